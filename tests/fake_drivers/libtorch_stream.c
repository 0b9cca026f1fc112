// The one function of libtorch_cuda.so (libtorch_hip.so) that the extension looks up.
#include <stdint.h>

int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = (void*)(uintptr_t)(0x5000 + 0x100 * device);
  return 0;
}
