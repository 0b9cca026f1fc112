"""Tensors between pages that cannot be touched: an emulated access just outside one ends the process.

The emulator's memory is the host's, so a stray read would otherwise go unseen. A violation shows as a segmentation
fault whose Python stack names the test.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PROT_NONE = 0


def fenced(tensor: torch.Tensor, alignment: int, offset: int = 0) -> torch.Tensor:
    """A copy with the same strides whose storage ends at a fence, or less than `alignment` bytes before it.

    Args:
        alignment: of the first element's address, in bytes; a multiple of the element size.
        offset: elements by which to miss that alignment.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        span = 0
    size = span * tensor.itemsize
    room = -(-(size + offset * tensor.itemsize) // alignment) * alignment
    pages = -(-max(room, 1) // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _libc.mprotect(base + page * mmap.PAGESIZE, mmap.PAGESIZE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = (pages + 1) * mmap.PAGESIZE - room + offset * tensor.itemsize
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    copy = whole[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)
