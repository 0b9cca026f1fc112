"""Context parallelism: each rank holds a part of the paged pool, and the ranks' results are merged.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Every rank has the queries, this forward's own keys and the sink, and the rows [first, last) of the pool. What is not
its own it leaves out as holes. The keys and the sink, which every rank repeats, count once by
replicated_logit_shift = -log(ranks). With a GPU for every rank: NCCL and the operator; else gloo and the reference.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import paged_prefill
from paged_prefill import _compare, _workload


def attend(*arguments, **keywords):
    """The operator; on a CPU, for which it has no kernels, the reference."""
    on_gpu = arguments[0].is_cuda
    return (paged_prefill.sparse_attn_v4_paged_prefill if on_gpu else paged_prefill.reference)(*arguments, **keywords)


def attend_in_parts(
    arguments: Sequence[torch.Tensor | float | None], first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's part of a call: `arguments` are the operator's nine, of which this rank keeps pool rows [first, last).

    Every rank returns the same: out [T, H, D] in q's dtype, lse [T, H] fp32.
    """
    q, unified_kv, kv_indices_prefix, *rest = arguments
    mine = (kv_indices_prefix >= first) & (kv_indices_prefix < last)
    local = torch.where(mine, kv_indices_prefix - first, -1)
    ranks = dist.get_world_size()
    out, lse = attend(
        q, unified_kv[first:last], local, *rest, return_lse=True, replicated_logit_shift=-math.log(ranks)
    )
    outs, lses = [torch.empty_like(out) for _ in range(ranks)], [torch.empty_like(lse) for _ in range(ranks)]
    dist.all_gather(outs, out)
    dist.all_gather(lses, lse)
    return paged_prefill.merge(outs, lses)


def share(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The pool rows [first, last) of a rank. The last of three or more ranks gets none, as happens to a small pool."""
    owners = ranks - 1 if ranks > 2 else ranks
    return rows * min(rank, owners) // owners, rows * min(rank + 1, owners) // owners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl if there is a GPU for every rank")
    parser.add_argument("--heads", type=int, default=128)
    options = parser.parse_args()

    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    backend = options.backend or ("nccl" if enough else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # The lists are padded with holes, and each layer class splits differently.
    for layer in _workload.LAYERS.values():
        workload = _workload.build(layer, _workload.SMALL_REQUESTS, heads=options.heads, device=device)
        first, last = share(len(workload.unified_kv), ranks, rank)
        for sink in (workload.attn_sink, None):
            arguments = (*workload.args()[:7], sink, workload.softmax_scale)
            out, lse = attend_in_parts(arguments, first, last)
            whole, whole_lse = paged_prefill.reference(
                *arguments, True, compute_dtype=torch.float64, out_dtype=torch.float64
            )
            for comparison in (_compare.compare_out(out, whole), _compare.compare_lse(lse, whole_lse)):
                assert comparison.ok, f"rank {rank}, {layer.name}: {comparison}"
            if rank == 0:
                error = _compare.compare_out(out, whole)
                print(f"{layer.name:9} sink {sink is not None!s:5}  error {error.error:.1e}, limit {error.limit:.0e}")
    if rank == 0:
        print(f"context parallel over {ranks} ranks ({backend}): equal to the single call")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
