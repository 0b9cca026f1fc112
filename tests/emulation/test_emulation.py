"""The shipped AMD images, executed instruction by instruction on a CPU, against the reference in fp64.

    EMULATOR=<checkout of tinygrad> python -m pytest tests/emulation

This shows values: that the machine code computes the operator, and keeps to its tensors. It does not show races,
waits or speed. Every image in the installed wheel's manifest whose target can be emulated runs every case.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import checkout

if reason := checkout.missing():
    pytest.skip(reason, allow_module_level=True)

import code_object
from fenced import fenced

import cases
from cases import Guarded
from oracle import assert_close, assert_lse_close
from paged_prefill import _compare, _manifest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOG2_E = math.log2(math.e)
# Odd, below and over one tile, for the variants with small tiles and with large ones.
HEADS = {16: (5, 13, 16, 17, 1, 32), 64: (33, 40, 67, 64)}
ANY_HEAD_DIMS = (72, 8, 200, 512, 64, 264)


@dataclass(frozen=True)
class Call:
    """A case and how it is called."""

    case: cases.Case
    return_lse: bool = True
    in_place: bool = False
    split: int = 0  # tiles of a first launch; the rest in a second one
    offset: int = 0  # elements by which the bases of q, unified_kv and kv miss their alignment


def shared_case(name, start, end):
    """Some tokens of a case that the GPU tests run too."""
    return lambda **options: Call(cases.build(name, **options).take(start, end))


def several_steps(**options):
    """Lists longer than any software pipeline."""
    prefix = cases.random_lists((150, 64, 0), 64, cases.random.Random(20))
    extend = cases.random_lists((70, 0, 129), 40, cases.random.Random(21))
    return cases.make(prefix, extend, kv_rows=40, **options)


def nan_row(**options):
    """A NaN in a selected row reaches its own token and no other."""
    case = cases.make([[1, 2, 3], [4, 5], [6] * 20], [[1], [2], [3]], kv_rows=8, **options)
    case.unified_kv[5, 3] = float("nan")
    return case


def strided(multiple, offset=0):
    """Rows of wider tables, as in a pool that several layers share, and q with heads outermost."""

    def build(**options):
        case = cases.build("holes", **options).take(0, 3)

        def widen(table):
            wider = table.new_full((len(table), table.size(1) * 2 + multiple), float("nan"))
            wider[:, : table.size(1)] = table
            return wider[:, : table.size(1)]

        tokens, heads, head_dim = case.q.shape
        q = case.q.new_full((heads, tokens, head_dim + multiple), float("nan"))
        q[..., :head_dim] = case.q.transpose(0, 1)
        q = q[..., :head_dim].transpose(0, 1)
        return Call(case.with_(q=q, unified_kv=widen(case.unified_kv), kv=widen(case.kv)), offset=offset)

    return build


def call(build, **how):
    return lambda **options: Call(build(**options), **how)


CASES = {
    "ragged": shared_case("ragged", 1, 5),
    "holes": shared_case("holes", 0, 4),
    "hostile_indices": shared_case("hostile_indices", 1, 5),
    "hostile_indptr": shared_case("hostile_indptr", 0, 8),
    "prefix_empty": shared_case("prefix_empty", 0, 4),
    "extend_empty": shared_case("extend_empty", 1, 5),
    "lists_empty": shared_case("lists_empty", 0, 3),
    "lists_absent": call(functools.partial(cases.make, [[], []], [[], []], tail=())),
    "all_holes": shared_case("all_holes", 0, 3),
    "tables_empty": shared_case("tables_empty", 0, 3),
    "repeated_rows": shared_case("repeated_rows", 0, 3),
    "first_chunk": shared_case("first_chunk", 15, 18),
    "no_sink": shared_case("no_sink", 0, 3),
    "sinks": shared_case("sinks", 0, 3),
    "shifted": shared_case("shifted", 0, 4),
    "offset_lists": shared_case("offset_lists", 0, 3),
    "sharp": shared_case("sharp", 0, 3),
    "one_token": shared_case("one_token", 0, 1),
    "csa-512": shared_case("csa-512", 5, 7),
    "hca": shared_case("hca", 9, 11),
    "several_steps": call(several_steps),
    "nan_row": call(nan_row),
    "without_lse": call(functools.partial(cases.build, "one_token"), return_lse=False),
    "in_place": call(functools.partial(cases.build, "repeated_rows"), in_place=True),
    "two_launches": call(functools.partial(cases.build, "shifted"), split=3),
    "strided": strided(8),
}
UNALIGNED_CASES = {"strided_unaligned": strided(3, offset=1), "strided_odd": strided(1, offset=3)}


def cases_of(variant):
    return CASES if variant["aligned"] else {**CASES, **UNALIGNED_CASES}


def variants():
    return [entry for entry in _manifest.read_manifest().data["variants"] if entry["target"] in code_object.ISA]


@functools.cache
def loaded(variant_id):
    found = code_object.CodeObject(_manifest.read_manifest().read_image(variant_id))
    assert variant_id.endswith(f"-{found.target}")
    return found


def build(variant, name):
    """The Call of a case, in the sizes that this variant is offered for."""
    names = list(cases_of(variant))
    index = names.index(name)
    heads = [h for h in HEADS[variant["head_tile"]] if variant["min_heads"] <= h <= (variant["max_heads"] or h)]
    return cases_of(variant)[name](
        heads=heads[index % len(heads)],
        head_dim=variant["head_dim"] or ANY_HEAD_DIMS[index % len(ANY_HEAD_DIMS)],
        dtype=DTYPES[variant["dtype"]],
    )


def emulate(variant, call):
    """(out, lse or None) of the variant's image."""
    case, offset = call.case, call.offset
    out = Guarded(case.q.shape, case.q.dtype, "cpu")
    lse = Guarded(case.q.shape[:2], torch.float32, "cpu") if call.return_lse else None
    q = out.data.copy_(case.q) if call.in_place else fenced(case.q, 16, offset)
    unified_kv, kv = fenced(case.unified_kv, 16, offset), fenced(case.kv, 16, offset)
    lists = {
        name: fenced(getattr(case, name), 4)
        for name in ("kv_indices_prefix", "kv_indptr_prefix", "kv_indices_extend", "kv_indptr_extend")
    }
    sink = None if case.attn_sink is None else fenced(case.attn_sink, 4)
    tokens, heads, head_dim = q.shape
    tiles = tokens * -(-heads // variant["head_tile"])
    values = {
        "q_ptr": q,
        "unified_kv_ptr": unified_kv,
        "kv_ptr": kv,
        **{f"{name}_ptr": tensor for name, tensor in lists.items()},
        "attn_sink_ptr": sink,
        "out_ptr": out.data,
        "lse_ptr": lse and lse.data,
        "q_stride_t": q.stride(0),
        "q_stride_h": q.stride(1),
        "unified_kv_stride_n": unified_kv.stride(0),
        "kv_stride_n": kv.stride(0),
        "num_tokens": tokens,
        "num_heads": heads,
        "head_dim": head_dim,
        "unified_kv_rows": len(unified_kv),
        "kv_rows": len(kv),
        "kv_indices_prefix_len": len(lists["kv_indices_prefix"]),
        "kv_indices_extend_len": len(lists["kv_indices_extend"]),
        "has_sink": int(sink is not None),
        "has_lse": int(call.return_lse),
        "num_tiles": tiles,
        "softmax_scale_log2": case.softmax_scale * LOG2_E,
        "logit_shift_log2": case.replicated_logit_shift * LOG2_E,
    }
    image = loaded(variant["id"])
    for first, end in ((0, call.split), (call.split, tiles)):
        if first < end:
            segment = image.pack(variant["arguments"], {**values, "first_tile": first})
            image.launch(end - first, variant["threads"], variant["shared"], segment)
    out.assert_intact("out")
    if lse:
        lse.assert_intact("lse")
    return out.data, lse and lse.data


@pytest.mark.parametrize(
    ("variant", "name"),
    [pytest.param(v, name, id=f"{v['id']}-{name}") for v in variants() for name in cases_of(v)],
)
def test_image_agrees_with_the_reference(variant, name, expect, proofs_of_run):
    call = build(variant, name)
    out, lse = emulate(variant, call)
    expected_out, expected_lse = expect(call.case)
    assert_close(out, expected_out, name)
    if lse is not None:
        assert_lse_close(lse, expected_lse, name)
    proofs_of_run.add(variant, _compare.compare_out(out, expected_out).error, len(cases_of(variant)), checkout.COMMIT)
