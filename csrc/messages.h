// Every text this package raises, once: C++ fills the {placeholders} with `fail`, Python with str.format.
// MESSAGE(name, text, hint): the text stands whole on the first line, since callers match on it; the hint follows on
// the second. The first five are, word for word and in this order, the guards of the public Triton version.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#define MESSAGES(MESSAGE)                                                                                              \
  MESSAGE(device, "Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors",                                     \
          "q is on {device}: move it, with every other tensor of the call, to one CUDA or HIP device")                 \
  MESSAGE(q_dtype, "sparse_attn_v4_paged_prefill expects fp16/bf16 q, got {q_dtype}",                                  \
          "argument q: cast it to torch.bfloat16 or torch.float16, the dtype of the pools")                            \
  MESSAGE(unified_kv_dtype, "unified_kv dtype mismatch: kv={unified_kv_dtype}, q={q_dtype}",                           \
          "argument unified_kv needs q's dtype: derive the cache dtype from the model's dtype, "                       \
          "or dequantize the pool before the call")                                                                    \
  MESSAGE(kv_dtype, "kv dtype mismatch: kv={kv_dtype}, q={q_dtype}",                                                   \
          "argument kv needs q's dtype: cast this forward's keys to {q_dtype}")                                        \
  MESSAGE(head_dim, "head_dim mismatch: unified_kv={unified_kv_dim}, kv={kv_dim}",                                     \
          "the last dimension of unified_kv, kv and q is one head_dim: slice or view the wider of the two")            \
  MESSAGE(rank, "{name} rank mismatch: expected {expected} dimensions {shape}, got {got}",                             \
          "argument {name}: view it as {shape}")                                                                       \
  MESSAGE(q_head_dim, "head_dim mismatch: q={q_dim}, unified_kv={unified_kv_dim}",                                     \
          "the last dimension of unified_kv, kv and q is one head_dim: slice or view q or the pools")                  \
  MESSAGE(tensor_device, "{name} device mismatch: {name}={device}, q={q_device}",                                      \
          "argument {name} must be on q's device: move it there with {name}.to(q.device)")                             \
  MESSAGE(layout, "{name} must be a dense strided tensor",                                                             \
          "argument {name} is sparse or quantized: convert it with to_dense() or dequantize()")                        \
  MESSAGE(index_dtype, "{name} expects int32/int64, got {dtype}", "argument {name}: cast it to torch.int32")           \
  MESSAGE(indptr_length, "{name} length mismatch: expected T + 1 = {expected}, got {got}",                             \
          "argument {name} has one entry more than q has tokens (T = {tokens}): "                                      \
          "pad it by repeating its last entry when q is padded, or slice q to the tokens it describes")                \
  MESSAGE(list_length, "{name} has {got} entries, more than {limit}",                                                  \
          "argument {name}: cut the call into chunks of tokens, each with its slice of indptr")                        \
  MESSAGE(table_rows, "{name} has {got} rows, more than {limit}",                                                      \
          "argument {name}: rows are named by int32, so pass a slice of the rows that the lists name")                 \
  MESSAGE(sink_length, "attn_sink length mismatch: expected H = {heads}, got {got}",                                   \
          "argument attn_sink has one logit per head of q: pass this rank's slice of it")                              \
  MESSAGE(sink_dtype, "attn_sink expects fp32/fp16/bf16, got {dtype}", "argument attn_sink: cast it to torch.float32") \
  MESSAGE(num_heads, "q must have at least one head, got shape {shape}",                                               \
          "argument q is [T, H, D]: check how the heads are split over the ranks")                                     \
  MESSAGE(head_dim_limit, "head_dim must be a multiple of 8 from 8 to {limit}, got {head_dim}",                        \
          "pad the last dimension of q, unified_kv and kv with zeros, and slice the result")                           \
  MESSAGE(num_tiles, "T * H is too large: {got} tiles of {head_tile} heads, more than {limit}",                        \
          "cut the call into chunks of tokens, each with its slice of q and of the two indptr")                        \
  MESSAGE(last_stride, "{name} must have a last-dimension stride of 1, got {stride}",                                  \
          "argument {name} is read in place and never copied: lay the pool out with head_dim innermost")               \
  MESSAGE(out_shape, "{name} shape mismatch: expected {expected}, got {got}",                                          \
          "argument {name}: allocate it with this call's T, H and D")                                                  \
  MESSAGE(out_dtype, "{name} dtype mismatch: expected {expected}, got {got}",                                          \
          "argument {name}: allocate it with dtype={expected}")                                                        \
  MESSAGE(out_contiguous, "{name} must be contiguous, got strides {strides}",                                          \
          "argument {name} is written in place: pass a contiguous tensor, and copy it to the strided one after")       \
  MESSAGE(out_overlap, "{name} overlaps {other}",                                                                      \
          "argument {name} must be disjoint from every other tensor of the call (out may also be q itself, whole)")    \
  MESSAGE(requires_grad, "sparse_attn_v4_paged_prefill is forward only, but {name} requires grad",                     \
          "call it under torch.no_grad() or torch.inference_mode(), or pass {name}.detach()")                          \
  MESSAGE(index_value, "{name} names no row of {table}: token {token}, entry {entry}, value {value}",                  \
          "argument {name} takes rows of {table}, which has {rows}, and -1 for a hole; "                               \
          "outside validation this value is a hole, and skipped")                                                      \
  MESSAGE(indptr_value, "{name} has a bad bound: token {token}, entry {entry}, value {value}",                         \
          "argument {name} never decreases and stays from 0 to {length}, the length of {list}; "                       \
          "outside validation this bound is clamped")                                                                  \
  MESSAGE(validate_capture, "paged_prefill cannot validate a call inside a stream capture: it waits for the device",   \
          "call paged_prefill.validate() before the capture, and capture with PAGED_PREFILL_VALIDATE unset")           \
  MESSAGE(no_kernel, "sparse_attn_v4_paged_prefill has no implementation for this kind of tensor",                     \
          "pass plain dense tensors on one CUDA or HIP device")                                                        \
  MESSAGE(no_image, "this paged_prefill wheel has no kernel image for device {ordinal}: {device}, {architecture}",     \
          "the wheel has images for {targets}; refused: {reasons}. "                                                   \
          "Install a wheel that lists this architecture, or build one with PAGED_PREFILL_TARGETS set to it")           \
  MESSAGE(no_variant, "no kernel image for device {ordinal} takes this call: {dtype}, H = {heads}, D = {head_dim}",    \
          "the images for this device are {variants}; inputs {alignment} aligned to 16 bytes")                         \
  MESSAGE(bad_manifest, "kernel image manifest {file} is unusable: {problem}",                                         \
          "install the wheel anew, from its file: pip install --force-reinstall --no-deps paged_prefill-*.whl")        \
  MESSAGE(bad_image, "kernel image {file} is {problem}: expected {expected}, got {got}",                               \
          "install the wheel anew, from its file: pip install --force-reinstall --no-deps paged_prefill-*.whl")        \
  MESSAGE(bad_argument, "kernel image {variant} needs the argument {argument}, which this extension does not know",    \
          "image and extension are of different versions: reinstall paged-prefill")                                    \
  MESSAGE(forked, "paged_prefill cannot use the GPU in a forked process: the driver was opened in its parent",         \
          "start workers with the 'spawn' method, or fork before the first call")                                      \
  MESSAGE(no_driver, "no GPU driver: {problem}",                                                                       \
          "{library} comes with the {vendor} driver: install it, or make it visible inside the container")             \
  MESSAGE(no_stream, "torch's current stream cannot be read: {problem}",                                               \
          "{library} of a torch built for {vendor} must be loaded in this process")                                    \
  MESSAGE(no_loader, "paged_prefill._C was loaded without its package", "import paged_prefill instead")                \
  MESSAGE(driver_call, "{call} failed for {subject}: {error} ({words})",                                               \
          "an earlier error of this process on this device may be reported here: "                                     \
          "rerun with CUDA_LAUNCH_BLOCKING=1 to place it")                                                             \
  MESSAGE(driver_image, "{call} failed for {subject}: {error} ({words})",                                              \
          "the driver, of version {driver}, does not take this image: update the driver{log}")                         \
  MESSAGE(driver_lost, "{call} failed for {subject}: {error} ({words})",                                               \
          "a reset of the device's context takes its images with it: the next call loads it anew")                     \
  MESSAGE(driver_capture, "{call} failed for {subject}: {error} ({words})",                                            \
          "the image cannot be loaded during this stream capture: call paged_prefill.preload() before it")

namespace paged_prefill {

enum class Message {
#define MESSAGE_NAME(name, text, hint) name,
  MESSAGES(MESSAGE_NAME)
#undef MESSAGE_NAME
};

struct MessageText {
  const char* name;
  const char* text;
  const char* hint;
};

inline constexpr MessageText message_texts[] = {
#define MESSAGE_TEXT(name, text, hint) {#name, text, hint},
    MESSAGES(MESSAGE_TEXT)
#undef MESSAGE_TEXT
};

// Throws std::runtime_error (RuntimeError in Python) with the text and the hint, each {name} replaced by its value.
[[noreturn]] void fail(Message message, std::initializer_list<std::pair<const char*, std::string>> values = {});

}  // namespace paged_prefill
