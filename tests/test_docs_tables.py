"""The generated tables say what is built: stale ones fail here, and `make tables` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools import tables
from build_tools.targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent


NOTHING_BUILT = {"targets": {}, "variants": []}


@pytest.fixture(scope="module")
def manifest():
    manifest = tables.installed_manifest()
    if missing := TARGETS.keys() - manifest["targets"].keys():
        pytest.skip(f"the installed wheel was built without {', '.join(sorted(missing))}")
    return manifest


def test_support_table_is_current(manifest):
    text = (ROOT / "README.md").read_text()
    assert tables.with_support_table(text, manifest) == text, "README.md's support table is stale: make tables"


def test_size_table_is_current(manifest):
    assert (ROOT / "docs" / "sizes.md").read_text() == tables.sizes_page(manifest), (
        "docs/sizes.md is stale: make tables"
    )


def test_support_table_has_a_row_for_each_target():
    rows = tables.support_table(NOTHING_BUILT).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(TARGETS)


def test_readme_without_the_marks_is_refused_in_words():
    with pytest.raises(ValueError, match=r"README\.md needs the line"):
        tables.with_support_table("# paged-prefill\n", NOTHING_BUILT)


def test_text_around_the_table_is_kept():
    text = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    written = tables.with_support_table(text, NOTHING_BUILT)
    assert written.startswith(f"before\n{tables.BEGIN}\n| Target |") and written.endswith(f"|\n{tables.END}\nafter\n")
    assert tables.with_support_table(written, NOTHING_BUILT) == written


def test_sizes_add_up():
    variants = [
        {"id": "paged_prefill-bf16-h16-d512-sm80", "target": "sm80", "bytes": 1500},
        {"id": "paged_prefill-bf16-h16-d512-gfx942", "target": "gfx942", "bytes": 2000},
        {"id": "paged_prefill-fp16-h16-d512-sm80", "target": "sm80", "bytes": 500},
    ]
    page = tables.sizes_page({"targets": {"gfx942": {}, "sm80": {}}, "variants": variants})
    assert "| `sm80` | 2 | 2,000 |" in page and "| `gfx942` | 1 | 2,000 |" in page and "| all | 3 | 4,000 |" in page
    assert "| `bf16-h16-d512` | 1.5 | 2.0 |" in page and "| `fp16-h16-d512` | 0.5 |  |" in page
