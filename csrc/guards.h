// The guards of both operators, on plain descriptions of their tensors. The Python fake repeats them in the same order
// with the same texts (python/paged_prefill/_guards.py); tests hold the two together.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace paged_prefill {

enum Argument : int {
  q,
  unified_kv,
  kv_indices_prefix,
  kv_indptr_prefix,
  kv,
  kv_indices_extend,
  kv_indptr_extend,
  attn_sink,
  out,
  lse,
  num_tensors,
};

struct TensorView {
  bool present = false;
  bool strided = true;
  int32_t dtype = 0;  // torch's codes
  int32_t device_type = 0;
  int32_t device_index = -1;
  int64_t item_size = 0;
  int64_t rank = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // of a strided tensor
  char* data = nullptr;

  int64_t rows() const { return sizes[0]; }
  int64_t last_size() const { return sizes[rank - 1]; }
};

using TensorViews = std::array<TensorView, num_tensors>;

// torch's numbers, asked of torch once when the operators are registered.
struct TorchCodes {
  int32_t bf16, fp16, fp32, int32, int64, cpu, cuda, meta, xpu, mps, privateuse1;
};
const TorchCodes& torch_codes();

const char* argument_name(int argument);
inline constexpr int64_t head_dim_limit = 512;
// The most keys that every kernel can count for one token, whose list may be the whole of it.
inline constexpr int64_t list_length_limit = (int64_t{1} << 30) - 128;

void check_types(const TensorViews& views);    // devices and dtypes: the first four texts
void check_inputs(const TensorViews& views);   // needs sizes and strides
void check_outputs(const TensorViews& views);  // needs data pointers

}  // namespace paged_prefill
