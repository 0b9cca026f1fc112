"""DeepSeek-V4's sparse prefill as servers issue it: a batch of requests in chunked prefill, for each layer class.

The pool (`unified_kv`) is one ring of WINDOW rows a request slot, followed by pages of BLOCK tokens' compressed
rows. Both are handed out in shuffled order, with slots and pages of other requests in between. A token attends to

    compressed rows of the pool       CSA: the top-k of the committed rows; HCA: all of them; none when dense
    the window before the chunk       rows of the request's ring: position p lies at slot * WINDOW + p % WINDOW
    the window inside the chunk       rows of `kv`, this forward's own keys

in that order: the first two are the prefix list, the third is the extend list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

WINDOW = 128
BLOCK = 128  # tokens a page; a page holds BLOCK // ratio compressed rows

Tensor = torch.Tensor
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]


@dataclass(frozen=True)
class Request:
    """One request of the batch: `context` tokens are in the cache, `chunk` tokens are in this forward."""

    context: int
    chunk: int


@dataclass(frozen=True)
class Layer:
    """A layer class: one compressed row for `ratio` tokens (0: none); at most `top_k` of them a token (0: all)."""

    name: str
    ratio: int = 0
    top_k: int = 0


WINDOW_ONLY = Layer("window")
CSA_FLASH = Layer("csa-512", ratio=4, top_k=512)
CSA_PRO = Layer("csa-1024", ratio=4, top_k=1024)
HCA = Layer("hca", ratio=128)
LAYERS = {layer.name: layer for layer in (WINDOW_ONLY, CSA_FLASH, CSA_PRO, HCA)}

# A first chunk, a second one, and the tails of longer prompts: 4096 tokens in all.
REQUESTS = (Request(0, 640), Request(2048, 2048), Request(16384, 1024), Request(49000, 384))
SMALL_REQUESTS = (Request(0, 5), Request(300, 6), Request(70, 3))


@dataclass(frozen=True)
class Workload:
    """One call's inputs, in the operator's order, and the figures that rates are computed from."""

    name: str
    q: torch.Tensor  # [T, H, D]
    unified_kv: torch.Tensor  # [pages, D]
    kv_indices_prefix: torch.Tensor  # [nnz_prefix] int32, -1 = hole
    kv_indptr_prefix: torch.Tensor  # [T + 1] int32
    kv: torch.Tensor  # [rows, D]; of a batch, its T tokens
    kv_indices_extend: torch.Tensor  # [nnz_extend] int32
    kv_indptr_extend: torch.Tensor  # [T + 1] int32
    attn_sink: torch.Tensor  # [H] float32
    softmax_scale: float
    keys: int  # (token, row) pairs, holes not counted

    def args(self) -> Arguments:
        """The operator's nine positional arguments."""
        return (
            self.q,
            self.unified_kv,
            self.kv_indices_prefix,
            self.kv_indptr_prefix,
            self.kv,
            self.kv_indices_extend,
            self.kv_indptr_extend,
            self.attn_sink,
            self.softmax_scale,
        )

    @property
    def flops(self) -> int:
        """Multiply-adds of the two products, counted as two operations each: 4 * H * D a key."""
        return 4 * self.keys * self.q.size(1) * self.q.size(2)

    @property
    def gather_bytes(self) -> int:
        """Bytes of the selected rows, each read once a token."""
        return self.keys * self.q.size(2) * self.q.element_size()


def build(
    layer: Layer,
    requests: Sequence[Request] = REQUESTS,
    *,
    heads: int = 128,
    head_dim: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    padded: bool = True,
    spare: float = 0.25,
    bucket: int | None = None,
) -> Workload:
    """Builds one layer's call for a batch of requests; everything is made on `device` from `seed`.

    Args:
        layer: one of LAYERS, or a class of your own.
        requests: the batch. Chunks lie one after another in q and kv.
        heads: query heads of this rank (128 or 64, and their tensor-parallel shares down to 8).
        padded: a token's compressed part is as long as its request's last token needs, filled up with -1, as by
            servers that size lists by request; False gives every token exactly its own rows.
        spare: share of the pool's slots and pages that belongs to nobody in this batch.
        bucket: pad q to this many tokens; the added ones have empty lists, as under a captured graph.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    context = torch.tensor([r.context for r in requests], dtype=torch.int64, device=device)  # [R]
    chunk = torch.tensor([r.chunk for r in requests], dtype=torch.int64, device=device)  # [R]
    tokens = sum(r.chunk for r in requests)
    request = torch.repeat_interleave(torch.arange(len(requests), device=device), chunk, output_size=tokens)  # [T]
    chunk_row = (chunk.cumsum(0) - chunk)[request]  # [T] where the token's chunk begins in kv
    chunk_start = context[request]  # [T] the position it begins at
    position = chunk_start + torch.arange(tokens, device=device) - chunk_row  # [T]

    slots, slot_order = _allocate(len(requests), spare, generator)
    window = position[:, None] - torch.arange(WINDOW - 1, -1, -1, device=device)  # [T, WINDOW] positions, oldest first
    in_chunk = window >= chunk_start[:, None]
    before = (window >= 0) & ~in_chunk
    ring = slot_order[request][:, None] * WINDOW + window % WINDOW
    prefix, prefix_listed = ring, before
    pool_rows = slots * WINDOW
    if layer.ratio:
        rows, listed, page_rows = _compressed(layer, context + chunk, request, position, padded, spare, generator)
        prefix = torch.cat((torch.where(rows < 0, -1, rows + pool_rows), ring), dim=1)
        prefix_listed = torch.cat((listed, before), dim=1)
        pool_rows += page_rows

    total = max(tokens, bucket or 0)
    kv_indices_prefix, kv_indptr_prefix = _csr(prefix, prefix_listed, total)
    kv_indices_extend, kv_indptr_extend = _csr(window + (chunk_row - chunk_start)[:, None], in_chunk, total)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    return Workload(
        name=f"{layer.name}-h{heads}",
        q=normal(total, heads, head_dim),
        unified_kv=normal(pool_rows, head_dim),
        kv_indices_prefix=kv_indices_prefix,
        kv_indptr_prefix=kv_indptr_prefix,
        kv=normal(total, head_dim),
        kv_indices_extend=kv_indices_extend,
        kv_indptr_extend=kv_indptr_extend,
        attn_sink=normal(heads, dtype=torch.float32),
        softmax_scale=head_dim**-0.5,
        keys=int((kv_indices_prefix >= 0).sum()) + kv_indices_extend.numel(),
    )


def uniform(
    heads: int,
    prefix: int,
    extend: int,
    rows: int,
    tokens: int = 4096,
    *,
    head_dim: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Workload:
    """The plainest load of a given size, for comparisons: full lists, without holes or repeats of a batch's structure.

    Every token has `prefix` random rows of a pool of `rows`, and a sliding window of `extend` rows of kv.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    def indptr(count: int) -> torch.Tensor:
        return torch.arange(tokens + 1, device=device, dtype=torch.int32) * count

    window = torch.arange(tokens, device=device)[:, None] + torch.arange(extend, device=device)
    return Workload(
        name=f"h{heads}-{prefix}+{extend}",
        q=normal(tokens, heads, head_dim),
        unified_kv=normal(rows, head_dim),
        kv_indices_prefix=torch.randint(
            rows, (tokens * prefix,), generator=generator, dtype=torch.int32, device=device
        ),
        kv_indptr_prefix=indptr(prefix),
        kv=normal(tokens + extend, head_dim),
        kv_indices_extend=window.flatten().to(torch.int32),
        kv_indptr_extend=indptr(extend),
        attn_sink=normal(heads, dtype=torch.float32),
        softmax_scale=head_dim**-0.5,
        keys=tokens * (prefix + extend),
    )


def _compressed(
    layer: Layer,
    length: torch.Tensor,  # [R] tokens in the cache after this chunk
    request: torch.Tensor,  # [T]
    position: torch.Tensor,  # [T]
    padded: bool,
    spare: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows [T, C] in the paged part of the pool (-1 = hole), which of them are listed, and that part's size."""
    capacity = BLOCK // layer.ratio
    blocks = (length + BLOCK - 1) // BLOCK  # [R]
    pages, page_order = _allocate(int(blocks.sum()), spare, generator)
    page_table = (blocks.cumsum(0) - blocks)[request]  # [T] where the request's pages begin in page_order

    visible = (position + 1) // layer.ratio  # [T] committed at this token, its own included
    most = length // layer.ratio  # [R]
    taken = visible
    if layer.top_k:
        most, taken = most.clamp(max=layer.top_k), taken.clamp(max=layer.top_k)
    column = torch.arange(max(most.tolist(), default=0), device=length.device)  # [C]
    valid = column < taken[:, None]

    # The top-k stands in for the indexer's: one row of each of `taken` equal strata, in an order of no meaning.
    low = column * visible[:, None] // taken[:, None].clamp(min=1)
    high = (column + 1) * visible[:, None] // taken[:, None].clamp(min=1)
    chance = torch.rand(low.shape, generator=generator, device=length.device)
    chosen = low + (chance * (high - low)).long().clamp(max=high - low - 1)
    if layer.top_k:
        chance = torch.rand(low.shape, generator=generator, device=length.device)
        chosen = chosen.gather(1, chance.masked_fill(~valid, 2.0).argsort(dim=1))

    block = torch.where(valid, page_table[:, None] + chosen // capacity, 0)
    rows = torch.where(valid, page_order[block] * capacity + chosen % capacity, -1)
    listed = column < most[request][:, None] if padded else valid
    return rows, listed, pages * capacity


def _allocate(wanted: int, spare: float, generator: torch.Generator) -> tuple[int, torch.Tensor]:
    """A pool of `wanted` pieces and the spare ones, and which of them, in shuffled order, are ours."""
    total = wanted + max(1, int(wanted * spare))
    return total, torch.randperm(total, generator=generator, device=generator.device)[:wanted]


def _csr(rows: torch.Tensor, listed: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index list and indptr [tokens + 1] of the listed entries; tokens beyond the rows get empty lists."""
    indptr = torch.zeros(tokens + 1, dtype=torch.int64, device=rows.device)
    indptr[1 : rows.size(0) + 1] = listed.sum(1).cumsum(0)
    indptr[rows.size(0) + 1 :] = indptr[rows.size(0)].clone()
    return rows[listed].to(torch.int32), indptr.to(torch.int32)
