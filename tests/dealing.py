"""How the tests of a run are dealt out to the processes that run them side by side (`make test`).

What waits long goes first, and each such test by itself to whoever is free: at the end all are busy with
short ones. Of the other folders a file stays in one process, with the servers that its tests share.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

_ORDER = ("vllm", "integration", "contract", "property", "unit")
_BY_ITSELF = "integration"
"""Folder whose tests need not stay together."""
_ONE_AT_A_TIME = {
    # A whole pool in processes of its own under load: several at a time would only wait for each other.
    "test_kill.py": "kill",
    # A demo's trace goes on whether or not the machine keeps up with it.
    "test_demo_run.py": "demo",
    "test_slurm_demo.py": "demo",
    "test_pool_by_hand.py": "demo",
    "test_modes_day.py": "demo",
}


def share(nodeid: str) -> str:
    """What stays in one process, and runs there one after the other: tests of the same answer."""
    path = PurePosixPath(nodeid.partition("::")[0])
    if path.parent.name == "vllm":
        return "vllm"  # one real engine at any time
    if path.name in _ONE_AT_A_TIME:
        return _ONE_AT_A_TIME[path.name]
    return nodeid if path.parent.name == _BY_ITSELF else str(path)


def rank(item: pytest.Item) -> tuple[int, float]:
    """Sorts what takes long to the front; a test that was given a longer limit takes longer."""
    limit = item.get_closest_marker("timeout")
    folder = item.path.parent.name
    place = _ORDER.index(folder) if folder in _ORDER else len(_ORDER)
    return place, -(limit.args[0] if limit else 0.0)


class Dealing(LoadScopeScheduling):
    """Hands out shares in the order in which the tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return share(nodeid)
