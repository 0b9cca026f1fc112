"""The grid as data: which kernels, at which compile-time points, with which tiles on which targets."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from build_tools.targets import TARGETS, Target

MAX_HEAD_DIM = 512
HEAD_DIMS = (64, 128, 256, 512)
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Spec:
    kernel: str  # key of KERNELS
    dtype: str
    head_tile: int
    head_dim: int  # 0: any multiple of 8 up to MAX_HEAD_DIM, at run time
    min_heads: int
    max_heads: int | None  # inclusive; None: no bound
    aligned: bool  # bases and row strides of q, unified_kv and kv are multiples of 16 bytes


@dataclass(frozen=True)
class Config:
    """What may differ between targets without a change of meaning. Options go to Triton's compiler."""

    num_warps: int
    constexprs: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """Where a kernel's source is. The module's `constexprs(spec)` gives what follows from the Spec."""

    module: str
    function: str
    sources: tuple[str, ...]  # modules whose text decides the code
    short_name: str = ""  # in the variant's id, before the target
    gluon: bool = False
    grid: str = "tiles"  # "tiles" | "persistent"

    def load(self) -> Any:
        return getattr(import_module(self.module), self.function)

    def constexprs(self, spec: Spec) -> dict[str, Any]:
        return import_module(self.module).constexprs(spec)


@dataclass(frozen=True)
class Variant:
    spec: Spec
    target: Target
    config: Config

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.spec.kernel]

    @property
    def id(self) -> str:
        spec = self.spec
        parts = ["paged_prefill", spec.dtype, f"h{spec.head_tile}", f"d{spec.head_dim or 'any'}"]
        return "-".join([*parts, *filter(None, [self.kernel.short_name]), self.target.name])

    @property
    def file(self) -> str:
        return f"{self.id}.{self.target.format}"

    @property
    def matrix(self) -> str:
        """What the names of its matrix instructions begin with; the warpgroup products of sm90a take 64 rows."""
        wide = self.target.pipeline == "90" and (self.kernel.gluon or self.spec.head_tile >= 64)
        return "HGMMA" if wide else self.target.matrix


def _hopper(short_name: str) -> Kernel:
    module = f"csrc.kernels.hopper_{short_name}"
    sources = (module, "csrc.kernels.hopper_common")
    return Kernel(module, f"sparse_paged_prefill_{short_name}", sources, short_name, gluon=True, grid="persistent")


KERNELS = {
    "portable": Kernel("csrc.kernels.portable", "sparse_paged_prefill", ("csrc.kernels.portable",)),
    "hopper_wide": _hopper("wide"),
    "hopper_narrow": _hopper("narrow"),
}

# Head tiles of the portable kernel and the heads they are for, by times measured on an H200: at D = 512 two tiles of
# 16 cost more than one of 32 from 17 heads on, and two of 32 more than one of 64 from 33 on.
TILES_512 = ((16, 1, 16), (32, 17, 32), (64, 33, None))
TILES_BELOW = ((16, 1, 32), (64, 33, None))


def _portable_grid(tiles_512: tuple[tuple[int, int, int | None], ...] = TILES_512) -> tuple[Spec, ...]:
    """Specs for every H and D; those of head_dim 0 also take what no other does: unaligned views, other head_dims."""
    return tuple(
        spec
        for dtype in DTYPES
        for spec in (
            *(
                Spec("portable", dtype, head_tile, head_dim, low, high, aligned=True)
                for head_dim in reversed(HEAD_DIMS)
                for head_tile, low, high in (tiles_512 if head_dim == 512 else TILES_BELOW)
            ),
            Spec("portable", dtype, 16, 0, 1, None, aligned=False),
        )
    )


FULL_GRID = _portable_grid()
# Public kernels tuned for these parts take 16 heads.
CDNA_GRID = _portable_grid(TILES_BELOW)
HOPPER_GRID = (
    *(
        Spec(kernel, dtype, head_tile, 512, low, high, aligned=True)
        for dtype in DTYPES
        for kernel, head_tile, low, high in (
            ("hopper_narrow", 8, 1, 8),
            ("hopper_narrow", 16, 9, 16),
            ("hopper_narrow", 32, 17, 32),
            ("hopper_wide", 64, 33, None),
        )
    ),
    # The kernels above take all that a portable one of their head_dim would.
    *_portable_grid(tiles_512=()),
)
# Each object of an RDNA target compiles slowly: small tiles for all heads, and head_dim 64 by the masked one.
RDNA_GRID = tuple(
    spec
    for dtype in DTYPES
    for spec in (
        *(Spec("portable", dtype, 16, head_dim, 1, None, aligned=True) for head_dim in (512, 256, 128)),
        Spec("portable", dtype, 16, 0, 1, None, aligned=False),
    )
)


def _tile(block_k: int, num_warps: int, num_stages: int, keys_first: bool, **options: Any) -> Config:
    constexprs = (("BLOCK_K", block_k), ("KEYS_FIRST", keys_first))
    return Config(num_warps, constexprs, (("num_stages", num_stages), *sorted(options.items())))


_CDNA = {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 2}

# (kernel, head_tile, head_dim) -> Config for each family of targets; 0 is the masked variant. No tile may spill (see
# SPILL_BUDGET in compile.py); that rules out 32 keys for 64 heads at D = 512 on the sm80 pipeline, though it is 17 %
# faster. Of the others, NVIDIA's families have the one of least time on an H200, where each block was given so much
# shared memory that an SM held as many blocks as one of the family's parts does (sm80 164 KB, small 100 KB). A loop
# of 5 stages has two buffers of rows, one of 3 stages has one. AMD's are those of public kernels tuned for the parts,
# as far as registers and LDS allow.
TILES: dict[str, dict[tuple[str, int, int], Config]] = {
    "ampere": {
        ("portable", 16, 512): _tile(32, 4, 3, False),
        ("portable", 32, 512): _tile(16, 4, 3, True),
        ("portable", 64, 512): _tile(16, 8, 5, True),
        ("portable", 16, 256): _tile(64, 4, 3, False),
        ("portable", 64, 256): _tile(64, 8, 3, True),
        ("portable", 16, 128): _tile(128, 4, 3, False),
        ("portable", 64, 128): _tile(64, 4, 3, True),
        ("portable", 16, 64): _tile(128, 4, 3, False),
        ("portable", 64, 64): _tile(32, 4, 5, False),
        ("portable", 16, 0): _tile(16, 4, 2, True),
    },
    "cdna": {
        ("portable", 16, 512): _tile(32, 4, 2, True, **_CDNA),
        ("portable", 16, 256): _tile(32, 4, 2, True, **_CDNA),
        ("portable", 16, 128): _tile(64, 4, 2, True, **_CDNA),
        ("portable", 16, 64): _tile(64, 4, 2, True, **_CDNA),
        ("portable", 64, 512): _tile(16, 8, 2, False, **_CDNA),
        ("portable", 64, 256): _tile(32, 8, 2, False, **_CDNA),
        ("portable", 64, 128): _tile(32, 4, 2, False, **_CDNA),
        ("portable", 64, 64): _tile(32, 4, 2, False, **_CDNA),
        ("portable", 16, 0): _tile(16, 4, 1, True, **_CDNA),
    },
    # The matrix instruction of gfx11 takes its operands twice, once in each half of a wave: at D = 512, q alone fills
    # the registers, and 16 warps spill the least.
    "rdna3": {
        ("portable", 16, 512): _tile(16, 16, 1, False),
        ("portable", 16, 256): _tile(16, 8, 1, False),
        ("portable", 16, 128): _tile(16, 4, 1, False),
        ("portable", 16, 0): _tile(16, 16, 1, True),
    },
}
# One block an SM, or two small ones: a second buffer in place of a second block.
TILES["small"] = TILES["ampere"] | {
    ("portable", 16, 512): _tile(32, 4, 5, False),
    ("portable", 32, 512): _tile(16, 4, 5, True),
    ("portable", 16, 128): _tile(64, 4, 3, False),
    ("portable", 16, 64): _tile(64, 4, 3, False),
}
TILES["hopper"] = {
    ("portable", 16, 256): _tile(128, 4, 3, False),
    ("portable", 64, 256): _tile(32, 4, 3, False),
    ("portable", 16, 128): _tile(128, 4, 3, False),
    ("portable", 64, 128): _tile(32, 4, 3, False),
    ("portable", 16, 64): _tile(128, 4, 3, False),
    ("portable", 64, 64): _tile(64, 4, 3, False),
    ("portable", 16, 0): _tile(16, 4, 2, True),
    # Of the default partition; the kernels add their worker warps.
    ("hopper_narrow", 8, 512): Config(4),
    ("hopper_narrow", 16, 512): Config(4),
    ("hopper_narrow", 32, 512): Config(4),
    ("hopper_wide", 64, 512): Config(4),
}
# gfx950 takes the same tiles, without kpack, which has no meaning there, and unpipelined: pipelined loops were
# reported to compute wrong values on it.
_CDNA4_OPTIONS = (("matrix_instr_nonkdim", 16), ("num_stages", 1), ("waves_per_eu", 2))
TILES["cdna4"] = {key: replace(tile, options=_CDNA4_OPTIONS) for key, tile in TILES["cdna"].items()}
TILES["rdna4"] = TILES["rdna3"] | {("portable", 16, 512): _tile(16, 8, 1, False)}

GRIDS = {
    "ampere": FULL_GRID, "small": FULL_GRID, "hopper": HOPPER_GRID, "cdna": CDNA_GRID, "cdna4": CDNA_GRID,
    "rdna3": RDNA_GRID, "rdna4": RDNA_GRID,
}  # fmt: skip


def variants(targets: list[Target] | None = None) -> list[Variant]:
    """Every variant of the targets; within a target, in order of preference."""
    return [
        Variant(spec, target, TILES[target.family][spec.kernel, spec.head_tile, spec.head_dim])
        for target in (targets if targets is not None else TARGETS.values())
        for spec in GRIDS[target.family]
    ]
