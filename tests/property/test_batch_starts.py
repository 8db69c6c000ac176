"""Several processes start, or end, one batch at one moment: their file operations in every order.

The actors are threads of which one runs at a time, and each stops before every look at the disk and every
change of it. An order is who runs how many steps, one after the other; then each runs on while it can.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hybridsched.batches.errors import OutputExistsError
from hybridsched.batches.files import FileLock
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import plan_files
from hybridsched.batches.manifest import find_work
from hybridsched.batches.verify import check_files
from hybridsched.batches.work import WorkFolder
from hybridsched.store.batch_values import BatchInfo, BatchStatus, BatchUnknownError, NewBatch
from hybridsched.workers.offline_submit import submit_file
from tests.batch_kit import CrashError, read_ids, run_local, start, write_input

LINES = 2
ALL = 10**9
COMPLETE = "complete"
STRIDE = int(os.environ.get("HYBRIDSCHED_STARTS_STRIDE", "11"))
"""Of the orders in which a second actor comes between every one of so many is tried; 1: all of them."""


class Actor:
    def __init__(self, stage: Stage, act: Callable[[], object], die_at: int) -> None:
        self.steps = 0
        self.budget = 0
        self.die_at = die_at
        self.result: object = None
        self.error: BaseException | None = None
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(stage, act), daemon=True)

    def _run(self, stage: Stage, act: Callable[[], object]) -> None:
        stage.here.actor = self
        self.go.acquire()
        try:
            self.result = act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        stage.back.release()


class Stage:
    """Runs actors in a given order."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.back = threading.Semaphore(0)

    def step(self, *, wait: bool = False) -> None:
        """Called by an actor before each operation; with `wait` it lets another one run."""
        actor: Actor | None = getattr(self.here, "actor", None)
        if actor is None:
            return
        actor.steps += 1
        if actor.steps >= actor.die_at:
            raise CrashError
        actor.budget -= 1
        if wait or actor.budget <= 0:
            self.back.release()
            actor.go.acquire()

    def play(
        self, acts: list[Callable[[], object]], order: list[tuple[int, int]], *, die_at: int = ALL
    ) -> list[Actor]:
        """Run all to their ends; the first one dies at its step `die_at`."""
        actors = [Actor(self, act, ALL if i else die_at) for i, act in enumerate(acts)]
        for actor in actors:
            actor.thread.start()
        rest = itertools.cycle([(i, ALL) for i in range(len(acts))])
        for i, steps in itertools.chain(order, itertools.islice(rest, 400 * len(acts))):
            actor = actors[i]
            if actor.thread.is_alive() and actor.result is None and actor.error is None:
                actor.budget = steps
                actor.go.release()
                assert self.back.acquire(timeout=60)
        for actor in actors:
            assert actor.result is not None or actor.error is not None, "it waits for ever"
            actor.thread.join(60)
        return actors


class MemoryStore:
    """The pool's batches, as `submit_file` uses them."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.batches: dict[str, BatchInfo] = {}
        self._step = step

    def get(self, batch_id: str) -> BatchInfo:
        self._step()
        if batch_id not in self.batches:
            raise BatchUnknownError(batch_id)
        return self.batches[batch_id]

    def all(self) -> list[BatchInfo]:
        return list(self.batches.values())

    def submit(self, new: NewBatch) -> BatchInfo:
        self._step()
        known = self.batches.get(new.id)
        assert known is None or known.status.ended, "a batch is registered again"
        return self.put(new.id, new.output, new.errors, BatchStatus.VALIDATING)

    def put(self, batch_id: str, output: str, errors: str, status: BatchStatus) -> BatchInfo:
        made = self.batches[batch_id] = msgspec.convert(
            {
                **dict.fromkeys(("user", "input", "work", "stop", "message"), ""),
                **dict.fromkeys(("uid", "bytes", "lines", "tokens", "cursor", "cursor_line"), 0),
                **dict.fromkeys(("next_chunk", "outstanding", "done", "failed", "output_tokens"), 0),
                **dict.fromkeys(("model", "deadline_ms", "started_ms", "finished_ms")),
                "at_end": False,
                "submitted_ms": 0.0,
                "jobs_only": True,
                "id": batch_id,
                "output": output,
                "errors": errors,
                "status": status.value,
            },
            BatchInfo,
        )
        return made


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()

    def stopping(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            made.step()
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, staticmethod(run) if owner is Folder and name == "open" else run)

    for name in ("open_file", "exists", "names", "replace", "unlink", "make_link", "read_link"):
        stopping(Folder, name)
    for name in ("open", "make_folder", "remove_folder"):
        stopping(Folder, name)
    stopping(FileLock, "take")
    for name in ("hybridsched.batches.files.os.fsync", "hybridsched.batches.folder.os.fsync"):
        monkeypatch.setattr(name, lambda fd: None)
    for name in ("hybridsched.batches.work._pause", "hybridsched.workers.offline_submit._pause"):
        monkeypatch.setattr(name, lambda seconds: made.step(wait=True))
    return made


class Scene:
    """A folder with an input, and a pool."""

    def __init__(self, folder: Path, step: Callable[[], None]) -> None:
        folder.mkdir()
        self.folder = folder
        self.source = folder / "in.jsonl"
        self.ids = write_input(self.source, LINES)
        self.store = MemoryStore(step)

    def submit(self) -> str:
        """A job's start: the batch's id, or that it was complete."""
        store: Any = self.store
        try:
            return submit_file(store, self.source, jobs_only=True).batch.id
        except OutputExistsError:
            files = plan_files(self.source, "x")
            if check_files(files.input, files.output, files.errors).exact:
                return COMPLETE
            raise

    def begin(self) -> WorkFolder:
        """A batch all of whose lines have run, and which is about to be ended by a worker."""
        work = start(self.source)
        self.store.put("batch_t", work.files.output, work.files.errors, BatchStatus.IN_PROGRESS)
        run_local(work)
        work.lock_shared()
        return work

    def end(self, work: WorkFolder) -> str:
        """What a worker does, see `offline_feed.end_batch`."""
        self.store.put("batch_t", work.files.output, work.files.errors, BatchStatus.COMPLETED)
        try:
            work.remove()
        except CrashError:
            work.close()  # its locks go with a process
            raise
        return COMPLETE

    def check_one_batch(self, actors: list[Actor]) -> None:
        """All that live have the same batch, and nothing is there beside it."""
        living = [actor for actor in actors if not isinstance(actor.error, CrashError)]
        assert [actor.error for actor in living] == [None] * len(living)
        assert {actor.result for actor in living} == set(self.store.batches)
        (batch_id,) = self.store.batches
        work = WorkFolder.open(self.folder / f".hybridsched-{batch_id}")
        if living == actors:
            assert find_work(work.files.output) == [work.path]
        if living == actors:
            assert [path for path in self.folder.iterdir() if path.is_dir()] == [work.path]
        run_local(work)
        self.store.put(batch_id, work.files.output, work.files.errors, BatchStatus.COMPLETED)
        work.remove()
        assert self.submit() == COMPLETE  # which removes what the dead have left
        self.check_ended()

    def check_ended(self) -> None:
        assert read_ids(self.folder / "in.output.jsonl") == self.ids
        names = {path.name for path in self.folder.iterdir()}
        assert names == {"in.jsonl", "in.output.jsonl", "in.errors.jsonl"}


@pytest.fixture
def scene(tmp_path: Path, stage: Stage) -> Callable[[], Scene]:
    numbers = itertools.count()
    return lambda: Scene(tmp_path / str(next(numbers)), stage.step)


def steps_of(stage: Stage, scene: Scene) -> int:
    """How many steps a start takes that meets nobody."""
    (actor,) = stage.play([scene.submit], [])
    scene.check_one_batch([actor])
    return actor.steps


def test_two_starts_in_every_order_are_one_batch(stage: Stage, scene: Callable[[], Scene]) -> None:
    """The first stops anywhere, the second runs any number of steps, then the first to its end."""
    steps = steps_of(stage, scene())
    for first in range(1, steps + 1):
        for second in range(1 + first % STRIDE, steps + 10, STRIDE):
            one = scene()
            actors = stage.play([one.submit, one.submit], [(0, first), (1, second), (0, ALL), (1, ALL)])
            one.check_one_batch(actors)


def test_a_batch_that_ends_while_it_is_started_again_is_complete(
    stage: Stage, scene: Callable[[], Scene]
) -> None:
    for first, second in itertools.product(range(1, 24), range(1, 16)):
        if (first + second) % STRIDE:
            continue
        one = scene()
        order = [(0, first), (1, second), (0, ALL), (1, ALL)]
        actors = stage.play([one.submit, partial(one.end, one.begin())], order)
        assert [actor.error for actor in actors] == [None, None]
        assert actors[0].result in (COMPLETE, "batch_t")
        assert one.store.batches["batch_t"].status is BatchStatus.COMPLETED
        assert list(one.store.batches) == ["batch_t"]
        one.check_ended()


def test_a_start_that_dies_anywhere_stands_in_nobodys_way(stage: Stage, scene: Callable[[], Scene]) -> None:
    steps = steps_of(stage, scene())
    for die_at in range(1, steps + 1):
        for second in range(1 + die_at % STRIDE, steps + 10, STRIDE):
            one = scene()
            order = [(0, die_at // 2), (1, second), (0, ALL), (1, ALL)]
            actors = stage.play([one.submit, one.submit], order, die_at=die_at)
            if second == 1:  # alone, and the next comes after
                actors += stage.play([one.submit], [])
            one.check_one_batch(actors)


ORDERS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 25)), max_size=20)
QUICK = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],
)


@QUICK
@given(order=ORDERS, die_at=st.one_of(st.just(ALL), st.integers(1, 60)))
def test_four_starts_in_any_order_are_one_batch(
    stage: Stage, scene: Callable[[], Scene], order: list[tuple[int, int]], die_at: int
) -> None:
    one = scene()
    one.check_one_batch(stage.play([one.submit] * 4, order, die_at=die_at))


@QUICK
@given(order=ORDERS, die_at=st.one_of(st.just(ALL), st.integers(1, 20)))
def test_starts_around_the_end_of_a_batch_find_it_complete(
    stage: Stage, scene: Callable[[], Scene], order: list[tuple[int, int]], die_at: int
) -> None:
    """Also where the one who ends it dies: then another start may go on with it, to the same end."""
    one = scene()
    work = one.begin()
    actors = stage.play([lambda: one.end(work), *[one.submit] * 3], order, die_at=die_at)
    assert all(actor.error is None for actor in actors[1:])
    if one.store.batches["batch_t"].status is not BatchStatus.COMPLETED:
        again = WorkFolder.open(work.path)
        run_local(again)
        again.remove()
    elif actors[0].error is not None:
        assert stage.play([one.submit], [])[0].error is None
    one.check_ended()
