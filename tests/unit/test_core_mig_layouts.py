"""mig-parted's layout format, what fits on which GPU, and what a refusal says."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.mig import (
    MODELS,
    PCI_IDS,
    LayoutEntry,
    LayoutFileError,
    MigRefusalError,
    Piece,
    Want,
    export,
    fits,
    layout_flaws,
    model_of,
    nominal_gb,
    parse_layouts,
    profile_memory_bytes,
    refusal,
    wants,
)
from hybridsched.mig.fake import NAMES, fake_gpu


def document(*entries: object) -> dict[str, object]:
    return {"version": "v1", "mig-configs": {"day": list(entries)}}


def pieces(**counts: int) -> tuple[Piece, ...]:
    return tuple(Piece(profile=name) for name, count in counts.items() for _ in range(count))


def test_an_entry_of_each_kind_is_read() -> None:
    found = parse_layouts(
        document(
            {"devices": "all", "mig-enabled": False},
            {
                "devices": [0, 3],
                "device-filter": ["0x20B210DE", "0x233010de"],
                "mig-enabled": True,
                "mig-devices": {"1g.10gb": 4, "3g.40gb": 1, "2g.20gb": 0},
            },
        )
    )
    assert found == {
        "day": (
            LayoutEntry(mig_enabled=False),
            LayoutEntry(
                devices=(0, 3),
                device_filter=(0x20B210DE, 0x233010DE),
                mig_enabled=True,
                mig_devices={"1g.10gb": 4, "3g.40gb": 1},
            ),
        )
    }


def test_every_mistake_of_a_file_is_named_with_its_place() -> None:
    wrong = {
        "version": "v2",
        "mig-config": {},
        "mig-configs": {
            "day": [
                {"device": [0], "mig-enabled": "yes"},
                {"devices": [0, 0], "mig-enabled": True, "mig-devices": {"1g.10gb": -1, "2g.20gb": True}},
                {"devices": "all", "mig-enabled": False, "mig-devices": {"1g.10gb": 7}},
                {"devices": "all", "mig-enabled": True},
                {"devices": "all", "device-filter": "H100", "mig-enabled": True, "mig-devices": [1]},
                7,
            ],
            "night": [],
            8: [],
        },
    }
    with pytest.raises(LayoutFileError) as caught:
        parse_layouts(wrong, source="file l.yaml")
    assert [where for where, _ in caught.value.problems] == [
        "version",
        "mig-config",
        "mig-configs.day[0].device",
        "mig-configs.day[0].devices",
        "mig-configs.day[0].mig-enabled",
        "mig-configs.day[1].devices",
        "mig-configs.day[1].mig-devices.1g.10gb",
        "mig-configs.day[1].mig-devices.2g.20gb",
        "mig-configs.day[2].mig-devices",
        "mig-configs.day[3].mig-devices",
        "mig-configs.day[4].device-filter",
        "mig-configs.day[4].mig-devices",
        "mig-configs.day[5]",
        "mig-configs.night",
        "mig-configs.8",
    ]
    assert "did you mean devices?" in str(caught.value)
    assert "layouts file l.yaml have 15 mistakes" in str(caught.value)


@pytest.mark.parametrize(
    "given", [None, [], "v1", 3, {"version": "v1"}, {"version": "v1", "mig-configs": {}}]
)
def test_what_is_no_layout_document_is_refused(given: object) -> None:
    with pytest.raises(LayoutFileError):
        parse_layouts(given)


def test_what_stands_for_billions_of_items_is_shown_in_part() -> None:
    """As a few lines of YAML with anchors can."""
    many: list[object] = [1] * 9
    for _ in range(12):
        many = [many] * 9
    with pytest.raises(LayoutFileError) as caught:
        parse_layouts({"version": "v1", "mig-configs": {"a": many}})
    assert len(str(caught.value)) < 5000


def test_a_gpu_that_no_entry_names_is_left_alone_and_filters_choose_models() -> None:
    second = msgspec.structs.replace(fake_gpu(0, "a100-80gb"), pci_id=PCI_IDS["a100-80gb"][1])
    gpus = [second, fake_gpu(1, "h100-80gb"), fake_gpu(2, "none")]
    layout = parse_layouts(
        document(
            {
                "devices": "all",
                "device-filter": f"{PCI_IDS['a100-80gb'][1]:#x}",
                "mig-enabled": True,
                "mig-devices": {"1g.10gb": 2},
            }
        )
    )["day"]
    assert wants(layout, gpus) == {0: Want(enabled=True, pieces=(Piece(profile="1g.10gb"),) * 2)}


def test_two_entries_may_say_the_same_of_a_gpu_and_not_different_things() -> None:
    gpus = [fake_gpu(0, "a100-80gb"), fake_gpu(1, "a100-80gb")]
    same = LayoutEntry(mig_enabled=True, mig_devices={"1g.10gb": 1, "2g.20gb": 1})
    again = LayoutEntry(devices=(1,), mig_enabled=True, mig_devices={"2g.20gb": 1, "1g.10gb": 1})
    assert wants((same, again), gpus)[1] == again.want
    other = LayoutEntry(devices=(1,), mig_enabled=False)
    with pytest.raises(MigRefusalError, match="different things of GPU 1"):
        wants((same, other), gpus)
    assert layout_flaws("a100-80gb", (same, other), 2) == ["entries 0 and 1 want different things of GPU 1"]


def test_of_a_layout_for_many_models_each_is_judged_by_its_own_entries() -> None:
    """As mig-parted's `all-balanced`: each model's profiles behind a filter of its boards."""
    ids = {"a30": {14: 2, 5: 1}}
    layout = tuple(
        LayoutEntry(
            device_filter=PCI_IDS[model],
            mig_enabled=True,
            mig_devices={p.name: wanted[p.id] for p in profiles if p.id in wanted},
        )
        for model, profiles in MODELS.items()
        for wanted in [ids.get(model, {19: 2, 14: 1, 9: 1})]
    )
    for model in MODELS:
        assert layout_flaws(model, layout, 8) == []
        assert layout_flaws(model, tuple(e for e in layout if e.device_filter != PCI_IDS[model]), 8) == [
            f"no entry is for {model}: their device filters name none of its boards"
        ]


def test_a_gpu_that_is_not_there_is_named() -> None:
    entry = LayoutEntry(devices=(0, 4), mig_enabled=False)
    with pytest.raises(MigRefusalError, match=r"entry 0 names GPU 4, which is not there \(GPUs: 0\)"):
        wants((entry,), [fake_gpu(0, "a30")])
    assert layout_flaws("a30", (entry,), 2) == ["entry 0 names GPU 4; a node has 2, 0 to 1"]


@pytest.mark.parametrize("model", MODELS)
def test_every_profile_fits_as_often_as_its_count_says_and_not_once_more(model: str) -> None:
    assert model_of(NAMES[model]) == model
    for profile in MODELS[model]:
        assert fits(MODELS[model], [Piece(profile=profile.name)] * profile.most), profile.name
        assert not fits(MODELS[model], [Piece(profile=profile.name)] * (profile.most + 1)), profile.name
        assert nominal_gb(profile.name)
        assert all(start + profile.size <= 8 for start in profile.starts)


@pytest.mark.parametrize(
    "wanted",
    [
        {"4g.40gb": 1, "3g.40gb": 1},
        {"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1},
        {"3g.40gb": 1, "1g.10gb": 4},
        {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2},
        {"2g.20gb": 3, "1g.10gb": 1},
        {"2g.20gb": 3, "1g.20gb": 1},
        {"1g.10gb": 6, "1g.10gb+me": 1},
    ],
)
def test_mixes_of_the_users_guide_fit(wanted: dict[str, int]) -> None:
    assert refusal(MODELS["a100-80gb"], pieces(**wanted)) is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            {"1g.5gb": 7},
            "there is no profile 1g.5gb; did you mean 1g.10gb? (at most: 7 x 1g.10gb, 1 x 1g.10gb+me, "
            "4 x 1g.20gb, 3 x 2g.20gb, 2 x 3g.40gb, 1 x 4g.40gb, 1 x 7g.80gb)",
        ),
        ({"1g.10gb": 8}, "8 x 1g.10gb is too many; at most 7 fit"),
        (
            {"3g.40gb": 1, "1g.10gb": 5},
            "1 x 3g.40gb, 5 x 1g.10gb do not fit together; 1 x 3g.40gb, 4 x 1g.10gb fit; "
            "nothing fits beside them",
        ),
        (
            {"4g.40gb": 1, "2g.20gb": 2},
            "1 x 4g.40gb, 2 x 2g.20gb do not fit together; 1 x 4g.40gb, 1 x 2g.20gb fit; beside them one "
            "of 1g.10gb, 1g.10gb+me, 1g.20gb fits",
        ),
        (
            {"1c.3g.40gb": 3},
            "1c.3g.40gb is part of an instance; only whole instances are supported, such as 3g.40gb",
        ),
    ],
)
def test_a_refusal_says_what_does_fit(wanted: dict[str, int], said: str) -> None:
    assert refusal(MODELS["a100-80gb"], pieces(**wanted)) == said
    layout = (LayoutEntry(mig_enabled=True, mig_devices=wanted),)
    assert layout_flaws("a100-80gb", layout, 4) == [f"entry 0, on a100-80gb: {said}"]


def test_only_one_instance_of_a_gpu_has_the_media_engines() -> None:
    assert refusal(MODELS["a30"], pieces(**{"1g.6gb+me": 1, "2g.12gb+me": 1})) is not None
    assert refusal(MODELS["a30"], pieces(**{"1g.6gb+me": 1, "2g.12gb": 1})) is None


def test_a_model_that_is_not_known_is_named_with_those_that_are() -> None:
    (said,) = layout_flaws("a100-80", (LayoutEntry(mig_enabled=False),), 1)
    assert "did you mean a100-80gb?" in said
    assert "h200" in said


def test_memory_of_a_profile_is_known_or_unknown_and_never_guessed() -> None:
    assert profile_memory_bytes("a100-80gb", "1g.10gb") == 9728 * 2**20
    assert profile_memory_bytes("h100-80gb", "1g.10gb") == 9984 * 2**20
    assert profile_memory_bytes("b200", "1g.23gb") == int(20.5 * 2**30)
    assert profile_memory_bytes("h100-94gb", "1g.12gb") is None
    assert profile_memory_bytes("a100-80gb", "1g.5gb") is None


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 PCIe", "h100-80gb"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", None),
        ("NVIDIA RTX A3000", None),
    ],
)
def test_product_names_lead_to_models(name: str, model: str | None) -> None:
    assert model_of(name) == model


def test_what_is_exported_is_read_as_the_same() -> None:
    gpus = [fake_gpu(0, "a100-80gb"), fake_gpu(1, "a100-80gb")]
    written, notes = export(gpus, "current")
    assert written["mig-configs"] == {
        "current": [{"devices": "all", "mig-enabled": False, "mig-devices": {}}]
    }
    assert notes == []
    assert wants(parse_layouts(written)["current"], gpus) == {0: Want(enabled=False), 1: Want(enabled=False)}
