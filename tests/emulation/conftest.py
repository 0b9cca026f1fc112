"""The proof records: written only by `--write-proofs`, from runs that passed, keyed by the image's sha256."""

from __future__ import annotations

import pytest

from build_tools import proofs


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

    def write(self, folder):
        """Merges the complete records into emulated-<target>.json."""
        for target, records in self._records.items():
            complete = {
                name: {key: value for key, value in record.items() if key != "_all"}
                for name, record in records.items()
                if record["cases"] == record["_all"]
            }
            proofs.write(folder / f"emulated-{target}.json", complete)


@pytest.fixture(scope="session")
def proofs_of_run(request):
    found = Proofs()
    yield found
    if folder := request.config.getoption("write_proofs"):
        found.write(folder)
