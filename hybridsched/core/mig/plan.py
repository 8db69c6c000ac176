"""The least change from what a node's GPUs are to what a layout wants: what can stay, stays where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from hybridsched.core.mig.placing import MigRefusalError, cells, place, refusal
from hybridsched.core.mig.values import Act, Gpu, GpuPlan, Instance, Piece, Plan, Step, Want, names_said


def plan(gpus: Sequence[Gpu], wants: Mapping[int, Want]) -> Plan:
    """The steps that make each GPU named in `wants` what it shall be; the others are left alone.

    Raises:
        MigRefusalError: a GPU cannot be so, whatever is destroyed; nothing is planned then.
    """
    by_index = {gpu.index: gpu for gpu in gpus}
    wrong = [
        problem for index, want in wants.items() if (problem := problem_of(by_index.get(index), index, want))
    ]
    if wrong:
        raise MigRefusalError("; ".join(wrong))
    return Plan(gpus=tuple(_gpu_plan(by_index[index], want) for index, want in sorted(wants.items())))


def problem_of(gpu: Gpu | None, index: int, want: Want) -> str | None:
    """Why a GPU cannot be as wanted, in a sentence without a full stop; None: it can."""
    if gpu is None:
        return f"GPU {index} is not there"
    if not want.enabled:
        return None
    who = f"GPU {index} ({gpu.name})"
    if not gpu.supported:
        return f"{who} has no MIG; only `mig-enabled: false` is possible"
    if not want.pieces:
        return None
    if not gpu.profiles:
        return (
            f"the MIG profiles of {who} are unknown here, and its driver does not tell them: put it in MIG "
            "mode first (a layout with `mig-devices: {}`), then try again"
        )
    problem = refusal(gpu.profiles, want.pieces)
    return None if problem is None else f"{who}: {problem}"


def back(before: Sequence[Gpu], now: Sequence[Gpu]) -> Plan:
    """The steps from `now` back to `before`, each instance at its old place.

    Only whole instances come back: other compute instances within them, as `before` may have had, are not
    made.
    """
    there = {gpu.index for gpu in now}
    wants = {gpu.index: _as_it_was(gpu) for gpu in before if gpu.index in there and gpu.supported}
    return plan(now, wants)


def _as_it_was(gpu: Gpu) -> Want:
    pieces = tuple(Piece(profile=i.profile, start=i.start) for i in gpu.instances)
    return Want(enabled=gpu.enabled, pieces=pieces if gpu.enabled else ())


def difference(gpu: Gpu, want: Want) -> str | None:
    """How a GPU differs from what is wanted, in a line; None: it does not."""
    who = f"GPU {gpu.index}"
    if gpu.enabled != want.enabled:
        pending = " (a change is pending)" if gpu.pending == want.enabled else ""
        return f"{who}: MIG mode is {_onoff(gpu.enabled)}, wanted {_onoff(want.enabled)}{pending}"
    if gpu.supported and gpu.pending != gpu.enabled:
        return f"{who}: MIG mode is {_onoff(gpu.enabled)} as wanted, and {_onoff(gpu.pending)} is pending"
    has = Counter(i.profile for i in gpu.instances)
    if has != Counter(piece.profile for piece in want.pieces):
        found = names_said([i.profile for i in gpu.instances])
        return f"{who}: has {found}, wanted {names_said([p.profile for p in want.pieces])}"
    places = {(i.profile, i.start) for i in gpu.instances}
    for piece in want.pieces:
        if piece.start is not None and (piece.profile, piece.start) not in places:
            return f"{who}: {piece.profile} does not stand at {piece.start}, where it was wanted"
    for instance in gpu.instances:
        if not instance.whole(_slices(gpu, instance)):
            count = len(instance.compute)
            parts = "no compute instance" if not count else f"{count} compute instance{'s'[: count > 1]}"
            return f"{who}: {instance.profile} at {instance.start} has {parts}, wanted 1 over the whole of it"
    return None


def _onoff(on: bool) -> str:
    return "on" if on else "off"


def _slices(gpu: Gpu, instance: Instance) -> int:
    profile = gpu.profile(instance.profile)
    return profile.slices if profile else 0


def _gpu_plan(gpu: Gpu, want: Want) -> GpuPlan:
    if not gpu.supported or difference(gpu, want) is None:
        as_it_is = _as_it_was(gpu).pieces
        return GpuPlan(gpu=gpu.index, want=want, stays=as_it_is)
    mode = gpu.enabled != want.enabled or gpu.pending != want.enabled
    kept, new = _keep(gpu, want) if gpu.enabled and want.enabled else ((), _placed(gpu, want))
    gone = tuple(i for i in gpu.instances if i not in kept)
    steps: list[Step] = []
    blockers: list[str] = []
    if mode and want.enabled:
        steps.append(Step(gpu=gpu.index, act=Act.MODE_ON))
    for instance in gone:
        steps += _emptied(gpu, instance)
        steps.append(_step(gpu, Act.DESTROY, instance))
    stays: list[Piece] = []
    for instance in kept:
        if instance.whole(_slices(gpu, instance)):
            stays.append(Piece(profile=instance.profile, start=instance.start))
        else:
            steps += [*_emptied(gpu, instance), _step(gpu, Act.CREATE_COMPUTE, instance)]
    for piece in new:
        profile = gpu.profile(piece.profile)
        if profile is None:
            raise MigRefusalError(f"GPU {gpu.index} has no profile {piece.profile}")
        for act in (Act.CREATE, Act.CREATE_COMPUTE):
            steps.append(
                Step(gpu=gpu.index, act=act, profile=piece.profile, start=piece.start, size=profile.size)
            )
    if mode and not want.enabled:
        steps.append(Step(gpu=gpu.index, act=Act.MODE_OFF))
    blockers += _used(gpu, [i for i in gpu.instances if i in gone or not i.whole(_slices(gpu, i))])
    if gpu.enabled != want.enabled:
        blockers += _busy(gpu)
    return GpuPlan(gpu=gpu.index, want=want, steps=tuple(steps), stays=tuple(stays), blockers=tuple(blockers))


def _step(gpu: Gpu, act: Act, instance: Instance, compute: int | None = None) -> Step:
    return Step(
        gpu=gpu.index,
        act=act,
        profile=instance.profile,
        start=instance.start,
        size=instance.size,
        compute=compute,
    )


def _emptied(gpu: Gpu, instance: Instance) -> list[Step]:
    return [_step(gpu, Act.DESTROY_COMPUTE, instance, compute.id) for compute in instance.compute]


def _used(gpu: Gpu, instances: Sequence[Instance]) -> Iterator[str]:
    for instance in instances:
        who = f"GPU {gpu.index}: {instance.profile} at {instance.start}"
        if instance.pids:
            yield f"{who} is in use by {_processes(instance.pids)}"
        elif instance.used:
            yield f"{who} may be in use: its processes could not be read"


def _busy(gpu: Gpu) -> Iterator[str]:
    """A change of the mode needs the whole GPU idle."""
    if gpu.pids is None:
        yield f"GPU {gpu.index} may be in use: its processes could not be read"
        return
    said = {pid for instance in gpu.instances for pid in instance.pids}
    if rest := tuple(pid for pid in gpu.pids if pid not in said):
        yield f"GPU {gpu.index} is in use by {_processes(rest)}"


def _processes(pids: tuple[int, ...]) -> str:
    return f"process{'es'[: 2 * (len(pids) > 1)]} {', '.join(map(str, pids))}"


def _placed(gpu: Gpu, want: Want) -> tuple[Piece, ...]:
    """All pieces of an empty GPU, largest first: the order that leaves the driver every choice."""
    found = place(gpu.profiles, want.pieces)
    if found is None:
        raise MigRefusalError(
            problem_of(gpu, gpu.index, want) or f"GPU {gpu.index}: the pieces cannot be placed"
        )
    return _largest_first(gpu, found)


def _largest_first(gpu: Gpu, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    sizes = {p.name: p.size for p in gpu.profiles}
    return tuple(sorted(pieces, key=lambda p: (-sizes[p.profile], p.profile, p.start or 0)))


def _keep(gpu: Gpu, want: Want) -> tuple[tuple[Instance, ...], tuple[Piece, ...]]:
    """Which instances stay, and the pieces to make beside them with their places.

    Those in use come first, then as many as possible, then the larger ones.
    """
    useful = [i for i in gpu.instances if any(_serves(i, piece) for piece in want.pieces)]
    sets = [chosen for count in range(len(useful), -1, -1) for chosen in combinations(useful, count)]
    sets.sort(key=lambda s: (-sum(i.used for i in s), -len(s), -sum(i.size for i in s), [i.start for i in s]))
    for chosen in sets:
        rest = _without(want.pieces, chosen)
        if rest is None:
            continue
        taken = 0
        for instance in chosen:
            taken |= cells(instance.start, instance.size)
        found = place(gpu.profiles, rest, taken)
        if found is not None:
            return chosen, _largest_first(gpu, found)
    raise MigRefusalError(problem_of(gpu, gpu.index, want) or f"GPU {gpu.index}: the pieces cannot be placed")


def _serves(instance: Instance, piece: Piece) -> bool:
    return instance.profile == piece.profile and piece.start in (None, instance.start)


def _without(pieces: Sequence[Piece], chosen: Sequence[Instance]) -> tuple[Piece, ...] | None:
    """The pieces that `chosen` does not serve; None when one of `chosen` serves none."""
    left = sorted(pieces, key=lambda p: p.start is None)  # a piece with a place is served by that one only
    for instance in chosen:
        served = next((piece for piece in left if _serves(instance, piece)), None)
        if served is None:
            return None
        left.remove(served)
    return tuple(left)
