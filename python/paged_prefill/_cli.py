"""The command line: `paged-prefill` and `python -m paged_prefill`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import _explain, _info, _manifest, _report, _verify, _workload
from ._version import __version__

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 on a failure, 2 on a wrong command line."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paged-prefill",
        description="DeepSeek-V4 sparse paged prefill attention from kernels compiled ahead of time.",
        epilog="`paged-prefill COMMAND --help` tells more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"paged-prefill {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, summary: str, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=description)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        sub.set_defaults(command=run)
        return sub

    command(
        "info",
        _info.info,
        "is my GPU served, and by which kernels?",
        "Prints the wheel's version and build, torch and driver, and for every visible GPU the kernel images it gets, "
        "or the reasons why it gets none. Works without a GPU.",
    ).add_argument("--all", action="store_true", help="list every image in the wheel, and what each known GPU gets")
    sized(
        command(
            "demo",
            demo,
            "run DeepSeek-V4's layers, checked and timed",
            "Runs a batch of requests in chunked prefill through each of DeepSeek-V4's layer classes and head counts, "
            "checks it against the fp64 reference and prints error, time and TFLOP/s. Without a GPU it runs a small "
            "batch through the reference and prints which image each known GPU would get. "
            "Exit status 1 when an error exceeds the tolerance.",
        )
    )
    verify_parser = sized(
        command(
            "verify",
            verify,
            "are the results right on my GPU?",
            "Compares every layer class and head count, in both dtypes, with the fp64 reference on this machine's GPU. "
            "Exit status 1 on any failure, or without a GPU.",
        )
    )
    verify_parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="repeat with N different inputs")
    bench_parser = sized(
        command(
            "bench",
            bench,
            "how fast is it on my GPU?",
            "Times every layer class and head count: median and spread, TFLOP/s, share of a bf16 GEMM measured in the "
            "same run, gather GB/s, CPU time per call and first-call time; beside it whatever is installed of the "
            "public Triton version, and a torch gather with scaled_dot_product_attention.",
        )
    )
    bench_parser.add_argument("--plot", metavar="FILE", help="draw the roofline and the bars (needs matplotlib)")
    bench_parser.add_argument("--no-baselines", action="store_true", help="time this package's operator only")
    explain_parser = command(
        "explain",
        _explain.explain,
        "what does this error mean, and what do I do?",
        "Prints what an error of this package means, how it comes about, how to mend it and how to prevent it. TEXT is "
        "the error's text, whole or in part, as it was printed or with {placeholders}; `-` reads it from the standard "
        "input, a log for example. Without TEXT it lists all errors. Exit status 1 when no error has these words.",
    )
    explain_parser.add_argument("text", nargs="*", metavar="TEXT", help="an error's text, a piece of it, or its name")
    explain_parser.add_argument("--all", action="store_true", help="print all entries, as docs/errors.md has them")
    return parser


def sized(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options that choose a part of the workloads."""
    layers = list(_workload.LAYERS)
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=layers,
        default=layers,
        metavar="NAME",
        help=f"of {', '.join(layers)}; default all",
    )
    heads = list(_verify.HEADS)
    parser.add_argument(
        "--heads",
        nargs="+",
        type=_positive,
        default=heads,
        metavar="H",
        help="query heads of one rank; default 128 64 32 16 8",
    )
    parser.add_argument("--device", default=None, metavar="DEVICE", help="for example cuda:1; default the current one")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a number from 1 on, got {text}")
    return value


def demo(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        return _demo_without_gpu(options)
    device = _device(options)
    points = [(layer, heads) for layer in options.layers for heads in options.heads]
    results = [
        _verify.run(_workload.LAYERS[layer], heads, device=device)
        for layer, heads in _report.progress(points, "running")
    ]
    name = torch.cuda.get_device_name(device)
    return _show(options, f"DeepSeek-V4 sparse paged prefill on {name}, bf16, D = 512", results)


def _demo_without_gpu(options: argparse.Namespace) -> int:
    points = [(layer, heads) for layer in options.layers for heads in options.heads]
    results = [
        _verify.run_reference(_workload.LAYERS[layer], heads) for layer, heads in _report.progress(points, "running")
    ]
    if not options.json:
        print("No CUDA or ROCm GPU here: a small batch runs through the reference, in fp32, on the CPU.")
    status = _show(options, "DeepSeek-V4 sparse paged prefill, fp32 reference against fp64, bf16, D = 512", results)
    if not options.json:
        _info.known_table(_manifest.read_manifest().data)
    return status


def verify(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print(f"error: verify needs a CUDA or ROCm GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    device = _device(options)
    points = [
        (layer, heads, dtype, seed)
        for layer in options.layers
        for heads in options.heads
        for dtype in DTYPES.values()
        for seed in range(options.seeds)
    ]
    results = [
        _verify.run(_workload.LAYERS[layer], heads, dtype=dtype, device=device, seed=seed, timed=False)
        for layer, heads, dtype, seed in _report.progress(points, "verifying")
    ]
    return _show(options, f"against the fp64 reference on {torch.cuda.get_device_name(device)}, D = 512", results)


def bench(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print(f"error: bench needs a CUDA or ROCm GPU; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    from . import _bench, _plot

    if options.plot:
        _plot.check(options.plot)
    device = _device(options)
    steps = [(layer, heads) for layer in options.layers for heads in options.heads]
    measured = _bench.run(options.layers, options.heads, device, not options.no_baselines)
    rows = [row for _ in _report.progress(steps, "timing") for row in next(measured)]
    costs, memory = _bench.overheads(device), _bench.copy_gbs(device)
    name = torch.cuda.get_device_name(device)
    gemm = statistics.median(row.gemm_tflops for row in rows)
    if options.plot:
        points = [_bench.point(row) for row in rows]
        title = f"DeepSeek-V4 sparse paged prefill on {name}"
        subtitle = f"4096 tokens, bf16, D = 512. paged-prefill {__version__}, torch {torch.__version__}."
        _plot.draw(options.plot, title, subtitle, points, gemm, [_plot.Roof("device memory (a copy)", memory)])
    if options.json:
        document = {
            "device": name,
            "torch": torch.__version__,
            "gemm_tflops": gemm,
            "copy_gbs": memory,
            **dataclasses.asdict(costs),
            "results": [_plain(row) for row in rows],
        }
        print(json.dumps(document, indent=1))
        return 0
    columns = (
        "layer",
        "H",
        "implementation",
        "ms",
        "spread",
        "TFLOP/s",
        "of GEMM",
        "gather GB/s",
        "error",
        "kernel image",
    )
    cells = [
        (
            row.layer,
            row.heads,
            row.implementation,
            f"{row.timing.milliseconds:.3f}",
            f"{row.timing.spread:.1%}",
            f"{row.timing.tflops:.0f}",
            f"{row.gemm_share:.2f}",
            f"{row.timing.gather_gbs:.0f}",
            f"{row.error:.1e}",
            _info.short(row.variant),
        )
        for row in rows
    ]
    _report.table(f"4096 tokens of DeepSeek-V4 on {name}, bf16, D = 512", columns, cells)
    print(f"bf16 GEMM of {_bench.GEMM_SIZE}^3: {gemm:.0f} TFLOP/s, copy in device memory: {memory:.0f} GB/s")
    print(f"CPU time of a call: {costs.call_us:.1f} us, of torch.add: {costs.torch_add_us:.1f} us")
    print(f"first call of a new process, image load included: {costs.first_call_ms:.1f} ms")
    if options.plot:
        print(f"drawn: {options.plot}")
    return 0


def _device(options: argparse.Namespace) -> torch.device:
    """The GPU to run on, made the current one, so that events and streams are its own."""
    device = torch.device(options.device or "cuda")
    torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device)
    return torch.device("cuda", torch.cuda.current_device())


def _show(options: argparse.Namespace, title: str, results: Sequence[_verify.Result]) -> int:
    failed = [result for result in results if not result.ok]
    if options.json:
        print(json.dumps({"title": title, "ok": not failed, "results": [_plain(r) for r in results]}, indent=1))
        return 1 if failed else 0
    timed = any(result.timing for result in results)
    columns = ["layer", "H", "dtype", "T", "keys/token", "error", "check"]
    columns += ["ms", "TFLOP/s", "gather GB/s"] if timed else []
    rows: list[list[object]] = []
    for r in results:
        row: list[object] = [r.layer, r.heads, r.dtype, r.tokens, f"{r.keys_per_token:.0f}", f"{r.error:.2e}"]
        row.append("ok" if r.ok else f"FAIL (limit {r.limit:.0e})")
        if r.timing:
            row += [f"{r.timing.milliseconds:.3f}", f"{r.timing.tflops:.0f}", f"{r.timing.gather_gbs:.0f}"]
        rows.append([*row, _info.short(r.variant)])
    _report.table(title, [*columns, "kernel image"], rows)
    for r in failed:
        print(f"FAIL {r.layer}, H = {r.heads}, {r.dtype}: {r.detail}")
    limits = ", ".join(f"{limit:.0e} in {dtype}" for dtype, limit in {r.dtype: r.limit for r in results}.items())
    print(f"{len(results) - len(failed)} of {len(results)} within the tolerance (relative error {limits})")
    return 1 if failed else 0


def _plain(result: Any) -> dict[str, Any]:
    """A result as JSON takes it: no inf and no NaN."""
    fields = dataclasses.asdict(result)
    return {k: v if not isinstance(v, float) or abs(v) < float("inf") else str(v) for k, v in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
