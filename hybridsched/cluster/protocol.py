"""What the workers and the command line need of Slurm."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hybridsched.cluster.values import Job, JobChange, JobSpec, Node, Partition, Reservation


class Cluster(Protocol):
    """A Slurm cluster. Every method has its own time limit and raises `ClusterError`."""

    async def ping(self) -> None:
        """Returns when a slurmctld answers. Raises `unreachable` or `timeout` within a few seconds."""
        ...

    async def config(self, keys: Collection[str]) -> dict[str, str]:
        """The values of slurmctld's live configuration for `keys` (`SLURM_VERSION`, `PreemptType`, …).

        Keys that this Slurm does not have are left out.
        """
        ...

    async def jobs(self, *, partitions: Collection[str] = (), ids: Collection[int] = ()) -> tuple[Job, ...]:
        """Jobs that slurmctld remembers, ended ones for a while too; of `partitions` and with `ids` if given.

        An id that is not known is no error: it is not in the answer.
        """
        ...

    async def submit(self, spec: JobSpec) -> int:
        """Submit a batch job; its id."""
        ...

    async def signal(self, job: int, name: str, *, steps: bool = False, task: int | None = None) -> None:
        """Send signal `name` (`USR2`) to a running job's batch shell; with `steps` to its steps as well.

        With `task`, `job` is an array's id and that task is meant; without, an array's id means all of it.
        Nothing happens to a job that waits. `not_found` for one that has ended or never was.
        """
        ...

    async def requeue(self, job: int, *, task: int | None = None) -> None:
        """End a running job, or one task of an array, and put it back in the queue.

        `refused` for a job that is pending.
        """
        ...

    async def cancel(self, job: int) -> None:
        """End a job for good. A job that has ended, even one that Slurm has forgotten, is no error."""
        ...

    async def update_job(self, job: int, change: JobChange, *, task: int | None = None) -> None:
        """Change a job, or one task of an array."""
        ...

    async def nodes(self, names: Collection[str] = ()) -> tuple[Node, ...]:
        """All nodes, or those with `names`; a name that Slurm does not know is not in the answer."""
        ...

    async def drain(self, node: str, reason: str) -> None:
        """Let nothing new start on a node. Slurm wants a reason, so an empty one is `invalid`."""
        ...

    async def resume(self, node: str) -> None:
        """Undo `drain`. No error where the node takes jobs already."""
        ...

    async def down(self, node: str, reason: str) -> None:
        """Take a node record out of service whose slurmd has ended. Jobs on it would be killed.

        A drain stays: after `down` a node that registers again still takes no job before `resume`.
        """
        ...

    async def set_gres_count(self, node: str, name: str, count: int) -> None:
        """Set the live count of a GRES that has no device files and is not consumed; the others stay.

        Only a GRES that slurm.conf calls `no_consume` may be steered: slurmctld takes a node out of service
        (INVAL) when it registers with another count than last time while jobs hold some of it.
        Returns when Slurm shows the count. `no_effect` when it took the order and did not follow it (it does
        not know a GRES of that name on the node).
        """
        ...

    async def partitions(self) -> tuple[Partition, ...]: ...

    async def reservations(self) -> tuple[Reservation, ...]: ...

    async def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        """Keep jobs of others off nodes from a moment on: none starts whose time limit reaches into it.

        Jobs that run are left alone. One of that name that is there already is moved.
        """
        ...

    async def unreserve(self, name: str) -> None:
        """Remove a reservation; one that is not there is no error."""
        ...

    async def reconfigure(self) -> None:
        """Have every daemon read its configuration again."""
        ...

    async def close(self) -> None:
        """Release what the adapter itself holds."""
        ...
