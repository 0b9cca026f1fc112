"""Tables and progress on a terminal: through rich where it is installed, in plain text where it is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_HAS_RICH = importlib.util.find_spec("rich") is not None


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], plain: bool = False) -> None:
    """Prints rows under column heads; numbers, and what begins with a digit, go to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    right = [
        bool(cells) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in cells) for i in range(len(columns))
    ]
    if _HAS_RICH and not plain:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        rich_table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, column in enumerate(columns):
            rich_table.add_column(column, justify="right" if right[i] else "left", overflow="fold")
        for row in cells:
            rich_table.add_row(*(_coloured(escape(cell)) for cell in row))
        Console(width=None if sys.stdout.isatty() else 160).print(rich_table)
        return
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    print(f"\n{title}" if title else "")
    for row in [list(columns), ["-" * width for width in widths], *cells]:
        parts = (
            cell.rjust(width) if side else cell.ljust(width)
            for cell, width, side in zip(row, widths, right, strict=True)
        )
        print("  " + "  ".join(parts).rstrip())
    print()


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yields the items with a progress bar on stderr, which leaves stdout to the result."""
    if _HAS_RICH and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=what, console=Console(stderr=True), transient=True)
        return
    every = 1 if sys.stderr.isatty() else max(1, len(items) // 5)  # a log file gets a few lines
    for i, item in enumerate(items, 1):
        if i % every == 0:
            print(f"{what} {i}/{len(items)}", file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)
        yield item


def _coloured(cell: str) -> str:
    colour = {"ok": "green", "FAIL": "bold red"}.get(cell.split(" ")[0])
    return f"[{colour}]{cell}[/{colour}]" if colour else cell
