"""What the memory-safety checks cost: the images with them and without, interleaved on one GPU.

    python -m benchmarks.bounds build --targets sm90a --out build/unchecked     (anywhere: compiles, no GPU)
    python -m benchmarks.bounds run --images build/unchecked                    (on the GPU, beside the installed wheel)

Without them an index is compared with zero only, since holes are part of the operator, and bounds are taken as they
come. The two must give the same bits on the workloads, whose lists are good.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# file -> (text with checks, without); each stands there exactly once
CHECKS = {
    "csrc/kernels/hopper_common.py": (
        ("(index >= 0) & (index < gl.where(in_prefix, self.unified_kv_rows, self.kv_rows))", "index >= 0"),
        ("gl.minimum(gl.maximum(gl.load(indptr_ptr + t), 0), length)", "gl.load(indptr_ptr + t)"),
        ("gl.minimum(gl.maximum(gl.load(indptr_ptr + t + 1), 0), length)", "gl.load(indptr_ptr + t + 1)"),
    ),
    "csrc/kernels/portable.py": (
        ("(index >= 0) & (index < tl.where(in_prefix, unified_kv_rows, kv_rows))", "index >= 0"),
        ("tl.minimum(tl.maximum(tl.load(indptr_ptr + t), 0), length)", "tl.load(indptr_ptr + t)"),
        ("tl.minimum(tl.maximum(tl.load(indptr_ptr + t + 1), 0), length)", "tl.load(indptr_ptr + t + 1)"),
    ),
    # Without its checks a Hopper image spills 8 bytes, which is no reason not to time it.
    "build_tools/compile.py": (('resources["spill_bytes"] > SPILL_BUDGET[target.family]', "False"),),
}


def build(targets: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("csrc/kernels", "build_tools", "python/paged_prefill/_version.py"):
            source, copy = ROOT / part, tree / part
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        for init in ROOT.glob("csrc/*.py"):
            shutil.copy(init, tree / "csrc")
        for name, changes in CHECKS.items():
            file = tree / name
            text = file.read_text()
            for old, new in changes:
                if text.count(old) != 1:
                    sys.exit(f"{name} has {text.count(old)} times, not once: {old}")
                text = text.replace(old, new)
            file.write_text(text)
        options = ["--targets", targets, "--out", str(out.resolve()), "--cache", f"{out.resolve()}-cache"]
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-m", "build_tools.compile", *options]
        subprocess.run(command, cwd=folder, env=environment, check=True)


def run(images: Path, heads: list[int]) -> None:
    import torch

    import paged_prefill
    from paged_prefill import _bench, _loader, _workload

    @contextmanager
    def using(name):
        _loader.override(0, images) if name == "without" else _loader.reset(0)
        yield

    print("layer      heads  with checks  without  with / without")
    for layer in _workload.LAYERS.values():
        for count in heads:
            workload = _workload.build(layer, heads=count, device="cuda")
            call = partial(paged_prefill.sparse_attn_v4_paged_prefill, *workload.args())
            results = {}
            for name in ("with", "without"):
                with using(name):
                    results[name] = call()
            assert torch.equal(*results.values()), f"{layer.name}, {count} heads: results differ"
            times = _bench.interleaved({"with": call, "without": call}, watch=using)
            with_checks, without = (statistics.median(times[name]) for name in ("with", "without"))
            ratio = statistics.median(a / b for a, b in zip(times["with"], times["without"], strict=True))
            print(f"{layer.name:10} {count:5}  {with_checks:8.4f} ms  {without:8.4f} ms  {ratio:.4f}", flush=True)
    _loader.reset(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="compile the images without checks")
    building.add_argument("--targets", default="sm90a")
    building.add_argument("--out", type=Path, required=True)
    running = commands.add_parser("run", help="time both on this machine's GPU")
    running.add_argument("--images", type=Path, required=True)
    running.add_argument("--heads", type=int, nargs="+", default=[128, 64, 16, 8])
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.targets, arguments.out)
    else:
        run(arguments.images.resolve(), arguments.heads)


if __name__ == "__main__":
    main()
