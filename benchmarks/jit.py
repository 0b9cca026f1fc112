"""The portable kernel through Triton's own launcher: the same source, compiled at its first call, not ahead of time."""

from __future__ import annotations

import math

import torch

from build_tools.specs import FULL_GRID, TILES
from csrc.kernels.portable import sparse_paged_prefill


def portable(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator at head_dim 512, as a server calls it that ships Triton's source: tensors in, a launch, out."""
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q) if out is None else out
    tile = next(
        spec.head_tile for spec in FULL_GRID if spec.head_dim == head_dim and heads <= (spec.max_heads or heads)
    )
    config = TILES["ampere"]["portable", tile, head_dim]
    sparse_paged_prefill[(tokens * -(-heads // tile),)](
        q,
        unified_kv,
        kv_indices_prefix,
        kv_indptr_prefix,
        kv,
        kv_indices_extend,
        kv_indptr_extend,
        attn_sink,
        out,
        out,  # in place of lse, which is not stored
        q.stride(0),
        q.stride(1),
        unified_kv.stride(0),
        kv.stride(0),
        heads,
        head_dim,
        unified_kv.size(0),
        kv.size(0),
        kv_indices_prefix.numel(),
        kv_indices_extend.numel(),
        1,
        0,
        0,
        softmax_scale * math.log2(math.e),
        0.0,
        BLOCK_H=tile,
        BLOCK_D=head_dim,
        MASK_D=False,
        **dict(config.constexprs),
        num_warps=config.num_warps,
        **dict(config.options),
    )
    return out
