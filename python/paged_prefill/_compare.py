"""The one tolerance: how far a result may lie from the fp64 reference, in the tests, the demo and `verify` alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Relative Frobenius error of a whole result. The 16-bit limits leave twice what rounding the probabilities and the
# result costs; the others are for references that are compared with each other.
OUT_LIMIT = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6, torch.float64: 1e-12}
# One token may be this much worse than the whole: few elements, less averaging. A wrong token is worse by far.
TOKEN_FACTOR = 4.0
# lse is never rounded to 16 bits: |error| <= LSE_ABSOLUTE + LSE_RELATIVE * |lse|.
LSE_ABSOLUTE = 1e-3
LSE_RELATIVE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """`error` against `limit`; `detail` says where the worst place is and what stands there."""

    error: float
    limit: float
    detail: str

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def compare_out(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compares out [T, H, D] with the fp64 reference; the limit is that of actual's dtype.

    The error is inf when an inf or a NaN stands in one of them only, or when one token is far off by itself.
    """
    limit = OUT_LIMIT[actual.dtype]
    if mismatch := _special_values(actual, expected):
        return Comparison(float("inf"), limit, mismatch)
    a, e = _finite(actual), _finite(expected)
    if a.numel() == 0:
        return Comparison(0.0, limit, "empty")
    # Below this an element may be flushed to zero or rounded to a subnormal.
    floor = max(torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps, 2.0**-126)
    error = _excess((a - e).norm(), floor * a.numel() ** 0.5) / e.norm().clamp(min=floor)
    of_token = (a - e).flatten(1).norm(dim=1) if a.dim() > 1 else (a - e).abs()
    size = e.flatten(1).norm(dim=1) if e.dim() > 1 else e.abs()
    of_token = _excess(of_token, floor * (a.numel() / a.size(0)) ** 0.5) / size.clamp(min=floor)
    token = int(of_token.argmax())
    place = int((a[token] - e[token]).abs().argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape[1:]))
    detail = (
        f"worst token {token} (error {float(of_token[token]):.2e}), worst there at {(token, *where)}: "
        f"{float(actual[(token, *where)])!r}, expected {float(expected[(token, *where)])!r}"
    )
    if float(of_token[token]) > TOKEN_FACTOR * limit:
        return Comparison(float("inf"), limit, detail)
    return Comparison(float(error), limit, detail)


def compare_lse(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compares lse [T, H] with the fp64 reference; the error is in units of the tolerance, so the limit is 1."""
    if mismatch := _special_values(actual, expected):
        return Comparison(float("inf"), 1.0, mismatch)
    a, e = _finite(actual), _finite(expected)
    if a.numel() == 0:
        return Comparison(0.0, 1.0, "empty")
    error = (a - e).abs() / (LSE_ABSOLUTE + LSE_RELATIVE * e.abs())
    place = tuple(int(i) for i in torch.unravel_index(error.argmax().cpu(), a.shape))
    detail = f"worst lse at {place}: {float(actual[place])!r}, expected {float(expected[place])!r}"
    return Comparison(float(error[place]), 1.0, detail)


def _special_values(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Says where infs and NaNs differ; empty when they stand in the same places with the same signs."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    # The expected value is judged as actual's dtype can hold it: what rounds to inf there is an inf.
    e = expected.to(actual.dtype)
    differs = (actual.isnan() != e.isnan()) | (actual.isposinf() != e.isposinf()) | (actual.isneginf() != e.isneginf())
    if not bool(differs.any()):
        return ""
    place = tuple(int(i) for i in differs.nonzero()[0])
    return (
        f"inf or NaN in {int(differs.sum())} of {differs.numel()} places where the other has none, first at {place}: "
        f"{float(actual[place])!r}, expected {float(expected[place])!r}"
    )


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _excess(error: torch.Tensor, floor: float) -> torch.Tensor:
    return (error - floor).clamp(min=0.0)
