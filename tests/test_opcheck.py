"""The two dispatcher operators under torch's own checks, and under torch.compile."""

from __future__ import annotations

import shutil

import pytest
import torch

import cases
import paged_prefill
from oracle import assert_close

OPS = torch.ops.paged_prefill
FUNCTIONAL = OPS.sparse_attn_v4_paged_prefill.default
OUT = OPS.sparse_attn_v4_paged_prefill_out.default


def functional_on_cpu(*arguments, return_lse=False, replicated_logit_shift=0.0):
    inputs, extra = arguments[:9], arguments[9:]
    return_lse, shift = (*extra, *(return_lse, replicated_logit_shift)[len(extra) :])
    out, lse = paged_prefill.reference(*inputs, True, shift)
    return out, lse if return_lse else lse.new_empty(0)


def out_on_cpu(*arguments, out, lse=None, replicated_logit_shift=0.0):
    inputs, extra = arguments[:9], arguments[9:]
    _, result = paged_prefill.reference(*inputs, True, *(extra or (replicated_logit_shift,)), out=out)
    if lse is not None:
        lse.copy_(result)


@pytest.fixture
def cpu_operators(monkeypatch):
    """Both operators with the reference on the CPU key, and fakes that take CPU tensors; undone afterwards."""
    from paged_prefill import _guards

    refuse = _guards.fail
    monkeypatch.setattr(_guards, "fail", lambda name, /, **values: None if name == "device" else refuse(name, **values))
    library = torch.library.Library("paged_prefill", "IMPL")
    library.impl(FUNCTIONAL, functional_on_cpu, "CPU", allow_override=True)
    library.impl(OUT, out_on_cpu, "CPU", allow_override=True)
    yield "cpu"
    library._destroy()


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, device):
    """The device to run on: the CPU through the reference, or a GPU as it is."""
    return request.getfixturevalue("cpu_operators") if request.param == "cpu" else device


@pytest.mark.parametrize("name", ["ragged", "no_sink", "lists_empty"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_O27_opcheck_functional(where, name, return_lse):
    case = cases.build(name, device=where, heads=5, head_dim=64)
    torch.library.opcheck(FUNCTIONAL, case.args(), {"return_lse": return_lse, "replicated_logit_shift": -0.5})


@pytest.mark.parametrize("name", ["ragged", "no_sink", "lists_empty"])
@pytest.mark.parametrize("with_lse", [False, True])
def test_O27_opcheck_out(where, name, with_lse):
    case = cases.build(name, device=where, heads=5, head_dim=64)
    lse = torch.empty(case.q.shape[:2], device=where) if with_lse else None
    torch.library.opcheck(OUT, case.args(), {"out": torch.empty_like(case.q), "lse": lse})


def test_O27_opcheck_out_is_q(where):
    case = cases.build("ragged", device=where, heads=5, head_dim=64)
    torch.library.opcheck(OUT, case.args(), {"out": case.q, "lse": None})


def run(*args):
    return paged_prefill.sparse_attn_v4_paged_prefill(*args, return_lse=True)


@pytest.fixture
def recompiles():
    """Starts from no compiled code; returns the number of graphs that were compiled since."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def without_nan(case):
    """No poison: the comparisons inside torch's checks take NaN for a difference."""
    return case.with_(unified_kv=case.unified_kv.nan_to_num(), kv=case.kv.nan_to_num())


def chunk(case, tokens):
    """The first tokens, in tensors of their own: of a view, torch.compile guards the base's sizes too."""
    part = case.take(0, tokens)
    names = ("q", "kv_indptr_prefix", "kv_indptr_extend")
    return part.with_(**{name: getattr(part, name).clone() for name in names})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_O27_fullgraph_with_dynamic_tokens(where, recompiles, backend):
    case = without_nan(cases.build("ragged", device=where, heads=5, head_dim=64))
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (9, 4, 7, 2, 6):
        part = chunk(case, tokens)
        for actual, expected in zip(compiled(*part.args()), run(*part.args()), strict=True):
            assert torch.equal(actual, expected)
    assert recompiles() == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_O27_no_tokens_under_compile(where, recompiles, backend):
    case = cases.build("ragged", device=where, heads=5, head_dim=64)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    out, lse = compiled(*case.take(0, 0).args())
    assert out.shape == (0, 5, 64)
    assert lse.shape == (0, 5)
    assert compiled(*case.take(0, 3).args())[0].shape == (3, 5, 64)


def test_O27_out_is_q_under_compile(where, recompiles):
    case = cases.build("ragged", device=where, heads=5, head_dim=64)
    expected, _ = run(*case.args())

    def in_place(q, *rest):
        paged_prefill.sparse_attn_v4_paged_prefill(q, *rest, out=q)
        return q * 2

    q = case.q.clone()
    doubled = torch.compile(in_place, fullgraph=True, backend="aot_eager")(q, *case.args()[1:])
    assert torch.equal(q, expected)
    assert torch.equal(doubled, expected * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("out", ["new", "given", "q"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_O27_inductor(device, recompiles, mode, out, return_lse):
    pytest.importorskip("triton", reason="torch's inductor needs triton on a GPU")
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("torch's inductor needs a C compiler, and none is on PATH")
    case = without_nan(cases.build("ragged", device=device))

    def layer(q, *rest):
        q = q * 0.5
        given = {"new": None, "given": torch.empty_like(q), "q": q}[out]
        result = paged_prefill.sparse_attn_v4_paged_prefill(q, *rest, return_lse=return_lse, out=given)
        return (result[0] + 1, result[1] * 2) if return_lse else result + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for scale in (1.0, 2.0, 3.0, 4.0):  # reduce-overhead records at the second call and replays from the third
        q = case.q * scale
        actual, expected = (function(q, *case.args()[1:]) for function in (compiled, layer))
        if return_lse:
            torch.testing.assert_close(actual[1], expected[1])
            actual, expected = actual[0], expected[0]
        assert_close(actual, expected.double())


@pytest.mark.gpu
def test_O27_guard_text_under_compile(device, recompiles):
    case = cases.build("ragged", device=device)
    compiled = torch.compile(run, fullgraph=True)
    wrong = case.with_(kv=case.kv.half())
    with pytest.raises(RuntimeError, match=r"kv dtype mismatch: kv=torch\.float16, q=torch\.bfloat16"):
        compiled(*wrong.args())
