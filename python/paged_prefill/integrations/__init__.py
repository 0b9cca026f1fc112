"""Drop-in adapters: LLM servers that have the public Triton function use this package's operator in its place.

Switch one on with `sglang.install()` or `atom.install()`, or name it in the environment variable
PAGED_PREFILL_INSTALL ("sglang", "atom", or both with a comma). sglang reads the variable in each of its processes,
by this package's entry point in the group sglang.srt.plugins; elsewhere `import paged_prefill.integrations.auto` does.

vLLM's ROCm path calls a variant of the function whose prefix lies in two pools (`..._split_kv`), which this operator
does not serve yet: there is no adapter for vLLM.
"""

from __future__ import annotations

import os

from . import atom, sglang

__all__ = ["atom", "install_from_environment", "sglang", "uninstall"]

VARIABLE = "PAGED_PREFILL_INSTALL"
_HOSTS = {"atom": atom, "sglang": sglang}


def install_from_environment() -> None:
    """Installs the adapters that PAGED_PREFILL_INSTALL names; none if it is unset or empty.

    Raises:
        RuntimeError: the variable names something else, or an adapter cannot be installed.
    """
    names = [name.strip().lower() for name in os.environ.get(VARIABLE, "").split(",")]
    for name in filter(None, names):
        if name not in _HOSTS:
            raise RuntimeError(
                f"{VARIABLE} names {name!r}, which has no adapter\nset it to some of {', '.join(_HOSTS)}, with commas"
            )
        _HOSTS[name].install()


def uninstall() -> None:
    """Undoes every `install`; each host has its own function again."""
    for host in _HOSTS.values():
        host.uninstall()
