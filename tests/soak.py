"""Randomised calls on a GPU for as long as wanted: no wrong answer, no drift in memory, no call lost.

    python tests/soak.py --seconds 300

Rounds of several threads, each on a stream of its own, alternate with captures. Among the good calls are ones that must
be refused. Of every fourth call a few tokens are compared with the fp64 reference, and every tenth is made twice and
must give the same bits. The last line is the count; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import paged_prefill
from cases import INT32_MAX, INT32_MIN
from oracle import assert_close, assert_lse_close

attention = paged_prefill.sparse_attn_v4_paged_prefill
DTYPES = (torch.bfloat16, torch.float16)
HEADS = (1, 3, 8, 16, 17, 32, 40, 64, 100, 128)
HEAD_DIMS = (512, 512, 512, 64, 128, 256, 72)
POOL_ROWS, KV_ROWS = 8192, 2048
MAX_QUERY = 600 * 64 * 512  # elements of q in one call
ROUNDS_TO_WARM_UP = 5
ALLOWED_DEVICE_BYTES, ALLOWED_HOST_BYTES = 64 << 20, 256 << 20


@dataclass
class Result:
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(text)
        print(f"WRONG: {text}", flush=True)


class Inputs:
    """Tables and queries made once; a call takes views of them and new lists."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.query = {dtype: normal(MAX_QUERY + 8, dtype=dtype) for dtype in DTYPES}
        self.pool = {(d, t): normal(POOL_ROWS, d, dtype=t) for d in set(HEAD_DIMS) for t in DTYPES}
        self.kv = {(d, t): normal(KV_ROWS, d, dtype=t) for d in set(HEAD_DIMS) for t in DTYPES}
        self.sink = normal(max(HEADS), dtype=torch.float32)

    def lists(self, rng: random.Random, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists with holes and an unowned tail; now and then hostile entries and bounds, or another dtype."""
        generator = torch.Generator(device=self.device).manual_seed(rng.getrandbits(60))
        options = {"generator": generator, "device": self.device, "dtype": torch.int32}
        longest = rng.choice((0, 1, 17, 64, 150, 700 if tokens < 100 else 40))
        lengths = torch.randint(0, longest + 1, (tokens,), **options)
        indptr = torch.zeros(tokens + 1, dtype=torch.int32, device=self.device)
        indptr[1:] = lengths.cumsum(0)
        indices = torch.randint(-rows // 4, rows, (tokens * longest + 7,), **options).clamp(min=-1)
        if rng.random() < 0.2:
            wild = torch.tensor((rows, rows + 5, -2, INT32_MIN, INT32_MAX), dtype=torch.int32, device=self.device)
            some = torch.randint(0, len(indices), (5,), generator=generator, device=self.device)
            indices[some] = wild
        if rng.random() < 0.1:
            wild = torch.tensor((-1, INT32_MAX, INT32_MIN), dtype=torch.int32, device=self.device)
            some = torch.randint(0, len(indptr), (3,), generator=generator, device=self.device)
            indptr[some] = wild
        if rng.random() < 0.2:
            indices = indices.long()
        if rng.random() < 0.1:
            indptr = indptr.long()
        return indices, indptr

    def call(self, rng: random.Random) -> dict[str, object]:
        """A random good call's arguments."""
        dtype, heads, head_dim = rng.choice(DTYPES), rng.choice(HEADS), rng.choice(HEAD_DIMS)
        most = min(600, MAX_QUERY // (heads * head_dim))
        tokens = rng.choice((0, 1, 2, rng.randint(1, 40), rng.randint(1, most)))
        start = rng.choice((0, 0, 0, 8, 1))  # 1: not aligned
        q = self.query[dtype][start : start + tokens * heads * head_dim].view(tokens, heads, head_dim)
        prefix, prefix_bounds = self.lists(rng, tokens, POOL_ROWS)
        extend, extend_bounds = self.lists(rng, tokens, KV_ROWS)
        sink = self.sink[:heads]
        return {
            "q": q,
            "unified_kv": self.pool[head_dim, dtype],
            "kv_indices_prefix": prefix,
            "kv_indptr_prefix": prefix_bounds,
            "kv": self.kv[head_dim, dtype],
            "kv_indices_extend": extend,
            "kv_indptr_extend": extend_bounds,
            "attn_sink": rng.choice((sink, sink, sink.bfloat16(), None)),
            "softmax_scale": head_dim**-0.5,
            "replicated_logit_shift": rng.choice((0.0, 0.0, -1.4)),
        }


def compare(arguments: dict[str, object], out: torch.Tensor, lse: torch.Tensor, rng: random.Random) -> None:
    tokens = sorted({rng.randrange(len(out)) for _ in range(3)}) if len(out) else []
    expected, expected_lse = paged_prefill.reference(
        **arguments, return_lse=True, compute_dtype=torch.float64, out_dtype=torch.float64, tokens=tokens
    )
    what = f"{tuple(arguments['q'].shape)}, tokens {tokens}"
    assert_close(out[tokens], expected, what)
    assert_lse_close(lse[tokens], expected_lse, what)


REFUSED = {
    "dtype mismatch": lambda a: {"unified_kv": a["unified_kv"].float()},
    "length mismatch": lambda a: {"kv_indptr_prefix": a["kv_indptr_prefix"][:-1]},
    "attn_sink length mismatch": lambda a: {"attn_sink": torch.zeros(a["q"].size(1) + 1, device=a["q"].device)},
    "head_dim mismatch": lambda a: {"kv": a["kv"][:, :-8]},
    "kv_indices_extend device mismatch": lambda a: {"kv_indices_extend": a["kv_indices_extend"].cpu()},
    "out shape mismatch": lambda a: {"out": a["q"].new_empty((1, *a["q"].shape[1:]))},
    "out overlaps kv": lambda a: {"out": a["kv"].view(-1)[: a["q"].numel()].view(a["q"].shape)},
}


def refused_call(arguments: dict[str, object], rng: random.Random, result: Result) -> None:
    text = rng.choice(list(REFUSED))
    q, kv = arguments["q"], arguments["kv"]
    if len(q) < 2 or q.numel() > kv.numel():
        text = "attn_sink length mismatch"
    try:
        attention(**{**arguments, **REFUSED[text](arguments)})
        result.problem(f"not refused: {text}")
    except RuntimeError as error:
        if text not in str(error):
            result.problem(f"refused in other words: {text}: {error}")
    result.add(refused=1)


def one_call(inputs: Inputs, rng: random.Random, result: Result) -> None:
    arguments = inputs.call(rng)
    if rng.random() < 0.1:
        refused_call(arguments, rng, result)
    q = arguments["q"]
    given = rng.choice((None, None, torch.empty(q.shape, dtype=q.dtype, device=q.device), "q"))
    if given == "q":
        own = q.clone()
        out, lse = attention(**{**arguments, "q": own}, return_lse=True, out=own)
    else:
        out, lse = attention(**arguments, return_lse=True, out=given)
    result.add(calls=1)
    if rng.random() < 0.25:
        compare(arguments, out, lse, rng)
        result.add(compared=1)
    if rng.random() < 0.1:
        # From where the first call read it: an unaligned q takes another image than its aligned copy.
        where = {"q": q.clone()} if given == "q" else {}
        again, lse_again = attention(**{**arguments, **where}, return_lse=True)
        if not (torch.equal(again, out) and torch.equal(lse_again, lse)):
            result.problem(f"two calls differ: {tuple(q.shape)}")
        result.add(calls=1, repeated=1)


def guarded(function, *arguments) -> None:
    result = arguments[-1]
    try:
        function(*arguments)
    except BaseException as error:
        result.problem(f"{type(error).__name__}: {error}")


def work(inputs: Inputs, seed: int, calls: int, stream: torch.cuda.Stream, result: Result) -> None:
    rng = random.Random(seed)
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for _ in range(calls):
            one_call(inputs, rng, result)
    stream.synchronize()


def capture(inputs: Inputs, seed: int, result: Result) -> None:
    """A captured call, replayed on inputs that change in place."""
    rng = random.Random(seed)
    arguments = inputs.call(rng)
    arguments["q"] = arguments["q"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(**arguments, return_lse=True)
    for _ in range(3):
        arguments["q"].mul_(0.75)
        if arguments["q"].numel():  # an empty capture has nothing to replay
            graph.replay()
        compare(arguments, out, lse, rng)
        result.add(replays=1)
    result.add(captures=1)
    if len(arguments["q"]):
        refused_call(arguments, rng, result)


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> tuple[int, int, int]:
    """Bytes that torch's tensors hold, that this device has in use, and that the host process has resident."""
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # the reference's, one for each stream and handle
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free, host_bytes()


def soak(seconds: float, threads: int, seed: int, device: str = "cuda") -> Result:
    result, inputs = Result(), Inputs(device, seed)
    streams = [torch.cuda.Stream() for _ in range(threads)]
    paged_prefill.preload()
    start, round_, first = time.monotonic(), 0, None
    while time.monotonic() - start < seconds:
        workers = [
            threading.Thread(target=guarded, args=(work, inputs, seed + 1000 * round_ + i, 60, stream, result))
            for i, stream in enumerate(streams)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for i in range(4):
            guarded(capture, inputs, seed + 1000 * round_ + 500 + i, result)
        round_ += 1
        if round_ == ROUNDS_TO_WARM_UP:
            first = memory()
        if round_ % 20 == 0:
            print(f"{time.monotonic() - start:5.0f} s  {dict(result.counts)}", flush=True)
        if len(result.problems) > 20:
            break
    last = memory()
    if first is None:
        result.problem(f"{seconds} s are too short to see whether memory drifts")
        return result
    tensors, in_use, resident = (b - a for a, b in zip(first, last, strict=True))
    in_mib = f"{in_use / 2**20:.1f} MiB on the device, {resident / 2**20:.1f} MiB on the host"
    drift = f"drift: {tensors} bytes in tensors, {in_mib}"
    print(drift)
    if tensors or in_use > ALLOWED_DEVICE_BYTES or resident > ALLOWED_HOST_BYTES:
        result.problem(drift)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"soaking needs a CUDA or ROCm GPU; torch {torch.__version__} sees none")
    start = time.monotonic()
    result = soak(arguments.seconds, arguments.threads, arguments.seed)
    counts = ", ".join(f"{number} {name}" for name, number in result.counts.items())
    print(f"soak: {time.monotonic() - start:.0f} s, {counts}, {len(result.problems)} wrong")
    sys.exit(bool(result.problems))


if __name__ == "__main__":
    main()
