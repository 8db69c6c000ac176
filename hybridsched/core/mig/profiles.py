"""Profiles by GPU model, for checks where no device is at hand. Where one is, its own are read and these
unused.

Source: NVIDIA MIG User Guide, "Supported MIG Profiles" (names, fractions, counts) and the listings of
`nvidia-smi mig -lgip` in its "Getting Started" (IDs, memory, multiprocessors of A30, A100, H100 80 GB), in
NVIDIA/mig-parted issue 120 (H200; its 7g as others print it) and pull request 187 (B200, where 1g.23gb has
20.50 GiB; an earlier driver printed 22.00 in pull request 166).
Placements are documented for the A100 only; the fractions of the later models are the same. What was not
printed anywhere is None: unknown.
"""

from __future__ import annotations

from types import MappingProxyType

from hybridsched.core.mig.values import Profile

_SEVEN = (
    # id, compute slices, memory slices, starts, most
    (19, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7),
    (20, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    (15, 1, 2, (0, 2, 4, 6), 4),
    (14, 2, 2, (0, 2, 4), 3),
    (9, 3, 4, (0, 4), 2),
    (5, 4, 4, (0,), 1),
    (0, 7, 8, (0,), 1),
)
_FOUR = (
    (14, 1, 1, (0, 1, 2, 3), 4),
    (21, 1, 1, (0, 1, 2, 3), 1),
    (5, 2, 2, (0, 2), 2),
    (6, 2, 2, (0, 2), 1),
    (0, 4, 4, (0,), 1),
)

_NO = None
_AMPERE = (14, 14, 14, 28, 42, 56, 98)
_HOPPER = (16, 16, 26, 32, 60, 64, 132)
_BLACKWELL = (18, 18, 30, 36, 70, 72, 148)
_UNSAID = (_NO,) * 7

_MODELS: dict[str, tuple[tuple[str, ...], tuple[int | None, ...], tuple[float | None, ...]]] = {
    # names, multiprocessors, GiB of an instance
    "a30": (
        ("1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"),
        (14, 14, 28, 28, 56),
        (5.8125, 5.8125, 11.6875, 11.6875, 23.4375),
    ),
    "a100-40gb": (
        ("1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
        _AMPERE,
        (4.75, 4.75, 9.625, 9.625, 19.5, 19.5, 39.25),
    ),
    "a100-80gb": (
        ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
        _AMPERE,
        (9.5, 9.5, 19.5, 19.5, 39.25, 39.25, 79.0),
    ),
    "h100-80gb": (
        ("1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
        _HOPPER,
        (9.75, 9.75, 19.625, 19.625, 39.5, 39.5, 79.25),
    ),
    "h100-94gb": (
        ("1g.12gb", "1g.12gb+me", "1g.24gb", "2g.24gb", "3g.47gb", "4g.47gb", "7g.94gb"),
        _UNSAID,
        _UNSAID,
    ),
    "h200": (
        ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
        _HOPPER,
        (16.0, 16.0, 32.25, 32.25, 69.5, 69.5, 140.0),
    ),
    "b200": (
        ("1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"),
        _BLACKWELL,
        (20.5, 20.5, 44.25, 44.25, 89.0, 89.0, 178.5),
    ),
}


def _profiles(model: str) -> tuple[Profile, ...]:
    names, multiprocessors, gib = _MODELS[model]
    shapes = _FOUR if len(names) == len(_FOUR) else _SEVEN
    return tuple(
        Profile(
            name=name,
            id=shape[0],
            slices=shape[1],
            size=shape[2],
            starts=shape[3],
            most=shape[4],
            multiprocessors=sms,
            memory_mib=None if memory is None else round(memory * 1024),
        )
        for name, shape, sms, memory in zip(names, shapes, multiprocessors, gib, strict=True)
    )


MODELS = MappingProxyType({model: _profiles(model) for model in _MODELS})
"""Model -> its profiles, smallest first."""

PCI_IDS = MappingProxyType(
    {
        "a30": (0x20B710DE,),
        "a100-40gb": (0x20B010DE, 0x20B110DE, 0x20F110DE, 0x20F610DE),
        "a100-80gb": (0x20B210DE, 0x20B510DE, 0x20F310DE, 0x20F510DE),
        "h100-80gb": (0x233010DE, 0x233110DE, 0x232210DE, 0x232410DE),
        "h100-94gb": (0x232110DE, 0x233A10DE),
        "h200": (0x233510DE, 0x233B10DE),
        "b200": (0x290110DE,),
    }
)
"""Model -> PCI device and vendor of its boards, those of the A800 and H800 too: what a `device-filter` names.

Source: NVIDIA/mig-parted, deployments/systemd/config-default.yaml.
"""

_KEYS = (
    # what NVML's product name must hold, and what it must not
    ("a30", ("A30",), ("A3000",)),
    ("a100-80gb", ("A100", "80GB"), ()),
    ("a100-40gb", ("A100",), ()),
    ("h200", ("H200",), ("GH200",)),
    ("h100-94gb", ("H100", "NVL"), ()),
    ("h100-80gb", ("H100",), ("GH100", "64GB", "96GB")),
    ("b200", ("B200",), ("GB200",)),
)


def model_of(name: str) -> str | None:
    """The key in `MODELS` of NVML's product name (`NVIDIA A100-SXM4-80GB`); None: not known here."""
    for key, holds, lacks in _KEYS:
        if all(word in name for word in holds) and not any(word in name for word in lacks):
            return key
    return None


def nominal_gb(profile: str) -> int | None:
    """The GB in a profile's name (`1g.18gb` -> 18): above what an instance has. None: it names none."""
    tail = profile.partition("+")[0].rpartition(".")[2]
    digits = tail.removesuffix("gb")
    return int(digits) if tail.endswith("gb") and digits.isdecimal() else None


def gres_type(profile: str) -> str:
    """The type that Slurm's GRES of a profile has: no `+` may stand in one."""
    return profile.replace("+", ".")
