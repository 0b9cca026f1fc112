"""What `paged-prefill info` tells: the wheel, torch, the driver, and the images each GPU gets."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _choice, _devices, _manifest, _report
from ._loader import build_info


def info(options: argparse.Namespace) -> int:
    """Prints it as text or JSON; raises RuntimeError when the wheel's manifest is damaged."""
    build = build_info()
    manifest = _manifest.read_manifest().data
    devices = [
        {"ordinal": i, "name": name, **dataclasses.asdict(facts), **_decision(_choice.choose(manifest, facts))}
        for i, (name, facts) in enumerate(_devices.visible())
    ]
    document = {
        "version": build["version"],
        "commit": build["commit"],
        "dirty": build["dirty"],
        "compilers": build["compilers"],
        "torch": torch.__version__,
        "runtime": _runtime(),
        "driver": devices[0]["driver_version"] if devices else None,
        "targets": build["targets"],
        "devices": devices,
    }
    if options.json:
        if options.all:
            document["variants"] = manifest["variants"]
        print(json.dumps(document, indent=1, default=str))
        return 0

    commit = f", commit {build['commit']}{' with changes' if build['dirty'] else ''}" if build["commit"] else ""
    print(f"paged-prefill {build['version']}{commit}")
    print(f"compilers     {', '.join(f'{name} {version}' for name, version in build['compilers'].items())}")
    print(f"torch         {torch.__version__} for {_runtime()}")
    print("images        " + ", ".join(f"{name}: {len(facts['images'])}" for name, facts in build["targets"].items()))
    if not devices:
        print("GPUs          none that torch sees; the operator needs a CUDA or ROCm one, paged_prefill.reference none")
    for device in devices:
        driver = f", driver {device['driver_version']}" if device["driver_version"] else ""
        print(f"\nGPU {device['ordinal']}: {device['name']}, {device['architecture']}{driver}")
        if device["target"] is None:
            print("  this wheel has no image for it:")
        else:
            print(f"  runs on the {device['target']} images")
            _variants_table("", [v for v in manifest["variants"] if v["id"] in device["variants"]])
        for what, reason in device["reasons"]:
            if options.all or device["target"] is None or "update the driver" in reason:
                print(f"  {what}: {reason}")
    if options.all:
        _variants_table("every image in the wheel", manifest["variants"])
    if options.all or not devices:
        known_table(manifest)
    return 0


def _runtime() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"


def _decision(decision: _choice.Decision) -> dict[str, Any]:
    return {
        "target": decision.target,
        "variants": [variant["id"] for variant in decision.variants],
        "reasons": [list(reason) for reason in decision.reasons],
    }


def _variants_table(title: str, variants: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for v in variants:
        used = v["resources"]
        heads = f"{v['min_heads']}..{v['max_heads'] or ''}"
        registers = used.get("registers", used.get("vgprs", "-"))
        shape = (short(v["file"]), v["head_tile"], v["head_dim"] or "any", heads)
        rows.append((*shape, registers, v["shared"], v["threads"], v["bytes"]))
    columns = ("paged_prefill-...", "head tile", "head_dim", "for heads", "registers", "shared", "threads", "bytes")
    _report.table(title, columns, rows)


def known_table(manifest: Mapping[str, Any]) -> None:
    """Prints which image each known GPU gets, and why some get none."""
    rows, refused = [], []
    for name, architecture, decision in _devices.known(manifest):
        images = ["", ""]
        if decision.target is None:
            refused.append(f"{name}: {_nearest_reason(decision)}")
        else:
            picked = [_devices.variant_for(decision.variants, "bf16", heads, 512) for heads in (16, 128)]
            images = [short(variant["file"]) if variant else "none" for variant in picked]
        rows.append((name, architecture, decision.target or "none", *images))
    columns = ("GPU", "architecture", "images", "bf16, D = 512, H = 16", "bf16, D = 512, H = 128")
    _report.table("which image each known GPU gets from this wheel", columns, rows)
    for line in refused:
        print(f"  {line}")


def _nearest_reason(decision: _choice.Decision) -> str:
    """The refusal to show of several: not that of another vendor's image, and rather that of one for many parts."""
    own = [f"{what} {reason}" for what, reason in decision.reasons if not reason.startswith("is for ")]
    return max(own, key=lambda text: " or later" in text, default="the wheel has no image for this vendor")


def short(name: str) -> str:
    """A file name or a variant's id without what all of them begin with."""
    return name.removeprefix("paged_prefill-")
