"""The choice of images: every architecture asked of a manifest like the wheel's, without a GPU."""

from __future__ import annotations

import pytest

from fake_drivers.images import TARGETS, manifest, variant
from paged_prefill._choice import DeviceFacts, choose

ALL = manifest(*(variant(target) for target in TARGETS))


def cuda(architecture: str, driver: int = 13000, shared: int = 0) -> DeviceFacts:
    return DeviceFacts("cuda", architecture, driver, shared)


def hip(architecture: str) -> DeviceFacts:
    return DeviceFacts("hip", architecture, 60443482, 65536)


def without(*targets: str):
    return manifest(*(variant(target) for target in TARGETS if target not in targets))


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ("75", None), ("80", "sm80"), ("86", "sm86"), ("87", "ptx"), ("89", "sm86"), ("90", "sm90a"), ("100", "sm100a"),
        ("103", "ptx"), ("110", "ptx"), ("120", "sm120a"), ("121", "ptx"), ("130", "ptx"),
    ],
)
def test_W01_every_cuda_capability_has_an_answer(capability, target):
    decision = choose(ALL, cuda(f"sm_{capability}"))
    assert decision.target == target
    assert all(entry["target"] == target for entry in decision.variants)
    assert bool(decision.variants) == (target is not None)
    # Whatever is not taken has its reason.
    assert {what for what, _ in decision.reasons} == set(TARGETS) - {target}
    assert all(reason for _, reason in decision.reasons)


@pytest.mark.parametrize(
    ("architecture", "target"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"), ("gfx942", "gfx942"), ("gfx90a:sramecc+:xnack+", "gfx90a"),
        ("gfx1151", None), ("gfx906", None), ("gfx9", None), ("gfx942a", None),
    ],
)
def test_W02_every_amd_architecture_has_an_answer(architecture, target):
    decision = choose(ALL, hip(architecture))
    assert decision.target == target
    assert {what for what, _ in decision.reasons} == set(TARGETS) - {target}


@pytest.mark.parametrize("capability", ["75", "80", "86", "89", "100", "103", "120", "121", "130"])
def test_W01_an_arch_specific_image_is_never_offered_to_a_neighbour(capability):
    only = manifest(variant("sm90a"))
    decision = choose(only, cuda(f"sm_{capability}"))
    assert not decision.variants
    major, minor = capability[:-1], capability[-1]
    assert decision.reasons == (
        ("sm90a", f"needs compute capability 9.0 and no other, the device has {major}.{minor}"),
    )


def test_a_later_minor_version_takes_the_images_of_an_earlier_one_within_its_memory():
    small, large = variant("sm86", head_tile=16, shared=90_000), variant("sm86", head_tile=64, shared=102_656)
    decision = choose(manifest(small, large), cuda("sm_89", shared=101_376))
    assert [entry["id"] for entry in decision.variants] == [small["id"]]
    assert decision.reasons == ((large["id"], "needs 102656 bytes of shared memory, the device has 101376"),)


def test_W04_an_sm80_image_over_the_limit_is_not_offered_to_a_small_part():
    sm80 = variant("sm80", shared=163_840)
    data = manifest(sm80)
    data["targets"]["sm80"] = {**data["targets"]["sm80"], "matches": "minor"}
    for architecture in ("sm_86", "sm_89"):
        decision = choose(data, cuda(architecture, shared=101_376))
        assert not decision.variants
        assert decision.reasons == ((sm80["id"], "needs 163840 bytes of shared memory, the device has 101376"),)


def test_W10_an_older_driver_is_told_both_versions():
    decision = choose(without("ptx"), cuda("sm_90", driver=12080))
    assert not decision.variants
    assert dict(decision.reasons)["sm90a"] == (
        "needs a driver for CUDA 13.0 or later, this one is for CUDA 12.8: update the driver"
    )
    # With PTX in the wheel the device runs on that, and the reason stays to be told.
    decision = choose(ALL, cuda("sm_90", driver=12080))
    assert decision.target == "ptx"
    assert "CUDA 12.8" in dict(decision.reasons)["sm90a"]


def test_order_within_a_target_is_the_manifests():
    first, second = variant("sm90a", head_tile=64), variant("sm90a", head_tile=16)
    for order in ([first, second], [second, first]):
        decision = choose(manifest(*order), cuda("sm_90"))
        assert [entry["id"] for entry in decision.variants] == [entry["id"] for entry in order]


def test_W03_W11_environment_and_names_are_no_part_of_a_choice(monkeypatch):
    expected = choose(ALL, cuda("sm_90"))
    for name, value in {
        "PAGED_PREFILL_TARGETS": "gfx942", "TORCH_CUDA_ARCH_LIST": "8.0", "CUDAARCHS": "80",
        "PYTORCH_ROCM_ARCH": "gfx90a",
        "CUDA_VISIBLE_DEVICES": "MIG-GPU-5/1/0", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "x",
        "HSA_OVERRIDE_GFX_VERSION": "9.0.0", "GPU_DEVICE_ORDINAL": "7",
    }.items():
        monkeypatch.setenv(name, value)
    assert choose(ALL, cuda("sm_90")) == expected


def test_W01_the_refusal_names_device_architectures_and_the_way_out(tmp_path):
    from fake_drivers.images import write
    from paged_prefill import _loader

    write(tmp_path, variant("sm90a"), variant("gfx942"))
    _loader.override(0, tmp_path)
    try:
        with pytest.raises(RuntimeError) as caught:
            _loader.describe(0, "cuda", "sm_75", 12080, "Tesla T4 MIG 1g.5gb", 65536)
    finally:
        _loader.reset(0)
    text, hint = str(caught.value).splitlines()
    assert text == "this paged_prefill wheel has no kernel image for device 0: Tesla T4 MIG 1g.5gb, sm_75"
    assert "sm90a, gfx942" in hint
    assert "sm90a needs compute capability 9.0 and no other, the device has 7.5" in hint
    assert "gfx942 is for AMD devices" in hint
    assert "PAGED_PREFILL_TARGETS" in hint


def test_the_installed_wheel_answers_for_each_of_its_targets():
    from paged_prefill import _manifest

    data = _manifest.read_manifest().data
    for name, facts in data["targets"].items():
        if facts["vendor"] == "hip":
            device = hip(f"{name}:sramecc+:xnack-")
        else:
            device = cuda("sm_{}{}".format(*facts["capability"]), driver=13020, shared=facts["shared_limit"])
        decision = choose(data, device)
        if facts.get("matches") == "later":
            assert decision.variants
            continue
        assert decision.target == name
        # No input without an image: an unaligned one, of any head_dim, of any number of heads.
        for dtype in ("bf16", "fp16"):
            last = [entry for entry in decision.variants if entry["dtype"] == dtype and not entry["aligned"]]
            assert any(entry["head_dim"] == 0 and entry["min_heads"] <= 1 and not entry["max_heads"] for entry in last)
