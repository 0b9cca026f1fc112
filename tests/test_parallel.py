"""Partial results merged, and the examples of context and tensor parallelism in processes of their own."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cases
from oracle import assert_close, assert_lse_close
from paged_prefill import merge, reference

ROOT = Path(__file__).resolve().parent.parent

INF = float("inf")


def whole_and_parts(ranks, sink=True, shift=None):
    """A call, and its (out, lse) parts when the prefix lists are split; the last rank has nothing of the prefix."""
    rng = random.Random(ranks)
    prefix = cases.random_lists((40, 3, 0, 129, 17, 1), 64, rng, holes=0.3)
    extend = cases.random_lists((5, 0, 0, 33, 1, 0), 40, rng, holes=0.2)
    whole = cases.make(prefix, extend, kv_rows=40, heads=5, head_dim=64, sink=sink)
    shift = -math.log(ranks) if shift is None else shift
    parts = []
    for rank in range(ranks):
        share = [[row if row % max(ranks - 1, 1) == rank else -1 for row in rows] for rows in prefix]
        indices, indptr = cases.csr(share)
        part = whole.with_(kv_indices_prefix=indices, kv_indptr_prefix=indptr)
        parts.append(reference(*part.args(), True, shift))
    return whole, *zip(*parts, strict=True)


def exact(case):
    return reference(*case.args(), True, compute_dtype=torch.float64, out_dtype=torch.float64)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_O15_merged_parts_are_the_single_call(ranks, sink):
    whole, outs, lses = whole_and_parts(ranks, sink)
    expected, expected_lse = exact(whole)
    for result in (merge(outs, lses), merge(torch.stack(outs), torch.stack(lses))):
        out, lse = result
        assert out.dtype == torch.bfloat16
        assert out.is_contiguous()
        assert_close(out, expected)
        assert_lse_close(lse, expected_lse)


def test_O15_parts_of_parts():
    whole, outs, lses = whole_and_parts(4)
    halves = [merge(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
    out, lse = merge(*zip(*halves, strict=True))
    expected, expected_lse = exact(whole)
    assert_close(out, expected)
    assert_lse_close(lse, expected_lse)


def test_O15_without_the_shift_what_is_repeated_counts_more_than_once():
    whole, outs, lses = whole_and_parts(3, shift=0.0)
    with pytest.raises(AssertionError):
        assert_lse_close(merge(outs, lses)[1], exact(whole)[1])


def test_where_no_part_has_a_row():
    out, lse = merge([torch.zeros(2, 1, 8)] * 3, [torch.full((2, 1), -INF)] * 3)
    assert out.eq(0).all()
    assert lse.eq(-INF).all()


def test_a_part_without_a_row_is_not_looked_at():
    outs = [torch.full((1, 1, 8), float("nan")), torch.ones(1, 1, 8)]
    out, lse = merge(outs, torch.tensor([-INF, 2.0]).view(2, 1, 1))
    assert out.eq(1).all()
    assert lse.item() == 2


def test_nan_reaches_its_own_token_only():
    outs, lses = torch.ones(2, 2, 1, 8), torch.zeros(2, 2, 1)
    outs[1, 1], lses[1, 1] = float("nan"), float("nan")
    out, lse = merge(outs, lses)
    assert out[0].eq(1).all() and lse[0].item() == pytest.approx(math.log(2))
    assert out[1].isnan().all() and lse[1].isnan().all()


def test_large_logarithms_do_not_overflow():
    outs = [torch.zeros(1, 1, 8), torch.ones(1, 1, 8)]
    out, lse = merge(outs, torch.tensor([1000.0, 1001.0]).view(2, 1, 1))
    assert lse.item() == pytest.approx(1001 + math.log1p(math.exp(-1)))
    assert out[0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_no_tokens():
    out, lse = merge(torch.zeros(2, 0, 4, 8, dtype=torch.float16), torch.zeros(2, 0, 4))
    assert (out.shape, out.dtype, lse.shape) == ((0, 4, 8), torch.float16, (0, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = merge(torch.rand(2, 3, 2, 8).to(dtype), torch.rand(2, 3, 2, dtype=lse_dtype))
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)


ONE, LSE = torch.zeros(2, 3, 8), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "text"),
    [
        ([], [], "merge needs as many outs as lses, and at least one: got 0 and 0"),
        ([ONE], [LSE, LSE], "merge needs as many outs as lses, and at least one: got 1 and 2"),
        ([ONE.int()], [LSE], r"outs\[0\] must be a floating-point tensor \[T, H, D\], got torch.int32 \[2, 3, 8\]"),
        ([ONE[0]], [LSE], r"outs\[0\] must be a floating-point tensor \[T, H, D\], got torch.float32 \[3, 8\]"),
        ([ONE, ONE[:1]], [LSE, LSE], r"outs\[1\] shape mismatch: expected \[2, 3, 8\], got \[1, 3, 8\]"),
        ([ONE], [LSE.T], r"lses\[0\] shape mismatch: expected \[2, 3\], got \[3, 2\]"),
        ([ONE, ONE.half()], [LSE, LSE], r"outs\[1\] dtype mismatch: expected torch.float32, got torch.float16"),
        ([ONE.half()], [LSE.half()], r"lses\[0\] dtype mismatch: expected torch.float32, got torch.float16"),
        ([ONE], [LSE.to("meta")], r"lses\[0\] device mismatch: lses\[0\]=meta, outs\[0\]=cpu"),
    ],
)
def test_merge_says_what_does_not_fit(outs, lses, text):
    with pytest.raises(RuntimeError, match=text + r"\n."):
        merge(outs, lses)


# The examples


def torchrun(example, processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / example), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


SAID = {
    "context_parallel.py": "context parallel over {} ranks ({}): equal to the single call",
    "tensor_parallel.py": "tensor parallel over {} ranks ({}): equal to the single call, bit for bit",
}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("example", SAID)
def test_example_on_the_cpu(example, processes):
    said = torchrun(example, processes, "--backend", "gloo", "--heads", "6")
    assert said == SAID[example].format(processes, "gloo")


@pytest.mark.gpu
@pytest.mark.parametrize("example", SAID)
def test_example_on_two_gpus(example):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    said = torchrun(example, 2, "--backend", "nccl", "--heads", "128")
    assert said == SAID[example].format(2, "nccl")
