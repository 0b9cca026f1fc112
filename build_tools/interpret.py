"""Runs the portable kernel in Triton's interpreter, on a CPU: `python -m build_tools.interpret`.

Same source as the images, so it shows the kernel's semantics where there is no GPU. fp16 only: the interpreter of
Triton 3.9 multiplies the bit patterns of bf16. Values, not speed.
"""

import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from build_tools.specs import HEAD_DIMS, KERNELS, MAX_HEAD_DIM

ROOT = Path(__file__).resolve().parent.parent
INT32_MAX = 2**31 - 1
LOG2_E = math.log2(math.e)


def run_interpreted(
    q: torch.Tensor,
    unified_kv: torch.Tensor,
    kv_indices_prefix: torch.Tensor,
    kv_indptr_prefix: torch.Tensor,
    kv: torch.Tensor,
    kv_indices_extend: torch.Tensor,
    kv_indptr_extend: torch.Tensor,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    replicated_logit_shift: float = 0.0,
    *,
    head_tile: int = 16,
    block_k: int = 32,
    keys_first: bool = True,
    masked: bool | None = None,
    want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator's out [T, H, D] and lse [T, H] by the interpreted kernel, for fp16 CPU tensors and int32 lists.

    Args:
        head_tile, block_k, keys_first: the tile, as in build_tools/specs.py.
        masked: take the variant whose head_dim is a run-time argument; None takes it where no other one fits.
        want_lse: False runs the kernel without an lse tensor and gives None for it.
    """
    if q.dtype != torch.float16:
        raise ValueError(f"the interpreter computes fp16 only, got {q.dtype}: its bf16 products are wrong")
    tensors = (q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv, kv_indices_extend, kv_indptr_extend, attn_sink)
    tile = {
        "BLOCK_H": head_tile,
        "BLOCK_K": block_k,
        "KEYS_FIRST": keys_first,
        "MASK_D": q.size(-1) not in HEAD_DIMS if masked is None else masked,
    }
    tile["BLOCK_D"] = MAX_HEAD_DIM if tile["MASK_D"] else q.size(-1)
    return _pool().submit(_launch, tensors, softmax_scale, replicated_logit_shift, tile, want_lse).result()


@cache
def _pool() -> ProcessPoolExecutor:
    # A process of its own: the interpreter is chosen when Triton is imported, for the whole process.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_process)


def _prepare_process() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def _launch(
    tensors: tuple[torch.Tensor | None, ...], scale: float, shift: float, tile: dict[str, Any], want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, unified_kv, prefix_indices, prefix_indptr, kv, extend_indices, extend_indptr, attn_sink = tensors
    tokens, heads, head_dim = q.shape
    # NaN, so that an element that is never written shows.
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    lse = torch.full((tokens, heads), float("nan")) if want_lse else None
    absent = torch.zeros(1)
    arguments = {
        "q_ptr": q,
        "unified_kv_ptr": unified_kv,
        "kv_indices_prefix_ptr": prefix_indices,
        "kv_indptr_prefix_ptr": prefix_indptr,
        "kv_ptr": kv,
        "kv_indices_extend_ptr": extend_indices,
        "kv_indptr_extend_ptr": extend_indptr,
        "attn_sink_ptr": absent if attn_sink is None else attn_sink,
        "out_ptr": out,
        "lse_ptr": absent if lse is None else lse,
        "q_stride_t": q.stride(0),
        "q_stride_h": q.stride(1),
        "unified_kv_stride_n": unified_kv.stride(0),
        "kv_stride_n": kv.stride(0),
        "num_heads": heads,
        "head_dim": head_dim,
        "unified_kv_rows": min(unified_kv.size(0), INT32_MAX),
        "kv_rows": min(kv.size(0), INT32_MAX),
        "kv_indices_prefix_len": prefix_indices.numel(),
        "kv_indices_extend_len": extend_indices.numel(),
        "has_sink": int(attn_sink is not None),
        "has_lse": int(want_lse),
        "first_tile": 0,
        "softmax_scale_log2": scale * LOG2_E,
        "logit_shift_log2": shift * LOG2_E,
    }
    tiles = tokens * -(-heads // tile["BLOCK_H"])
    if tiles:
        KERNELS["portable"].load()[(tiles,)](**arguments, **tile)
    return out, lse


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from paged_prefill import _compare, _workload, reference

    table = Table(title="The portable kernel in Triton's interpreter, fp16, against the reference in fp64")
    for column in ("layer", "tokens", "heads", "head_dim", "keys", "error", "limit", "seconds"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    failed = []
    for name, layer in _workload.LAYERS.items():
        work = _workload.build(layer, _workload.SMALL_REQUESTS, heads=24, head_dim=128, dtype=torch.float16)
        start = time.perf_counter()
        out, _ = run_interpreted(*work.args())
        seconds = time.perf_counter() - start
        expected = reference(*work.args(), compute_dtype=torch.float64, out_dtype=torch.float64)
        result = _compare.compare_out(out, expected)
        if not result.ok:
            failed.append(f"{name}: error {result.error:.2e} is over {result.limit:.0e}; {result.detail}")
        tokens, heads, head_dim = work.q.shape
        row = (name, str(tokens), str(heads), str(head_dim), str(work.keys))
        table.add_row(*row, f"{result.error:.2e}", f"{result.limit:.0e}", f"{seconds:.1f}")
    Console().print(table)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
