"""Static proof of every image in the installed package: the right machine code, for its target, within its limits.

`pytest -k gfx942` runs one target's. The images are read again here; what the build wrote of them is compared.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path

import pytest

elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools reads the images")
pytest.importorskip("msgpack", reason="msgpack reads the metadata of AMD's code objects")
import paged_prefill
from build_tools import compile, inspection, specs, targets, verify_wheel

IMAGES = Path(paged_prefill.__file__).parent / "images"
MANIFEST = json.loads((IMAGES / "manifest.json").read_text())
VARIANTS = {variant["id"]: variant for variant in MANIFEST["variants"]}
DECLARED = {variant.id: variant for variant in specs.variants()}
CUBINS, CODE_OBJECTS, PTX = (
    [name for name, variant in VARIANTS.items() if variant["format"] == kind] for kind in ("cubin", "hsaco", "ptx")
)
DATA_CENTRE = {"ampere", "hopper", "cdna", "cdna4"}  # families of targets, which never spill
# One image of each kernel and head tile a target: its disassembly is made again, which takes half a second.
SAMPLE = list({(v["target"], v["kernel"], v["head_tile"]): v["id"] for v in map(VARIANTS.get, CUBINS)}.values())


def read(name):
    return (IMAGES / VARIANTS[name]["file"]).read_bytes()


def packed(variant):
    """(offset, size) of what a launch passes: the arguments, then two null scratch pointers."""
    return inspection.natural_layout(iter([*(compile.SIZES[kind] for _, kind in variant["arguments"]), 8, 8]))


def test_folder_holds_what_the_manifest_lists():
    present = {path.name for path in IMAGES.iterdir()} - {"manifest.json", "__pycache__"}
    assert present == {variant["file"] for variant in VARIANTS.values()}
    assert {variant["target"] for variant in VARIANTS.values()} == MANIFEST["targets"].keys()


def test_targets_are_those_of_the_table():
    for name, facts in MANIFEST["targets"].items():
        table = targets.TARGETS[name]
        assert (facts["shared_limit"], facts["warp_size"]) == (table.shared_limit, table.warp_size)
        wanted = [variant.id for variant in specs.variants([table])]
        assert [variant["id"] for variant in MANIFEST["variants"] if variant["target"] == name] == wanted


@pytest.mark.parametrize("name", VARIANTS)
def test_image_is_for_its_target(name):
    """Bytes, hash, ELF machine and flags, symbol, shared memory; see build_tools/verify_wheel.py."""
    variant = VARIANTS[name]
    assert not list(verify_wheel.check_image(variant, MANIFEST["targets"][variant["target"]], read(name)))


@pytest.mark.parametrize("name", VARIANTS)
def test_W04_limits(name):
    variant, target = VARIANTS[name], targets.TARGETS[VARIANTS[name]["target"]]
    assert 0 < variant["shared"] <= target.shared_limit
    assert variant["threads"] <= 1024
    assert variant["threads"] % target.warp_size == 0
    assert variant["warp_size"] == target.warp_size
    assert variant["format"] == target.format
    assert variant["resources"]["spill_bytes"] <= compile.SPILL_BUDGET[target.family]
    if target.family in DATA_CENTRE:
        assert variant["resources"]["spill_bytes"] == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_W05_W06_instructions_are_those_of_the_target(name):
    assert not list(inspection.instruction_problems(VARIANTS[name]["instructions"], DECLARED[name].matrix))


@pytest.mark.parametrize("name", SAMPLE)
def test_disassembly_agrees_with_the_record(name):
    pytest.importorskip("triton", "3.9.0", reason="the disassembler comes with the build's Triton 3.9")
    command = [compile._tool("nvdisasm"), "--no-dataflow", str(IMAGES / VARIANTS[name]["file"])]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert inspection.instructions(text) == VARIANTS[name]["instructions"]


@pytest.mark.parametrize("name", CUBINS)
def test_cubin_takes_what_a_launch_passes(name):
    assert inspection.cubin_parameters(read(name)) == packed(VARIANTS[name])


@pytest.mark.parametrize("name", CODE_OBJECTS)
def test_code_object_takes_what_a_launch_passes(name):
    variant, kernel = VARIANTS[name], inspection.amd_kernel(read(name))
    assert inspection.amd_parameters(read(name)) == packed(variant)
    kinds = [argument[".value_kind"] for argument in kernel[".args"]]
    pointers = [kind == "ptr" for _, kind in variant["arguments"]] + [True, True]
    assert kinds == ["global_buffer" if pointer else "by_value" for pointer in pointers]
    assert kernel[".symbol"] == variant["symbol"] + ".kd"
    assert kernel[".max_flat_workgroup_size"] == variant["threads"]
    assert kernel[".wavefront_size"] == variant["warp_size"]
    assert kernel[".private_segment_fixed_size"] == variant["resources"]["spill_bytes"]
    assert kernel[".vgpr_count"] == variant["resources"]["vgprs"]
    assert kernel[".group_segment_fixed_size"] == 0  # all of it is dynamic: the launch passes `shared`


@pytest.mark.parametrize("name", CODE_OBJECTS)
def test_matrix_instructions_are_in_the_code(name):
    """Matrix instructions have an encoding of their own in their first 32 bits, at any of the section's words."""
    encoding, mask = (0xD3800000, 0xFF800000) if VARIANTS[name]["warp_size"] == 64 else (0xCC000000, 0xFF000000)
    code = elffile.ELFFile(io.BytesIO(read(name))).get_section_by_name(".text").data()
    words = memoryview(code[: len(code) // 4 * 4]).cast("I")
    counted = sum(count for word, count in VARIANTS[name]["instructions"].items() if inspection.MATRIX.fullmatch(word))
    assert sum(word & mask == encoding for word in words) >= counted > 0


@pytest.mark.parametrize("name", PTX)
def test_ptx_takes_what_a_launch_passes_and_runs_on_every_later_part(name):
    text = read(name).decode()
    assert inspection.ptx_parameters(text) == packed(VARIANTS[name])
    assert VARIANTS[name]["ptx_sha256"] == VARIANTS[name]["sha256"]
    assert re.search(r"^\.version 8\.0$", text, re.MULTILINE)
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert "wgmma" not in text
    assert "tcgen05" not in text


@pytest.mark.parametrize("name", PTX)
def test_aligned_images_gather_by_16_byte_asynchronous_copies(name):
    found = re.search(r"cp\.async\.cg\.shared\.global[^;]*, 0x10,", read(name).decode())
    assert bool(found) == VARIANTS[name]["aligned"]
