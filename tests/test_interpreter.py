"""The portable kernel's source in Triton's interpreter, fp16, against the dense oracle: semantics without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

import cases
import oracle

pytest.importorskip("triton", "3.9.0", reason="the interpreter tests need the build's Triton 3.9")
if sys.version_info < (3, 11):
    pytest.skip("build_tools needs Python 3.11", allow_module_level=True)

from build_tools import specs
from build_tools.interpret import run_interpreted


def check(case, **tile):
    out, lse = run_interpreted(*case.args(), case.replicated_logit_shift, **tile)
    expected_out, expected_lse = oracle.dense(*case.args(), case.replicated_logit_shift)
    oracle.assert_close(out, expected_out, case.name)
    oracle.assert_lse_close(lse, expected_lse, case.name)
    return out, lse


# Heads below, at, between and above multiples of the tile; head_dims with a variant of their own and without one.
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (3, 72)])
@pytest.mark.parametrize("name", cases.BUILDERS)
def test_case(name, heads, head_dim):
    check(cases.build(name, heads=heads, head_dim=head_dim, dtype=torch.float16))


@pytest.mark.parametrize("name", cases.LAYER_BUILDERS)
def test_layer(name):
    check(cases.build(name, heads=16, head_dim=64, dtype=torch.float16))


# Every tile that some target has.
@pytest.mark.parametrize(
    ("head_tile", "block_k", "keys_first"),
    sorted(
        {
            (head_tile, dict(tile.constexprs)["BLOCK_K"], dict(tile.constexprs)["KEYS_FIRST"])
            for tiles in specs.TILES.values()
            for (kernel, head_tile, _), tile in tiles.items()
            if kernel == "portable"
        }
    ),
)
def test_tile(head_tile, block_k, keys_first):
    case = cases.build("holes", heads=17, head_dim=64, dtype=torch.float16)
    check(case, head_tile=head_tile, block_k=block_k, keys_first=keys_first)


@pytest.mark.parametrize("head_dim", [8, 120, 136, 504, 512])
def test_masked_head_dim(head_dim):
    check(cases.build("ragged", heads=2, head_dim=head_dim, dtype=torch.float16), masked=True)


@pytest.mark.parametrize("heads", [1, 15, 16, 17, 31, 33])
def test_heads(heads):
    check(cases.build("extend_empty", heads=heads, head_dim=64, dtype=torch.float16))


def test_without_lse():
    case = cases.build("sinks", heads=8, head_dim=64, dtype=torch.float16)
    out, lse = run_interpreted(*case.args(), want_lse=False)
    assert lse is None
    assert torch.equal(out, check(case)[0])


def test_infinite_sink_takes_all_the_weight():
    case = cases.build("sinks", heads=2, head_dim=64, dtype=torch.float16)
    case = case.with_(attn_sink=torch.tensor((float("inf"), 0.5)))
    out, lse = run_interpreted(*case.args())
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    assert torch.equal(lse[:, 0], torch.full_like(lse[:, 0], float("inf")))
    assert out[0, 1].abs().max() > 0


def test_nan_query_reaches_its_own_head_only_and_no_empty_token():
    case = cases.build("all_holes", heads=2, head_dim=64, dtype=torch.float16)
    case.q[:, 1] = float("nan")
    out, lse = run_interpreted(*case.args())
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(lse).all()


def test_nan_row_reaches_its_own_token_only():
    case = cases.make([[1, 2], [3], [2, 4]], [[], [0], []], heads=2, head_dim=64, dtype=torch.float16)
    case.unified_kv[3] = float("nan")
    out, _ = run_interpreted(*case.args())
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


def test_tokens_do_not_depend_on_their_neighbours():
    case = cases.build("ragged", heads=4, head_dim=64, dtype=torch.float16)
    whole, _ = run_interpreted(*case.args())
    for start, end in ((0, 3), (3, 4), (4, 9)):
        part, _ = run_interpreted(*case.take(start, end).args())
        assert torch.equal(part, whole[start:end])


def test_large_logits_stay_a_softmax():
    case = cases.make([[1, 2, 3]], [[0]], heads=2, head_dim=64, dtype=torch.float16)
    for sign in (1.0, -1.0):
        case.q.fill_(300.0)
        case.unified_kv[1:4] = sign * torch.tensor((300.0, 299.0, 300.0), dtype=torch.float16)[:, None]
        case.kv[:1] = sign * 300.0
        check(case)


def test_strided_views():
    base = cases.build("ragged", heads=4, head_dim=64, dtype=torch.float16)
    wide = torch.full((base.q.size(0), 4, 80), float("nan"), dtype=torch.float16)
    wide[:, :, 8:72] = base.q
    pool = torch.full((base.unified_kv.size(0), 3, 64), float("nan"), dtype=torch.float16)
    pool[:, 1] = base.unified_kv
    view = base.with_(q=wide[:, :, 8:72], unified_kv=pool[:, 1])
    assert torch.equal(run_interpreted(*view.args())[0], run_interpreted(*base.args())[0])


def test_bf16_is_refused():
    case = cases.build("one_token", heads=1, head_dim=64)
    with pytest.raises(ValueError, match="fp16 only"):
        run_interpreted(*case.args())
