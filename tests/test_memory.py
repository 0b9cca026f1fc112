"""Hostile lists and bounds in tables that are surrounded by poison: nothing outside may be read or written."""

from __future__ import annotations

import random

import pytest
import torch

import cases
from cases import INT32_MAX, INT32_MIN

pytestmark = pytest.mark.gpu

SEEDS, BATCH = 320, 20
HEADS = (1, 3, 8, 16, 17, 32, 40, 64, 100, 128)
HEAD_DIMS = (512, 512, 512, 64, 128, 256, 8, 72, 504)


def within(table, rng, fill):
    """The same tensor at an address inside a larger buffer that is full of `fill`."""
    before = rng.choice((0, 1, 3, 8, 64, 1024))
    flat = torch.full((before + table.numel() + 4096,), fill, dtype=table.dtype, device=table.device)
    inner = flat[before : before + table.numel()].view(table.shape)
    inner.copy_(table)
    return inner


def hostile_case(seed, device):
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens, heads, head_dim = rng.randrange(1, 14), rng.choice(HEADS), rng.choice(HEAD_DIMS)
    dtype = rng.choice((torch.bfloat16, torch.float16))

    def table(rows):
        values = torch.randn(rows, head_dim, generator=g).to(device=device, dtype=dtype)
        return within(values, rng, float("nan"))

    def lists(rows):
        length = rng.choice((0, 1, 15, 40, 150))
        far = (-1, -2, rows, rows + 1, INT32_MAX, INT32_MIN, INT32_MAX // 1024, 1 << 22, -(1 << 22))
        entries = [rng.randrange(rows) if rows and rng.random() < 0.7 else rng.choice(far) for _ in range(length)]
        # What lies around a list names valid rows, so that an entry read from outside changes the result.
        indices = within(torch.tensor(entries, dtype=torch.int32, device=device), rng, 0)
        wild = rng.random() < 0.5
        far = (-1, length, length + 1, length + 64, INT32_MAX, INT32_MIN)
        bounds = [rng.choice(far) if wild and rng.random() < 0.3 else rng.randint(0, length) for _ in range(tokens + 1)]
        bounds = bounds if wild else sorted(bounds)
        return indices, within(torch.tensor(bounds, dtype=torch.int32, device=device), rng, INT32_MAX)

    pool_rows, kv_rows = rng.choice((0, 1, 17, 200)), rng.choice((0, 1, 17, 200))
    prefix, prefix_bounds = lists(pool_rows)
    extend, extend_bounds = lists(kv_rows)
    return cases.Case(
        f"seed {seed}",
        within(torch.randn(tokens, heads, head_dim, generator=g).to(device=device, dtype=dtype), rng, float("nan")),
        table(pool_rows),
        prefix,
        prefix_bounds,
        table(kv_rows),
        extend,
        extend_bounds,
        within(torch.randn(heads, generator=g).to(device), rng, float("nan")) if rng.random() < 0.8 else None,
        head_dim**-0.5,
        rng.choice((0.0, -1.5)),
    )


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH), ids=lambda first: f"seeds{first}")
def test_hostile_lists_and_bounds(check, device, first):
    for seed in range(first, first + BATCH):
        rng = random.Random(-seed)
        check(hostile_case(seed, device), out_offset=rng.randrange(9), lse_offset=rng.randrange(3))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("value", [INT32_MAX, INT32_MIN, -1, 1 << 30])
def test_every_bound_and_every_index_hostile(check, device, heads, value):
    """Lists that would be 2^31 entries long, if their bounds were believed."""
    case = cases.build("ragged", device=device, heads=heads)
    for name in ("kv_indices_prefix", "kv_indptr_prefix", "kv_indices_extend", "kv_indptr_extend"):
        check(case.with_(**{name: torch.full_like(getattr(case, name), value)}), name)
    alternating = torch.tensor([0, INT32_MAX], dtype=torch.int32, device=device).repeat(5)
    clean = {"unified_kv": torch.nan_to_num(case.unified_kv), "kv": torch.nan_to_num(case.kv)}
    check(case.with_(kv_indptr_prefix=alternating, kv_indptr_extend=alternating, **clean), "alternating bounds")
