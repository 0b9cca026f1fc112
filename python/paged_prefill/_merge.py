"""Joins the results of one softmax whose rows were split over several calls or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

Tensor = torch.Tensor


def merge(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merges n partial results of `sparse_attn_v4_paged_prefill` into that of one call over all their rows::

        lse = log(sum_i exp(lse_i))
        out = sum_i exp(lse_i - lse) * out_i

    Every row must be in one part only. What all n parts repeat (the rows of `kv`, the sink) is counted n times unless
    each part was computed with replicated_logit_shift = -log(n): then it counts once. A part without a row for a
    token has lse = -inf there, and its out is not looked at.

    The sums are fp32 (fp64 for fp64 results), in the order of the parts, so ranks that merge the same parts in the
    same order get the same bits. Merged results may be merged again.

    Args:
        outs: n tensors [T, H, D] of one floating dtype, or one tensor [n, T, H, D]; n >= 1.
        lses: n tensors [T, H], fp32 (fp64 for fp64 outs), natural logarithms, or one tensor [n, T, H].

    Returns:
        out [T, H, D] in the dtype of `outs` and lse [T, H] in that of `lses`, both new and contiguous. Where no part
        has a row, out = 0 and lse = -inf.

    Raises:
        RuntimeError: no part, as many outs as lses, or shapes, dtypes or devices that do not fit together.
    """
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    stacked = torch.stack(lses)  # [n, T, H]
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.softmax(stacked, dim=0)[..., None]  # exp(lse_i - lse), without the rounding of lse
    empty = (stacked == float("-inf"))[..., None]  # their weight may be NaN, if all are, and so may what they hold
    total = torch.zeros(outs[0].shape, dtype=lse.dtype, device=lse.device)
    for i, out in enumerate(outs):
        total += torch.where(empty[i], 0.0, weights[i] * out)
    return total.to(outs[0].dtype), lse


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        _fail(
            f"merge needs as many outs as lses, and at least one: got {len(outs)} and {len(lses)}",
            "pass the (out, lse) pair of every rank, each from a call with return_lse=True",
        )
    first = outs[0]
    if first.dim() != 3 or not first.is_floating_point():
        _fail(
            f"outs[0] must be a floating-point tensor [T, H, D], got {first.dtype} {list(first.shape)}",
            "argument outs: pass the results as the operator returns them, or stacked as [n, T, H, D]",
        )
    lse_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, tensor, shape, dtype in (
            ("outs", out, first.shape, first.dtype),
            ("lses", lse, first.shape[:2], lse_dtype),
        ):
            if tensor.shape != shape:
                _fail(
                    f"{name}[{i}] shape mismatch: expected {list(shape)}, got {list(tensor.shape)}",
                    f"argument {name}: every rank computes the same tokens and heads; only their rows differ",
                )
            if tensor.dtype != dtype:
                _fail(f"{name}[{i}] dtype mismatch: expected {dtype}, got {tensor.dtype}", f"argument {name}: cast it")
            if tensor.device != first.device:
                _fail(
                    f"{name}[{i}] device mismatch: {name}[{i}]={tensor.device}, outs[0]={first.device}",
                    "gather the parts on one device first, for example with torch.distributed.all_gather",
                )


def _fail(text: str, hint: str) -> NoReturn:
    raise RuntimeError(f"{text}\n{hint}")
