"""The tables and the picture of a benchmark's results.json."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

from build_tools.tables import table
from paged_prefill import _bench, _plot

OURS, GEMM = _bench.OURS, _bench.GEMM
FLASHMLA, GATHER, PTX = "FlashMLA", "gather only", "portable kernel, PTX"
TABLES = "<!-- tables: written by benchmarks.bench_hopper -->", "<!-- end of the tables -->"
HEADLINE = "<!-- headline: written by benchmarks.bench_hopper -->", "<!-- end of the headline -->"
ERROR_LIMIT = 2.2e-3
DRAWN = (OURS, FLASHMLA, PTX, "atom", "sglang")


def speedup(shape: dict[str, Any], of: str, over: str) -> tuple[float, float, float] | None:
    """Median, least and greatest over the rounds of how many times faster one is than another in the same round."""
    results = shape["results"]
    if of not in results or over not in results:
        return None
    pairs = zip(results[over]["milliseconds"], results[of]["milliseconds"], strict=True)
    ratios = [theirs / ours for theirs, ours in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


def gemm_share(shape: dict[str, Any], name: str) -> float:
    """Of the GEMM's rate: the median over rounds."""
    results = shape["results"]
    median, gemm = statistics.median(results[name]["milliseconds"]), results[GEMM]
    rate = results[name]["tflops"] * median  # TFLOP/s times ms: constant over the rounds
    gemm_rate = gemm["tflops"] * statistics.median(gemm["milliseconds"])
    pairs = zip(results[name]["milliseconds"], gemm["milliseconds"], strict=True)
    return statistics.median(rate / ours / (gemm_rate / theirs) for ours, theirs in pairs)


def _ratio(shape: dict[str, Any], of: str, over: str, digits: int = 2) -> str:
    found = speedup(shape, of, over)
    return f"{found[0]:.{digits}f}" if found else ""


_PORTABLE_INTRO = (
    "### The portable kernel\n\nAs the PTX in the wheel, which the driver compiles for every NVIDIA part from compute "
    "capability 8.0 on.\n\n"
)


def tables(document: dict[str, Any]) -> str:
    """All tables, as Markdown."""
    machine, shapes = document["machine"], document["shapes"]
    commit = f" of commit {machine['commit'][:12]}" if machine["commit"] else ""
    parts = [
        f"{machine['device']}, driver for {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"paged-prefill {machine['paged_prefill']}{commit}. Medians over {document['rounds']} interleaved rounds, "
        "each call on a cold L2 cache.\n",
        "### The operator\n\n" + _operator(shapes),
        *([_PORTABLE_INTRO + _portable(shapes)] if any(PTX in shape["results"] for shape in shapes) else []),
        *(["### Cost of a call\n\n" + _costs(document)] if "cpu_us" in document else []),
        "### Every figure\n\n" + _everything(shapes),
    ]
    return "\n".join(parts)


def headline(document: dict[str, Any]) -> str:
    """What README leads with: each shape that FlashMLA was timed on, the won and the lost alike."""
    rows = []
    for shape in document["shapes"]:
        if not (ratio := _ratio(shape, OURS, FLASHMLA)):
            continue
        load = [f"{shape['prefix']} + {shape['extend']}", f"{shape['tokens']:,}", f"{shape['rows']:,}"]
        rates = [f"{shape['results'][name]['tflops']:.0f}" for name in (OURS, FLASHMLA)]
        rows.append([str(shape["heads"]), *load, *rates, ratio])
    head = ["heads", "keys: prefix + extend", "T, tokens a call", "rows of the pool", "this operator, TFLOP/s",
            "FlashMLA, TFLOP/s", "times as fast"]  # fmt: skip
    line = f"{document['machine']['device']}, bf16, D = 512; medians over {document['rounds']} interleaved rounds.\n\n"
    return line + table(head, rows, right=1)


def page(text: str, document: dict[str, Any]) -> str:
    """A page's text with what stands between its marks written anew: the tables, or the headline figures.

    Raises:
        ValueError: the marks are missing.
    """
    for (first, last), write in ((TABLES, tables), (HEADLINE, headline)):
        before, begin, rest = text.partition(first)
        _, end, after = rest.partition(last)
        if begin and end:
            return f"{before}{begin}\n\n{write(document)}\n{end}{after}"
    raise ValueError(f"the page needs the lines {TABLES} or {HEADLINE}: what is written goes between the two.")


def _operator(shapes: list[dict[str, Any]]) -> str:
    head = ["prefix + extend, pool rows, T, H", "ms (over rounds)", "TFLOP/s", "of the GEMM", "times FlashMLA",
            "of the gather limit", "times ATOM", "times sglang", "error", "W", "MHz"]  # fmt: skip
    rows = []
    for shape in shapes:
        ours = shape["results"][OURS]
        times = ours["milliseconds"]
        good = "error" not in ours or (ours["error"] <= ERROR_LIMIT and ours["repeats"])
        rows.append([
            shape["label"],
            f"{statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f})",
            f"{ours['tflops']:.0f}",
            f"{gemm_share(shape, OURS):.2f}",
            _ratio(shape, OURS, FLASHMLA),
            _ratio(shape, OURS, GATHER),
            _ratio(shape, OURS, "atom", 1),
            _ratio(shape, OURS, "sglang", 1),
            f"{ours['error']:.2e}{'' if good else ' **wrong**'}" if "error" in ours else "",
            *_card(ours),
        ])  # fmt: skip
    return table(head, rows, right=1)


def _portable(shapes: list[dict[str, Any]]) -> str:
    head = ["prefix + extend, pool rows, T, H", "ms", "TFLOP/s", "times ATOM", "times sglang", "error"]
    rows = []
    for shape in shapes:
        if result := shape["results"].get(PTX):
            figures = [f"{statistics.median(result['milliseconds']):.3f}", f"{result['tflops']:.0f}"]
            ratios = [_ratio(shape, PTX, name) for name in ("atom", "sglang")]
            rows.append([shape["label"], *figures, *ratios, f"{result['error']:.2e}"])
    return table(head, rows, right=1)


def _costs(document: dict[str, Any]) -> str:
    cpu, first = document["cpu_us"], document["first_call_ms"]
    rows = [[f"CPU time of a call: {name}", f"{us:.1f} us", f"{cpu[OURS] / us:.2f}"] for name, us in cpu.items()]
    rows += [
        [f"first call of a process: {name}", f"{ms:.1f} ms", f"{first[OURS] / ms:.3f}"] for name, ms in first.items()
    ]
    return table(["", "time", "this operator's time over it"], rows, right=1)


def _everything(shapes: list[dict[str, Any]]) -> str:
    head = ["prefix + extend, pool rows, T, H", "what", "ms", "least", "greatest", "TFLOP/s", "GB/s", "error", "W",
            "MHz", "power-capped"]  # fmt: skip
    rows = []
    for shape in shapes:
        for name, result in shape["results"].items():
            times = result["milliseconds"]
            rows.append([
                shape["label"], name, *(f"{value:.4f}" for value in (statistics.median(times), min(times), max(times))),
                f"{result['tflops']:.0f}" if "tflops" in result else "",
                f"{result['gbs']:.0f}" if "gbs" in result else "",
                f"{result['error']:.2e}" if "error" in result else "",
                *_card(result),
                "" if result.get("power_capped") is None else f"{result['power_capped']:.0%}",
            ])  # fmt: skip
    return table(head, rows, right=2)


def _card(result: dict[str, Any]) -> list[str]:
    return ["" if result.get(key) is None else f"{result[key]:.0f}" for key in ("watts", "megahertz")]


def plot(document: dict[str, Any], path: Path) -> bool:
    """Draws the picture; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    points, gathers = [], []
    for shape in document["shapes"]:
        for name in DRAWN:
            if result := shape["results"].get(name):
                rate = result["tflops"] * statistics.median(result["milliseconds"])
                low, high = (rate / bound(result["milliseconds"]) for bound in (max, min))
                points.append(_plot.Point(shape["label"], name, 2.0 * shape["heads"], result["tflops"], low, high))
        if GATHER in shape["results"] and shape["tokens"] >= 2048:
            gathers.append(shape["results"][GATHER]["gbs"])
    gemm = statistics.median(shape["results"][GEMM]["tflops"] for shape in document["shapes"])
    roofs = [_plot.Roof("gather only", max(gathers))] if gathers else []
    machine = document["machine"]
    subtitle = (
        f"bf16, D = 512; medians over {document['rounds']} interleaved rounds. paged-prefill "
        f"{machine['paged_prefill']}, torch {machine['torch']}, driver for {machine['driver']}"
    )
    title = f"Sparse paged prefill on {machine['device']}"
    _plot.draw(str(path), title, subtitle, points, gemm, roofs)
    return True
