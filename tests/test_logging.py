"""The logger `paged_prefill`: which images serve a device and how long each takes to load, at INFO."""

from __future__ import annotations

import logging

import pytest

from paged_prefill import _loader, _manifest


@pytest.fixture
def target(monkeypatch):
    """A target of this wheel with an architecture that it serves."""
    monkeypatch.setattr(_loader, "_architectures", {})
    for name, facts in _manifest.read_manifest().data["targets"].items():
        if facts["vendor"] == "cuda" and facts["capability"] and name != "ptx":
            major, minor = facts["capability"]
            return name, f"sm_{major}{minor}"
    pytest.skip("this wheel has no CUDA image")


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_chosen_images_are_said_at_info(caplog, target, level):
    name, architecture = target
    with caplog.at_level(level, "paged_prefill"):
        _loader.describe(3, "cuda", architecture, 99990, "Some GPU", 0)
    said = [f"device 3 (Some GPU, {architecture}) is served by the {name} images"]
    assert [record.message for record in caplog.records] == (said if level == logging.INFO else [])


def test_nothing_by_default():
    logger = logging.getLogger("paged_prefill")
    assert logger.level == logging.NOTSET
    assert logger.handlers == []


def test_load_time_is_said_at_info(scenario):
    scenario("""
    import logging
    said = []
    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())
    logging.getLogger("paged_prefill").addHandler(Keep())
    logging.getLogger("paged_prefill").setLevel(logging.INFO)
    from fake_drivers.images import variant
    entry = variant("sm90a")
    use_images(entry)
    out_operator(**call())
    out_operator(**call())
    loads = [line for line in said if line.startswith(f"device 0 loaded {entry['id']} in ")]
    assert len(loads) == 1, said
    """)
