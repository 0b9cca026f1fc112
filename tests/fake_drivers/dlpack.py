"""Tensors over memory that torch did not allocate, on devices it may not have, by way of DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


kept: list[Any] = []  # memory and descriptions live as long as the process
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
CODES = {torch.int32: (0, 32), torch.int64: (0, 64), torch.float16: (2, 16), torch.float32: (2, 32),
          torch.float64: (2, 64), torch.bfloat16: (4, 16), torch.uint8: (1, 8)}


def wrap(pointer: int, shape: Any, strides: Any, dtype: torch.dtype, device_type: int, device: int) -> torch.Tensor:
    code, bits = CODES[dtype]
    count = len(shape)
    description = _Tensor(
        pointer, device_type, device, count, code, bits, 1,
        (ctypes.c_int64 * count)(*shape), (ctypes.c_int64 * count)(*strides), 0, None, None,
    )
    kept.append(description)
    return torch._C._from_dlpack(_new_capsule(ctypes.addressof(description), b"dltensor", None))
