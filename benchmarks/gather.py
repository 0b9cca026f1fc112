"""The gather limit: a kernel that reads the rows a call selects and does nothing with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

# (rows a step, warps): which one is fastest depends on the card, so the limit is the fastest of them.
SHAPES = ((8, 4), (16, 4), (16, 8), (32, 8))


@triton.jit
def _gather(
    pool_ptr,  # [rows, WIDTH] int32
    indices_ptr,  # [T, keys] int32, -1 = hole
    out_ptr,  # [T, WIDTH] int32
    keys,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    sums = tl.zeros([BLOCK, WIDTH], tl.int32)
    k = tl.arange(0, BLOCK)
    index = tl.load(indices_ptr + t * keys + k, mask=k < keys, other=-1)
    for start in range(0, keys, BLOCK):
        # The next step's indices are under way while this step's rows are.
        k = start + BLOCK + tl.arange(0, BLOCK)
        following = tl.load(indices_ptr + t * keys + k, mask=k < keys, other=-1)
        rows = pool_ptr + index.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        sums ^= tl.load(rows, mask=(index >= 0)[:, None], other=0)
        index = following
    tl.store(out_ptr + t * WIDTH + columns, tl.xor_sum(sums, 0))


def gathers(pool: torch.Tensor, indices: torch.Tensor) -> Iterator[Callable[[], torch.Tensor]]:
    """Calls that read the rows of pool [rows, D] named by indices [T, keys], one for each of SHAPES."""
    words = pool.view(torch.int32)
    tokens, keys = indices.shape
    out = torch.empty(tokens, words.size(1), dtype=torch.int32, device=pool.device)
    for block, warps in SHAPES:

        def call(block: int = block, warps: int = warps) -> torch.Tensor:
            _gather[(tokens,)](words, indices, out, keys, WIDTH=words.size(1), BLOCK=block, num_warps=warps)
            return out

        yield call
