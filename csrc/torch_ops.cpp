// The two operators, and all that is known here of torch: its stable ABI, so that one binary serves every later torch.
//
// The guards are registered for every backend and the launch for CUDA (which torch's ROCm builds also call CUDA) on
// top, so that a CPU, sparse or quantized tensor meets the public texts instead of a missing-kernel error. The
// functional operator's CUDA kernel is in Python (_attention.py): a failed allocation from here would lose torch's own
// OutOfMemoryError.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#include "guards.h"
#include "launcher.h"
#include "messages.h"

namespace paged_prefill {

const TorchCodes& torch_codes() {
  static const TorchCodes codes = {aoti_torch_dtype_bfloat16(),
                                   aoti_torch_dtype_float16(),
                                   aoti_torch_dtype_float32(),
                                   aoti_torch_dtype_int32(),
                                   aoti_torch_dtype_int64(),
                                   aoti_torch_device_type_cpu(),
                                   aoti_torch_device_type_cuda(),
                                   aoti_torch_device_type_meta(),
                                   aoti_torch_device_type_xpu(),
                                   aoti_torch_device_type_mps(),
                                   aoti_torch_device_type_privateuse1()};
  return codes;
}

namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// The tensors of one call: their handles, owned, and what the guards and the launch read of them.
class Tensors {
 public:
  // Takes the handles over from the dispatcher's stack: seven inputs and the sink first, out and lse at `outputs`.
  Tensors(StableIValue* stack, int outputs) {
    for (int i = q; i < attn_sink; i++) handles_[i] = to<AtenTensorHandle>(stack[i]);
    handles_[attn_sink] = take_optional(stack[attn_sink]);
    if (outputs) {
      handles_[out] = to<AtenTensorHandle>(stack[outputs]);
      handles_[lse] = take_optional(stack[outputs + 1]);
    }
  }
  Tensors(const Tensors&) = delete;
  ~Tensors() {
    for (AtenTensorHandle handle : handles_) {
      if (handle) aoti_torch_delete_tensor_object(handle);
    }
  }

  // In the order of the guards: what they may read of a tensor depends on those before.
  void check_inputs() {
    for (int i = 0; i < num_tensors; i++) {
      AtenTensorHandle handle = handles_[i];
      TensorView& view = views[i];
      view.present = handle != nullptr;
      if (!handle) continue;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &view.dtype));
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &view.device_type));
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
    }
    check_types(views);
    for (int i = 0; i < num_tensors; i++) {
      AtenTensorHandle handle = handles_[i];
      TensorView& view = views[i];
      if (!handle) continue;
      int64_t* sizes = nullptr;
      int64_t* strides = nullptr;
      int32_t layout = 0;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
      view.strided = layout == aoti_torch_layout_strided();
      // A nested tensor is called strided but has no sizes to give.
      if (aoti_torch_get_dim(handle, &view.rank) || aoti_torch_get_sizes(handle, &sizes) ||
          (view.strided && aoti_torch_get_strides(handle, &strides))) {
        fail(Message::layout, {{"name", argument_name(i)}});
      }
      view.sizes = sizes;
      view.strides = strides;
    }
    paged_prefill::check_inputs(views);
  }

  void check_outputs() {
    for (int i = 0; i < num_tensors; i++) {
      if (!handles_[i]) continue;
      read_data(i);
      views[i].item_size = static_cast<int64_t>(aoti_torch_dtype_element_size(views[i].dtype));
    }
    paged_prefill::check_outputs(views);
  }

  // Gives the kernel what it reads: int32 contiguous lists, an fp32 contiguous sink, unit-stride rows of q. The public
  // Python function has done the same before, where torch's allocation errors keep their kind; this is for direct
  // calls.
  void convert() {
    for (int i : {kv_indices_prefix, kv_indptr_prefix, kv_indices_extend, kv_indptr_extend}) {
      if (views[i].dtype == torch_codes().int64) {
        replace(i, narrow(handles_[i]));
      }
      if (!unit_stride(i)) replace(i, contiguous(handles_[i]));
    }
    if (handles_[attn_sink] && views[attn_sink].dtype != torch_codes().fp32) {
      Tensor sink = borrow(handles_[attn_sink]);
      replace(attn_sink, torch::stable::to(sink, torch::headeronly::ScalarType::Float));
    }
    if (handles_[attn_sink] && !unit_stride(attn_sink)) replace(attn_sink, contiguous(handles_[attn_sink]));
    if (!unit_stride(q)) replace(q, contiguous(handles_[q]));
  }

  TensorViews views;

 private:
  static AtenTensorHandle take_optional(StableIValue value) {
    return to<std::optional<AtenTensorHandle>>(value).value_or(nullptr);
  }

  static Tensor borrow(AtenTensorHandle handle) {
    AtenTensorHandle copy;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    return Tensor(copy);
  }

  static Tensor contiguous(AtenTensorHandle handle) { return torch::stable::contiguous(borrow(handle)); }

  // To int32 with every value beyond its range still out of range: negative ones stay holes, large ones too.
  static Tensor narrow(AtenTensorHandle handle) {
    Tensor result = borrow(handle);
    for (auto [operation, bound] :
         {std::pair("aten::minimum", int64_t{INT32_MAX}), std::pair("aten::maximum", int64_t{-1})}) {
      AtenTensorHandle limit;
      TORCH_ERROR_CODE_CHECK(aoti_torch_scalar_to_tensor_int64(bound, &limit));
      StableIValue stack[] = {from(result), from(Tensor(limit))};
      TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(operation, "", stack, TORCH_ABI_VERSION));
      result = to<Tensor>(stack[0]);
    }
    return torch::stable::to(result, torch::headeronly::ScalarType::Int);
  }

  bool unit_stride(int i) const { return views[i].last_size() <= 1 || views[i].strides[views[i].rank - 1] == 1; }

  void replace(int i, const Tensor& tensor) {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
    aoti_torch_delete_tensor_object(handles_[i]);
    handles_[i] = handle;
    int64_t* sizes;
    int64_t* strides;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &views[i].dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
    views[i].sizes = sizes;
    views[i].strides = strides;
    read_data(i);
  }

  void read_data(int i) {
    void* data = nullptr;
    if (aoti_torch_get_data_ptr(handles_[i], &data)) fail(Message::layout, {{"name", argument_name(i)}});
    views[i].data = static_cast<char*>(data);
  }

  std::array<AtenTensorHandle, num_tensors> handles_{};
};

// Of the device of the tensors, whatever device is current. The library is loaded RTLD_LOCAL, so only its own handle
// finds the symbol.
void* current_stream(int ordinal) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static std::atomic<Getter> known{nullptr};
  Getter getter = known.load(std::memory_order_relaxed);
  const char* name = python::uses_hip() ? "libtorch_hip.so" : "libtorch_cuda.so";
  const char* vendor = python::uses_hip() ? "ROCm" : "CUDA";
  if (!getter) {
    void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    getter = library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
    if (!getter) {
      const char* problem = dlerror();
      fail(Message::no_stream, {{"problem", problem ? problem : std::string(name) + " is not loaded"},
                                {"library", name},
                                {"vendor", vendor}});
    }
    known.store(getter, std::memory_order_relaxed);
  }
  void* stream = nullptr;
  if (getter(ordinal, &stream)) {
    fail(Message::no_stream, {{"problem", "torch reports an error"}, {"library", name}, {"vendor", vendor}});
  }
  return stream;
}

// Whether a tensor meets what the `aligned` images assume: its base, and each stride that is ever used, is a multiple
// of 16 bytes (8 elements).
bool is_aligned(const TensorView& view) {
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) return false;
  for (int64_t i = 0; i + 1 < view.rank; i++) {
    if (view.sizes[i] > 1 && view.strides[i] % 8 != 0) return false;
  }
  return true;
}

// A stride that is never used is passed as 0, which no alignment assumption can be wrong about.
int64_t used_stride(const TensorView& view, int dimension) {
  return view.sizes[dimension] > 1 ? view.strides[dimension] : 0;
}

int32_t clamped(int64_t rows) { return static_cast<int32_t>(std::min<int64_t>(rows, INT32_MAX)); }

void guards_only(StableIValue* stack, int outputs) {
  Tensors tensors(stack, outputs);
  tensors.check_inputs();
  fail(Message::no_kernel);
}

void guard_functional(StableIValue* stack, uint64_t, uint64_t) { guards_only(stack, 0); }
void guard_out(StableIValue* stack, uint64_t, uint64_t) { guards_only(stack, 10); }

void launch_out(StableIValue* stack, uint64_t, uint64_t) {
  Tensors tensors(stack, 10);
  double softmax_scale = to<double>(stack[8]);
  double logit_shift = to<double>(stack[9]);
  const TensorViews& views = tensors.views;
  tensors.check_inputs();
  tensors.check_outputs();
  if (views[q].rows() == 0) return;
  tensors.convert();

  constexpr double log2_e = 1.4426950408889634;
  Call call;
  KernelArguments& arguments = call.arguments;
  arguments.q_ptr = views[q].data;
  arguments.unified_kv_ptr = views[unified_kv].data;
  arguments.kv_indices_prefix_ptr = views[kv_indices_prefix].data;
  arguments.kv_indptr_prefix_ptr = views[kv_indptr_prefix].data;
  arguments.kv_ptr = views[kv].data;
  arguments.kv_indices_extend_ptr = views[kv_indices_extend].data;
  arguments.kv_indptr_extend_ptr = views[kv_indptr_extend].data;
  arguments.attn_sink_ptr = views[attn_sink].data;
  arguments.out_ptr = views[out].data;
  arguments.lse_ptr = views[lse].data;
  arguments.q_stride_t = used_stride(views[q], 0);
  arguments.q_stride_h = used_stride(views[q], 1);
  arguments.unified_kv_stride_n = used_stride(views[unified_kv], 0);
  arguments.kv_stride_n = used_stride(views[kv], 0);
  arguments.num_heads = static_cast<int32_t>(views[q].sizes[1]);
  arguments.head_dim = static_cast<int32_t>(views[q].sizes[2]);
  arguments.unified_kv_rows = clamped(views[unified_kv].rows());
  arguments.kv_rows = clamped(views[kv].rows());
  arguments.kv_indices_prefix_len = clamped(views[kv_indices_prefix].rows());
  arguments.kv_indices_extend_len = clamped(views[kv_indices_extend].rows());
  arguments.has_sink = views[attn_sink].present;
  arguments.has_lse = views[lse].present;
  arguments.softmax_scale_log2 = static_cast<float>(softmax_scale * log2_e);
  arguments.logit_shift_log2 = static_cast<float>(logit_shift * log2_e);
  call.num_tokens = views[q].rows();
  call.dtype = views[q].dtype == torch_codes().bf16 ? "bf16" : "fp16";
  call.aligned =
      is_aligned(views[q]) && is_aligned(views[unified_kv]) && is_aligned(views[kv]) && is_aligned(views[out]);
  int ordinal = views[q].device_index;
  launch(ordinal, call, current_stream(ordinal));
}

}  // namespace
}  // namespace paged_prefill

#define PAGED_PREFILL_INPUTS                                                                    \
  "Tensor q, Tensor unified_kv, Tensor kv_indices_prefix, Tensor kv_indptr_prefix, Tensor kv, " \
  "Tensor kv_indices_extend, Tensor kv_indptr_extend, Tensor? attn_sink, float softmax_scale, "

STABLE_TORCH_LIBRARY(paged_prefill, library) {
  library.def("sparse_attn_v4_paged_prefill(" PAGED_PREFILL_INPUTS
              "bool return_lse=False, float replicated_logit_shift=0.0) -> (Tensor, Tensor)");
  library.def("sparse_attn_v4_paged_prefill_out(" PAGED_PREFILL_INPUTS
              "float replicated_logit_shift=0.0, *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(paged_prefill, CompositeExplicitAutograd, library) {
  library.impl("sparse_attn_v4_paged_prefill", paged_prefill::guard_functional);
  library.impl("sparse_attn_v4_paged_prefill_out", paged_prefill::guard_out);
}

STABLE_TORCH_LIBRARY_IMPL(paged_prefill, CUDA, library) {
  library.impl("sparse_attn_v4_paged_prefill_out", paged_prefill::launch_out);
}
