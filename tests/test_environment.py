"""The installed package in the surroundings that servers have: nothing writable, no home, no user name, odd tritons.

On a machine without a GPU the calls go to the fake drivers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import paged_prefill

UNKNOWN_USER = 54_321  # has no name, no home and no files
FAKE_CALL = """
from fake_drivers.process import *
for device in (0, 1):
    out_operator(**call(device=device))
    paged_prefill.preload(device)
assert len(launches()) == 2
"""
GPU_CALL = """
import torch, paged_prefill
q = torch.ones(1, 8, 64, dtype=torch.bfloat16, device="cuda")
i = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
out = paged_prefill.sparse_attn_v4_paged_prefill(q, q[0], i[:1], i, q[0], i[:1], i, None, 1.0)
assert torch.equal(out, q)
"""
WHERE = "\nprint(paged_prefill.__file__)\n"


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def surroundings(request):
    """(a call's code, variables that it needs, a folder that everybody can read): see `run`."""
    folder = Path(tempfile.mkdtemp(prefix="paged_prefill_"))  # pytest's own is for its user only
    folder.chmod(0o755)
    variables = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    if request.param == "fake":
        server = request.getfixturevalue("fake_server")
        shutil.copytree(server.libraries, folder / "lib")
        shutil.copytree(Path(__file__).parent / "fake_drivers", folder / "helpers" / "fake_drivers")
        variables |= {"LD_LIBRARY_PATH": str(folder / "lib"), "FAKE_IMAGES": str(folder)}
    yield FAKE_CALL if request.param == "fake" else GPU_CALL, variables, folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def start(code, variables, folder, paths, **options):
    search = os.pathsep.join(map(str, [*paths, folder / "helpers", *filter(None, sys.path[1:])]))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**variables, "PYTHONPATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def files_of(folder):
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def drop_capabilities():
    """Makes file permissions hold for root too, in this process and what it starts."""
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; it fails beyond the last one


def unprivileged():
    """Options that start a process to which permissions apply: as a user without a name where that user can run it."""
    if os.geteuid() != 0:
        return {}
    options = {"user": UNKNOWN_USER, "group": UNKNOWN_USER, "extra_groups": []}
    try:
        if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, **options).returncode == 0:
            return options
    except OSError:
        pass  # the interpreter lies in somebody's home
    return {"preexec_fn": drop_capabilities}


def test_W08_nothing_writable_no_home_no_user_name_and_8_processes(surroundings):
    code, variables, folder = surroundings
    options = unprivileged()
    site, home = folder / "site-packages", folder / "home"
    package = Path(paged_prefill.__file__).parent
    shutil.copytree(package, site / "paged_prefill", ignore=shutil.ignore_patterns("__pycache__"))
    home.mkdir()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    attempt = f"open({str(site / 'new')!r}, 'w')"
    assert subprocess.run([sys.executable, "-c", attempt], capture_output=True, **options).returncode, "still writable"
    before = files_of(folder)
    variables = {**variables, "TMPDIR": str(home), "XDG_CACHE_HOME": str(home)}  # and no HOME
    processes = [start(code + WHERE, variables, folder, [site], cwd=home, **options) for _ in range(8)]
    assert {finish(process).strip() for process in processes} == {str(site / "paged_prefill" / "__init__.py")}
    assert files_of(folder) == before
    assert not stat.S_IMODE(site.stat().st_mode) & 0o222


def test_W09_a_wrong_triton_makes_no_difference(surroundings):
    """One that fails on import, and so would tell if it were; without any the call works as well."""
    code, variables, folder = surroundings
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").write_text("raise RuntimeError('this triton is not to be imported')\n")
    check = "\nimport sys\nassert not any(name.partition('.')[0] == 'triton' for name in sys.modules)\n"
    finish(start(code + check, variables, folder, [folder]))
    # How the import system says "not there" to imports and to find_spec alike.
    refuse = "import sys\nsys.modules['triton'] = None\n"
    finish(start(refuse + code, variables, folder, []))


def test_W03_W11_variables_of_builds_and_of_visible_devices_are_not_read(surroundings):
    """Those that pick the GPU for the driver are its own affair: here they name what only the driver understands."""
    code, variables, folder = surroundings
    odd = {
        "PAGED_PREFILL_TARGETS": "gfx942",
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "CUDAARCHS": "80",
        "PYTORCH_ROCM_ARCH": "gfx90a",
        "HIP_VISIBLE_DEVICES": "x",
        "ROCR_VISIBLE_DEVICES": "GPU-0",
        "HSA_OVERRIDE_GFX_VERSION": "9.0.0",
        "GPU_DEVICE_ORDINAL": "7",
        "NVIDIA_VISIBLE_DEVICES": "MIG-GPU-5/1/0",
    }
    if not torch.cuda.is_available():
        odd["CUDA_VISIBLE_DEVICES"] = "MIG-41b35cd0-1b4c-5c5f-a1c0-0d4d3c5c5c5c"
    finish(start(code, {**variables, **odd}, folder, []))
