"""The reference against the dense formula of oracle.py, and its edge rows one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import oracle
from paged_prefill import reference

FP64 = {"compute_dtype": torch.float64, "out_dtype": torch.float64}


def agree(case):
    out, lse = reference(*case.args(), True, case.replicated_logit_shift, **FP64)
    expected_out, expected_lse = oracle.dense(*case.args(), case.replicated_logit_shift)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [*cases.BUILDERS, *cases.LAYER_BUILDERS])
def test_named_cases_match_the_dense_formula(name, dtype):
    agree(cases.build(name, heads=7, head_dim=72, dtype=dtype))


list_of_rows = st.lists(
    st.integers(-3, 14) | st.sampled_from([cases.INT32_MAX, cases.INT32_MIN, 2**32 + 5, 2**40, -(2**40)]), max_size=24
)


@settings(max_examples=150, deadline=None)
@given(
    prefix=list_of_rows,
    extend=list_of_rows,
    prefix_bounds=st.lists(st.integers(-4, 30) | st.just(2**33), min_size=4, max_size=4),
    extend_bounds=st.lists(st.integers(-4, 30) | st.just(-(2**33)), min_size=4, max_size=4),
    rows=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    heads=st.integers(1, 3),
    sink=st.sampled_from([None, 0.0, 50.0, -1e4, float("-inf")]),
    shift=st.sampled_from([0.0, -math.log(3), 2.0]),
    seed=st.integers(0, 1000),
)
def test_any_lists_and_bounds_match_the_dense_formula(
    prefix, extend, prefix_bounds, extend_bounds, rows, heads, sink, shift, seed
):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g).bfloat16()  # noqa: E731
    agree(
        cases.Case(
            "any",
            normal(3, heads, 16),
            normal(rows[0], 16),
            torch.tensor(prefix, dtype=torch.int64),
            torch.tensor(prefix_bounds, dtype=torch.int64),
            normal(rows[1], 16),
            torch.tensor(extend, dtype=torch.int64),
            torch.tensor(extend_bounds, dtype=torch.int64),
            None if sink is None else torch.full((heads,), sink),
            0.3,
            shift,
        )
    )


def test_empty_token_is_zero_with_lse_of_the_sink():
    case = cases.build("lists_empty", heads=4, head_dim=8)
    out, lse = reference(*case.args(), True, 0.25)
    assert torch.equal(out, torch.zeros_like(case.q))
    assert torch.equal(lse, (case.attn_sink + 0.25).expand(3, 4))
    out, lse = reference(*case.with_(attn_sink=None).args(), True)
    assert torch.equal(out, torch.zeros_like(case.q))
    assert torch.equal(lse, torch.full((3, 4), float("-inf")))


def test_nan_row_reaches_its_own_token_only():
    case = cases.make([[1, 2], [3, 4], [1]], [[0], [1], []], heads=2, head_dim=8)
    case.unified_kv[4, 5] = float("nan")
    out = reference(*case.args())
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_dtypes_of_the_results():
    case = cases.build("ragged", heads=2, head_dim=8, dtype=torch.float16)
    assert reference(*case.args()).dtype == torch.float16
    out, lse = reference(*case.args(), True, out_dtype=torch.float32)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    out, lse = reference(*case.args(), True, **FP64)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


def test_fp32_is_close_to_fp64():
    case = cases.build("sharp", heads=5, head_dim=64)
    exact = reference(*case.args(), **FP64)
    oracle.assert_close(reference(*case.args(), out_dtype=torch.float32), exact)
    oracle.assert_close(reference(*case.args()), exact)


def test_out_may_be_q_and_tokens_selects():
    case = cases.build("ragged", heads=3, head_dim=8)
    whole = reference(*case.args())
    assert torch.equal(reference(*case.args(), tokens=[8, 0, 3]), whole[[8, 0, 3]])
    assert torch.equal(reference(*case.args(), tokens=[]), whole[:0])
    q = case.q.clone()
    assert reference(*case.with_(q=q).args(), out=q) is q
    assert torch.equal(q, whole)


def test_sliced_calls_equal_the_whole():
    case = cases.build("offset_lists", heads=3, head_dim=8)
    parts = [reference(*case.take(t, t + 2).args()) for t in (0, 2)]
    assert torch.equal(torch.cat(parts), reference(*case.args()))


def test_layer_views_of_a_pool_are_read_in_place():
    case = cases.build("ragged", heads=3, head_dim=8)
    interleaved = torch.full((64, 5, 8), float("nan"), dtype=case.q.dtype)
    interleaved[:, 3] = case.unified_kv
    assert torch.equal(reference(*case.with_(unified_kv=interleaved[:, 3]).args()), reference(*case.args()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"q": c.q[:, 0]}, "q has 2 dimensions, needs 3"),
        (lambda c: {"unified_kv": c.unified_kv[:, :4]}, "unified_kv=4"),
        (lambda c: {"kv_indptr_prefix": c.kv_indptr_prefix[:-1]}, r"has shape \(9,\), needs \(10,\)"),
        (lambda c: {"kv_indptr_extend": c.kv_indptr_extend[None]}, r"kv_indptr_extend has shape \(1, 10\)"),
        (lambda c: {"attn_sink": c.attn_sink.repeat(2)}, r"attn_sink has shape \(6,\), needs \(3,\)"),
    ],
    ids=["rank", "head_dim", "indptr-length", "indptr-rank", "sink"],
)
def test_shapes_that_do_not_fit_are_named(change, text):
    case = cases.build("ragged", heads=3, head_dim=8)
    with pytest.raises(RuntimeError, match=text):
        reference(*case.with_(**change(case)).args())


def test_compute_dtype_is_checked():
    case = cases.build("one_token", heads=1, head_dim=8)
    with pytest.raises(RuntimeError, match=r"compute_dtype is torch\.bfloat16"):
        reference(*case.args(), compute_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="out has shape"):
        reference(*case.args(), out=torch.empty(2, 1, 8))


# The comparison is a test's own instrument: it must see what it is there to see.


def test_comparison_sees_one_wrong_token_among_many():
    expected = torch.randn(4000, 2, 8, dtype=torch.float64)
    actual = expected.bfloat16()
    oracle.assert_close(actual, expected)
    actual[1234, 1, 3] += 1.0
    with pytest.raises(AssertionError, match=r"\(1234, 1, 3\)"):
        oracle.assert_close(actual, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_comparison_looks_at_special_values_first(value):
    expected = torch.randn(5, 2, 8, dtype=torch.float64)
    actual = expected.bfloat16()
    actual[3, 0, 2] = value
    with pytest.raises(AssertionError, match=r"1 of 80 places.*\(3, 0, 2\)"):
        oracle.assert_close(actual, expected)
    expected[3, 0, 2] = value
    oracle.assert_close(actual, expected)


def test_comparison_takes_zero_for_zero_only():
    zeros = torch.zeros(2, 1, 8, dtype=torch.float64)
    oracle.assert_close(zeros.bfloat16(), zeros)
    oracle.assert_close(torch.zeros(0, 1, 8).bfloat16(), torch.zeros(0, 1, 8, dtype=torch.float64))
    with pytest.raises(AssertionError):
        oracle.assert_close(zeros.bfloat16() + 1e-3, zeros)


def test_lse_comparison():
    expected = torch.tensor([[1.0, float("-inf")], [-700.0, 3.0]], dtype=torch.float64)
    oracle.assert_lse_close(expected.float(), expected)
    with pytest.raises(AssertionError, match=r"\(1, 1\)"):
        oracle.assert_lse_close(expected.float() + torch.tensor([[0, 0], [0, 0.01]]), expected)
