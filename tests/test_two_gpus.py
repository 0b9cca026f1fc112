"""What only two GPUs of one host can show: each call runs on its tensors' device, whatever the others do."""

from __future__ import annotations

import threading

import pytest
import torch

import cases
import paged_prefill
from oracle import assert_close
from test_runtime import in_new_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        0 < torch.cuda.device_count() < 2, reason=f"needs two GPUs, this machine has {torch.cuda.device_count()}"
    ),
]
ORDINALS = (0, 1)


def call(case):
    return paged_prefill.sparse_attn_v4_paged_prefill(*case.args())


def case_on(ordinal):
    return cases.build("ragged", device=f"cuda:{ordinal}", seed=ordinal)


def test_O22_calls_interleaved_from_two_threads(expect):
    """Thread i alternates between the devices, and both threads share each device's default stream."""
    both = [case_on(ordinal) for ordinal in ORDINALS]
    first = [call(case) for case in both]
    for case, out in zip(both, first, strict=True):
        assert_close(out, expect(case)[0])
    for ordinal in ORDINALS:
        torch.cuda.synchronize(ordinal)
    wrong, barrier = [], threading.Barrier(2)

    def work(start):
        torch.cuda.set_device(start)
        barrier.wait()
        for i in range(200):
            ordinal = (start + i) % 2
            out = call(both[ordinal])
            if out.device.index != ordinal or torch.cuda.current_device() != start:
                wrong.append((start, i, out.device))
            elif not torch.equal(out, first[ordinal]):
                wrong.append((start, i, "other bits"))

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in ORDINALS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_O26_first_calls_on_both_devices_from_32_threads():
    body = """
        from paged_prefill import _C
        both = [cases.build("ragged", device=f"cuda:{i}") for i in (0, 1)]
        barrier, results, errors = threading.Barrier(32), [None] * 32, []
        def work(i):
            try:
                barrier.wait()
                results[i] = paged_prefill.sparse_attn_v4_paged_prefill(*both[i % 2].args())
                torch.cuda.synchronize(i % 2)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        assert not errors, errors
        for i, out in enumerate(results):
            assert out.device.index == i % 2
            oracle.assert_close(out, expected.to(out.device))
        for ordinal in (0, 1):
            loaded = _C.loaded(ordinal)
            assert len(loaded) == len(set(loaded)) >= 1, loaded
        print("both")
    """
    assert in_new_process(body) == "both"


def test_O23_captures_on_each_device():
    graphs = []
    for ordinal in ORDINALS:
        case = case_on(ordinal)
        with torch.cuda.device(ordinal):
            expected = call(case)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call(case)
        graphs.append((graph, out, expected))
    for graph, out, expected in reversed(graphs):
        out.fill_(float("nan"))
        with torch.cuda.device(out.device):
            graph.replay()
        assert torch.equal(out, expected)


def test_O24_preload_of_all_devices_before_any_call():
    body = """
        from paged_prefill import _C
        for device in (1, "cuda:0"):
            paged_prefill.preload(device)
        loaded = [_C.loaded(ordinal) for ordinal in (0, 1)]
        assert loaded[0] == loaded[1] and loaded[0], loaded
        for ordinal in (1, 0):
            case = cases.build("ragged", device=f"cuda:{ordinal}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(ordinal), torch.cuda.graph(graph):
                out = paged_prefill.sparse_attn_v4_paged_prefill(*case.args())
            with torch.cuda.device(ordinal):
                graph.replay()
            oracle.assert_close(out, expected.to(out.device))
        assert [_C.loaded(ordinal) for ordinal in (0, 1)] == loaded
        print("preloaded")
    """
    assert in_new_process(body) == "preloaded"


def test_a_stream_of_one_device_does_not_carry_the_others_call():
    """The current device's stream is busy; a call on the other device neither waits for it nor runs on it."""
    case = case_on(1)
    expected = call(case)
    torch.cuda.synchronize(1)
    torch.cuda.set_device(0)
    torch.cuda._sleep(2_000_000_000)  # about a second
    out = call(case)
    torch.cuda.synchronize(1)
    assert not torch.cuda.current_stream(0).query(), "device 0 was waited for"
    assert torch.equal(out, expected)
    torch.cuda.synchronize(0)
