"""How far each image has been shown to be right: from the records in proofs/, which the tests write, never typed.

A record is keyed by the sha256 of what ran: of the image, or of its PTX when another part's driver compiled that. An
image without a matching record, such as one that has been rebuilt from other sources, is compiled and inspected.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "proofs"
INSPECTED = "compiled and inspected"
# File names begin with the kind; from the strongest to the weakest: (kind, the digest that must match, the claim).
KINDS = (
    ("hardware", "sha256", "run on hardware"),
    ("ptx", "ptx_sha256", "run as PTX on another part"),
    ("emulated", "sha256", "emulated"),
)
LEVELS = (*(claim for _, _, claim in KINDS), INSPECTED)


def records(folder: Path = FOLDER) -> dict[str, set[str]]:
    """The digests that each kind's records hold."""
    found: dict[str, set[str]] = {}
    for kind, digest, _ in KINDS:
        files = sorted(folder.glob(f"{kind}-*.json"))
        found[kind] = {record[digest] for file in files for record in json.loads(file.read_text()).values()}
    return found


def level(variant: Mapping[str, Any], known: Mapping[str, set[str]]) -> str:
    """The strongest claim that a record allows for a manifest entry."""
    for kind, digest, claim in KINDS:
        if variant.get(digest) in known[kind]:
            return claim
    return INSPECTED


def summary(variants: Iterable[Mapping[str, Any]], known: Mapping[str, set[str]]) -> str:
    """A target's claim, with counts where its images differ."""
    counts = Counter(level(variant, known) for variant in variants)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{claim}: {counts[claim]}" for claim in LEVELS if counts[claim])


def write(file: Path, new: Mapping[str, Mapping[str, Any]]) -> None:
    """Merges records, by variant id, into a file of proofs/."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**known, **new}, indent=1, sort_keys=True) + "\n")
