"""The operator's guards for tensors without data (fake and meta), in the order and with the texts of csrc/guards.cpp.

Real tensors are checked in C++, which costs a tenth of this. Both take their texts from the one table, csrc/messages.h.
"""

from typing import NoReturn

import torch

from . import _C

Arguments = dict[str, torch.Tensor | None]

HEAD_DIM_LIMIT = 512
INT32_MAX = 2**31 - 1
LIST_LENGTH_LIMIT = 2**30 - 128  # as in csrc/guards.h
LISTS = ("kv_indices_prefix", "kv_indices_extend")
INDPTRS = ("kv_indptr_prefix", "kv_indptr_extend")

_TEXTS = _C.guard_texts()

# Rank and shape of each argument, in the order of the out operator's schema.
_SHAPES = {
    "q": (3, "[T, H, D]"),
    "unified_kv": (2, "[pages, D]"),
    "kv_indices_prefix": (1, "[nnz_prefix]"),
    "kv_indptr_prefix": (1, "[T + 1]"),
    "kv": (2, "[tokens, D]"),
    "kv_indices_extend": (1, "[nnz_extend]"),
    "kv_indptr_extend": (1, "[T + 1]"),
    "attn_sink": (1, "[H]"),
    "out": (3, "[T, H, D]"),
    "lse": (2, "[T, H]"),
}


def message(name: str, /, **values: object) -> str:
    """The text `name` of the table with its hint on the second line, both filled in."""
    text, hint = _TEXTS[name]
    return f"{text}\n{hint}".format(**values)


def fail(name: str, /, **values: object) -> NoReturn:
    raise RuntimeError(message(name, **values))


def _holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes is known to hold; on sizes that depend on data it is not, and the kernel decides."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


DEVICE_TYPES = ("cuda", "meta")  # torch calls a HIP device cuda too


def check(arguments: Arguments) -> None:
    """Applies every guard that needs no data; raises RuntimeError. Arguments are named as in the operators' schemas."""
    present = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    q, unified_kv, kv = present["q"], present["unified_kv"], present["kv"]
    if q.device.type not in DEVICE_TYPES:
        fail("device", device=q.device)
    if q.dtype not in (torch.bfloat16, torch.float16):
        fail("q_dtype", q_dtype=q.dtype)
    if unified_kv.dtype != q.dtype:
        fail("unified_kv_dtype", unified_kv_dtype=unified_kv.dtype, q_dtype=q.dtype)
    if kv.dtype != q.dtype:
        fail("kv_dtype", kv_dtype=kv.dtype, q_dtype=q.dtype)
    for name in ("unified_kv", "kv", *present):
        rank, shape = _SHAPES[name]
        if present[name].dim() != rank:
            fail("rank", name=name, expected=rank, shape=shape, got=present[name].dim())
        if name == "kv" and _holds(unified_kv.shape[1] != kv.shape[1]):
            fail("head_dim", unified_kv_dim=unified_kv.shape[1], kv_dim=kv.shape[1])
    tokens, heads, head_dim = q.shape
    if _holds(head_dim != unified_kv.shape[1]):
        fail("q_head_dim", q_dim=head_dim, unified_kv_dim=unified_kv.shape[1])
    for name, tensor in present.items():
        if tensor.device != q.device:
            fail("tensor_device", name=name, device=tensor.device, q_device=q.device)
    for name, tensor in present.items():
        if tensor.layout != torch.strided:
            fail("layout", name=name)
    for name in ("kv_indices_prefix", "kv_indptr_prefix", "kv_indices_extend", "kv_indptr_extend"):
        if present[name].dtype not in (torch.int32, torch.int64):
            fail("index_dtype", name=name, dtype=present[name].dtype)
    for name in INDPTRS:
        got = present[name].shape[0]
        if _holds(got != tokens + 1):
            fail("indptr_length", name=name, expected=tokens + 1, got=got, tokens=tokens)
    for name in LISTS:
        if _holds(present[name].shape[0] > LIST_LENGTH_LIMIT):
            fail("list_length", name=name, got=present[name].shape[0], limit=LIST_LENGTH_LIMIT)
    for name in ("unified_kv", "kv"):
        if _holds(present[name].shape[0] > INT32_MAX):
            fail("table_rows", name=name, got=present[name].shape[0], limit=INT32_MAX)
    sink = present.get("attn_sink")
    if sink is not None:
        if _holds(sink.shape[0] != heads):
            fail("sink_length", heads=heads, got=sink.shape[0])
        if sink.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            fail("sink_dtype", dtype=sink.dtype)
    if _holds(heads < 1):
        fail("num_heads", shape=list(q.shape))
    if _holds(head_dim < 8) or _holds(head_dim > HEAD_DIM_LIMIT) or _holds(head_dim % 8 != 0):
        fail("head_dim_limit", head_dim=head_dim, limit=HEAD_DIM_LIMIT)
    for name in ("unified_kv", "kv"):
        pool = present[name]
        if _holds(pool.stride(1) != 1) and not _holds(pool.shape[0] == 0):
            fail("last_stride", name=name, stride=pool.stride(1))
    for name, expected, dtype in (("out", (tokens, heads, head_dim), q.dtype), ("lse", (tokens, heads), torch.float32)):
        if name in present:
            _check_output(name, present[name], expected, dtype)


def _check_output(name: str, tensor: torch.Tensor, expected: tuple[int, ...], dtype: torch.dtype) -> None:
    # Overlap is a matter of addresses, which these tensors do not have: the kernel checks it.
    if any(_holds(got != needed) for got, needed in zip(tensor.shape, expected, strict=False)):
        fail("out_shape", name=name, expected=list(expected), got=list(tensor.shape))
    if tensor.dtype != dtype:
        fail("out_dtype", name=name, expected=dtype, got=tensor.dtype)
    if not tensor.is_contiguous():
        fail("out_contiguous", name=name, strides=list(tensor.stride()))


def refuse_grad(arguments: Arguments) -> None:
    """Raises if an argument requires grad, after the guards that come first; call it with grad mode enabled."""
    for name, tensor in arguments.items():
        if tensor is not None and tensor.requires_grad:
            check(arguments)
            fail("requires_grad", name=name)
