// From a checked call to a launch: which image, its arguments by name, its grid.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace paged_prefill {

// Every argument a kernel can ask for, by the name in its signature. An image's manifest entry lists the ones it takes,
// in its own order.
#define KERNEL_ARGUMENTS(ARGUMENT)                    \
  ARGUMENT(const void*, "ptr", q_ptr)                 \
  ARGUMENT(const void*, "ptr", unified_kv_ptr)        \
  ARGUMENT(const void*, "ptr", kv_indices_prefix_ptr) \
  ARGUMENT(const void*, "ptr", kv_indptr_prefix_ptr)  \
  ARGUMENT(const void*, "ptr", kv_ptr)                \
  ARGUMENT(const void*, "ptr", kv_indices_extend_ptr) \
  ARGUMENT(const void*, "ptr", kv_indptr_extend_ptr)  \
  ARGUMENT(const void*, "ptr", attn_sink_ptr)         \
  ARGUMENT(void*, "ptr", out_ptr)                     \
  ARGUMENT(void*, "ptr", lse_ptr)                     \
  ARGUMENT(int64_t, "i64", q_stride_t)                \
  ARGUMENT(int64_t, "i64", q_stride_h)                \
  ARGUMENT(int64_t, "i64", unified_kv_stride_n)       \
  ARGUMENT(int64_t, "i64", kv_stride_n)               \
  ARGUMENT(int32_t, "i32", num_tokens)                \
  ARGUMENT(int32_t, "i32", num_heads)                 \
  ARGUMENT(int32_t, "i32", head_dim)                  \
  ARGUMENT(int32_t, "i32", unified_kv_rows)           \
  ARGUMENT(int32_t, "i32", kv_rows)                   \
  ARGUMENT(int32_t, "i32", kv_indices_prefix_len)     \
  ARGUMENT(int32_t, "i32", kv_indices_extend_len)     \
  ARGUMENT(int32_t, "i32", has_sink)                  \
  ARGUMENT(int32_t, "i32", has_lse)                   \
  ARGUMENT(int32_t, "i32", num_tiles)                 \
  ARGUMENT(int32_t, "i32", first_tile)                \
  ARGUMENT(float, "fp32", softmax_scale_log2)         \
  ARGUMENT(float, "fp32", logit_shift_log2)

struct KernelArguments {
#define FIELD(type, tag, name) type name;
  KERNEL_ARGUMENTS(FIELD)
#undef FIELD
};

// A call whose guards have passed.
struct Call {
  KernelArguments arguments{};
  int64_t num_tokens = 0;
  const char* dtype = "";  // "bf16" or "fp16"
  bool aligned = false;    // every base and stride the `aligned` images assume is a multiple of 16 bytes
};

struct Variant {
  Image image;
  std::string dtype;
  int head_tile = 0;
  int head_dim = 0;  // 0: any
  int min_heads = 0;
  int max_heads = INT32_MAX;
  bool aligned = false;                  // needs an aligned call
  bool persistent = false;               // its blocks stride over the tiles
  std::vector<size_t> offsets;           // of its arguments in KernelArguments, in its own order
  std::atomic<void*> function{nullptr};  // null until it is loaded
  std::mutex load_lock;                  // held while the image is read and loaded

  void add_argument(const std::string& name, const std::string& type);
  bool accepts(const Call& call) const;
};

void launch(int ordinal, Call& call, void* stream);

// What the driver says of a device; opens it.
DeviceFacts device_facts(int ordinal);
// Loads every image of a device now.
void preload(int ordinal);
std::vector<std::string> loaded(int ordinal);
std::string last_launch(int ordinal);  // empty before the first
// Forgets a device's images, so that its next call describes it again. For tests: what is loaded stays loaded.
void reset(int ordinal);

inline constexpr int max_devices = 128;
inline constexpr size_t max_arguments = 32;

// The Python side, registered by the package when it is imported.
namespace python {

bool uses_hip();
std::vector<std::unique_ptr<Variant>> describe(int ordinal, const DeviceFacts& facts);
std::string read_image(int ordinal, const std::string& id);
void report_load(int ordinal, const std::string& id, double milliseconds);

// Releases the GIL for a scope, whether or not this thread holds it. The launcher's lock is only ever waited for inside
// such a scope: a thread that waits for it with the GIL would stop the one that has it and needs the GIL.
class GilReleased {
 public:
  GilReleased();
  ~GilReleased();

 private:
  int held_;
  void* state_;
};

}  // namespace python
}  // namespace paged_prefill
