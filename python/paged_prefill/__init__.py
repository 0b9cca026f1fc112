"""DeepSeek-V4 sparse paged prefill attention from kernels compiled ahead of time.

Importing this package opens no driver and initialises no device: a device is looked at by its first call, or by
`preload`.
"""

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (its libraries must be loaded before the extension is)

from ._attention import sparse_attn_v4_paged_prefill
from ._loader import build_info, preload
from ._reference import reference
from ._validate import validate
from ._version import __version__

if TYPE_CHECKING:
    from . import integrations
    from ._merge import merge

__all__ = [
    "__version__",
    "build_info",
    "integrations",
    "merge",
    "preload",
    "reference",
    "sparse_attn_v4_paged_prefill",
    "validate",
]


def __getattr__(name: str) -> Any:
    # Few programs use these: the others' imports do not pay for them.
    if name == "merge":
        from ._merge import merge

        return merge
    if name == "integrations":
        from importlib import import_module  # `from . import` would ask this function again

        return import_module(".integrations", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
