"""Compiles every variant into an image, without a GPU: `python -m build_tools.compile --help`.

An image depends on the tree and the compilers only, and is the same byte for byte in every folder. Images are kept
in a cache under a key of everything they depend on. A variant that does not compile, spills more than its family may,
or needs more shared memory than its target has fails the build: a partly built wheel would only be slow later.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import multiprocessing.util
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from build_tools import BuildError, inspection, manifest
from build_tools.specs import KERNELS, Variant, variants
from build_tools.targets import Target, as_ptx, select

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "python" / "paged_prefill" / "images"
TRITON_VERSION = "3.9.0"
TARGETS_VARIABLE = "PAGED_PREFILL_TARGETS"
CACHE_VARIABLE = "PAGED_PREFILL_CACHE"

# Bytes a thread may keep in local memory. Data-centre parts have none; consumer parts of small register files or
# LDS trade a little for a tile that fits.
SPILL_BUDGET = {"ampere": 0, "hopper": 0, "cdna": 0, "cdna4": 0, "small": 64, "rdna3": 512, "rdna4": 0}

# The PTX language of the oldest drivers in the target table; a later version would need later ones for nothing.
PTX_VERSION = 80

ALIGNED_POINTERS = ("q_ptr", "unified_kv_ptr", "kv_ptr", "out_ptr")
SIZES = {"ptr": 8, "i64": 8, "i32": 4, "fp32": 4}


def argument_type(name: str) -> str:
    """The manifest's type of a kernel argument, which its name decides."""
    if name.endswith("_ptr"):
        return "ptr"
    if name.endswith("_log2"):
        return "fp32"
    return "i64" if "_stride_" in name else "i32"


def _triton_type(name: str, dtype: str) -> str:
    kind = argument_type(name)
    if kind != "ptr":
        return kind
    if name in ALIGNED_POINTERS:
        return f"*{dtype}"
    return "*fp32" if name in ("attn_sink_ptr", "lse_ptr") else "*i32"


def _divisibility(name: str) -> int:
    """What an aligned variant takes for granted: 16 bytes of a pointer, 8 two-byte elements of a stride."""
    return 16 if name in ALIGNED_POINTERS else 8 if "_stride_" in name else 1


@cache
def _tool(name: str) -> str:
    """A binary of Triton's wheel."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{Path(command[0]).name} ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


@cache
def compilers() -> dict[str, str]:
    """Name -> version of what makes the images; raises BuildError unless Triton is the pinned one."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != TRITON_VERSION:
        raise BuildError(
            f"compiling the images needs Triton {TRITON_VERSION}, found {found}: pip install triton=={TRITON_VERSION}."
        )
    versions = {"triton": found}
    for name in ("ptxas", "ptxas-blackwell"):
        versions[name] = re.findall(r"V([\d.]+)", _run(_tool(name), "--version"))[-1]
    return versions


@cache
def source_sha256(kernel: str) -> str:
    digest = hashlib.sha256()
    for module in KERNELS[kernel].sources:
        digest.update((ROOT / (module.replace(".", "/") + ".py")).read_bytes())
    return digest.hexdigest()


@cache
def _own_sha256() -> str:
    """Of the modules that make and check an image."""
    return hashlib.sha256(Path(__file__).read_bytes() + Path(inspection.__file__).read_bytes()).hexdigest()


def cache_key(variant: Variant) -> str:
    """Hash of everything that the variant's image and record depend on."""
    facts = {
        "schema": manifest.SCHEMA,
        "build": _own_sha256(),
        "compilers": compilers(),
        "source": source_sha256(variant.spec.kernel),
        "id": variant.id,
        **asdict(variant),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read_cache(cache_dir: Path, key: str) -> tuple[dict[str, Any], bytes] | None:
    try:
        record = json.loads((cache_dir / f"{key}.json").read_text())
        image = (cache_dir / f"{key}.image").read_bytes()
    except (OSError, ValueError):
        return None
    return (record, image) if hashlib.sha256(image).hexdigest() == record.get("sha256") else None


def _write_cache(cache_dir: Path, key: str, record: dict[str, Any], image: bytes) -> None:
    for name, data in ((f"{key}.image", image), (f"{key}.json", json.dumps(record).encode())):
        partial = cache_dir / f".{name}.{os.getpid()}"
        partial.write_bytes(data)
        os.replace(partial, cache_dir / name)


def prepare_process(triton_cache: str) -> None:
    """Makes the compiler's environment a function of this file: no caller's variable may change an image."""
    for name in list(os.environ):
        if name.startswith(("TRITON_", "AMDGCN_", "PTXAS_", "LLVM_", "DISABLE_", "NVPTX_", "USE_IR_LOC")):
            del os.environ[name]
    os.environ["TRITON_CACHE_DIR"] = triton_cache
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # paths in objects would differ from folder to folder
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the default changes in Triton 3.10
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    # Triton's bindings report themselves as leaked when an interpreter ends in the ordinary way.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-1000)


def compile_group(group: list[Variant]) -> list[tuple[dict[str, Any], bytes]]:
    """Compiles variants that differ in the assembler's part only; runs in a prepared process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    first = group[0]
    try:
        function = first.kernel.load()
        constexprs = first.kernel.constexprs(first.spec) | dict(first.config.constexprs)
        names = [name for name in function.arg_names if name not in constexprs]
        types = {name: _triton_type(name, first.spec.dtype) for name in names} | dict.fromkeys(constexprs, "constexpr")
        attrs = {
            (index,): [["tt.divisibility", _divisibility(name)]]
            for index, name in enumerate(function.arg_names)
            if first.spec.aligned and name in names and _divisibility(name) > 1
        }
        source = (GluonASTSource if first.kernel.gluon else ASTSource)(
            function, {name: types[name] for name in function.arg_names}, constexprs=constexprs, attrs=attrs
        )
        target = first.target
        options = {"num_warps": first.config.num_warps, **dict(first.config.options)}
        if target.vendor == "cuda":
            options["ptx_version"] = PTX_VERSION
            # Machine code is assembled below, for each target of the group.
            triton.knobs.runtime.add_stages_inspection_hook = _without_cubin
        arch = target.pipeline if target.vendor == "hip" else int(target.pipeline)
        kernel = triton.compile(source, target=GPUTarget(target.vendor, arch, target.warp_size), options=options)
    except Exception as error:
        raise BuildError(f"{first.id} does not compile: {type(error).__name__}: {error}") from None
    built = []
    for variant in group:
        try:
            built.append(_finish(variant, kernel, [[name, argument_type(name)] for name in names], constexprs))
        except BuildError as error:
            raise BuildError(f"{variant.id}: {error}") from None
    return built


def _finish(
    variant: Variant, kernel: Any, arguments: list[list[str]], constexprs: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """Assembles, checks and describes one variant of a compiled kernel."""
    target, spec, metadata = variant.target, variant.spec, kernel.metadata
    if target.vendor == "hip":
        image, assembly = kernel.asm["hsaco"], kernel.asm["amdgcn"]
        resources, parameters, made_from = _amd_resources(assembly), inspection.amd_parameters(image), {}
    else:
        ptx = kernel.asm["ptx"]
        image, resources, parameters, assembly = _assemble(target, ptx)
        # Targets of one family are assembled from the same PTX: what is shown of it holds for each of them.
        made_from = {"ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest()}
    expected = inspection.natural_layout(iter([*(SIZES[kind] for _, kind in arguments), 8, 8]))
    if parameters != expected:
        raise BuildError(f"its parameters were to be {expected} (two scratch pointers last), but are {parameters}.")
    if metadata.shared > target.shared_limit:
        raise BuildError(
            f"it needs {metadata.shared} bytes of shared memory and {target.name} has {target.shared_limit}: "
            "choose a smaller tile in build_tools/specs.py."
        )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise BuildError("it needs scratch memory, but is launched with null scratch pointers.")
    if resources["spill_bytes"] > SPILL_BUDGET[target.family]:
        raise BuildError(
            f"it spills {resources['spill_bytes']} bytes a thread, {SPILL_BUDGET[target.family]} are allowed: "
            "choose a smaller tile in build_tools/specs.py."
        )
    instructions = inspection.instructions(assembly)
    problems = [
        *inspection.instruction_problems(instructions, variant.matrix),
        *inspection.address_problems(kernel.asm["ttgir" if variant.kernel.gluon else "ttir"]),
    ]
    if problems:
        raise BuildError(f"{problems[0]}.")
    record = {
        "id": variant.id,
        "file": variant.file,
        "format": target.format,
        "target": target.name,
        **asdict(spec),
        "symbol": metadata.name,
        "shared": metadata.shared,
        "threads": metadata.num_warps * target.warp_size,
        "warp_size": target.warp_size,
        "grid": variant.kernel.grid,
        "arguments": arguments,
        "config": {"num_warps": variant.config.num_warps, **constexprs, **dict(variant.config.options)},
        "resources": resources,
        "instructions": instructions,
        "bytes": len(image),
        "sha256": hashlib.sha256(image).hexdigest(),
        **made_from,
        "source_sha256": source_sha256(spec.kernel),
    }
    return record, image


def _assemble(target: Target, ptx: str) -> tuple[bytes, dict[str, int], list[tuple[int, int]], str]:
    """The target's image of a kernel's PTX, its resources, its parameters and its disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        # An image that stays PTX is assembled too: what a driver would refuse fails here.
        part = f"sm_{target.name[2:]}" if target.assembler else f"sm_{target.pipeline}"
        # The first is an option that Triton gives too, for a fault of 13.x.
        options = ("--regAllocOptLevel=2", f"--gpu-name={part}")
        _run(_tool(target.assembler or "ptxas"), *options, str(source), "-o", str(cubin))
        usage = _run(_tool("cuobjdump"), "-res-usage", str(cubin))
        disassembly = _run(_tool("nvdisasm"), "--no-dataflow", str(cubin))
        code = cubin.read_bytes()
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    resources = {"registers": int(registers), "spill_bytes": int(stack)}
    if target.assembler:
        return code, resources, inspection.cubin_parameters(code), disassembly
    return ptx.encode(), resources, inspection.ptx_parameters(ptx), disassembly


def _without_cubin(*stages: Any) -> Any:
    """Triton's hook on its stages: an empty object in place of an assembled one."""
    if not stages:
        return "without cubin", hashlib.sha256(b"without cubin").hexdigest()
    stages[1]["cubin"] = lambda source, metadata: b""
    return None


def _amd_resources(asm: str) -> dict[str, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", asm)
        return int(found[1]) if found else 0

    return {
        "vgprs": number("vgpr_count"),
        "agprs": number("agpr_count"),
        "sgprs": number("sgpr_count"),
        "spill_bytes": number("private_segment_fixed_size"),
    }


def _groups(missing: Iterable[Variant]) -> list[list[Variant]]:
    """Variants that share the code path up to the assembler, one compilation each."""
    groups: dict[Any, list[Variant]] = {}
    for variant in missing:
        key = variant.spec, variant.config, variant.target.vendor, variant.target.pipeline
        groups.setdefault(key, []).append(variant)
    return list(groups.values())


def _progress(total: int) -> Callable[[list[Variant]], None]:
    """Called with each group that is done: a bar on a terminal, plain lines elsewhere."""
    done = 0
    if sys.stderr.isatty():
        from rich.progress import Progress

        bar = Progress(transient=True)
        task = bar.add_task("compiling images", total=total)
        bar.start()

        def advance(group: list[Variant]) -> None:
            nonlocal done
            done += len(group)
            bar.update(task, completed=done, description=group[-1].id)
            if done == total:
                bar.stop()

        return advance

    def line(group: list[Variant]) -> None:
        nonlocal done
        done += len(group)
        print(f"[{done}/{total}] {', '.join(variant.id for variant in group)}", file=sys.stderr, flush=True)

    return line


def compile_variants(
    wanted: list[Variant], cache_dir: Path, jobs: int | None = None
) -> list[tuple[dict[str, Any], bytes]]:
    """(record, image) of each variant, in the given order, from the cache where it has them.

    Raises:
        BuildError: a variant does not compile or breaks a limit; the text names it and the cause.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    keys = {variant: cache_key(variant) for variant in wanted}
    found = {variant: entry for variant in wanted if (entry := _read_cache(cache_dir, keys[variant]))}
    if groups := _groups(variant for variant in wanted if variant not in found):
        report = _progress(sum(map(len, groups)))
        # A fresh interpreter for each worker: Triton reads its environment once, and must not see the caller's.
        with (
            tempfile.TemporaryDirectory(prefix="paged-prefill-") as triton_cache,
            ProcessPoolExecutor(
                min(jobs or len(os.sched_getaffinity(0)), len(groups)),
                mp_context=multiprocessing.get_context("spawn"),
                initializer=prepare_process,
                initargs=(triton_cache,),
            ) as pool,
        ):
            pending = {pool.submit(compile_group, group): group for group in groups}
            try:
                for future in as_completed(pending):
                    for variant, (record, image) in zip(pending[future], future.result(), strict=True):
                        _write_cache(cache_dir, keys[variant], record, image)
                        found[variant] = record, image
                    report(pending[future])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [found[variant] for variant in wanted]


def build(
    out_dir: Path = IMAGES,
    targets: list[Target] | None = None,
    cache_dir: Path | None = None,
    jobs: int | None = None,
) -> None:
    """Fills out_dir with the images of `targets` and their manifest.

    Args:
        out_dir: the folder; images of an earlier build in it are removed, and the manifest is written last.
        targets: None takes those that PAGED_PREFILL_TARGETS names, or all.
        cache_dir: None takes PAGED_PREFILL_CACHE, or build/image-cache under the tree.
        jobs: processes; None takes one for each core.

    Raises:
        BuildError: wrong compiler, unknown target, or a variant that cannot be built.
    """
    if targets is None:
        targets = select(os.environ.get(TARGETS_VARIABLE))
    if cache_dir is None:
        cache_dir = Path(os.environ.get(CACHE_VARIABLE) or ROOT / "build" / "image-cache")
    (out_dir / manifest.NAME).unlink(missing_ok=True)  # a build that fails leaves no folder that looks finished
    images = compile_variants(variants(targets), cache_dir, jobs)
    version = runpy.run_path(str(ROOT / "python" / "paged_prefill" / "_version.py"))["__version__"]
    manifest.write(out_dir, version, compilers(), targets, images)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m build_tools.compile", description="Compile the kernel images.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder to fill (default: the package's images)")
    parser.add_argument("--targets", help=f"names separated by commas (default: ${TARGETS_VARIABLE}, or all)")
    parser.add_argument("--cache", type=Path, help=f"folder of compiled images (default: ${CACHE_VARIABLE})")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument("--as-ptx", action="store_true", help="leave the targets' images PTX, to test on other parts")
    args = parser.parse_args()
    try:
        targets = select(args.targets) if args.targets or args.as_ptx else None
        if args.as_ptx:
            if args.out == IMAGES:
                raise BuildError("--as-ptx needs --out: such images are no part of the package.")
            targets = [as_ptx(target) for target in targets or ()]
        build(args.out, targets, args.cache, args.jobs)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
