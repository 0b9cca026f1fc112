"""The picture of `bench --plot`: each workload under the roofs that the card gave in the same run, and as bars."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
# One strong colour for this package, which comes first; quiet ones for what stands beside it.
COLOURS = ("#0b69a3", "#e9893b", "#8d99a6", "#9a6fb0", "#5ba37c", "#c2b280")
MARKERS = "osD^vPX*ph<>"
WIDTH, ROOFLINE = 9.0, 4.8  # inches: a page shows the picture 900 pixels wide, its smallest letters at 12 pixels


@dataclass(frozen=True)
class Point:
    """One implementation on one workload; `low` and `high` bound its rate over the rounds."""

    label: str
    implementation: str
    intensity: float  # floating-point operations a gathered byte
    tflops: float
    low: float
    high: float


@dataclass(frozen=True)
class Roof:
    """A limit of bytes per second."""

    label: str
    gbs: float


def check(path: str) -> None:
    """Raises RuntimeError if no plot can be written there, before anything has been measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("a plot needs matplotlib, which is not installed: pip install 'paged-prefill[bench]'")
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise RuntimeError(f"the plot cannot be written to {file}: there is no folder {file.absolute().parent}")
    formats = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".") not in formats:
        raise RuntimeError(f"the plot cannot be written to {file}: its ending must be one of {', '.join(formats)}")


def draw(
    path: str, title: str, subtitle: str, points: Sequence[Point], gemm_tflops: float, roofs: Sequence[Roof]
) -> None:
    """Writes the picture; the file's ending chooses the format."""
    figure_module = importlib.import_module("matplotlib.figure")
    names = list(dict.fromkeys(point.implementation for point in points))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    labels = list(dict.fromkeys(point.label for point in points))
    bars = 1.1 + 0.2 * len(points) + 0.12 * len(labels)
    with importlib.import_module("matplotlib").rc_context(
        {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.edgecolor": FAINT}
    ):
        size = WIDTH, ROOFLINE + bars
        figure = figure_module.Figure(figsize=size, dpi=200, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        # Two figures in one: their labels take unlike room, and neither gives up its own for the other's.
        upper, lower = (part.subplots() for part in figure.subfigures(2, 1, height_ratios=(ROOFLINE, bars)))
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
        _roofline(upper, points, colours, gemm_tflops, roofs)
        _bars(lower, points, labels, names, colours, gemm_tflops)
        for axes in (upper, lower):
            axes.tick_params(colors=INK, labelcolor=INK, length=0)
            axes.set_axisbelow(True)
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
        figure.supxlabel(subtitle, x=0.012, ha="left", fontsize=9.5, color=FAINT)
        figure.savefig(path)


def _roofline(
    axes: Any, points: Sequence[Point], colours: dict[str, str], gemm_tflops: float, roofs: Sequence[Roof]
) -> None:
    low_x, high_x = min(p.intensity for p in points) / 1.6, max(p.intensity for p in points) * 1.9
    low_y = min(p.tflops for p in points) / 1.8
    high_y = max(gemm_tflops, *(p.tflops for p in points)) * 1.7
    for i, roof in enumerate(sorted(roofs, key=lambda roof: roof.gbs)):
        ridge = min(high_x, gemm_tflops * 1e3 / roof.gbs)
        style = "-" if i == len(roofs) - 1 else (0, (4, 3))
        axes.plot([low_x, ridge], [low_x * roof.gbs / 1e3, ridge * roof.gbs / 1e3], color=INK, lw=1.4, ls=style)
        # A line through the origin: its angle in data units is that of its slope, and stays so on a logarithmic paper.
        axes.text(
            low_x * 1.06,
            low_x * 1.06 * roof.gbs / 1e3 * (1.06 if i == len(roofs) - 1 else 0.88),
            f"{roof.label}, {roof.gbs / 1e3:.1f} TB/s",
            rotation=math.degrees(math.atan(roof.gbs / 1e3)),
            rotation_mode="anchor",
            transform_rotates_text=True,
            va="bottom" if i == len(roofs) - 1 else "top",
            fontsize=9.5,
            color=INK,
        )
    start = min((gemm_tflops * 1e3 / roof.gbs for roof in roofs), default=low_x)
    axes.plot([max(low_x, start), high_x], [gemm_tflops] * 2, color=INK, lw=1.4)
    axes.annotate(
        f"bf16 GEMM, {gemm_tflops:.0f} TFLOP/s",
        (high_x, gemm_tflops),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=INK,
    )
    labels = list(dict.fromkeys(point.label.rpartition(", H ")[0] or point.label for point in points))
    for point in reversed(points):
        first = point.implementation == points[0].implementation
        label = point.label.rpartition(", H ")[0] or point.label
        colour = colours[point.implementation]
        there = list(dict.fromkeys(p.label for p in points if p.intensity == point.intensity))
        axes.plot(
            point.intensity * 1.06 ** (there.index(point.label) - (len(there) - 1) / 2),
            point.tflops,
            MARKERS[labels.index(label) % len(MARKERS)],
            ms=8 if first else 5.5,
            mfc=colour if first else "white",
            mec="white" if first else colour,
            mew=0.8 if first else 1.4,
            zorder=4 if first else 3,
        )
    axes.set(xscale="log", yscale="log", xlim=(low_x, high_x), ylim=(low_y, high_y))
    ticks = sorted({point.intensity for point in points})
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    levels = [level for level in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if low_y <= level <= high_y]
    axes.set_yticks(levels, [str(level) for level in levels])
    axes.set_yticks([], minor=True)
    axes.grid(color=GRID, lw=0.8)
    axes.set_xlabel("operations a gathered byte (two a head, in 16 bits; equal ones side by side)")
    axes.set_title("TFLOP/s under the card's own limits, measured in this run", loc="left", fontsize=10.5)
    shapes = [axes.plot([], [], MARKERS[i % len(MARKERS)], color=FAINT, ms=6, ls="")[0] for i in range(len(labels))]
    axes.legend(shapes, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9.5, frameon=False)


def _bars(
    axes: Any,
    points: Sequence[Point],
    labels: Sequence[str],
    names: Sequence[str],
    colours: dict[str, str],
    gemm_tflops: float,
) -> None:
    y, ticks = 0.0, []
    for label in labels:
        group = [point for point in points if point.label == label]
        ticks.append(y + (len(group) - 1) / 2)
        for point in group:
            first = point.implementation == names[0]
            error = [[point.tflops - point.low], [point.high - point.tflops]]
            axes.barh(y, point.tflops, 0.84, color=colours[point.implementation], zorder=2)
            axes.errorbar(point.tflops, y, xerr=error, ecolor=INK, elinewidth=0.9, capsize=0, zorder=3)
            axes.annotate(
                f"{point.tflops:.0f}",
                (max(point.high, point.tflops), y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5 if first else 9,
                fontweight="bold" if first else "normal",
                color=INK if first else FAINT,
            )
            y += 1
        y += 0.9
    axes.axvline(gemm_tflops, color=INK, lw=1.2, ls=(0, (4, 3)))
    axes.annotate(
        "GEMM", (gemm_tflops, -0.8), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9.5, color=INK
    )
    axes.set_yticks(ticks, labels)
    axes.set_ylim(y - 0.6, -1.3)
    axes.set_xlim(0, gemm_tflops * 1.1)
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.set_xlabel("TFLOP/s (thin lines: slowest and fastest round)")
    axes.set_title("beside what else computes the same", loc="left", fontsize=10.5)
    patches = [axes.barh(0, 0, color=colours[name])[0] for name in names]
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(names), "columnspacing": 1.2}
    axes.legend(patches, names, **above, fontsize=9.5, frameon=False, borderpad=0, borderaxespad=0.5)
