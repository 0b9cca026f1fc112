"""Optional checks of what the index tensors hold, which the operator itself only makes harmless.

An index that names no row is skipped and a bound outside its list is clamped, so a call never fails for its contents.
Here both are errors: a server's bug shows where it is made.
"""

import torch
from torch import Tensor

from . import _guards

# (list, its indptr, the table it names rows of)
_SIDES = (
    ("kv_indices_prefix", "kv_indptr_prefix", "unified_kv"),
    ("kv_indices_extend", "kv_indptr_extend", "kv"),
)


def validate(
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
) -> None:
    """Checks a call of `sparse_attn_v4_paged_prefill`, contents of the index tensors included, without making it.

    The arguments are the operator's, [T, H, D] and so on. Each bound of an indptr must lie between 0 and the length of
    its list and be no smaller than the one before; each index that a token owns must be -1, for a hole, or a row of
    its table. Entries that no token owns may hold anything. The checks run on the tensors' device and the host waits
    for them once. With PAGED_PREFILL_VALIDATE=1 in the environment when the package is imported, every call of the
    Python function makes them, except inside torch.compile.

    Raises:
        RuntimeError: a guard of the operator fails; or a bound or an index is bad: the text names the argument, the
            token, the entry in the argument, and the value; or the current stream is being captured.
    """
    arguments = {
        "q": q, "unified_kv": unified_kv, "kv_indices_prefix": kv_indices_prefix, "kv_indptr_prefix": kv_indptr_prefix,
        "kv": kv, "kv_indices_extend": kv_indices_extend, "kv_indptr_extend": kv_indptr_extend,
        "attn_sink": attn_sink, "out": out,
    }  # fmt: skip
    _guards.check(arguments)
    if not _has_data(q):
        return
    if q.device.type == "cuda":
        with torch.cuda.device(q.device):
            if torch.cuda.is_current_stream_capturing():
                _guards.fail("validate_capture")
    tensors = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    faults = [_find_faults(tensors[indices], tensors[indptr], tensors[table]) for indices, indptr, table in _SIDES]
    found = torch.stack([torch.stack(side) for side in faults]).tolist()  # the one wait
    for (indices, indptr, table), side in zip(_SIDES, found, strict=True):
        bound, bound_value, entry, index_value, token = side
        length, rows = tensors[indices].shape[0], tensors[table].shape[0]
        if bound >= 0:
            # The first bound begins token 0's list; every other one ends the list of the token before it.
            values = {"token": max(bound - 1, 0), "entry": bound, "value": bound_value}
            _guards.fail("indptr_value", name=indptr, list=indices, length=length, **values)
        if entry >= 0:
            values = {"token": token, "entry": entry, "value": index_value}
            _guards.fail("index_value", name=indices, table=table, rows=rows, **values)


def _has_data(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _find_faults(indices: Tensor, indptr: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """(bad bound's position, its value, bad index's position, its value, its token); a position is -1 without a fault.

    All are 0-dimensional int64 on the tensors' device. The index is meaningful if the bounds are good.
    """
    bounds, rows = indptr.long(), indices.long()
    bad = (bounds < 0) | (bounds > len(rows))
    bad[1:] |= bounds[1:] < bounds[:-1]
    bound, bound_value = _first(bad, bounds)
    if len(rows) == 0:
        return bound, bound_value, torch.full_like(bound, -1), torch.zeros_like(bound), torch.zeros_like(bound)
    position = torch.arange(len(rows), device=rows.device)
    owned = (position >= bounds[0]) & (position < bounds[-1])
    entry, value = _first(owned & ((rows < -1) | (rows >= len(table))), rows)
    token = torch.searchsorted(bounds, entry.view(1), right=True)[0] - 1
    return bound, bound_value, entry, value, token


def _first(bad: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the first true element, -1 without one, and the value there."""
    position = bad.to(torch.int8).argmax()
    return torch.where(bad.any(), position, -1), values.index_select(0, position.view(1))[0]
