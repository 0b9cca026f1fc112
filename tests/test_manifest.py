"""Images and their manifest as they stand in the installed package, and what is said when they are damaged."""

from __future__ import annotations

import json

import pytest

import paged_prefill
from fake_drivers.images import variant, write
from paged_prefill import _manifest


def test_every_installed_image_is_what_was_built():
    manifest = _manifest.read_manifest()
    assert manifest.data["version"] == paged_prefill.__version__
    ids = [entry["id"] for entry in manifest.data["variants"]]
    assert ids
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert manifest.read_image(name)
    listed = {entry["file"] for entry in manifest.data["variants"]} | {"manifest.json"}
    assert {path.name for path in manifest.folder.iterdir()} == listed


def test_build_info():
    info = paged_prefill.build_info()
    assert info["version"] == paged_prefill.__version__
    assert {"compilers", "targets", "commit"} <= info.keys()
    for facts in info["targets"].values():
        assert facts["images"]


DAMAGE = {
    "missing": lambda file: file.unlink(),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "altered": lambda file: file.write_bytes(b"X" + file.read_bytes()[1:]),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}
WORDS = {
    "missing": "unreadable",
    "truncated": "truncated",
    "longer": "altered",
    "altered": "altered",
    "a folder": "unreadable",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_W12_a_damaged_image_is_named_before_any_launch(scenario, damage):
    """The call names the file, nothing is loaded or launched, and the repaired package works in the same process."""
    scenario(
        f"""
        from test_manifest import DAMAGE
        from fake_drivers.images import variant
        entry = variant("sm90a")
        use_images(entry)
        file = IMAGES / entry["file"]
        good = file.read_bytes()
        DAMAGE[{damage!r}](file)
        for attempt in range(2):
            text, hint = error_of(out_operator, **call()).split("\\n")
            assert text.startswith(f"kernel image {{file}} is {WORDS[damage]}: expected "), text
            assert "install the wheel anew" in hint
            assert error_of(paged_prefill.preload, 0) == text + "\\n" + hint
        assert cuda_stub.fake_live_modules() == 0 and not launches() and extension.loaded(0) == []
        if file.is_dir():
            file.rmdir()
        file.write_bytes(good)
        out_operator(**call())
        assert len(launches()) == 1 and extension.loaded(0) == [entry["id"]]
        """
    )


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"schema": 2}'])
def test_W12_a_damaged_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(RuntimeError) as caught:
        _manifest.read_manifest(tmp_path)
    assert str(caught.value).startswith(f"kernel image manifest {tmp_path / 'manifest.json'} is unusable: ")


def test_W12_an_image_the_manifest_does_not_list(tmp_path):
    write(tmp_path, variant("sm90a"))
    with pytest.raises(RuntimeError, match="it does not list other"):
        _manifest.read_manifest(tmp_path).read_image("other")


def test_the_manifest_is_read_once(tmp_path):
    write(tmp_path, variant("sm90a"))
    first = _manifest.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1}))
    assert _manifest.read_manifest(tmp_path) is first
