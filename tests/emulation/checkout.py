"""Where the emulator is: tinygrad's sources (MIT) at one commit, in the folder that EMULATOR names; nothing is copied.

The corrections are written against that commit's internals, so another one is refused rather than tried.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/tinygrad/tinygrad"
COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
VARIABLE = "EMULATOR"


def missing() -> str | None:
    """Why nothing can be emulated here, or None."""
    if not os.environ.get(VARIABLE):
        return f"{VARIABLE} names no folder; set it to a checkout of {REPOSITORY} at {COMMIT}"
    if shutil.which("clang") is None:
        return "the emulator compiles each instruction with clang, and there is no clang on PATH; install it"
    return None


def enable() -> None:
    """Put the checkout on sys.path.

    Raises:
        RuntimeError: the folder is not an unmodified checkout of COMMIT, or another `test` package is imported.
    """
    folder = Path(os.environ[VARIABLE]).resolve()
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if commit != COMMIT:
        raise RuntimeError(f"{VARIABLE} needs {REPOSITORY} at {COMMIT}, {folder} is at {commit}; check that commit out")
    if changes := _git(folder, "status", "--porcelain", "--untracked-files=no"):
        raise RuntimeError(f"{VARIABLE} needs an unmodified checkout, {folder} has changes; revert them:\n{changes}")
    sys.path.insert(0, str(folder))
    import test  # tinygrad's; Python's own regression tests have the same name

    if Path(test.__file__).parent.parent != folder:
        raise RuntimeError(f"`test` is {test.__file__}, needs {folder / 'test'}; import nothing named test before")


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        said = result.stderr.strip()
        raise RuntimeError(f"{VARIABLE} needs a git checkout of {REPOSITORY}; of {folder} git says: {said}")
    return result.stdout
