"""SM90 kernel for 32 heads and fewer: tiles of 8, 16 or 32 heads, D = 512.

A persistent CTA of three warpgroups walks tiles (a token and HEADS of its heads): the first scores, the
second makes the output, the third gathers key rows in blocks of 64. The heads are on the matrix unit's N
side, and rows stay where they are gathered: S^T [64, HEADS] = K Q^T by wgmma, O^T [512, HEADS] += K^T P^T.

The second product is mma.sync with transposing shared-memory loads for 8 and 16 heads, since a wgmma of N <
64 takes as long as one of N = 64; at 32 heads it is wgmma, in two halves of the keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from csrc.kernels.hopper_common import (
    LAZY_STEP,
    LOWEST,
    Lists,
    Output,
    Tables,
    any_not_one,
    any_ptx,
    arrive,
    gather,
    output_factor,
    tiles_of,
    wgmma_wait_all_but,
)

# STAGES: buffers of 64 rows. WEIGHT_STAGES: buffers of P; at 16 heads shared memory has no room for two.
# Registers of a thread of the output and of the producer warpgroup; the scoring warpgroup has the rest.
CONFIGS = {
    8: {"STAGES": 3, "WEIGHT_STAGES": 2, "OUTPUT_REGISTERS": 152, "PRODUCER_REGISTERS": 128},
    16: {"STAGES": 3, "WEIGHT_STAGES": 1, "OUTPUT_REGISTERS": 152, "PRODUCER_REGISTERS": 128},
    32: {"STAGES": 2, "WEIGHT_STAGES": 2, "OUTPUT_REGISTERS": 184, "PRODUCER_REGISTERS": 128},
}

D = gl.constexpr(512)
BLOCK = gl.constexpr(64)  # keys of a stage
PART = gl.constexpr(32)  # keys of a stage that the producer gets back at once
STEP = gl.constexpr(16)  # keys of one mma.sync

# What the producer knows of a key, in one byte.
HOLE = gl.constexpr(-1)
PREFIX = gl.constexpr(0)
EXTEND = gl.constexpr(1)

VOTE_BARRIER = 10  # named barrier of the scoring warpgroup alone; Triton itself uses numbers 0 to 3


def constexprs(spec):
    return {"HEADS": spec.head_tile, **CONFIGS[spec.head_tile]}


@gluon.aggregate
class Ring:
    """A position in a ring of buffers, and the parity of the rounds made.

    The parity is the phase to wait for of the buffer's full barrier; for its empty barrier it is the other.
    """

    index: gl.tensor
    phase: gl.tensor
    size: gl.constexpr

    @gluon.jit
    def next(self):
        end = self.index + 1 == self.size
        return Ring(gl.where(end, 0, self.index + 1), gl.where(end, self.phase ^ 1, self.phase), self.size)


@gluon.jit
def ring(size: gl.constexpr):
    return Ring(gl.to_tensor(0), gl.to_tensor(0), size)


@gluon.aggregate
class Shared:
    """Shared memory and mbarriers.

    A phase is one tile of q, one block of k and kind, and of p one block or one tile's end, when the factors
    of the output take the place of alpha.
    """

    q: gl.shared_memory_descriptor  # [2, HEADS, D]; holds the tile's output once its scores are done
    k: gl.shared_memory_descriptor  # [STAGES, BLOCK, D]
    p: gl.shared_memory_descriptor  # [WEIGHT_STAGES, BLOCK, HEADS]
    kind: gl.shared_memory_descriptor  # [STAGES, BLOCK] int8: HOLE, PREFIX or EXTEND
    alpha: gl.shared_memory_descriptor  # [WEIGHT_STAGES, HEADS] fp32: the factor of O before P is added
    q_full: gl.shared_memory_descriptor  # [2]: the producer's 128 threads' copies arrive, the scores wait
    q_empty: gl.shared_memory_descriptor  # [2]: the output arrives, its tile stored, the producer waits
    k_full: gl.shared_memory_descriptor  # [STAGES]: the producer's 128 threads' copies arrive, the scores
    # wait; the output waits after them, through p_full
    k_empty: gl.shared_memory_descriptor  # [2 * STAGES], by PART: the output arrives, the producer waits
    kind_full: gl.shared_memory_descriptor  # [STAGES]: the producer arrives, the scores wait
    p_full: gl.shared_memory_descriptor  # [WEIGHT_STAGES]: the scores' four warps arrive, the output waits
    p_empty: gl.shared_memory_descriptor  # [WEIGHT_STAGES]: the output arrives, the scores wait


@gluon.constexpr_function
def _any_above_step(outputs, inputs):
    vote = f"barrier.cta.red.or.pred any, {VOTE_BARRIER}, 128, mine;"
    return any_ptx(outputs, inputs, "gt", "0f41000000", vote)


@gluon.jit
def any_above_step(d):
    """Whether any element is above LAZY_STEP: one barrier vote in place of a maximum across warps."""
    return gl.inline_asm(_any_above_step, ("=r", "f"), (d,), gl.int32, False) != 0


@gluon.jit
def score(lists, output, tiles, scale, sm, HEADS: gl.constexpr, STAGES: gl.constexpr, WEIGHT_STAGES: gl.constexpr):
    """S^T = K Q^T and its softmax: hands P^T and the rescale factors to the output, and stores lse."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    k_ring = ring(STAGES)
    p_ring = ring(WEIGHT_STAGES)
    q_ring = ring(2)
    step = gl.num_programs(0)
    count = lists.count(tiles.token(tiles.first))
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        heads = block * HEADS + gl.arange(0, HEADS, layout=head_layout)
        blocks = (count + BLOCK - 1) // BLOCK
        count = lists.count(tiles.token(tile + step))
        sink = output.load_sink(heads)
        m = gl.full([HEADS], LOWEST, gl.float32, head_layout)
        l_parts = gl.zeros([BLOCK, HEADS], gl.float32, layout)  # summed over keys once, at the tile's end
        mbarrier.wait(sm.q_full.index(q_ring.index), q_ring.phase)
        for _ in range(blocks):
            mbarrier.wait(sm.kind_full.index(k_ring.index), k_ring.phase)
            kind = sm.kind.index(k_ring.index).load(gl.SliceLayout(1, layout))
            shift = gl.where(kind == EXTEND, output.logit_shift_log2, 0.0)
            mbarrier.wait(sm.k_full.index(k_ring.index), k_ring.phase)
            q = sm.q.index(q_ring.index).permute((1, 0))
            s = gl.zeros([BLOCK, HEADS], gl.float32, layout)
            s = warpgroup_mma(sm.k.index(k_ring.index), q, s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            # A select, not an added -inf: a hole stays a hole for a query that holds NaN or infinity.
            s = gl.where((kind != HOLE)[:, None], s * scale + shift[:, None], float("-inf"))
            alpha = gl.full([HEADS], 1.0, gl.float32, head_layout)
            d = s - m[None, :]
            if any_above_step(d):
                m_block = gl.max(s, 0)
                m_new = gl.where(m_block > m + LAZY_STEP, m_block, m)
                alpha = gl.exp2(m - m_new)
                m = m_new
                d = s - m[None, :]
                l_parts = l_parts * alpha[None, :]
            p = gl.exp2(d)
            mbarrier.wait(sm.p_empty.index(p_ring.index), p_ring.phase ^ 1)
            sm.p.index(p_ring.index).store(p.to(sm.k.dtype))
            sm.alpha.index(p_ring.index).store(alpha)
            if HEADS == 32:  # read by wgmma
                fence_async_shared()
            arrive(sm.p_full.index(p_ring.index))
            p_ring = p_ring.next()
            l_parts = l_parts + p
            k_ring = k_ring.next()
        l = gl.sum(l_parts, 0)
        factor = output_factor(m, l, sink)
        mbarrier.wait(sm.p_empty.index(p_ring.index), p_ring.phase ^ 1)
        sm.alpha.index(p_ring.index).store(factor)
        arrive(sm.p_full.index(p_ring.index))
        output.store_lse(token, heads, m, l, sink)
        p_ring = p_ring.next()
        q_ring = q_ring.next()


@gluon.jit
def accumulate_wgmma(acc, k, p, k_empty, p_empty, stage):
    """O^T += K^T P^T in two halves of the keys, each given back to the producer as soon as it is read."""
    for part in gl.static_range(2):
        k_part = k.slice(part * PART, PART, 0).permute((1, 0))
        acc = warpgroup_mma(k_part, p.slice(part * PART, PART, 0), acc, is_async=True)
    wgmma_wait_all_but(1)
    mbarrier.arrive(k_empty.index(2 * stage))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(k_empty.index(2 * stage + 1))
    mbarrier.arrive(p_empty)
    return acc


@gluon.jit
def accumulate_mma(acc, k, p, k_empty, p_empty, stage, layout: gl.constexpr):
    """The same by mma.sync, 16 keys a step; a part is given back once its last rows are in registers."""
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    p0 = p.slice(0 * STEP, STEP, 0).load(b_layout)
    p1 = p.slice(1 * STEP, STEP, 0).load(b_layout)
    p2 = p.slice(2 * STEP, STEP, 0).load(b_layout)
    p3 = p.slice(3 * STEP, STEP, 0).load(b_layout)
    acc = mma_v2(k.slice(0 * STEP, STEP, 0).permute((1, 0)).load(a_layout), p0, acc)
    k1 = k.slice(1 * STEP, STEP, 0).permute((1, 0)).load(a_layout)
    mbarrier.arrive(k_empty.index(2 * stage))
    mbarrier.arrive(p_empty)
    acc = mma_v2(k1, p1, acc)
    acc = mma_v2(k.slice(2 * STEP, STEP, 0).permute((1, 0)).load(a_layout), p2, acc)
    k3 = k.slice(3 * STEP, STEP, 0).permute((1, 0)).load(a_layout)
    mbarrier.arrive(k_empty.index(2 * stage + 1))
    return mma_v2(k3, p3, acc)


@gluon.jit
def accumulate(lists, output, tiles, sm, HEADS: gl.constexpr, STAGES: gl.constexpr, WEIGHT_STAGES: gl.constexpr):
    """O^T = O^T * alpha + K^T P^T, and the tile's output through its Q buffer for whole 16-byte rows."""
    wgmma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    layout: gl.constexpr = wgmma_layout if HEADS == 32 else mma_layout
    head_layout: gl.constexpr = gl.SliceLayout(0, layout)
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    k_ring = ring(STAGES)
    p_ring = ring(WEIGHT_STAGES)
    q_ring = ring(2)
    step = gl.num_programs(0)
    count = lists.count(tiles.token(tiles.first))
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        head = block * HEADS
        blocks = (count + BLOCK - 1) // BLOCK
        count = lists.count(tiles.token(tile + step))
        acc = gl.zeros([D, HEADS], gl.float32, layout)
        for _ in range(blocks):
            mbarrier.wait(sm.p_full.index(p_ring.index), p_ring.phase)
            alpha = sm.alpha.index(p_ring.index).load(head_layout)
            if any_not_one(alpha):
                acc = acc * alpha[None, :]
            k = sm.k.index(k_ring.index)
            p = sm.p.index(p_ring.index)
            p_empty = sm.p_empty.index(p_ring.index)
            if HEADS == 32:
                acc = accumulate_wgmma(acc, k, p, sm.k_empty, p_empty, k_ring.index)
            else:
                acc = accumulate_mma(acc, k, p, sm.k_empty, p_empty, k_ring.index, layout)
            p_ring = p_ring.next()
            k_ring = k_ring.next()
        mbarrier.wait(sm.p_full.index(p_ring.index), p_ring.phase)
        factor = sm.alpha.index(p_ring.index).load(head_layout)
        out = (acc * factor[None, :]).to(sm.k.dtype)
        mbarrier.arrive(sm.p_empty.index(p_ring.index))
        p_ring = p_ring.next()
        stage = sm.q.index(q_ring.index)
        stage.permute((1, 0)).store(out)
        r = gl.arange(0, HEADS, layout=gl.SliceLayout(1, store_layout))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, store_layout))
        output.store_rows(token, head, r, columns, stage.load(store_layout), D)
        mbarrier.arrive(sm.q_empty.index(q_ring.index))
        q_ring = q_ring.next()


@gluon.jit
def produce_part(sm, part: gl.constexpr, stage, phase, rows, valid, in_prefix, columns):
    """Gathers 32 rows into their part of a stage when it is free, and notes what the keys are."""
    mbarrier.wait(sm.k_empty.index(2 * stage + part), phase ^ 1)
    gather(sm.k.index(stage).slice(part * PART, PART, 0), rows, columns, valid)
    kind = gl.where(valid, gl.where(in_prefix, PREFIX, EXTEND), HOLE)
    sm.kind.index(stage).slice(part * PART, PART, 0).store(kind.to(gl.int8))


@gluon.jit
def produce(
    q_ptr,
    q_stride_t,
    q_stride_h,
    num_heads,
    lists,
    tables,
    tiles,
    sm,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Gathers Q and key rows. Indices are loaded one block ahead, at a tile's end the next tile's first."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    r = gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    q_columns = gl.arange(0, D, layout=gl.SliceLayout(0, q_layout))
    k_ring = ring(STAGES)
    q_ring = ring(2)
    step = gl.num_programs(0)
    span = lists.span(tiles.token(tiles.first))
    index0 = tables.indices(span, r)
    index1 = tables.indices(span, r + PART)
    for tile in range(tiles.first, tiles.end, step):
        token, block = tiles.place(tile)
        heads = block * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, q_layout))
        blocks = (span.count() + BLOCK - 1) // BLOCK
        next_span = lists.span(tiles.token(tile + step))
        mbarrier.wait(sm.q_empty.index(q_ring.index), q_ring.phase ^ 1)
        q_rows = q_ptr + token.to(gl.int64) * q_stride_t + heads * q_stride_h
        gather(sm.q.index(q_ring.index), q_rows, q_columns, heads < num_heads)
        async_copy.mbarrier_arrive(sm.q_full.index(q_ring.index), increment_count=False)
        q_ring = q_ring.next()
        if blocks == 0:
            index0 = tables.indices(next_span, r)
            index1 = tables.indices(next_span, r + PART)
        for i in range(blocks):
            k = i * BLOCK + r
            in_prefix0 = k < span.prefix_count
            in_prefix1 = k + PART < span.prefix_count
            rows0, valid0 = tables.rows(index0, in_prefix0)
            rows1, valid1 = tables.rows(index1, in_prefix1)
            last = i + 1 == blocks
            k_next = gl.where(last, 0, (i + 1) * BLOCK) + r
            span_next = span.replaced_if(last, next_span)
            index0 = tables.indices(span_next, k_next)
            index1 = tables.indices(span_next, k_next + PART)
            produce_part(sm, 0, k_ring.index, k_ring.phase, rows0, valid0, in_prefix0, columns)
            produce_part(sm, 1, k_ring.index, k_ring.phase, rows1, valid1, in_prefix1, columns)
            async_copy.mbarrier_arrive(sm.k_full.index(k_ring.index), increment_count=False)
            mbarrier.arrive(sm.kind_full.index(k_ring.index))
            k_ring = k_ring.next()
        span = next_span


@gluon.jit
def sparse_paged_prefill_narrow(
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
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHT_STAGES: gl.constexpr,
    OUTPUT_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    row_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * HEADS if HEADS > 8 else 0, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sm = Shared(
        q=gl.allocate_shared_memory(dtype, [2, HEADS, D], row_layout),
        k=gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], row_layout),
        p=gl.allocate_shared_memory(dtype, [WEIGHT_STAGES, BLOCK, HEADS], p_layout),
        kind=gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK], flat),
        alpha=gl.allocate_shared_memory(gl.float32, [WEIGHT_STAGES, HEADS], flat),
        q_full=mbarrier.allocate_mbarrier(batch=2),
        q_empty=mbarrier.allocate_mbarrier(batch=2),
        k_full=mbarrier.allocate_mbarrier(batch=STAGES),
        k_empty=mbarrier.allocate_mbarrier(batch=2 * STAGES),
        kind_full=mbarrier.allocate_mbarrier(batch=STAGES),
        p_full=mbarrier.allocate_mbarrier(batch=WEIGHT_STAGES),
        p_empty=mbarrier.allocate_mbarrier(batch=WEIGHT_STAGES),
    )
    for i in gl.static_range(2):
        mbarrier.init(sm.q_full.index(i), count=128)
        mbarrier.init(sm.q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(sm.k_full.index(i), count=128)
        mbarrier.init(sm.k_empty.index(2 * i), count=1)
        mbarrier.init(sm.k_empty.index(2 * i + 1), count=1)
        mbarrier.init(sm.kind_full.index(i), count=1)
    for i in gl.static_range(WEIGHT_STAGES):
        mbarrier.init(sm.p_full.index(i), count=4)
        mbarrier.init(sm.p_empty.index(i), count=1)
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
            (score, (lists, output, tiles, softmax_scale_log2, sm, HEADS, STAGES, WEIGHT_STAGES)),
            (accumulate, (lists, output, tiles, sm, HEADS, STAGES, WEIGHT_STAGES)),
            (produce, (q_ptr, q_stride_t, q_stride_h, num_heads, lists, tables, tiles, sm, HEADS, STAGES)),
        ],
        [4, 4],
        [OUTPUT_REGISTERS, PRODUCER_REGISTERS],
    )
