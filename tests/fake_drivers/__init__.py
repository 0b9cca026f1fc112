"""GPU drivers that run nothing, so that guards, loader and launcher are tested on a machine without a GPU.

Each scenario is a text run in a process of its own, with the stub libraries found before any real one; it starts with
`from fake_drivers.process import *`. Starting Python and importing torch takes seconds, so the processes are forks of
one that has done that and no more: no driver is open in it, no image loaded.
"""

from __future__ import annotations

import json
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
SERVER = """
from fake_drivers.process import *
from fake_drivers import process
import json, linecache, sys, traceback

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            process.IMAGES = IMAGES = Path(request["images"])
            code = request["code"]
            linecache.cache["<scenario>"] = (len(code), None, code.splitlines(True), "<scenario>")
            exec(compile(code, "<scenario>", "exec"), dict(globals()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


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


def _environment(libraries: Path, images: Path) -> dict[str, str]:
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "FAKE_IMAGES": str(images),
    }


class Server:
    """Runs scenarios in forks of one process."""

    def __init__(self, libraries: Path) -> None:
        self.libraries = libraries
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=_environment(libraries, libraries),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, images: Path) -> str:
        """Runs a scenario whose images are in this folder; returns its output, or fails with its traceback."""
        images.mkdir(parents=True, exist_ok=True)
        output = images / "output.txt"
        request = {"code": textwrap.dedent(code), "images": str(images), "output": str(output)}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline().strip()
        text = output.read_text() if output.exists() else ""
        assert status == "0", f"exit status {status}\n{text}"
        return text

    def stop(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def run_alone(libraries: Path, code: str, images: Path, **environment: str) -> str:
    """The same in a process that starts from nothing, for what its environment decides."""
    variables = {**_environment(libraries, images), **environment}
    script = "from fake_drivers.process import *\n" + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
