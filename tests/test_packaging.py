"""Building and releasing: the sentences a build ends with, the source distribution, reproducibility, the workflows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_tools.targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# The fewest variants; `make test` has them in its image cache, so that building with them compiles the extension only.
CHEAP_TARGET = "gfx1201"


def run_setup(arguments, before="", **environment):
    """setup.py in a process of its own, after the statements in `before`."""
    code = f"import runpy, sys\n{before}\nsys.argv = ['setup.py', *{arguments!r}]\nrunpy.run_path('setup.py')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def assert_ends_with(result, sentence):
    """The build ended with this sentence and nothing else a person has to read."""
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert re.fullmatch(sentence, result.stderr.strip().splitlines()[-1]), result.stderr


def test_free_threaded_python_is_refused_by_setup():
    before = (
        "import sysconfig\nget = sysconfig.get_config_var\n"
        "sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED' or get(name)"
    )
    assert_ends_with(run_setup(["--version"], before), r"paged-prefill has no build for free-threaded Python: use .*\.")


def test_free_threaded_python_is_refused_by_the_tag():
    tags = pytest.importorskip("packaging.tags")
    wheel = tags.Tag("cp310", "abi3", "manylinux_2_34_x86_64")

    def accepts(version, abi):
        return wheel in set(tags.cpython_tags(version, [abi], [wheel.platform]))

    assert [accepts((3, minor), f"cp3{minor}") for minor in range(9, 15)] == [False, True, True, True, True, True]
    assert not accepts((3, 13), "cp313t") and not accepts((3, 14), "cp314t")


def test_old_python_is_refused_by_setup():
    before = (
        "sys.version_info = (3, 10, 14, 'final', 0)\n"
        "sys.version = sys.version.replace(sys.version.split()[0], '3.10.14')"
    )
    sentence = r"building paged-prefill needs Python 3\.11 or later .*, not 3\.10\.14: install a built wheel, .*\."
    assert_ends_with(run_setup(["--version"], before), sentence)


def test_missing_compiler_is_told(tmp_path):
    sentence = r"building paged-prefill needs a C\+\+17 compiler, and none is on PATH: install g\+\+ or clang\."
    assert_ends_with(run_setup(["--version"], PATH=str(tmp_path), CXX=""), sentence)


def test_wrong_triton_is_told_before_anything_compiles(tmp_path):
    before = (
        "import importlib.metadata as metadata\nversion = metadata.version\n"
        "metadata.version = lambda n: '3.5.0' if n == 'triton' else version(n)"
    )
    pytest.importorskip("torch", "2.13", reason="setup.py imports torch's build helper")
    result = run_setup(
        ["build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")], before
    )
    assert_ends_with(result, r"compiling the images needs Triton 3\.9\.0, found 3\.5\.0: pip install triton==3\.9\.0\.")
    assert not list(tmp_path.rglob("*.o"))


def test_unknown_target_is_told_before_anything_compiles(tmp_path):
    pytest.importorskip("triton", "3.9.0", reason="building needs Triton 3.9")
    arguments = ["build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    result = run_setup(arguments, PAGED_PREFILL_TARGETS="sm80 hopper")
    assert_ends_with(result, r"unknown target hopper: the known ones are sm80, .*gfx942.*\.")
    assert not list(tmp_path.rglob("*.o"))


def test_commit_of_an_outer_repository_is_not_taken(tmp_path):
    """A source tree unpacked inside another project's checkout has no commit of its own."""
    git = shutil.which("git") or pytest.skip("needs git")
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m", "m"],
    ):
        subprocess.run([git, "-C", str(tmp_path), *arguments], check=True)
    source = (ROOT / "setup.py").read_text()
    function = source[source.index("COMMIT_RECORD =") : source.index("class BuildImages")]
    names = {"json": json, "subprocess": subprocess, "Path": Path, "ROOT": tmp_path / "inner"}
    (tmp_path / "inner").mkdir()
    exec(function, names)
    assert names["commit"]() == {"commit": None, "dirty": None}
    names["ROOT"] = tmp_path
    assert re.fullmatch("[0-9a-f]{40}", names["commit"]()["commit"]) and names["commit"]()["dirty"] is False
    (tmp_path / "new.py").write_text("")
    assert names["commit"]()["dirty"] is True
    (tmp_path / "commit.json").write_text('{"commit": "c", "dirty": false}')
    assert names["commit"]() == {"commit": "c", "dirty": False}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("triton", "3.9.0", reason="building needs Triton 3.9")
    pytest.importorskip("build", reason="the build front end makes the source distribution")
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("paged_prefill-*.tar.gz"))


def test_sdist_holds_the_tree(sdist):
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("needs git, which knows the tree's files")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert tracked - held == set()
    assert not [name for name in held if name.endswith((".so", ".cubin", ".hsaco", ".pyc", "manifest.json"))]


def test_sdist_builds_without_git_and_twice_the_same(sdist, tmp_path):
    """From the archive and from a folder, with a git that fails: byte-identical wheels that know their commit."""
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "git").write_text("#!/bin/sh\nexit 1\n")
    (broken / "git").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{broken}{os.pathsep}{os.environ['PATH']}",
        "PAGED_PREFILL_TARGETS": CHEAP_TARGET,
        "PAGED_PREFILL_CACHE": os.environ.get("PAGED_PREFILL_CACHE") or str(ROOT / "build" / "image-cache"),
        "SOURCE_DATE_EPOCH": "1764547200",
        "CUDA_VISIBLE_DEVICES": "",
    }
    folder = tmp_path / "some" / "deeper" / "folder"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheels = []
    for index, source in enumerate((sdist, next(folder.iterdir()))):
        out = tmp_path / str(index)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            str(out),
            str(source),
        ]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        wheels.append(next(out.glob("paged_prefill-*-cp310-abi3-linux_*.whl")))
    first, second = (zipfile.ZipFile(wheel) for wheel in wheels)
    differing = [name for name in first.namelist() if first.read(name) != second.read(name)]
    assert first.namelist() == second.namelist() and not differing
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert json.loads(first.read("paged_prefill/_build.json")) == recorded_commit(sdist)


def recorded_commit(sdist):
    with tarfile.open(sdist) as archive:
        record = next(name for name in archive.getnames() if name.endswith("/commit.json"))
        return json.load(archive.extractfile(record))


def test_sdist_knows_its_commit(sdist):
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("needs git, which knows the commit")

    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()

    assert recorded_commit(sdist) == {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}


def test_cibuildwheel_builds_one_wheel_for_each_architecture():
    pytest.importorskip("cibuildwheel", reason="cibuildwheel reads its configuration")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux"]
    result = subprocess.run(
        [*command, "--archs", "x86_64,aarch64"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == ["cp312-manylinux_x86_64", "cp312-manylinux_aarch64"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_pinned_and_runs_make(path):
    text = path.read_text()
    for action in re.findall(r"^\s*-? ?uses: (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40} # v[\d.]+|\./\.github/workflows/\w+\.yml", action), action
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in re.findall(r"^\s*-? ?run: (.*)$", text, re.MULTILINE):
        words = command.split()
        assert words[0] == "make" and words[1] in targets, command
    assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE)
    assert text.count("write") == text.count("id-token: write # proves") <= 1


def test_arch_matrix_has_each_target_once():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = " ".join(re.findall(r"^\s+targets: (.*)$", text, re.MULTILINE)).split()
    assert sorted(listed) == sorted(TARGETS)


def test_a_hook_bans_triton_at_run_time():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    ban = re.compile(re.search(r"language: pygrep\s+entry: (.*)", text)[1], re.MULTILINE)
    assert all(
        ban.search(line) for line in ("import triton", "from triton.language import dot", "    import triton.testing")
    )
    assert not any(
        ban.search(line) for line in ("import tritonclient", "# import triton", "from ._choice import choose")
    )
    for path in (ROOT / "python").rglob("*.py"):
        assert not ban.search(path.read_text()), path
    assert not re.search(r"repo: (?!local)", text)


def test_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings and headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
