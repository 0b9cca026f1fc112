"""Serves ATOM's `sparse_attn_v4_paged_prefill` with this package's operator.

ATOM defines it in `atom.model_ops.v4_kernels.paged_prefill`, re-exports it from `atom.model_ops.v4_kernels`, and its
models copy it from there. The tenth positional argument is `out`, which may be q. With the planes of an FP8 cache
(`unified_kv_rope` and what belongs to it) ATOM's own kernel runs.
"""

from __future__ import annotations

from ._replace import Replacement

_replacement = Replacement("ATOM", ("atom.model_ops.v4_kernels.paged_prefill",))


def install() -> list[str]:
    """Makes ATOM use the operator from now on, in the modules it has imported and in those it will.

    Calls that the operator refuses by design still run ATOM's own kernel, each kind of them said once in the log.
    A second call changes nothing.

    Returns:
        The modules in which the function was replaced now; none if ATOM has yet to import it.

    Raises:
        RuntimeError: ATOM is not installed, or this version of it does not have the function.
    """
    return _replacement.install()


def uninstall() -> list[str]:
    """Undoes `install`; returns the modules in which ATOM's own function stands again."""
    return _replacement.uninstall()
