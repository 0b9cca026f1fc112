"""Times the layer classes' workloads, and beside them, in the same run, what else is installed that computes them."""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import _compare, _plot, _verify, _workload
from ._attention import sparse_attn_v4_paged_prefill
from ._reference import reference

# The public Triton version that the operator replaces, at the places where sglang has had it.
PUBLIC = (
    "sglang.srt.layers.attention.dsv4.unified_kv_kernels.paged_prefill",
    "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_prefill",
)
OURS = "paged-prefill"
GEMM = "bf16 GEMM"
GEMM_SIZE = 8192
GEMM_FLOPS = 2 * GEMM_SIZE**3
ROUNDS = 7
ROUND_MILLISECONDS = 25.0  # of one implementation's turn in a round
Calls = Mapping[str, Callable[[], object]]
BASELINE_CHUNK = 64  # tokens whose gathered rows the torch baseline holds at once


@dataclass(frozen=True)
class Row:
    """One implementation on one workload."""

    layer: str
    heads: int
    implementation: str
    timing: _verify.Timing
    gemm_tflops: float  # of the bf16 GEMM in the same rounds
    gemm_share: float
    error: float  # relative Frobenius error over a sample of tokens
    variant: str


@dataclass(frozen=True)
class Overheads:
    """CPU time: of a call, of torch.add, and of a new process's first call (image load included)."""

    call_us: float
    torch_add_us: float
    first_call_ms: float


def gemm(device: torch.device) -> Callable[[], torch.Tensor]:
    """A bf16 matrix product of 8192^3: what this card gives, as the yardstick in each round."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device)
    return functools.partial(torch.mm, a, a, out=torch.empty_like(a))


def copy_gbs(device: torch.device) -> float:
    """GB/s of device memory, read and write counted, from a copy that no cache holds."""
    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(_verify.time_calls(lambda: target.copy_(source), 10)) / 1e6


def interleaved(
    calls: Calls,
    rounds: int = ROUNDS,
    watch: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    paired: Collection[str] = (),
) -> dict[str, list[float]]:
    """Milliseconds of each call, one median a round.

    The calls take turns within a round, in alternating order, so that a card that gets warm does so for all of them.
    Those named in `paired` share a turn and alternate in it call by call: under its power limit a card runs a kernel
    faster after a lighter one, so a ratio needs the same neighbours on both sides. `watch(name)` is a context around
    each turn.
    """
    together = [name for name in calls if name in paired]
    turns = [*([together] if together else []), *([name] for name in calls if name not in paired)]
    repeats = []
    for turn in turns:
        estimate = statistics.mean(statistics.median(_verify.time_calls(calls[name], 3, warmup=2)) for name in turn)
        repeats.append(max(4, min(40, round(ROUND_MILLISECONDS / (estimate + 0.07)))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for turn, count in list(zip(turns, repeats, strict=True))[:: -1 if i % 2 else 1]:
            for name in turn:
                calls[name]()  # loads what it has to, outside of the turn
            with ExitStack() as stack:
                for name in turn:
                    stack.enter_context(watch(name))
                measured = _verify.time_alternating([calls[name] for name in turn], count, warmup=1)
            for name, milliseconds in zip(turn, measured, strict=True):
                times[name].append(statistics.median(milliseconds))
    return times


def run(
    layers: Sequence[str], heads: Sequence[int], device: torch.device, baselines: bool = True
) -> Iterator[list[Row]]:
    """Yields the rows of each workload; the implementations, and the GEMM, take turns on the same inputs."""
    product = gemm(device)
    for name in layers:
        for count in heads:
            workload = _workload.build(_workload.LAYERS[name], heads=count, device=device)
            yield _measure(name, workload, product, baselines)
            del workload
            torch.cuda.empty_cache()


def _measure(
    layer: str, workload: _workload.Workload, product: Callable[[], torch.Tensor], baselines: bool
) -> list[Row]:
    calls = _implementations(workload.args(), baselines)
    errors = {name: error(workload, call) for name, call in calls.items()}
    variant = last_variant(workload)
    times = interleaved({GEMM: product, **calls})
    rate = GEMM_FLOPS / statistics.median(times.pop(GEMM)) / 1e9
    rows = []
    for name in calls:
        timing, image = _verify.Timing.of(workload, times[name]), variant if name == OURS else ""
        rows.append(Row(layer, workload.q.size(1), name, timing, rate, timing.tflops / rate, errors[name], image))
    return rows


def error(workload: _workload.Workload, call: Callable[[], torch.Tensor]) -> float:
    """Relative Frobenius error of a call's result against fp64, over a sample of tokens."""
    tokens = _verify.sample(workload)
    exact = reference(*workload.args(), compute_dtype=torch.float64, out_dtype=torch.float64, tokens=tokens)
    assert isinstance(exact, torch.Tensor)
    return _compare.compare_out(call()[tokens], exact).error


def ours(args: _workload.Arguments) -> Callable[[], torch.Tensor]:
    """This package's operator on the given inputs, writing to one result."""
    out = torch.empty_like(args[0])

    def call() -> torch.Tensor:
        sparse_attn_v4_paged_prefill(*args, out=out)
        return out

    return call


def public(args: _workload.Arguments) -> Callable[[], torch.Tensor] | None:
    """sglang's Triton version on the given inputs, where it is installed."""
    for module in PUBLIC:
        try:
            function: Any = importlib.import_module(module).sparse_attn_v4_paged_prefill
        except (ImportError, AttributeError):
            continue
        return functools.partial(function, *args)
    return None


def point(row: Row) -> _plot.Point:
    """A row as the plot takes it. A gathered row of 16-bit numbers gives two operations a byte and head."""
    timing = row.timing
    low, high = (timing.tflops * timing.milliseconds / t for t in (timing.slowest, timing.fastest))
    label = f"{row.layer}, H {row.heads}"
    return _plot.Point(label, row.implementation, 2.0 * row.heads, timing.tflops, low, high)


def _implementations(args: _workload.Arguments, baselines: bool) -> dict[str, Callable[[], torch.Tensor]]:
    calls = {OURS: ours(args)}
    if baselines:
        if theirs := public(args):
            calls["sglang's Triton"] = theirs
        calls["torch gather + sdpa"] = functools.partial(gather_and_sdpa, *args)
    return calls


def gather_and_sdpa(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """What one writes without a kernel: the rows gathered to a rectangle, then scaled_dot_product_attention.

    The sink is one more key, of zeros, with its logit in the mask. Rows of a token without keys are zero.
    """
    tokens, heads, head_dim = q.shape
    table = torch.cat((unified_kv, kv, q.new_zeros(1, head_dim)))
    prefix, extend = kv_indptr_prefix.long(), kv_indptr_extend.long()
    sink = q.new_full((heads,), float("-inf")) if attn_sink is None else attn_sink.to(q.dtype)
    out = torch.empty_like(q)
    for start in range(0, tokens, BASELINE_CHUNK):
        end = min(start + BASELINE_CHUNK, tokens)
        rows, valid = [], []
        for indptr, indices, base, count in (
            (prefix, kv_indices_prefix, 0, unified_kv.size(0)),
            (extend, kv_indices_extend, unified_kv.size(0), kv.size(0)),
        ):
            first, last = indptr[start:end, None], indptr[start + 1 : end + 1, None]
            column = first + torch.arange(max(1, int((last - first).max())), device=q.device)
            row = indices[column.clamp(max=max(0, indices.numel() - 1))].long() if indices.numel() else column * 0 - 1
            valid.append((column < last) & (row >= 0) & (row < count))
            rows.append(torch.where(valid[-1], row + base, table.size(0) - 1))
        rows.append(rows[0].new_full((end - start, 1), table.size(0) - 1))  # the sink's key
        mask = q.new_zeros(end - start, 1, heads, sum(part.size(1) for part in rows))
        mask[..., :-1].masked_fill_(~torch.cat(valid, 1)[:, None, None], float("-inf"))
        mask[..., -1] = sink
        keys = table[torch.cat(rows, 1)][:, None]  # [chunk, 1, keys, D]: the heads share them, as queries of one
        part = torch.nn.functional.scaled_dot_product_attention(
            q[start:end, None], keys, keys, attn_mask=mask, scale=softmax_scale
        )
        out[start:end] = part[:, 0].nan_to_num(nan=0.0)
    return out


def overheads(device: torch.device) -> Overheads:
    """CPU time of a small call, which the GPU finishes sooner than the CPU issues it."""
    x = torch.ones(64, device=device)
    times = cpu_us({OURS: ours(small_workload(device).args()), "torch.add": lambda: torch.add(x, x)})
    return Overheads(times[OURS], times["torch.add"], first_call_ms(device))


def small_workload(device: torch.device) -> _workload.Workload:
    """What CPU time is measured on."""
    return _workload.build(_workload.HCA, _workload.SMALL_REQUESTS, heads=8, device=device)


def cpu_us(calls: Calls, repeats: int = 200, rounds: int = 9) -> dict[str, float]:
    """Microseconds of CPU time that issuing each call takes: the median over rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if i:  # the first round warms up
                times[name].append((time.perf_counter() - start) / repeats * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def first_call_ms(
    device: torch.device,
    setup: str = "from paged_prefill import sparse_attn_v4_paged_prefill as call",
    environment: Mapping[str, str] | None = None,
) -> float:
    """Milliseconds of the first call of a new process, its image's load included, torch being warm already.

    `setup` are the statements that define `call`, which takes the operator's nine arguments.
    """
    code = (
        f"import time, torch\n{setup}\n"
        "from paged_prefill import _bench\n"
        f"args = _bench.small_workload(torch.device({str(device)!r})).args()\n"
        "torch.cuda.synchronize(); start = time.perf_counter()\n"
        "call(*args); torch.cuda.synchronize()\n"
        "print((time.perf_counter() - start) * 1000)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if result.returncode:
        raise RuntimeError(f"the process of a first call ended with {result.returncode}: {result.stderr.strip()}")
    return float(result.stdout.split()[-1])


def last_variant(workload: _workload.Workload) -> str:
    """Id of the kernel image that the workload's device ran last."""
    from . import _C

    return _C.last_launch(workload.q.device.index) or ""
