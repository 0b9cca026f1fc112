"""Fake and meta tensors, torch.compile and opcheck, all without a GPU."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import paged_prefill
from paged_prefill import _guards, reference
from test_guards import GOOD, ROWS, Spec, place

# It prints each error with a traceback before it raises it.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True

operator = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill
out_operator = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill_out


def empty(spec: Spec) -> torch.Tensor:
    if spec.strides:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=spec.device)
    return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)


def inputs_of(arguments):
    return {name: value for name, value in arguments.items() if name not in ("out", "lse")}


def wrong_texts(function, arguments, expected):
    """[(expected, text)] if the call does not fail with that first line, else []."""
    try:
        function(**arguments)
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    return [] if text.splitlines()[0] == expected else [(expected, text)]


def test_fake_cuda_tensors_meet_the_same_guards():
    wrong = []
    with FakeTensorMode():
        for changes, expected in ROWS:
            arguments = place({**GOOD, **changes}, empty)
            wrong += wrong_texts(out_operator, arguments, expected)
            if not changes.keys() & {"out", "lse"}:
                wrong += wrong_texts(operator, inputs_of(arguments), expected)
                wrong += wrong_texts(paged_prefill.sparse_attn_v4_paged_prefill, inputs_of(arguments), expected)
    assert not wrong


def test_meta_tensors_meet_the_guards_but_the_first():
    wrong = []
    for changes, expected in ROWS:
        if expected.startswith("Triton") or "device mismatch" in expected:
            continue  # meta tensors have one device
        arguments = place({**GOOD, **changes}, lambda spec: empty(spec.on("meta")))
        wrong += wrong_texts(out_operator, arguments, expected)
    assert not wrong


@pytest.mark.parametrize("device", ["cuda:0", "meta"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_results_of_fake_tensors(device, index_dtype):
    with FakeTensorMode():
        specs = {name: spec.on(device) if isinstance(spec, Spec) else spec for name, spec in GOOD.items()}
        for name, spec in specs.items():
            if name.startswith("kv_ind"):
                specs[name] = Spec(spec.shape, index_dtype, device)
        arguments = place(specs, empty)
        inputs = inputs_of(arguments)
        out, lse = paged_prefill.sparse_attn_v4_paged_prefill(**inputs, return_lse=True)
        assert (out.shape, out.dtype, out.device) == ((3, 4, 64), torch.bfloat16, torch.device(device))
        assert (lse.shape, lse.dtype, lse.device) == ((3, 4), torch.float32, torch.device(device))
        assert out.is_contiguous() and lse.is_contiguous()
        assert paged_prefill.sparse_attn_v4_paged_prefill(**inputs, out=inputs["q"]) is inputs["q"]
        out, lse = operator(**inputs)
        assert out.shape == (3, 4, 64)
        assert lse.shape == (0,)
        assert operator(**inputs, return_lse=True)[1].shape == (3, 4)
        assert out_operator(**arguments) is None


# What follows runs on the CPU: the reference stands in for the kernel, and the guards take a CPU tensor.
@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(_guards, "DEVICE_TYPES", (*_guards.DEVICE_TYPES, "cpu"))
    library = torch.library.Library("paged_prefill", "IMPL")

    def functional(*arguments, return_lse=False, replicated_logit_shift=0.0):
        q = arguments[0]
        tail = arguments[9:] or (return_lse, replicated_logit_shift)
        out, lse = reference(*arguments[:9], True, *tail[1:])
        return out, lse if tail[0] else q.new_empty(0, dtype=torch.float32)

    def into(*arguments, out, lse=None, replicated_logit_shift=0.0):
        shift = arguments[9] if len(arguments) > 9 else replicated_logit_shift
        result, sums = reference(*arguments[:9], True, shift)
        out.copy_(result)
        if lse is not None:
            lse.copy_(sums)

    library.impl("sparse_attn_v4_paged_prefill", functional, "CPU", allow_override=True)
    library.impl("sparse_attn_v4_paged_prefill_out", into, "CPU", allow_override=True)
    yield
    library._destroy()


# No two sizes are equal or follow from each other, since a compiler would take that for a rule.
def example(T=6, H=4, D=64, index_dtype=torch.int32):
    generator = torch.Generator().manual_seed(T)
    return {
        "q": torch.randn(T, H, D, generator=generator).to(torch.bfloat16),
        "unified_kv": torch.randn(23, D, generator=generator).to(torch.bfloat16),
        "kv_indices_prefix": torch.randint(-1, 23, (2 * T,), generator=generator).to(index_dtype),
        "kv_indptr_prefix": torch.arange(0, 2 * T + 1, 2, dtype=index_dtype),
        "kv": torch.randn(29, D, generator=generator).to(torch.bfloat16),
        "kv_indices_extend": torch.randint(-1, 29, (3 * T,), generator=generator).to(index_dtype),
        "kv_indptr_extend": torch.arange(0, 3 * T + 1, 3, dtype=index_dtype),
        "attn_sink": torch.randn(H, generator=generator),
        "softmax_scale": 0.125,
    }


def test_opcheck(on_cpu):
    arguments = example()
    positional = tuple(arguments.values())
    torch.library.opcheck(operator.default, positional)
    torch.library.opcheck(operator.default, (*positional, True, -0.5))
    out, lse = torch.empty_like(arguments["q"]), torch.empty(6, 4)
    torch.library.opcheck(out_operator.default, positional, {"out": out, "lse": lse})
    torch.library.opcheck(out_operator.default, positional, {"out": out})
    torch.library.opcheck(out_operator.default, positional, {"out": arguments["q"]})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_one_graph_serves_every_number_of_tokens(on_cpu, backend, index_dtype):
    torch._dynamo.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    def step(arguments):
        out, lse = paged_prefill.sparse_attn_v4_paged_prefill(**arguments, return_lse=True)
        return out * 1, lse

    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    seen = None
    for tokens in (6, 8, 11, 13):
        arguments = example(tokens, index_dtype=index_dtype)
        out, lse = compiled(arguments)
        expected, expected_lse = reference(**arguments, return_lse=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        seen = seen or len(graphs)
        assert len(graphs) == seen, f"recompiled for T = {tokens}"
    assert compiled(example(0, index_dtype=index_dtype))[0].shape == (0, 4, 64)


def test_compiled_call_into_its_own_q(on_cpu):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(arguments):
        q = arguments["q"] * 1
        return paged_prefill.sparse_attn_v4_paged_prefill(**{**arguments, "q": q}, out=q)

    arguments = example()
    torch.testing.assert_close(step(arguments), reference(**arguments))


def test_text_arrives_through_compile(on_cpu):
    torch._dynamo.reset()
    compiled = torch.compile(paged_prefill.sparse_attn_v4_paged_prefill, backend="eager", fullgraph=True)
    arguments = example()
    with pytest.raises(RuntimeError, match="head_dim mismatch: unified_kv=64, kv=32"):
        compiled(**{**arguments, "kv": arguments["kv"][:, :32]})
    with pytest.raises(RuntimeError, match="is forward only, but q requires grad"):
        compiled(**{**arguments, "q": arguments["q"].clone().requires_grad_(True)})
