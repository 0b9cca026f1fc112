"""The built kernels against the fp64 reference, on a GPU.

A test's name carries the id of the case it stands for: O1 is what was reported of kernels of this kind about pools
beyond 2^31 elements, and so on.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

import cases
from cases import INT32_MAX, INT32_MIN, csr, make, random_lists
from oracle import assert_close, assert_lse_close

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = (1, 2, 4, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 96, 128)
HEAD_DIMS = (8, 64, 72, 128, 256, 504, 512)
TILE_HEADS = (8, 16, 32, 64, 128)  # one for each head tile, and two tiles of 64


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=TILE_HEADS, ids=lambda h: f"h{h}")
def heads(request):
    return request.param


@pytest.fixture
def options(device, dtype, heads):
    return {"device": device, "dtype": dtype, "heads": heads}


# Every shape: each H with each head_dim, all small cases, guard words around both results.


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda d: f"d{d}")
@pytest.mark.parametrize("h", HEADS, ids=lambda h: f"h{h}")
def test_O16_every_head_count_and_head_dim(check, device, dtype, h, head_dim):
    for name in cases.BUILDERS:
        check(cases.build(name, device=device, dtype=dtype, heads=h, head_dim=head_dim))


@pytest.mark.parametrize("name", cases.LAYER_BUILDERS)
def test_layer_classes(check, options, name):
    check(cases.build(name, **options))


def test_layer_classes_at_full_length(call, expect, device, dtype, heads):
    from paged_prefill import _workload

    for layer in _workload.LAYERS.values():
        workload = _workload.build(layer, heads=heads, dtype=dtype, device=device, bucket=4104)
        case = cases.Case(layer.name, *workload.args())
        out, lse = call(case)
        spread = [*range(0, 4104, 97), 4095, 4096, 4103]
        expected_out, expected_lse = expect(case, spread)
        assert_close(out[spread], expected_out, layer.name)
        assert_lse_close(lse[spread], expected_lse, layer.name)
        assert bool(out.isfinite().all())


# O1..O3: sizes


@pytest.fixture(scope="module")
def huge_pool(device):
    """6,002,400 rows of 512, all NaN: 6.1 GB, past 2^31 elements."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    if free < 10 << 30:
        pytest.skip(f"needs 10 GiB of free GPU memory, {free / 2**30:.1f} are free")
    return torch.full((61 * 98_400, 512), float("nan"), dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("h", [8, 16, 32, 64])
@pytest.mark.parametrize("side", ["prefix", "extend"])
def test_O01_pool_beyond_2_31_elements(check, huge_pool, device, side, h):
    rows = [0, 1, 4_194_303, 4_194_304, 4_194_305, len(huge_pool) - 1, 2_000_000, 4_198_399]
    listed, other = [rows, rows[3:], [rows[5]] * 17], [[1], [], [2]]
    prefix, extend = (listed, other) if side == "prefix" else (other, listed)
    case = make(prefix, extend, name=f"O1 {side}", heads=h, device=device, tail=())
    huge_pool[rows] = torch.randn(len(rows), 512, device=device).bfloat16()
    check(case.with_(**{"unified_kv" if side == "prefix" else "kv": huge_pool}))
    huge_pool[rows] = float("nan")


@pytest.mark.parametrize("h", [8, 16, 32, 64])
@pytest.mark.parametrize("side", ["prefix", "extend"])
def test_O01_row_stride_of_a_layer_interleaved_pool(check, huge_pool, device, side, h):
    layer = huge_pool.view(98_400, 61, 512)[:, 7]  # stride 61 * 512: row 68,760 lies past 2^31 elements
    rows = [0, 68_700, 68_759, 68_760, 68_761, 98_399]
    listed, other = [rows, rows[2:], [rows[5]] * 17], [[1], [], [2]]
    prefix, extend = (listed, other) if side == "prefix" else (other, listed)
    case = make(prefix, extend, name=f"O1 strided {side}", heads=h, device=device, tail=())
    layer[rows] = torch.randn(len(rows), 512, device=device).bfloat16()
    check(case.with_(**{"unified_kv" if side == "prefix" else "kv": layer}))
    layer[rows] = float("nan")


def many_tokens(tokens, heads, device, head_dim=512):
    """One prefix row and one extend row a token; built without Python lists."""
    g = torch.Generator(device=device).manual_seed(tokens)
    normal = {"generator": g, "device": device, "dtype": torch.bfloat16}
    indptr = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    pick = lambda: torch.randint(0, 500, (tokens,), generator=g, device=device, dtype=torch.int32)  # noqa: E731
    return cases.Case(
        f"{tokens} tokens",
        torch.randn(tokens, heads, head_dim, **normal),
        torch.randn(500, head_dim, **normal),
        pick(),
        indptr,
        torch.randn(500, head_dim, **normal),
        pick(),
        indptr.clone(),
        torch.randn(heads, generator=g, device=device),
        head_dim**-0.5,
    )


def two_row_formula(case, start, end):
    """many_tokens' result in fp64 for tokens [start, end), all at once."""
    pairs = zip((case.unified_kv, case.kv), (case.kv_indices_prefix, case.kv_indices_extend), strict=True)
    rows = torch.stack([table[indices[start:end].long()] for table, indices in pairs], 1).double()
    z = case.softmax_scale * torch.einsum("thd,tkd->thk", case.q[start:end].double(), rows)
    sink = case.attn_sink.double().expand(z.shape[:2])[..., None]
    return torch.einsum("thk,tkd->thd", torch.cat((z, sink), 2).softmax(2)[..., :2], rows)


@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_O03_more_tokens_than_a_grid_dimension_of_16_bits(call, device, tokens):
    case = many_tokens(tokens, 8, device)
    out, _ = call(case)
    for start in range(0, tokens, 10_000):
        assert_close(out[start : start + 10_000], two_row_formula(case, start, min(start + 10_000, tokens)))


@pytest.mark.parametrize(("tokens", "h"), [(65_537, 64), (131_074, 32), (262_148, 16), (524_296, 8)])
def test_O02_q_and_out_beyond_2_31_elements(device, tokens, h):
    import paged_prefill

    free = torch.cuda.mem_get_info()[0]
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of free GPU memory, {free / 2**30:.1f} are free")
    case = many_tokens(tokens, h, device)
    out = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())
    for start, end in ((0, 500), (tokens // 2, tokens // 2 + 500), (tokens - 500, tokens)):
        assert_close(out[start:end], two_row_formula(case, start, end), f"tokens {start}..{end}")
    assert bool(out.isfinite().all())


# O4, O5: nothing to do


def test_O04_no_tokens(device, dtype):
    import paged_prefill

    empty = make([], [], pool_rows=0, kv_rows=0, device=device, dtype=dtype, tail=())
    out, lse = paged_prefill.sparse_attn_v4_paged_prefill(*empty.args(), return_lse=True)
    assert out.shape == (0, 16, 512)
    assert lse.shape == (0, 16)
    assert out.dtype == dtype


@pytest.mark.parametrize("name", ["lists_empty", "all_holes", "tables_empty"])
def test_O04_O09_tokens_without_rows(call, options, name):
    for sink in (True, False):
        case = cases.build(name, **options)
        case = case if sink else case.with_(attn_sink=None)
        out, lse = call(case)
        assert torch.equal(out, torch.zeros_like(out))
        expected = case.attn_sink if sink else torch.full((case.q.size(1),), float("-inf"), device=lse.device)
        torch.testing.assert_close(lse, expected.expand_as(lse), rtol=1e-6, atol=1e-6)


def test_O05_bucket_longer_than_indptr(call, device):
    import paged_prefill

    tokens, bucket = 342, 352
    rng = random.Random(5)
    lists = random_lists([rng.randrange(40) for _ in range(tokens)], 64, rng)
    case = make(lists, lists, kv_rows=64, device=device)
    padded = case.with_(q=torch.randn(bucket, 16, 512, device=device).bfloat16())
    with pytest.raises(RuntimeError, match=r"343.*353|353.*343"):
        paged_prefill.sparse_attn_v4_paged_prefill(*padded.args())

    repeat = lambda p: torch.cat((p, p[-1:].expand(bucket - tokens)))  # noqa: E731
    padded = padded.with_(
        kv_indptr_prefix=repeat(case.kv_indptr_prefix), kv_indptr_extend=repeat(case.kv_indptr_extend)
    )
    out, lse = call(padded)
    assert torch.equal(out[tokens:], torch.zeros_like(out[tokens:]))
    torch.testing.assert_close(lse[tokens:], case.attn_sink.expand_as(lse[tokens:]), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:tokens], call(padded.take(0, tokens))[0])


# O6..O9: what is listed and what is not


@pytest.mark.parametrize("tokens", [64, 65, 80, 4096])
def test_O06_list_tails_never_matter(call, device, heads, tokens):
    rng = random.Random(tokens)
    lists = random_lists([rng.randrange(12) for _ in range(tokens)], 64, rng)
    exact, hostile = (
        make(lists, lists, kv_rows=64, heads=heads, device=device, tail=tail) for tail in ((), cases.HOSTILE_TAIL * 30)
    )
    for a, b in zip(call(exact), call(hostile), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_O07_unselected_rows_are_never_read(check, options, length):
    rng = random.Random(length)
    lists = random_lists([length] * 4, 200, rng, holes=0.5)
    lists[1] = [-1] * length
    lists[2] = [-1] * (length - 1) + [5]
    out, _ = check(make(lists, lists[::-1], pool_rows=200, kv_rows=200, **options))
    assert bool(out.isfinite().all())


def test_O07_nan_row_reaches_its_own_token_only(call, options):
    """The tokens before, between and behind the poisoned ones keep their very bits."""
    rng = random.Random(7)
    lists = random_lists([20, 3, 64, 1, 0, 130, 7, 65], 64, rng)
    case = make(lists, lists[::-1], kv_rows=64, **options)
    clean, clean_lse = call(case)
    poisoned = case.unified_kv.clone()
    poisoned[0] = float("nan")
    prefix = [list(one) for one in lists]
    prefix[1][1] = prefix[5][129] = 0
    indices, _ = csr(prefix, options["device"], tail=cases.HOSTILE_TAIL)
    out, lse = call(case.with_(unified_kv=poisoned, kv_indices_prefix=indices))
    hit = [1, 5]
    rest = [t for t in range(8) if t not in hit]
    assert bool(out[hit].isnan().all())
    assert bool(lse[hit].isnan().all())
    assert torch.equal(out[rest], clean[rest])
    assert torch.equal(lse[rest], clean_lse[rest])


@pytest.mark.parametrize("value", [64, 69, 2147480000, -2, INT32_MAX, INT32_MIN])
def test_O08_index_outside_its_table_is_a_hole(call, options, value):
    rng = random.Random(8)
    lists = random_lists([17, 40, 1, 64], 64, rng, holes=0.4)
    replaced = [[value if row == -1 else row for row in one] for one in lists]
    expected = call(make(lists, lists, kv_rows=64, **options))
    actual = call(make(replaced, replaced, kv_rows=64, **options))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["prefix_empty", "extend_empty"])
def test_O09_one_side_empty(check, options, name):
    check(cases.build(name, **options))


# O10, O11, O14, O21: values


@pytest.mark.parametrize("value", [0.5, 100.0, -100.0, 1e4, -1e4, float("-inf"), "mixed"])
def test_O10_sinks(check, call, options, value):
    case = cases.build("sinks", **options)
    if value != "mixed":
        case = case.with_(attn_sink=torch.full_like(case.attn_sink, value))
    out, _ = check(case)
    assert not bool(out.isnan().any())
    plain, plain_lse = call(case.with_(attn_sink=None))
    share = torch.sigmoid(plain_lse.double() - case.attn_sink.double())
    share = share.nan_to_num(nan=1.0)  # no row and no sink: -inf - -inf
    for h in range(case.q.size(1)):
        assert_close(out[:, h : h + 1], (plain.double() * share[..., None])[:, h : h + 1], f"head {h}")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_O11_logits_of_a_million(check, options, sign):
    case = make([[1, 2, 3] * 6, [1], []], [[1], [2] * 40, []], kv_rows=4, **options)
    size = (1e6 / (512 * case.softmax_scale)) ** 0.5
    case.unified_kv[1:4] = size * sign
    case.kv[1:3] = size * sign
    out, _ = check(case.with_(q=torch.full_like(case.q, size)))
    assert bool(out.isfinite().all())


def test_O11_one_logit_far_above_the_others(check, options):
    case = make([list(range(1, 60)), list(range(1, 60))[::-1]], [[1], [1]], **options)
    case.q.fill_(4.0)
    case.unified_kv[1:60] = torch.linspace(-4, 4, 59, device=case.q.device)[:, None].to(case.q.dtype)
    check(case)


def test_O14_lse_is_the_natural_logarithm(call, options):
    lists = random_lists([1, 20, 70], 64, random.Random(14))
    case = make(lists, [[]] * 3, **options)
    _, lse = call(case)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == (case.q.shape[:2], torch.float32, True)
    for t, rows in enumerate(lists):
        z = case.softmax_scale * (case.q[t].double() @ case.unified_kv[rows].double().T)
        assert_lse_close(lse[t : t + 1], torch.logsumexp(torch.cat((z, case.attn_sink.double()[:, None]), 1), 1)[None])


def test_O21_fp16_near_its_limit(check, device, heads):
    case = make([[1] * 8192, [1, 2]], [[], [1]], device=device, dtype=torch.float16, heads=heads)
    case.unified_kv[1] = 6e4
    case.unified_kv[2] = -6e4
    case.kv[1] = 6e4
    case = case.with_(q=torch.full_like(case.q, 2.0**-14))
    out, _ = check(case)
    assert bool(out.isfinite().all())


# O15, O20: calls cut into pieces


def merge(parts):
    """fp64 (out, lse) of several partial calls."""
    outs = torch.stack([out.double() for out, _ in parts])
    lses = torch.stack([lse.double() for _, lse in parts])
    lse = torch.logsumexp(lses, 0)
    weight = (lses - lse).exp().nan_to_num(nan=0.0)  # -inf - -inf: no part has a row
    return (outs * weight[..., None]).sum(0), lse


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_O15_prefix_split_over_ranks_and_merged(call, expect, options, ranks):
    rng = random.Random(15 + ranks)
    prefix = random_lists([40, 3, 0, 129, 17], 64, rng, holes=0.2)
    extend = random_lists([5, 0, 0, 33, 1], 40, rng)
    whole = make(prefix, extend, kv_rows=40, **options)
    parts = []
    for rank in range(ranks):
        share = [one[rank::ranks] if rank else one[::ranks] for one in prefix]
        share[1] = prefix[1] if rank == 0 else []  # the others' share of this token is empty
        indices, indptr = csr(share, options["device"])
        shift = -math.log(ranks)
        parts.append(
            call(whole.with_(kv_indices_prefix=indices, kv_indptr_prefix=indptr, replicated_logit_shift=shift))
        )
    out, lse = merge(parts)
    expected_out, expected_lse = expect(whole)
    assert_close(out.to(whole.q.dtype), expected_out)
    assert_lse_close(lse.float(), expected_lse)


def test_O20_call_cut_into_four_keeps_its_bits(call, options):
    rng = random.Random(20)
    lists = random_lists([rng.randrange(70) for _ in range(37)], 64, rng, holes=0.2)
    case = make(lists, lists[::-1], kv_rows=64, **options)
    whole = call(case)
    parts = [call(case.take(start, end)) for start, end in ((0, 9), (9, 10), (10, 30), (30, 37))]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_tokens_do_not_depend_on_each_other(call, options):
    """Alone, reversed, and among tokens with much longer lists, a token has the same bits."""
    rng = random.Random(21)
    lists = random_lists([rng.choice((0, 1, 17, 64, 65, 200)) for _ in range(150)], 64, rng)
    case = make(lists, lists[::-1], kv_rows=64, **options)
    whole, whole_lse = call(case)
    for t in (0, 1, 77, 149):
        out, lse = call(case.take(t, t + 1))
        assert torch.equal(out[0], whole[t])
        assert torch.equal(lse[0], whole_lse[t])
    backwards = make(lists[::-1], lists, kv_rows=64, **options)
    tables = {"unified_kv": case.unified_kv, "kv": case.kv, "attn_sink": case.attn_sink}
    assert torch.equal(call(backwards.with_(q=case.q.flip(0), **tables))[0].flip(0), whole)


def test_repeated_calls_have_the_same_bits(call, options):
    rng = random.Random(22)
    lists = random_lists([rng.randrange(300) for _ in range(300)], 64, rng)
    case = make(lists, lists[::-1], kv_rows=64, **options)
    first = call(case)
    for _ in range(5):
        for a, b in zip(call(case), first, strict=True):
            assert torch.equal(a, b)


# O17: lengths


def test_O17_lengths_mixed(check, options):
    lengths = (0, 1, 15, 16, 17, 127, 128, 192, 256, 511, 512, 2047, 2048, 8192)
    rng = random.Random(17)
    prefix = random_lists(lengths, 9000, rng)
    extend = random_lists(lengths[::-1], 9000, rng)
    check(make(prefix, extend, pool_rows=9000, kv_rows=9000, **options))


# O12, O13, O18, O19: how the tensors come


def through_python(case, **changes):
    import paged_prefill

    return paged_prefill.sparse_attn_v4_paged_prefill(*case.with_(**changes).args(), return_lse=True)


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("length", [128, 15])
def test_O12_sink_of_another_head_count_is_refused(device, length):
    case = cases.build("ragged", device=device)
    with pytest.raises(RuntimeError, match=rf"attn_sink[\s\S]*({length}[\s\S]*16|16[\s\S]*{length})"):
        through_python(case, attn_sink=torch.zeros(length, device=device))


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16])
def test_O13_sink_dtypes_are_converted(device, other):
    case = cases.build("ragged", device=device)
    sink = case.attn_sink.to(other)
    assert same(through_python(case, attn_sink=sink), through_python(case, attn_sink=sink.float()))


def test_O13_sink_in_another_form(device):
    case = cases.build("ragged", device=device)
    spread = torch.full((32,), float("nan"), device=device)
    spread[::2] = case.attn_sink
    assert same(through_python(case, attn_sink=spread[::2]), through_python(case))
    offset = torch.cat((spread[:1], case.attn_sink))[1:]
    assert same(through_python(case, attn_sink=offset), through_python(case))
    for refused in (case.attn_sink.double(), case.attn_sink.cpu(), case.attn_sink[None]):
        with pytest.raises(RuntimeError, match="attn_sink"):
            through_python(case, attn_sink=refused)
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="attn_sink"):
            through_python(case, attn_sink=case.attn_sink.to("cuda:1"))


def as_wide_rows(t):
    wide = torch.full((*t.shape[:-1], 576), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., : t.size(-1)] = t
    return wide[..., : t.size(-1)]


def as_every_second(t):
    spread = torch.full((t.size(0), 2, *t.shape[1:]), float("nan"), dtype=t.dtype, device=t.device)
    spread[:, 0] = t
    return spread.flatten(0, 1)[::2]


def as_shifted(t, elements=1):
    flat = torch.full((t.numel() + elements,), float("nan"), dtype=t.dtype, device=t.device)
    flat[elements:] = t.flatten()
    return flat[elements:].view(t.shape)


def as_odd_rows(t):
    wide = torch.full((*t.shape[:-1], t.size(-1) + 1), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., : t.size(-1)] = t
    return wide[..., : t.size(-1)]


def as_heads_first(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


VIEWS = {
    "576 of 512": as_wide_rows,
    "every second row": as_every_second,
    "one element further": as_shifted,
    "eight elements further": lambda t: as_shifted(t, 8),
    "odd row stride": as_odd_rows,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["q", "unified_kv", "kv"])
def test_O18_views_are_read_in_place(call, check, device, heads, name, view):
    case = cases.build("ragged", device=device, heads=heads)
    out, _ = check(case.with_(**{name: VIEWS[view](getattr(case, name))}), view)
    plain, _ = call(case)
    assert_close(out, plain.double())


def test_O18_transposed_q(call, device, heads):
    case = cases.build("ragged", device=device, heads=heads)
    assert same(call(case.with_(q=as_heads_first(case.q))), call(case))
    out = through_python(case, q=as_heads_first(case.q))[0]
    assert out.is_contiguous()


@pytest.mark.parametrize("name", ["unified_kv", "kv"])
def test_O18_pool_with_another_last_stride_is_refused(device, name):
    case = cases.build("ragged", device=device)
    with pytest.raises(RuntimeError, match=name):
        through_python(case, **{name: getattr(case, name).T.contiguous().T})


@pytest.mark.parametrize("offset", [1, 2, 7])
def test_O18_results_at_any_address(check, device, heads, offset):
    check(cases.build("ragged", device=device, heads=heads), out_offset=offset, lse_offset=offset)


def test_out_may_be_q(device, dtype, heads):
    import paged_prefill

    rng = random.Random(30)
    lists = random_lists([rng.randrange(70) for _ in range(300)], 64, rng)
    case = make(lists, lists[::-1], kv_rows=64, device=device, dtype=dtype, heads=heads)
    expected = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())
    q = case.q.clone()
    out, _ = paged_prefill.sparse_attn_v4_paged_prefill(*case.with_(q=q).args(), return_lse=True, out=q)
    assert out is q
    assert torch.equal(q, expected)


INDEX_NAMES = ("kv_indices_prefix", "kv_indptr_prefix", "kv_indices_extend", "kv_indptr_extend")


@pytest.mark.parametrize("name", INDEX_NAMES)
def test_O19_index_tensors_in_another_form(device, name):
    case = cases.build("ragged", device=device)
    expected = through_python(case)
    tensor = getattr(case, name)
    spread = torch.full((2 * tensor.numel(),), INT32_MAX, dtype=torch.int32, device=device)
    spread[::2] = tensor
    for form in (tensor.long(), spread[::2], spread.long()[::2], as_shifted(tensor.float()).int()):
        assert same(through_python(case, **{name: form}), expected)
    for refused in (tensor[None], tensor.cpu(), tensor.float(), tensor.to(torch.int16), tensor.bool()):
        with pytest.raises(RuntimeError, match=name):
            through_python(case, **{name: refused})


@pytest.mark.parametrize("value", [2**32 + 5, 2**32, 2**31, -(2**32) + 5, -(2**31) - 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("name", ["kv_indices_prefix", "kv_indices_extend"])
def test_O19_int64_values_beyond_int32_are_holes(device, name, value):
    case = cases.build("holes", device=device)
    indices = getattr(case, name).long()
    replaced = torch.where(indices == -1, value, indices)
    assert same(through_python(case, **{name: replaced}), through_python(case))


def test_O19_int64_bounds_beyond_int32_are_clamped(check, device):
    case = cases.build("hostile_indptr", device=device)
    bounds = case.kv_indptr_prefix.long()
    bounds[bounds == INT32_MAX] = 2**32 + 3
    bounds[bounds == INT32_MIN] = -(2**32) + 3
    assert same(through_python(case, kv_indptr_prefix=bounds), through_python(case))
