#include "guards.h"

#include "messages.h"

namespace paged_prefill {
namespace {

constexpr const char* names[] = {"q",
                                 "unified_kv",
                                 "kv_indices_prefix",
                                 "kv_indptr_prefix",
                                 "kv",
                                 "kv_indices_extend",
                                 "kv_indptr_extend",
                                 "attn_sink",
                                 "out",
                                 "lse"};
constexpr int ranks[] = {3, 2, 1, 1, 2, 1, 1, 1, 3, 2};
constexpr const char* shapes[] = {"[T, H, D]",    "[pages, D]", "[nnz_prefix]", "[T + 1]",   "[tokens, D]",
                                  "[nnz_extend]", "[T + 1]",    "[H]",          "[T, H, D]", "[T, H]"};

// By torch's dtype code, which is append-only.
constexpr const char* dtype_names[] = {"uint8",
                                       "int8",
                                       "int16",
                                       "int32",
                                       "int64",
                                       "float16",
                                       "float32",
                                       "float64",
                                       "complex32",
                                       "complex64",
                                       "complex128",
                                       "bool",
                                       "qint8",
                                       "quint8",
                                       "qint32",
                                       "bfloat16",
                                       "quint4x2",
                                       "quint2x4",
                                       "bits1x8",
                                       "bits2x4",
                                       "bits4x2",
                                       "bits8",
                                       "bits16",
                                       "float8_e5m2",
                                       "float8_e4m3fn",
                                       "float8_e5m2fnuz",
                                       "float8_e4m3fnuz",
                                       "uint16",
                                       "uint32",
                                       "uint64",
                                       "uint1",
                                       "uint2",
                                       "uint3",
                                       "uint4",
                                       "uint5",
                                       "uint6",
                                       "uint7",
                                       "int1",
                                       "int2",
                                       "int3",
                                       "int4",
                                       "int5",
                                       "int6",
                                       "int7",
                                       "float8_e8m0fnu",
                                       "float4_e2m1fn_x2"};

std::string dtype_text(int32_t code) {
  bool known = code >= 0 && code < static_cast<int32_t>(std::size(dtype_names));
  return known ? std::string("torch.") + dtype_names[code] : "torch dtype number " + std::to_string(code);
}

std::string device_text(const TensorView& view) {
  const TorchCodes& codes = torch_codes();
  const std::pair<int32_t, const char*> kinds[] = {
      {codes.cpu, "cpu"}, {codes.cuda, "cuda"}, {codes.meta, "meta"}, {codes.xpu, "xpu"}, {codes.mps, "mps"}};
  std::string text =
      view.device_type == codes.privateuse1 ? "privateuseone" : "device type " + std::to_string(view.device_type);
  for (const auto& kind : kinds) {
    if (view.device_type == kind.first) text = kind.second;
  }
  return view.device_index < 0 ? text : text + ":" + std::to_string(view.device_index);
}

std::string list_text(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

void check_rank(const TensorViews& views, int which) {
  const TensorView& view = views[which];
  if (!view.present || view.rank == ranks[which]) return;
  fail(Message::rank, {{"name", names[which]},
                       {"expected", std::to_string(ranks[which])},
                       {"shape", shapes[which]},
                       {"got", std::to_string(view.rank)}});
}

bool is_empty(const TensorView& view) {
  for (int64_t i = 0; i < view.rank; i++) {
    if (view.sizes[i] == 0) return true;
  }
  return false;
}

// The stride of a dimension of one entry is never used.
bool is_contiguous(const TensorView& view) {
  if (is_empty(view)) return true;
  int64_t expected = 1;
  for (int64_t i = view.rank - 1; i >= 0; i--) {
    if (view.sizes[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.sizes[i];
  }
  return true;
}

// Compares the address ranges, gaps between strided rows included.
bool overlap(const TensorView& a, const TensorView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  auto end = [](const TensorView& view) {
    int64_t last = 0;
    for (int64_t i = 0; i < view.rank; i++) last += (view.sizes[i] - 1) * view.strides[i];
    return view.data + (last + 1) * view.item_size;
  };
  return a.data < end(b) && b.data < end(a);
}

void check_output(const TensorViews& views, int which, const int64_t* expected, int32_t dtype) {
  const TensorView& view = views[which];
  for (int64_t i = 0; i < view.rank; i++) {
    if (view.sizes[i] == expected[i]) continue;
    fail(Message::out_shape, {{"name", names[which]},
                              {"expected", list_text(expected, view.rank)},
                              {"got", list_text(view.sizes, view.rank)}});
  }
  if (view.dtype != dtype) {
    fail(Message::out_dtype,
         {{"name", names[which]}, {"expected", dtype_text(dtype)}, {"got", dtype_text(view.dtype)}});
  }
  if (!is_contiguous(view)) {
    fail(Message::out_contiguous, {{"name", names[which]}, {"strides", list_text(view.strides, view.rank)}});
  }
  for (int other = 0; other < which; other++) {
    bool is_q = which == out && other == q && view.data == views[q].data && is_contiguous(views[q]);
    if (views[other].present && !is_q && overlap(view, views[other])) {
      fail(Message::out_overlap, {{"name", names[which]}, {"other", names[other]}});
    }
  }
}

}  // namespace

const char* argument_name(int argument) { return names[argument]; }

void check_types(const TensorViews& views) {
  const TorchCodes& codes = torch_codes();
  if (views[q].device_type != codes.cuda) fail(Message::device, {{"device", device_text(views[q])}});
  if (views[q].dtype != codes.bf16 && views[q].dtype != codes.fp16) {
    fail(Message::q_dtype, {{"q_dtype", dtype_text(views[q].dtype)}});
  }
  if (views[unified_kv].dtype != views[q].dtype) {
    fail(Message::unified_kv_dtype,
         {{"unified_kv_dtype", dtype_text(views[unified_kv].dtype)}, {"q_dtype", dtype_text(views[q].dtype)}});
  }
  if (views[kv].dtype != views[q].dtype) {
    fail(Message::kv_dtype, {{"kv_dtype", dtype_text(views[kv].dtype)}, {"q_dtype", dtype_text(views[q].dtype)}});
  }
}

void check_inputs(const TensorViews& views) {
  const TorchCodes& codes = torch_codes();
  check_rank(views, unified_kv);
  check_rank(views, kv);
  int64_t head_dim = views[unified_kv].last_size();
  if (head_dim != views[kv].last_size()) {
    fail(Message::head_dim,
         {{"unified_kv_dim", std::to_string(head_dim)}, {"kv_dim", std::to_string(views[kv].last_size())}});
  }
  for (int which = 0; which < num_tensors; which++) check_rank(views, which);
  if (views[q].last_size() != head_dim) {
    fail(Message::q_head_dim,
         {{"q_dim", std::to_string(views[q].last_size())}, {"unified_kv_dim", std::to_string(head_dim)}});
  }
  for (int which = 0; which < num_tensors; which++) {
    const TensorView& view = views[which];
    if (!view.present) continue;
    if (view.device_type != views[q].device_type || view.device_index != views[q].device_index) {
      fail(Message::tensor_device,
           {{"name", names[which]}, {"device", device_text(view)}, {"q_device", device_text(views[q])}});
    }
  }
  for (int which = 0; which < num_tensors; which++) {
    if (views[which].present && !views[which].strided) fail(Message::layout, {{"name", names[which]}});
  }
  for (int which : {kv_indices_prefix, kv_indptr_prefix, kv_indices_extend, kv_indptr_extend}) {
    const TensorView& view = views[which];
    if (view.dtype != codes.int32 && view.dtype != codes.int64) {
      fail(Message::index_dtype, {{"name", names[which]}, {"dtype", dtype_text(view.dtype)}});
    }
  }
  int64_t tokens = views[q].rows();
  for (int which : {kv_indptr_prefix, kv_indptr_extend}) {
    if (views[which].rows() == tokens + 1) continue;
    fail(Message::indptr_length, {{"name", names[which]},
                                  {"expected", std::to_string(tokens + 1)},
                                  {"got", std::to_string(views[which].rows())},
                                  {"tokens", std::to_string(tokens)}});
  }
  for (int which : {kv_indices_prefix, kv_indices_extend}) {
    if (views[which].rows() <= list_length_limit) continue;
    fail(Message::list_length, {{"name", names[which]},
                                {"got", std::to_string(views[which].rows())},
                                {"limit", std::to_string(list_length_limit)}});
  }
  for (int which : {unified_kv, kv}) {
    if (views[which].rows() <= INT32_MAX) continue;
    fail(Message::table_rows,
         {{"name", names[which]}, {"got", std::to_string(views[which].rows())}, {"limit", std::to_string(INT32_MAX)}});
  }
  int64_t heads = views[q].sizes[1];
  if (views[attn_sink].present) {
    const TensorView& sink = views[attn_sink];
    if (sink.rows() != heads) {
      fail(Message::sink_length, {{"heads", std::to_string(heads)}, {"got", std::to_string(sink.rows())}});
    }
    if (sink.dtype != codes.fp32 && sink.dtype != codes.fp16 && sink.dtype != codes.bf16) {
      fail(Message::sink_dtype, {{"dtype", dtype_text(sink.dtype)}});
    }
  }
  if (heads < 1 || heads > INT32_MAX) fail(Message::num_heads, {{"shape", list_text(views[q].sizes, 3)}});
  if (head_dim < 8 || head_dim > head_dim_limit || head_dim % 8 != 0) {
    fail(Message::head_dim_limit, {{"head_dim", std::to_string(head_dim)}, {"limit", std::to_string(head_dim_limit)}});
  }
  for (int which : {unified_kv, kv}) {
    if (is_empty(views[which]) || views[which].strides[1] == 1) continue;
    fail(Message::last_stride, {{"name", names[which]}, {"stride", std::to_string(views[which].strides[1])}});
  }
}

void check_outputs(const TensorViews& views) {
  check_output(views, out, views[q].sizes, views[q].dtype);
  if (views[lse].present) check_output(views, lse, views[q].sizes, torch_codes().fp32);
}

}  // namespace paged_prefill
