"""Inside a scenario's process: tensors that torch takes for CUDA ones, and the stub drivers' controls."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

for library in ("libtorch_cuda.so", "libtorch_hip.so"):
    ctypes.CDLL(library)  # as torch's own build would have it loaded

import paged_prefill
from fake_drivers import images
from fake_drivers.dlpack import kept, wrap
from paged_prefill import _C as extension
from paged_prefill import _loader as loader

cuda_stub = ctypes.CDLL("libcuda.so.1")
hip_stub = ctypes.CDLL("libamdhip64.so.7")
for stub in (cuda_stub, hip_stub):
    stub.fake_log.restype = ctypes.c_char_p
    sizes = [images.BYTES[kind] for _, kind in images.ARGUMENTS] + [8, 8]
    stub.fake_arguments(len(sizes), (ctypes.c_int * len(sizes))(*sizes))

IMAGES = Path(os.environ["FAKE_IMAGES"])
torch.cuda._lazy_init = lambda: None
out_operator = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill_out
operator = torch.ops.paged_prefill.sparse_attn_v4_paged_prefill
attention = paged_prefill.sparse_attn_v4_paged_prefill


def cuda(tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
    """The same memory, as a tensor of a CUDA device."""
    kept.append(tensor)
    return wrap(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, 2, device)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a fake CUDA tensor, as a CPU tensor."""
    return wrap(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, 1, 0)


def offer_allocation() -> None:
    """Gives the fake device what the public function asks of torch: empty tensors and conversions."""
    library = torch.library.Library("aten", "IMPL")
    kept.append(library)

    def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return cuda(torch.full(size, -7.0).to(dtype or torch.float32), device.index or 0)

    def on_host(function):
        return lambda x, *arguments, **keywords: cuda(function(host(x), *arguments, **keywords), x.device.index)

    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("clamp", on_host(torch.clamp), "CUDA")
    library.impl("minimum", on_host(torch.minimum), "CUDA")
    library.impl("maximum", on_host(torch.maximum), "CUDA")
    library.impl("clone", on_host(lambda x, **_: torch.clone(x, memory_format=torch.contiguous_format)), "CUDA")
    library.impl("_to_copy", on_host(lambda x, dtype=None, **_: x.to(dtype, copy=True)), "CUDA")
    # torch's own method guards the device before it dispatches
    torch.Tensor.contiguous = lambda x, **_: x if x.is_contiguous() else x.clone()


def call(T=3, H=4, D=64, device=0, dtype=torch.bfloat16, sink=True, lse=False, **changes):
    """A good call's keyword arguments for the out operator, on a fake CUDA device."""
    lists = torch.tensor([0, 1, -1, 2, 0, 1], dtype=torch.int32)
    arguments = {
        "q": torch.zeros(T, H, D, dtype=dtype),
        "unified_kv": torch.zeros(10, D, dtype=dtype),
        "kv_indices_prefix": lists,
        "kv_indptr_prefix": torch.arange(T + 1, dtype=torch.int32),
        "kv": torch.zeros(7, D, dtype=dtype),
        "kv_indices_extend": lists.clone(),
        "kv_indptr_extend": torch.arange(T + 1, dtype=torch.int32),
        "attn_sink": torch.zeros(H) if sink else None,
        "softmax_scale": 0.125,
        "out": torch.zeros(T, H, D, dtype=dtype),
        "lse": torch.zeros(T, H) if lse else None,
    }
    put = {k: cuda(v, device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return {**put, **changes}


def log(stub=cuda_stub) -> list[str]:
    lines = stub.fake_log().decode().splitlines()
    stub.fake_clear_log()
    return lines


def launches(stub=cuda_stub) -> list[dict[str, Any]]:
    """The logged launches: device, symbol, grid, block, shared, stream, and arguments by name."""
    found = []
    for line in log(stub):
        if "LaunchKernel" not in line:
            continue
        fields: dict[str, Any] = dict(re.findall(r"(\w+)=(\S+)", line))
        values = [bytes.fromhex(value) for value in fields["arguments"].split(",")]
        formats = {"ptr": "<Q", "i64": "<q", "i32": "<i", "fp32": "<f"}
        fields["arguments"] = {
            name: struct.unpack(formats[kind], value)[0]
            for (name, kind), value in zip(images.ARGUMENTS, values, strict=False)  # two scratch pointers follow
        }
        fields["scratch"] = values[len(images.ARGUMENTS):]
        found.append(fields)
    return found


def error_of(function, *arguments, **keywords) -> str:
    """The text of the RuntimeError a call raises."""
    with pytest.raises(RuntimeError) as caught:
        function(*arguments, **keywords)
    assert caught.type is RuntimeError
    return str(caught.value)


def use_images(*variants, devices=(0, 1), vendor="cuda") -> None:
    images.write(IMAGES, *variants)
    loader._manifest.read_manifest.cache_clear()
    extension.register_loader(vendor, loader.describe, loader.read_image, loader.report_load)
    for device in devices:
        loader.override(device, IMAGES)
