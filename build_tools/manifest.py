"""manifest.json: what was built. Written last, so that its presence means a finished folder of images."""

import json
import os
from pathlib import Path
from typing import Any

from build_tools.targets import Target

SCHEMA = 1
NAME = "manifest.json"
IMAGE_SUFFIXES = (".cubin", ".hsaco", ".ptx")


def describe_target(target: Target) -> dict[str, Any]:
    """What the run-time choice needs to know of a target."""
    return {
        "vendor": target.vendor,
        "capability": target.capability,
        "matches": target.matches,
        "warp_size": target.warp_size,
        "shared_limit": target.shared_limit,
        "minimum_driver": target.minimum_driver,
        "family": target.family,
        "products": target.products,
        "note": target.note,
    }


def write(
    out_dir: Path,
    version: str,
    compilers: dict[str, str],
    targets: list[Target],
    images: list[tuple[dict[str, Any], bytes]],
) -> None:
    """Fills out_dir with the images and then the manifest; images of an earlier build are removed.

    Args:
        images: a record as it stands in the manifest, and the image; in order of preference within a target.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / NAME).unlink(missing_ok=True)
    for path in out_dir.iterdir():
        if path.suffix in IMAGE_SUFFIXES:
            path.unlink()
    for record, image in images:
        (out_dir / record["file"]).write_bytes(image)
    text = json.dumps(
        {
            "schema": SCHEMA,
            "version": version,
            "compilers": compilers,
            "targets": {target.name: describe_target(target) for target in targets},
            "variants": [record for record, _ in images],
        },
        indent=1,
    )
    partial = out_dir / f".{NAME}.partial"
    partial.write_text(text + "\n")
    os.replace(partial, out_dir / NAME)
