"""What can go wrong with Redis. Re-exported by `hybridsched.store.connection`."""

from __future__ import annotations


class StoreError(Exception):
    """Something about Redis went wrong. The message says what was tried, what came back, what to do."""


class StoreUrlError(StoreError, ValueError):
    """The URL cannot be understood."""


class StoreUnavailable(StoreError):  # noqa: N818 - the name says the state; callers read `except StoreUnavailable`
    """The server could not be reached, did not answer in time, or is loading or failing over. Try again."""


class StoreRefused(StoreError):  # noqa: N818
    """The server answered no: wrong password, missing ACL right, too old, out of memory, a failed script."""
