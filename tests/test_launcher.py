"""Loading and launching, on drivers that run nothing: what is passed, when it loads, and what is said on failure."""

from __future__ import annotations

import pytest


def test_arguments_byte_for_byte(scenario):
    scenario("""
    from fake_drivers.images import variant
    import math
    use_images(variant("sm90a", head_tile=16, threads=256, shared=1024))
    a = call(T=5, H=20, D=64, lse=True)
    a["softmax_scale"] = 0.3
    out_operator(**a, replicated_logit_shift=-math.log(3))
    (launch,) = launches()
    expected = {
        "q_ptr": a["q"].data_ptr(), "unified_kv_ptr": a["unified_kv"].data_ptr(), "kv_ptr": a["kv"].data_ptr(),
        "kv_indices_prefix_ptr": a["kv_indices_prefix"].data_ptr(),
        "kv_indptr_prefix_ptr": a["kv_indptr_prefix"].data_ptr(),
        "kv_indices_extend_ptr": a["kv_indices_extend"].data_ptr(),
        "kv_indptr_extend_ptr": a["kv_indptr_extend"].data_ptr(),
        "attn_sink_ptr": a["attn_sink"].data_ptr(), "out_ptr": a["out"].data_ptr(), "lse_ptr": a["lse"].data_ptr(),
        "q_stride_t": 20 * 64, "q_stride_h": 64, "unified_kv_stride_n": 64, "kv_stride_n": 64,
        "num_tokens": 5, "num_heads": 20, "head_dim": 64, "unified_kv_rows": 10, "kv_rows": 7,
        "kv_indices_prefix_len": 6, "kv_indices_extend_len": 6, "has_sink": 1, "has_lse": 1,
        "num_tiles": 10, "first_tile": 0,
        "softmax_scale_log2": torch.tensor(0.3 * math.log2(math.e)).item(),
        "logit_shift_log2": torch.tensor(-math.log(3) * math.log2(math.e)).item(),
    }
    assert launch["arguments"] == expected, launch["arguments"]
    assert launch["scratch"] == [bytes(8), bytes(8)]
    assert (launch["grid"], launch["block"], launch["shared"]) == ("10,1,1", "256,1,1", "1024")
    assert (launch["device"], launch["stream"]) == ("0", "0x5000")
    assert launch["symbol"] == "kernel_" + extension.last_launch(0)

    out_operator(**call(sink=False))
    (launch,) = launches()
    arguments = launch["arguments"]
    names = ("has_sink", "attn_sink_ptr", "has_lse", "lse_ptr")
    assert [arguments[name] for name in names] == [0, 0, 0, 0]
    """)


def parameters_of(variant, image):
    """(offset, size) of each of an image's parameters, as the image itself says."""
    pytest.importorskip("elftools", reason="pyelftools reads the images")
    from build_tools import inspection

    if variant["format"] == "ptx":
        return inspection.ptx_parameters(image.decode())
    return inspection.cubin_parameters(image) if variant["format"] == "cubin" else inspection.amd_parameters(image)


def test_arguments_of_every_shipped_image(scenario):
    """Each image of the installed package is loaded and launched; the driver reads what the image's layout says."""
    from paged_prefill import _manifest

    manifest = _manifest.read_manifest()
    layouts = {v["id"]: parameters_of(v, manifest.read_image(v["id"])) for v in manifest.data["variants"]}
    output = scenario(f"""
    import json, math
    layouts = {layouts!r}
    installed = loader._manifest.read_manifest(loader._manifest.PACKAGE_IMAGES)
    for number, entry in enumerate(installed.data["variants"]):
        target = installed.data["targets"][entry["target"]]
        folder = IMAGES / str(number)
        folder.mkdir()
        (folder / entry["file"]).symlink_to(installed.folder / entry["file"])
        data = {{**installed.data, "variants": [entry], "targets": {{entry["target"]: target}}}}
        (folder / "manifest.json").write_text(json.dumps(data))
        # A device stays with the driver that opened it.
        device, stub = (0, cuda_stub) if target["vendor"] == "cuda" else (1, hip_stub)
        extension.register_loader(target["vendor"], loader.describe, loader.read_image, loader.report_load)
        loader.override(device, folder, entry["target"])
        layout = layouts[entry["id"]]
        widths = [size for _, size in layout]
        stub.fake_arguments(len(widths), (ctypes.c_int * len(widths))(*widths))
        dtype = {{"bf16": torch.bfloat16, "fp16": torch.float16}}[entry["dtype"]]
        T, H, D = 5, max(entry["min_heads"] or 1, 3), entry["head_dim"] or 72
        a = call(T=T, H=H, D=D, dtype=dtype, lse=True, device=device)
        log(stub)
        out_operator(**a, replicated_logit_shift=-0.5)
        (line,) = [line for line in log(stub) if "LaunchKernel" in line]
        fields = dict(re.findall(r"(\\w+)=(\\S+)", line))
        tiles = T * -(-H // entry["head_tile"])
        expected = {{
            **{{name + "_ptr": a[name].data_ptr() for name in a if name != "softmax_scale"}},
            "q_stride_t": H * D, "q_stride_h": D, "unified_kv_stride_n": D, "kv_stride_n": D,
            "num_tokens": T, "num_heads": H, "head_dim": D, "unified_kv_rows": 10, "kv_rows": 7,
            "kv_indices_prefix_len": 6, "kv_indices_extend_len": 6, "has_sink": 1, "has_lse": 1,
            "num_tiles": tiles, "first_tile": 0,
            "softmax_scale_log2": 0.125 * math.log2(math.e), "logit_shift_log2": -0.5 * math.log2(math.e),
        }}
        # The parameter block as the image lays it out, from the manifest's names and types, and then as launched.
        formats = {{"ptr": "<Q", "i64": "<q", "i32": "<i", "fp32": "<f"}}
        values = [struct.pack(formats[kind], expected[name]) for name, kind in entry["arguments"]] + [bytes(8)] * 2
        assert [len(value) for value in values] == widths, entry["id"]
        block, launched = bytearray(layout[-1][0] + 8), bytearray(layout[-1][0] + 8)
        for value, text, (offset, size) in zip(values, fields["arguments"].split(","), layout, strict=True):
            block[offset : offset + size] = value
            launched[offset : offset + size] = bytes.fromhex(text)
        assert launched == block, entry["id"]
        assert fields["symbol"] == entry["symbol"] and fields["block"] == f"{{entry['threads']}},1,1", entry["id"]
        blocks = tiles if entry["grid"] == "tiles" else min(tiles, 304 if device else 10)
        assert fields["grid"] == f"{{blocks}},1,1" and fields["shared"] == str(entry["shared"]), entry["id"]
    print(number + 1)
    """)
    assert int(output) == len(layouts)


def test_hidden_arguments_of_amd_images_are_the_runtimes():
    """What a launch passes is the explicit arguments and the two scratch pointers; the rest HIP fills in itself."""
    pytest.importorskip("elftools", reason="pyelftools reads the images")
    from build_tools import inspection
    from paged_prefill import _manifest

    manifest = _manifest.read_manifest()
    images = [variant for variant in manifest.data["variants"] if variant["format"] == "hsaco"]
    if not images:
        pytest.skip("the installed package has no AMD image")
    for variant in images:
        kinds = [a[".value_kind"] for a in inspection.amd_kernel(manifest.read_image(variant["id"]))[".args"]]
        explicit = [kind for kind in kinds if not kind.startswith("hidden_")]
        assert len(explicit) == len(variant["arguments"]) + 2, variant["id"]
        assert kinds[: len(explicit)] == explicit, f"{variant['id']}: hidden arguments come last"
        # None of them: a printf buffer, a heap or a call out would need what a plain launch does not set up.
        assert not set(kinds) & {"hidden_printf_buffer", "hidden_hostcall_buffer", "hidden_heap_v1"}, variant["id"]


def test_a_kernels_own_subset_and_order_of_arguments(scenario):
    scenario("""
    from fake_drivers.images import variant
    chosen = [["num_tokens", "i32"], ["out_ptr", "ptr"], ["softmax_scale_log2", "fp32"], ["kv_stride_n", "i64"]]
    use_images(variant("sm90a", arguments=chosen))
    images.ARGUMENTS[:] = chosen
    widths = [images.BYTES[kind] for _, kind in chosen] + [8, 8]
    cuda_stub.fake_arguments(len(widths), (ctypes.c_int * len(widths))(*widths))
    a = call()
    out_operator(**a)
    (launch,) = launches()
    assert launch["arguments"]["num_tokens"] == 3 and launch["arguments"]["out_ptr"] == a["out"].data_ptr()
    assert launch["arguments"]["kv_stride_n"] == 64
    """)


@pytest.mark.parametrize("argument", [["k_ptr", "ptr"], ["num_tokens", "i64"]])
def test_an_argument_this_extension_does_not_know(scenario, argument):
    scenario(f"""
    from fake_drivers.images import variant
    use_images(variant("sm90a", arguments=[{argument!r}]))
    text = error_of(out_operator, **call())
    image = "paged_prefill-bf16-h16-dany-sm90a"
    assert text.startswith(f"kernel image {{image}} needs the argument {argument[1]} {argument[0]}, ")
    assert not launches()
    """)


def test_O04_grids_and_calls_without_a_token(scenario):
    """A persistent grid has a block per multiprocessor at most; no tokens, no launch; empty lists launch."""
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a", grid="persistent"))
    for T, blocks in ((3, 3), (10, 10), (11, 10), (4000, 10)):
        out_operator(**call(T=T))
        (launch,) = launches()
        assert launch["grid"] == f"{blocks},1,1", launch
        assert launch["arguments"]["num_tiles"] == T
    loader.reset(0)
    use_images(variant("sm90a"))
    out_operator(**call(T=70_000))
    assert launches()[0]["grid"] == "70000,1,1"

    empty = call(T=0)
    for name in ("unified_kv", "kv", "kv_indices_prefix", "kv_indices_extend"):
        empty[name] = cuda(host(empty[name])[:0].clone())
    out_operator(**empty)
    assert not log()
    assert error_of(out_operator, **{**call(T=0), "kv": call()["q"]}).startswith("kv rank mismatch")
    some = {**call(), **{name: empty[name] for name in ("unified_kv", "kv", "kv_indices_prefix", "kv_indices_extend")}}
    out_operator(**some)
    (launch,) = launches()
    sizes = [launch["arguments"][name] for name in ("unified_kv_rows", "kv_rows", "kv_indices_prefix_len")]
    assert sizes == [0, 0, 0] and launch["grid"] == "3,1,1"
    """)


def test_variants_by_head_count_dimension_dtype_and_alignment(scenario):
    scenario("""
    from fake_drivers.images import variant
    from fake_drivers.dlpack import wrap
    use_images(
        variant("sm90a", head_tile=16, head_dim=64, max_heads=32, aligned=True),
        variant("sm90a", head_tile=64, head_dim=64, min_heads=33, aligned=True),
        variant("sm90a", head_tile=16),
        variant("sm90a", head_tile=64, head_dim=64, dtype="fp16", aligned=True),
    )
    def used(**changes):
        out_operator(**changes)
        log()
        return extension.last_launch(0).removeprefix("paged_prefill-").removesuffix("-sm90a")
    assert used(**call(H=1)) == used(**call(H=32)) == "bf16-h16-d64"
    assert used(**call(H=33)) == used(**call(H=128)) == "bf16-h64-d64"
    assert used(**call(D=128)) == used(**call(D=8)) == "bf16-h16-dany"
    assert used(**call(H=4, dtype=torch.float16)) == "fp16-h64-d64"

    a = call()
    memory = cuda(torch.zeros(100_000, dtype=torch.bfloat16))
    def view(shape, strides, offset=0):
        return wrap(memory.data_ptr() + 2 * offset, shape, strides, torch.bfloat16, 2, 0)
    assert memory.data_ptr() % 16 == 0
    aligned, general = "bf16-h16-d64", "bf16-h16-dany"
    for changes, expected in (
        ({"q": view((3, 4, 64), (256, 64, 1))}, aligned),
        ({"q": view((3, 4, 64), (4 * 72, 72, 1))}, aligned),
        ({"q": view((3, 4, 64), (4 * 65, 65, 1))}, general),
        ({"q": view((3, 4, 64), (4 * 64 + 4, 64, 1))}, general),
        ({"q": view((3, 4, 64), (256, 64, 1), 4)}, general),
        ({"q": view((3, 4, 64), (256, 64, 1), 8)}, aligned),
        ({"q": view((3, 4, 64), (0, 64, 1))}, aligned),
        ({"unified_kv": view((10, 64), (61 * 64, 1))}, aligned),
        ({"unified_kv": view((10, 64), (65, 1))}, general),
        ({"unified_kv": view((1, 64), (65, 1))}, aligned),
        ({"unified_kv": view((10, 64), (64, 1), 1)}, general),
        ({"kv": view((7, 64), (100, 1))}, general),
        ({"kv": view((0, 64), (100, 1))}, aligned),
        ({"out": view((3, 4, 64), (256, 64, 1), 1)}, general),
    ):
        assert used(**{**a, **changes}) == expected, (changes, expected)
    # A stride that is never used is passed as 0.
    out_operator(**{**call(T=1, H=1), "q": view((1, 1, 64), (77, 5, 1))})
    launch = launches()[0]
    assert extension.last_launch(0).endswith("h16-d64-sm90a")
    assert (launch["arguments"]["q_stride_t"], launch["arguments"]["q_stride_h"]) == (0, 0)

    text = error_of(out_operator, **call(D=128, dtype=torch.float16))
    assert text.startswith("no kernel image for device 0 takes this call: fp16, H = 4, D = 128\\n"), text
    assert "paged_prefill-fp16-h64-d64-sm90a" in text
    """)


def test_shared_memory_over_48_kb_is_opted_in(scenario):
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a", shared=49152))
    out_operator(**call())
    assert not any("cuFuncSetAttribute" in line for line in log())
    loader.reset(0)
    use_images(variant("sm90a", shared=231936))
    out_operator(**call())
    assert any(line == "cuFuncSetAttribute shared=231936" for line in log())
    """)


def test_O22_each_device_loads_its_own_images_when_needed(scenario):
    """A call loads the image it uses; preload the rest; each device has its own; the current device does not matter."""
    scenario("""
    from fake_drivers.images import variant
    small, large = variant("sm90a", max_heads=32), variant("sm90a", head_tile=64, min_heads=33)
    use_images(small, large)
    assert extension.loaded(0) == [] and extension.last_launch(0) is None and not log()
    cuda_stub.fake_make_current(0)
    out_operator(**call(device=1))
    assert cuda_stub.fake_context_depth() == 1
    assert extension.loaded(1) == [small["id"]] and extension.loaded(0) == []
    lines = log()
    assert [line for line in lines if "Load" in line] == [f"cuModuleLoadDataEx device=1 image=image of {small['id']}"]
    assert "device=1" in lines[-1] and "stream=0x5100" in lines[-1]
    paged_prefill.preload("cuda:1")
    assert extension.loaded(1) == [small["id"], large["id"]] and len(log()) == 1
    paged_prefill.preload(torch.device("cuda", 0))
    assert extension.loaded(0) == [small["id"], large["id"]]
    log()
    for device in (0, 1, 0):
        for heads in (4, 64):
            out_operator(**call(H=heads, device=device))
    assert [line.split()[:2] for line in log()] == [
        ["cuLaunchKernel", f"device={d}"] for d in (0, 0, 1, 1, 0, 0)
    ]
    assert cuda_stub.fake_live_modules() == 4
    assert error_of(paged_prefill.preload, "cpu").startswith("Triton sparse_attn_v4_paged_prefill requires CUDA/HIP")
    """)


@pytest.mark.parametrize("slow", [0, 20_000])
def test_O26_32_threads_load_each_image_once(scenario, slow):
    scenario(f"""
    from fake_drivers.images import variant
    import threading
    use_images(variant("sm90a"))
    cuda_stub.fake_slow_load({slow})
    barrier, errors = threading.Barrier(32), []
    calls = [call(device=i % 2) for i in range(32)]
    def work(arguments):
        barrier.wait()
        try:
            for _ in range(20):
                out_operator(**arguments)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(arguments,)) for arguments in calls]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not errors, errors
    lines = log()
    assert sum("cuModuleLoadDataEx" in line for line in lines) == 2
    assert sum("cuInit" in line for line in lines) == 1
    assert sum("cuLaunchKernel" in line for line in lines) == 640
    """)


CUDA_CALLS = {
    "cuInit": "the CUDA driver",
    "cuDriverGetVersion": "the CUDA driver",
    "cuDeviceGet": "device 0",
    "cuDeviceGetName": "device 0",
    "cuDeviceGetAttribute": "device 0",
    "cuDevicePrimaryCtxRetain": "device 0",
    "cuCtxGetCurrent": "paged_prefill-bf16-h16-dany-sm90a",
    "cuCtxPushCurrent": "paged_prefill-bf16-h16-dany-sm90a",
    "cuThreadExchangeStreamCaptureMode": "paged_prefill-bf16-h16-dany-sm90a",
    "cuModuleLoadDataEx": "paged_prefill-bf16-h16-dany-sm90a",
    "cuModuleGetFunction": "paged_prefill-bf16-h16-dany-sm90a",
    "cuFuncSetAttribute": "paged_prefill-bf16-h16-dany-sm90a",
    "cuFuncGetAttribute": "paged_prefill-bf16-h16-dany-sm90a",
    "cuCtxPopCurrent": "paged_prefill-bf16-h16-dany-sm90a",
    "cuLaunchKernel": "paged_prefill-bf16-h16-dany-sm90a",
}
HIP_CALLS = {
    "hipInit": "the HIP runtime",
    "hipDriverGetVersion": "the HIP runtime",
    "hipGetDevicePropertiesR0600": "device 1",
    "hipDeviceGetAttribute": "device 1",
    "hipGetDevice": "paged_prefill-bf16-h16-dany-gfx942",
    "hipSetDevice": "paged_prefill-bf16-h16-dany-gfx942",
    "hipThreadExchangeStreamCaptureMode": "paged_prefill-bf16-h16-dany-gfx942",
    "hipModuleLoadData": "paged_prefill-bf16-h16-dany-gfx942",
    "hipModuleGetFunction": "paged_prefill-bf16-h16-dany-gfx942",
    "hipModuleLaunchKernel": "paged_prefill-bf16-h16-dany-gfx942",
}


OPENING_CALLS = [
    name for name, subject in {**CUDA_CALLS, **HIP_CALLS}.items() if not subject.startswith("paged_prefill")
]


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_any_failing_driver_call_is_told_and_the_next_call_works(scenario, vendor):
    """Each driver call fails in turn at each of its uses; nothing stays half loaded, no context stays pushed."""
    calls, target, stub, device = (
        (CUDA_CALLS, "sm90a", "cuda_stub", 0) if vendor == "cuda" else (HIP_CALLS, "gfx942", "hip_stub", 1)
    )
    error = "CUDA_ERROR_UNKNOWN" if vendor == "cuda" else "hipErrorUnknown"
    scenario(f"""
    from fake_drivers.images import variant
    use_images(variant({target!r}, shared=50_000), vendor={vendor!r})
    stub = {stub}
    arguments = call(device={device})
    for name, subject in {calls!r}.items():
        for nth in range(1, 5):
            loader.reset({device})
            loader.override({device}, IMAGES)
            before = stub.fake_live_modules()
            stub.fake_fail(name.encode(), nth, 999)
            try:
                out_operator(**arguments)
                text = None
            except RuntimeError as caught:
                text = str(caught)
            if text is None and nth > 1:
                stub.fake_fail(b"", 1, 0)
                break  # the call uses it less often
            if text is None:
                # what happens once in a process has happened: nothing asks again
                assert name in {OPENING_CALLS!r}, name
                break
            first, hint = text.split("\\n")
            assert first == f"{{name}} failed for {{subject}}: {error} (unknown error in words)", first
            assert hint
            assert stub.fake_live_modules() - before <= 1
            assert stub.fake_capture_mode() == 0
            if {vendor!r} == "cuda":
                assert stub.fake_context_depth() == 0
            else:
                assert stub.fake_current_device() == 0
            out_operator(**arguments)
            assert len(launches(stub)) >= 1
    """)


@pytest.mark.parametrize("call_name", OPENING_CALLS)
def test_a_device_that_fails_to_open_opens_at_the_next_call(scenario, call_name):
    vendor, target = ("cuda", "sm90a") if call_name.startswith("cu") else ("hip", "gfx942")
    subject = {**CUDA_CALLS, **HIP_CALLS}[call_name].replace("device 1", "device 0")
    scenario(f"""
    from fake_drivers.images import variant
    use_images(variant({target!r}), vendor={vendor!r})
    stub = {vendor}_stub
    stub.fake_fail(b"{call_name}", 1, 999)
    text = error_of(out_operator, **call())
    assert text.startswith("{call_name} failed for {subject}: "), text
    assert "(unknown error in words)" in text
    assert extension.loaded(0) == []
    out_operator(**call())
    assert len(launches(stub)) == 1
    """)


def test_an_image_the_driver_does_not_take(scenario):
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a"))
    cuda_stub.fake_fail(b"cuModuleLoadDataEx", 1, 209)
    text = error_of(out_operator, **call())
    failed = "cuModuleLoadDataEx failed for paged_prefill-bf16-h16-dany-sm90a"
    assert text.startswith(f"{failed}: CUDA_ERROR_NO_BINARY_FOR_GPU (words)\\n")
    assert "of version CUDA 13.0, does not take this image" in text and "ptxas says no" in text
    cuda_stub.fake_fail(b"cuModuleLoadDataEx", 1, 12345)
    text = error_of(out_operator, **call())
    assert text.startswith(f"{failed}: error 12345 (no description)\\n")
    """)


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_O24_first_call_inside_a_capture(scenario, vendor):
    """Loading happens in the relaxed mode, which a capture allows, and the thread's mode is put back."""
    target, stub, load = {
        "cuda": ("sm90a", "cuda_stub", b"cuModuleLoadDataEx"),
        "hip": ("gfx942", "hip_stub", b"hipModuleLoadData"),
    }[vendor]
    scenario(f"""
    from fake_drivers.images import variant
    use_images(variant({target!r}), vendor={vendor!r})
    {stub}.fake_capture(1)
    {stub}.fake_fail({load!r}, 1, 900)
    text = error_of(out_operator, **call())
    assert "call paged_prefill.preload() before it" in text, text
    out_operator(**call())
    assert {stub}.fake_capture_mode() == 0
    assert len(launches({stub})) == 1
    """)


def test_fork(scenario):
    """A fork before the first call works in both processes; after it, the child is told, and so are its children."""
    scenario("""
    from fake_drivers.images import variant
    import os
    use_images(variant("sm90a"))
    arguments = call()
    def in_child(work):
        child = os.fork()
        if child == 0:
            try:
                work()
                os._exit(0)
            except BaseException as error:
                print(error, flush=True)
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    in_child(lambda: out_operator(**arguments))
    assert not log()
    out_operator(**arguments)
    def refused():
        for function in (lambda: out_operator(**arguments), lambda: paged_prefill.preload(0)):
            text = error_of(function)
            assert text.startswith("paged_prefill cannot use the GPU in a forked process"), text
            assert "spawn" in text
    in_child(refused)
    in_child(lambda: in_child(refused))
    out_operator(**arguments)
    assert len(launches()) == 2
    """)


def test_a_primary_context_reset(scenario):
    """Before the first call it changes nothing; after it, one call tells and the next one loads anew."""
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a"))
    cuda_stub.fake_reset(0)
    for _ in range(2):
        out_operator(**call())
        out_operator(**call(device=1))
        log()
        cuda_stub.fake_reset(0)
        text, hint = error_of(out_operator, **call()).split("\\n")
        assert text.startswith("cuLaunchKernel failed for paged_prefill-bf16-h16-dany-sm90a: error 709"), text
        assert "the next call loads it anew" in hint
        assert extension.loaded(0) == [] and len(extension.loaded(1)) == 1
        assert cuda_stub.fake_context_depth() == 0
    # The same where the context itself is refused, at a launch and at a load.
    for name, loaded in (("cuCtxPushCurrent", True), ("cuModuleLoadDataEx", False)):
        out_operator(**call())
        if not loaded:
            loader.override(0, IMAGES)
        cuda_stub.fake_fail(name.encode(), 1, 201)
        assert "the next call loads it anew" in error_of(out_operator, **call())
        assert extension.loaded(0) == []
        log()
        out_operator(**call())
        assert [line.split()[0] for line in log()] == [
            "cuDevicePrimaryCtxRetain", "cuModuleLoadDataEx", "cuLaunchKernel"
        ]
    cuda_stub.fake_reset(0)
    error_of(out_operator, **call())
    out_operator(**call())
    out_operator(**call(device=1))
    assert len([line for line in log() if "cuModuleLoadDataEx" in line]) == 1
    """)


def test_hip(scenario):
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("gfx942", threads=256, shared=65536), vendor="hip")
    hip_stub.fake_make_current(0)
    a = call(device=1)
    out_operator(**a)
    (launch,) = launches(hip_stub)
    assert (launch["device"], launch["stream"], launch["grid"], launch["block"]) == ("1", "0x5100", "3,1,1", "256,1,1")
    assert launch["shared"] == "65536" and launch["arguments"]["q_ptr"] == a["q"].data_ptr()
    assert launch["scratch"] == [bytes(8), bytes(8)]
    assert hip_stub.fake_current_device() == 0
    assert not log(cuda_stub)
    """)


def test_a_grid_beyond_hips_limit_is_cut(scenario):
    """HIP counts threads below 2^32: 2^24 blocks of 256 are one too many."""
    scenario("""
    from fake_drivers.images import variant
    from fake_drivers.dlpack import wrap
    use_images(variant("gfx942", threads=1024, head_tile=1), vendor="hip")
    # Nothing reads these tensors, so a stride of 0 in the guards' eyes is all the memory they need.
    T, H, D = 2**17, 128, 8
    a = call(H=H, D=D)
    memory = torch.empty(T * H * D, dtype=torch.bfloat16)
    lists = torch.empty(T + 1, dtype=torch.int32)
    a |= {"out": cuda(memory.view(T, H, D)), "q": cuda(memory.view(T, H, D))}
    a |= {"kv_indptr_prefix": cuda(lists), "kv_indptr_extend": cuda(lists)}
    out_operator(**a)
    cut = launches(hip_stub)
    step = (2**32 - 1) // 1024
    tiles = T * H
    assert [int(launch["grid"].split(",")[0]) for launch in cut] == [step] * (tiles // step) + [tiles % step]
    assert [launch["arguments"]["first_tile"] for launch in cut] == list(range(0, tiles, step))
    assert {launch["arguments"]["num_tiles"] for launch in cut} == {tiles}
    """)


def test_O13_O18_O19_conversions(scenario):
    """int64 and strided lists, sinks of other dtypes, and a q whose last dimension is strided: what the kernel gets."""
    scenario("""
    from fake_drivers.images import variant
    from fake_drivers.dlpack import wrap
    use_images(variant("sm90a"))
    offer_allocation()
    hostile = torch.tensor([0, 2**32 + 5, -(2**32) + 5, 2**31, -(2**31) - 1, 2**63 - 1], dtype=torch.int64)
    narrowed = [0, 2**31 - 1, -1, 2**31 - 1, -1, 2**31 - 1]
    def read(pointer, count, dtype):
        return wrap(pointer, (count,), (1,), dtype, 1, 0).tolist()
    for function in (attention, out_operator):
        a = call()
        if function is attention:
            a.pop("lse")
        a["kv_indices_prefix"] = cuda(hostile)
        a["kv_indptr_prefix"] = cuda(torch.tensor([0, 1, 2**40, -(2**40)]))
        wide = torch.arange(12, dtype=torch.int32)
        a["kv_indices_extend"] = cuda(wide[::2])
        a["kv_indptr_extend"] = cuda(torch.arange(8)[::2])
        a["attn_sink"] = cuda(torch.arange(8, dtype=torch.float16)[::2])
        base = torch.arange(3 * 4 * 128).view(3, 4, 128).to(torch.bfloat16)
        a["q"] = cuda(base[:, :, ::2])
        function(**a)
        (launch,) = launches()
        got = launch["arguments"]
        assert read(got["kv_indices_prefix_ptr"], 6, torch.int32) == narrowed
        assert read(got["kv_indptr_prefix_ptr"], 4, torch.int32) == [0, 1, 2**31 - 1, -1]
        assert read(got["kv_indices_extend_ptr"], 6, torch.int32) == wide[::2].tolist()
        assert read(got["kv_indptr_extend_ptr"], 4, torch.int32) == [0, 2, 4, 6]
        assert read(got["attn_sink_ptr"], 4, torch.float32) == [0.0, 2.0, 4.0, 6.0]
        assert got["q_ptr"] != a["q"].data_ptr() and (got["q_stride_t"], got["q_stride_h"]) == (256, 64)
        assert read(got["q_ptr"], 768, torch.bfloat16) == base[:, :, ::2].flatten().tolist()
    """)


def test_results_are_allocated_when_none_are_given(scenario):
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a"))
    offer_allocation()
    a = {k: v for k, v in call().items() if k not in ("out", "lse")}
    out = attention(**a)
    (launch,) = launches()
    assert out.shape == (3, 4, 64) and out.dtype == torch.bfloat16 and launch["arguments"]["out_ptr"] == out.data_ptr()
    out, lse = attention(**a, return_lse=True)
    (launch,) = launches()
    assert lse.shape == (3, 4) and lse.dtype == torch.float32 and launch["arguments"]["lse_ptr"] == lse.data_ptr()
    assert attention(**a, out=a["q"]) is a["q"]
    assert launches()[0]["arguments"]["out_ptr"] == a["q"].data_ptr()
    out, lse = operator(**a)
    assert lse.shape == (0,) and launches()[0]["arguments"]["has_lse"] == 0
    out, lse = operator(**a, return_lse=True, replicated_logit_shift=1.0)
    assert lse.shape == (3, 4) and launches()[0]["arguments"]["lse_ptr"] == lse.data_ptr()

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("no memory")
    loader.torch.empty = loader.torch.empty_like = exhausted
    for function in (attention, operator):
        try:
            function(**a)
            raise AssertionError("no error")
        except torch.OutOfMemoryError:
            pass
    """)


def test_ptx_is_announced_once_it_is_compiled(scenario):
    scenario("""
    from fake_drivers.images import variant
    import logging
    records = []
    logging.getLogger("paged_prefill").addHandler(logging.Handler())
    logging.getLogger("paged_prefill").handlers[0].emit = records.append
    logging.getLogger("paged_prefill").setLevel(logging.INFO)
    cuda_stub.fake_device(13, 0, 13040)
    use_images(variant("ptx"), variant("sm90a"))
    for _ in range(3):
        out_operator(**call())
    assert extension.last_launch(0) == "paged_prefill-bf16-h16-dany-ptx"
    messages = [record.getMessage() for record in records]
    assert messages[:2] == [
        "device 0 (Fake GPU MIG 1g.5gb 0, sm_130) is served by the ptx images",
        "the driver compiles paged_prefill-bf16-h16-dany-ptx for sm_130: "
        "seconds at the first load, then from its own cache"
    ], messages
    assert len(messages) == 3, messages
    assert messages[2].startswith("device 0 loaded paged_prefill-bf16-h16-dany-ptx in "), messages
    """)


def test_W10_a_driver_older_than_the_images_is_told_both_versions(scenario):
    scenario("""
    from fake_drivers.images import variant
    cuda_stub.fake_device(9, 0, 12080)
    use_images(variant("sm90a"))
    for function in (lambda: out_operator(**call()), lambda: paged_prefill.preload(0)):
        text, hint = error_of(function).split("\\n")
        assert text == "this paged_prefill wheel has no kernel image for device 0: Fake GPU MIG 1g.5gb 0, sm_90"
        reason = "sm90a needs a driver for CUDA 13.0 or later, this one is for CUDA 12.8: update the driver"
        assert reason in hint, hint
    """)


def test_W10_an_older_driver_is_warned_of(scenario):
    scenario("""
    from fake_drivers.images import variant
    import logging
    records = []
    logging.getLogger("paged_prefill").addHandler(logging.Handler())
    logging.getLogger("paged_prefill").handlers[0].emit = records.append
    cuda_stub.fake_device(9, 0, 12080)
    use_images(variant("ptx"), variant("sm90a"))
    out_operator(**call())
    assert extension.last_launch(0) == "paged_prefill-bf16-h16-dany-ptx"
    (record,) = records
    assert record.levelno == logging.WARNING and "CUDA 13.0 or later, this one is for CUDA 12.8" in record.getMessage()
    """)


def test_override_forces_a_target(scenario):
    scenario("""
    from fake_drivers.images import variant
    use_images(variant("sm90a"), variant("ptx"), variant("sm80"))
    for target in ("ptx", "sm80", "sm90a"):
        loader.override(0, IMAGES, target)
        out_operator(**call())
        assert extension.last_launch(0).endswith("-" + target)
    loader.override(0, IMAGES)
    out_operator(**call())
    assert extension.last_launch(0).endswith("-sm90a")
    """)


def test_a_package_whose_images_are_asked_for_by_no_one_opens_nothing(scenario):
    scenario("""
    assert not log() and not log(hip_stub)
    assert extension.loaded(0) == [] and extension.loaded(-1) == [] and extension.last_launch(1000) is None
    for ordinal in (-1, 128, 10**6):
        assert "device ordinal out of range" in error_of(extension.preload, ordinal)
    """)


def test_facts_of_a_device_are_the_drivers(scenario):
    scenario("""
    cuda_stub.fake_device(10, 3, 13010)
    from paged_prefill import _choice, _devices
    vendor, architecture, driver, name, limit = extension.device_facts(1)
    assert (vendor, architecture, driver) == ("cuda", "sm_103", 13010)
    assert "Fake GPU" in name and limit > 0
    assert "ordinal" in error_of(extension.device_facts, -1)
    torch.cuda.device_count = lambda: 1
    assert [facts for _, facts in _devices.visible()] == [_choice.DeviceFacts("cuda", "sm_103", 13010, limit)]
    """)
