// libcuda behind driver.h. The declarations are the few of cuda.h that are used here: no CUDA toolkit is needed to
// build.
#include <dlfcn.h>

#include <atomic>

#include "driver.h"
#include "messages.h"

namespace paged_prefill {
namespace {

using Result = int;
using Device = int;
using Context = void*;
using Module = void*;
using Function = void*;

enum : int {
  attribute_processors = 16,
  attribute_capability_major = 75,
  attribute_capability_minor = 76,
  attribute_shared_optin = 97,
  function_max_threads = 0,
  function_max_dynamic_shared = 8,
  jit_error_log = 5,
  jit_error_log_size = 6,
  capture_relaxed = 2,
};
constexpr unsigned shared_without_optin = 48 * 1024;

#define CUDA_CALLS(CALL)                                                                                          \
  CALL(cuInit, (unsigned flags))                                                                                  \
  CALL(cuDriverGetVersion, (int* version))                                                                        \
  CALL(cuDeviceGet, (Device * device, int ordinal))                                                               \
  CALL(cuDeviceGetName, (char* name, int length, Device device))                                                  \
  CALL(cuDeviceGetAttribute, (int* value, int attribute, Device device))                                          \
  CALL(cuDevicePrimaryCtxRetain, (Context * context, Device device))                                              \
  CALL(cuCtxGetCurrent, (Context * context))                                                                      \
  CALL(cuCtxPushCurrent_v2, (Context context))                                                                    \
  CALL(cuCtxPopCurrent_v2, (Context * context))                                                                   \
  CALL(cuThreadExchangeStreamCaptureMode, (int* mode))                                                            \
  CALL(cuModuleLoadDataEx, (Module * module, const void* image, unsigned count, int* options, void** values))     \
  CALL(cuModuleUnload, (Module module))                                                                           \
  CALL(cuModuleGetFunction, (Function * function, Module module, const char* name))                               \
  CALL(cuFuncGetAttribute, (int* value, int attribute, Function function))                                        \
  CALL(cuFuncSetAttribute, (Function function, int attribute, int value))                                         \
  CALL(cuLaunchKernel,                                                                                            \
       (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
        unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra))                         \
  CALL(cuGetErrorName, (Result result, const char** text))                                                        \
  CALL(cuGetErrorString, (Result result, const char** text))

struct Cuda {
#define POINTER(name, parameters) Result(*name) parameters;
  CUDA_CALLS(POINTER)
#undef POINTER
  int version = 0;
};

void* find(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) {
    fail(Message::no_driver, {{"problem", std::string("libcuda.so.1 does not export ") + name},
                              {"library", "libcuda.so.1"},
                              {"vendor", "NVIDIA"}});
  }
  return symbol;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Invalid context, invalid handle, context destroyed: what a reset of the primary context leaves behind.
bool is_lost(Result result) { return result == 201 || result == 400 || result == 709; }

thread_local Result last_failure = 0;  // of `check`

void check(const Cuda& cuda, Result result, const char* call, const std::string& subject, const char* log = "") {
  if (result == 0) return;
  last_failure = result;
  const char* error = nullptr;
  const char* words = nullptr;
  cuda.cuGetErrorName(result, &error);
  cuda.cuGetErrorString(result, &words);
  bool image = result == 200 || result == 209 || (result >= 218 && result <= 223);  // invalid, foreign or too new
  bool capture = result >= 900 && result <= 908;
  fail(image             ? Message::driver_image
       : capture         ? Message::driver_capture
       : is_lost(result) ? Message::driver_lost
                         : Message::driver_call,
       {{"call", call},
        {"subject", subject},
        {"error", error ? error : "error " + std::to_string(result)},
        {"words", words ? words : "no description"},
        {"driver", "CUDA " + version_text(cuda.version)},
        {"log", *log ? std::string("; its compiler says: ") + log : ""}});
}

// Opened once, under the launcher's lock; a failed opening is tried again by the next call.
const Cuda& cuda_driver() {
  static Cuda cuda;
  static bool opened = false;
  if (opened) return cuda;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* problem = dlerror();
    fail(Message::no_driver, {{"problem", problem ? problem : "libcuda.so.1 cannot be opened"},
                              {"library", "libcuda.so.1"},
                              {"vendor", "NVIDIA"}});
  }
#define RESOLVE(name, parameters) cuda.name = reinterpret_cast<Result(*) parameters>(find(library, #name));
  CUDA_CALLS(RESOLVE)
#undef RESOLVE
  check(cuda, cuda.cuInit(0), "cuInit", "the CUDA driver");
  check(cuda, cuda.cuDriverGetVersion(&cuda.version), "cuDriverGetVersion", "the CUDA driver");
  opened = true;
  return cuda;
}

// Makes a context current for a scope. Retaining a primary context does not make it current, and the calling thread
// may have none yet, or another device's.
class CurrentContext {
 public:
  CurrentContext(const Cuda& cuda, Context context, const std::string& subject) : cuda_(cuda) {
    Context current = nullptr;
    check(cuda, cuda.cuCtxGetCurrent(&current), "cuCtxGetCurrent", subject);
    if (current == context) return;
    check(cuda, cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent", subject);
    pushed_ = true;
  }
  ~CurrentContext() {
    Context popped;
    if (pushed_) cuda_.cuCtxPopCurrent_v2(&popped);
  }
  // The checked form of the destructor.
  void restore(const std::string& subject) {
    if (!pushed_) return;
    pushed_ = false;
    Context popped;
    check(cuda_, cuda_.cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent", subject);
  }

 private:
  const Cuda& cuda_;
  bool pushed_ = false;
};

// Loading allocates, which another thread's or this thread's stream capture forbids in every mode but the relaxed one.
class RelaxedCapture {
 public:
  RelaxedCapture(const Cuda& cuda, const std::string& subject) : cuda_(cuda) {
    check(cuda, cuda.cuThreadExchangeStreamCaptureMode(&previous_), "cuThreadExchangeStreamCaptureMode", subject);
    changed_ = true;
  }
  ~RelaxedCapture() {
    if (changed_) cuda_.cuThreadExchangeStreamCaptureMode(&previous_);
  }
  // The checked form of the destructor, which tries again if this fails.
  void restore(const std::string& subject) {
    int mode = previous_;
    check(cuda_, cuda_.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode", subject);
    changed_ = false;
  }

 private:
  const Cuda& cuda_;
  int previous_ = capture_relaxed;
  bool changed_ = false;
};

class CudaDevice final : public DriverDevice {
 public:
  CudaDevice(const Cuda& cuda, int ordinal) : cuda_(cuda) {
    std::string subject = "device " + std::to_string(ordinal);
    check(cuda, cuda.cuDeviceGet(&device_, ordinal), "cuDeviceGet", subject);
    char name[256] = {};
    check(cuda, cuda.cuDeviceGetName(name, sizeof name - 1, device_), "cuDeviceGetName", subject);
    facts.name = name;
    facts.driver_version = cuda.version;
    facts.architecture = "sm_" + std::to_string(attribute(attribute_capability_major, subject)) +
                         std::to_string(attribute(attribute_capability_minor, subject));
    facts.shared_limit = attribute(attribute_shared_optin, subject);
    facts.processors = attribute(attribute_processors, subject);
    // Last, since it is the only call here that holds something; it is kept as long as the process, like torch's own.
    check(cuda, cuda.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain", subject);
  }

  void* load(const Image& image, const std::string& bytes) override {
    return watched([&] { return load_in_context(image, bytes); });
  }

  void launch(void* function, const Image& image, unsigned blocks, void* stream, void** arguments) override {
    watched([&] {
      CurrentContext current(cuda_, context_, image.id);
      check(cuda_,
            cuda_.cuLaunchKernel(function, blocks, 1, 1, image.threads, 1, 1, image.shared, stream, arguments, nullptr),
            "cuLaunchKernel", image.id);
      current.restore(image.id);
    });
  }

  bool lost() const override { return lost_; }

  int64_t max_blocks(unsigned) const override { return INT32_MAX; }

 private:
  // Notes whether what fails in `body` fails for want of its context.
  template <typename Body>
  auto watched(Body body) -> decltype(body()) {
    last_failure = 0;
    try {
      return body();
    } catch (...) {
      if (is_lost(last_failure)) lost_ = true;
      throw;
    }
  }

  void* load_in_context(const Image& image, const std::string& bytes) {
    CurrentContext current(cuda_, context_, image.id);
    RelaxedCapture relaxed(cuda_, image.id);
    char log[4096] = {};
    int options[] = {jit_error_log, jit_error_log_size};
    void* values[] = {log, reinterpret_cast<void*>(sizeof log - 1)};
    Module module = nullptr;
    check(cuda_, cuda_.cuModuleLoadDataEx(&module, bytes.c_str(), 2, options, values), "cuModuleLoadDataEx", image.id,
          log);
    try {
      Function function = nullptr;
      check(cuda_, cuda_.cuModuleGetFunction(&function, module, image.symbol.c_str()), "cuModuleGetFunction", image.id);
      if (image.shared > shared_without_optin) {
        check(cuda_, cuda_.cuFuncSetAttribute(function, function_max_dynamic_shared, static_cast<int>(image.shared)),
              "cuFuncSetAttribute", image.id);
      }
      // With lazy loading the code is not on the device until the function is asked about; a capture must not be
      // the first to do so.
      int threads = 0;
      check(cuda_, cuda_.cuFuncGetAttribute(&threads, function_max_threads, function), "cuFuncGetAttribute", image.id);
      relaxed.restore(image.id);
      current.restore(image.id);
      return function;
    } catch (...) {
      cuda_.cuModuleUnload(module);
      throw;
    }
  }

  int attribute(int which, const std::string& subject) {
    int value = 0;
    check(cuda_, cuda_.cuDeviceGetAttribute(&value, which, device_), "cuDeviceGetAttribute", subject);
    return value;
  }

  const Cuda& cuda_;
  Device device_ = 0;
  Context context_ = nullptr;
  std::atomic<bool> lost_{false};
};

}  // namespace

std::unique_ptr<DriverDevice> open_cuda_device(int ordinal) {
  return std::make_unique<CudaDevice>(cuda_driver(), ordinal);
}

}  // namespace paged_prefill
