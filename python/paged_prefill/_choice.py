"""Which of the wheel's images a device gets: a pure function of the manifest and of what the driver says of the device.

One target's images serve a device: those of its exact ISA, else those that a later minor version runs, else PTX, which
the driver compiles at the first load. The manifest says of each target which devices it matches. Every refusal has its
reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Capability = tuple[int, int]

# NVIDIA promises no binary compatibility between desktop and integrated (Tegra) parts: these take images of their own,
# or PTX.
INTEGRATED: tuple[Capability, ...] = ((8, 7), (11, 0))


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of a device. Names and environment variables are no part of a choice."""

    vendor: str  # "cuda" or "hip"
    architecture: str  # "sm_90", "gfx942:sramecc+:xnack-"
    driver_version: int  # as the driver gives it: 12080 is CUDA 12.8
    shared_limit: int  # bytes of shared memory a block can have; 0 if unknown


@dataclass(frozen=True)
class Decision:
    """The images a device gets, in order of preference, or none; and why each other candidate was refused."""

    target: str | None
    variants: tuple[Mapping[str, Any], ...]
    reasons: tuple[tuple[str, str], ...]  # (target or variant id, reason)


def choose(manifest: Mapping[str, Any], device: DeviceFacts) -> Decision:
    """Chooses a device's images from a manifest's data."""
    candidates: dict[str, list[Mapping[str, Any]]] = {target: [] for target in manifest["targets"]}
    for variant in manifest["variants"]:
        candidates[variant["target"]].append(variant)
    ranked: list[tuple[tuple[int, int], str, list[Mapping[str, Any]]]] = []
    reasons: list[tuple[str, str]] = []
    for target, variants in candidates.items():
        facts = manifest["targets"][target]
        rank, reason = _rank(target, facts, device)
        reason = reason or _driver_reason(facts, device)
        if reason:
            reasons.append((target, reason))
            continue
        limit = device.shared_limit or facts["shared_limit"]
        fitting = [variant for variant in variants if variant["shared"] <= limit]
        for variant in variants:
            if variant["shared"] > limit:
                reason = f"needs {variant['shared']} bytes of shared memory, the device has {limit}"
                reasons.append((variant["id"], reason))
        if fitting:
            ranked.append((rank, target, fitting))
    if not ranked:
        return Decision(None, (), tuple(reasons))
    ranked.sort(key=lambda entry: entry[0])
    _, chosen, variants = ranked[0]
    reasons += [(target, f"{chosen} comes first for {device.architecture}") for _, target, _ in ranked[1:]]
    return Decision(chosen, tuple(variants), tuple(reasons))


def capability_of(architecture: str) -> Capability:
    """(9, 0) of "sm_90", (10, 3) of "sm_103"."""
    digits = architecture.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def _rank(target: str, facts: Mapping[str, Any], device: DeviceFacts) -> tuple[tuple[int, int], str]:
    """How near a target's images are to a device, the smallest first, and why they are refused ("" if they are not)."""
    if facts["vendor"] != device.vendor:
        return (0, 0), f"is for {'AMD' if facts['vendor'] == 'hip' else 'NVIDIA'} devices"
    if device.vendor == "hip":
        # The suffixes (sramecc, xnack) are modes that an object built without them runs in.
        base = device.architecture.split(":")[0]
        return (0, 0), "" if target == base else f"is another ISA than {base}"
    needed = (int(facts["capability"][0]), int(facts["capability"][1]))
    found = capability_of(device.architecture)
    needs = f"needs compute capability {needed[0]}.{needed[1]}"
    has = f"the device has {found[0]}.{found[1]}"
    matches = facts["matches"]
    if matches == "later":
        return (2, 0), "" if found >= needed else f"{needs} or later, {has}"
    if found == needed:
        return (0, 0), ""
    if matches == "exact":
        return (0, 0), f"{needs} and no other, {has}"
    if found in INTEGRATED or needed in INTEGRATED:
        return (0, 0), f"{needs}, {has}, and one of the two is an integrated part"
    compatible = found[0] == needed[0] and found[1] > needed[1]
    return (1, found[1] - needed[1]), "" if compatible else f"{needs} or a later {needed[0]}.x, {has}"


def _driver_reason(facts: Mapping[str, Any], device: DeviceFacts) -> str:
    minimum = facts.get("minimum_driver")
    if minimum is None or device.vendor != "cuda":
        return ""
    major, minor = (int(part) for part in str(minimum).split(".")[:2])
    if device.driver_version >= major * 1000 + minor * 10:
        return ""
    found = f"{device.driver_version // 1000}.{device.driver_version % 1000 // 10}"
    return f"needs a driver for CUDA {minimum} or later, this one is for CUDA {found}: update the driver"
