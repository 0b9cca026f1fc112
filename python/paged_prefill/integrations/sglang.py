"""Serves sglang's `sparse_attn_v4_paged_prefill` with this package's operator.

sglang calls it through `unified_kv_kernels.runtime.prefill`. Versions differ in where they define it and in what
follows the nine arguments that all have: nothing; `return_lse` and `replicated_logit_shift`; or the planes of an
MXFP8 cache, with which sglang's own kernel runs.
"""

from __future__ import annotations

from ._replace import Replacement

_replacement = Replacement(
    "sglang",
    (
        "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_prefill",
        "sglang.srt.layers.attention.dsv4.unified_kv_kernels.paged_prefill",
    ),
)


def install() -> list[str]:
    """Makes sglang use the operator from now on, in the modules it has imported and in those it will.

    Calls that the operator refuses by design still run sglang's own kernel, each kind of them said once in the log.
    A second call changes nothing.

    Returns:
        The modules in which the function was replaced now; none if sglang has yet to import it.

    Raises:
        RuntimeError: sglang is not installed, or this version of it does not have the function.
    """
    return _replacement.install()


def uninstall() -> list[str]:
    """Undoes `install`; returns the modules in which sglang's own function stands again."""
    return _replacement.uninstall()
