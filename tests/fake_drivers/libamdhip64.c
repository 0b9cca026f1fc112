// A libamdhip64 that runs nothing: two devices of gfx942, and the rules of the real one that the launcher must keep.
#include "fake.h"

#define DEVICES 2
#define ENTER(call)               \
  do {                            \
    int code = failure_of(#call); \
    if (code) return code;        \
  } while (0)

typedef struct {
  int device;
} Module;
typedef struct {
  Module* module;
  char name[256];
} Function;

static _Thread_local int current;
static int live_modules;

int fake_live_modules(void) { return live_modules; }
int fake_current_device(void) { return current; }
void fake_make_current(int device) { current = device; }

int hipInit(unsigned flags) {
  ENTER(hipInit);
  record("hipInit");
  return 0;
}
int hipDriverGetVersion(int* version) {
  ENTER(hipDriverGetVersion);
  *version = 60443482;
  return 0;
}
int hipGetDevicePropertiesR0600(char* properties, int device) {
  ENTER(hipGetDevicePropertiesR0600);
  memset(properties, 0, 1472);
  strcpy(properties, "Fake Instinct");
  strcpy(properties + 1160, "gfx942:sramecc+:xnack-");
  return 0;
}
int hipDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER(hipDeviceGetAttribute);
  *value = attribute == 63 ? 304 : attribute == 74 ? 65536 : 0;
  return 0;
}
int hipGetDevice(int* device) {
  ENTER(hipGetDevice);
  *device = current;
  return 0;
}
int hipSetDevice(int device) {
  ENTER(hipSetDevice);
  if (device >= DEVICES) return 101;
  current = device;
  return 0;
}
int hipThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(hipThreadExchangeStreamCaptureMode);
  int previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return 0;
}
int hipModuleLoadData(Module** module, const void* image) {
  if (capturing && capture_mode != 2) return 900;
  ENTER(hipModuleLoadData);
  *module = malloc(sizeof **module);
  (*module)->device = current;
  __sync_fetch_and_add(&live_modules, 1);
  record("hipModuleLoadData device=%d image=%.48s", current, (const char*)image);
  return 0;
}
int hipModuleUnload(Module* module) {
  __sync_fetch_and_sub(&live_modules, 1);
  record("hipModuleUnload device=%d", module->device);
  return 0;
}
int hipModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER(hipModuleGetFunction);
  *function = calloc(1, sizeof **function);
  (*function)->module = module;
  snprintf((*function)->name, sizeof(*function)->name, "%s", name);
  return 0;
}
// Takes a host function; with a module's, the real one reads memory that is not its own.
int hipFuncSetAttribute(const void* function, int attribute, int value) { abort(); }
int hipModuleLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** arguments,
                          void** extra) {
  char text[2048];
  ENTER(hipModuleLaunchKernel);
  if (current != function->module->device) return 400;
  if ((uint64_t)grid_x * block_x > UINT32_MAX || !grid_x || extra) return 1;
  record("hipModuleLaunchKernel device=%d symbol=%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p arguments=%s",
         current, function->name, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream,
         hex_arguments(arguments, text));
  return 0;
}
const char* hipGetErrorName(int code) { return code == 999 ? "hipErrorUnknown" : "hipErrorOther"; }
const char* hipGetErrorString(int code) { return code == 999 ? "unknown error in words" : "words"; }
