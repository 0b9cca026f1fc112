"""The installed wheel as a product: what it needs of a machine, torch and Python, and what verify_wheel refuses."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

pytest.importorskip("elftools", reason="pyelftools reads the objects")
import torch

import paged_prefill
from build_tools import verify_wheel
from build_tools.targets import TARGETS
from build_tools.verify_wheel import EXTENSION, IMAGES

MANIFEST = f"{IMAGES}/manifest.json"
MODULE = "paged_prefill/__init__.py"
OLDEST_TORCH = "0x020a000000000000"  # TORCH_TARGET_VERSION of 2.10
INSTALLERS_OWN = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}


def with_record(files):
    """The files with a RECORD that fits them."""
    folder = next(name for name in files if name.endswith(".dist-info/METADATA")).rpartition("/")[0]
    text = io.StringIO()
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        csv.writer(text).writerow([name, f"sha256={digest}", len(content)])
    csv.writer(text).writerow([f"{folder}/RECORD", "", ""])
    return {**files, f"{folder}/RECORD": text.getvalue().encode()}


@pytest.fixture(scope="module")
def payload():
    """The files of the installed wheel, without what the installer adds."""
    files = {}
    for file in importlib.metadata.files("paged-prefill"):
        name = PurePosixPath(file)
        if name.parts[0] != ".." and name.suffix != ".pyc" and name.name not in INSTALLERS_OWN:
            files[str(name)] = Path(file.locate()).read_bytes()
    return files


@pytest.fixture(scope="module")
def wheel(payload):
    return with_record(payload)


@pytest.fixture(scope="module")
def extension(payload):
    return payload[EXTENSION]


def test_the_installed_wheel_passes_every_check(wheel):
    assert verify_wheel.verify(wheel) == []


def test_summary_has_a_line_for_each_target(wheel):
    lines = list(verify_wheel.summary(wheel))
    assert [line.split()[0] for line in lines] == list(verify_wheel.manifest_of(wheel)["targets"])


def test_the_tag_is_true(wheel, extension):
    """Every symbol version that the extension needs is one that auditwheel's policy for the tag promises."""
    policy = pytest.importorskip("auditwheel.policy", reason="auditwheel holds the policies of the tags")
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc

    for tag in verify_wheel.platform_tags(wheel):
        match = re.fullmatch(r"(manylinux_\d+_\d+|manylinux2014)_(\w+)", tag)
        assert match, f"the tag is {tag}: `make wheel` gives the one that the symbols allow"
        policies = policy.WheelPolicies(libc=Libc.GLIBC, arch=Architecture(match[2]))
        promised = policies.get_policy_by_name(tag).symbol_versions
        for prefix, versions in verify_wheel.versions_needed(extension).items():
            assert versions <= set(promised[prefix]), f"{tag}: {prefix} {versions - set(promised[prefix])} is beyond it"


def test_python_tag_is_the_stable_one():
    text = importlib.metadata.distribution("paged-prefill").read_text("WHEEL")
    assert re.findall(r"^Tag: (\S+?-\S+?)-", text, re.MULTILINE) == ["cp310-abi3"]
    assert "Root-Is-Purelib: false" in text


def test_every_undefined_symbol_has_an_owner(extension):
    """A versioned one belongs to a system library, the rest to the limited Python API and torch's C interface."""
    _, undefined = verify_wheel.dynamic_symbols(extension)
    unversioned = undefined - versioned_symbols(extension)
    weak = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}
    owned = re.compile(r"_?Py[A-Z_]\w*|aoti_torch_\w+|torch_\w+")
    assert {name for name in unversioned - weak if not owned.fullmatch(name)} == set()


def versioned_symbols(extension):
    elf = verify_wheel.ELFFile(io.BytesIO(extension))
    numbers = elf.get_section_by_name(".gnu.version")
    symbols = elf.get_section_by_name(".dynsym")
    local_or_global = ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
    return {
        symbols.get_symbol(index).name
        for index in range(symbols.num_symbols())
        if numbers.get_symbol(index)["ndx"] not in local_or_global
    }


def test_the_extension_keeps_to_the_limited_api():
    pytest.importorskip("abi3audit", reason="abi3audit knows the symbols of the limited API")
    path = Path(paged_prefill.__file__).with_name("_C.abi3.so")
    command = [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_amd_target_has_its_number_in_elf_headers():
    assert {name for name, target in TARGETS.items() if target.vendor == "hip"} <= verify_wheel.AMD_MACHINES.keys()


def test_torch_symbols_are_those_of_the_oldest_stable_interface(extension, tmp_path):
    """What torch's own headers declare when told to serve 2.10 is what 2.10 exports and later ones keep."""
    compiler = shutil.which("c++") or shutil.which("g++") or pytest.skip("needs a C++ preprocessor")
    include = Path(torch.__file__).parent / "include"
    headers = ["torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h"]
    source = tmp_path / "headers.cpp"
    source.write_text("".join(f"#include <{header}>\n" for header in headers))

    def declared(version):
        command = [compiler, "-E", "-P", "-std=c++17", f"-DTORCH_TARGET_VERSION={version}", f"-I{include}", str(source)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return set(re.findall(r"\b(?:aoti_)?torch_\w+(?=\s*\()", text))

    _, undefined = verify_wheel.dynamic_symbols(extension)
    used = {name for name in undefined if re.match(r"(aoti_)?torch_", name)}
    oldest = declared(OLDEST_TORCH)
    assert len(used) > 10
    assert used <= oldest, f"not in torch 2.10's stable interface: {sorted(used - oldest)}"
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 11):  # the headers do tell versions apart
        assert oldest < declared("0x020b000000000000")


def test_no_runtime_module_imports_what_the_wheel_does_not_require(payload):
    for name in (name for name in payload if name.endswith(".py")):
        for node in ast.walk(ast.parse(payload[name])):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {n.partition(".")[0] for n in names} & {"triton", "build_tools", "csrc"}, name


def test_metadata():
    metadata = importlib.metadata.metadata("paged-prefill")
    requires = importlib.metadata.requires("paged-prefill")
    assert metadata["Requires-Python"] == ">=3.10"
    assert [r for r in requires if "extra ==" not in r] == ["torch>=2.10"]
    assert {"bench", "test"} <= set(metadata.get_all("Provides-Extra"))
    assert {r.partition(">")[0] for r in requires if 'extra == "bench"' in r} == {"matplotlib", "rich"}
    assert not [r for r in requires if r.startswith("triton")]
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL")} >= {"Source", "Changelog"}
    assert "Programming Language :: Python :: 3" in metadata.get_all("Classifier")
    assert metadata["Version"] == paged_prefill.__version__


def test_build_info(payload):
    info = paged_prefill.build_info()
    manifest = json.loads(payload[MANIFEST])
    assert info["version"] == paged_prefill.__version__ == manifest["version"]
    assert info["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", info["commit"])
    assert info["dirty"] in (None, True, False)
    assert info["compilers"] == manifest["compilers"] and {"triton", "ptxas"} <= info["compilers"].keys()
    assert sorted(info["targets"]) == sorted(manifest["targets"])
    assert info["manifest_sha256"] == hashlib.sha256(payload[MANIFEST]).hexdigest()


def test_size_budget(wheel, tmp_path):
    path = tmp_path / "wheel.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in wheel.items():
            archive.writestr(name, content)
    assert path.stat().st_size < verify_wheel.SIZE_BUDGET


def change_manifest(files, change):
    manifest = json.loads(files[MANIFEST])
    change(manifest)
    return {**files, MANIFEST: json.dumps(manifest).encode()}


def change_image(files, image, **record):
    """The first variant with another image, and a record that fits it but for what `record` says."""

    def change(manifest):
        variant = manifest["variants"][0]
        variant |= {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest(), **record}

    files = change_manifest(files, change)
    return {**files, f"{IMAGES}/{json.loads(files[MANIFEST])['variants'][0]['file']}": image}


def first_image(files):
    return files[f"{IMAGES}/{json.loads(files[MANIFEST])['variants'][0]['file']}"]


def replace(files, suffix, old, new):
    name = next(name for name in files if name.endswith(suffix))
    text = re.sub(old, new, files[name].decode(), count=1, flags=re.MULTILINE)
    assert text != files[name].decode()
    return {**files, name: text.encode()}


def without(files, name):
    return {key: content for key, content in files.items() if key != name}


def first(files):
    return json.loads(files[MANIFEST])["variants"][0]


DAMAGES = {
    "manifest missing": (
        lambda files: without(files, MANIFEST),
        "manifest.json is missing: the build folder is half-written, remove build/",
    ),
    "image missing": (lambda files: without(files, f"{IMAGES}/{first(files)['file']}"), "is missing: the build folder"),
    "stale module": (
        lambda files: {**files, "paged_prefill/_old.py": b""},
        "_old.py belongs to no file of the tree: the build folder is stale",
    ),
    "image altered": (
        lambda files: {**files, f"{IMAGES}/{first(files)['file']}": first_image(files)[:-1] + b"?"},
        "do not hash to the manifest's sha256",
    ),
    "image truncated": (
        lambda files: {**files, f"{IMAGES}/{first(files)['file']}": first_image(files)[:100]},
        "has 100 bytes that do not hash",
    ),
    "other machine code": (
        lambda files: change_image(files, files[EXTENSION]),
        r"is for machine EM_\w+, not|is not PTX|has no entry",
    ),
    "too much shared memory": (
        lambda files: change_manifest(files, lambda m: m["variants"][0].update(shared=1 << 20)),
        "needs 1048576 bytes of shared memory, its target has",
    ),
    "other symbol": (
        lambda files: change_manifest(files, lambda m: m["variants"][0].update(symbol="absent")),
        "has no (symbol|entry) absent",
    ),
    "build path": (
        lambda files: change_manifest(files, lambda m: m.update(note="/home/someone/tree/csrc/kernels/portable.py")),
        "manifest.json holds the build path /home/someone/tree/csrc/kernels/portable.py",
    ),
    "other version": (
        lambda files: change_manifest(files, lambda m: m.update(version="9.9")),
        "the manifest is of version 9.9",
    ),
    "tag too low": (
        lambda files: replace(files, "/WHEEL", r"manylinux_\d+_\d+", "manylinux_2_5"),
        r"needs glibc 2\.\d+, the tag manylinux_2_5_\w+ says less",
    ),
    "tag of another machine": (
        lambda files: replace(files, "/WHEEL", r"(x86_64|aarch64)$", "riscv64"),
        "build on that machine",
    ),
    "a requirement": (
        lambda files: replace(
            files, "/METADATA", "^Requires-Dist: torch", "Requires-Dist: triton\nRequires-Dist: torch"
        ),
        "triton is required at run time",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_wheel_is_refused_in_words(payload, name):
    damage, words = DAMAGES[name]
    problems = verify_wheel.verify(with_record(damage(payload)))
    assert [problem for problem in problems if re.search(words, problem)], problems
    assert all(problem.endswith(".") or "build again" in problem for problem in problems)


def test_a_file_that_does_not_fit_record_is_told(wheel):
    problems = verify_wheel.verify({**wheel, MODULE: wheel[MODULE] + b"\n"})
    assert problems == [f"{MODULE} does not have the sha256 in RECORD: the wheel was altered, build it again."]
    problems = verify_wheel.verify({**wheel, "extra.txt": b""})
    assert "extra.txt is in the wheel only: the wheel was altered, build it again." in problems


def test_command_prints_a_line_for_each_target_and_fails_on_a_bad_wheel(wheel, payload, tmp_path, capsys):
    def write(name, files):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, content in files.items():
                archive.writestr(file, content)
        return str(tmp_path / name)

    assert verify_wheel.main([write("good.whl", wheel)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("good.whl: ") and out[0].endswith("every check passed")
    assert len(out) == 1 + len(verify_wheel.manifest_of(wheel)["targets"])
    assert verify_wheel.main([write("bad.whl", with_record(without(payload, MANIFEST)))]) == 1
    assert "manifest.json is missing" in capsys.readouterr().err
    manifest = json.loads(payload[MANIFEST])
    lacking = sorted(manifest["targets"])[0]
    manifest["targets"].pop(lacking)
    manifest["variants"] = [variant for variant in manifest["variants"] if variant["target"] != lacking]
    names = {f"{IMAGES}/{variant['file']}" for variant in manifest["variants"]} | {MANIFEST}
    fewer = {name: content for name, content in payload.items() if not name.startswith(IMAGES) or name in names}
    fewer[MANIFEST] = json.dumps(manifest).encode()
    path = write("fewer.whl", with_record(fewer))
    assert verify_wheel.main([path]) == 0
    assert verify_wheel.main([path, "--complete"]) == 1
    assert re.search(rf"it lacks .*{lacking}.*: build it without PAGED_PREFILL_TARGETS\.", capsys.readouterr().err)
