"""Tensor parallelism: each rank computes its share of the heads, over the whole pool.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

A rank's call takes its slices of q and of the sink and everything else whole. A head's bits do not depend on the heads
beside it as long as the same kernel image serves both numbers of heads (64 and 128 heads on every GPU, for example),
so the shares together are the single call, bit for bit. With a GPU for every rank: NCCL and the operator; else gloo
and the reference.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import paged_prefill
from paged_prefill import _workload


def attend(*arguments, **keywords):
    """The operator; on a CPU, for which it has no kernels, the reference, a head at a time.

    A product of matrices on a CPU rounds by the number of its rows, so that only equal shapes give equal bits.
    """
    q, *others, attn_sink, softmax_scale = arguments
    if q.is_cuda:
        return paged_prefill.sparse_attn_v4_paged_prefill(*arguments, **keywords)
    heads = [
        paged_prefill.reference(q[:, h : h + 1], *others, attn_sink[h : h + 1], softmax_scale)
        for h in range(q.size(1))
    ]
    return torch.cat(heads, dim=1)


def attend_with_my_heads(arguments: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """One rank's share of a call with the operator's nine `arguments`; every rank returns the whole out [T, H, D]."""
    q, *others, attn_sink, softmax_scale = arguments
    ranks = dist.get_world_size()
    mine = slice(q.size(1) * dist.get_rank() // ranks, q.size(1) * (dist.get_rank() + 1) // ranks)
    out = attend(q[:, mine], *others, attn_sink[mine], softmax_scale)
    outs = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(outs, out)
    return torch.cat(outs, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl if there is a GPU for every rank")
    parser.add_argument("--heads", type=int, default=128, help="of all ranks together; a multiple of their number")
    options = parser.parse_args()

    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    backend = options.backend or ("nccl" if enough else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.heads % ranks:
        parser.error(f"--heads {options.heads} is not a multiple of {ranks} ranks")

    for layer in _workload.LAYERS.values():
        workload = _workload.build(layer, _workload.SMALL_REQUESTS, heads=options.heads, device=device)
        out = attend_with_my_heads(workload.args())
        assert torch.equal(out, attend(*workload.args())), f"rank {rank}, {layer.name}: other bits than the single call"
    if rank == 0:
        print(f"tensor parallel over {ranks} ranks ({backend}): equal to the single call, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
