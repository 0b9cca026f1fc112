"""Static checks of every image in the installed package: the right machine code, in the right limits."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path

import pytest

elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools reads the images")
import paged_prefill

IMAGES = Path(paged_prefill.__file__).parent / "images"
MANIFEST = json.loads((IMAGES / "manifest.json").read_text())
VARIANTS = {variant["id"]: variant for variant in MANIFEST["variants"]}
ELF_IMAGES = [name for name, variant in VARIANTS.items() if variant["format"] != "ptx"]
AMD_IMAGES = [name for name, variant in VARIANTS.items() if variant["format"] == "hsaco"]
PTX_IMAGES = [name for name, variant in VARIANTS.items() if variant["format"] == "ptx"]

EM_CUDA, EM_AMDGPU = 190, 224
# EF_AMDGPU_MACH of the LLVM AMDGPU back end's table of e_flags.
AMD_MACHINES = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F, "gfx1100": 0x41, "gfx1201": 0x4E}


def read(variant):
    return (IMAGES / variant["file"]).read_bytes()


def elf_of(variant):
    return elffile.ELFFile(io.BytesIO(read(variant)))


def symbols(elf):
    return {s.name for section in elf.iter_sections() if hasattr(section, "iter_symbols") for s in section.iter_symbols()}


def cuda_part(elf):
    """SM number of a cubin: bits 8 to 15 of e_flags in ABI 8 objects, 0 to 7 before."""
    flags = elf["e_flags"]
    return flags >> 8 & 0xFF if elf["e_ident"]["EI_ABIVERSION"] >= 8 else flags & 0xFF


def test_folder_holds_what_the_manifest_lists():
    present = {path.name for path in IMAGES.iterdir()} - {"manifest.json", "__pycache__"}
    assert present == {variant["file"] for variant in VARIANTS.values()}
    assert {variant["target"] for variant in VARIANTS.values()} == MANIFEST["targets"].keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_record(name):
    variant, target = VARIANTS[name], MANIFEST["targets"][VARIANTS[name]["target"]]
    image = read(variant)
    assert (len(image), hashlib.sha256(image).hexdigest()) == (variant["bytes"], variant["sha256"])
    assert 0 < variant["shared"] <= target["shared_limit"]
    assert variant["threads"] <= 1024 and variant["threads"] % variant["warp_size"] == 0
    assert variant["warp_size"] == target["warp_size"]
    assert variant["format"] == {"cuda": "ptx" if variant["target"] == "ptx" else "cubin", "hip": "hsaco"}[target["vendor"]]
    assert str(Path(__file__).resolve().parent.parent).encode() not in image


@pytest.mark.parametrize("name", ELF_IMAGES)
def test_elf_is_for_its_target(name):
    variant, elf = VARIANTS[name], elf_of(VARIANTS[name])
    target = variant["target"]
    if variant["format"] == "cubin":
        assert elf["e_machine"] in (EM_CUDA, "EM_CUDA")
        assert cuda_part(elf) == int(re.sub(r"\D", "", target))
    else:
        assert elf["e_machine"] in (EM_AMDGPU, "EM_AMDGPU")
        assert elf["e_flags"] & 0xFF == AMD_MACHINES[target]
    assert variant["symbol"] in symbols(elf)
    # Frame tables are part of every cubin; lines and sources would be paths of the build machine.
    sections = [section.name for section in elf.iter_sections()]
    assert not [section for section in sections if "debug" in section and "debug_frame" not in section]


@pytest.mark.parametrize("name", AMD_IMAGES)
def test_amd_metadata_agrees_with_the_record(name):
    msgpack = pytest.importorskip("msgpack")
    variant = VARIANTS[name]
    notes = [
        note["n_descdata"] if isinstance(note["n_descdata"], bytes) else note["n_descdata"].encode("latin-1")
        for segment in elf_of(variant).iter_segments("PT_NOTE")
        for note in segment.iter_notes()
    ]
    kernel = msgpack.unpackb(notes[0], strict_map_key=False)["amdhsa.kernels"][0]
    assert kernel[".symbol"] == variant["symbol"] + ".kd"
    assert kernel[".max_flat_workgroup_size"] == variant["threads"]
    assert kernel[".wavefront_size"] == variant["warp_size"]
    assert kernel[".group_segment_fixed_size"] == 0  # all of it is dynamic: the launch passes `shared`
    kinds = ["ptr" if a[".value_kind"] == "global_buffer" else a[".size"] for a in kernel[".args"]]
    sizes = {"ptr": "ptr", "i64": 8, "i32": 4, "fp32": 4}
    assert kinds == [sizes[kind] for _, kind in variant["arguments"]] + ["ptr", "ptr"]


@pytest.mark.parametrize("name", PTX_IMAGES)
def test_ptx_runs_on_every_later_part(name):
    variant, text = VARIANTS[name], read(VARIANTS[name]).decode()
    assert re.search(r"^\.version 8\.0$", text, re.MULTILINE)
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert f".visible .entry {variant['symbol']}(" in text
    assert "wgmma" not in text and "tcgen05" not in text


def test_aligned_images_gather_by_16_byte_asynchronous_copies():
    for name in PTX_IMAGES:
        text = read(VARIANTS[name]).decode()
        assert bool(re.search(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,", text)) == VARIANTS[name]["aligned"], name
