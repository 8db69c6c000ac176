"""The table of devices: names, aliases, NVIDIA's labels."""

from __future__ import annotations

import pytest

from hybridsched.core.gpus import GIB, GPUS, UnknownDevice, device_by_label, find_device, slices, whole


def test_every_device_is_found_by_its_name() -> None:
    devices = [device for gpu in GPUS for device in (whole(gpu), *slices(gpu))]
    assert len({device.name for device in devices}) == len(devices)
    for device in devices:
        assert find_device(device.name) == device
        assert find_device(device.name.upper()) == device


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_slices_grow_and_stay_within_their_gpu(gpu: object) -> None:
    kind = next(one for one in GPUS if one is gpu)
    sizes = [device.memory_bytes for device in slices(kind)]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[-1] <= kind.memory_bytes
    for profile in kind.profiles:
        memory = (profile.memory_mib or 0) * 1024**2
        assert memory * profile.most <= 1.01 * kind.memory_bytes


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "h100-80gb"),
        ("3g.40gb@a100", "3g.40gb@a100-80gb"),
        ("1g.5gb", "1g.5gb@a100-40gb"),
        ("1g.10gb+me@h100", "1g.10gb@h100-80gb"),
        (" H200 ", "h200"),
    ],
)
def test_short_names(given: str, name: str) -> None:
    assert find_device(given).name == name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a100", "a100-40gb or a100-80gb"),
        ("1g.10gb@a100", "1g.10gb@a100-40gb or 1g.10gb@a100-80gb"),
        ("3g.40gb", "3g.40gb@a100-80gb or 3g.40gb@h100-80gb"),
        ("v100", "there are a30"),
        ("9g.90gb@h100", "3g.40gb@a100-80gb"),
        ("3g.40gb@v100", "there are a30"),
        ("", "there are a30"),
        ("@", "there are a30"),
    ],
)
def test_names_of_none_or_several(given: str, says: str) -> None:
    with pytest.raises(UnknownDevice, match=says):
        find_device(given)


@pytest.mark.parametrize(
    ("label", "profile", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "3g.20gb", "3g.20gb@a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "1g.10gb+me", "1g.10gb@h100-80gb"),
        ("NVIDIA H200", None, "h200"),
        ("NVIDIA B200", None, "b200"),
        ("NVIDIA A30", None, "a30"),
    ],
)
def test_labels_of_nvidia(label: str, profile: str | None, name: str) -> None:
    assert device_by_label(label, profile).name == name


@pytest.mark.parametrize("label", ["Tesla V100-SXM2-32GB", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", ""])
def test_labels_that_are_not_in_the_table(label: str) -> None:
    with pytest.raises(UnknownDevice, match="--gpu"):
        device_by_label(label)


def test_memory_is_below_the_label() -> None:
    for gpu in GPUS:
        digits = gpu.name.partition("-")[2].removesuffix("gb")
        if digits:
            assert gpu.memory_bytes < int(digits) * GIB
