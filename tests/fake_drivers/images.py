"""Folders of images as the build writes them, with texts in place of machine code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

POINTERS = (
    "q_ptr unified_kv_ptr kv_indices_prefix_ptr kv_indptr_prefix_ptr kv_ptr kv_indices_extend_ptr kv_indptr_extend_ptr "
    "attn_sink_ptr out_ptr lse_ptr"
).split()
STRIDES = "q_stride_t q_stride_h unified_kv_stride_n kv_stride_n".split()
SIZES = (
    "num_tokens num_heads head_dim unified_kv_rows kv_rows kv_indices_prefix_len kv_indices_extend_len "
    "has_sink has_lse num_tiles first_tile"
).split()
SCALES = "softmax_scale_log2 logit_shift_log2".split()
ARGUMENTS = [
    *([name, "ptr"] for name in POINTERS),
    *([name, "i64"] for name in STRIDES),
    *([name, "i32"] for name in SIZES),
    *([name, "fp32"] for name in SCALES),
]
BYTES = {"ptr": 8, "i64": 8, "i32": 4, "fp32": 4}

TARGETS: dict[str, dict[str, Any]] = {
    name: {
        "vendor": "cuda" if capability else "hip",
        "capability": capability,
        "matches": matches,
        "shared_limit": kib * 1024,
        "minimum_driver": driver,
    }
    for name, capability, matches, kib, driver in (
        ("sm80", [8, 0], "exact", 163, "12.0"),
        ("sm86", [8, 6], "minor", 99, "12.0"),
        ("sm90a", [9, 0], "exact", 227, "13.0"),
        ("sm100a", [10, 0], "exact", 227, "13.0"),
        ("sm120a", [12, 0], "exact", 99, "13.0"),
        ("gfx90a", None, "exact", 64, None),
        ("gfx942", None, "exact", 64, None),
        ("ptx", [8, 0], "later", 99, "12.0"),
    )
}


def variant(target: str, **changes: Any) -> dict[str, Any]:
    """A manifest entry; its image is the text "image of <id>"."""
    entry = {
        "dtype": "bf16",
        "head_tile": 16,
        "head_dim": 0,
        "min_heads": 1,
        "max_heads": None,
        "aligned": False,
        "shared": 16384,
        "threads": 128,
        "grid": "tiles",
        "arguments": ARGUMENTS,
        "kernel": "portable",
        **changes,
    }
    head_dim = entry["head_dim"] or "any"
    name = f"paged_prefill-{entry['dtype']}-h{entry['head_tile']}-d{head_dim}-{target}"
    kind = "ptx" if target == "ptx" else "cubin" if TARGETS[target]["vendor"] == "cuda" else "hsaco"
    entry = {"id": name, "target": target, "format": kind, "symbol": f"kernel_{name}", **entry}
    image = f"image of {entry['id']}".encode()
    return {
        "file": f"{entry['id']}.{kind}",
        "bytes": len(image),
        "sha256": hashlib.sha256(image).hexdigest(),
        "source_sha256": "",
        **entry,
    }


def manifest(*variants: dict[str, Any]) -> dict[str, Any]:
    named = {entry["target"] for entry in variants}
    return {
        "schema": 1,
        "version": "0.1.0",
        "compilers": {"triton": "3.9.0"},
        "targets": {name: facts for name, facts in TARGETS.items() if name in named},
        "variants": list(variants),
    }


def write(folder: Path, *variants: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in variants:
        (folder / entry["file"]).write_text(f"image of {entry['id']}")
    (folder / "manifest.json").write_text(json.dumps(manifest(*variants)))
    return folder
