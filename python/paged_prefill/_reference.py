"""The operator's formula in plain torch: the yardstick of the tests, and the documented way on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INT32_MAX = 2**31 - 1


def reference(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    return_lse: bool = False,
    replicated_logit_shift: float = 0.0,
    *,
    out: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    tokens: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What `sparse_attn_v4_paged_prefill` computes, one token at a time, on any device and in any float dtype.

    The first twelve arguments are the operator's own. The arithmetic runs in `compute_dtype` (torch.float32 or
    torch.float64) and nothing is rounded before the end.

    Args:
        q: [T, H, D] queries.
        unified_kv: [pages, D] the paged pool, one row a slot; keys and values at once.
        kv_indices_prefix: [nnz_prefix] int32 or int64, rows of `unified_kv`; a value outside them is a hole.
        kv_indptr_prefix: [T + 1] int32 or int64; token t's list is [indptr[t], indptr[t + 1]).
        kv: [tokens, D] this forward's own rows, with kv_indices_extend and kv_indptr_extend in the same way.
        attn_sink: [H] one logit a head that has no value row, or None.
        softmax_scale: factor of the dot products.
        return_lse: also return the logarithm (natural, sink included) of each softmax's denominator.
        replicated_logit_shift: added to the logits of `kv` and to the sink; -log(n) when n ranks repeat them.
        out: [T, H, D] tensor to write to; it may be q itself. Its dtype wins over `out_dtype`.
        out_dtype: dtype of the result; q.dtype by default, as the operator does. torch.float64 with
            compute_dtype=torch.float64 gives the unrounded result that errors are measured against.
        tokens: compute these tokens only (a spot check of a long call): out is [len(tokens), H, D].

    Returns:
        out [T, H, D], or (out, lse) with lse [T, H] in torch.float32 (torch.float64 when out is torch.float64).
        A token without a valid row has out = 0 and lse = sink + shift, or -inf without a sink.

    Raises:
        RuntimeError: shapes that do not fit together; both numbers are in the message.
    """
    _check(q, unified_kv, kv_indptr_prefix, kv, kv_indptr_extend, attn_sink, compute_dtype)
    chosen = range(q.size(0)) if tokens is None else tokens
    if out is None:
        out = q.new_empty((len(chosen), q.size(1), q.size(2)), dtype=out_dtype or q.dtype)
    elif out.shape != (len(chosen), q.size(1), q.size(2)):
        raise RuntimeError(f"out has shape {tuple(out.shape)}, needs {(len(chosen), q.size(1), q.size(2))}")
    lse_dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    lse = q.new_empty((len(chosen), q.size(1)), dtype=lse_dtype)

    sink = q.new_full((q.size(1),), float("-inf"), dtype=compute_dtype)
    if attn_sink is not None:
        sink = attn_sink.to(device=q.device, dtype=compute_dtype) + replicated_logit_shift
    prefix_starts, extend_starts = kv_indptr_prefix.tolist(), kv_indptr_extend.tolist()

    for i, t in enumerate(chosen):
        prefix = _rows(unified_kv, kv_indices_prefix, prefix_starts[t], prefix_starts[t + 1]).to(compute_dtype)
        extend = _rows(kv, kv_indices_extend, extend_starts[t], extend_starts[t + 1]).to(compute_dtype)
        q_t = q[t].to(compute_dtype)  # [H, D]
        z = torch.cat(
            (
                softmax_scale * (q_t @ prefix.T),  # [H, P]
                softmax_scale * (q_t @ extend.T) + replicated_logit_shift,  # [H, E]
                sink[:, None],  # [H, 1]
            ),
            dim=1,
        )
        # A token without a row keeps the sink's column alone; without that one too there is nothing to sum: zero.
        probabilities = torch.softmax(z, dim=1)[:, :-1]  # [H, P + E]
        out[i] = (probabilities @ torch.cat((prefix, extend))).to(out.dtype)
        lse[i] = torch.logsumexp(z, dim=1).to(lse_dtype)
    return (out, lse) if return_lse else out


def _rows(table: torch.Tensor, indices: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The rows of `table` that indices[start:end] names, holes left out, whatever the three numbers are."""
    length = indices.numel()
    start, end = min(max(start, 0), length), min(max(end, 0), length)
    named = indices[start : max(start, end)].to(device=table.device, dtype=torch.int64)
    return table[named[(named >= 0) & (named < min(table.size(0), INT32_MAX))]]


def _check(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor | None,
    compute_dtype: torch.dtype,
) -> None:
    if compute_dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"compute_dtype is {compute_dtype}, needs torch.float32 or torch.float64")
    for name, tensor, rank in (("q", q, 3), ("unified_kv", unified_kv, 2), ("kv", kv, 2)):
        if tensor.dim() != rank:
            raise RuntimeError(f"{name} has {tensor.dim()} dimensions, needs {rank}: {tuple(tensor.shape)} came")
    if not q.size(-1) == unified_kv.size(-1) == kv.size(-1):
        widths = f"q={q.size(-1)}, unified_kv={unified_kv.size(-1)}, kv={kv.size(-1)}"
        raise RuntimeError(f"head_dim mismatch: {widths}")
    for name, indptr in (("kv_indptr_prefix", kv_indptr_prefix), ("kv_indptr_extend", kv_indptr_extend)):
        if indptr.dim() != 1 or indptr.numel() != q.size(0) + 1:
            came = tuple(indptr.shape)
            raise RuntimeError(
                f"{name} has shape {came}, needs ({q.size(0) + 1},): one more than q's {q.size(0)} tokens"
            )
    if attn_sink is not None and tuple(attn_sink.shape) != (q.size(1),):
        raise RuntimeError(f"attn_sink has shape {tuple(attn_sink.shape)}, needs ({q.size(1)},): one logit a head")
