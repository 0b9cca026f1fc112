"""Devices, streams, captures, threads and first calls, on a GPU; and which kernel image a call runs on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

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
