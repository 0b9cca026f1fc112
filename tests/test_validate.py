"""Validation of what the index tensors hold: which contents are errors, and what the error says."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

import cases
import paged_prefill
from cases import INT32_MAX, INT32_MIN, csr, make
from paged_prefill import _guards

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 64


@pytest.fixture(params=DEVICES)
def where(request, monkeypatch):
    monkeypatch.setattr(_guards, "DEVICE_TYPES", (*_guards.DEVICE_TYPES, "cpu"))
    return request.param


def validate(case, **changes):
    paged_prefill.validate(*case.with_(**changes).args())


def text_of(case, **changes):
    with pytest.raises(RuntimeError) as caught:
        validate(case, **changes)
    text, hint = str(caught.value).split("\n")
    assert hint and "{" not in text + hint
    return text


HOSTILE = ("hostile_indices", "hostile_indptr", "tables_empty")


@pytest.mark.parametrize("name", sorted({*cases.BUILDERS, *cases.LAYER_BUILDERS} - {*HOSTILE}))
def test_good_calls_pass(where, name):
    """Holes of -1, empty lists, a first bound above zero, and whatever stands in entries that no token owns."""
    validate(cases.build(name, device=where, heads=2, head_dim=64))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_calls_do_not(where, name):
    assert "token " in text_of(cases.build(name, device=where, heads=2, head_dim=64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [ROWS, ROWS + 5, -2, INT32_MAX, INT32_MIN, 2**32 + 5, -(2**40)])
@pytest.mark.parametrize(("name", "table"), [("kv_indices_prefix", "unified_kv"), ("kv_indices_extend", "kv")])
def test_an_index_that_names_no_row(where, name, table, value, dtype):
    if dtype is torch.int32 and not INT32_MIN <= value <= INT32_MAX:
        pytest.skip("no int32 value")
    lists = [[1, 2, 3], [], [-1, 4], [5]]
    case = make(lists, lists, pool_rows=ROWS, kv_rows=ROWS, heads=2, head_dim=64, device=where)
    indices = getattr(case, name).to(dtype)
    indices[4] = value  # the second entry of token 2
    indices[5] = value  # the first bad one is told
    expected = f"{name} names no row of {table}: token 2, entry 4, value {value}"
    assert text_of(case, **{name: indices}) == expected
    assert text_of(case, **{name: torch.stack((indices, indices), 1)[:, 0]}) == expected


@pytest.mark.parametrize("name", ["kv_indptr_prefix", "kv_indptr_extend"])
@pytest.mark.parametrize(
    ("bounds", "token", "entry", "value"),
    [
        ([-1, 1, 2, 3], 0, 0, -1),
        ([0, 1, 7, 7], 1, 2, 7),
        ([0, 2, 1, 3], 1, 2, 1),
        ([0, 1, 2, INT32_MAX], 2, 3, INT32_MAX),
        ([0, 1, INT32_MIN, 3], 1, 2, INT32_MIN),
        ([3, 2, 1, 0], 0, 1, 2),
    ],
)
def test_a_bad_bound(where, name, bounds, token, entry, value):
    lists = [[1, 2], [3], [4, 5, 6]]
    case = make(lists, lists, kv_rows=ROWS, tail=(), heads=2, head_dim=64, device=where)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=where)
    assert text_of(case, **{name: indptr}) == f"{name} has a bad bound: token {token}, entry {entry}, value {value}"


def test_the_prefix_comes_first_and_bounds_before_indices(where):
    case = make([[1, 99], [2]], [[99], [1]], kv_rows=ROWS, tail=(), heads=2, head_dim=64, device=where)
    assert text_of(case).startswith("kv_indices_prefix names no row of unified_kv: token 0, entry 1, value 99")
    indptr = torch.tensor([0, 1, 9], dtype=torch.int32, device=where)
    assert text_of(case, kv_indptr_prefix=indptr).startswith("kv_indptr_prefix has a bad bound: token 1, entry 2")
    good, _ = csr([[1, 2], [2]], where)
    assert text_of(case, kv_indices_prefix=good).startswith("kv_indices_extend names no row of kv: token 0, entry 0")


def test_no_tokens_and_no_entries(where):
    validate(make([], [], pool_rows=0, kv_rows=0, tail=(), heads=2, head_dim=64, device=where))
    validate(make([[], []], [[], []], pool_rows=0, kv_rows=0, tail=(), heads=2, head_dim=64, device=where))


def test_the_guards_come_before(where):
    case = cases.build("ragged", device=where, heads=2, head_dim=64)
    text = text_of(case, kv_indptr_prefix=case.kv_indptr_prefix[1:], kv_indices_extend=case.kv_indices_extend + 1000)
    assert text == "kv_indptr_prefix length mismatch: expected T + 1 = 10, got 9"
    with pytest.raises(RuntimeError, match="out shape mismatch"):
        paged_prefill.validate(*case.args(), out=case.q[1:])


def test_a_tensor_on_the_cpu_is_refused_as_by_the_operator():
    with pytest.raises(RuntimeError, match="requires CUDA/HIP tensors"):
        validate(cases.build("ragged", heads=2, head_dim=64))


def test_tensors_without_data_meet_the_guards_only():
    from torch._subclasses.fake_tensor import FakeTensorMode

    shapes = cases.build("one_token", heads=2, head_dim=64)
    names = [name for name in vars(shapes) if isinstance(getattr(shapes, name), torch.Tensor)]
    validate(shapes, **{name: getattr(shapes, name).to("meta") for name in names})
    with FakeTensorMode():
        like = {name: getattr(shapes, name) for name in names}
        fakes = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in like.items()}
        validate(shapes, **fakes)


def test_the_environment_variable_is_read_at_import(fake_server, tmp_path):
    """Each call is validated, whatever the grad mode, and a refused one launches nothing."""
    import fake_drivers

    code = """
    from fake_drivers.images import variant
    from contextlib import nullcontext
    from paged_prefill import _validate
    use_images(variant("sm90a"))
    # torch's operators do not run on the fake device: the same memory is looked at on the host
    inner = _validate._find_faults
    _validate._find_faults = lambda *tensors: inner(*map(host, tensors))
    torch.cuda.device, torch.cuda.is_current_stream_capturing = lambda _: nullcontext(), lambda: False
    good = call()
    good.pop("lse")
    attention(**good)
    bad = {**good, "kv_indices_extend": cuda(torch.full((6,), 7, dtype=torch.int32))}
    for mode in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with mode:
            text = error_of(attention, **bad)
            assert text.startswith("kv_indices_extend names no row of kv: token 0, entry 0, value 7"), text
    assert len(launches()) == 1
    torch.cuda.is_current_stream_capturing = lambda: True
    assert error_of(attention, **good).startswith("paged_prefill cannot validate a call inside a stream capture")
    """
    fake_drivers.run_alone(fake_server.libraries, code, tmp_path / "images", PAGED_PREFILL_VALIDATE="1")


@pytest.mark.gpu
def test_the_host_waits_once(device):
    case = cases.build("ragged", device=device)
    validate(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            validate(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1


@pytest.mark.gpu
def test_refused_inside_a_capture(device):
    case = cases.build("ragged", device=device)
    expected = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="cannot validate a call inside a stream capture"):
            validate(case)
        out = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())
    graph.replay()
    assert torch.equal(out, expected)
    validate(case)


@pytest.mark.gpu
def test_the_environment_variable_on_a_gpu(device):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import cases, paged_prefill, torch\n"
        "case = cases.build('ragged', device='cuda')\n"
        "out = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())\n"
        "try: paged_prefill.sparse_attn_v4_paged_prefill(*cases.build('hostile_indices', device='cuda').args())\n"
        "except RuntimeError as error: print(error)\n"
        "assert torch.equal(paged_prefill.sparse_attn_v4_paged_prefill(*case.args()), out)"
    )
    environment = {**os.environ, "PAGED_PREFILL_VALIDATE": "1"}
    command = [sys.executable, "-c", code, os.path.dirname(cases.__file__)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("kv_indices_prefix names no row of unified_kv: token 0, entry 0, value ")
