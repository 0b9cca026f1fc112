"""Sparse paged-prefill attention in plain Triton: one source for every NVIDIA and AMD target.

One program makes the output of one tile: one token and BLOCK_H of its heads. It walks the concatenation of the
token's prefix list (rows of unified_kv) and extend list (rows of kv) in steps of BLOCK_K keys, in a single loop, so
that a short list costs no extra step and the software pipeline runs across the seam. Keys and values are the same
rows, so each row is read once.

Every address is 64-bit from the program id on: pools, T*H*D and strides beyond 2^31 elements are in the contract.
No index and no indptr content may lead outside the tensors: list bounds are clamped to the list, and an index outside
its table is a hole.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# The running maximum starts at the most negative finite float: -inf - (-inf) would be NaN in a token without rows.
LOWEST = tl.constexpr(-3.4028234663852886e38)


def constexprs(spec):
    return {"BLOCK_H": spec.head_tile, "BLOCK_D": spec.head_dim or 512, "MASK_D": not spec.head_dim}


@triton.jit
def _list_bounds(indptr_ptr, t, length):
    """First entry and number of entries of token t's list, clamped to [0, length]; an end before its start is empty."""
    begin = tl.minimum(tl.maximum(tl.load(indptr_ptr + t), 0), length)
    end = tl.minimum(tl.maximum(tl.load(indptr_ptr + t + 1), 0), length)
    return begin.to(tl.int64), tl.maximum(end - begin, 0).to(tl.int64)


@triton.jit
def sparse_paged_prefill(
    q_ptr,  # [T, H, D], strides q_stride_t, q_stride_h, 1
    unified_kv_ptr,  # [unified_kv_rows, D], strides unified_kv_stride_n, 1
    kv_indices_prefix_ptr,  # [kv_indices_prefix_len] int32
    kv_indptr_prefix_ptr,  # [T + 1] int32
    kv_ptr,  # [kv_rows, D], strides kv_stride_n, 1
    kv_indices_extend_ptr,  # [kv_indices_extend_len] int32
    kv_indptr_extend_ptr,  # [T + 1] int32
    attn_sink_ptr,  # [H] fp32, null when has_sink is 0
    out_ptr,  # [T, H, D] contiguous; may be q
    lse_ptr,  # [T, H] fp32 contiguous, null when has_lse is 0
    q_stride_t,
    q_stride_h,
    unified_kv_stride_n,
    kv_stride_n,
    num_heads,
    head_dim,
    unified_kv_rows,
    kv_rows,
    kv_indices_prefix_len,
    kv_indices_extend_len,
    has_sink,
    has_lse,
    first_tile,
    softmax_scale_log2,
    logit_shift_log2,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_D: tl.constexpr,  # head_dim is any number up to BLOCK_D; otherwise it is BLOCK_D
    KEYS_FIRST: tl.constexpr,  # which operand of the first product the keys are; a matter of registers only
):
    tile = first_tile.to(tl.int64) + tl.program_id(0)
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    t = tile // head_blocks
    heads = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H] int64
    dims = tl.arange(0, BLOCK_D)
    head_ok = heads < num_heads
    width = BLOCK_D
    tile_ok = head_ok[:, None]
    if MASK_D:
        width = head_dim
        tile_ok = tile_ok & (dims < head_dim)[None, :]
    q = tl.load(q_ptr + t * q_stride_t + heads[:, None] * q_stride_h + dims[None, :], mask=tile_ok, other=0.0)

    prefix_begin, prefix_count = _list_bounds(kv_indptr_prefix_ptr, t, kv_indices_prefix_len)
    extend_begin, extend_count = _list_bounds(kv_indptr_extend_ptr, t, kv_indices_extend_len)
    prefix_indices = kv_indices_prefix_ptr + prefix_begin
    extend_indices = kv_indices_extend_ptr + (extend_begin - prefix_count)
    count = prefix_count + extend_count

    m = tl.full([BLOCK_H], LOWEST, tl.float32)  # running maximum of the logits, log2 domain
    l = tl.zeros([BLOCK_H], tl.float32)  # sum of exp2(logit - m)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_prefix = k < prefix_count
        index = tl.load(tl.where(in_prefix, prefix_indices, extend_indices) + k, mask=k < count, other=-1)
        valid = (index >= 0) & (index < tl.where(in_prefix, unified_kv_rows, kv_rows))
        row = tl.where(in_prefix, unified_kv_ptr, kv_ptr)
        row += index.to(tl.int64) * tl.where(in_prefix, unified_kv_stride_n, kv_stride_n)
        row_ok = valid[:, None]
        if not MASK_D:
            # The select between the two pools hides the alignment that makes the gather a 16-byte copy.
            row = tl.multiple_of(row, 16)
        if MASK_D:
            row_ok = row_ok & (dims < head_dim)[None, :]
        # A hole's row is zero, so that its zero probability meets no NaN in the second product.
        rows = tl.load(row[:, None] + dims[None, :], mask=row_ok, other=0.0)  # [BLOCK_K, BLOCK_D]

        shift = tl.where(in_prefix, 0.0, logit_shift_log2)
        if KEYS_FIRST:
            s = tl.trans(tl.dot(rows, tl.trans(q)))
        else:
            s = tl.dot(q, tl.trans(rows))
        s = s * softmax_scale_log2 + shift[None, :]
        # A select, not an added -inf: a hole stays a hole for a query that holds NaN or infinity.
        s = tl.where(valid[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(rows.dtype), rows, acc * alpha[:, None])
        m = m_new

    # The sink is a logit without a row. A sink of +inf takes all the weight: it is held finite here, so that no
    # inf - inf arises, and given back to lse below.
    sink = tl.load(attn_sink_ptr + heads, mask=heads < num_heads * has_sink, other=float("-inf"))
    sink = sink * LOG2_E + logit_shift_log2
    m_new = tl.maximum(m, tl.minimum(sink, -LOWEST))
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.exp2(tl.minimum(sink, -LOWEST) - m_new)
    # l is zero only without a row and without a sink; NaN is not zero and is passed on.
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc *= (alpha / l)[:, None]
    lse = tl.where(empty, float("-inf"), (m_new + tl.log2(l)) * LN_2)
    lse = tl.where(sink == float("inf"), float("inf"), lse)

    row = t * num_heads + heads  # of out and lse, int64
    tl.store(out_ptr + row[:, None] * width + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=tile_ok)
    tl.store(lse_ptr + row, lse, mask=heads < num_heads * has_lse)
