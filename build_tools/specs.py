"""The grid as data: which kernels, at which compile-time points, with which tiles on which targets."""

from dataclasses import dataclass
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


def _hopper(short_name: str) -> Kernel:
    module = f"csrc.kernels.hopper_{short_name}"
    sources = (module, "csrc.kernels.hopper_common")
    return Kernel(module, f"sparse_paged_prefill_{short_name}", sources, short_name, gluon=True, grid="persistent")


KERNELS = {
    "portable": Kernel("csrc.kernels.portable", "sparse_paged_prefill", ("csrc.kernels.portable",)),
    "hopper_wide": _hopper("wide"),
    "hopper_narrow": _hopper("narrow"),
}

# Up to 32 heads, two small tiles of a token cost less than one that is mostly padding.
SMALL_TILE_MAX_HEADS = 32


def _portable(dtype: str, head_tile: int, head_dim: int) -> Spec:
    low, high = (SMALL_TILE_MAX_HEADS + 1, None) if head_tile > 16 else (1, SMALL_TILE_MAX_HEADS)
    return Spec("portable", dtype, head_tile, head_dim, low, high, aligned=True)


def _any(dtype: str) -> Spec:
    return Spec("portable", dtype, 16, 0, 1, None, aligned=False)


FULL_GRID = tuple(
    spec
    for dtype in DTYPES
    for spec in (*(_portable(dtype, tile, dim) for dim in reversed(HEAD_DIMS) for tile in (16, 64)), _any(dtype))
)
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
    *FULL_GRID,
)
# Each object of an RDNA target compiles slowly: small tiles for all heads, and head_dim 64 by the masked one.
RDNA_GRID = tuple(
    spec
    for dtype in DTYPES
    for spec in (*(Spec("portable", dtype, 16, dim, 1, None, True) for dim in (512, 256, 128)), _any(dtype))
)


def _tile(block_k: int, num_warps: int, num_stages: int, keys_first: bool, **options: Any) -> Config:
    constexprs = (("BLOCK_K", block_k), ("KEYS_FIRST", keys_first))
    return Config(num_warps, constexprs, (("num_stages", num_stages), *sorted(options.items())))


_CDNA = {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 2}

# (kernel, head_tile, head_dim) -> Config for each family of targets, by what a part's registers and shared memory
# hold without spills. 0 is the masked variant.
TILES: dict[str, dict[tuple[str, int, int], Config]] = {
    "ampere": {
        ("portable", 16, 512): _tile(32, 4, 3, True),
        ("portable", 16, 256): _tile(32, 4, 3, False),
        ("portable", 16, 128): _tile(64, 4, 3, True),
        ("portable", 16, 64): _tile(64, 4, 3, True),
        ("portable", 64, 512): _tile(16, 8, 3, True),
        ("portable", 64, 256): _tile(32, 8, 3, True),
        ("portable", 64, 128): _tile(64, 4, 3, True),
        ("portable", 64, 64): _tile(64, 4, 3, False),
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
    "rdna3": {
        ("portable", 16, 512): _tile(16, 16, 1, False),
        ("portable", 16, 256): _tile(16, 8, 1, False),
        ("portable", 16, 128): _tile(16, 4, 1, False),
        ("portable", 16, 0): _tile(16, 16, 1, True),
    },
}
TILES["small"] = TILES["ampere"]
TILES["hopper"] = TILES["ampere"] | {
    ("portable", 64, 512): _tile(32, 8, 3, True),
    ("portable", 64, 256): _tile(32, 8, 3, False),
    ("portable", 64, 128): _tile(64, 4, 3, False),
    # Of the default partition; the kernels add their worker warps.
    ("hopper_narrow", 8, 512): Config(4),
    ("hopper_narrow", 16, 512): Config(4),
    ("hopper_narrow", 32, 512): Config(4),
    ("hopper_wide", 64, 512): Config(4),
}
# gfx950 takes the same tiles; kpack has no meaning there.
TILES["cdna4"] = {
    key: Config(tile.num_warps, tile.constexprs, tuple(item for item in tile.options if item[0] != "kpack"))
    for key, tile in TILES["cdna"].items()
}
TILES["rdna4"] = TILES["rdna3"] | {("portable", 16, 512): _tile(16, 8, 1, False)}

GRIDS = dict.fromkeys(TILES, FULL_GRID) | {"hopper": HOPPER_GRID, "rdna3": RDNA_GRID, "rdna4": RDNA_GRID}


def variants(targets: list[Target] | None = None) -> list[Variant]:
    """Every variant of the targets; within a target, in order of preference."""
    return [
        Variant(spec, target, TILES[target.family][spec.kernel, spec.head_tile, spec.head_dim])
        for target in (targets if targets is not None else TARGETS.values())
        for spec in GRIDS[target.family]
    ]
