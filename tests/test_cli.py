"""The command line, in this process and as a module of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_prefill import (
    _C,
    __version__,
    _bench,
    _cli,
    _compare,
    _devices,
    _explain,
    _manifest,
    _plot,
    _report,
    _verify,
    _workload,
)

COMMANDS = ("info", "demo", "verify", "bench", "explain")
GPU = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parent.parent


def run(capsys, *arguments):
    status = _cli.main(arguments)
    return status, capsys.readouterr().out


def test_module_runs():
    result = subprocess.run([sys.executable, "-m", "paged_prefill", "--version"], capture_output=True, text=True)
    assert result.stdout.strip() == f"paged-prefill {__version__}"
    assert result.returncode == 0


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        _cli.main([*([command] if command else []), "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    if command is None:
        assert all(name in text for name in COMMANDS)


def test_a_wrong_command_line_is_status_2(capsys):
    for arguments in ([], ["nonsense"], ["demo", "--layers", "dense"]):
        with pytest.raises(SystemExit) as stop:
            _cli.main(arguments)
        assert stop.value.code == 2
    capsys.readouterr()


def test_info_names_version_torch_and_targets(capsys):
    status, text = run(capsys, "info")
    assert status == 0
    for part in (__version__, torch.__version__, *_manifest.read_manifest().data["targets"]):
        assert part in text
    assert ("none that torch sees" in text) != GPU


def test_info_all_lists_every_image(capsys):
    _, text = run(capsys, "info", "--all")
    flat = "".join(text.split())
    for variant in _manifest.read_manifest().data["variants"]:
        assert variant["file"].removeprefix("paged_prefill-") in flat


def test_info_json(capsys):
    status, text = run(capsys, "info", "--json", "--all")
    document = json.loads(text)
    assert status == 0
    assert document["version"] == __version__
    assert len(document["variants"]) == len(_manifest.read_manifest().data["variants"])
    assert len(document["devices"]) == (torch.cuda.device_count() if GPU else 0)


@pytest.mark.skipif(GPU, reason="what the demo does without a GPU; torch sees one here")
def test_demo_without_a_gpu_runs_the_reference(capsys):
    status, text = run(capsys, "demo", "--heads", "8", "16")
    assert status == 0
    assert "No CUDA or ROCm GPU here" in text
    assert "8 of 8 within the tolerance" in text
    for name, architecture, _ in _devices.known(_manifest.read_manifest().data):
        assert architecture in text
        assert name.split(",")[0] in text


@pytest.mark.skipif(GPU, reason="what verify does without a GPU; torch sees one here")
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_without_a_gpu_these_fail(capsys, command):
    assert _cli.main([command]) == 1
    assert "needs a CUDA or ROCm GPU" in capsys.readouterr().err


@pytest.mark.skipif(GPU, reason="without a GPU the demo is small enough to run here")
def test_demo_json(capsys):
    status, text = run(capsys, "demo", "--json", "--heads", "8", "--layers", "hca", "window")
    document = json.loads(text)
    assert status == 0
    assert document["ok"]
    assert [result["layer"] for result in document["results"]] == ["hca", "window"]


def test_an_error_above_the_tolerance_is_status_1(capsys, monkeypatch):
    wrong = _verify.Result("hca", 8, "bfloat16", 14, 70.0, float("inf"), 4e-3, 0.1, False, "worst token 3", "none")
    monkeypatch.setattr(_verify, "run", lambda *a, **k: wrong)
    monkeypatch.setattr(_verify, "run_reference", lambda *a, **k: wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, text = run(capsys, "demo", "--heads", "8", "--layers", "hca")
    assert status == 1
    assert "FAIL" in text
    assert "worst token 3" in text
    status, text = run(capsys, "demo", "--heads", "8", "--layers", "hca", "--json")
    assert status == 1
    assert json.loads(text)["results"][0]["error"] == "inf"


def test_a_damaged_wheel_is_one_clear_error(capsys, monkeypatch, tmp_path):
    _manifest.read_manifest.cache_clear()
    monkeypatch.setattr(_manifest.read_manifest.__wrapped__, "__defaults__", (tmp_path,))
    try:
        assert _cli.main(["info"]) == 1
    finally:
        _manifest.read_manifest.cache_clear()
    assert "manifest" in capsys.readouterr().err


def test_output_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(_report, "_HAS_RICH", False)
    _report.table("numbers", ("name", "value"), [("a", 1), ("b", 22)])
    assert "  a         1\n  b        22" in capsys.readouterr().out
    assert list(_report.progress([1, 2, 3], "counting")) == [1, 2, 3]
    status, text = run(capsys, "info")
    assert status == 0
    assert __version__ in text


def test_known_devices_get_an_explicit_answer():
    manifest = _manifest.read_manifest().data
    for name, _, decision in _devices.known(manifest):
        assert decision.target is not None or decision.reasons, name
        if decision.target:
            assert {variant["target"] for variant in decision.variants} == {decision.target}


def test_variant_for_prefers_the_first_that_fits():
    base = {"dtype": "bf16", "head_dim": 512, "min_heads": 1, "max_heads": None, "aligned": True}
    narrow, wide = {**base, "id": "narrow", "max_heads": 16}, {**base, "id": "wide", "min_heads": 17}
    masked = {**base, "id": "masked", "head_dim": 0, "aligned": False}
    variants = [narrow, wide, masked]
    pick = lambda *arguments: (_devices.variant_for(variants, *arguments) or {"id": None})["id"]  # noqa: E731
    assert pick("bf16", 16, 512) == "narrow"
    assert pick("bf16", 17, 512) == "wide"
    assert pick("bf16", 17, 512, False) == "masked"
    assert pick("bf16", 16, 72) == "masked"
    assert pick("fp16", 16, 512) is None


@pytest.mark.gpu
def test_demo_on_the_gpu(capsys):
    status, text = run(capsys, "demo", "--json", "--heads", "16", "128")
    results = json.loads(text)["results"]
    assert status == 0
    assert len(results) == 2 * len(_workload.LAYERS)
    for result in results:
        assert result["ok"]
        assert result["error"] <= _compare.OUT_LIMIT[torch.bfloat16]
        assert result["timing"]["tflops"] > 0
        assert result["variant"].startswith("paged_prefill-bf16-")


@pytest.mark.gpu
def test_bench_on_the_gpu(capsys):
    status, text = run(capsys, "bench", "--json", "--heads", "16", "--layers", "hca")
    document = json.loads(text)
    ours, *others = document["results"]
    assert status == 0
    assert ours["implementation"] == "paged-prefill"
    assert ours["error"] <= _compare.OUT_LIMIT[torch.bfloat16]
    assert 0 < ours["gemm_share"] < 1
    assert "torch gather + sdpa" in [other["implementation"] for other in others]
    assert all(other["error"] < 1e-2 for other in others)
    assert document["call_us"] > 0


def test_torch_baseline_computes_the_same():
    from paged_prefill import reference

    for layer in _workload.LAYERS.values():
        workload = _workload.build(layer, _workload.SMALL_REQUESTS, heads=8, bucket=70)
        exact = reference(*workload.args(), compute_dtype=torch.float64, out_dtype=torch.float64)
        assert _compare.compare_out(_bench.gather_and_sdpa(*workload.args()), exact).error < 1e-2


@pytest.mark.gpu
def test_verify_on_the_gpu(capsys):
    status, text = run(capsys, "verify", "--heads", "8", "--layers", "csa-512")
    assert status == 0
    assert "2 of 2 within the tolerance" in text


def filled(name):
    """A message as it is printed, with a value in each place, and the values."""
    text, hint = _C.guard_texts()[name]
    words = {key: f"{key.upper()}-7" for key in re.findall(r"\{(\w+)\}", text + hint)}
    return f"{text}\n{hint}".format(**words), {key: words[key] for key in re.findall(r"\{(\w+)\}", text)}


def test_each_message_has_an_entry_and_each_entry_a_message():
    assert _explain.ENTRIES.keys() == _C.guard_texts().keys()
    for name, entry in _explain.ENTRIES.items():
        for field in _explain.HEADINGS:
            assert getattr(entry, field).endswith("."), f"{name}.{field} is no sentence"


@pytest.mark.parametrize("name", list(_C.guard_texts()))
def test_explain_finds_a_message_in_every_form(name):
    text, hint = _C.guard_texts()[name]
    printed, values = filled(name)
    same_text = [other for other, parts in _C.guard_texts().items() if parts[0] == text]
    assert _explain.find(name) == [name]
    assert _explain.find(f"{text}\n{hint}") == [name]
    assert _explain.find(printed) == [name]
    assert _explain.find(f"Traceback (most recent call last):\n  File x\nRuntimeError: {printed}\n") == [name]
    assert _explain.find(" ".join(printed.split())) == [name]
    assert _explain.find(text) == same_text
    assert _explain.find(printed.splitlines()[0]) == same_text
    assert name in _explain.find(text[:-2]), "a piece of the text"
    assert _explain.values(name, printed) == values


def test_explain_by_a_few_words():
    assert _explain.find("attn_sink length mismatch: expected H = 128, go") == ["sink_length"]
    assert _explain.find("head_dim mismatch") == ["head_dim", "q_head_dim"]
    assert "unified_kv_dtype" in _explain.find("fp8")
    for other in ("CUDA out of memory", "hello world", "what is the"):
        assert _explain.find(other) == [], other


def test_explain_prints_the_page(capsys):
    text = "RuntimeError: unified_kv dtype mismatch: kv=torch.float8_e4m3fn, q=torch.bfloat16"
    status, page = run(capsys, "explain", text)
    assert status == 0
    for part in (*_explain.HEADINGS.values(), "unified_kv_dtype = torch.float8_e4m3fn", "FP8"):
        assert part in page
    status, page = run(capsys, "explain", "--json", *text.split())
    assert status == 0
    assert [entry["name"] for entry in json.loads(page)["entries"]] == ["unified_kv_dtype"]


def test_explain_without_a_text_lists_all(capsys):
    status, page = run(capsys, "explain")
    assert status == 0
    for text, _ in _C.guard_texts().values():
        assert text in page


def test_explain_of_something_else_is_status_1(capsys):
    assert _cli.main(["explain", "hello world"]) == 1
    assert "lists all" in capsys.readouterr().err
    status, page = run(capsys, "explain", "hello world", "--json")
    assert status == 1
    assert json.loads(page)["entries"] == []


def test_errors_page_is_current(capsys):
    _, page = run(capsys, "explain", "--all")
    assert (ROOT / "docs" / "errors.md").read_text() == page, (
        "docs/errors.md is stale: paged-prefill explain --all > docs/errors.md"
    )


def points():
    return [
        _plot.Point(f"{layer}, H {heads}", name, 2.0 * heads, rate * heads, rate * heads * 0.9, rate * heads * 1.1)
        for layer in ("window", "hca")
        for heads in (8, 128)
        for name, rate in (("paged-prefill", 4.0), ("other", 0.5))
    ]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra `bench`")
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_drawn(tmp_path, ending):
    file = tmp_path / f"out.{ending}"
    _plot.check(str(file))
    _plot.draw(str(file), "title", "subtitle", points(), 700.0, [_plot.Roof("memory", 4200.0), _plot.Roof("g", 8e3)])
    assert file.stat().st_size > 10_000
    with pytest.raises(RuntimeError, match="there is no folder"):
        _plot.check(str(tmp_path / "absent" / "out.png"))
    with pytest.raises(RuntimeError, match="its ending must be one of"):
        _plot.check(str(tmp_path / "out.docx"))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra `bench`")
def test_plot_reads_at_the_width_of_a_page(tmp_path, monkeypatch):
    """At 900 pixels no letter is smaller than 12 of them, and no legend lies over a point or a bar."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (figures.append(self), save(self, path)))
    _plot.draw(str(tmp_path / "out.png"), "title", "subtitle", points(), 700.0, [_plot.Roof("memory", 4200.0)])
    (figure,) = figures
    pixels = 900 / figure.get_figwidth() / 72  # of a point
    sizes = {text.get_text(): text.get_fontsize() * pixels for text in figure.findobj(Text) if text.get_text()}
    assert min(sizes.values()) >= 12, sizes
    assert len(figure.findobj(lambda artist: artist.__class__.__name__ == "Legend")) == 2
    for axes in figure.findobj(lambda artist: hasattr(artist, "get_legend")):
        legend, paper = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert not legend.shrunk(0.99, 0.99).overlaps(paper), (axes.get_title("left"), legend, paper)


def test_plot_without_matplotlib_is_one_clear_error(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _cli.main(["bench", "--plot", "out.png"]) == 1
    assert "pip install 'paged-prefill[bench]'" in capsys.readouterr().err


def test_uniform_load_is_full():
    load = _workload.uniform(8, prefix=5, extend=3, rows=16, tokens=4, head_dim=64)
    assert load.kv_indptr_prefix.tolist() == [0, 5, 10, 15, 20]
    assert load.kv_indices_extend.tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert load.keys == 32
    assert int(load.kv_indices_prefix.max()) < 16


def test_figures_in_the_documents_are_those_measured():
    render = pytest.importorskip("benchmarks.render")
    document = json.loads((ROOT / "docs" / "h200.json").read_text())
    for page in (ROOT / "README.md", ROOT / "docs" / "performance.md"):
        text = page.read_text()
        assert render.page(text, document) == text, f"{page.name} is stale: docs/performance.md says how to write it"


@pytest.mark.parametrize("option", [("--heads", "0"), ("--heads", "-3"), ("--heads", "x")])
def test_a_head_count_that_is_none_is_refused_by_its_option(option, capsys):
    with pytest.raises(SystemExit) as exited:
        _cli.main(["demo", *option])
    assert exited.value.code == 2
    assert "--heads" in capsys.readouterr().err
