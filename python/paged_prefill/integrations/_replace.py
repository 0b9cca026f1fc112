"""Replaces a host's public function in every module that holds it, and in those that import it later.

The host is never imported from here. Where it already is, each module attribute that is the function becomes the
adapter, copies made by `from x import f` included. Where it is not, the module that defines the function is watched
for, and changed right after its import, before anyone can copy from it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from paged_prefill._attention import sparse_attn_v4_paged_prefill
from paged_prefill._guards import HEAD_DIM_LIMIT

Function = Callable[..., Any]

NAME = "sparse_attn_v4_paged_prefill"
POOLS = ("unified_kv", "kv")
INDPTRS = ("kv_indptr_prefix", "kv_indptr_extend")
OPERATOR_ARGUMENTS = frozenset(inspect.signature(sparse_attn_v4_paged_prefill).parameters)
# They describe the lists to kernels that are chosen by them, or name the layer in traces: results do not depend on it.
HINTS = frozenset(("prefix_has_sentinel", "max_seqlen_q", "max_seqlen_k", "prefix"))

_log = logging.getLogger("paged_prefill")
_lock = threading.RLock()


class Replacement:
    """The adapter of one host: `modules` are the names under which its versions define the function."""

    def __init__(self, host: str, modules: Sequence[str]) -> None:
        self.host = host
        self.modules = tuple(modules)
        self._adapters: dict[Function, Function] = {}  # host's function -> ours
        self._watcher = _Watcher(self.modules, self._replace_in)

    def install(self) -> list[str]:
        """Replaces the function; returns the names of the modules in which it was, none if they are yet to come."""
        self._require_host()
        with _lock:
            if self._watcher not in sys.meta_path:
                sys.meta_path.insert(0, self._watcher)
            replaced: list[str] = []
            for name in self.modules:
                module = sys.modules.get(name)
                if module is not None:
                    replaced += self._replace_in(module)
            return replaced

    def uninstall(self) -> list[str]:
        """Puts the host's function back; returns the names of the modules in which it is again."""
        with _lock:
            if self._watcher in sys.meta_path:
                sys.meta_path.remove(self._watcher)
            restored: list[str] = []
            for original, adapter in self._adapters.items():
                restored += _swap(adapter, original)
            self._adapters.clear()
            return restored

    def _replace_in(self, module: ModuleType) -> list[str]:
        with _lock:
            function = _namespace(module).get(NAME)
            if self._watcher not in sys.meta_path or not callable(function) or function in self._adapters.values():
                return []
            adapter = self._adapters.setdefault(function, adapt(self.host, function))
            replaced = _swap(function, adapter)
        _log.info("%s of %s is served by paged_prefill in %s", NAME, self.host, ", ".join(replaced))
        return replaced

    def _require_host(self) -> None:
        """An adapter that would never take effect is an error now, not a slow server later."""
        if any(name in sys.modules for name in self.modules):
            return
        package = self.modules[0].partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise RuntimeError(
                f"paged_prefill.integrations: {package} is not installed\n"
                f"install {self.host} in this environment, or leave its adapter out"
            )
        for folder in spec.submodule_search_locations or ():
            for name in self.modules:
                *parents, last = name.split(".")[1:]
                if any(Path(folder, *parents).glob(f"{last}.*")):
                    return
        raise RuntimeError(
            f"paged_prefill.integrations: this version of {self.host} has no module that defines {NAME}\n"
            f"looked for {', '.join(self.modules)}: another version of {self.host} or of paged-prefill is needed"
        )


class _Watcher(importlib.abc.MetaPathFinder):
    """Calls `react(module)` right after one of `modules` has been imported; finds nothing by itself."""

    def __init__(self, modules: tuple[str, ...], react: Callable[[ModuleType], object]) -> None:
        self.modules = modules
        self.react = react

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                # On this one loader: it stays of the class that the host and its tools expect.
                spec.loader.exec_module = _followed(spec.loader.exec_module, self.react)  # type: ignore[assignment,method-assign]
                return spec
        return None


def _followed(
    execute: Callable[[ModuleType], None], react: Callable[[ModuleType], object]
) -> Callable[[ModuleType], None]:
    def execute_and_react(module: ModuleType) -> None:
        execute(module)
        react(module)

    return execute_and_react


def adapt(host: str, original: Function) -> Function:
    """The operator under `original`'s own signature; `original` itself runs what the operator refuses by design."""
    parameters = inspect.signature(original).parameters
    names = tuple(parameters)
    required = frozenset(name for name, p in parameters.items() if p.default is p.empty)
    extra = {name: p.default for name, p in parameters.items() if name not in OPERATOR_ARGUMENTS | HINTS}
    said: set[str] = set()

    @functools.wraps(original)
    def adapter(*args: Any, **keywords: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | keywords
        if len(args) + len(keywords) != len(given) or not required <= given.keys() <= parameters.keys():
            return original(*args, **keywords)  # a wrong call: the error is the host's
        reason = _refusal(given, extra)
        if reason:
            if reason not in said:
                said.add(reason)
                _log.warning("%s: %s runs %s's own kernel where %s", host, NAME, host, reason)
            return original(*args, **keywords)
        tokens = given["q"].shape[0]
        for name in INDPTRS:  # a longer one is a view of a larger buffer: the host reads T + 1 entries of it
            if given[name].dim() == 1 and given[name].shape[0] > tokens + 1:
                given[name] = given[name][: tokens + 1]
        arguments = {name: value for name, value in given.items() if name in OPERATOR_ARGUMENTS}
        if torch.is_grad_enabled():
            with torch.no_grad():  # the host's kernel makes no gradients either, and parameters (the sink) want some
                return sparse_attn_v4_paged_prefill(**arguments)
        return sparse_attn_v4_paged_prefill(**arguments)

    return adapter


def _refusal(given: dict[str, Any], extra: dict[str, Any]) -> str:
    """Why the operator refuses this call by design though the host serves it; empty if it does not.

    What both refuse is left to the operator's guards, which have the host's texts.
    """
    for name, default in extra.items():
        value = given.get(name, default)
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            return f"{name} is given"
    q, sink, out = given["q"], given["attn_sink"], given.get("out")
    for name in ("q", *POOLS):
        if not isinstance(given[name], torch.Tensor):
            return f"{name} is no tensor"
    for name in POOLS:
        pool = given[name]
        if pool.dtype not in (torch.bfloat16, torch.float16):
            return f"{name} is {pool.dtype}"
        if pool.dim() == 2 and pool.stride(1) != 1 and pool.shape[0] > 0:
            return f"{name} has a last-dimension stride of {pool.stride(1)}"
    if q.dim() != 3:
        return ""
    _, heads, head_dim = q.shape
    if head_dim > HEAD_DIM_LIMIT or head_dim % 8:
        return f"head_dim is {head_dim}"
    if isinstance(sink, torch.Tensor) and sink.dim() == 1 and sink.shape[0] > heads:
        return f"attn_sink has {sink.shape[0]} logits for {heads} heads (every rank takes the first of them)"
    if isinstance(out, torch.Tensor) and not out.is_contiguous():
        return "out is not contiguous"
    return ""


def _swap(old: Function, new: Function) -> list[str]:
    """Makes every module attribute that is `old` be `new`; returns the modules' names."""
    changed = []
    for name, module in list(sys.modules.items()):
        namespace = _namespace(module)
        for key in [key for key, value in list(namespace.items()) if value is old]:
            namespace[key] = new
            changed.append(name)
    return changed


def _namespace(module: object) -> dict[str, Any]:
    try:  # not getattr, by which a lazy module would load itself
        namespace = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return namespace if isinstance(namespace, dict) else {}
