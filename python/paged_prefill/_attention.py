"""The operator: the public function, and the two dispatcher operators behind it as far as they are Python.

The extension defines both operators, guards them on every backend and launches the out form on CUDA. Here are the
functional form's CUDA kernel, the fakes, and the refusal of inputs that require grad.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _C, _guards, _loader  # noqa: F401  (the loader registers itself with the extension)
from ._validate import validate

_functional = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill.default
_out = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill_out.default
_call_out: Callable[..., None] = getattr(_out, "_op", _out)  # what an eager call of the overload comes to
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_STRIDED = torch.strided
_DTYPES = (torch.bfloat16, torch.float16)
_VALIDATES = os.environ.get("PAGED_PREFILL_VALIDATE", "0") not in ("", "0")


def sparse_attn_v4_paged_prefill(
    q: Tensor,
    unified_kv: Tensor,
    kv_indices_prefix: Tensor,
    kv_indptr_prefix: Tensor,
    kv: Tensor,
    kv_indices_extend: Tensor,
    kv_indptr_extend: Tensor,
    attn_sink: Tensor | None,
    softmax_scale: float,
    return_lse: bool = False,
    replicated_logit_shift: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query token over the cache rows its two lists name; a row is key and value at once.

    For token t and head h, over the valid rows r that t's prefix list names in `unified_kv` and t's extend list names
    in `kv`::

        z_r   = softmax_scale * <q[t, h], r>  (+ replicated_logit_shift for rows of kv)
        z_s   = attn_sink[h] + replicated_logit_shift
        lse   = log(sum exp(z_r) + exp(z_s))
        out   = sum exp(z_r - lse) * r

    A list is a multiset, and t's part of it is [indptr[t], indptr[t+1]), clamped to the list's length. An index that is
    negative, or not less than the row count of its table, is a hole and is skipped. A token without a valid row has
    out = 0 and lse = z_s (-inf without a sink). Sums are fp32; only probabilities are rounded to q's dtype.

    Args:
        q: [T, H, D], fp16 or bf16; T >= 0, H >= 1, D a multiple of 8 up to 512. May be strided; it is copied if its
            last dimension has a stride other than 1.
        unified_kv: [pages, D], q's dtype, the paged pool. Rows may be strided; the last dimension has stride 1.
        kv_indices_prefix: [nnz_prefix], int32 or int64, rows of `unified_kv`. Values beyond int32 are holes.
        kv_indptr_prefix: [T+1], int32 or int64.
        kv: [tokens, D], q's dtype, this forward's own keys; strided like `unified_kv`.
        kv_indices_extend: [nnz_extend], int32 or int64, rows of `kv`.
        kv_indptr_extend: [T+1], int32 or int64.
        attn_sink: [H], fp32, fp16 or bf16, a logit per head with no value row; or None.
        softmax_scale: factor of the dot products.
        return_lse: also return lse.
        replicated_logit_shift: natural-log shift of the sink and of the rows of `kv`; -log(n) when they are replicated
            on n ranks whose (out, lse) pairs are merged.
        out: [T, H, D], q's dtype, contiguous: written instead of a new tensor. It is q itself or overlaps no input.

    Returns:
        out [T, H, D] in q's dtype, contiguous; with `return_lse`, (out, lse) with lse [T, H] fp32, natural logarithm.

    Raises:
        RuntimeError: an argument breaks the rules above (the text names it, and what to do), an input requires grad
            while grad mode is enabled, the wheel has no image for the device, or the driver reports an error.
        torch.OutOfMemoryError: out, lse or a converted argument cannot be allocated.

    The call is asynchronous on the current stream of q's device.
    """
    if q.layout is _STRIDED and not q.is_contiguous() and q.dim() == 3 and q.stride(2) != 1:
        q = q.contiguous()
    kv_indices_prefix = _as_list(kv_indices_prefix)
    kv_indptr_prefix = _as_list(kv_indptr_prefix)
    kv_indices_extend = _as_list(kv_indices_extend)
    kv_indptr_extend = _as_list(kv_indptr_extend)
    if attn_sink is not None:
        attn_sink = _as_sink(attn_sink)
    if out is None:
        out = _empty_out(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    # fmt: off
    if torch.compiler.is_compiling():
        _out(q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend, attn_sink,
             softmax_scale, replicated_logit_shift, out=out, lse=lse)
        return out if lse is None else (out, lse)
    if torch.is_grad_enabled() and (
        q.requires_grad or unified_kv.requires_grad or kv.requires_grad or out.requires_grad
        or (attn_sink is not None and attn_sink.requires_grad)
    ):
        _guards.refuse_grad({
            "q": q, "unified_kv": unified_kv, "kv_indices_prefix": kv_indices_prefix,
            "kv_indptr_prefix": kv_indptr_prefix, "kv": kv, "kv_indices_extend": kv_indices_extend,
            "kv_indptr_extend": kv_indptr_extend, "attn_sink": attn_sink, "out": out, "lse": lse,
        })
    if _VALIDATES:
        validate(q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend, attn_sink,
                 softmax_scale, out=out)
    # The operator's own check of requires_grad is a Python kernel, which costs as much as all of this; it has just been
    # made.
    with _BelowAutograd():
        _call_out(q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend,
                  attn_sink, softmax_scale, replicated_logit_shift, out=out, lse=lse)
    # fmt: on
    return out if lse is None else (out, lse)


def _as_list(indices: Tensor) -> Tensor:
    """int32 and contiguous; values beyond int32 become the nearest one that is still out of every table's range."""
    if indices.layout is not _STRIDED:
        return indices  # for the guards to refuse
    if indices.dtype is torch.int64:
        indices = indices.clamp(-1, _guards.INT32_MAX).to(torch.int32)
    return indices if indices.is_contiguous() else indices.contiguous()


def _as_sink(sink: Tensor) -> Tensor:
    """fp32 and contiguous, from the dtypes the guards accept."""
    if sink.layout is not _STRIDED:
        return sink
    if sink.dtype in _DTYPES:
        sink = sink.to(torch.float32)
    return sink if sink.is_contiguous() else sink.contiguous()


def _empty_out(q: Tensor) -> Tensor:
    if q.layout is _STRIDED and q.dtype in _DTYPES:
        return torch.empty_like(q, memory_format=torch.contiguous_format)  # half the time of torch.empty(q.shape, ...)
    return torch.empty(0, device=q.device)  # the guards refuse q first; not every dtype can be allocated


def _functional_cuda(
    q: Tensor,
    unified_kv: Tensor,
    kv_indices_prefix: Tensor,
    kv_indptr_prefix: Tensor,
    kv: Tensor,
    kv_indices_extend: Tensor,
    kv_indptr_extend: Tensor,
    attn_sink: Tensor | None,
    softmax_scale: float,
    return_lse: bool = False,
    replicated_logit_shift: float = 0.0,
) -> tuple[Tensor, Tensor]:
    out = _empty_out(q)
    lse = torch.empty(q.shape[:2] if return_lse else 0, dtype=torch.float32, device=q.device)
    # fmt: off
    _out(q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend, attn_sink,
         softmax_scale, replicated_logit_shift, out=out, lse=lse if return_lse else None)
    # fmt: on
    return out, lse


_INPUTS = tuple(argument.name for argument in _out._schema.arguments[:8])


def _functional_fake(*arguments: Any, return_lse: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
    _guards.check(dict(zip(_INPUTS, arguments, strict=False)))
    q = arguments[0]
    with_lse = arguments[9] if len(arguments) > 9 else return_lse
    lse = torch.empty(q.shape[:2] if with_lse else 0, dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def _out_fake(*arguments: Any, out: Tensor, lse: Tensor | None = None, **_: Any) -> None:
    _guards.check({**dict(zip(_INPUTS, arguments, strict=False)), "out": out, "lse": lse})


def _forward_only(operator: Any) -> Callable[..., Any]:
    """An Autograd kernel that refuses what requires grad, and otherwise goes on as if it were not there."""

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            _guards.refuse_grad({**dict(zip(_INPUTS, arguments, strict=False)), **keywords})
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **keywords)

    return kernel


_library: Any = torch.library.Library("paged_prefill", "IMPL")  # type: ignore[no-untyped-call]
_library.impl(_functional, _functional_cuda, "CUDA")
for _operator in (_functional, _out):
    _library.impl(_operator, _forward_only(_operator), "Autograd", with_keyset=True)
torch.library.register_fake("paged_prefill::sparse_attn_v4_paged_prefill", _functional_fake, lib=_library)
torch.library.register_fake("paged_prefill::sparse_attn_v4_paged_prefill_out", _out_fake, lib=_library)
