"""Every image of this machine's GPU under compute-sanitizer, on small hostile inputs.

    python tests/sanitize.py

memcheck and initcheck run over all of the device's images, racecheck over the portable kernel's: the Hopper kernels
hand data from warp to warp by mbarriers and named barriers, which racecheck does not follow. Each tensor is an
allocation of its own, made by a copy from the host, so that an access outside one is an error and nothing but the
kernels under test runs. One line a tool; the exit status is 1 if there was an error or a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = {"memcheck": "all", "initcheck": "all", "racecheck": "portable"}
CASES = ("ragged", "hostile_indices", "hostile_indptr", "all_holes", "tables_empty")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def variants_of(kernels: str, device: int = 0):
    """The manifest, and its entries that serve the device."""
    from paged_prefill import _choice, _devices, _manifest

    manifest = _manifest.read_manifest()
    variants = _choice.choose(manifest.data, _devices.visible()[device][1]).variants
    return manifest, [v for v in variants if kernels == "all" or v["kernel"] == kernels]


def alone(manifest, variant, folder: Path) -> Path:
    """A folder of images with this one only, so that every call it can take runs on it."""
    folder.mkdir()
    (folder / variant["file"]).symlink_to(manifest.folder / variant["file"])
    target = {variant["target"]: manifest.data["targets"][variant["target"]]}
    (folder / "manifest.json").write_text(json.dumps({**manifest.data, "targets": target, "variants": [variant]}))
    return folder


def run(kernels: str, device: str = "cuda") -> None:
    """Calls each image; what the sanitizer watches."""
    import torch

    import cases
    import paged_prefill
    from oracle import assert_close, assert_lse_close
    from paged_prefill import _C, _loader

    manifest, variants = variants_of(kernels)
    calls = 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for number, variant in enumerate(variants):
            _loader.override(0, alone(manifest, variant, Path(folder) / str(number)))
            # A tile that is full and one that is not, as far as the image takes that many heads.
            heads = min(variant["head_tile"] + 1, variant["max_heads"] or variant["head_tile"] + 1)
            options = {"heads": max(heads, variant["min_heads"] or 1), "head_dim": variant["head_dim"] or 72}
            for name in CASES:
                case = cases.build(name, dtype=getattr(torch, DTYPES[variant["dtype"]]), **options)
                expected = paged_prefill.reference(
                    *case.args(), True, compute_dtype=torch.float64, out_dtype=torch.float64
                )
                inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in case.args()]
                out, lse = paged_prefill.sparse_attn_v4_paged_prefill(*inputs, return_lse=True)
                what = f"{variant['id']} {name}"
                assert_close(out.cpu(), expected[0], what)
                assert_lse_close(lse.cpu(), expected[1], what)
                calls += 1
            assert device != "cuda" or _C.last_launch(0) == variant["id"]
    print(f"{len(variants)} images, {calls} calls")


def sanitize(tool: str, kernels: str, command: str) -> bool:
    """One tool over the images; prints its line, and its whole output if there was anything."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    result = subprocess.run(
        [command, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--run", kernels],
        env=environment,
        capture_output=True,
        text=True,
    )
    text = result.stdout + result.stderr
    found = SUMMARY.search(text)
    calls = re.search(r"^\d+ images, \d+ calls$", text, re.MULTILINE)
    clean = result.returncode == 0 and found is not None and int(found[1]) == 0 and calls is not None
    if not clean:
        print(text[-8000:])
    print(
        f"{tool}: {calls[0] if calls else 'did not finish'}, {found[0] if found else 'no summary'}, "
        f"{time.monotonic() - start:.0f} s",
        flush=True,
    )
    return clean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the tool, or its path")
    parser.add_argument("--run", metavar="KERNELS", help="call the images in this process: what the tool watches")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run)
        return
    command = shutil.which(arguments.sanitizer)
    if command is None:
        sys.exit(f"{arguments.sanitizer} is not on PATH: it comes with the CUDA toolkit, in its bin folder")
    clean = [sanitize(tool, TOOLS[tool], command) for tool in arguments.tools]
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()
