"""Builds the extension and the kernel images; everything declarative stands in pyproject.toml.

The images are compiled by `build_tools.compile`, without a GPU, into the build folder beside the package;
PAGED_PREFILL_TARGETS="sm90a gfx942" builds a subset, PAGED_PREFILL_CACHE names the folder of compiled images.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))  # an isolated build does not put the source tree on the path

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("paged-prefill has no build for free-threaded Python: use the ordinary build of Python 3.11 or later.")
if sys.version_info < (3, 11):
    sys.exit(
        "building paged-prefill needs Python 3.11 or later (Triton 3.9 has no earlier wheel), not "
        f"{sys.version.split()[0]}: install a built wheel, which runs on 3.10 and later."
    )
if not any(shutil.which(name) for name in (*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")):
    sys.exit("building paged-prefill needs a C++17 compiler, and none is on PATH: install g++ or clang.")

import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

TORCH_INCLUDE = Path(torch.__file__).parent / "include"
COMMIT_RECORD = "commit.json"  # written into a source distribution, which has no git


def commit() -> dict[str, object]:
    """The commit that the build comes from; None when neither git nor a source distribution's record knows."""
    if (ROOT / COMMIT_RECORD).exists():
        return dict(json.loads((ROOT / COMMIT_RECORD).read_text()))
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    try:
        if not (ROOT / ".git").exists():  # an outer repository's commit would be a false one
            raise FileNotFoundError
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": bool(dirty.strip())}


class BuildImagesAndExtension(BuildExtension):
    def run(self) -> None:
        from build_tools import BuildError
        from build_tools import compile as images
        from build_tools.targets import select

        package = Path(self.build_lib) / "paged_prefill"
        try:
            images.compilers()  # a wrong Triton or target is refused before anything compiles
            select(os.environ.get(images.TARGETS_VARIABLE))
            super().run()
            images.build(package / "images")
        except BuildError as error:
            sys.exit(str(error))
        (package / "_build.json").write_text(json.dumps(commit(), indent=1) + "\n")


class RecordCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        record = commit()  # before base_dir, which is made inside the tree
        super().make_release_tree(base_dir, files)
        Path(base_dir, COMMIT_RECORD).write_text(json.dumps(record, indent=1) + "\n")


setup(
    ext_modules=[
        CppExtension(
            "paged_prefill._C",
            sorted(f"csrc/{path.name}" for path in (ROOT / "csrc").glob("*.cpp")),
            depends=sorted(f"csrc/{path.name}" for path in (ROOT / "csrc").glob("*.h")),
            # before torch's libraries, which hold pieces of a newer libstdc++ that a later torch may not
            libraries=["stdc++"],
            py_limited_api=True,
            define_macros=[
                ("Py_LIMITED_API", "0x030A0000"),
                ("TORCH_TARGET_VERSION", "0x020a000000000000"),
            ],
            extra_compile_args=[
                "-std=c++17", "-O2", "-g0", "-Wall", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
                # torch's headers put __FILE__ into the binary: a build path would differ from machine to machine. Of
                # two maps that fit the last one counts, and the environment that holds torch may lie in the tree.
                f"-fmacro-prefix-map={ROOT}=.", f"-fmacro-prefix-map={TORCH_INCLUDE}=torch",
            ],
            extra_link_args=["-Wl,-s", f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}"],
        )
    ],
    cmdclass={"build_ext": BuildImagesAndExtension.with_options(use_ninja=False), "sdist": RecordCommit},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
