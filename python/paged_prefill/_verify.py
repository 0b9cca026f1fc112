"""Runs the layer classes' workloads on a GPU, against the fp64 reference, and times them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import _compare, _workload
from ._reference import reference

HEADS = (128, 64, 32, 16, 8)
SAMPLE = 64  # tokens of a workload that the reference computes
FLUSH_BYTES = 2**28  # more than any GPU's L2 cache


@dataclass(frozen=True)
class Timing:
    """Rates of one workload, from the median of several calls."""

    milliseconds: float
    spread: float  # (slowest - fastest) / median, of the middle half of the calls
    fastest: float  # milliseconds
    slowest: float
    tflops: float
    gather_gbs: float

    @classmethod
    def of(cls, workload: _workload.Workload, times: list[float]) -> Timing:
        middle = statistics.median(times)
        half = sorted(times)[len(times) // 4 : len(times) - len(times) // 4]
        spread = (half[-1] - half[0]) / middle
        rates = workload.flops / middle / 1e9, workload.gather_bytes / middle / 1e6
        return cls(middle, spread, min(times), max(times), *rates)


@dataclass(frozen=True)
class Result:
    """One workload: how far off it is, which kernel image it ran on, and how long it takes."""

    layer: str
    heads: int
    dtype: str
    tokens: int
    keys_per_token: float
    error: float  # relative Frobenius error of out over the sample, inf when a token is wrong by itself
    limit: float
    lse_error: float  # in tolerances: 1 is the limit
    ok: bool
    detail: str
    variant: str
    timing: Timing | None = None


def run(
    layer: _workload.Layer,
    heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    requests: Sequence[_workload.Request] = _workload.REQUESTS,
    seed: int = 0,
    timed: bool = True,
) -> Result:
    """Builds the workload on `device` and runs the operator on it.

    Raises:
        RuntimeError: what the operator raises.
    """
    from . import _C
    from ._attention import sparse_attn_v4_paged_prefill

    workload = _workload.build(layer, requests, heads=heads, dtype=dtype, device=device, seed=seed)
    out, lse = sparse_attn_v4_paged_prefill(*workload.args(), return_lse=True)
    variant = _C.last_launch(workload.q.device.index) or ""
    timing = None
    if timed:
        again = torch.empty_like(out)
        timing = Timing.of(workload, time_calls(lambda: sparse_attn_v4_paged_prefill(*workload.args(), out=again)))
    return _result(layer, workload, out, lse, variant, timing)


def run_reference(layer: _workload.Layer, heads: int, dtype: torch.dtype = torch.bfloat16) -> Result:
    """The same at a small size on the CPU, with the fp32 reference in the operator's place."""
    workload = _workload.build(layer, _workload.SMALL_REQUESTS, heads=heads, dtype=dtype)
    out, lse = reference(*workload.args(), return_lse=True)
    return _result(layer, workload, out, lse, "reference")


def time_calls(call: Callable[[], object], repeats: int = 30, warmup: int = 5) -> list[float]:
    """Milliseconds of each of `repeats` calls on the current stream, after `warmup` calls that warm the card up."""
    return time_alternating([call], repeats, warmup)[0]


def time_alternating(calls: Sequence[Callable[[], object]], repeats: int, warmup: int) -> list[list[float]]:
    """The same of several calls that alternate one by one, each as often after every other one.

    Each call finds the L2 cache cold, as after a model's other layers; writing over the cache also keeps the GPU busy
    while the CPU issues the call, so that a short kernel's time has no waiting in it.
    """
    for _ in range(warmup):
        for call in calls:
            call()
    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    events = [[(event(), event()) for _ in range(repeats)] for _ in calls]
    for i in range(repeats):
        for j in range(len(calls)):
            place = (i + j) % len(calls)
            start, end = events[place][i]
            cache.zero_()
            start.record()
            calls[place]()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in own] for own in events]


def sample(workload: _workload.Workload) -> list[int]:
    """SAMPLE tokens spread over the workload, the first and the last included."""
    return sorted(set(torch.linspace(0, workload.q.size(0) - 1, SAMPLE).round().int().tolist()))


def _result(
    layer: _workload.Layer,
    workload: _workload.Workload,
    out: torch.Tensor,
    lse: torch.Tensor,
    variant: str,
    timing: Timing | None = None,
) -> Result:
    tokens = sample(workload)
    exact_out, exact_lse = reference(
        *workload.args(), return_lse=True, compute_dtype=torch.float64, out_dtype=torch.float64, tokens=tokens
    )
    of_out = _compare.compare_out(out[tokens], exact_out)
    of_lse = _compare.compare_lse(lse[tokens], exact_lse)
    return Result(
        layer=layer.name,
        heads=workload.q.size(1),
        dtype=str(workload.q.dtype).removeprefix("torch."),
        tokens=workload.q.size(0),
        keys_per_token=workload.keys / max(1, workload.q.size(0)),
        error=of_out.error,
        limit=of_out.limit,
        lse_error=of_lse.error,
        ok=of_out.ok and of_lse.ok,
        detail=of_lse.detail if of_out.ok and not of_lse.ok else of_out.detail,
        variant=variant,
        timing=timing,
    )
