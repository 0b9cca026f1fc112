"""The operator's mathematics a second time, written from the contract alone, and the comparison every test uses.

Where the reference walks over tokens and gathers, this one is dense: a multiplicity matrix says how often each token
names each row, every token meets every row, and a row named n times adds log(n) to its logit.
"""

from __future__ import annotations

from collections import Counter

import torch

from paged_prefill import _compare


def dense(
    q,
    unified_kv,
    kv_indices_prefix,
    kv_indptr_prefix,
    kv,
    kv_indices_extend,
    kv_indptr_extend,
    attn_sink,
    softmax_scale,
    replicated_logit_shift=0.0,
):
    """(out [T, H, D], lse [T, H]) in fp64 on the CPU, for finite q and rows that are finite or NaN."""
    q = q.detach().cpu().double()
    heads = q.shape[1]
    rows = torch.cat((unified_kv, kv)).detach().cpu().double()
    counts = torch.cat(
        (
            multiplicity(kv_indices_prefix, kv_indptr_prefix, len(q), len(unified_kv)),
            multiplicity(kv_indices_extend, kv_indptr_extend, len(q), len(kv)),
        ),
        dim=1,
    )
    shift = torch.zeros(len(rows), dtype=torch.float64)
    shift[len(unified_kv) :] = replicated_logit_shift
    clean = rows.nan_to_num(nan=0.0)

    logits = torch.einsum("thd,rd->thr", q, clean) * softmax_scale + shift + counts.log()[:, None, :]
    if attn_sink is None:
        sink = torch.full((heads,), float("-inf"), dtype=torch.float64)
    else:
        sink = attn_sink.detach().cpu().double() + replicated_logit_shift
    lse = torch.logaddexp(logits.logsumexp(-1) if len(rows) else torch.full(q.shape[:2], float("-inf")), sink)
    weights = (logits - lse[..., None]).exp()
    weights[counts[:, None, :].expand_as(weights) == 0] = 0.0
    out = torch.einsum("thr,rd->thd", weights, clean)

    poisoned = (counts * rows.isnan().any(1)).sum(1) > 0
    out[poisoned] = float("nan")
    lse[poisoned] = float("nan")
    return out, lse


def multiplicity(indices, indptr, tokens, rows):
    """[tokens, rows] float64: how often each token's list names each row."""
    indices, indptr = indices.tolist(), indptr.tolist()
    counts = torch.zeros(tokens, rows, dtype=torch.float64)
    for token in range(tokens):
        start, end = (sorted((0, bound, len(indices)))[1] for bound in indptr[token : token + 2])
        for row, times in Counter(indices[start:end]).items():
            if 0 <= row < rows:
                counts[token, row] = times
    return counts


def assert_close(actual, expected, what=""):
    """`actual` is an operator's out; `expected` the fp64 result for the same inputs."""
    comparison = _compare.compare_out(actual, expected.to(actual.device))
    assert comparison.ok, f"{what} error {comparison.error:.2e} > {comparison.limit:.0e}; {comparison.detail}"


def assert_lse_close(actual, expected, what=""):
    assert actual.dtype == torch.float32 and actual.is_contiguous()
    comparison = _compare.compare_lse(actual, expected.to(actual.device))
    assert comparison.ok, f"{what} lse off by {comparison.error:.2e} tolerances; {comparison.detail}"
