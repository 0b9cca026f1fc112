"""Writes the generated tables: `python -m build_tools.tables`; with --check, says which are stale and fails.

The support table of README.md follows from the target table, the manifest of the installed package and the records in
proofs/, docs/sizes.md from the manifest: a table can be read, but what is built decides what it says.
"""

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from build_tools import proofs
from build_tools.specs import variants
from build_tools.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SIZES = ROOT / "docs" / "sizes.md"
BEGIN, END = "<!-- support table: written by `make tables` -->", "<!-- end of the support table -->"


def table(head: list[str], rows: list[list[str]], right: int = 0) -> str:
    """A Markdown table; columns from index `right` on are aligned to the right when it is not 0."""
    rule = [" --- " if not right or index < right else " ---: " for index in range(len(head))]
    lines = ["|" + "|".join(f" {cell} " for cell in row) + "|" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]]) + "\n"


def _devices(target: Target) -> str:
    """Which devices the run-time choice gives the target's images."""
    if target.capability is None:
        return f"`{target.name}`"
    major, minor = target.capability
    if target.matches == "later":
        return f"compute capability {major}.{minor} and later"
    if target.matches == "minor":
        return f"compute capability {major}.{minor} and later {major}.x"
    return f"compute capability {major}.{minor}"


def support_table(manifest: dict[str, Any]) -> str:
    """One row a target, with what it serves, what it needs, and how far its images have been shown to be right."""
    known, rows = proofs.records(), []
    for target in TARGETS.values():
        vendor = "NVIDIA" if target.vendor == "cuda" else "AMD"
        driver = f"CUDA {target.minimum_driver}" if target.minimum_driver else ""
        images = str(len(variants([target])))
        shown = proofs.summary((v for v in manifest["variants"] if v["target"] == target.name), known)
        rows.append([f"`{target.name}`", vendor, _devices(target), target.products, images, driver, shown, target.note])
    return table(["Target", "Vendor", "Device", "For example", "Images", "Driver from", "Shown", "Note"], rows)


def with_support_table(readme: str, manifest: dict[str, Any]) -> str:
    """README's text with the table between its marks written anew.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md needs the line {BEGIN!r} and, below it, {END!r}: the support table goes between.")
    return f"{before}{BEGIN}\n{support_table(manifest)}{END}{after}"


def sizes_page(manifest: dict[str, Any]) -> str:
    """docs/sizes.md: bytes a target, and KB a variant as specs by targets."""
    by_target: dict[str, list[int]] = {name: [] for name in TARGETS if name in manifest["targets"]}
    by_spec: dict[str, dict[str, int]] = defaultdict(dict)
    for variant in manifest["variants"]:
        by_target[variant["target"]].append(variant["bytes"])
        by_spec[variant["id"].removesuffix(f"-{variant['target']}")][variant["target"]] = variant["bytes"]
    rows = [[f"`{name}`", str(len(sizes)), f"{sum(sizes):,}"] for name, sizes in by_target.items()]
    every = [size for sizes in by_target.values() for size in sizes]
    rows.append(["all", str(len(every)), f"{sum(every):,}"])
    grid = [
        [f"`{spec.partition('-')[2]}`", *(f"{sizes[name] / 1000:.1f}" if name in sizes else "" for name in by_target)]
        for spec, sizes in by_spec.items()
    ]
    return (
        "# Sizes of the images\n\n"
        "Written by `make tables` from the manifest of the built wheel; a test fails when it is stale.\n\n"
        "The wheel's archive compresses the images to about a quarter, and the installer unpacks them. Installed, they "
        "stay as they are: to inflate one would add some 0.3 ms to its first call, of which reading and hashing it "
        "takes 0.04. The budget of the wheel is 30 MB, which the tests hold.\n\n"
        "## Bytes a target\n\n" + table(["Target", "Images", "Bytes"], rows, right=1) + "\n"
        "## Kilobytes a variant\n\n"
        "A row is a compile-time point: dtype, heads a tile, head_dim, and the kernel's short name if it has one.\n\n"
        + table(["", *(f"`{name}`" for name in by_target)], grid, right=1)
    )


def installed_manifest() -> dict[str, Any]:
    """The manifest of the installed package, which this does not import."""
    spec = importlib.util.find_spec("paged_prefill")
    if spec is None or spec.origin is None:
        sys.exit("the table of sizes is that of the installed wheel, and none is installed: make install.")
    return dict(json.loads((Path(spec.origin).parent / "images" / "manifest.json").read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m build_tools.tables", description="Write the generated tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a table is stale")
    check = parser.parse_args().check
    manifest = installed_manifest()
    if missing := TARGETS.keys() - manifest["targets"].keys():
        sys.exit(f"the installed wheel lacks {', '.join(sorted(missing))}: make install without PAGED_PREFILL_TARGETS.")
    stale = False
    for path, text in ((README, with_support_table(README.read_text(), manifest)), (SIZES, sizes_page(manifest))):
        if path.exists() and path.read_text() == text:
            continue
        stale = True
        if not check:
            path.write_text(text)
        print(f"{path.relative_to(ROOT)} {'is stale: make tables' if check else 'written'}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
