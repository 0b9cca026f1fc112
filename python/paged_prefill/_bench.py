"""Times the layer classes' workloads, and beside them, in the same run, what else is installed that computes them."""

from __future__ import annotations

import functools
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from . import _compare, _verify, _workload
from ._attention import sparse_attn_v4_paged_prefill
from ._reference import reference

# The public Triton version that the operator replaces, at the places where sglang has had it.
PUBLIC = (
    "sglang.srt.layers.attention.dsv4.unified_kv_kernels.paged_prefill",
    "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_prefill",
)
OURS = "paged-prefill"
GEMM = 8192
BASELINE_CHUNK = 64  # tokens whose gathered rows the torch baseline holds at once


@dataclass(frozen=True)
class Row:
    """One implementation on one workload."""

    layer: str
    heads: int
    implementation: str
    timing: _verify.Timing
    gemm_share: float  # of the bf16 GEMM's rate in this run
    error: float  # relative Frobenius error over a sample of tokens
    variant: str


@dataclass(frozen=True)
class Overheads:
    """CPU time: of a call, of torch.add, and of a new process's first call (image load included)."""

    call_us: float
    torch_add_us: float
    first_call_ms: float


def gemm_tflops(device: torch.device) -> float:
    """bf16 TFLOP/s of an 8192^3 matrix product: what this card gives in this run."""
    a = torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return 2 * GEMM**3 / statistics.median(_verify.time_calls(lambda: torch.mm(a, a, out=out))) / 1e9


def run(
    layers: Sequence[str], heads: Sequence[int], device: torch.device, gemm: float, baselines: bool = True
) -> Iterator[list[Row]]:
    """Yields the rows of each workload; the implementations take turns on the same inputs."""
    for name in layers:
        for count in heads:
            workload = _workload.build(_workload.LAYERS[name], heads=count, device=device)
            yield _measure(name, workload, gemm, baselines)
            del workload
            torch.cuda.empty_cache()


def _measure(layer: str, workload: _workload.Workload, gemm: float, baselines: bool) -> list[Row]:
    tokens, args = _verify.sample(workload), workload.args()
    exact = reference(*args, compute_dtype=torch.float64, out_dtype=torch.float64, tokens=tokens)
    assert isinstance(exact, torch.Tensor)
    rows = []
    for implementation, repeats, call in _implementations(args, baselines):
        error = _compare.compare_out(call()[tokens], exact).error
        variant = _last_variant(workload) if implementation == OURS else ""
        timing = _verify.Timing.of(workload, _verify.time_calls(call, repeats))
        heads = workload.q.size(1)
        rows.append(Row(layer, heads, implementation, timing, timing.tflops / gemm, error, variant))
    return rows


def _implementations(
    args: _workload.Arguments, baselines: bool
) -> Iterator[tuple[str, int, Callable[[], torch.Tensor]]]:
    out = torch.empty_like(args[0])

    def ours() -> torch.Tensor:
        sparse_attn_v4_paged_prefill(*args, out=out)
        return out

    yield OURS, 30, ours
    if not baselines:
        return
    for module in PUBLIC:
        try:
            public = importlib.import_module(module).sparse_attn_v4_paged_prefill
        except (ImportError, AttributeError):
            continue
        yield "sglang's Triton", 10, functools.partial(public, *args)
        break
    yield "torch gather + sdpa", 3, functools.partial(gather_and_sdpa, *args)


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
    workload = _workload.build(_workload.HCA, _workload.SMALL_REQUESTS, heads=8, device=device)
    args = workload.args()
    out, x = torch.empty_like(workload.q), torch.ones(64, device=device)
    return Overheads(
        _cpu_us(lambda: sparse_attn_v4_paged_prefill(*args, out=out)),
        _cpu_us(lambda: torch.add(x, x)),
        first_call_ms(device),
    )


def _cpu_us(call: Callable[[], object], calls: int = 200, rounds: int = 9) -> float:
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def first_call_ms(device: torch.device) -> float:
    """Milliseconds of the first call of a new process, its image's load included, torch being warm already."""
    code = (
        "import time, torch, paged_prefill\n"
        "from paged_prefill import _workload\n"
        f"w = _workload.build(_workload.HCA, _workload.SMALL_REQUESTS, heads=8, device={str(device)!r})\n"
        "torch.cuda.synchronize(); start = time.perf_counter()\n"
        "paged_prefill.sparse_attn_v4_paged_prefill(*w.args()); torch.cuda.synchronize()\n"
        "print((time.perf_counter() - start) * 1000)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(result.stdout)


def _last_variant(workload: _workload.Workload) -> str:
    from . import _C

    return _C.last_launch(workload.q.device.index) or ""
