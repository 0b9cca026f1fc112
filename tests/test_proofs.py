"""What is claimed of an image follows from a record of that very image, and from nothing else."""

from __future__ import annotations

import json

import pytest

from build_tools import proofs

IMAGE = {"id": "a", "sha256": "1" * 64, "ptx_sha256": "2" * 64}


@pytest.fixture
def folder(tmp_path):
    def fill(**files):
        for name, record in files.items():
            (tmp_path / f"{name.replace('_', '-')}.json").write_text(json.dumps({"a": record}))
        return proofs.records(tmp_path)

    return fill


def test_without_a_record_an_image_is_compiled_and_inspected(folder):
    assert proofs.level(IMAGE, folder()) == proofs.INSPECTED


@pytest.mark.parametrize(
    ("file", "record", "claim"),
    [
        ("hardware_sm90a", {"sha256": "1" * 64}, "run on hardware"),
        ("ptx_sm80", {"ptx_sha256": "2" * 64}, "run as PTX on another part"),
        ("emulated_gfx942", {"sha256": "1" * 64}, "emulated"),
    ],
)
def test_a_record_of_the_same_bytes_is_a_claim(folder, file, record, claim):
    known = folder(**{file: record})
    assert proofs.level(IMAGE, known) == claim
    changed = {**IMAGE, "sha256": "3" * 64, "ptx_sha256": "4" * 64}
    assert proofs.level(changed, known) == proofs.INSPECTED, "a rebuilt image keeps no claim"


def test_the_strongest_claim_counts(folder):
    known = folder(emulated_x={"sha256": "1" * 64}, hardware_x={"sha256": "1" * 64})
    assert proofs.level(IMAGE, known) == "run on hardware"


def test_summary_counts_what_differs(folder):
    known = folder(emulated_x={"sha256": "1" * 64})
    assert proofs.summary([IMAGE, IMAGE], known) == "emulated"
    assert proofs.summary([IMAGE, {"sha256": "5"}], known) == "emulated: 1, compiled and inspected: 1"


def test_records_are_merged_by_variant(tmp_path):
    file = tmp_path / "new" / "hardware-x.json"
    proofs.write(file, {"a": {"sha256": "1"}, "b": {"sha256": "2"}})
    proofs.write(file, {"b": {"sha256": "3"}})
    assert json.loads(file.read_text()) == {"a": {"sha256": "1"}, "b": {"sha256": "3"}}
    assert proofs.records(file.parent)["hardware"] == {"1", "3"}
