"""The build: what it makes, what it refuses, and that the same tree gives the same bytes."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", "3.9.0", reason="building needs Triton 3.9")

from build_tools import BuildError, compile, inspection, manifest, specs, targets

ROOT = Path(__file__).resolve().parent.parent


def variant(target="sm80", dtype="fp16", head_tile=16, head_dim=64):
    """A small one: a second or two."""
    wanted = f"paged_prefill-{dtype}-h{head_tile}-d{head_dim}-{target}"
    return next(v for v in specs.variants([targets.TARGETS[target]]) if v.id == wanted)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A cache that holds one variant."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, compile.compile_variants([variant()], cache)[0]


def test_unknown_target_is_named_with_the_known_ones():
    with pytest.raises(BuildError, match=r"unknown target sm91: .*sm90a.*gfx942.*ptx"):
        targets.select("sm80 sm91")


def test_left_out_target_is_told_why():
    with pytest.raises(BuildError, match=r"target gfx906 \(left out: it has no matrix units\), gfx999: the known"):
        targets.select("gfx999 gfx906")
    assert not targets.LEFT_OUT.keys() & targets.TARGETS.keys()


def test_targets_are_selected_in_table_order():
    assert [t.name for t in targets.select("gfx942, sm80")] == ["sm80", "gfx942"]
    assert [t.name for t in targets.select("")] == [t.name for t in targets.select(None)] == list(targets.TARGETS)


def test_build_reads_the_targets_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(compile.TARGETS_VARIABLE, "hopper")
    with pytest.raises(BuildError, match="unknown target hopper"):
        compile.build(tmp_path)


def test_another_triton_is_refused(tmp_path, monkeypatch):
    compile.compilers.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.8.0")
    try:
        with pytest.raises(BuildError, match=r"needs Triton 3\.9\.0, found 3\.8\.0: pip install"):
            compile.build(tmp_path, [targets.TARGETS["sm80"]], tmp_path / "cache")
    finally:
        compile.compilers.cache_clear()


def test_the_build_requires_the_triton_it_checks_for():
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"triton=={compile.TRITON_VERSION}" in requires


@pytest.mark.parametrize("name", targets.TARGETS)
@pytest.mark.parametrize("dtype", specs.DTYPES)
def test_every_shape_is_served(name, dtype):
    offered = [v.spec for v in specs.variants([targets.TARGETS[name]]) if v.spec.dtype == dtype]
    for heads in range(1, 130):
        fitting = [s for s in offered if s.min_heads <= heads and (s.max_heads is None or heads <= s.max_heads)]
        for head_dim in range(8, specs.MAX_HEAD_DIM + 1, 8):
            widths = [s for s in fitting if s.head_dim in (0, head_dim)]
            assert any(not s.aligned for s in widths), (heads, head_dim)
        assert any(s.head_dim == 512 and s.aligned for s in fitting), heads


@pytest.mark.parametrize("name", targets.TARGETS)
def test_every_variant_is_the_choice_for_something(name):
    left = {v.spec for v in specs.variants([targets.TARGETS[name]])}
    offered = [v.spec for v in specs.variants([targets.TARGETS[name]])]
    for dtype in specs.DTYPES:
        for heads in (1, 8, 9, 16, 17, 32, 33, 128):
            for head_dim in (8, *specs.HEAD_DIMS):
                for aligned in (True, False):
                    left.discard(chosen(offered, dtype, heads, head_dim, aligned))
    assert not left


def chosen(offered, dtype, heads, head_dim, aligned):
    """What the launcher takes: the first that accepts."""
    return next(
        s
        for s in offered
        if s.dtype == dtype
        and s.head_dim in (0, head_dim)
        and s.min_heads <= heads <= (s.max_heads or heads)
        and (aligned or not s.aligned)
    )


def test_ids_and_files_are_unique():
    all_variants = specs.variants()
    assert len({v.id for v in all_variants}) == len({v.file for v in all_variants}) == len(all_variants)


def test_rdna_targets_keep_to_eight_specs():
    assert all(len(grid) <= 8 for family, grid in specs.GRIDS.items() if family.startswith("rdna"))


def test_tables_fit_together():
    for target in targets.TARGETS.values():
        assert target.family in specs.TILES and target.family in compile.SPILL_BUDGET
        assert (target.vendor == "cuda") == (target.capability is not None)
        if target.vendor == "cuda" and target.matches != "later":
            assert target.name.removeprefix("sm").rstrip("a") == "".join(map(str, target.capability))
            # An arch-specific image runs on its own part only.
            assert target.name.endswith("a") == (target.capability[0] >= 9)
            assert target.matches == "exact" or not target.name.endswith("a")


GOOD_IR = """
    %index = tt.load %p, %m, %cst : tensor<32x!tt.ptr<i32>> loc(#loc1)
    %128 = arith.extsi %index : tensor<32xi32> to tensor<32xi64> loc(#loc1)
    %131 = tt.splat %kv_stride_n : i64 -> tensor<32xi64> loc(#loc1)
    %132 = arith.muli %128, %131 : tensor<32xi64> loc(#loc1)
    %133 = tt.addptr %127, %132 {tt.divisibility = dense<16> : tensor<1xi32>} : tensor<32x!tt.ptr<bf16>>, tensor<32xi64> loc(#loc1)
    %14 = tt.make_range {end = 512 : i32, start = 0 : i32} : tensor<512xi32> loc(#loc1)
    %134 = tt.expand_dims %14 {axis = 0 : i32} : tensor<512xi32> -> tensor<1x512xi32> loc(#loc1)
    %135 = tt.addptr %136, %134 : tensor<32x512x!tt.ptr<bf16>>, tensor<32x512xi32> loc(#loc1)
"""  # noqa: E501


def test_W06_64_bit_addresses_are_accepted():
    assert not list(inspection.address_problems(GOOD_IR))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("%127, %132 {", "%127, %index {", "a 32-bit offset"),
        ("%128 = arith.extsi %index", "%n = arith.muli %index, %s : tensor<32xi32>\n%128 = arith.extsi %n", "product"),
    ],
)
def test_W06_32_bit_addresses_are_refused(old, new, told):
    ir = GOOD_IR.replace(old, new)
    if told == "a 32-bit offset":
        ir = ir.replace("tensor<32x!tt.ptr<bf16>>, tensor<32xi64>", "tensor<32x!tt.ptr<bf16>>, tensor<32xi32>")
    problems = list(inspection.address_problems(ir))
    assert problems
    assert told in problems[0]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"HMMA": 4, "LDGSTS": 2}, None),
        ({"LDGSTS": 2}, "matrix products were to be HMMA"),
        ({"HGMMA": 2}, "matrix products were to be HMMA"),
        ({"HMMA": 4, "UTCHMMA": 1}, "tensor memory (UTCHMMA)"),
        ({"HMMA": 4, "buffer_load_dwordx4": 1}, "offsets have 32 bits"),
    ],
)
def test_instructions_that_no_image_may_have(counts, told):
    problems = list(inspection.instruction_problems(counts, "HMMA"))
    assert bool(problems) == bool(told)
    assert told is None or told in problems[0]


def test_instructions_are_counted_by_name():
    sass = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @UP0 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
    """
    assert inspection.instructions(sass) == {"HMMA": 2, "LDGSTS": 1, "UTCHMMA": 1}
    amd = "\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]\n\tglobal_load_dwordx4 v[0:3], v[4:5], off\n"
    assert inspection.instructions(amd) == {"global_load_dwordx4": 1, "v_mfma_f32_16x16x16_bf16": 1}


def test_targets_as_ptx(tmp_path, monkeypatch):
    small = variant()
    monkeypatch.setattr(compile, "variants", lambda wanted: [replace(small, target=target) for target in wanted])
    command = ["compile", "--as-ptx", "--targets", "sm80", "--out", str(tmp_path), "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", command)
    compile.main()
    (record,) = json.loads((tmp_path / manifest.NAME).read_text())["variants"]
    assert (record["id"], record["target"], record["format"]) == (small.id, "sm80", "ptx")
    assert (tmp_path / f"{small.id}.ptx").read_text().count(".target sm_80") == 1
    monkeypatch.setattr(sys, "argv", ["compile", "--as-ptx", "--targets", "sm90a", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="sm90a has no PTX that other parts run"):
        compile.main()


def test_record(cached):
    record, image = cached[1]
    assert record["id"] == "paged_prefill-fp16-h16-d64-sm80" and record["file"] == record["id"] + ".cubin"
    assert record["bytes"] == len(image) and image.startswith(b"\x7fELF")
    kinds = dict(map(tuple, record["arguments"]))
    assert kinds["q_ptr"] == kinds["lse_ptr"] == "ptr"
    assert kinds["q_stride_t"] == kinds["kv_stride_n"] == "i64"
    assert kinds["num_heads"] == kinds["has_sink"] == kinds["first_tile"] == kinds["kv_indices_prefix_len"] == "i32"
    assert kinds["softmax_scale_log2"] == kinds["logit_shift_log2"] == "fp32"
    assert not {"BLOCK_K", "BLOCK_H"} & kinds.keys()
    assert record["instructions"]["HMMA"] > 0
    assert record["instructions"]["LDGSTS"] > 0


def test_targets_of_one_family_are_made_from_the_same_ptx(cached, tmp_path):
    images = compile.compile_variants([variant(), variant("sm100a")], tmp_path)
    assert len({record["ptx_sha256"] for record, _ in images}) == 1
    assert images[0] == cached[1]
    assert images[1][0]["sha256"] != images[0][0]["sha256"]


def test_cached_variant_is_not_compiled_again(cached, monkeypatch):
    cache, first = cached
    monkeypatch.setattr(compile, "ProcessPoolExecutor", None)
    assert compile.compile_variants([variant()], cache) == [first]


def test_damaged_cache_entry_is_not_used(cached, tmp_path):
    cache, (record, image) = cached
    key = compile.cache_key(variant())
    (tmp_path / f"{key}.json").write_bytes((cache / f"{key}.json").read_bytes())
    (tmp_path / f"{key}.image").write_bytes(image[:-1])
    assert compile._read_cache(tmp_path, key) is None
    assert compile._read_cache(cache, key) == (record, image)


def test_cache_key_follows_what_the_image_depends_on(monkeypatch):
    one = variant()
    keys = {compile.cache_key(v) for v in (one, variant(dtype="bf16"), variant(target="sm86"))}
    keys.add(compile.cache_key(replace(one, config=replace(one.config, num_warps=8))))
    monkeypatch.setattr(compile, "source_sha256", lambda kernel: "other")
    keys.add(compile.cache_key(one))
    assert len(keys) == 5


def test_two_builds_are_byte_identical(cached, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")  # no caller's variable may change an image
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(tmp_path)
    assert compile.compile_variants([variant()], tmp_path / "another cache") == [cached[1]]


def test_variant_that_does_not_compile_is_named(tmp_path):
    broken = replace(variant(), config=replace(variant().config, num_warps=3))
    with pytest.raises(BuildError, match=r"paged_prefill-fp16-h16-d64-sm80 does not compile: .*power of 2"):
        compile.compile_variants([broken], tmp_path)


def test_too_much_shared_memory_is_refused(tmp_path):
    small = replace(variant(), target=replace(targets.TARGETS["sm80"], shared_limit=1024))
    with pytest.raises(BuildError, match=r"h16-d64-sm80: it needs \d+ bytes of shared memory and sm80 has 1024"):
        compile.compile_variants([small], tmp_path)


def test_failed_build_leaves_no_manifest(tmp_path, monkeypatch):
    out = tmp_path / "images"
    out.mkdir()
    (out / manifest.NAME).write_text("{}")
    broken = replace(variant(), config=replace(variant().config, num_warps=3))
    monkeypatch.setattr(compile, "variants", lambda wanted: [broken])
    with pytest.raises(BuildError):
        compile.build(out, [targets.TARGETS["sm80"]], tmp_path / "cache")
    assert not (out / manifest.NAME).exists()


def test_stale_images_are_removed_and_the_manifest_is_deterministic(cached, tmp_path, monkeypatch):
    cache, (record, image) = cached
    monkeypatch.setattr(compile, "variants", lambda wanted: [variant()])
    texts = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "paged_prefill-old.cubin").write_bytes(b"old")
        compile.build(folder, [targets.TARGETS["sm80"]], cache)
        assert sorted(p.name for p in folder.iterdir()) == sorted([manifest.NAME, record["file"]])
        assert (folder / record["file"]).read_bytes() == image
        texts.append((folder / manifest.NAME).read_text())
    assert texts[0] == texts[1]
    written = json.loads(texts[0])
    assert written["schema"] == manifest.SCHEMA and written["compilers"]["triton"] == compile.TRITON_VERSION
    assert written["variants"] == [record] and list(written["targets"]) == ["sm80"]


def test_command_line_names_the_fault_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compile", "--targets", "sm91", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^unknown target sm91: the known ones are .*\.$"):
        compile.main()
