"""What this machine's GPUs are, and what the well-known ones would be, in the terms that images are chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _C
from ._choice import Decision, DeviceFacts, choose

# A driver newer than any image needs, for parts that are not in this machine.
CURRENT_DRIVER = 13030

# (name, vendor, architecture) of parts that people serve models on.
KNOWN = (
    ("A100, A30", "cuda", "sm_80"),
    ("A10, A40, RTX 3090", "cuda", "sm_86"),
    ("Jetson AGX Orin", "cuda", "sm_87"),
    ("L4, L40S, RTX 4090", "cuda", "sm_89"),
    ("H100, H200, GH200", "cuda", "sm_90"),
    ("B200, GB200", "cuda", "sm_100"),
    ("B300, GB300", "cuda", "sm_103"),
    ("Jetson Thor", "cuda", "sm_110"),
    ("RTX 5090, RTX PRO 6000", "cuda", "sm_120"),
    ("DGX Spark (GB10)", "cuda", "sm_121"),
    ("T4", "cuda", "sm_75"),
    ("Instinct MI210, MI250X", "hip", "gfx90a:sramecc+:xnack-"),
    ("Instinct MI300X, MI325X", "hip", "gfx942:sramecc+:xnack-"),
    ("Instinct MI350X, MI355X", "hip", "gfx950:sramecc+:xnack-"),
    ("Radeon RX 7900 XTX", "hip", "gfx1100"),
    ("Ryzen AI Max (Strix Halo)", "hip", "gfx1151"),
    ("Radeon RX 9070 XT", "hip", "gfx1201"),
)


def known(manifest: Mapping[str, Any]) -> list[tuple[str, str, Decision]]:
    """(name, architecture, what the wheel has for it) of each known part, given a current driver."""
    return [
        (name, architecture, choose(manifest, DeviceFacts(vendor, architecture, CURRENT_DRIVER, 0)))
        for name, vendor, architecture in KNOWN
    ]


def visible() -> list[tuple[str, DeviceFacts]]:
    """(name, facts) of each GPU that torch sees, in the order of their ordinals: what the launcher chooses by."""
    found = []
    for ordinal in range(torch.cuda.device_count()):
        vendor, architecture, driver_version, name, shared_limit = _C.device_facts(ordinal)
        found.append((name, DeviceFacts(vendor, architecture, driver_version, shared_limit)))
    return found


def variant_for(
    variants: Sequence[Mapping[str, Any]], dtype: str, heads: int, head_dim: int, aligned: bool = True
) -> Mapping[str, Any] | None:
    """The first variant that takes such a call, as csrc/launcher.cpp picks it, or None."""
    for variant in variants:
        fits = variant["dtype"] == dtype and variant["head_dim"] in (0, head_dim) and aligned >= variant["aligned"]
        if fits and variant["min_heads"] <= heads and heads <= (variant["max_heads"] or heads):
            return variant
    return None
