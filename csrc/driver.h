// What the launcher asks of a GPU driver. Both drivers are opened with dlopen at a device's first use, so that one
// extension serves CUDA, ROCm and CPU builds of torch and importing it touches no driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace paged_prefill {

struct DeviceFacts {
  std::string architecture;  // "sm_90", or "gfx942:sramecc+:xnack-" as the driver spells it
  std::string name;          // for messages only, never parsed
  int driver_version = 0;    // 12080 for CUDA 12.8; the HIP runtime's own number
  int shared_limit = 0;      // bytes of shared memory a block can opt in to
  int processors = 0;        // multiprocessors or compute units: the size of a persistent grid
};

// What a driver needs to know of an image beside its bytes.
struct Image {
  std::string id;      // variant id, for messages
  std::string symbol;  // the kernel's name in the image
  unsigned shared = 0;
  unsigned threads = 0;
};

// One opened device. `load` and `launch` leave the calling thread's current device as they found it; every failing
// driver call throws with the call's name, the driver's words and the image's id.
class DriverDevice {
 public:
  virtual ~DriverDevice() = default;
  // Loads an image and returns its kernel, ready to launch even inside a stream capture; on failure nothing stays
  // loaded.
  virtual void* load(const Image& image, const std::string& bytes) = 0;
  virtual void launch(void* function, const Image& image, unsigned blocks, void* stream, void** arguments) = 0;
  virtual int64_t max_blocks(unsigned threads) const = 0;
  // Whether a call has failed because the context is gone, and all that was loaded with it: open the device anew.
  virtual bool lost() const { return false; }

  DeviceFacts facts;
};

std::unique_ptr<DriverDevice> open_cuda_device(int ordinal);
std::unique_ptr<DriverDevice> open_hip_device(int ordinal);

}  // namespace paged_prefill
