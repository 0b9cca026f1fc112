"""SM90 kernel for 33 heads and more: 64 heads a tile, D = 512.

A persistent CTA of three warpgroups walks tiles (a token and 64 of its heads). One warpgroup gathers key
rows, two consume them: the left one makes the left 256 columns of the output, the right one the right 256.
Keys come in pairs of 64-key blocks, even and odd. The left consumer scores the even block, the right one the
odd block; each multiplies both blocks' probabilities with its half of the columns, its own from registers,
the other's from shared memory. A pair's steps, with the named barriers in capitals:

    left                                            right
    (S even is done)                   ORDER ->     S odd
    maximum, P even to shared    EVEN_READY ->      O += P even K
    O += P even K                 <- ODD_READY      maximum, P odd to shared
    O += P odd K, with the next S even under it     O += P odd K

A tile ends with each consumer's epilogue; the left one issues the next tile's first S even before its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from csrc.kernels.hopper_common import (
    LAZY_STEP,
    LOWEST,
    Lists,
    Output,
    Tables,
    any_nan,
    any_not_one,
    arrive,
    arrive_if,
    gather,
    named_arrive,
    named_sync,
    opaque_zero,
    output_factor,
    tiles_of,
    wgmma_wait_all_but,
)

# Registers a thread of the right consumer and of the producer; the left consumer has the rest.
CONFIGS = {64: {"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 72}}

HEADS = gl.constexpr(64)
BLOCK = gl.constexpr(64)  # keys
HALF = gl.constexpr(256)  # columns of a slot of K and of one consumer's output
PIECE = gl.constexpr(128)  # columns that have one full barrier

# Slots of the K buffer; slot % 2 is the column half.
EVEN_LEFT = gl.constexpr(0)
EVEN_RIGHT = gl.constexpr(1)
ODD_LEFT = gl.constexpr(2)
ODD_RIGHT = gl.constexpr(3)

# Named barriers of the two consumers, 256 threads each; Triton itself uses numbers 0 to 3. The compiler does
# not see them, so neither side may arrive twice before the other has waited. A pair passes ORDER, EVEN_READY
# and ODD_READY once each, in this order; the left waits for ODD_READY before it arrives for the next pair.
EVEN_READY = gl.constexpr(8)  # the left arrives with P even and the maximum in shared memory, the right waits
ODD_READY = gl.constexpr(9)  # the right arrives with P odd and the maximum in shared memory, the left waits
SUMS_READY = gl.constexpr(12)  # both wait, once a tile, between storing their sum and loading the other's
ORDER = gl.constexpr(13)  # the left arrives when S even is done, the right waits: S odd must not delay S even
CONSUMERS = gl.constexpr(256)


def constexprs(spec):
    return dict(CONFIGS[spec.head_tile])


@gluon.aggregate
class Shared:
    """Shared memory and mbarriers. A phase is one tile's for q, one pair's for k and bias."""

    q: gl.shared_memory_descriptor  # [2, HEADS, HALF]
    k: gl.shared_memory_descriptor  # [4, BLOCK, HALF] slots
    even: gl.shared_memory_descriptor  # [2, HEADS, BLOCK]: first P even; together the left's output stage
    odd: gl.shared_memory_descriptor  # the same for P odd and the right
    bias: gl.shared_memory_descriptor  # [2, BLOCK] fp32, even and odd: what a key adds to its logits, or -inf
    seen: gl.shared_memory_descriptor  # [2, BLOCK] int8, by tile parity: 0 where the tile has had holes only
    # What one consumer stores and the other loads is apart from what it loads itself, else the compiler puts
    # a barrier between. Sums are by tile parity: a token without keys could overwrite one not yet read.
    maximum_even: gl.shared_memory_descriptor  # [HEADS] fp32: after the even block, of the left
    maximum_odd: gl.shared_memory_descriptor  # [HEADS] fp32: after the odd block, of the right
    sum_left: gl.shared_memory_descriptor  # [2, HEADS] fp32
    sum_right: gl.shared_memory_descriptor  # [2, HEADS] fp32
    q_full: gl.shared_memory_descriptor  # the producer's 128 threads' copies arrive, both consumers wait
    q_empty: gl.shared_memory_descriptor  # [2], by half: the consumers' eight warps arrive after their last S
    # from it in the tile, the producer waits
    k_full: gl.shared_memory_descriptor  # [8], a slot's pieces: the 128 threads' copies arrive, the consumer
    # that scores the slot's block waits; the other waits after it, through EVEN_READY or ODD_READY
    k_empty: gl.shared_memory_descriptor  # [4]: four warps of the half's consumer arrive after its product with
    # P, which lies after every S from the slot; the producer waits
    bias_full: gl.shared_memory_descriptor  # [2]: the producer's four warps arrive, the consumer that scores
    # the block waits. A bias is free again with EVEN_LEFT, or with ODD_RIGHT


@gluon.jit
def scores(s, sm, slot: gl.constexpr, phase, go, first: gl.constexpr):
    """Issues s (+)= Q K^T over the columns of one slot, piece by piece as they arrive; no waits unless go."""
    for piece in gl.static_range(2):
        mbarrier.wait(sm.k_full.index(2 * slot + piece), phase, pred=go)
        zero = opaque_zero()
        q = sm.q.index(zero + slot % 2).slice(piece * PIECE, PIECE, 1)
        k = sm.k.index(zero + slot).slice(piece * PIECE, PIECE, 1)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=piece == 1 or not first, is_async=True)
    return s


@gluon.jit
def lazy_maximum(m, m_block):
    return gl.where(m_block > m + LAZY_STEP, m_block, m)


@gluon.jit
def first_factor(m, m_even, first):
    """A pair's first factor of the sums: 1 in a tile's first pair, where they are 0, for no rescale to run."""
    return gl.where(first, 1.0, gl.exp2(m - m_even))


@gluon.jit
def rescaled(acc, factor, layout: gl.constexpr):
    if any_not_one(factor):
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]
    return acc


@gluon.jit
def attend_left(s, bias, m, l, acc, first, scale, sm, s_layout: gl.constexpr, acc_layout: gl.constexpr):
    """One pair in the left consumer, from finished S even to the issue of the product with P odd."""
    s = s * scale + bias[None, :]
    m_even = lazy_maximum(m, gl.max(s, 1))
    sm.maximum_even.store(m_even)
    p = gl.exp2(s - m_even[:, None])
    p_half = p.to(sm.k.dtype)
    sm.even.index(0).store(p_half)
    fence_async_shared()
    named_arrive(EVEN_READY, CONSUMERS)
    alpha = first_factor(m, m_even, first)
    acc = rescaled(acc, alpha, acc_layout)
    p_operand = gl.convert_layout(p_half, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
    acc = warpgroup_mma(p_operand, sm.k.index(opaque_zero() + EVEN_LEFT), acc, is_async=True)
    l = l * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(sm.k_empty.index(EVEN_LEFT))
    named_sync(ODD_READY, CONSUMERS)
    m_odd = sm.maximum_odd.load(gl.SliceLayout(1, s_layout))
    alpha = gl.exp2(m_even - m_odd)
    l = l * alpha
    acc = rescaled(acc, alpha, acc_layout)
    zero = opaque_zero()
    acc = warpgroup_mma(sm.odd.index(zero), sm.k.index(zero + ODD_LEFT), acc, is_async=True)
    return m_odd, l, acc


@gluon.jit
def attend_right(m, l, acc, scale, phase, first, last, sm, s_layout: gl.constexpr, acc_layout: gl.constexpr):
    """One pair in the right consumer, S odd included."""
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    named_sync(ORDER, CONSUMERS)
    s = scores(gl.zeros([HEADS, BLOCK], gl.float32, s_layout), sm, ODD_RIGHT, phase, True, True)
    s = scores(s, sm, ODD_LEFT, phase, True, False)
    wgmma_wait_all_but(2)
    arrive_if(sm.q_empty.index(1), last)
    mbarrier.wait(sm.bias_full.index(1), phase)
    bias = sm.bias.index(1).load(gl.SliceLayout(0, s_layout))
    s = warpgroup_mma_wait(0, deps=(s,))
    arrive_if(sm.q_empty.index(0), last)
    s = s * scale + bias[None, :]
    m_block = gl.max(s, 1)
    named_sync(EVEN_READY, CONSUMERS)
    m_even = sm.maximum_even.load(m_layout)
    sm.maximum_odd.store(lazy_maximum(m_even, m_block))
    alpha = first_factor(m, m_even, first)
    l = l * alpha
    acc = rescaled(acc, alpha, acc_layout)
    zero = opaque_zero()
    acc = warpgroup_mma(sm.even.index(zero), sm.k.index(zero + EVEN_RIGHT), acc, is_async=True)
    # The maximum's round trip through shared memory keeps ptxas from hoisting exponentials above the wgmmas.
    m_odd = sm.maximum_odd.load(m_layout)
    p = gl.exp2(s - m_odd[:, None])
    p_half = p.to(sm.k.dtype)
    sm.odd.index(0).store(p_half)
    fence_async_shared()
    named_arrive(ODD_READY, CONSUMERS)
    alpha = gl.exp2(m_even - m_odd)
    l = l * alpha + gl.sum(p, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(sm.k_empty.index(EVEN_RIGHT))
    acc = rescaled(acc, alpha, acc_layout)
    p_operand = gl.convert_layout(p_half, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
    acc = warpgroup_mma(p_operand, sm.k.index(opaque_zero() + ODD_RIGHT), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(sm.k_empty.index(ODD_RIGHT))
    return m_odd, l, acc


@gluon.jit
def exchange_sums(l, own, other):
    """Sum of both consumers."""
    own.store(l)
    named_sync(SUMS_READY, CONSUMERS)
    return l + other.load(l.type.layout)


@gluon.jit
def write_tile(m, l, acc, sink, output, token, head, stage, seen, side: gl.constexpr, acc_layout: gl.constexpr):
    """Normalises and stores half of the columns, staged for 16-byte stores; the left also stores lse."""
    if any_nan(l):
        # Holes add exactly nothing, unless the query holds NaN or infinity: then nothing else must stay.
        any_layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        if gl.max(seen.load(any_layout).to(gl.int32), 0) == 0:
            l = gl.zeros_like(l)
            acc = gl.zeros_like(acc)
    factor = output_factor(m, l, sink)
    if side == 0:
        output.store_lse(token, head + gl.arange(0, HEADS, layout=m.type.layout), m, l, sink)
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc_layout), assert_trivial=True)[:, None]
    pieces = out.to(stage.dtype).reshape([HEADS, 2, PIECE]).permute([0, 2, 1]).split()
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = gl.arange(0, HEADS, layout=gl.SliceLayout(1, store_layout))
    columns = side * HALF + gl.arange(0, PIECE, layout=gl.SliceLayout(0, store_layout))
    for piece in gl.static_range(2):
        stage.store(pieces[piece])
        output.store_rows(token, head, r, columns + piece * PIECE, stage.load(store_layout), 2 * HALF)


@gluon.jit
def consume_left(lists, output, tiles, scale, sm):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    bias_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    stage = sm.even.reinterpret(sm.k.dtype, [HEADS, PIECE], sm.q.layout)
    phase = 0
    q_phase = 0
    parity = 0
    step = gl.num_programs(0)
    count = lists.count(tiles.token(tiles.first))
    mbarrier.wait(sm.q_full, q_phase)
    q_phase ^= 1
    s = gl.zeros([HEADS, BLOCK], gl.float32, s_layout)
    bias = gl.zeros([BLOCK], gl.float32, bias_layout)
    if count > 0:
        s = scores(s, sm, EVEN_LEFT, phase, True, True)
        s = scores(s, sm, EVEN_RIGHT, phase, True, False)
        mbarrier.wait(sm.bias_full.index(0), phase)
        bias = sm.bias.index(0).load(bias_layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        named_arrive(ORDER, CONSUMERS)
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        head = block * HEADS
        pairs = (count + 2 * BLOCK - 1) // (2 * BLOCK)
        count = lists.count(tiles.token(tile + step))
        m = gl.full([HEADS], LOWEST, gl.float32, m_layout)
        l = gl.zeros([HEADS], gl.float32, m_layout)
        acc = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
        for i in range(pairs - 1):
            m, l, acc = attend_left(s, bias, m, l, acc, i == 0, scale, sm, s_layout, acc_layout)
            phase ^= 1
            s_next = gl.zeros([HEADS, BLOCK], gl.float32, s_layout)
            s_next = scores(s_next, sm, EVEN_LEFT, phase, True, True)
            acc = warpgroup_mma_wait(2, deps=(acc,))
            arrive(sm.k_empty.index(ODD_LEFT))
            s_next = scores(s_next, sm, EVEN_RIGHT, phase, True, False)
            mbarrier.wait(sm.bias_full.index(0), phase)
            bias = sm.bias.index(0).load(bias_layout)
            wgmma_wait_all_but(1)
            named_arrive(ORDER, CONSUMERS)
            s = warpgroup_mma_wait(0, deps=(s_next,))
        arrive(sm.q_empty.index(0))
        arrive(sm.q_empty.index(1))
        sink = output.load_sink(head + gl.arange(0, HEADS, layout=m_layout))
        if pairs > 0:
            m, l, acc = attend_left(s, bias, m, l, acc, pairs == 1, scale, sm, s_layout, acc_layout)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            arrive(sm.k_empty.index(ODD_LEFT))
            phase ^= 1
        l = exchange_sums(l, sm.sum_left.index(parity), sm.sum_right.index(parity))
        # The next tile's first S even runs under this tile's epilogue. The wgmmas have no condition, so that
        # their accumulators stay in place; where there is no next tile or it has no keys, nothing reads them.
        more = tile + step < tiles.end
        mbarrier.wait(sm.q_full, q_phase, pred=more)
        q_phase ^= 1
        go = more & (count > 0)
        s_next = gl.zeros([HEADS, BLOCK], gl.float32, s_layout)
        s_next = scores(s_next, sm, EVEN_LEFT, phase, go, True)
        s_next = scores(s_next, sm, EVEN_RIGHT, phase, go, False)
        write_tile(m, l, acc, sink, output, token, head, stage, sm.seen.index(parity), 0, acc_layout)
        parity ^= 1
        mbarrier.wait(sm.bias_full.index(0), phase, pred=go)
        bias = sm.bias.index(0).load(bias_layout)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        if go:
            named_arrive(ORDER, CONSUMERS)


@gluon.jit
def consume_right(lists, output, tiles, scale, sm):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    stage = sm.odd.reinterpret(sm.k.dtype, [HEADS, PIECE], sm.q.layout)
    phase = 0
    parity = 0  # of the tile, and the phase of q_full
    step = gl.num_programs(0)
    count = lists.count(tiles.token(tiles.first))
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        head = block * HEADS
        pairs = (count + 2 * BLOCK - 1) // (2 * BLOCK)
        count = lists.count(tiles.token(tile + step))
        m = gl.full([HEADS], LOWEST, gl.float32, m_layout)
        l = gl.zeros([HEADS], gl.float32, m_layout)
        acc = gl.zeros([HEADS, HALF], gl.float32, acc_layout)
        mbarrier.wait(sm.q_full, parity)
        for i in range(pairs):
            last = i + 1 == pairs
            m, l, acc = attend_right(m, l, acc, scale, phase, i == 0, last, sm, s_layout, acc_layout)
            phase ^= 1
        arrive_if(sm.q_empty.index(0), pairs == 0)
        arrive_if(sm.q_empty.index(1), pairs == 0)
        sink = output.load_sink(head + gl.arange(0, HEADS, layout=m_layout))
        l = exchange_sums(l, sm.sum_right.index(parity), sm.sum_left.index(parity))
        write_tile(m, l, acc, sink, output, token, head, stage, sm.seen.index(parity), 1, acc_layout)
        parity ^= 1


@gluon.jit
def produce_slot(sm, slot: gl.constexpr, rows, columns, valid, phase):
    """Gathers one slot when it is free, with a full barrier for each piece."""
    mbarrier.wait(sm.k_empty.index(slot), phase ^ 1)
    for piece in gl.static_range(2):
        piece_of_slot = sm.k.index(slot).slice(piece * PIECE, PIECE, 1)
        gather(piece_of_slot, rows + (slot % 2 * HALF + piece * PIECE), columns, valid)
        async_copy.mbarrier_arrive(sm.k_full.index(2 * slot + piece), increment_count=False)


@gluon.jit
def produce(q_ptr, q_stride_t, q_stride_h, num_heads, lists, tables, logit_shift_log2, tiles, sm):
    """Gathers Q and key rows. Indices are loaded one pair ahead, at a tile's end the next tile's first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    q_columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    phase = 0
    parity = 0  # of the tile, and the phase of q_full
    step = gl.num_programs(0)
    span = lists.span(tiles.token(tiles.first))
    index_even = tables.indices(span, r)
    index_odd = tables.indices(span, r + BLOCK)
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        heads = block * HEADS + r
        pairs = (span.count() + 2 * BLOCK - 1) // (2 * BLOCK)
        next_span = lists.span(tiles.token(tile + step))
        q_rows = q_ptr + token.to(gl.int64) * q_stride_t + heads * q_stride_h
        for i in gl.static_range(2):
            # The right half is free first: S odd starts with it.
            mbarrier.wait(sm.q_empty.index(1 - i), parity ^ 1)
            gather(sm.q.index(1 - i), q_rows + (1 - i) * HALF, q_columns, heads < num_heads)
        async_copy.mbarrier_arrive(sm.q_full, increment_count=False)
        seen = gl.zeros_like(r)  # stays unpublished in a tile without keys, whose sums are zero anyway
        if pairs == 0:
            index_even = tables.indices(next_span, r)
            index_odd = tables.indices(next_span, r + BLOCK)
        for i in range(pairs):
            k = i * (2 * BLOCK) + r
            in_prefix_even = k < span.prefix_count
            in_prefix_odd = k + BLOCK < span.prefix_count
            rows_even, valid_even = tables.rows(index_even, in_prefix_even)
            rows_odd, valid_odd = tables.rows(index_odd, in_prefix_odd)
            bias_even = gl.where(valid_even, gl.where(in_prefix_even, 0.0, logit_shift_log2), float("-inf"))
            bias_odd = gl.where(valid_odd, gl.where(in_prefix_odd, 0.0, logit_shift_log2), float("-inf"))
            seen = seen | (valid_even | valid_odd).to(gl.int32)
            last = i + 1 == pairs
            k_next = gl.where(last, 0, (i + 1) * (2 * BLOCK)) + r
            span_next = span.replaced_if(last, next_span)
            index_even = tables.indices(span_next, k_next)
            index_odd = tables.indices(span_next, k_next + BLOCK)
            produce_slot(sm, EVEN_LEFT, rows_even, columns, valid_even, phase)
            sm.bias.index(0).store(bias_even)
            # Published by the even bias; a tile of the same parity finds it free, since q_empty lies between.
            sm.seen.index(parity).store(seen.to(gl.int8))
            arrive(sm.bias_full.index(0))
            produce_slot(sm, EVEN_RIGHT, rows_even, columns, valid_even, phase)
            produce_slot(sm, ODD_RIGHT, rows_odd, columns, valid_odd, phase)
            sm.bias.index(1).store(bias_odd)
            arrive(sm.bias_full.index(1))
            produce_slot(sm, ODD_LEFT, rows_odd, columns, valid_odd, phase)
            phase ^= 1
        span = next_span
        parity ^= 1


@gluon.jit
def sparse_paged_prefill_wide(
    q_ptr,  # [T, H, 512], strides q_stride_t, q_stride_h, 1
    unified_kv_ptr,  # [unified_kv_rows, 512], strides unified_kv_stride_n, 1
    kv_indices_prefix_ptr,  # [kv_indices_prefix_len] int32
    kv_indptr_prefix_ptr,  # [T + 1] int32
    kv_ptr,  # [kv_rows, 512], strides kv_stride_n, 1
    kv_indices_extend_ptr,  # [kv_indices_extend_len] int32
    kv_indptr_extend_ptr,  # [T + 1] int32
    attn_sink_ptr,  # [H] fp32, null when has_sink is 0
    out_ptr,  # [T, H, 512] contiguous; may be q: a tile's Q is read before its output is written
    lse_ptr,  # [T, H] fp32 contiguous, null when has_lse is 0
    q_stride_t,
    q_stride_h,
    unified_kv_stride_n,
    kv_stride_n,
    num_heads,
    unified_kv_rows,
    kv_rows,
    kv_indices_prefix_len,
    kv_indices_extend_len,
    has_sink,
    has_lse,
    num_tiles,
    first_tile,
    softmax_scale_log2,
    logit_shift_log2,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sm = Shared(
        q=gl.allocate_shared_memory(dtype, [2, HEADS, HALF], tile_layout),
        k=gl.allocate_shared_memory(dtype, [4, BLOCK, HALF], tile_layout),
        even=gl.allocate_shared_memory(dtype, [2, HEADS, BLOCK], tile_layout),
        odd=gl.allocate_shared_memory(dtype, [2, HEADS, BLOCK], tile_layout),
        bias=gl.allocate_shared_memory(gl.float32, [2, BLOCK], flat),
        seen=gl.allocate_shared_memory(gl.int8, [2, BLOCK], flat),
        maximum_even=gl.allocate_shared_memory(gl.float32, [HEADS], flat),
        maximum_odd=gl.allocate_shared_memory(gl.float32, [HEADS], flat),
        sum_left=gl.allocate_shared_memory(gl.float32, [2, HEADS], flat),
        sum_right=gl.allocate_shared_memory(gl.float32, [2, HEADS], flat),
        q_full=mbarrier.allocate_mbarrier(),
        q_empty=mbarrier.allocate_mbarrier(batch=2),
        k_full=mbarrier.allocate_mbarrier(batch=8),
        k_empty=mbarrier.allocate_mbarrier(batch=4),
        bias_full=mbarrier.allocate_mbarrier(batch=2),
    )
    mbarrier.init(sm.q_full, count=128)
    for i in gl.static_range(2):
        mbarrier.init(sm.q_empty.index(i), count=8)
    for i in gl.static_range(8):
        mbarrier.init(sm.k_full.index(i), count=128)
    for i in gl.static_range(4):
        mbarrier.init(sm.k_empty.index(i), count=4)
    for i in gl.static_range(2):
        mbarrier.init(sm.bias_full.index(i), count=4)
    gl.barrier()
    tiles = tiles_of(num_heads, HEADS, first_tile, num_tiles)
    lists = Lists(kv_indptr_prefix_ptr, kv_indptr_extend_ptr, kv_indices_prefix_len, kv_indices_extend_len)
    tables = Tables(
        kv_indices_prefix_ptr,
        kv_indices_extend_ptr,
        unified_kv_ptr,
        kv_ptr,
        unified_kv_stride_n,
        kv_stride_n,
        unified_kv_rows,
        kv_rows,
    )
    output = Output(out_ptr, lse_ptr, attn_sink_ptr, num_heads, has_lse, has_sink, logit_shift_log2)
    gl.warp_specialize(
        [
            (consume_left, (lists, output, tiles, softmax_scale_log2, sm)),
            (consume_right, (lists, output, tiles, softmax_scale_log2, sm)),
            (produce, (q_ptr, q_stride_t, q_stride_h, num_heads, lists, tables, logit_shift_log2, tiles, sm)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
