"""The adapters, against packages that define, re-export and copy the public function as the hosts do."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
import textwrap
import threading
from importlib.metadata import entry_points

import pytest
import torch

import cases
import paged_prefill
from oracle import assert_close
from paged_prefill.integrations import _replace, atom, install_from_environment, sglang, uninstall

NAME = "sparse_attn_v4_paged_prefill"
NINE = (
    "q: torch.Tensor, unified_kv: torch.Tensor, kv_indices_prefix: torch.Tensor, kv_indptr_prefix: torch.Tensor, "
    "kv: torch.Tensor, kv_indices_extend: torch.Tensor, kv_indptr_extend: torch.Tensor, attn_sink: torch.Tensor, "
    "softmax_scale: float"
)
# What follows the nine arguments in the hosts' versions.
SGLANG_TAILS = {
    "plain": "",
    "lse": ", return_lse: bool = False, replicated_logit_shift: float = 0.0",
    "mxfp8": ", unified_kv_rope=None, kv_extend_nope=None, kv_extend_rope=None",
}
ATOM_TAILS = {
    "plain": "",
    "out": ", out: torch.Tensor | None = None",
    "fp8": (
        ", out=None, unified_kv_rope=None, q_packed=None, q_rope=None, k_packed=None, k_rope=None, "
        "prefix_has_sentinel=True, max_seqlen_q=0, max_seqlen_k=0, prefix=''"
    ),
}
SGLANG = {
    "kernels": "sglang.kernels.ops.attention.dsv4.unified_kv_kernels",
    "srt": "sglang.srt.layers.attention.dsv4.unified_kv_kernels",
}
ATOM = "atom.model_ops.v4_kernels"

DEFINITION = """
    from __future__ import annotations
    import torch
    calls = []

    def sparse_attn_v4_paged_prefill({signature}):
        "The host's words."
        calls.append(locals())
        return "the host's result"
"""
RUNTIME = """
    from {package}.paged_prefill import (
        sparse_attn_v4_paged_prefill,
    )

    def prefill(*, q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv_extend, kv_indices_extend,
                kv_indptr_extend, attn_sink, softmax_scale, **more):
        return sparse_attn_v4_paged_prefill(
            q, unified_kv, kv_indices_prefix, kv_indptr_prefix, kv_extend, kv_indices_extend, kv_indptr_extend,
            attn_sink, softmax_scale, **more)
"""
BACKEND = """
    def forward(**arguments):
        from {package} import runtime
        return runtime.prefill(**arguments)
"""
PLUGINS = """
    from importlib.metadata import entry_points

    def load_plugins():
        for entry_point in entry_points(group="sglang.srt.plugins"):
            entry_point.load()()
"""
ATOM_INIT = """
    from atom.model_ops.v4_kernels.paged_prefill import (
        sparse_attn_v4_paged_prefill,
    )

    __all__ = ["sparse_attn_v4_paged_prefill"]
"""
ATOM_MODEL = """
    from atom.model_ops.v4_kernels import (  # noqa: F401
        sparse_attn_v4_paged_prefill,
    )
    from atom.model_ops.v4_kernels import sparse_attn_v4_paged_prefill as attend

    def forward(*arguments, **keywords):
        return attend(*arguments, **keywords)
"""


def write(root, modules):
    for name, text in modules.items():
        file = root.joinpath(*name.split("."))
        for parent in list(file.relative_to(root).parents)[:-1]:
            (root / parent).mkdir(parents=True, exist_ok=True)
            (root / parent / "__init__.py").touch()
        if file.is_dir():
            file /= "__init__"
        file.with_suffix(".py").write_text(textwrap.dedent(text))


def write_sglang(root, layout="kernels", tail="lse"):
    package = SGLANG[layout]
    definition = DEFINITION.format(signature=NINE + SGLANG_TAILS[tail])
    write(
        root,
        {
            f"{package}.paged_prefill": definition,
            f"{package}.runtime": RUNTIME.format(package=package),
            "sglang.srt.layers.attention.backend": BACKEND.format(package=package),
            "sglang.srt.plugins": PLUGINS,
        },
    )
    return package


def write_atom(root, tail="out"):
    write(
        root,
        {
            f"{ATOM}.paged_prefill": DEFINITION.format(signature=NINE + ATOM_TAILS[tail]),
            "atom.models.deepseek_v4": ATOM_MODEL,
        },
    )
    (root / "atom/model_ops/v4_kernels/__init__.py").write_text(textwrap.dedent(ATOM_INIT))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder for a stand-in host, at the head of sys.path; the host is forgotten afterwards."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("sglang", "atom")]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    uninstall()
    forget()


@pytest.fixture
def served(monkeypatch):
    """The calls that reach the operator, which the reference computes on the CPU."""
    calls = []

    def operator(**arguments):
        calls.append(arguments)
        return paged_prefill.reference(**arguments)

    monkeypatch.setattr(_replace, NAME, operator)
    return calls


@pytest.fixture
def case():
    return cases.build("ragged", heads=3, head_dim=64)


def function_of(module):
    return getattr(importlib.import_module(module), NAME)


def host_calls(package):
    return importlib.import_module(f"{package}.paged_prefill").calls


@pytest.mark.parametrize("first", ["host", "adapter"])
@pytest.mark.parametrize("tail", SGLANG_TAILS)
@pytest.mark.parametrize("layout", SGLANG)
def test_sglang(root, served, case, layout, tail, first):
    package = write_sglang(root, layout, tail)
    if first == "host":
        importlib.import_module(f"{package}.runtime")
        assert sglang.install() == [f"{package}.paged_prefill", f"{package}.runtime"]
    else:
        assert sglang.install() == []
        assert not any(name.startswith("sglang") for name in sys.modules)
    keywords = dict(zip(inspect.signature(paged_prefill.reference).parameters, case.args(), strict=False))
    keywords["kv_extend"] = keywords.pop("kv")
    if tail == "lse":
        keywords |= {"return_lse": True, "replicated_logit_shift": -0.5}
    forward = importlib.import_module("sglang.srt.layers.attention.backend").forward
    result = forward(**keywords)
    assert len(served) == 1
    assert host_calls(package) == []
    if tail == "lse":
        out, lse = result
        expected, expected_lse = paged_prefill.reference(*case.args(), True, -0.5)
        assert lse.equal(expected_lse)
    else:
        out, expected = result, paged_prefill.reference(*case.args())
    assert out.equal(expected)

    assert f"{package}.runtime" in sglang.uninstall()
    assert forward(**keywords) == "the host's result"
    assert not hasattr(function_of(f"{package}.paged_prefill"), "__wrapped__")


@pytest.mark.parametrize("first", ["host", "adapter"])
@pytest.mark.parametrize("tail", ATOM_TAILS)
def test_atom(root, served, case, tail, first):
    write_atom(root, tail)
    if first == "host":
        importlib.import_module("atom.models.deepseek_v4")
        # The model holds it twice.
        assert sorted(atom.install()) == [ATOM, f"{ATOM}.paged_prefill", *["atom.models.deepseek_v4"] * 2]
    else:
        assert atom.install() == []
    forward = importlib.import_module("atom.models.deepseek_v4").forward
    expected = paged_prefill.reference(*case.args())
    assert forward(*case.args()).equal(expected)
    if tail != "plain":
        q = case.q.clone()
        assert forward(q, *case.args()[1:], q) is q  # the tenth positional argument is out
        assert q.equal(expected)
        out = torch.empty_like(case.q)
        assert forward(*case.args(), out=out) is out
    if tail == "fp8":  # descriptions of the lists change nothing
        assert forward(*case.args(), prefix_has_sentinel=False, max_seqlen_q=3, prefix="a").equal(expected)
    assert host_calls(ATOM) == []
    assert atom.uninstall()
    assert forward(*case.args()) == "the host's result"
    assert function_of(ATOM) is function_of(f"{ATOM}.paged_prefill")


def test_signature_and_documentation_stay_the_hosts(root):
    write_atom(root)
    own = function_of(ATOM)
    atom.install()
    adapter = function_of(ATOM)
    assert adapter is not own
    assert inspect.signature(adapter) == inspect.signature(own)
    assert (adapter.__name__, adapter.__doc__, adapter.__module__) == (own.__name__, own.__doc__, own.__module__)


def test_install_and_uninstall_twice(root):
    write_atom(root)
    own = function_of("atom.models.deepseek_v4")
    assert atom.install()
    adapter = function_of(ATOM)
    assert atom.install() == []
    assert function_of(ATOM) is adapter
    assert atom.uninstall()
    assert atom.uninstall() == []
    assert function_of("atom.models.deepseek_v4") is own
    assert atom.install()
    atom.uninstall()
    assert function_of("atom.models.deepseek_v4") is own
    assert not any(isinstance(finder, _replace._Watcher) for finder in sys.meta_path)


def test_import_after_uninstall_is_the_hosts(root):
    write_atom(root)
    atom.install()
    atom.uninstall()
    assert not hasattr(function_of("atom.models.deepseek_v4"), "__wrapped__")


def test_reload_is_served(root):
    write_atom(root)
    atom.install()
    importlib.reload(importlib.import_module(f"{ATOM}.paged_prefill"))
    assert hasattr(function_of(f"{ATOM}.paged_prefill"), "__wrapped__")


def test_lazy_modules_stay_unloaded(root):
    write_atom(root)
    write(root, {"atom.never": "raise AssertionError('loaded by the search')"})
    function_of(ATOM)
    spec = importlib.util.find_spec("atom.never")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["atom.never"] = module
    spec.loader.exec_module(module)
    assert atom.install()


def test_threads_install_once(root):
    write_atom(root)
    function_of("atom.models.deepseek_v4")
    barrier, results = threading.Barrier(8), []

    def work():
        barrier.wait()
        results.append(atom.install())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, results)) == [0] * 7 + [4]
    assert not hasattr(function_of(ATOM).__wrapped__, "__wrapped__")


# What the operator refuses by design


def refused(case):
    """(reason, changed arguments by name) of calls that the host serves and the operator does not."""
    wide = torch.zeros(3, 3, 1024, dtype=case.q.dtype)
    return {
        "unified_kv_rope is given": {"unified_kv_rope": torch.zeros(2, 64)},
        "unified_kv is torch.float8_e4m3fn": {"unified_kv": case.unified_kv.to(torch.float8_e4m3fn)},
        "kv is torch.uint8": {"kv": torch.zeros(4, 64, dtype=torch.uint8)},
        "q is no tensor": {"q": None},
        "head_dim is 1024": {"q": wide, "unified_kv": wide[0], "kv": wide[0]},
        "head_dim is 60": {"q": case.q[..., :60], "unified_kv": case.unified_kv[:, :60], "kv": case.kv[:, :60]},
        "unified_kv has a last-dimension stride of 64": {"unified_kv": torch.zeros(64, 64).bfloat16().T},
        "attn_sink has 6 logits for 3 heads": {"attn_sink": torch.zeros(6)},
        "out is not contiguous": {"out": torch.empty(9, 3, 128, dtype=case.q.dtype)[..., ::2]},
    }


@pytest.mark.parametrize("reason", refused(cases.build("ragged", heads=3, head_dim=64)))
def test_the_host_runs_what_the_operator_refuses_and_says_so_once(root, served, case, caplog, reason):
    write_atom(root, "fp8")
    atom.install()
    names = list(inspect.signature(paged_prefill.reference).parameters)
    arguments = dict(zip(names, case.args(), strict=False)) | refused(case)[reason]
    with caplog.at_level(logging.WARNING, "paged_prefill"):
        for _ in range(3):
            assert function_of(ATOM)(**arguments) == "the host's result"
    assert served == []
    assert len(host_calls(ATOM)) == 3
    assert [reason in record.message for record in caplog.records] == [True]


def test_wrong_calls_get_the_hosts_own_error(root, served, case):
    write_atom(root)
    atom.install()
    forward = function_of(ATOM)
    for arguments, keywords in (
        (case.args()[:8], {}),
        ((*case.args(), None, None), {}),
        (case.args(), {"softmax_scale": 1.0}),
        (case.args(), {"other": 1}),
    ):
        with pytest.raises(TypeError, match=NAME):
            forward(*arguments, **keywords)


def test_guards_speak_through_the_adapter(root, case):
    write_atom(root)
    atom.install()
    with pytest.raises(RuntimeError, match="Triton sparse_attn_v4_paged_prefill requires CUDA/HIP tensors"):
        function_of(ATOM)(*case.args())
    assert host_calls(ATOM) == []


def test_indptr_of_a_longer_buffer(root, served, case):
    write_atom(root)
    atom.install()
    longer = torch.cat((case.kv_indptr_prefix, torch.full((5,), 7, dtype=torch.int32)))
    assert function_of(ATOM)(*case.with_(kv_indptr_prefix=longer).args()).equal(paged_prefill.reference(*case.args()))


def test_a_parameter_as_sink_while_grad_is_enabled(root, monkeypatch, case):
    """Hosts pass the parameter itself; their kernel makes no gradients."""
    seen = []
    monkeypatch.setattr(_replace, NAME, lambda **_: seen.append(torch.is_grad_enabled()))
    write_atom(root)
    atom.install()
    with torch.enable_grad():
        function_of(ATOM)(*case.with_(attn_sink=torch.nn.Parameter(case.attn_sink)).args())
        assert torch.is_grad_enabled()
    assert seen == [False]


# Switching on


def test_a_host_that_is_not_there(root, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="sglang is not installed"):
        sglang.install()


def test_a_host_without_the_function(root):
    write(root, {"atom.model_ops.other": ""})
    with pytest.raises(RuntimeError, match=r"this version of ATOM has no module(?s:.*)atom\.model_ops\.v4_kernels"):
        atom.install()
    assert "atom" not in sys.modules


def test_environment_variable(root, monkeypatch):
    write_atom(root)
    write_sglang(root)
    for value, watched in (("", 0), (" ATOM ,", 1), ("sglang,atom", 2)):
        monkeypatch.setenv("PAGED_PREFILL_INSTALL", value)
        install_from_environment()
        assert sum(isinstance(finder, _replace._Watcher) for finder in sys.meta_path) == watched
        uninstall()
    monkeypatch.setenv("PAGED_PREFILL_INSTALL", "vllm")
    with pytest.raises(RuntimeError, match="PAGED_PREFILL_INSTALL names 'vllm'"):
        install_from_environment()


def python(root, *arguments, **environment):
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": path},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_sglang_loads_the_adapter_as_a_plugin(tmp_path):
    if not any(e.value.startswith("paged_prefill.") for e in entry_points(group="sglang.srt.plugins")):
        pytest.fail("the installed package has no entry point in the group sglang.srt.plugins")
    package = write_sglang(tmp_path)
    code = f"""
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from {package}.runtime import prefill
        print(hasattr(prefill.__globals__["{NAME}"], "__wrapped__"))
    """
    for value, served in (("sglang", "True"), ("", "False")):
        assert python(tmp_path, "-c", textwrap.dedent(code), PAGED_PREFILL_INSTALL=value) == [served]


@pytest.mark.parametrize("line", ["from paged_prefill.integrations import atom; atom.install()", "import auto"])
def test_one_line_in_a_script_reaches_spawned_workers(tmp_path, line):
    write_atom(tmp_path)
    line = line.replace("import auto", "import paged_prefill.integrations.auto")
    script = f"""
        {line}
        import multiprocessing

        def work():
            from atom.models.deepseek_v4 import {NAME}
            print(hasattr({NAME}, "__wrapped__"), flush=True)

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=work)
            worker.start()
            worker.join()
            work()
    """
    (tmp_path / "serve.py").write_text(textwrap.dedent(script))
    assert python(tmp_path, str(tmp_path / "serve.py"), PAGED_PREFILL_INSTALL="atom") == ["True", "True"]


@pytest.mark.gpu
@pytest.mark.parametrize("tail", ["out", "fp8"])
def test_atom_on_a_gpu(root, device, expect, tail):
    write_atom(root, tail)
    atom.install()
    case = cases.build("holes", device=device, heads=16)
    q = case.q.clone()
    result = importlib.import_module("atom.models.deepseek_v4").forward(q, *case.args()[1:], q)
    assert result is q
    assert_close(q, expect(case)[0])
    assert host_calls(ATOM) == []


@pytest.mark.gpu
def test_sglang_on_a_gpu(root, device, expect):
    package = write_sglang(root)
    sglang.install()
    case = cases.build("holes", device=device, heads=16).with_(replicated_logit_shift=-0.5)
    parameter = torch.nn.Parameter(case.attn_sink)
    function = function_of(f"{package}.runtime")
    out, lse = function(*case.with_(attn_sink=parameter).args(), True, -0.5)
    assert not out.requires_grad
    expected, expected_lse = expect(case)
    assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-4, atol=1e-3)
