"""GPU drivers that run nothing, so that guards, loader and launcher are tested on a machine without a GPU.

Each scenario is a text run in a process of its own, with the stub libraries found before any real one; it starts with
`from fake_drivers.process import *`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
LIBRARIES = {
    "libcuda.so.1": "libcuda.c",
    "libamdhip64.so.7": "libamdhip64.c",
    "libtorch_cuda.so": "libtorch_stream.c",
    "libtorch_hip.so": "libtorch_stream.c",
}


def build(folder: Path) -> Path:
    """Compiles the stub libraries into a folder; skips the test where that cannot work."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("the fake drivers need a C compiler, and none is on PATH")
    if torch.version.cuda or torch.version.hip:
        pytest.skip(f"the fake drivers need a CPU build of torch, not {torch.__version__}: it brings the real ones")
    for name, source in LIBRARIES.items():
        command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", str(HERE / source)]
        subprocess.run([*command, "-o", str(folder / name), "-lpthread"], check=True)
    return folder


def run_scenario(libraries: Path, code: str, folder: Path, **environment: str) -> str:
    """Runs a scenario with the stub libraries; returns its output. Fails with its traceback if it fails."""
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "FAKE_IMAGES": str(folder),
        **environment,
    }
    script = "from fake_drivers.process import *\n" + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
