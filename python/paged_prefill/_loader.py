"""Joins the extension to the images: tells it, at a device's first call, which ones there are and their bytes."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _C, _choice, _manifest
from ._guards import fail
from ._version import __version__

_log = logging.getLogger("paged_prefill")


@dataclass(frozen=True)
class _Override:
    images: Path
    target: str | None


_overrides: dict[int, _Override] = {}
_architectures: dict[int, str] = {}


def describe(
    ordinal: int, vendor: str, architecture: str, driver_version: int, name: str, shared_limit: int
) -> Sequence[Mapping[str, Any]]:
    """The manifest entries of a device's images, in order of preference. Raises RuntimeError if there are none."""
    _architectures[ordinal] = architecture
    manifest = _images_of(ordinal).data
    forced = _overrides[ordinal].target if ordinal in _overrides else None
    if forced is not None:
        return [variant for variant in manifest["variants"] if variant["target"] == forced]
    device = _choice.DeviceFacts(vendor, architecture, driver_version, shared_limit)
    decision = _choice.choose(manifest, device)
    if not decision.variants:
        fail(
            "no_image",
            ordinal=ordinal,
            device=name,
            architecture=architecture,
            targets=", ".join(manifest["targets"]),
            reasons="; ".join(f"{what} {reason}" for what, reason in decision.reasons),
        )
    for target, reason in decision.reasons:
        # The device runs, but not on the images made for it.
        if "update the driver" in reason:
            _log.warning("device %d (%s) runs on the %s images: %s %s", ordinal, name, decision.target, target, reason)
    _log.info("device %d (%s, %s) is served by the %s images", ordinal, name, architecture, decision.target)
    return decision.variants


def read_image(ordinal: int, variant_id: str) -> bytes:
    """The verified bytes of an image of a device. Raises RuntimeError naming the file if it is not what was built."""
    manifest = _images_of(ordinal)
    if manifest.variant(variant_id)["format"] == "ptx":
        _log.info(
            "the driver compiles %s for %s: seconds at the first load, then from its own cache",
            variant_id,
            _architectures.get(ordinal, "this device"),
        )
    return manifest.read_image(variant_id)


def report_load(ordinal: int, variant_id: str, milliseconds: float) -> None:
    """Says how long reading, checking and loading an image took."""
    _log.info("device %d loaded %s in %.1f ms", ordinal, variant_id, milliseconds)


def _images_of(ordinal: int) -> _manifest.Manifest:
    if ordinal in _overrides:
        return _manifest.read_manifest(_overrides[ordinal].images)
    return _manifest.read_manifest()


def override(ordinal: int, images: Path | None = None, target: str | None = None) -> None:
    """Makes a device take its images from another folder, or those of a target whatever its own is. For tests."""
    _overrides[ordinal] = _Override(images or _manifest.PACKAGE_IMAGES, target)
    _C.reset(ordinal)


def reset(ordinal: int) -> None:
    """Undoes `override`; the next call on the device chooses again. For tests."""
    _overrides.pop(ordinal, None)
    _C.reset(ordinal)


def preload(device: torch.device | str | int | None = None) -> None:
    """Loads every image of a device now, so that no later call does, in a stream capture or elsewhere.

    Args:
        device: the device, its index, or None for the current one.

    Raises:
        RuntimeError: the wheel has no image for the device, an image is damaged, or the driver reports an error.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            fail("device", device=device)
        device = device.index
    if device is None:  # without a GPU the extension says what is missing
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    _C.preload(device)


def build_info() -> dict[str, Any]:
    """What this wheel was built from: version, commit, compilers, manifest, and per target its images and requirements.

    Raises:
        RuntimeError: the image manifest is missing or damaged.
    """
    manifest = _manifest.read_manifest()
    try:
        build = json.loads((Path(__file__).parent / "_build.json").read_bytes())
    except OSError:
        build = {"commit": None, "dirty": None}
    images: dict[str, list[str]] = {}
    for variant in manifest.data["variants"]:
        images.setdefault(variant["target"], []).append(variant["id"])
    targets = {name: {**facts, "images": images.get(name, [])} for name, facts in manifest.data["targets"].items()}
    return {
        "version": __version__,
        **build,
        "compilers": manifest.data["compilers"],
        "manifest_sha256": manifest.sha256,
        "targets": targets,
    }


_C.register_loader("hip" if torch.version.hip else "cuda", describe, read_image, report_load)
