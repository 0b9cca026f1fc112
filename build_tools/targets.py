"""The targets as data: which machine code is made, by which code path, within which limits.

Three kinds of code path:
- Triton's own pipeline for the part, where it is the proven one: sm80, sm90a, and all AMD parts.
- Triton's sm80 pipeline, assembled for the exact part: its mma.sync tiles run on every NVIDIA part since 8.0, so the
  same PTX can be proven on one part and assembled for another, which the tcgen05 code of Triton's Blackwell pipeline
  cannot.
- The same sm80 PTX unassembled, for the driver to compile: any NVIDIA part from 8.0 on without an image of its own.
"""

from dataclasses import dataclass, replace

from build_tools import BuildError


@dataclass(frozen=True)
class Target:
    name: str  # the true ISA, the last part of a variant's id
    vendor: str  # "cuda" | "hip"
    family: str  # row of the tile table in specs.py
    pipeline: str  # Triton's target: "80", "90" or the gfx name
    assembler: str  # which ptxas of Triton's wheel makes the machine code; "" leaves PTX; AMD's is Triton's own
    matrix: str  # what the names of the matrix instructions begin with, in the disassembly
    capability: tuple[int, int] | None  # CUDA; None on AMD
    matches: str  # devices served: "exact", "minor" (same major, this minor or later), "later" (any later)
    warp_size: int
    shared_limit: int  # bytes a block may use
    minimum_driver: str | None  # CUDA version of the oldest driver that takes the image's format; None: not known
    products: str
    note: str = ""

    @property
    def format(self) -> str:
        return "hsaco" if self.vendor == "hip" else "cubin" if self.assembler else "ptx"


def _cuda(
    name: str, family: str, capability: tuple[int, int], kib: int, driver: str, products: str, *,
    pipeline: str = "80", assembler: str = "ptxas-blackwell", matches: str = "exact", note: str = "",
) -> Target:
    return Target(
        name, "cuda", family, pipeline, assembler, "HMMA", capability, matches, 32, kib * 1024, driver, products, note
    )  # fmt: skip


def _hip(name: str, family: str, warp_size: int, kib: int, products: str) -> Target:
    matrix = "v_mfma" if warp_size == 64 else "v_wmma"
    return Target(name, "hip", family, name, "", matrix, None, "exact", warp_size, kib * 1024, None, products)


# The first assembler (12.9) writes objects of ELF ABI 7, which every driver from CUDA 12.0 on takes; the second one
# (13.4) writes ABI 8, for drivers from CUDA 13.0 on. The parts from 10.0 on have ABI 8 from either.
TARGETS = {
    target.name: target
    for target in (
        _cuda("sm80", "ampere", (8, 0), 163, "12.0", "A100, A800, A30", assembler="ptxas"),
        _cuda("sm86", "small", (8, 6), 99, "12.0", "A10, A40, RTX A6000, RTX 3090", assembler="ptxas", matches="minor"),
        _cuda("sm89", "small", (8, 9), 99, "12.0", "L4, L40S, RTX 4090", assembler="ptxas", matches="minor"),
        _cuda(
            # On an H200 within 2 % of the second assembler's code in every shape of docs/performance.md.
            "sm90a", "hopper", (9, 0), 227, "12.0", "H100, H200, H20, GH200", pipeline="90", assembler="ptxas",
        ),
        _cuda("sm100a", "ampere", (10, 0), 227, "13.0", "B200, GB200"),
        _cuda("sm103a", "ampere", (10, 3), 227, "13.0", "B300, GB300"),
        _cuda("sm120a", "small", (12, 0), 99, "13.0", "RTX 5090, RTX PRO 6000 Blackwell"),
        _cuda("sm121a", "small", (12, 1), 99, "13.0", "DGX Spark (GB10)"),
        _hip("gfx90a", "cdna", 64, 64, "Instinct MI210, MI250, MI250X"),
        _hip("gfx942", "cdna", 64, 64, "Instinct MI300A, MI300X, MI308X, MI325X"),
        _hip("gfx950", "cdna4", 64, 160, "Instinct MI350X, MI355X"),
        _hip("gfx1100", "rdna3", 32, 64, "Radeon RX 7900 XTX, PRO W7900"),
        _hip("gfx1101", "rdna3", 32, 64, "Radeon RX 7800 XT, PRO W7700"),
        _hip("gfx1151", "rdna3", 32, 64, "Ryzen AI Max (Strix Halo)"),
        _hip("gfx1200", "rdna4", 32, 64, "Radeon RX 9060 XT"),
        _hip("gfx1201", "rdna4", 32, 64, "Radeon RX 9070 XT, AI PRO R9700"),
        _hip("gfx1250", "rdna4", 32, 64, "Instinct MI400 series"),
        _cuda(
            "ptx", "small", (8, 0), 99, "12.0", "any NVIDIA part from compute capability 8.0 on", assembler="",
            matches="later", note="compiled by the driver at the first load, for parts without an image of their own",
        ),
    )
}


# What users ask for and do not get an image of their own for.
LEFT_OUT = {
    "sm75": "it has neither matrix products of bf16 nor asynchronous copies",
    "sm87": "the ptx images serve integrated parts, whose compatibility NVIDIA promises to PTX only",
    "sm110a": "the ptx images serve integrated parts, whose compatibility NVIDIA promises to PTX only",
    "gfx906": "it has no matrix units",
    "gfx908": "its bf16 matrix products have half the rate, and nothing here runs them",
    "gfx11-generic": "Triton 3.9 does not compile for generic names",
    "gfx12-generic": "Triton 3.9 does not compile for generic names",
}


def as_ptx(target: Target) -> Target:
    """The target with its images left as PTX: the same tiles and code path, for another part's driver to compile."""
    if target.vendor != "cuda" or target.pipeline != "80":
        raise BuildError(f"{target.name} has no PTX that other parts run: only the targets of the sm80 pipeline have.")
    return replace(target, assembler="")


def select(text: str | None) -> list[Target]:
    """The targets named in `text`, separated by spaces or commas, in table order; all of them when it is empty."""
    names = set((text or "").replace(",", " ").split())
    if unknown := sorted(names - TARGETS.keys()):
        told = ", ".join(f"{name} (left out: {LEFT_OUT[name]})" if name in LEFT_OUT else name for name in unknown)
        raise BuildError(f"unknown target {told}: the known ones are {', '.join(TARGETS)}.")
    return [target for name, target in TARGETS.items() if not names or name in names]
