"""Times the operator against what else there is, in one process and interleaved: `python -m benchmarks.bench_hopper`.

Beside the installed wheel's operator: a bf16 GEMM, the gather limit, the portable kernel (the wheel's PTX), FlashMLA
and the public Triton versions where they can be imported.
Writes results.json, tables.md and plot.png into --out; `--render results.json` draws them again, without a GPU.

Peers are looked for on the import path and in the folder given by --peers:
- FlashMLA, by its public interface: module `flash_mla` with
  `flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink) -> (out, max_logits, lse)`, q [T, 64 or 128, 512],
  kv [rows, 1, 512], indices [T, 1, keys]. Its two inputs are merged, and its heads padded, outside of the timing.
- public Triton versions: each `NAME_public.py` in the folder, with `sparse_attn_v4_paged_prefill` of this operator's
  first nine arguments; sglang's own is found where it is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import paged_prefill
from benchmarks import render
from benchmarks.power import Meter
from benchmarks.render import FLASHMLA, GATHER, OURS, PTX
from paged_prefill import _bench, _devices, _loader, _manifest, _report, _workload

MERGED = f"{FLASHMLA} and merge"
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A load of full lists: each token has `prefix` rows of a pool of `rows`, and `extend` of this forward's keys."""

    heads: int
    prefix: int
    extend: int
    rows: int
    tokens: int = 4096

    @property
    def label(self) -> str:
        rows = f"{self.rows >> 20} Mi" if self.rows >= 2**20 else f"{self.rows >> 10} Ki"
        return f"{self.prefix}+{self.extend}, {rows}, T {self.tokens}, H {self.heads}"


SHAPES = (
    Shape(128, 1024, 128, 32768),
    Shape(64, 512, 128, 32768),
    Shape(128, 2048, 128, 2**20, 2048),
    Shape(32, 1024, 128, 32768),
    Shape(16, 1024, 128, 32768),
    Shape(8, 512, 128, 32768),
    Shape(64, 0, 128, 1024),
    Shape(16, 0, 128, 1024),
    Shape(128, 1024, 128, 32768, 512),
    Shape(128, 1024, 128, 32768, 64),
    Shape(16, 1024, 128, 32768, 64),
)


class Images:
    """Chooses whose images the operator runs on; a change costs one load, so it is made once a turn."""

    def __init__(self, device: torch.device) -> None:
        self._ordinal, self._current = device.index, OURS
        has_ptx = "ptx" in _manifest.read_manifest().data["targets"]
        self.names = (OURS, PTX) if has_ptx else (OURS,)

    def use(self, name: str) -> None:
        if name == self._current:
            return
        if name == OURS:
            _loader.reset(self._ordinal)
        else:
            _loader.override(self._ordinal, target="ptx")
        self._current = name


def merged(load: _workload.Workload, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sources as one: pool [rows, D] and indices [T, keys], filled up with -1 to a multiple of 128."""
    pool = torch.cat((load.unified_kv, load.kv))
    prefix = load.kv_indices_prefix.view(shape.tokens, shape.prefix)
    extend = load.kv_indices_extend.view(shape.tokens, shape.extend) + load.unified_kv.size(0)
    indices = torch.cat((prefix, extend), dim=1)
    return pool, torch.nn.functional.pad(indices, (0, -indices.size(1) % 128), value=-1).contiguous()


def flashmla(load: _workload.Workload, shape: Shape) -> Iterator[tuple[str, Call]]:
    """FlashMLA's kernel alone, and with the merge of the two pools that it needs; nothing where it is not at hand."""
    try:
        function: Any = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    except (ImportError, AttributeError):
        return
    pool, indices = merged(load, shape)
    missing = (64 if shape.heads <= 64 else 128) - shape.heads
    q = torch.nn.functional.pad(load.q, (0, 0, 0, missing)).contiguous()
    sink = torch.nn.functional.pad(load.attn_sink, (0, missing)).contiguous()

    def kernel() -> torch.Tensor:
        out = function(q, pool[:, None], indices[:, None], load.softmax_scale, 512, sink)[0]
        return out[:, : shape.heads]

    def with_merge() -> torch.Tensor:
        torch.cat((load.unified_kv, load.kv), out=pool)
        return kernel()

    yield FLASHMLA, kernel
    yield MERGED, with_merge


def public_modules(peers: Path | None) -> dict[str, str]:
    """Name -> module of the public Triton versions that can be imported."""
    files = sorted(peers.glob("*_public.py")) if peers else ()
    found = {file.stem.removesuffix("_public"): file.stem for file in files}
    for module in () if "sglang" in found else _bench.PUBLIC:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        found["sglang"] = module
        break
    return found


def public(load: _workload.Workload, peers: Path | None) -> dict[str, Call]:
    """The public Triton versions on a load."""
    calls = {}
    for name, module in public_modules(peers).items():
        if function := getattr(importlib.import_module(module), "sparse_attn_v4_paged_prefill", None):
            calls[name] = functools.partial(function, *load.args())
    return calls


def calls_of(load: _workload.Workload, shape: Shape, images: Images, peers: Path | None) -> dict[str, Call]:
    """What runs on a load, by name; the GEMM and the gather limit are not among it."""
    operator = _bench.ours(load.args())

    def on(name: str) -> Call:
        def call() -> torch.Tensor:
            images.use(name)
            return operator()

        return call

    calls = {name: on(name) for name in images.names}
    calls |= dict(flashmla(load, shape)) | public(load, peers)
    for name, call in list(calls.items()):
        if name == OURS:
            continue
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a peer may fail in any way of its own; the others are still worth measuring
            print(f"{name} is left out at {shape.label}: {error!r}"[:400], file=sys.stderr)
            del calls[name]
    return calls


def fastest_gather(load: _workload.Workload, shape: Shape) -> Call | None:
    """The gather kernel that is fastest on this load; None without Triton."""
    try:
        from benchmarks.gather import gathers
    except ImportError:
        return None
    candidates = list(gathers(*merged(load, shape)))
    times = [statistics.median(_bench.interleaved({"": call}, rounds=2)[""]) for call in candidates]
    return candidates[times.index(min(times))]


def measure(shape: Shape, device: torch.device, images: Images, product: Call, options: Any) -> dict[str, Any]:
    """Every figure of one shape, as results.json has them."""
    load = _workload.uniform(shape.heads, shape.prefix, shape.extend, shape.rows, shape.tokens, device=device)
    calls = calls_of(load, shape, images, options.peers)
    facts: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        first = call().clone()
        facts[name] = {"repeats": torch.equal(first, call()), "error": _bench.error(load, call)}
        if name in images.names:
            facts[name]["image"] = _bench.last_variant(load)
    timed = {_bench.GEMM: product, **calls}
    if gather := fastest_gather(load, shape):
        timed[GATHER] = gather
    meter = Meter(device)
    times = _bench.interleaved(timed, options.rounds, meter.watch, (_bench.GEMM, OURS, FLASHMLA, MERGED, GATHER))
    entries = {}
    for name, rounds in times.items():
        median = statistics.median(rounds)
        entry = {"milliseconds": rounds, **facts.get(name, {}), **meter.samples[name].summary()}
        if name == _bench.GEMM:
            entry["tflops"] = _bench.GEMM_FLOPS / median / 1e9
        elif name == GATHER:
            entry["gbs"] = load.gather_bytes / median / 1e6
        else:
            entry |= {"tflops": load.flops / median / 1e9, "gbs": load.gather_bytes / median / 1e6}
        entries[name] = entry
    return {**asdict(shape), "label": shape.label, "results": entries}


def overheads(device: torch.device, peers: Path | None) -> dict[str, Any]:
    """CPU microseconds of a call, and milliseconds of a new process's first one, beside the public Triton versions'."""
    load, x = _bench.small_workload(device), torch.ones(64, device=device)
    calls: dict[str, Call] = {OURS: _bench.ours(load.args()), "torch.add": lambda: torch.add(x, x)}
    first = {OURS: _bench.first_call_ms(device)}
    path = [str(peers.resolve())] if peers else []
    for name, call in public(load, peers).items():
        setup = f"import sys; sys.path[:0] = {path!r}\n"
        setup += f"from {public_modules(peers)[name]} import sparse_attn_v4_paged_prefill as call"
        try:
            call()
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "warm"):
                    milliseconds = _bench.first_call_ms(device, setup, {"TRITON_CACHE_DIR": cache})
                    first[f"{name}, Triton's cache {state}"] = milliseconds
        except Exception as error:  # a peer may fail in any way of its own; the others are still worth measuring
            print(f"{name} is left out of the cost of a call: {error!r}"[:400], file=sys.stderr)
        else:
            calls[f"{name}, through Triton's launcher"] = call
    return {"cpu_us": _bench.cpu_us(calls), "first_call_ms": first}


def machine(device: torch.device) -> dict[str, Any]:
    driver = _devices.visible()[device.index or 0][1].driver_version
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = None
    build = paged_prefill.build_info()
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": f"CUDA {driver // 1000}.{driver % 1000 // 10}",
        "torch": torch.__version__,
        "triton": triton,
        "paged_prefill": build["version"],
        "commit": build["commit"],
        "compilers": build["compilers"],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench_hopper"), help="folder for the results")
    parser.add_argument("--peers", type=Path, help="folder with flash_mla and NAME_public.py")
    parser.add_argument("--rounds", type=int, default=_bench.ROUNDS)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), metavar="N", help="a selection")
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing, draw this file's figures")
    parser.add_argument("--pages", type=Path, nargs="+", default=(), help="pages to write the figures into")
    return parser.parse_args()


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.render:
        document = json.loads(options.render.read_text())
    else:
        if not torch.cuda.is_available():
            sys.exit(f"measuring needs a GPU; torch {torch.__version__} sees none. --render needs none.")
        if options.peers:
            sys.path.insert(0, str(options.peers.resolve()))
        device = torch.device("cuda", torch.cuda.current_device())
        product = _bench.gemm(device)
        document = {"machine": machine(device), "rounds": options.rounds, "shapes": []}
        images = Images(device)
        for number in _report.progress(list(options.shapes), "shape"):
            document["shapes"].append(measure(SHAPES[number], device, images, product, options))
            torch.cuda.empty_cache()
        images.use(OURS)
        document |= overheads(device, options.peers)
        (options.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    tables = render.tables(document)
    (options.out / "tables.md").write_text(tables)
    for page in options.pages:
        page.write_text(render.page(page.read_text(), document))
    print(tables)
    if render.plot(document, options.out / "plot.png"):
        print(f"drawn: {options.out / 'plot.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
