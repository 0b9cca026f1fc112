"""Checks a wheel as a stranger would: `python -m build_tools.verify_wheel dist/*.whl`, no GPU, no import of it.

Each check yields sentences that say what was needed, what came, and what to do; no sentence means a good wheel.
"""

import argparse
import base64
import csv
import hashlib
import io
import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from build_tools.targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "paged_prefill"
IMAGES = f"{PACKAGE}/images"
EXTENSION = f"{PACKAGE}/_C.abi3.so"
SIZE_BUDGET = 30_000_000  # bytes of the wheel; the index takes 100 MB a file, a project's quota is soon full of them

SYSTEM_LIBRARIES = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
TORCH_LIBRARIES = {"libc10.so", "libtorch.so", "libtorch_cpu.so"}  # in every build of torch, CUDA, ROCm or CPU
HOST_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}

EM_CUDA, EM_AMDGPU = 190, 224
CUDA_ACCELERATED = 0x800  # e_flags of ABI 7: code for exactly this part ("sm_90a")
# Some 300 bytes that ptxas always writes; in objects of ABI 8 once more beside the intermediate code.
FRAME_SECTIONS = {".debug_frame", ".rel.debug_frame", ".rela.debug_frame"}
FRAME_SECTIONS |= {f".nv.merc{name}" for name in FRAME_SECTIONS}
AMD_CODE_OBJECT_V5 = 3  # EI_ABIVERSION
# EF_AMDGPU_MACH, from LLVM's table of the AMDGPU back end's e_flags.
AMD_MACHINES = {
    "gfx908": 0x30, "gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F,
    "gfx1100": 0x41, "gfx1101": 0x46, "gfx1102": 0x47, "gfx1103": 0x44,
    "gfx1150": 0x43, "gfx1151": 0x4A, "gfx1152": 0x55, "gfx1153": 0x58,
    "gfx1200": 0x48, "gfx1201": 0x4E, "gfx1250": 0x49, "gfx1251": 0x5A,
}  # fmt: skip

AGAIN = "build again with an empty image cache"

# What a build folder, an environment or a home looks like inside a binary; drivers are looked for elsewhere.
BUILD_PATH = re.compile(rb"(?:/(?:root|home|work|tmp|project|builds|Users)/|/site-packages/)[\w.+/-]*")


def read_wheel(path: Path) -> dict[str, bytes]:
    """Name -> content of a wheel's files."""
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist() if not entry.is_dir()}


def platform_tags(files: Mapping[str, bytes]) -> list[str]:
    """The platform tags that the wheel claims, for example manylinux_2_28_x86_64."""
    return [tag.split("-")[2] for tag in _metadata(files, "WHEEL", "Tag")]


def _metadata(files: Mapping[str, bytes], file: str, field: str) -> list[str]:
    name = next(name for name in files if name.endswith(f".dist-info/{file}"))
    return re.findall(rf"^{field}: (.*)$", files[name].decode(), flags=re.MULTILINE)


def manifest_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    return dict(json.loads(files[f"{IMAGES}/manifest.json"]))


def check_files(files: Mapping[str, bytes]) -> Iterator[str]:
    """RECORD holds for every file, and the files are the tree's modules, the extension and the manifest's images."""
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    recorded = {row[0]: row[1] for row in csv.reader(io.StringIO(files[record].decode()))}
    for name in sorted(files.keys() ^ recorded.keys()):
        yield f"{name} is in {'the wheel' if name in files else 'RECORD'} only: the wheel was altered, build it again."
    for name in sorted(files.keys() & recorded.keys() - {record}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if recorded[name] != f"sha256={digest}":
            yield f"{name} does not have the sha256 in RECORD: the wheel was altered, build it again."
    python = ROOT / "python"
    expected = {str(path.relative_to(python)) for path in (python / PACKAGE).rglob("*.py*") if path.suffix != ".pyc"}
    expected |= {f"{PACKAGE}/py.typed", f"{PACKAGE}/_build.json", EXTENSION, f"{IMAGES}/manifest.json"}
    if f"{IMAGES}/manifest.json" in files:
        expected |= {f"{IMAGES}/{variant['file']}" for variant in manifest_of(files)["variants"]}
    shipped = {name for name in files if ".dist-info/" not in name}
    for name in sorted(expected - shipped):
        yield f"{name} is missing: the build folder is half-written, remove build/lib* and build again."
    for name in sorted(shipped - expected):
        yield f"{name} belongs to no file of the tree: the build folder is stale, remove build/lib* and build again."


def check_metadata(files: Mapping[str, bytes]) -> Iterator[str]:
    """The manifest's version is the wheel's, and torch is the only requirement at run time."""
    version = _metadata(files, "METADATA", "Version")[0]
    if manifest_of(files)["version"] != version:
        yield f"the manifest is of version {manifest_of(files)['version']}, the wheel of {version}: build it again."
    for requirement in _metadata(files, "METADATA", "Requires-Dist"):
        if "extra ==" not in requirement and not requirement.startswith("torch"):
            yield f"{requirement} is required at run time, where only torch may be: make it an extra in pyproject.toml."


def versions_needed(extension: bytes) -> dict[str, set[str]]:
    """Symbol version prefix -> versions, for example GLIBC -> {2.17, 2.34}, that the extension needs."""
    needed = defaultdict(set)
    for section in ELFFile(io.BytesIO(extension)).iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    prefix, _, number = version.name.partition("_")
                    needed[prefix].add(number)
    return dict(needed)


def dynamic_symbols(extension: bytes) -> tuple[set[str], set[str]]:
    """(defined, undefined) dynamic symbols of the extension."""
    table = ELFFile(io.BytesIO(extension)).get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    defined, undefined = set(), set()
    for symbol in table.iter_symbols():
        if symbol.name:
            (undefined if symbol["st_shndx"] == "SHN_UNDEF" else defined).add(symbol.name)
    return defined, undefined


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check_extension(files: Mapping[str, bytes]) -> Iterator[str]:
    """The extension is for the tags' machine, needs what every machine has, and shows one symbol."""
    extension = files[EXTENSION]
    elf = ELFFile(io.BytesIO(extension))
    glibc = max(versions_needed(extension).get("GLIBC", {"0"}), key=as_numbers)
    for tag in platform_tags(files):
        parts = re.fullmatch(r"(?:linux|manylinux2014|manylinux_(\d+)_(\d+))_(\w+)", tag)
        if not parts:
            yield f"the platform tag {tag} is not one of Linux with glibc: repair the wheel with auditwheel."
        elif elf["e_machine"] != HOST_MACHINES.get(parts[3]):
            yield f"{EXTENSION} is for {elf['e_machine']}, the tag {tag} says {parts[3]}: build on that machine."
        elif parts[1] and as_numbers(glibc) > (int(parts[1]), int(parts[2])):
            yield f"{EXTENSION} needs glibc {glibc}, the tag {tag} says less: repair the wheel with auditwheel."
    dynamic = elf.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    for entry in dynamic.iter_tags():
        if entry.entry.d_tag == "DT_NEEDED" and entry.needed not in SYSTEM_LIBRARIES | TORCH_LIBRARIES:
            yield f"{EXTENSION} needs {entry.needed}, which a machine may lack: open it at run time instead."
        if entry.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            yield f"{EXTENSION} has a search path of the build machine: link without -rpath."
    if extra := dynamic_symbols(extension)[0] - {"PyInit__C"}:
        yield f"{EXTENSION} shows {', '.join(sorted(extra))}: csrc/exports.map lets the module's init out only."


def check_image(variant: Mapping[str, Any], target: Mapping[str, Any], image: bytes) -> Iterator[str]:
    """An image is what its record says, for its target, within its limits, and without debug sections."""
    if len(image) != variant["bytes"] or hashlib.sha256(image).hexdigest() != variant["sha256"]:
        yield f"has {len(image)} bytes that do not hash to the manifest's sha256: {AGAIN}"
        return
    if variant["shared"] > target["shared_limit"]:
        needed, limit = variant["shared"], target["shared_limit"]
        yield f"needs {needed} bytes of shared memory, its target has {limit}: choose a smaller tile"
    if variant["format"] == "ptx":
        if f".entry {variant['symbol']}(" not in image.decode():
            yield f"has no entry {variant['symbol']}: {AGAIN}"
        elif not re.search(r"^\.target sm_80\s*$", image.decode(), flags=re.MULTILINE):
            yield f"is not PTX for sm_80, which every later part's driver takes: {AGAIN}"
        return
    elf = ELFFile(io.BytesIO(image))
    yield from (_check_cubin if variant["format"] == "cubin" else _check_hsaco)(variant["target"], elf)
    sections = list(elf.iter_sections())
    tables = [section for section in sections if isinstance(section, SymbolTableSection)]
    if not any(table.get_symbol_by_name(variant["symbol"]) for table in tables):
        yield f"has no symbol {variant['symbol']}: {AGAIN}"
    if debug := {section.name for section in sections if "debug" in section.name} - FRAME_SECTIONS:
        yield f"carries {', '.join(sorted(debug))}, which no user reads: keep TRITON_DISABLE_LINE_INFO set"


def cubin_part(elf: ELFFile) -> tuple[int, int]:
    """(SM number, ELF ABI version) of a cubin; the number moved from bits 0..7 to 8..15 of e_flags in ABI 8."""
    abi = elf["e_ident"]["EI_ABIVERSION"]
    return (elf["e_flags"] >> 8 if abi >= 8 else elf["e_flags"]) & 0xFF, abi


def _check_cubin(target: str, elf: ELFFile) -> Iterator[str]:
    part, abi = cubin_part(elf)
    if elf["e_machine"] not in (EM_CUDA, "EM_CUDA"):
        yield f"is for machine {elf['e_machine']}, not CUDA: {AGAIN}"
    elif part != int(re.sub(r"\D", "", target)):
        yield f"is machine code of sm_{part}: {AGAIN}"
    elif abi < 8 and target.endswith("a") != bool(elf["e_flags"] & CUDA_ACCELERATED):
        yield f"{'lacks' if target.endswith('a') else 'has'} the flag of architecture-specific code: {AGAIN}"


def _check_hsaco(target: str, elf: ELFFile) -> Iterator[str]:
    if target not in AMD_MACHINES:
        yield f"is for {target}, whose e_flags are unknown: add it to AMD_MACHINES in build_tools/verify_wheel.py"
    elif elf["e_machine"] not in (EM_AMDGPU, "EM_AMDGPU"):
        yield f"is for machine {elf['e_machine']}, not AMD GPU: {AGAIN}"
    elif elf["e_flags"] & 0xFF != AMD_MACHINES[target]:
        yield f"has machine {elf['e_flags'] & 0xFF:#x} in e_flags, its target {AMD_MACHINES[target]:#x}: {AGAIN}"
    elif elf["e_ident"]["EI_ABIVERSION"] != AMD_CODE_OBJECT_V5:
        yield f"is a code object of another version than V5 (ABI {elf['e_ident']['EI_ABIVERSION']}): {AGAIN}"


def check_images(files: Mapping[str, bytes]) -> Iterator[str]:
    manifest = manifest_of(files)
    for variant in manifest["variants"]:
        if image := files.get(f"{IMAGES}/{variant['file']}"):  # a missing one is told by check_files
            target = manifest["targets"][variant["target"]]
            for problem in check_image(variant, target, image):
                yield f"{variant['file']} {problem}."


def check_paths(files: Mapping[str, bytes]) -> Iterator[str]:
    """No file tells where it was built. Modules and metadata are the tree's own text."""
    own = {str(ROOT).encode(), str(Path.home()).encode()} - {b"/"}
    for name, content in sorted(files.items()):
        if PurePosixPath(name).suffix in (".py", ".pyi") or ".dist-info/" in name:
            continue
        found = {match[0] for match in BUILD_PATH.finditer(content)} | {path for path in own if path in content}
        for path in sorted(found):
            yield f"{name} holds the build path {path.decode()}: map it away in setup.py's compiler options."


def summary(files: Mapping[str, bytes]) -> Iterator[str]:
    """One line a target: what it holds, and what its objects' own headers say."""
    manifest = manifest_of(files)
    for name, target in manifest["targets"].items():
        variants = [variant for variant in manifest["variants"] if variant["target"] == name]
        headers = set()
        for variant in variants:
            if variant["format"] == "ptx":
                headers.add("PTX for sm_80 and later")
                continue
            elf = ELFFile(io.BytesIO(files[f"{IMAGES}/{variant['file']}"]))
            part, abi = cubin_part(elf)
            headers.add(f"sm_{part}, ELF ABI {abi}" if variant["format"] == "cubin" else f"e_flags {elf['e_flags']:#x}")
        shared = max(variant["shared"] for variant in variants)
        size = sum(variant["bytes"] for variant in variants)
        yield (
            f"{name:9} {len(variants):3} images {size / 1e6:6.2f} MB   shared memory {shared:6} of "
            f"{target['shared_limit']:6} bytes   {', '.join(sorted(headers))}"
        )


def verify(files: Mapping[str, bytes]) -> list[str]:
    """What is wrong with a wheel of these files; empty when nothing is."""
    problems = list(check_files(files))
    if EXTENSION not in files or f"{IMAGES}/manifest.json" not in files:
        return problems
    for check in (check_metadata, check_extension, check_images, check_paths):
        problems += check(files)
    return problems


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_tools.verify_wheel", description="Check wheels as a stranger would."
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--complete", action="store_true", help="refuse a wheel that lacks a target of the table")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.wheels:
        files = read_wheel(path)
        problems = verify(files)
        if path.stat().st_size > SIZE_BUDGET:
            problems.append(f"it has {path.stat().st_size} bytes of {SIZE_BUDGET}: ship fewer specs a target.")
        if not problems and options.complete and (missing := TARGETS.keys() - manifest_of(files)["targets"].keys()):
            problems.append(f"it lacks {', '.join(sorted(missing))}: build it without PAGED_PREFILL_TARGETS.")
        if problems:
            failed = True
            print(f"{path.name}: {len(problems)} problems", *problems, sep="\n  ", file=sys.stderr)
        else:
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, every check passed", *summary(files), sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
