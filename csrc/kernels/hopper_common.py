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
class Lists:
    """The CSR bounds of the prefix and extend lists, and the tiles that they are read for."""

    indptr_prefix_ptr: gl.tensor
    indptr_extend_ptr: gl.tensor
    prefix_len: gl.tensor
    extend_len: gl.tensor
    head_blocks: gl.tensor
    num_tiles: gl.tensor

    @gluon.jit
    def span(self, tile):
        """The keys of a tile's token; past the end the last tile's, so that prefetches need no guard."""
        t = gl.minimum(tile, self.num_tiles - 1) // self.head_blocks
        prefix_begin, prefix_count = list_bounds(self.indptr_prefix_ptr, t, self.prefix_len)
        extend_begin, extend_count = list_bounds(self.indptr_extend_ptr, t, self.extend_len)
        return Span(prefix_begin, prefix_count, extend_begin, extend_count)

    @gluon.jit
    def count(self, tile):
        return self.span(tile).count()


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
    def store_lse(self, t, heads, lse):
        use = (heads < self.num_heads) & (self.has_lse != 0)
        gl.store(self.lse_ptr + t * self.num_heads + heads, lse, mask=use)

    @gluon.jit
    def store_rows(self, t, heads, columns, rows, D: gl.constexpr):
        pointers = self.out_ptr + (t * self.num_heads + heads)[:, None] * D + columns[None, :]
        gl.store(gl.multiple_of(pointers, (1, 16)), rows, mask=(heads < self.num_heads)[:, None])


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


@gluon.jit
def close_softmax(m, l, sink):
    """From maximum, sum and sink logit: the factor from accumulated rows to outputs, and the natural-log lse.

    Without a row and a sink they are 0 and -inf. A sink of +inf takes all the weight, and NaN in l stays.
    """
    top = gl.maximum(m, gl.minimum(sink, -LOWEST))
    weight = gl.exp2(m - top)
    total = l * weight + gl.exp2(sink - top)
    return gl.where(total == 0.0, 0.0, weight / total), (top + gl.log2(total)) * LN_2


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
def _barrier_ptx(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads};"


@gluon.jit
def named_sync(barrier: gl.constexpr, threads: gl.constexpr):
    gl.inline_asm(_barrier_ptx("sync", barrier, threads), "~{memory}", (), (), False)


@gluon.jit
def named_arrive(barrier: gl.constexpr, threads: gl.constexpr):
    gl.inline_asm(_barrier_ptx("arrive", barrier, threads), "~{memory}", (), (), False)


@gluon.jit
def opaque_zero():
    """A zero that LLVM cannot see through and ptxas folds.

    Indexing shared memory with it just before each wgmma keeps LLVM from hoisting and spilling descriptors.
    """
    return gl.inline_asm("mov.u32 $0, 0;", "=r", (), gl.int32, False)


@gluon.jit
def wgmma_wait_one():
    """Waits for all but the newest wgmma group; unlike warpgroup_mma_wait, it closes no accumulator."""
    gl.inline_asm("wgmma.wait_group.sync.aligned 1;", "~{memory}", (), (), False)
