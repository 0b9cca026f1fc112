"""Devices, streams, captures, threads and first calls, on a GPU; and which kernel image a call runs on."""

from __future__ import annotations

import statistics
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import cases
import paged_prefill
from oracle import assert_close

pytestmark = pytest.mark.gpu


def call(case, **keywords):
    return paged_prefill.sparse_attn_v4_paged_prefill(*case.args(), **keywords)


def in_new_process(body):
    """Runs `body` where no call has been made yet; `case` and `expected` are there, the latter from the reference."""
    prelude = """
        import sys, threading, traceback
        sys.path.insert(0, {tests!r})
        import torch, paged_prefill, cases, oracle
        case = cases.build("ragged", device="cuda")
        expected = paged_prefill.reference(*case.args(), compute_dtype=torch.float64, out_dtype=torch.float64)
        call = lambda **keywords: paged_prefill.sparse_attn_v4_paged_prefill(*case.args(), **keywords)
    """.format(tests=str(cases.__file__).rpartition("/")[0])
    code = textwrap.dedent(prelude) + textwrap.dedent(body)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# Which kernel ran


def variants_of_the_device():
    from paged_prefill import _C, _devices, _manifest

    paged_prefill.preload()
    loaded = set(_C.loaded(torch.cuda.current_device()))
    listed = [variant for variant in _manifest.read_manifest().data["variants"] if variant["id"] in loaded]
    return listed, _devices.variant_for


@pytest.mark.parametrize("head_dim", [8, 64, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_call_runs_on_the_first_variant_that_takes_it(device, dtype, head_dim):
    from paged_prefill import _C

    variants, variant_for = variants_of_the_device()
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    for heads in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128):
        case = cases.build("one_token", device=device, dtype=dtype, heads=heads, head_dim=head_dim)
        shifted = torch.empty(case.q.numel() + 1, dtype=dtype, device=device)[1:].view(case.q.shape).copy_(case.q)
        for q, aligned in ((case.q, True), (shifted, False)):
            expected = variant_for(variants, name, heads, head_dim, aligned)
            call(case.with_(q=q))
            assert _C.last_launch(torch.cuda.current_device()) == expected["id"]


def test_images_serve_this_device_only(device):
    variants, _ = variants_of_the_device()
    assert len({variant["target"] for variant in variants}) == 1


# O22: devices


@pytest.fixture
def two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")


def test_O22_device_is_the_tensors(two_devices, check):
    torch.cuda.set_device(0)
    for ordinal in (1, 0, 1):
        case = cases.build("ragged", device=f"cuda:{ordinal}")
        out, _ = check(case)
        assert out.device.index == ordinal
        assert torch.cuda.current_device() == 0


def test_O22_one_tensor_on_another_device_is_refused(two_devices):
    case = cases.build("ragged", device="cuda:1")
    for name in ("unified_kv", "kv", "attn_sink", "kv_indices_prefix", "kv_indptr_extend"):
        with pytest.raises(RuntimeError, match=f"{name} device mismatch"):
            call(case.with_(**{name: getattr(case, name).to("cuda:0")}))
    with pytest.raises(RuntimeError, match="out device mismatch"):
        call(case, out=torch.empty_like(case.q, device="cuda:0"))


@pytest.mark.parametrize("name", ["unified_kv", "kv", "attn_sink", "kv_indices_prefix", "kv_indptr_extend"])
def test_O22_one_tensor_on_the_cpu_is_refused(device, name):
    case = cases.build("ragged", device=device)
    with pytest.raises(RuntimeError, match=f"{name} device mismatch"):
        call(case.with_(**{name: getattr(case, name).cpu()}))


# O23: captures and streams


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_O23_replay_follows_its_inputs(device, expect, heads):
    case = cases.build("ragged", device=device, heads=heads)
    call(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(case)
    for seed in (1, 2):
        case.q.copy_(torch.randn(case.q.shape, generator=torch.Generator().manual_seed(seed)))
        case.attn_sink.add_(0.25)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, expect(case)[0])


def test_O23_int64_lists_and_bf16_sink_in_a_capture(device):
    case = cases.build("ragged", device=device)
    wide = case.with_(kv_indices_prefix=case.kv_indices_prefix.long(), attn_sink=case.attn_sink.bfloat16())
    expected = call(wide)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(wide)
    graph.replay()
    assert torch.equal(out, expected)


def test_O23_replay_follows_every_input(device, expect):
    """Lists, bounds and tables changed in place between replays, as a server does with its static buffers."""
    first, second = (cases.build(name, device=device) for name in ("ragged", "ragged"))
    second = second.with_(
        kv_indices_prefix=second.kv_indices_prefix.flip(0),
        kv_indptr_prefix=second.kv_indptr_prefix.clamp(max=60),
        kv_indptr_extend=(second.kv_indptr_extend - 3).clamp(min=0),
        unified_kv=second.unified_kv.nan_to_num(nan=0.5) * 0.5,
        kv=second.kv.nan_to_num(nan=0.25) + 1,
    )
    graph = torch.cuda.CUDAGraph()
    static = first.with_(
        **{name: value.clone() for name, value in vars(first).items() if isinstance(value, torch.Tensor)}
    )
    call(static)
    with torch.cuda.graph(graph):
        out, lse = call(static, return_lse=True)
    for case in (first, second, first):
        for name, value in vars(case).items():
            if isinstance(value, torch.Tensor):
                getattr(static, name).copy_(value)
        graph.replay()
        assert_close(out, expect(case)[0])
        assert torch.equal(lse, call(case, return_lse=True)[1])


def test_O23_a_capture_holds_no_memory_but_the_results(device):
    case = cases.build("ragged", device=device)
    out = torch.empty_like(case.q)
    call(case, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        during = torch.cuda.memory_allocated()
        for _ in range(3):
            call(case, out=out)
        assert torch.cuda.memory_allocated() == during
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, call(case))
    del graph
    assert torch.cuda.memory_allocated() <= before


def test_O04_O23_no_tokens_in_a_capture(device):
    """Nothing is launched: the graph holds the addition only."""
    case = cases.build("ragged", device=device)
    none = case.take(0, 0)
    total = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(none, return_lse=True)
        total.add_(1)
    graph.replay()
    assert total.item() == 1
    assert out.shape == (0, *case.q.shape[1:]) and lse.shape == (0, case.q.size(1))


def test_O23_side_stream_keeps_its_order(device):
    case = cases.build("ragged", device=device)
    expected = call(case)
    q = torch.full_like(case.q, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so, ahead of the input's arrival
        q.copy_(case.q)
        out = call(case.with_(q=q))
        doubled = out * 2
    side.synchronize()
    assert torch.equal(doubled, expected * 2)


# O24, O25, O26: first calls


def test_O24_first_call_in_a_capture():
    """Works, or says what to do; after preload() it works."""
    capture = """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = call()
        except RuntimeError:
            print("preload()" in traceback.format_exc())  # the capture's own error may come on top
        else:
            graph.replay()
            oracle.assert_close(out, expected)
            print(True)
    """
    assert in_new_process(capture) == "True"
    body = """
        paged_prefill.preload()
        for heads in (8, 16, 32, 64, 128):
            for head_dim in (64, 128, 256, 512, 72):
                for dtype in (torch.bfloat16, torch.float16):
                    case = cases.build("ragged", device="cuda", heads=heads, head_dim=head_dim, dtype=dtype)
                    expected = paged_prefill.reference(
                        *case.args(), compute_dtype=torch.float64, out_dtype=torch.float64
                    )
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = call()
                    graph.replay()
                    oracle.assert_close(out, expected)
        print("preloaded")
    """
    assert in_new_process(body) == "preloaded"


def test_O25_a_thread_after_the_first_call_of_another():
    body = """
        outs = []
        for _ in range(2):
            out = torch.full_like(case.q, float("nan"))
            thread = threading.Thread(target=call, kwargs={"out": out})
            thread.start(); thread.join()
            torch.cuda.synchronize()
            oracle.assert_close(out, expected)
        print("threads")
    """
    assert in_new_process(body) == "threads"


def test_O25_first_call_of_all_in_a_thread_that_never_touched_cuda():
    body = """
        out = torch.full_like(case.q, float("nan"))
        torch.cuda.synchronize()
        thread = threading.Thread(target=call, kwargs={"out": out})
        thread.start(); thread.join()
        torch.cuda.synchronize()
        oracle.assert_close(out, expected)
        print("thread")
    """
    assert in_new_process(body) == "thread"


def test_fork_after_the_first_call_is_told():
    body = """
        import os
        call()
        torch.cuda.synchronize()
        q, lists = case.q, case.args()[1:]
        child = os.fork()
        if child == 0:
            try:  # torch itself refuses what needs its CUDA runtime; with out= the call reaches the launcher
                paged_prefill.sparse_attn_v4_paged_prefill(q, *lists, out=q)
            except RuntimeError as error:
                os._exit(0 if str(error).startswith("paged_prefill cannot use the GPU in a forked process") else 2)
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        oracle.assert_close(call(), expected)
    """
    assert in_new_process(body) == "0"


def reset_primary_context(before):
    """Code that resets device 0's primary context as another library in the process may."""
    if torch.version.hip:
        pytest.skip("primary contexts are CUDA's")
    return f"""
        import ctypes
        driver = ctypes.CDLL("libcuda.so.1")
        {before}
        torch.cuda.synchronize()
        inputs = [x.cpu() if isinstance(x, torch.Tensor) else x for x in case.args()]
        expected = expected.cpu()
        assert driver.cuDevicePrimaryCtxReset_v2(0) == 0
        # torch's memory is gone with the context: the driver's own is used, and torch only describes it
        assert driver.cuInit(0) == 0
        context = ctypes.c_void_p()
        assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert driver.cuCtxSetCurrent(context) == 0
        sys.path.insert(0, {str(cases.__file__).rpartition("/")[0]!r})
        from fake_drivers.dlpack import wrap
        def on_device(tensor):
            pointer = ctypes.c_uint64()
            size = ctypes.c_size_t(max(tensor.nbytes, 16))
            assert driver.cuMemAlloc_v2(ctypes.byref(pointer), size) == 0
            if tensor.nbytes:
                source = ctypes.c_void_p(tensor.data_ptr())
                assert driver.cuMemcpyHtoD_v2(pointer, source, ctypes.c_size_t(tensor.nbytes)) == 0
            return wrap(pointer.value, tensor.shape, tensor.stride(), tensor.dtype, 2, 0)
        moved = [on_device(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        out = on_device(torch.zeros_like(inputs[0]))
        told = []
        for _ in range(2):
            try:
                paged_prefill.sparse_attn_v4_paged_prefill(*moved, out=out)
                break
            except RuntimeError as error:
                told.append(str(error))
        assert len(told) < 2, told
        assert not told or "the next call loads it anew" in told[0], told
        assert driver.cuCtxSynchronize() == 0
        result = torch.empty_like(inputs[0])
        size = ctypes.c_size_t(result.nbytes)
        assert driver.cuMemcpyDtoH_v2(ctypes.c_void_p(result.data_ptr()), ctypes.c_uint64(out.data_ptr()), size) == 0
        oracle.assert_close(result, expected)
        print(len(told), flush=True)
        import os
        os._exit(0)  # torch's own cleanup finds its context gone
    """


def test_primary_context_reset_before_the_first_call():
    assert in_new_process(reset_primary_context("pass")) == "0"


def test_primary_context_reset_after_the_first_call():
    """Either the next call works, or it tells and the one after it works."""
    assert in_new_process(reset_primary_context("call()")) in ("0", "1")


def test_O26_32_threads_make_the_first_call():
    body = """
        from paged_prefill import _C, _loader
        reads = []
        inner = _loader._manifest.Manifest.read_image
        _loader._manifest.Manifest.read_image = lambda self, name: (reads.append(name), inner(self, name))[1]
        barrier, results, errors = threading.Barrier(32), [None] * 32, []
        def work(i):
            try:
                barrier.wait()
                results[i] = call()
                torch.cuda.synchronize()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        assert not errors, errors
        for out in results:
            oracle.assert_close(out, expected)
        assert len(reads) == len(set(reads)) >= 1, reads
        loaded = _C.loaded(torch.cuda.current_device())
        assert len(loaded) == len(set(loaded)), loaded
        print("once")
    """
    assert in_new_process(body) == "once"


def test_threads_with_streams_of_their_own(device):
    case = cases.build("ragged", device=device)
    expected = call(case)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(call(case), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_out_of_memory_is_torchs_own_error(device):
    heads = 128
    tokens = torch.cuda.mem_get_info()[1] // (heads * 512 * 2) + 1
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device).expand(tokens, heads, 512)
    table = torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    indptr = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        paged_prefill.sparse_attn_v4_paged_prefill(q, table, indptr[:0], indptr, table, indptr[:0], indptr, None, 1.0)


def test_no_memory_is_kept(device):
    case = cases.build("ragged", device=device)
    call(case)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        call(case, return_lse=True)
    assert torch.cuda.memory_allocated() == before


def test_same_rows_in_pools_of_two_sizes_give_the_same_bits(device):
    for heads in (8, 16, 32, 64, 128):
        case = cases.build("ragged", device=device, heads=heads)
        larger = torch.full((100_000, case.q.size(2)), float("nan"), dtype=case.q.dtype, device=device)
        larger[: len(case.unified_kv)] = case.unified_kv
        for a, b in zip(
            call(case, return_lse=True), call(case.with_(unified_kv=larger), return_lse=True), strict=True
        ):
            assert torch.equal(a, b)


def test_cpu_time_of_a_call_is_at_most_two_small_additions(device):
    """Interleaved in one run, with results allocated and with grad mode as it comes; medians of many rounds."""
    case = cases.build("one_token", device=device)
    x = torch.zeros(8, device=device)
    arguments = case.args()
    times = {"call": [], "add": []}
    for _ in range(200):
        torch.cuda.synchronize()
        for name, function in (
            ("call", lambda: paged_prefill.sparse_attn_v4_paged_prefill(*arguments)),
            ("add", lambda: torch.add(x, x)),
        ):
            start = time.perf_counter()
            for _ in range(20):
                function()
            times[name].append((time.perf_counter() - start) / 20 * 1e6)
            torch.cuda.synchronize()
    one_call, one_add = (statistics.median(times[name]) for name in ("call", "add"))
    print(f"a call takes {one_call:.1f} us of CPU time, torch.add {one_add:.1f} us: {one_call / one_add:.2f}")
    assert one_call <= 2 * one_add, f"{one_call:.1f} us against {one_add:.1f} us"
