"""Puts the tree's root on sys.path (`build_tools`, `csrc`); `paged_prefill` itself comes from the installed wheel."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

DEVICE = "cuda"  # torch's name for ROCm devices too


def pytest_addoption(parser):
    group = parser.getgroup("paged_prefill")
    group.addoption("--images-of", metavar="TARGET", help="run every GPU on this target's images, whatever it is")
    group.addoption(
        "--write-proofs",
        nargs="?",
        type=Path,
        const=ROOT / "proofs",
        metavar="FOLDER",
        help="record which images passed, in proofs/ or in another folder; in one process, not under xdist",
    )
    group.addoption("--images-in", metavar="FOLDER", type=Path, help="take --images-of from here, not from the package")


@pytest.fixture(scope="session", autouse=True)
def _images(request):
    target, folder = (request.config.getoption(name) for name in ("--images-of", "--images-in"))
    if not target:
        return
    from paged_prefill import _C, _loader

    for ordinal in range(torch.cuda.device_count()):
        _loader.override(ordinal, folder, target)
        _C.preload(ordinal)
        loaded = _C.loaded(ordinal)
        assert loaded and all(name.endswith(f"-{target}") for name in loaded), loaded


launched = Counter()  # variant id -> calls made by the fixture `call`


def pytest_sessionfinish(session, exitstatus):
    """Records what a GPU has run, once everything has passed: by the image, or by the PTX that its driver compiled."""
    folder = session.config.getoption("write_proofs")
    if not folder or exitstatus or not launched:
        return
    from build_tools import proofs
    from paged_prefill import _loader

    entries = {entry["id"]: entry for entry in _loader._images_of(0).data["variants"]}
    for name, calls in launched.items():
        entry = entries[name]
        kind, digest = ("ptx", "ptx_sha256") if entry["format"] == "ptx" else ("hardware", "sha256")
        record = {digest: entry[digest], "calls": calls, "device": torch.cuda.get_device_name(0)}
        proofs.write(folder / f"{kind}-{entry['target']}.json", {name: record})


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA or ROCm GPU; torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory):
    import fake_drivers

    server = fake_drivers.Server(fake_drivers.build(tmp_path_factory.mktemp("stubs")))
    yield server
    server.stop()


@pytest.fixture
def scenario(fake_server, tmp_path):
    """scenario(code) -> output: runs the code on fake drivers, in a process where nothing has been used yet."""
    return lambda code: fake_server.run(code, tmp_path / "images")


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def call():
    """call(case) -> (out, lse): the out operator, with guard words around both results."""
    import paged_prefill
    from cases import Guarded

    def run(case, out_offset=0, lse_offset=0):
        out = Guarded(case.q.shape, case.q.dtype, case.q.device, out_offset)
        lse = Guarded(case.q.shape[:2], torch.float32, case.q.device, lse_offset)
        torch.ops.paged_prefill.sparse_attn_v4_paged_prefill_out(
            *case.args(), case.replicated_logit_shift, out=out.data, lse=lse.data
        )
        if case.q.is_cuda and case.q.size(0):
            launched[paged_prefill._C.last_launch(case.q.device.index)] += 1
        out.assert_intact(f"{case.name}: out")
        lse.assert_intact(f"{case.name}: lse")
        return out.data, lse.data

    return run


@pytest.fixture(scope="session")
def expect():
    """expect(case, tokens=None) -> (out, lse): the reference in fp64, unrounded."""
    from paged_prefill import reference

    def run(case, tokens=None):
        return reference(
            *case.args(),
            True,
            case.replicated_logit_shift,
            compute_dtype=torch.float64,
            out_dtype=torch.float64,
            tokens=tokens,
        )

    return run


@pytest.fixture(scope="session")
def check(call, expect):
    """check(case): one call with guard words, out and lse against the reference; returns (out, lse)."""
    from oracle import assert_close, assert_lse_close

    def run(case, what="", **offsets):
        out, lse = call(case, **offsets)
        expected_out, expected_lse = expect(case)
        assert_close(out, expected_out, f"{case.name} {what}")
        assert_lse_close(lse, expected_lse, f"{case.name} {what}")
        return out, lse

    return run
