"""What tinygrad's AMD emulator (test/mockgpu/amd/emu.py) gets wrong or lacks, put right when this module is imported.

An emulator's handler turns one decoded instruction into a graph of operations on the wave's registers and on memory.
Ours stand in front of its own, chosen by the instruction's name. Each follows AMD's instruction-set documents and is
confirmed by the agreement of many differently tiled objects with the reference.

Not emulated: waiting (s_waitcnt and the like do nothing), waves at the same time (they run one after another between
barriers), global_load_lds_dwordx4, scaled FP6 and FP4 matrix products, gfx1250.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable

import checkout

checkout.enable()

import tinygrad.renderer.amd as decoder
from test.mockgpu.amd import emu
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.uop.ops import Ops, UOp

Handler = Callable[["decoder.Inst", "emu._Ctx"], UOp]

# Registers of the emulator's scalar file that no instruction can name as a source or a destination.
SCRATCH_BASE = 210
# First VGPR in the source encoding; below it are scalars and constants.
VGPR0 = 256
# Formats of vector results in which a lane reads other lanes' registers.
DPP_FORMATS = tuple(
    getattr(isa, name) for isa in (emu.irc, emu.ir3, emu.ir4) for name in ("VOP1_DPP16", "VOP2_DPP16")
)
# A scalar address operand from here on is "off".
NO_SADDR = 124

_handlers: list[tuple[re.Pattern[str], tuple[type, ...], Handler]] = []


def handles(pattern: str, formats: tuple[type, ...] = ()) -> Callable[[Handler], Handler]:
    """Registers a handler for the instructions whose whole name matches, of these formats only if any are given."""

    def register(handler: Handler) -> Handler:
        _handlers.append((re.compile(pattern), formats, handler))
        return handler

    return register


def u32(value: int) -> UOp:
    return UOp.const(value, dtypes.uint32)


def i32(value: int) -> UOp:
    return UOp.const(value, dtypes.int)


def u64(value: UOp) -> UOp:
    return value.cast(dtypes.uint64)


def field(inst, ctx, name: str) -> UOp:
    return ctx.inst_field(getattr(type(inst), name))


def register_file(ctx, accumulation: bool):
    """(read(register, lane), write(register, lane, word, exec mask)) of VGPRs or of accumulation VGPRs."""
    return (ctx.raccvgpr_dyn, ctx.waccvgpr_dyn) if accumulation else (ctx.rvgpr_dyn, ctx.wvgpr_dyn)


def in_two_steps(ctx, words: int, compute: Callable[[UOp], list[UOp]], store: Callable[[UOp, list[UOp]], list[UOp]]):
    """A sink that computes `words` words for every lane before it stores any: lanes read each other's registers."""
    kept = UOp.placeholder((ctx.wave_size * words,), dtypes.uint32, slot=0, addrspace=AddrSpace.LOCAL)
    lane = ctx.range()
    first = UOp.group(*[kept.index(lane * i32(words) + i32(i)).store(w) for i, w in enumerate(compute(lane))]).end(lane)
    kept = kept.after(first)
    lane = ctx.range()
    second = store(lane, [kept.index(lane * i32(words) + i32(i)).load() for i in range(words)])
    return UOp.sink(first, UOp.group(*second).end(lane), *ctx.inc_pc())


@handles(r"V_MFMA_F32_(16X16|32X32)X\d+_B?F16")
def mfma(inst, ctx) -> UOp:
    """CDNA. (The emulator reads A and B from VGPRs whatever `acc` says, and misplaces the rows of 32x32.)"""
    size, depth = (int(number) for number in re.fullmatch(r".*_(\d+)X\d+X(\d+)_.*", inst.op.name).groups())
    groups = 64 // size
    if inst.cbsz or inst.abid or inst.blgp:
        raise NotImplementedError(f"{inst.op.name} with cbsz={inst.cbsz} abid={inst.abid} blgp={inst.blgp}")
    accumulation = bool(inst.acc & 1), bool(inst.acc & 2), bool(inst.acc_cd)
    return matrix_product(
        inst, ctx, size, depth, groups, accumulation, lambda r, g: i32(r // 4 * 4 * groups + r % 4) + g * i32(4)
    )


@handles(r"V_WMMA_F32_16X16X16_B?F16")
def wmma(inst, ctx) -> UOp:
    """RDNA3, where both halves of a wave hold the same A and B, and RDNA4. (The emulator takes constant C for v128.)"""
    if inst.neg or inst.neg_hi:
        raise NotImplementedError(f"{inst.op.name} with neg={inst.neg} neg_hi={inst.neg_hi}")
    if isinstance(inst, emu.ir4.VOP3P):
        return matrix_product(inst, ctx, 16, 16, 2, (False,) * 3, lambda r, g: i32(r) + g * i32(8))
    return matrix_product(inst, ctx, 16, 16, 1, (False,) * 3, lambda r, g: i32(2 * r) + g)


def matrix_product(inst, ctx, size: int, depth: int, groups: int, accumulation, row_of) -> UOp:
    """D [size, size] = A [size, depth] B [depth, size] + C, with 16-bit A and B and fp32 C and D.

    A lane of group g (`size` lanes make a group) holds row lane % size of A, column lane % size of B, and of these
    the depth / groups elements that begin at (g % groups) * depth / groups; register r of its C and D is row
    row_of(r, g), column lane % size. `accumulation` says whether A, B, and C and D lie in accumulation registers.
    """
    per_lane = depth // groups
    exec_mask, vdst = ctx.rexec(), field(inst, ctx, "vdst")
    convert = bf16_bits if inst.op.name.endswith("_BF16") else f16_bits

    inputs = UOp.placeholder((2 * size * depth,), dtypes.uint32, slot=0, addrspace=AddrSpace.LOCAL)
    lane = ctx.range()
    group, row = lane // i32(size), lane % i32(size)
    loads = []
    for operand, name in enumerate(("src0", "src1")):
        read, _ = register_file(ctx, accumulation[operand])
        source = field(inst, ctx, name) - u32(VGPR0)
        at = i32(operand * size * depth) + row * i32(depth) + group % i32(groups) * i32(per_lane)
        for register in range(per_lane // 2):
            word = read(source + u32(register), lane)
            for half in range(2):
                element = convert(word >> u32(16 * half) & u32(0xFFFF))
                loads.append(inputs.index(at + i32(2 * register + half)).store(element))
    loaded = UOp.group(*loads).end(lane)
    inputs = inputs.after(loaded)

    lane = ctx.range()
    group, column = lane // i32(size), lane % i32(size)
    read, write = register_file(ctx, accumulation[2])
    source = field(inst, ctx, "src2")
    in_registers = source >= u32(VGPR0)
    constant = ctx.rsgpr_dyn(source, in_registers.ne(True))
    stores = []
    for register in range(size * size // ctx.wave_size):
        start = in_registers.where(read(source - u32(VGPR0) + u32(register), lane, in_registers), constant)
        total = start.bitcast(dtypes.float32)
        a = row_of(register, group) * i32(depth)
        b = column * i32(depth) + i32(size * depth)
        for k in range(depth):
            left, right = (inputs.index(base + i32(k)).load().bitcast(dtypes.float32) for base in (a, b))
            total = total + left * right
        stores.append(write(vdst + u32(register), lane, total.bitcast(dtypes.uint32), exec_mask))
    return UOp.sink(loaded, UOp.group(*stores).end(lane), *ctx.inc_pc())


def bf16_bits(half: UOp) -> UOp:
    """The fp32 word of a bf16."""
    return half << u32(16)


def f16_bits(half: UOp) -> UOp:
    """The fp32 word of an fp16; in integers, since a chain of bit casts is folded away and the conversion with it."""
    sign, exponent, mantissa = half >> u32(15) << u32(31), half >> u32(10) & u32(31), half & u32(1023)
    subnormal = (mantissa.cast(dtypes.float32) * UOp.const(2.0**-24, dtypes.float32)).bitcast(dtypes.uint32)
    normal = exponent + u32(112) << u32(23) | mantissa << u32(13)
    special = u32(0x7F800000) | mantissa << u32(13)
    return sign | exponent.eq(u32(0)).where(subnormal, exponent.eq(u32(31)).where(special, normal))


@handles(r"V_PERMLANE(16|32)_SWAP_B32_E(32|64)")
def permlane_swap(inst, ctx) -> UOp:
    """gfx950: the odd rows (of 16 or 32 lanes) of vdst change places with the even rows of src0."""
    width = 16 if "16" in inst.op.name else 32
    exec_mask, vdst = ctx.rexec(), field(inst, ctx, "vdst")
    source = field(inst, ctx, "src0") - u32(VGPR0)

    def compute(lane: UOp) -> list[UOp]:
        odd = (lane // i32(width) % i32(2)).ne(i32(0))
        # The lane of the other row is named for both halves, so that neither read leaves the register.
        other = odd.where(lane - i32(width), lane + i32(width))
        return [
            odd.where(ctx.rvgpr_dyn(source, other), ctx.rvgpr_dyn(vdst, lane)),
            odd.where(ctx.rvgpr_dyn(source, lane), ctx.rvgpr_dyn(vdst, other)),
        ]

    def store(lane: UOp, words: list[UOp]) -> list[UOp]:
        return [ctx.wvgpr_dyn(vdst, lane, words[0], exec_mask), ctx.wvgpr_dyn(source, lane, words[1], exec_mask)]

    return in_two_steps(ctx, 2, compute, store)


@handles(r"V_PERMLANEX?16_B32")
def permlane16(inst, ctx) -> UOp:
    """Each lane takes the lane of its row of 16 (of the other row: X) that its 4 bits of src1:src2 name.

    (The emulator does not read literals here.)
    """
    exec_mask, vdst = ctx.rexec(), field(inst, ctx, "vdst")
    literal = ctx.optional_field(inst, "literal")
    source = field(inst, ctx, "src0") - u32(VGPR0)
    low, high = (ctx.rsrc_dyn(field(inst, ctx, name), None, 32, literal) for name in ("src1", "src2"))
    across = i32(16 if "X16" in inst.op.name else 0)
    fetch_inactive, zero_inactive = bool(inst.opsel & 1), bool(inst.opsel & 2)

    def compute(lane: UOp) -> list[UOp]:
        nibble = (lane & i32(7)).cast(dtypes.uint32) * u32(4)
        chosen = (lane & i32(8)).ne(i32(0)).where(high, low) >> nibble & u32(15)
        other = (lane & i32(~15)) ^ across | chosen.cast(dtypes.int)
        word = ctx.rvgpr_dyn(source, other)
        if fetch_inactive:
            return [word]
        inactive = u32(0) if zero_inactive else ctx.rvgpr_dyn(vdst, lane)
        return [emu._lane_active(exec_mask, other).where(word, inactive)]

    return in_two_steps(ctx, 1, compute, lambda lane, words: [ctx.wvgpr_dyn(vdst, lane, words[0], exec_mask)])


@handles(r"V_\w*[FIUB]16\w*_E32", (emu.irc.VOP1, emu.irc.VOP2, emu.irc.VOP2_LIT))
def cdna_16_bit(inst, ctx) -> UOp:
    """A register number of 128 or more is itself. (The emulator takes it for an RDNA high half in short encodings.)"""
    exec_mask, vdst, source = ctx.rexec(), field(inst, ctx, "vdst"), field(inst, ctx, "src0")
    literal = ctx.optional_field(inst, "literal")
    lane = ctx.range()
    operands = {
        "S0": ctx.rsrc_dyn(source, lane, inst.canonical_op_bits["s0"], literal),
        "D0": ctx.rvgpr_dyn(vdst, lane),
    }
    if hasattr(type(inst), "vsrc1"):
        operands["S1"] = ctx.rvgpr_dyn(field(inst, ctx, "vsrc1"), lane)
    if literal is not None:
        operands["SIMM32"] = literal
    return ctx.compile_vop_pcode(inst.op, operands, lane, vdst, exec_mask, src0_off=source)


@handles(r"V_\w*[FIUB]16\w*_E32", (emu.irc.VOP1_DPP16, emu.irc.VOP2_DPP16, emu.irc.VOPC))
def cdna_16_bit_unknown(inst, ctx) -> UOp:
    """The same mistake in formats that no object here has used: refused, so that it cannot pass unseen."""
    raise NotImplementedError(f"{inst.op.name} as {type(inst).__name__} is not emulated")


def lds_address(inst, ctx, lane: UOp) -> UOp:
    offset = field(inst, ctx, "offset1") << u32(8) | field(inst, ctx, "offset0")
    return ctx.rvgpr_dyn(field(inst, ctx, "addr"), lane) + offset


def lds_half(ctx, address: UOp, active: UOp) -> UOp:
    """The 16 bits at an even byte address."""
    return ctx.lds.index((address >> u32(2)).valid(active)).load() >> (address & u32(2)) * u32(8) & u32(0xFFFF)


@handles(r"DS_READ_B64_TR_B16")
def lds_read_transposed(inst, ctx) -> UOp:
    """gfx950: within 16 lanes, half r of lane i is half i % 4 of the 8 bytes that lane 4 r + i / 4 addresses."""
    exec_mask, vdst = ctx.rexec(), field(inst, ctx, "vdst")
    _, write = register_file(ctx, bool(inst.acc))

    def compute(lane: UOp) -> list[UOp]:
        within = lane & i32(15)
        halves = []
        for r in range(4):
            other = (lane & i32(~15)) + i32(4 * r) + (within >> i32(2))
            address = lds_address(inst, ctx, other) + (within & i32(3)).cast(dtypes.uint32) * u32(2)
            halves.append(lds_half(ctx, address, emu._lane_active(exec_mask, other)))
        return [halves[0] | halves[1] << u32(16), halves[2] | halves[3] << u32(16)]

    def store(lane: UOp, words: list[UOp]) -> list[UOp]:
        return [write(vdst + u32(i), lane, word, exec_mask) for i, word in enumerate(words)]

    return in_two_steps(ctx, 2, compute, store)


@handles(r"DS_(READ|LOAD)_[UI](8|16)_D16(_HI)?")
def lds_read_d16(inst, ctx) -> UOp:
    """Loads one half of the destination and keeps the other. (The emulator clears it.)"""
    exec_mask, vdst = ctx.rexec(), field(inst, ctx, "vdst")
    read, write = register_file(ctx, bool(getattr(inst, "acc", 0)))
    lane = ctx.range()
    active = emu._lane_active(exec_mask, lane)
    address = lds_address(inst, ctx, lane)
    half = lds_half(ctx, address, active)
    if "8_D16" in inst.op.name:
        half = half >> (address & u32(1)) * u32(8) & u32(0xFF)
        if "_I8_" in inst.op.name:
            half = half | (half >> u32(7)) * u32(0xFF00)
    old = read(vdst, lane)
    word = half << u32(16) | old & u32(0xFFFF) if inst.op.name.endswith("_HI") else half | old & u32(0xFFFF0000)
    return UOp.sink(write(vdst, lane, word, exec_mask).end(lane), *ctx.inc_pc())


@handles(r"SCRATCH_(LOAD|STORE)_(DWORD(X[234])?|B(32|64|96|128))")
def scratch(inst, ctx) -> UOp:
    """Spills. Scratch is per lane and per wave; the emulator gives all waves of a workgroup the same bytes."""
    exec_mask = ctx.rexec()
    read, write = register_file(ctx, bool(getattr(inst, "acc", 0)))
    rdna4 = hasattr(type(inst), "ioffset")
    data = field(inst, ctx, "vsrc" if rdna4 else "data")
    vdst = field(inst, ctx, "vdst")
    vaddr, saddr = field(inst, ctx, "vaddr" if rdna4 else "addr"), field(inst, ctx, "saddr")
    lane = ctx.range()
    active = emu._lane_active(exec_mask, lane)
    stride = ctx.rsgpr_dyn(u32(emu.SCRATCH_STRIDE_IDX))
    address = ctx.rsgpr_dyn(u32(SCRATCH_BASE)) + lane.cast(dtypes.uint32) * stride
    address = address + ctx.inst_field_signed(getattr(type(inst), "ioffset" if rdna4 else "offset")).cast(dtypes.uint32)
    address = address + (saddr < u32(NO_SADDR)).where(ctx.rsgpr_dyn(saddr), u32(0))
    if inst.sve:
        address = address + ctx.rvgpr_dyn(vaddr, lane)
    stores = []
    for i in range(dwords(inst)):
        word = read(data + u32(i), lane)
        loaded = u32(0)
        for byte in range(4):
            slot = ctx.scratch.index((address + u32(4 * i + byte)).valid(active))
            if "STORE" in inst.op.name:
                stores.append(slot.store((word >> u32(8 * byte) & u32(0xFF)).cast(dtypes.uint8)))
            else:
                loaded = loaded | slot.load().cast(dtypes.uint32) << u32(8 * byte)
        if "LOAD" in inst.op.name:
            stores.append(write(vdst + u32(i), lane, loaded, exec_mask))
    return UOp.sink(UOp.group(*stores).end(lane), *ctx.inc_pc())


def dwords(inst) -> int:
    """How many 32-bit words a load or store moves, by its name's end: DWORDX4 or B128."""
    kind = inst.op.name.rsplit("_", 1)[1]
    return int(kind[1:]) // 32 if kind[0] == "B" else int(kind.removeprefix("DWORD").lstrip("X") or 1)


@handles(r"BUFFER_(LOAD|STORE)_B(32|64|96|128)")
def rdna_buffer(inst, ctx) -> UOp:
    """RDNA3 MUBUF and RDNA4 VBUFFER, raw: a word at or beyond num_records reads 0 and is not written."""
    exec_mask, rdna4 = ctx.rexec(), hasattr(type(inst), "ioffset")
    if inst.idxen:
        raise NotImplementedError(f"{inst.op.name} with an index; only raw buffers are emulated")
    vdata, vaddr = field(inst, ctx, "vdata"), field(inst, ctx, "vaddr")
    descriptor = field(inst, ctx, "rsrc") if rdna4 else field(inst, ctx, "srsrc") * u32(4)
    soffset = ctx.rsrc_dyn(field(inst, ctx, "soffset"), None, 32)
    immediate = ctx.inst_field_signed(type(inst).ioffset).cast(dtypes.uint32) if rdna4 else field(inst, ctx, "offset")
    high = ctx.rsgpr_dyn(descriptor + u32(1)) & u32(0xFFFF)
    base = u64(ctx.rsgpr_dyn(descriptor)) | u64(high) << UOp.const(32, dtypes.uint64)
    records = ctx.rsgpr_dyn(descriptor + u32(2))
    lane = ctx.range()
    active = emu._lane_active(exec_mask, lane)
    offset = immediate + ctx.rvgpr_dyn(vaddr, lane) if inst.offen else immediate
    stores = []
    for i in range(dwords(inst)):
        at = offset + u32(4 * i)
        inside = active & (u64(at) + UOp.const(4, dtypes.uint64) <= u64(records))
        slot = ctx.vmem.index(((base + u64(soffset) + u64(at)) >> UOp.const(2, dtypes.uint64)).valid(inside))
        if "STORE" in inst.op.name:
            stores.append(slot.store(ctx.rvgpr_dyn(vdata + u32(i), lane)))
        else:
            stores.append(ctx.wvgpr_dyn(vdata + u32(i), lane, inside.where(slot.load(), u32(0)), exec_mask))
    return UOp.sink(UOp.group(*stores).end(lane), *ctx.inc_pc())


@handles(r"GLOBAL_(INV|WB|WBINV)|BUFFER_(GL[01]_INV|INV|WBL2)")
def cache_control(inst, ctx) -> UOp:
    """There are no caches."""
    return UOp.sink(*ctx.inc_pc())


def for_active_lanes(graph: UOp, ctx) -> UOp:
    """The graph with its LDS accesses made by active lanes only: an inactive lane may hold any address."""
    exec_mask, gated = ctx.rexec(), {}
    for node in graph.toposort():
        if node.op is Ops.INDEX and node.src[0].without_after is ctx.lds:
            (lane,) = node.ranges
            gated[node] = node.src[0].index(node.src[1].get_idx().valid(emu._lane_active(exec_mask, lane)))
    return graph.substitute(gated)


def all_lanes_read_first(graph: UOp, ctx) -> UOp:
    """The graph with its results kept until every lane has read: with DPP a lane reads others' registers.

    (The emulator goes lane by lane, so that a destination that is also the source is read half overwritten.)
    """
    stores = [node for node in graph.toposort() if node.op is Ops.STORE]
    vector = [store for store in stores if store.src[0].src[0].without_after is ctx.vgpr]
    if len(stores) != len(vector) + len(ctx.inc_pc()):
        raise NotImplementedError("DPP with a scalar result")
    (old_lane,) = vector[0].ranges

    def compute(lane: UOp) -> list[UOp]:
        return [store.src[1].substitute({old_lane: lane}) for store in vector]

    def store_all(lane: UOp, words: list[UOp]) -> list[UOp]:
        places = [store.src[0].substitute({old_lane: lane}) for store in vector]
        return [place.store(word) for place, word in zip(places, words, strict=True)]

    return in_two_steps(ctx, len(vector), compute, store_all)


def _ours_first(theirs: Handler | None) -> Handler:
    def handle(inst, ctx) -> UOp:
        name = emu._op_name(inst)
        for pattern, formats, ours in _handlers:
            if pattern.fullmatch(name) and (not formats or type(inst) in formats):
                return ours(inst, ctx)
        if theirs is None:
            raise NotImplementedError(f"{name} is not emulated")
        graph = theirs(inst, ctx)
        if name.startswith("DS_"):
            return for_active_lanes(graph, ctx)
        if type(inst) in DPP_FORMATS:
            return all_lanes_read_first(graph, ctx)
        return graph

    return handle


def _dpp16_control(lane: UOp, control: int, row_mask: int, bank_mask: int, wave_size: int):
    """(source lane, enabled, in bounds): row_share (gfx90a: row_newbcast) is 0x150 to 0x15f, row_xmask 0x160 to 0x16f.

    (The emulator's table has other numbers, and broadcasts lane 0 for row_bcast, which is refused here.)
    """
    if control in (0x142, 0x143):
        raise NotImplementedError("DPP row_bcast is not emulated")
    if not 0x150 <= control <= 0x16F:
        return _their_dpp16_control(lane, control, row_mask, bank_mask, wave_size)
    identity = 0xE4  # quad_perm [0, 1, 2, 3]
    own, enabled, in_bounds = _their_dpp16_control(lane, identity, row_mask, bank_mask, wave_size)
    number = i32(control & 15)
    return own ^ number if control >= 0x160 else own & i32(~15) | number, enabled, in_bounds


def _init_wave(lib, wave_start, total_threads, *rest):
    """The emulator's, with this wave's part of the scratch memory and, on RDNA4, its number in ttmp8[29:25].

    The scratch size that comes is the whole workgroup's (`run` passes it so, since the emulator allocates what one
    wave of that size needs).
    """
    state = _their_init_wave(lib, wave_start, total_threads, *rest)
    waves = -(-total_threads // state.wave_size)
    a_lane = state._read_sgpr(emu.SCRATCH_STRIDE_IDX) // waves
    state._write_sgpr(emu.SCRATCH_STRIDE_IDX, a_lane)
    state._write_sgpr(SCRATCH_BASE, a_lane * wave_start)
    if "rdna4" in rest:
        state._write_sgpr(emu.ttmp[8].offset, wave_start // state.wave_size << 25)
    return state


def run(entry, size, grid, threads, kernarg, rsrc2, private_size, isa, registers) -> None:
    """One launch of `grid` workgroups; private_size is a lane's scratch in bytes."""
    waves = -(-threads // emu._wave_size(isa))
    emu.run_asm(entry, size, grid, 1, 1, threads, 1, 1, kernarg, rsrc2, private_size * waves, isa, registers)


def renumber_gfx90a(entry: int, size: int) -> None:
    """Rewrites gfx90a's *_bf16_1k matrix products (VOP3P opcodes 0x63 to 0x67) as gfx940's, which the decoder knows."""
    at = entry
    while at < entry + size:
        word = ctypes.c_uint32.from_address(at)
        opcode = word.value >> 16 & 0x7F
        if word.value >> 23 == 0b110100111 and 0x63 <= opcode <= 0x67:
            word.value += 0x5D - 0x63 << 16
        at += decoder.decode_inst(ctypes.string_at(at, 16), "cdna").size()


for _kind, _theirs in list(emu._INST_HANDLERS.items()):
    emu._INST_HANDLERS[_kind] = _ours_first(_theirs)
for _isa, _kind in (("rdna3", emu.ir3.MUBUF), ("rdna4", emu.ir4.VBUFFER)):
    emu._INST_HANDLERS[_kind] = _ours_first(None)
    decoder._load_formats()[_isa].insert(0, _kind)
_their_dpp16_control, emu._dpp16_ctrl = emu._dpp16_ctrl, _dpp16_control
_their_init_wave, emu._init_wave = emu._init_wave, _init_wave
# Decoding is most of a launch; objects stay where they are mapped (code_object), so addresses can stand for them.
emu._decode_at = functools.cache(emu._decode_at)
