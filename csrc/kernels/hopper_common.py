"""What the wide and the narrow SM90 kernel share: the keys of a token, the lazy softmax, named barriers.

Logits are in the log2 domain throughout: exp2 is the hardware's exponential, and the conversion is part of
softmax_scale_log2 and logit_shift_log2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# The running maximum starts at the lowest finite float: -inf - (-inf) would be NaN in a block of holes.
LOWEST = gl.constexpr(-3.4028234663852886e38)
# A running maximum moves only when it is exceeded by more than this. Probabilities then reach 2^8 at most,
# which fp16 holds, and most blocks need no rescale of the accumulators.
LAZY_STEP = gl.constexpr(8.0)
# More keys than a list can hold in memory; keeps the 32-bit counts of two lists from wrapping.
MOST_KEYS = gl.constexpr((1 << 30) - 128)


@gluon.aggregate
class Span:
    """The entries of one token's two lists: begin and number of each."""

    prefix_begin: gl.tensor
    prefix_count: gl.tensor
    extend_begin: gl.tensor
    extend_count: gl.tensor

    @gluon.jit
    def count(self):
        return self.prefix_count + self.extend_count

    @gluon.jit
    def replaced_if(self, condition, other):
        return Span(
            gl.where(condition, other.prefix_begin, self.prefix_begin),
            gl.where(condition, other.prefix_count, self.prefix_count),
            gl.where(condition, other.extend_begin, self.extend_begin),
            gl.where(condition, other.extend_count, self.extend_count),
        )


@gluon.aggregate
class Tiles:
    """The tiles of a launch: tile = token * head_blocks + block of heads; first is this CTA's."""

    head_blocks: gl.tensor
    reciprocal: gl.tensor  # floor((2^32 - 1) / head_blocks)
    first: gl.tensor
    end: gl.tensor

    @gluon.jit
    def place(self, tile):
        """Token and block of a tile: a division by the reciprocal, which is short by one at most."""
        token = gl.umulhi(tile.to(gl.uint32, bitcast=True), self.reciprocal).to(gl.int32, bitcast=True)
        block = tile - token * self.head_blocks
        short = block >= self.head_blocks
        return token + short.to(gl.int32), gl.where(short, block - self.head_blocks, block)

    @gluon.jit
    def token(self, tile):
        """The token of a tile; past the end the last tile's, so that prefetches need no guard."""
        token, _ = self.place(gl.minimum(tile, self.end - 1))
        return token


@gluon.jit
def tiles_of(num_heads, heads_a_tile: gl.constexpr, first_tile, num_tiles):
    head_blocks = (num_heads + heads_a_tile - 1) // heads_a_tile
    reciprocal = gl.to_tensor(0xFFFFFFFF).to(gl.uint32) // head_blocks.to(gl.uint32, bitcast=True)
    return Tiles(head_blocks, reciprocal, first_tile + gl.program_id(0), num_tiles)


@gluon.aggregate
class Lists:
    """The CSR bounds of the prefix and extend lists."""

    indptr_prefix_ptr: gl.tensor
    indptr_extend_ptr: gl.tensor
    prefix_len: gl.tensor
    extend_len: gl.tensor

    @gluon.jit
    def span(self, token):
        prefix_begin, prefix_count = list_bounds(self.indptr_prefix_ptr, token, self.prefix_len)
        extend_begin, extend_count = list_bounds(self.indptr_extend_ptr, token, self.extend_len)
        return Span(prefix_begin, prefix_count, extend_begin, extend_count)

    @gluon.jit
    def count(self, token):
        return self.span(token).count()


@gluon.aggregate
class Tables:
    """The rows that the list entries name, and the entries."""

    indices_prefix_ptr: gl.tensor
    indices_extend_ptr: gl.tensor
    unified_kv_ptr: gl.tensor
    kv_ptr: gl.tensor
    unified_kv_stride_n: gl.tensor
    kv_stride_n: gl.tensor
    unified_kv_rows: gl.tensor
    kv_rows: gl.tensor

    @gluon.jit
    def indices(self, span, k):
        """Entries k of the concatenated lists, -1 past their end; one load from a selected pointer."""
        prefix = self.indices_prefix_ptr + (span.prefix_begin + k)
        extend = self.indices_extend_ptr + (span.extend_begin + (k - span.prefix_count))
        return gl.load(gl.where(k < span.prefix_count, prefix, extend), mask=k < span.count(), other=-1)

    @gluon.jit
    def rows(self, index, in_prefix):
        """Row pointers, and whether each is inside its table."""
        valid = (index >= 0) & (index < gl.where(in_prefix, self.unified_kv_rows, self.kv_rows))
        prefix = self.unified_kv_ptr + index.to(gl.int64) * self.unified_kv_stride_n
        extend = self.kv_ptr + index.to(gl.int64) * self.kv_stride_n
        return gl.where(in_prefix, prefix, extend), valid


@gluon.aggregate
class Output:
    """Where a tile's result goes, and the sink that takes part in it."""

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    attn_sink_ptr: gl.tensor
    num_heads: gl.tensor
    has_lse: gl.tensor
    has_sink: gl.tensor
    logit_shift_log2: gl.tensor

    @gluon.jit
    def load_sink(self, heads):
        use = (heads < self.num_heads) & (self.has_sink != 0)
        sink = gl.load(self.attn_sink_ptr + heads, mask=use, other=float("-inf"))
        return sink * LOG2_E + self.logit_shift_log2

    @gluon.jit
    def store_lse(self, token, heads, m, l, sink):
        """The natural log of the sum of all weights; nothing of it is computed when it is not asked for."""
        if self.has_lse != 0:
            top, _, total = close_softmax(m, l, sink)
            lse = (top + log2(total)) * LN_2
            pointers = self.lse_ptr + token.to(gl.int64) * self.num_heads + heads
            gl.store(pointers, lse, mask=heads < self.num_heads)

    @gluon.jit
    def store_rows(self, token, head, r, columns, rows, D: gl.constexpr):
        """Stores heads head + r of a token, off one 64-bit address."""
        r = r + opaque_zero()  # keeps LLVM from carrying the offsets of all rows in registers across tiles
        base = self.out_ptr + (token.to(gl.int64) * self.num_heads + head) * D
        pointers = base + (r.to(gl.int64)[:, None] * D + columns[None, :])
        gl.store(gl.multiple_of(pointers, (1, 16)), rows, mask=(head + r < self.num_heads)[:, None])


@gluon.jit
def list_bounds(indptr_ptr, t, length):
    """First entry and length of token t's list, clamped to [0, length]; an end before its start is empty."""
    begin = gl.minimum(gl.maximum(gl.load(indptr_ptr + t), 0), length)
    end = gl.minimum(gl.maximum(gl.load(indptr_ptr + t + 1), 0), length)
    return begin, gl.minimum(gl.maximum(end - begin, 0), MOST_KEYS)


@gluon.jit
def gather(destination, rows, columns, valid):
    """Asynchronous copy of row pieces in 16-byte units; zeros where a row is not valid.

    The zeros matter: a stale NaN in a row of probability zero would reach the output as 0 * NaN.
    The sum of pointers is formed inside the call; kept in a variable it loses its contiguity.
    """
    pointers = gl.multiple_of(rows[:, None] + columns[None, :], (1, 16))
    async_copy.async_load(destination, pointers, mask=valid[:, None])


@gluon.constexpr_function
def _log2_ptx(outputs, inputs):
    return " ".join(f"lg2.approx.ftz.f32 {y}, {x};" for y, x in zip(outputs[0], inputs[0], strict=True))


@gluon.constexpr_function
def _reciprocal_ptx(outputs, inputs):
    return " ".join(f"rcp.approx.ftz.f32 {y}, {x};" for y, x in zip(outputs[0], inputs[0], strict=True))


@gluon.jit
def log2(x):
    """The hardware's logarithm: within 2^-22, far below the error of a sum of bf16 products."""
    return gl.inline_asm(_log2_ptx, ("=f", "f"), (x,), x.type, True)


@gluon.jit
def close_softmax(m, l, sink):
    """From maximum, sum and sink logit: the larger logit, the factor of l to it, and the sum with the sink.

    A sink of +inf takes all the weight, and NaN in l stays. The sum is 0 without a row and a sink, else at
    least 1.
    """
    top = gl.maximum(m, gl.minimum(sink, -LOWEST))
    weight = gl.exp2(m - top)
    return top, weight, l * weight + gl.exp2(sink - top)


@gluon.jit
def output_factor(m, l, sink):
    """The factor from accumulated rows to outputs; 0 without a row and a sink."""
    _, weight, total = close_softmax(m, l, sink)
    reciprocal = gl.inline_asm(_reciprocal_ptx, ("=f", "f"), (total,), total.type, True)
    return gl.where(total == 0.0, 0.0, weight * reciprocal)


@gluon.constexpr_function
def any_ptx(outputs, inputs, compare, threshold, vote):
    """PTX: compares a thread's registers with a threshold and ors the answers of the voting threads."""
    result, values = outputs[0][0], inputs[0]
    lines = ["{ .reg .pred mine, any;", f"setp.{compare}.f32 mine, {values[0]}, {threshold};"]
    lines += [f"setp.{compare}.or.f32 mine, {value}, {threshold}, mine;" for value in values[1:]]
    return " ".join([*lines, vote, f"selp.u32 {result}, 1, 0, any; }}"])


@gluon.constexpr_function
def _any_not_one(outputs, inputs):
    return any_ptx(outputs, inputs, "neu", "0f3F800000", "vote.sync.any.pred any, mine, -1;")


@gluon.jit
def any_not_one(factors):
    """Whether a factor of this warp differs from 1. Skipping a rescale by exactly 1 does not change bits."""
    return gl.inline_asm(_any_not_one, ("=r", "f"), (factors,), gl.int32, False) != 0


@gluon.constexpr_function
def _any_nan(outputs, inputs):
    return any_ptx(outputs, inputs, "nan", "0f00000000", "vote.sync.any.pred any, mine, -1;")


@gluon.jit
def any_nan(x):
    """Whether an element of this warp is NaN."""
    return gl.inline_asm(_any_nan, ("=r", "f"), (x,), gl.int32, False) != 0


@gluon.constexpr_function
def _barrier_ptx(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads};"


@gluon.jit
def named_sync(barrier: gl.constexpr, threads: gl.constexpr):
    gl.inline_asm(_barrier_ptx("sync", barrier, threads), "~{memory}", (), (), False)


@gluon.jit
def named_arrive(barrier: gl.constexpr, threads: gl.constexpr):
    gl.inline_asm(_barrier_ptx("arrive", barrier, threads), "~{memory}", (), (), False)


@gluon.jit
def arrive(barrier):
    """One arrival of each warp; mbarrier.arrive has one of the warpgroup, behind a barrier of its warps."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; bar.warp.sync -1;"
        " @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        (barrier,),
        (),
        False,
    )


@gluon.jit
def arrive_if(barrier, condition):
    """The same where a condition of the whole warpgroup holds."""
    gl.inline_asm(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; setp.ne.and.u32 p, $1, 0, p;"
        " bar.warp.sync -1; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,r,~{memory}",
        (barrier, condition.to(gl.int32)),
        (),
        False,
    )


@gluon.jit
def opaque_zero():
    """A zero that LLVM cannot see through and ptxas folds.

    Indexing shared memory with it just before each wgmma keeps LLVM from hoisting and spilling descriptors.
    """
    return gl.inline_asm("mov.u32 $0, 0;", "=r", (), gl.int32, False)


@gluon.constexpr_function
def _wgmma_wait_ptx(newest):
    return f"wgmma.wait_group.sync.aligned {newest};"


@gluon.jit
def wgmma_wait_all_but(newest: gl.constexpr):
    """Waits for all but the newest wgmma groups; warpgroup_mma_wait would close an accumulator."""
    gl.inline_asm(_wgmma_wait_ptx(newest), "~{memory}", (), (), False)
