"""torch.export and AOTInductor: one exported program, and one package, for every number of tokens and keys."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cases
import paged_prefill
import test_opcheck

ROOT = Path(__file__).resolve().parent.parent

# The device to run on: the CPU, where the reference stands in for the kernels, or a GPU as it is.
cpu_operators = test_opcheck.cpu_operators
where = test_opcheck.where

OPS = torch.ops.paged_prefill
OUT, FUNCTIONAL = test_opcheck.OUT, test_opcheck.FUNCTIONAL


class Attention(torch.nn.Module):
    """A layer's attention, with the sink as the parameter that models have."""

    def __init__(self, case):
        super().__init__()
        self.attn_sink = torch.nn.Parameter(case.attn_sink, requires_grad=False)
        self.softmax_scale = case.softmax_scale

    def attend(self, *arguments):
        return paged_prefill.sparse_attn_v4_paged_prefill(*arguments, self.attn_sink, self.softmax_scale, True)

    def forward(self, q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend):
        out, lse = self.attend(
            q * 0.5, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend
        )
        return out + 1, lse


class FunctionalAttention(Attention):
    """The same by the functional operator, as a caller without the Python function writes it."""

    def attend(self, *arguments):
        return OPS.sparse_attn_v4_paged_prefill(*arguments, self.attn_sink, self.softmax_scale, True)


FORMS = {Attention: OUT, FunctionalAttention: FUNCTIONAL}


def build(device):
    return test_opcheck.without_nan(cases.build("ragged", device=device, heads=16, head_dim=64))


def export(form, case):
    dynamic = {0: torch.export.Dim.AUTO}
    with torch.no_grad():
        return torch.export.export(form(case), case.args()[:7], dynamic_shapes=(dynamic,) * 7)


def assert_runs(program, model, case):
    for part in (case, case.take(0, 4), case.take(2, 5)):
        arguments = part.args()[:7]
        with torch.no_grad():
            for actual, expected in zip(program(*arguments), model(*arguments), strict=True):
                assert torch.equal(actual, expected)


def test_the_documented_schemas_are_the_operators():
    document = " ".join((ROOT / "docs" / "torch.md").read_text().split())
    functional, out = (str(operator._schema).replace("0.", "0.0") for operator in (FUNCTIONAL, OUT))
    name, rest = functional.removeprefix("paged_prefill::").split("(", 1)
    assert f"torch.ops.paged_prefill.{name}( {rest}" in document
    assert f"torch.ops.paged_prefill.{name}_out( <the same, without return_lse>, {out[out.index('*') :]}" in document


@pytest.mark.parametrize("form", FORMS)
def test_exported_program_holds_one_call_and_takes_any_number_of_tokens(where, form):
    case = build(where)
    program = export(form, case)
    ours = [node.target for node in program.graph.nodes if "paged_prefill" in str(node.target)]
    assert ours == [FORMS[form]]
    assert_runs(program.module(), form(case), case)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_runs(torch.export.load(file).module(), form(case), case)


def test_export_meets_the_guards(where):
    case = build(where)
    with pytest.raises(RuntimeError, match=r"kv dtype mismatch: kv=torch\.float16, q=torch\.bfloat16"):
        export(Attention, case.with_(kv=case.kv.half()))


def test_export_on_meta_tensors_needs_no_gpu():
    case = build("cpu")
    tensors = {name: value.to("meta") for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    program = export(Attention, case.with_(**tensors))
    assert OUT in [node.target for node in program.graph.nodes]


def package(form, case, file):
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("AOTInductor needs a C++ compiler, and none is on PATH")
    return torch._inductor.aoti_compile_and_package(export(form, case), package_path=str(file))


def test_package_runs(cpu_operators, tmp_path):
    case = build("cpu")
    file = package(Attention, case, tmp_path / "attention.pt2")
    assert_runs(torch._inductor.aoti_load_package(file), Attention(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_package_runs_on_a_gpu_in_a_process_of_its_own(device, tmp_path, form):
    pytest.importorskip("triton", reason="AOTInductor needs triton on a GPU")
    case = build(device)
    file = package(form, case, tmp_path / "attention.pt2")
    assert_runs(torch._inductor.aoti_load_package(file), form(case), case)
    with torch.no_grad():
        torch.save([*case.args()[:7], *form(case)(*case.args()[:7])], tmp_path / "tensors.pt")
    code = (
        "import sys, torch, paged_prefill\n"
        "program = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "*arguments, out, lse = torch.load(sys.argv[2])\n"
        "print([torch.equal(a, e) for a, e in zip(program(*arguments), (out, lse))])"
    )
    command = [sys.executable, "-c", code, file, str(tmp_path / "tensors.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "[True, True]"
