"""Importing the package costs little, loads little and initialises nothing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest
import torch


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_adds_no_foreign_module():
    added = python(
        "import sys, torch; before = set(sys.modules); import paged_prefill\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    ).split()
    foreign = [name for name in added if name != "paged_prefill" and name not in sys.stdlib_module_names]
    assert foreign == []


def test_import_does_not_need_triton_numpy_or_rich():
    code = (
        "import sys, importlib.abc\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if ready and name.partition('.')[0] in ('triton', 'numpy', 'rich'):\n"
        "            raise ImportError(f'{name} is absent')\n"
        "ready = False; sys.meta_path.insert(0, Refuse())\n"
        "import torch; ready = True; import paged_prefill; print(paged_prefill.__version__)"
    )
    assert python(code)


def test_import_costs_under_50_ms():
    code = (
        "import torch, time; start = time.perf_counter(); import paged_prefill\n"
        "print((time.perf_counter() - start) * 1000)"
    )
    times = [float(python(code)) for _ in range(5)]
    assert statistics.median(times) < 50, f"milliseconds: {times}"


def test_W07_import_opens_no_driver_and_no_device():
    code = (
        "import torch, os\n"
        "names = ('libcuda.so', 'libamdhip64', 'libhsa-runtime', 'libnvidia')\n"
        "opened = lambda: {n for n in names for line in open('/proc/self/maps') if n in line}\n"
        "files = lambda: [os.path.realpath(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd')]\n"
        "before = opened(); import paged_prefill\n"
        "devices = [f for f in files() if f.startswith(('/dev/nvidia', '/dev/kfd', '/dev/dri'))]\n"
        "print(sorted(opened() - before), torch.cuda.is_initialized(), devices)"
    )
    assert python(code) == "[] False []"


def test_W07_import_then_fork():
    code = (
        "import torch, paged_prefill, os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    q = torch.zeros(1, 1, 8, dtype=torch.bfloat16); kv = q[0]; i = torch.tensor([0, 1], dtype=torch.int32)\n"
        "    out = paged_prefill.reference(q, kv, i[:1], i, kv, i[:1], i, None, 1.0)\n"
        "    os._exit(0 if out.shape == q.shape else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert python(code) == "0"


@pytest.mark.gpu
def test_W07_import_then_fork_then_use_the_gpu():
    """Nothing was initialised before the fork, so the child may be the first to use the device."""
    code = (
        "import torch, paged_prefill, os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    q = torch.ones(1, 8, 64, dtype=torch.bfloat16, device='cuda'); kv = q[0]\n"
        "    i = torch.tensor([0, 1], dtype=torch.int32, device='cuda')\n"
        "    out = paged_prefill.sparse_attn_v4_paged_prefill(q, kv, i[:1], i, kv, i[:1], i, None, 1.0)\n"
        "    os._exit(0 if torch.equal(out, q) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert python(code) == "0"


def test_import_writes_no_file(tmp_path):
    read_only = tmp_path / "home"
    read_only.mkdir(mode=0o555)
    assert python("import paged_prefill; print('fine')", HOME=str(read_only), XDG_CACHE_HOME=str(read_only)) == "fine"
    assert list(read_only.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_preload_without_a_gpu_says_what_is_missing():
    code = (
        "import torch, paged_prefill\n"
        "try: paged_prefill.preload()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "driver" in python(code)
