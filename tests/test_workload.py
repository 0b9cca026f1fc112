"""The workload generator makes the lists that a server would: causal, within bounds, window and top-k respected."""

from __future__ import annotations

import itertools

import pytest
import torch

from paged_prefill import _workload
from paged_prefill._workload import BLOCK, LAYERS, WINDOW, Request

REQUESTS = (Request(0, 37), Request(500, 200), Request(1000, 1), Request(4096, 130), Request(127, 129))


def build(layer, requests=REQUESTS, **options):
    return _workload.build(LAYERS[layer], requests, heads=2, head_dim=8, **options)


def lists(indices, indptr):
    indices, indptr = indices.tolist(), indptr.tolist()
    return [indices[a:b] for a, b in itertools.pairwise(indptr)]


def tokens(requests):
    """(request, its first row in kv, position) of each token."""
    row = 0
    for number, request in enumerate(requests):
        for i in range(request.chunk):
            yield number, row, request.context + i
        row += request.chunk


def split(prefix, position, request):
    """The compressed part and the ring part of one token's prefix list."""
    before = max(0, request.context - max(0, position - WINDOW + 1))
    return prefix[: len(prefix) - before], prefix[len(prefix) - before :]


@pytest.mark.parametrize("layer", LAYERS)
def test_extend_lists_are_the_window_inside_the_chunk(layer):
    workload = build(layer)
    extend = lists(workload.kv_indices_extend, workload.kv_indptr_extend)
    assert len(extend) == sum(r.chunk for r in REQUESTS)
    for (number, row, position), rows in zip(tokens(REQUESTS), extend, strict=True):
        in_chunk = position - REQUESTS[number].context
        assert rows == list(range(row + max(0, in_chunk - WINDOW + 1), row + in_chunk + 1))


@pytest.mark.parametrize("layer", LAYERS)
def test_ring_rows_are_the_window_before_the_chunk(layer):
    workload = build(layer)
    slots = {}
    for (number, _, position), prefix in zip(
        tokens(REQUESTS), lists(workload.kv_indices_prefix, workload.kv_indptr_prefix), strict=True
    ):
        request = REQUESTS[number]
        _, ring = split(prefix, position, request)
        positions = range(max(0, position - WINDOW + 1), request.context)
        assert [row % WINDOW for row in ring] == [p % WINDOW for p in positions]
        slots.setdefault(number, set()).update(row // WINDOW for row in ring)
        assert len(ring) + min(position - request.context + 1, WINDOW) == min(position + 1, WINDOW)
    owned = [slots[number] for number in slots if slots[number]]
    assert all(len(slot) == 1 for slot in owned)
    assert len(set().union(*owned)) == len(owned), "two requests share a ring"


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "exact"])
@pytest.mark.parametrize("layer", ["csa-512", "csa-1024", "hca"])
def test_compressed_rows_are_causal_distinct_and_own(layer, padded):
    workload, kind = build(layer, padded=padded), LAYERS[layer]
    rows_of = {number: set() for number in range(len(REQUESTS))}
    ring_rows = int(len(REQUESTS) * 1.25) * WINDOW
    for (number, _, position), prefix in zip(
        tokens(REQUESTS), lists(workload.kv_indices_prefix, workload.kv_indptr_prefix), strict=True
    ):
        request = REQUESTS[number]
        compressed, _ = split(prefix, position, request)
        valid = [row for row in compressed if row >= 0]
        visible = (position + 1) // kind.ratio
        assert len(valid) == len(set(valid)) == (min(visible, kind.top_k) if kind.top_k else visible)
        assert compressed[: len(valid)] == valid, "holes come after the rows"
        most = (request.context + request.chunk) // kind.ratio
        assert len(compressed) == ((min(most, kind.top_k) if kind.top_k else most) if padded else len(valid))
        assert all(ring_rows <= row < len(workload.unified_kv) for row in valid)
        rows_of[number].update(valid)
        assert len(rows_of[number]) <= visible, "a row of the future, or of another request"
    pages = [{(row - ring_rows) // (BLOCK // kind.ratio) for row in rows} for rows in rows_of.values()]
    assert len(set().union(*pages)) == sum(map(len, pages)), "two requests share a page"


@pytest.mark.parametrize("layer", LAYERS)
def test_everything_lies_within_its_table(layer):
    workload = build(layer)
    assert -1 <= int(workload.kv_indices_prefix.min())
    assert int(workload.kv_indices_prefix.max()) < len(workload.unified_kv)
    assert 0 <= int(workload.kv_indices_extend.min())
    assert int(workload.kv_indices_extend.max()) < len(workload.kv)
    for indices, indptr in (
        (workload.kv_indices_prefix, workload.kv_indptr_prefix),
        (workload.kv_indices_extend, workload.kv_indptr_extend),
    ):
        assert indices.dtype == indptr.dtype == torch.int32
        assert int(indptr[0]) == 0
        assert int(indptr[-1]) == indices.numel()
        assert bool((indptr.diff() >= 0).all())
    valid = int((workload.kv_indices_prefix >= 0).sum()) + workload.kv_indices_extend.numel()
    assert workload.keys == valid
    assert workload.flops == 4 * valid * 2 * 8
    assert workload.gather_bytes == valid * 8 * 2


def test_hca_lists_are_in_order_and_csa_lists_are_not():
    prefix = lists(*(lambda w: (w.kv_indices_prefix, w.kv_indptr_prefix))(build("hca", (Request(4000, 3),), spare=0)))
    table = prefix[0][: 4001 // 128]
    assert prefix[2][: len(table)] == table
    csa = build("csa-512", (Request(4000, 3),))
    first = lists(csa.kv_indices_prefix, csa.kv_indptr_prefix)[0][:512]
    assert first != sorted(first)


@pytest.mark.parametrize("layer", LAYERS)
def test_same_seed_same_workload(layer):
    one, two, other = build(layer), build(layer), build(layer, seed=1)
    same = [torch.equal(a, b) for a, b in zip(one.args()[:-1], two.args()[:-1], strict=True)]
    assert all(same)
    assert not torch.equal(one.q, other.q)


def test_bucket_appends_tokens_with_empty_lists():
    workload = build("csa-512", bucket=512)
    assert workload.q.size(0) == 512
    assert workload.kv_indptr_prefix.numel() == workload.kv_indptr_extend.numel() == 513
    padding = sum(r.chunk for r in REQUESTS)
    assert len(set(workload.kv_indptr_prefix[padding:].tolist())) == 1
    assert len(set(workload.kv_indptr_extend[padding:].tolist())) == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_edges_of_the_batch(layer):
    first_token = build(layer, (Request(0, 1),))
    assert first_token.keys == 1
    nothing = build(layer, ())
    assert nothing.q.shape == (0, 2, 8)
    assert nothing.keys == 0


def test_default_batch_has_4096_tokens_and_a_first_chunk():
    assert sum(r.chunk for r in _workload.REQUESTS) == 4096
    assert any(r.context == 0 for r in _workload.REQUESTS)
