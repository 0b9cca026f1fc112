"""Reads the image manifest the build wrote, and the images it lists.

An image is read when a device first needs it, and only returned if its size and sha256 are those of the manifest.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._guards import fail

SCHEMA = 1
PACKAGE_IMAGES = Path(__file__).parent / "images"


@dataclass(frozen=True)
class Manifest:
    folder: Path
    data: dict[str, Any]
    sha256: str  # of manifest.json, which holds the sha256 of every image

    def variant(self, variant_id: str) -> dict[str, Any]:
        """The entry with this id. Raises RuntimeError if there is none."""
        for entry in self.data["variants"]:
            if entry["id"] == variant_id:
                return dict(entry)
        fail("bad_manifest", file=self.folder / "manifest.json", problem=f"it does not list {variant_id}")

    def read_image(self, variant_id: str) -> bytes:
        """The verified bytes of an image. Raises RuntimeError naming the file if it is not what was built."""
        entry = self.variant(variant_id)
        file = self.folder / str(entry["file"])
        size, digest = entry["bytes"], entry["sha256"]
        try:
            image = file.read_bytes()
        except OSError as error:
            fail("bad_image", file=file, problem="unreadable", expected=f"{size} bytes", got=error.strerror or error)
        if len(image) != size:
            problem = "truncated" if len(image) < size else "altered"
            fail("bad_image", file=file, problem=problem, expected=f"{size} bytes", got=f"{len(image)} bytes")
        got = hashlib.sha256(image).hexdigest()
        if got != digest:
            fail("bad_image", file=file, problem="altered", expected=f"sha256 {digest}", got=f"sha256 {got}")
        return image


@functools.cache
def read_manifest(folder: Path = PACKAGE_IMAGES) -> Manifest:
    """The manifest of a folder of images, read once. Raises RuntimeError if it is missing or of another schema."""
    file = folder / "manifest.json"
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        fail("bad_manifest", file=file, problem=str(error))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        fail("bad_manifest", file=file, problem=f"its schema is {found}, not {SCHEMA}")
    return Manifest(folder, data, hashlib.sha256(text).hexdigest())
