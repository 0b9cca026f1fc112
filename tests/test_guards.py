"""Every guard, word for word: the launch on fake CUDA tensors, and the same rows through the Python fake.

A row names the arguments that differ from a good call, and the first line of the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64


@dataclass(frozen=True)
class Spec:
    """A tensor to make: on a fake CUDA device, or as a fake tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cuda:0"
    strides: tuple[int, ...] | None = None

    def on(self, device: str) -> Spec:
        return Spec(self.shape, self.dtype, device, self.strides)


T, H, D = 3, 4, 64
GOOD = {
    "q": Spec((T, H, D), BF16),
    "unified_kv": Spec((10, D), BF16),
    "kv_indices_prefix": Spec((6,), I32),
    "kv_indptr_prefix": Spec((T + 1,), I32),
    "kv": Spec((7, D), BF16),
    "kv_indices_extend": Spec((5,), I32),
    "kv_indptr_extend": Spec((T + 1,), I32),
    "attn_sink": Spec((H,), FP32),
    "softmax_scale": 0.125,
    "out": Spec((T, H, D), BF16),
    "lse": Spec((T, H), FP32),
}
TENSORS = [name for name in GOOD if name != "softmax_scale"]
# As far as this torch has them.
RARE = [
    getattr(torch, name)
    for name in (
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint4", "int4", "uint16", "complex32",
        "bool", "bits8",
    )
    if hasattr(torch, name)
]
BY_NAME = {
    "unified_kv": (2, "[pages, D]"), "kv": (2, "[tokens, D]"), "kv_indices_prefix": (1, "[nnz_prefix]"),
    "kv_indptr_prefix": (1, "[T + 1]"), "kv_indices_extend": (1, "[nnz_extend]"), "kv_indptr_extend": (1, "[T + 1]"),
    "attn_sink": (1, "[H]"), "out": (3, "[T, H, D]"), "lse": (2, "[T, H]"), "q": (3, "[T, H, D]"),
}


def changed(name: str, **fields: object) -> dict[str, Spec]:
    return {name: Spec(**{**vars(GOOD[name]), **fields})}


def both_pools(head_dim: int) -> dict[str, Spec]:
    return changed("unified_kv", shape=(10, head_dim)) | changed("kv", shape=(7, head_dim))


def whole_head_dim(head_dim: int) -> dict[str, Spec]:
    shape = (T, H, head_dim)
    return both_pools(head_dim) | changed("q", shape=shape) | changed("out", shape=shape)


DEVICE_TEXT = "Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors"
ROWS: list[tuple[dict[str, object], str]] = [
    # The five of the public version; where two are broken, the first one speaks.
    (changed("q", device="cpu"), DEVICE_TEXT),
    ({name: spec.on("cpu") for name, spec in GOOD.items() if isinstance(spec, Spec)}, DEVICE_TEXT),
    (changed("q", device="cpu", dtype=FP32), DEVICE_TEXT),
    (changed("q", device="cpu", shape=()), DEVICE_TEXT),
    *((changed("q", dtype=dtype), f"sparse_attn_v4_paged_prefill expects fp16/bf16 q, got {dtype}")
      for dtype in (FP32, FP64, I32, torch.uint8, *RARE)),
    (changed("q", dtype=FP32) | changed("unified_kv", dtype=FP16),
     "sparse_attn_v4_paged_prefill expects fp16/bf16 q, got torch.float32"),
    (changed("q", dtype=FP16), "unified_kv dtype mismatch: kv=torch.bfloat16, q=torch.float16"),
    *((changed("unified_kv", dtype=dtype), f"unified_kv dtype mismatch: kv={dtype}, q=torch.bfloat16")
      for dtype in (FP16, FP32, torch.uint8, *RARE)),
    (changed("unified_kv", dtype=FP16, device="cpu") | changed("kv", dtype=FP32),
     "unified_kv dtype mismatch: kv=torch.float16, q=torch.bfloat16"),
    *((changed("kv", dtype=dtype), f"kv dtype mismatch: kv={dtype}, q=torch.bfloat16")
      for dtype in (FP16, FP32, torch.uint8, *RARE)),
    (changed("kv", dtype=FP16, shape=(7, 32)), "kv dtype mismatch: kv=torch.float16, q=torch.bfloat16"),
    (changed("kv", shape=(7, 32)), "head_dim mismatch: unified_kv=64, kv=32"),
    (changed("unified_kv", shape=(10, 576), device="cpu"), "head_dim mismatch: unified_kv=576, kv=64"),
    # Ranks, before a size is read.
    *((changed(name, shape=()), f"{name} rank mismatch: expected {rank} dimensions {shape}, got 0")
      for name, (rank, shape) in BY_NAME.items()),
    *((changed(name, shape=(1,) * (rank + 1)),
       f"{name} rank mismatch: expected {rank} dimensions {shape}, got {rank + 1}")
      for name, (rank, shape) in BY_NAME.items() if name not in ("unified_kv", "kv")),
    (both_pools(128), "head_dim mismatch: q=64, unified_kv=128"),
    # Devices.
    *((changed(name, device="cpu"), f"{name} device mismatch: {name}=cpu, q=cuda:0") for name in TENSORS[1:]),
    *((changed(name, device="cuda:1"), f"{name} device mismatch: {name}=cuda:1, q=cuda:0") for name in TENSORS[1:]),
    (changed("q", device="cuda:1"), "unified_kv device mismatch: unified_kv=cuda:0, q=cuda:1"),
    # Lists.
    *((changed(name, dtype=dtype), f"{name} expects int32/int64, got {dtype}")
      for name in TENSORS if name.startswith("kv_ind") for dtype in (FP32, FP64, torch.uint8)),
    *((changed(name, shape=(got,)), f"{name} length mismatch: expected T + 1 = 4, got {got}")
      for name in ("kv_indptr_prefix", "kv_indptr_extend") for got in (0, 3, 5)),
    (changed("q", shape=(352, H, D)) | changed("kv_indptr_prefix", shape=(343,)),
     "kv_indptr_prefix length mismatch: expected T + 1 = 353, got 343"),
    # Longer than the kernels count; nothing reads such a tensor, so it needs no memory.
    *((changed(name, shape=(got,)), f"{name} has {got} entries, more than 1073741696")
      for name in ("kv_indices_prefix", "kv_indices_extend") for got in (2**30 - 127, 2**31 + 1000)),
    (changed("kv_indices_extend", shape=(2**31 + 1000,)) | changed("kv_indptr_extend", dtype=I64),
     "kv_indices_extend has 2147484648 entries, more than 1073741696"),
    *((changed(name, shape=(got, D)), f"{name} has {got} rows, more than 2147483647")
      for name in ("unified_kv", "kv") for got in (2**31, 2**33)),
    # Sink.
    *((changed("attn_sink", shape=(got,)), f"attn_sink length mismatch: expected H = 4, got {got}")
      for got in (3, 5, 128)),
    *((changed("attn_sink", dtype=dtype), f"attn_sink expects fp32/fp16/bf16, got {dtype}") for dtype in (FP64, I32)),
    # Sizes.
    (changed("q", shape=(T, 0, D)) | changed("attn_sink", shape=(0,)),
     "q must have at least one head, got shape [3, 0, 64]"),
    *((whole_head_dim(head_dim), f"head_dim must be a multiple of 8 from 8 to 512, got {head_dim}")
      for head_dim in (0, 4, 60, 65, 520, 576)),
    *((changed(name, strides=(128, 2)), f"{name} must have a last-dimension stride of 1, got 2")
      for name in ("unified_kv", "kv")),
    (changed("unified_kv", strides=(1, 10)), "unified_kv must have a last-dimension stride of 1, got 10"),
    # Results.
    (changed("out", shape=(T, H, 32)), "out shape mismatch: expected [3, 4, 64], got [3, 4, 32]"),
    (changed("out", shape=(T + 1, H, D)), "out shape mismatch: expected [3, 4, 64], got [4, 4, 64]"),
    (changed("out", dtype=FP32), "out dtype mismatch: expected torch.bfloat16, got torch.float32"),
    (changed("out", strides=(512, 128, 1)), "out must be contiguous, got strides [512, 128, 1]"),
    (changed("lse", shape=(T, H + 1)), "lse shape mismatch: expected [3, 4], got [3, 5]"),
    (changed("lse", dtype=BF16), "lse dtype mismatch: expected torch.float32, got torch.bfloat16"),
    (changed("lse", strides=(1, 3)), "lse must be contiguous, got strides [1, 3]"),
]


def place(arguments: dict[str, object], make: object) -> dict[str, object]:
    return {name: make(value) if isinstance(value, Spec) else value for name, value in arguments.items()}


SCENARIO = """
import test_guards
from test_guards import GOOD, ROWS, Spec, place

def make(spec):
    size = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides or ())) + 1 if spec.strides else 0
    item = spec.dtype.itemsize
    if spec.device == "cpu":
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype) if spec.strides else torch.empty(
            spec.shape, dtype=spec.dtype)
    index = int(spec.device[-1])
    if spec.shape and spec.shape[0] > 2**28:
        strides = (spec.shape[1], 1) if len(spec.shape) == 2 else (1,)
        return wrap(cuda(torch.zeros(16), index).data_ptr(), spec.shape, strides, spec.dtype, 2, index)
    if spec.dtype in process_codes:
        plain = torch.zeros(spec.shape, dtype=spec.dtype)
        if spec.strides:
            plain = torch.zeros(size, dtype=spec.dtype).as_strided(spec.shape, spec.strides)
        return cuda(plain, index)
    widths = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
    return cuda(torch.zeros(spec.shape, dtype=widths[item]), index).view(spec.dtype)

from fake_drivers.images import variant
from fake_drivers.dlpack import CODES as process_codes, wrap
use_images(variant("sm90a"))
out_operator(**place(GOOD, make))
assert len(launches()) == 1
"""


def test_every_guard_word_for_word(scenario):
    scenario(
        SCENARIO
        + """
wrong = []
for changes, expected in ROWS:
    arguments = place({**GOOD, **changes}, make)
    text, _, hint = error_of(out_operator, **arguments).partition("\\n")
    if text != expected or not hint or "{" in text + hint:
        wrong.append((expected, text, hint))
    if "out" in changes or "lse" in changes:
        continue
    inputs = {k: v for k, v in arguments.items() if k not in ("out", "lse")}
    for function in (operator, attention):
        offer = error_of(function, **inputs) if arguments["q"].device.type == "cpu" else text
        if offer.partition("\\n")[0] != expected:
            wrong.append((expected, offer))
assert not wrong, "\\n".join(map(str, wrong))
assert not launches(), "a refused call launched"
out_operator(**place(GOOD, make))
assert len(launches()) == 1
"""
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("q=a['q'], out=a['q']", None),
        ("out=inside(a['q'], 64)", "out overlaps q"),
        ("out=inside(a['unified_kv'], 0)", "out overlaps unified_kv"),
        ("out=inside(a['kv_indices_prefix'], 0)", "out overlaps kv_indices_prefix"),
        ("out=inside(a['kv'], -64)", "out overlaps kv"),
        ("out=inside(a['attn_sink'], 0)", "out overlaps attn_sink"),
        ("lse=inside(a['attn_sink'], 0, 'lse')", "lse overlaps attn_sink"),
        ("lse=inside(a['out'], 0, 'lse')", "lse overlaps out"),
        ("lse=inside(a['q'], 0, 'lse')", "lse overlaps q"),
        ("q=wrap(a['out'].data_ptr(), (3, 4, 64), (0, 64, 1), BF16, 2, 0)", "out overlaps q"),
    ],
)
def test_overlap(scenario, code, expected):
    scenario(
        SCENARIO
        + f"""
from test_guards import BF16
# Far apart in one piece of memory: an out laid over a small tensor must cover no other by chance.
arena = torch.zeros(len(GOOD) << 16, dtype=torch.uint8)
places = iter(range(arena.data_ptr() + (1 << 15), arena.data_ptr() + arena.numel(), 1 << 16))
def apart(spec):
    strides = torch.empty(spec.shape, device="meta").stride()
    return wrap(next(places), spec.shape, strides, spec.dtype, 2, 0)
a = place(GOOD, apart)
def inside(tensor, offset, like="out"):
    like = a[like]
    return wrap(tensor.data_ptr() + offset, like.shape, like.stride(), like.dtype, 2, 0)
changes = dict({code})
expected = {expected!r}
if expected is None:
    out_operator(**{{**a, **changes}})
    assert len(launches()) == 1
else:
    assert error_of(out_operator, **{{**a, **changes}}).startswith(expected + "\\n")
"""
    )


def test_requires_grad(scenario):
    """Refused with grad mode enabled, by the function and by both operators, after the guards that come first."""
    scenario(
        SCENARIO
        + """
offer_allocation()
a = place(GOOD, make)
inputs = {k: v for k, v in a.items() if k not in ("out", "lse")}
for name in ("q", "unified_kv", "kv", "attn_sink"):
    a[name].requires_grad_(True)
    expected = f"sparse_attn_v4_paged_prefill is forward only, but {name} requires grad\\n"
    for function, arguments in ((attention, inputs), (operator, inputs), (out_operator, a)):
        text = error_of(function, **arguments)
        assert text.startswith(expected), text
    with torch.no_grad():
        attention(**inputs), operator(**inputs), out_operator(**a)
    with torch.inference_mode():
        attention(**inputs), operator(**inputs), out_operator(**a)
    assert len(launches()) == 6
    a[name].requires_grad_(False)
cpu = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
cpu["q"].requires_grad_(True)
assert error_of(attention, **cpu).startswith("Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors\\n")
assert error_of(operator, **cpu).startswith("Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors\\n")
"""
    )


def test_sparse_and_quantized_tensors_meet_the_texts(scenario):
    scenario(
        SCENARIO
        + """
cpu = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in place(GOOD, make).items()}
sparse = cpu["q"].to_sparse()
quantized = torch.quantize_per_tensor(torch.zeros(3, 4, 64), 0.1, 0, torch.quint8)
for q in (sparse, quantized, cpu["q"].to_mkldnn()):
    for function in (operator, attention):
        inputs = {k: v for k, v in {**cpu, "q": q}.items() if k not in ("out", "lse")}
        text = error_of(function, **inputs)
        assert text.startswith("Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors\\n"), text
"""
    )


def test_the_first_five_texts_and_their_order():
    from paged_prefill import _C

    texts = [text for text, _ in _C.guard_texts().values()]
    assert texts[:5] == [
        "Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors",
        "sparse_attn_v4_paged_prefill expects fp16/bf16 q, got {q_dtype}",
        "unified_kv dtype mismatch: kv={unified_kv_dtype}, q={q_dtype}",
        "kv dtype mismatch: kv={kv_dtype}, q={q_dtype}",
        "head_dim mismatch: unified_kv={unified_kv_dim}, kv={kv_dim}",
    ]


def test_N35_the_longest_lists_and_tables_are_served(scenario):
    scenario(
        SCENARIO
        + """
from test_guards import D, I32, BF16
longest = {
    "kv_indices_prefix": Spec((2**30 - 128,), I32), "unified_kv": Spec((2**31 - 1, D), BF16),
    "kv_indices_extend": Spec((2**30 - 128,), I32), "kv": Spec((2**31 - 1, D), BF16),
}
for name, spec in longest.items():
    arguments = {n: v for n, v in GOOD.items() if n not in ("out", "lse")}
    placed = place({**arguments, name: spec}, make)
    # Apart from what lies behind the small memory that stands for the large one.
    far = [wrap(2**60 + i * 2**20, GOOD[n].shape, torch.empty(GOOD[n].shape).stride(), GOOD[n].dtype, 2, 0)
           for i, n in enumerate(("out", "lse"))]
    out_operator(**placed, out=far[0], lse=far[1])
    (launch,) = launches()
    passed = {"unified_kv": "unified_kv_rows", "kv": "kv_rows"}.get(name, name + "_len")
    assert launch["arguments"][passed] == spec.shape[0], name
"""
    )


def test_every_text_has_a_hint():
    from paged_prefill import _C

    for name, (text, hint) in _C.guard_texts().items():
        assert text and hint, name
        assert "\n" not in text + hint, name
