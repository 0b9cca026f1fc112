"""Inputs for the operator, by name. The reference, the interpreter and the GPU tests all draw from here.

Every case is poisoned: rows that no list names are NaN, and so are the ends of the index lists that no token owns
(they name such rows). A kernel that touches what it must not shows it in the result.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import torch

from paged_prefill import _workload

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
HOSTILE_TAIL = (0, INT32_MAX, -1, 1, INT32_MIN, 2, 3)


@dataclass(frozen=True)
class Case:
    """One call. Fields are the operator's arguments, in its order."""

    name: str
    q: torch.Tensor
    unified_kv: torch.Tensor
    kv_indices_prefix: torch.Tensor
    kv_indptr_prefix: torch.Tensor
    kv: torch.Tensor
    kv_indices_extend: torch.Tensor
    kv_indptr_extend: torch.Tensor
    attn_sink: torch.Tensor | None
    softmax_scale: float
    replicated_logit_shift: float = 0.0

    def args(self):
        """The nine positional arguments that both operators and the reference share."""
        return (
            self.q,
            self.unified_kv,
            self.kv_indices_prefix,
            self.kv_indptr_prefix,
            self.kv,
            self.kv_indices_extend,
            self.kv_indptr_extend,
            self.attn_sink,
            self.softmax_scale,
        )

    def with_(self, **changes):
        return replace(self, **changes)

    def take(self, start, end):
        """Tokens [start, end) alone: the lists stay whole, so that indptr begins above zero."""
        return replace(
            self,
            q=self.q[start:end],
            kv_indptr_prefix=self.kv_indptr_prefix[start : end + 1],
            kv_indptr_extend=self.kv_indptr_extend[start : end + 1],
        )


def csr(lists, device="cpu", head=(), tail=()):
    """(indices, indptr) in int32; `head` and `tail` are entries that belong to no token."""
    flat, indptr = list(head), [len(head)]
    for one in lists:
        flat += one
        indptr.append(len(flat))
    return (
        torch.tensor([*flat, *tail], dtype=torch.int32, device=device),
        torch.tensor(indptr, dtype=torch.int32, device=device),
    )


def poison(table, indices, indptr):
    """Sets every row of `table` that no token names to NaN, in place."""
    kept, rows = set(), indices.tolist()
    bounds = indptr.tolist()
    for start, end in itertools.pairwise(bounds):
        kept.update(rows[max(0, start) : max(0, end)])
    unnamed = torch.ones(len(table), dtype=torch.bool)
    named = [row for row in kept if 0 <= row < len(table)]
    unnamed[torch.tensor(named, dtype=torch.int64)] = False
    table[unnamed.to(table.device)] = float("nan")


def make(
    prefix,
    extend,
    *,
    name="",
    heads=16,
    head_dim=512,
    dtype=torch.bfloat16,
    device="cpu",
    seed=0,
    pool_rows=64,
    kv_rows=None,
    sink=True,
    shift=0.0,
    head=(),
    tail=HOSTILE_TAIL,
    q_scale=1.0,
):
    """A case from two lists of lists of rows; values are normal, so that logits are about q_scale."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kv_rows = max(len(prefix), 1) if kv_rows is None else kv_rows

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    kv_indices_prefix, kv_indptr_prefix = csr(prefix, device, head, tail)
    kv_indices_extend, kv_indptr_extend = csr(extend, device, head, tail)
    case = Case(
        name,
        normal(len(prefix), heads, head_dim) * q_scale,
        normal(pool_rows, head_dim),
        kv_indices_prefix,
        kv_indptr_prefix,
        normal(kv_rows, head_dim),
        kv_indices_extend,
        kv_indptr_extend,
        normal(heads, dtype=torch.float32) if sink else None,
        head_dim**-0.5,
        shift,
    )
    poison(case.unified_kv, kv_indices_prefix, kv_indptr_prefix)
    poison(case.kv, kv_indices_extend, kv_indptr_extend)
    return case


def random_lists(lengths, rows, rng, holes=0.0, hole_values=(-1,)):
    """One list for each length; row 0 and the last row stay unnamed, so that they are poison."""
    return [
        [rng.choice(hole_values) if rng.random() < holes else rng.randrange(1, rows - 1) for _ in range(length)]
        for length in lengths
    ]


def ragged(**options):
    rng = random.Random(1)
    prefix = random_lists((0, 1, 15, 16, 17, 31, 32, 33, 5), 64, rng)
    extend = random_lists((3, 0, 16, 17, 1, 33, 31, 0, 2), 40, rng)
    return make(prefix, extend, kv_rows=40, **options)


def holes(**options):
    rng = random.Random(2)
    prefix = random_lists((33, 17, 16, 40, 1, 0), 64, rng, 0.4)
    extend = random_lists((17, 33, 1, 0, 16, 9), 40, rng, 0.4)
    prefix[3] = [-1] * 35 + [7] + [-1] * 31  # whole tiles of holes on both sides of the one row
    return make(prefix, extend, kv_rows=40, **options)


def hostile_indices(**options):
    rng = random.Random(3)
    pool = (64, 69, 2147480000, -2, INT32_MIN, INT32_MAX, -1)
    own = (40, 45, 2147480000, -2, INT32_MIN, INT32_MAX, -1)
    prefix = random_lists((33, 17, 3, 16), 64, rng, 0.5, pool)
    extend = random_lists((16, 20, 33, 2), 40, rng, 0.5, own)
    return make([*prefix, list(pool)], [*extend, list(own)], kv_rows=40, **options)


def hostile_indptr(**options):
    rng = random.Random(4)
    case = make(random_lists((12,) * 8, 64, rng), random_lists((9,) * 8, 40, rng), kv_rows=40, tail=(), **options)
    prefix = (-5, 12, 3, 96, INT32_MAX, 40, INT32_MIN, 50, 97)
    extend = (3, 3, 72, 73, -1, INT32_MAX, 0, INT32_MIN, 9)
    device = case.q.device
    return case.with_(
        kv_indptr_prefix=torch.tensor(prefix, dtype=torch.int32, device=device),
        kv_indptr_extend=torch.tensor(extend, dtype=torch.int32, device=device),
    )


def prefix_empty(**options):
    return make([[]] * 5, random_lists((1, 16, 17, 40, 3), 40, random.Random(5)), kv_rows=40, **options)


def extend_empty(**options):
    return make(random_lists((1, 16, 17, 40, 3), 64, random.Random(6)), [[]] * 5, **options)


def lists_empty(**options):
    return make([[]] * 3, [[]] * 3, **options)


def all_holes(**options):
    return make([[-1] * 33, [-1], []], [[-1] * 2, [], [-1] * 17], **options)


def tables_empty(**options):
    return make([[0, 1], [], [-1]], [[0], [5], []], pool_rows=0, kv_rows=0, **options)


def repeated_rows(**options):
    return make([[3] * 20, [5, 5, 9], [1, 2, 3] * 6], [[2], [2, 2], [4] * 16], kv_rows=8, **options)


def first_chunk(**options):
    return make([[]] * 20, [list(range(t + 1)) for t in range(20)], kv_rows=21, **options)


def no_sink(**options):
    case = make([[1, 2, 3], [], [4]], [[1], [], [-1]], **options)
    return case.with_(attn_sink=None)


def sinks(**options):
    case = make([list(range(1, 18)), [], [-1]], [[1], [], []], **options)
    values = torch.tensor((0.5, 100.0, -100.0, 1e4, float("-inf"), -1e4, 0.0), device=case.q.device)
    return case.with_(attn_sink=values.repeat(-(-case.q.size(1) // 7))[: case.q.size(1)].contiguous())


def shifted(**options):
    rng = random.Random(7)
    prefix, extend = random_lists((16, 5, 0, 0), 64, rng), random_lists((17, 0, 3, 0), 40, rng)
    return make(prefix, extend, kv_rows=40, shift=-math.log(4), **options)


def offset_lists(**options):
    rng = random.Random(8)
    prefix, extend = random_lists((5, 17, 0, 33), 64, rng), random_lists((16, 0, 1, 3), 40, rng)
    return make(prefix, extend, kv_rows=40, head=(0, INT32_MAX, -7, 0, 0), **options)


def sharp(**options):
    rng = random.Random(9)
    prefix, extend = random_lists((40, 17, 64), 64, rng), random_lists((16, 33, 1), 40, rng)
    return make(prefix, extend, kv_rows=40, q_scale=8.0, **options)


def one_token(**options):
    return make([[5]], [[]], **options)


def _layer(layer):
    def build(*, heads=16, head_dim=512, dtype=torch.bfloat16, device="cpu", seed=0):
        workload = _workload.build(
            layer,
            _workload.SMALL_REQUESTS,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        case = Case(layer.name, *workload.args())
        poison(case.unified_kv, case.kv_indices_prefix, case.kv_indptr_prefix)
        poison(case.kv, case.kv_indices_extend, case.kv_indptr_extend)
        return case

    return build


# name -> builder(heads=, head_dim=, dtype=, device=, seed=); all of them are small: at most a few hundred keys,
# the layer classes a thousand or two.
BUILDERS = {
    builder.__name__: builder
    for builder in (
        ragged,
        holes,
        hostile_indices,
        hostile_indptr,
        prefix_empty,
        extend_empty,
        lists_empty,
        all_holes,
        tables_empty,
        repeated_rows,
        first_chunk,
        no_sink,
        sinks,
        shifted,
        offset_lists,
        sharp,
        one_token,
    )
}
LAYER_BUILDERS = {name: _layer(layer) for name, layer in _workload.LAYERS.items()}


def build(name, **options):
    case = {**BUILDERS, **LAYER_BUILDERS}[name](**options)
    return case.with_(name=name)


class Guarded:
    """A tensor in the middle of a larger buffer whose other words must stay as they are.

    `data` starts as NaN: an element that is never written fails the comparison.
    """

    WORDS = 512

    def __init__(self, shape, dtype, device, offset=0):
        numel = math.prod(shape)
        self._buffer = torch.full((2 * self.WORDS + offset + numel,), float("nan"), dtype=dtype, device=device)
        self._start = self.WORDS + offset
        self._end = self._start + numel
        self._word = 0x7FAB if dtype.itemsize == 2 else 0x7FABCDEF  # a NaN, and none that arithmetic makes
        self._raw = self._buffer.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        self._raw.fill_(self._word)
        self.data = self._buffer[self._start : self._end].view(shape)

    def assert_intact(self, what=""):
        outside = torch.cat((self._raw[: self._start], self._raw[self._end :]))
        written = int((outside != self._word).sum())
        assert written == 0, f"{what}: {written} words outside the tensor were written"
