"""The proof records: written only by `--write-proofs`, from runs that passed, keyed by the image's sha256."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROOFS = Path(__file__).resolve().parents[2] / "proofs"


def pytest_addoption(parser):
    parser.addoption("--write-proofs", action="store_true", help="record the images that passed in proofs/*.json")


class Proofs:
    """What passed: a variant's record is complete when every case of it did."""

    def __init__(self):
        self._records = {}

    def add(self, variant, error, cases, emulator_commit):
        """One case of `variant` (its manifest entry) passed; it has `cases` of them."""
        targets = self._records.setdefault(variant["target"], {})
        record = targets.setdefault(
            variant["id"],
            {
                "sha256": variant["sha256"],
                "cases": 0,
                "emulator_commit": emulator_commit,
                "max_relative_error": 0.0,
                "_all": cases,
            },
        )
        record["cases"] += 1
        record["max_relative_error"] = float(f"{max(record['max_relative_error'], error):.3g}")

    def write(self):
        """Merges the complete records into proofs/emulated-<target>.json."""
        for target, records in self._records.items():
            complete = {
                name: {key: value for key, value in record.items() if key != "_all"}
                for name, record in records.items()
                if record["cases"] == record["_all"]
            }
            file = PROOFS / f"emulated-{target}.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            PROOFS.mkdir(exist_ok=True)
            file.write_text(json.dumps({**known, **complete}, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def proofs(request):
    found = Proofs()
    yield found
    if request.config.getoption("write_proofs", False):
        found.write()
