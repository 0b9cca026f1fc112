// A libcuda.so.1 that runs nothing: two devices, one primary context each, and the rules the real driver enforces.
#include <unistd.h>

#include "fake.h"

#define DEVICES 2
#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define CONTEXT_IS_DESTROYED 709
#define CAPTURE_UNSUPPORTED 900
#define ENTER(call)               \
  do {                            \
    int code = failure_of(#call); \
    if (code) return code;        \
  } while (0)

typedef struct {
  int device, number, life;
} Module;
typedef struct {
  Module* module;
  char name[256];
  int is_loaded, shared;
} Function;

static int contexts[DEVICES];  // a context is the address of its entry
static int lives[DEVICES];     // how often each was reset
static int capability[2] = {9, 0};
static int version = 13000, next_module, live_modules, slow_load;
static _Thread_local void* stack[16];
static _Thread_local int depth;

void fake_device(int major, int minor, int driver_version) {
  capability[0] = major;
  capability[1] = minor;
  version = driver_version;
}
int fake_live_modules(void) { return live_modules; }
int fake_context_depth(void) { return depth; }
void fake_make_current(int device) { stack[depth = 1] = &contexts[device]; }
void fake_reset(int device) { lives[device]++; }
void fake_slow_load(int microseconds) { slow_load = microseconds; }

static int context_of(void* context) { return (int)((int*)context - contexts); }

int cuInit(unsigned flags) {
  ENTER(cuInit);
  record("cuInit");
  return 0;
}
int cuDriverGetVersion(int* out) {
  ENTER(cuDriverGetVersion);
  *out = version;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  ENTER(cuDeviceGet);
  if (ordinal >= DEVICES) return 101;
  *device = ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int length, int device) {
  ENTER(cuDeviceGetName);
  snprintf(name, length, "Fake GPU MIG 1g.5gb %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  *value = attribute == 16   ? 10 + device
           : attribute == 75 ? capability[0]
           : attribute == 76 ? capability[1]
           : attribute == 97 ? 232448
                             : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  record("cuDevicePrimaryCtxRetain device=%d", device);
  *context = &contexts[device];
  return 0;
}
int cuCtxGetCurrent(void** context) {
  ENTER(cuCtxGetCurrent);
  *context = depth ? stack[depth] : NULL;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  ENTER(cuCtxPushCurrent);
  stack[++depth] = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = stack[depth--];
  ENTER(cuCtxPopCurrent);
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  int previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return 0;
}
int cuModuleLoadDataEx(Module** module, const void* image, unsigned count, int* options, void** values) {
  if (!depth) return INVALID_CONTEXT;
  if (capturing && capture_mode != 2) return CAPTURE_UNSUPPORTED;
  for (unsigned i = 0; i < count; i++) {
    if (options[i] == 5) strcpy(values[i], "ptxas says no");
  }
  ENTER(cuModuleLoadDataEx);
  if (slow_load) usleep(slow_load);
  *module = malloc(sizeof **module);
  (*module)->device = context_of(stack[depth]);
  (*module)->life = lives[(*module)->device];
  (*module)->number = __sync_fetch_and_add(&next_module, 1);
  __sync_fetch_and_add(&live_modules, 1);
  record("cuModuleLoadDataEx device=%d image=%.48s", (*module)->device, (const char*)image);
  return 0;
}
int cuModuleUnload(Module* module) {
  __sync_fetch_and_sub(&live_modules, 1);
  record("cuModuleUnload device=%d", module->device);
  return 0;
}
int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER(cuModuleGetFunction);
  *function = calloc(1, sizeof **function);
  (*function)->module = module;
  (*function)->shared = 48 * 1024;
  snprintf((*function)->name, sizeof(*function)->name, "%s", name);
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  ENTER(cuFuncGetAttribute);
  function->is_loaded = 1;
  *value = 1024;
  return 0;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
  ENTER(cuFuncSetAttribute);
  if (attribute != 8) return INVALID_VALUE;
  function->shared = value;
  record("cuFuncSetAttribute shared=%d", value);
  return 0;
}
int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
  char text[2048];
  ENTER(cuLaunchKernel);
  if (!depth || context_of(stack[depth]) != function->module->device) return INVALID_CONTEXT;
  if (lives[function->module->device] != function->module->life) return CONTEXT_IS_DESTROYED;
  if (capturing && !function->is_loaded) return CAPTURE_UNSUPPORTED;
  if ((int)shared > function->shared || extra || !grid_x || grid_x > 0x7fffffff) return INVALID_VALUE;
  record("cuLaunchKernel device=%d symbol=%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p arguments=%s",
         function->module->device, function->name, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
         hex_arguments(arguments, text));
  return 0;
}
int cuGetErrorName(int code, const char** text) {
  *text = code == 209   ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : code == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : code == 999 ? "CUDA_ERROR_UNKNOWN"
                        : NULL;
  return *text ? 0 : INVALID_VALUE;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 999 ? "unknown error in words" : code == 209 || code == 900 ? "words" : NULL;
  return *text ? 0 : INVALID_VALUE;
}
