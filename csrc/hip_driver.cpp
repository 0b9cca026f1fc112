// libamdhip64 behind driver.h, with the few declarations of hip_runtime_api.h (ROCm 6 and later) that are used here.
#include <dlfcn.h>

#include <cstring>

#include "driver.h"
#include "messages.h"

namespace paged_prefill {
namespace {

using Result = int;
using Module = void*;
using Function = void*;

enum : int {
  attribute_processors = 63,
  attribute_shared_limit = 74,
  capture_relaxed = 2,
};

// hipDeviceProp_tR0600, of which only two strings are read; the spare bytes are for later, longer versions of it.
struct Properties {
  char name[256];
  char unread[1160 - 256];
  char architecture[256];
  char spare[4096];
};

#define HIP_CALLS(CALL)                                                                                           \
  CALL(hipInit, (unsigned flags))                                                                                 \
  CALL(hipDriverGetVersion, (int* version))                                                                       \
  CALL(hipGetDevicePropertiesR0600, (Properties * properties, int device))                                        \
  CALL(hipDeviceGetAttribute, (int* value, int attribute, int device))                                            \
  CALL(hipGetDevice, (int* device))                                                                               \
  CALL(hipSetDevice, (int device))                                                                                \
  CALL(hipThreadExchangeStreamCaptureMode, (int* mode))                                                           \
  CALL(hipModuleLoadData, (Module * module, const void* image))                                                   \
  CALL(hipModuleUnload, (Module module))                                                                          \
  CALL(hipModuleGetFunction, (Function * function, Module module, const char* name))                              \
  CALL(hipModuleLaunchKernel,                                                                                     \
       (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
        unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra))

struct Hip {
#define POINTER(name, parameters) Result(*name) parameters;
  HIP_CALLS(POINTER)
#undef POINTER
  const char* (*hipGetErrorName)(Result result);
  const char* (*hipGetErrorString)(Result result);
  int version = 0;
};

[[noreturn]] void fail_to_open(const std::string& problem) {
  fail(Message::no_driver, {{"problem", problem}, {"library", "libamdhip64.so"}, {"vendor", "AMD ROCm"}});
}

void* find(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) fail_to_open(std::string("libamdhip64.so does not export ") + name);
  return symbol;
}

// Two HIP runtimes in one process fail at the first launch, so the one torch has mapped is taken before any other.
void* open_library() {
  static const char* const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
  for (int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (const char* name : names) {
      if (void* library = dlopen(name, mode)) return library;
    }
  }
  const char* problem = dlerror();
  fail_to_open(problem ? problem : "libamdhip64.so cannot be opened");
}

void check(const Hip& hip, Result result, const char* call, const std::string& subject) {
  if (result == 0) return;
  const char* error = hip.hipGetErrorName(result);
  const char* words = hip.hipGetErrorString(result);
  bool image = result == 200 || result == 209 || result == 218;
  bool capture = result >= 900 && result <= 908;
  fail(image     ? Message::driver_image
       : capture ? Message::driver_capture
                 : Message::driver_call,
       {{"call", call},
        {"subject", subject},
        {"error", error ? error : "error " + std::to_string(result)},
        {"words", words ? words : "no description"},
        {"driver", "HIP " + std::to_string(hip.version)},
        {"log", ""}});
}

const Hip& hip_driver() {
  static Hip hip;
  static bool opened = false;
  if (opened) return hip;
  void* library = open_library();
#define RESOLVE(name, parameters) hip.name = reinterpret_cast<Result(*) parameters>(find(library, #name));
  HIP_CALLS(RESOLVE)
#undef RESOLVE
  hip.hipGetErrorName = reinterpret_cast<const char* (*)(Result)>(find(library, "hipGetErrorName"));
  hip.hipGetErrorString = reinterpret_cast<const char* (*)(Result)>(find(library, "hipGetErrorString"));
  check(hip, hip.hipInit(0), "hipInit", "the HIP runtime");
  check(hip, hip.hipDriverGetVersion(&hip.version), "hipDriverGetVersion", "the HIP runtime");
  opened = true;
  return hip;
}

class CurrentDevice {
 public:
  CurrentDevice(const Hip& hip, int ordinal, const std::string& subject) : hip_(hip) {
    check(hip, hip.hipGetDevice(&previous_), "hipGetDevice", subject);
    if (previous_ == ordinal) return;
    check(hip, hip.hipSetDevice(ordinal), "hipSetDevice", subject);
    moved_ = true;
  }
  ~CurrentDevice() {
    if (moved_) hip_.hipSetDevice(previous_);
  }
  // The checked form of the destructor, which tries again if this fails.
  void restore(const std::string& subject) {
    if (!moved_) return;
    check(hip_, hip_.hipSetDevice(previous_), "hipSetDevice", subject);
    moved_ = false;
  }

 private:
  const Hip& hip_;
  int previous_ = 0;
  bool moved_ = false;
};

// Loading allocates, which a stream capture forbids in every mode but the relaxed one.
class RelaxedCapture {
 public:
  RelaxedCapture(const Hip& hip, const std::string& subject) : hip_(hip) {
    check(hip, hip.hipThreadExchangeStreamCaptureMode(&previous_), "hipThreadExchangeStreamCaptureMode", subject);
    changed_ = true;
  }
  ~RelaxedCapture() {
    if (changed_) hip_.hipThreadExchangeStreamCaptureMode(&previous_);
  }
  // The checked form of the destructor, which tries again if this fails.
  void restore(const std::string& subject) {
    int mode = previous_;
    check(hip_, hip_.hipThreadExchangeStreamCaptureMode(&mode), "hipThreadExchangeStreamCaptureMode", subject);
    changed_ = false;
  }

 private:
  const Hip& hip_;
  int previous_ = capture_relaxed;
  bool changed_ = false;
};

class HipDevice final : public DriverDevice {
 public:
  HipDevice(const Hip& hip, int ordinal) : hip_(hip), ordinal_(ordinal) {
    std::string subject = "device " + std::to_string(ordinal);
    // The unsuffixed export of this call fills an older layout.
    auto properties = std::make_unique<Properties>();
    std::memset(properties.get(), 0, sizeof(Properties));
    check(hip, hip.hipGetDevicePropertiesR0600(properties.get(), ordinal), "hipGetDevicePropertiesR0600", subject);
    facts.name = properties->name;
    facts.architecture = properties->architecture;
    facts.driver_version = hip.version;
    check(hip, hip.hipDeviceGetAttribute(&facts.processors, attribute_processors, ordinal), "hipDeviceGetAttribute",
          subject);
    check(hip, hip.hipDeviceGetAttribute(&facts.shared_limit, attribute_shared_limit, ordinal), "hipDeviceGetAttribute",
          subject);
  }

  // hipFuncSetAttribute takes a host function, not a module's: all LDS of a module's kernel is asked for at the launch.
  void* load(const Image& image, const std::string& bytes) override {
    CurrentDevice current(hip_, ordinal_, image.id);
    RelaxedCapture relaxed(hip_, image.id);
    Module module = nullptr;
    check(hip_, hip_.hipModuleLoadData(&module, bytes.data()), "hipModuleLoadData", image.id);
    try {
      Function function = nullptr;
      check(hip_, hip_.hipModuleGetFunction(&function, module, image.symbol.c_str()), "hipModuleGetFunction", image.id);
      relaxed.restore(image.id);
      current.restore(image.id);
      return function;
    } catch (...) {
      hip_.hipModuleUnload(module);
      throw;
    }
  }

  void launch(void* function, const Image& image, unsigned blocks, void* stream, void** arguments) override {
    CurrentDevice current(hip_, ordinal_, image.id);
    check(hip_,
          hip_.hipModuleLaunchKernel(function, blocks, 1, 1, image.threads, 1, 1, image.shared, stream, arguments,
                                     nullptr),
          "hipModuleLaunchKernel", image.id);
    current.restore(image.id);
  }

  // HIP counts a grid in threads, below 2^32 of them.
  int64_t max_blocks(unsigned threads) const override { return UINT32_MAX / threads; }

 private:
  const Hip& hip_;
  int ordinal_;
};

}  // namespace

std::unique_ptr<DriverDevice> open_hip_device(int ordinal) {
  return std::make_unique<HipDevice>(hip_driver(), ordinal);
}

}  // namespace paged_prefill
