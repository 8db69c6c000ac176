"""One user's rights on files, taken by a process of root for single operations, in the calling thread alone.

A worker of root that opened a user's files as root could be led anywhere by a link that this user, or another
one, puts in their place at the right moment. The kernel is asked instead: on Linux the user and group that
file operations are judged by belong to the thread, and root's own power over files goes while they are
another user's. What is opened keeps its rights; what is created belongs to the user and counts against their
quota; a server that trusts no root (root_squash) lets it pass.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
from types import TracebackType

_SETGROUPS = {
    "x86_64": 116,
    "aarch64": 159,
    "riscv64": 159,
    "loongarch64": 159,
    "ppc64le": 81,
    "s390x": 206,
}
"""Number of the setgroups system call. The C library's function would change every thread of the process."""

_NOBODY_GID = 65534
_ASK = ctypes.c_uint32(-1).value
"""To setfsuid and setfsgid: change nothing, return what is set."""


class Rights:
    """The rights of user `uid`; a context manager, around calls of the operating system only.

    For the process's own user it does nothing. Not to be nested, and no thread may be started within: it
    would keep these rights.
    """

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self._foreign = uid != os.geteuid()
        self._gid = _NOBODY_GID
        self._groups: list[int] = []
        if self._foreign:
            self._own_groups = os.getgroups()
            self._libc = ctypes.CDLL(None, use_errno=True)
            try:
                entry = pwd.getpwuid(uid)
            except KeyError:
                return  # a user without a name has no groups
            self._gid = entry.pw_gid
            self._groups = os.getgrouplist(entry.pw_name, entry.pw_gid)

    def __enter__(self) -> None:
        """Take them.

        Raises:
            PermissionError: this process is not root, or the kernel does not let it.
        """
        if not self._foreign:
            return
        if os.geteuid() != 0:
            raise PermissionError(
                errno.EPERM, f"this process runs as user {os.geteuid()} and cannot act for user {self.uid}"
            )
        try:
            self._take(self._groups, self._gid, self.uid)
        except BaseException:
            self._give_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._foreign:
            self._give_back()

    def _take(self, groups: list[int], gid: int, uid: int) -> None:
        # Groups first: that needs a right of root, which a change of the file user does not take away, but
        # until the file user is set the rest is still root's.
        self._set_groups(groups)
        self._libc.setfsgid(ctypes.c_uint32(gid))
        self._libc.setfsuid(ctypes.c_uint32(uid))
        now = (
            ctypes.c_uint32(self._libc.setfsgid(ctypes.c_uint32(_ASK))).value,
            ctypes.c_uint32(self._libc.setfsuid(ctypes.c_uint32(_ASK))).value,
        )
        if now != (gid, uid):
            raise PermissionError(errno.EPERM, f"the kernel does not let this process act for user {uid}")

    def _give_back(self) -> None:
        self._libc.setfsuid(ctypes.c_uint32(os.geteuid()))
        self._libc.setfsgid(ctypes.c_uint32(os.getegid()))
        self._set_groups(self._own_groups)

    def _set_groups(self, groups: list[int]) -> None:
        number = _SETGROUPS.get(platform.machine())
        if number is None:
            raise PermissionError(
                errno.EPERM,
                f"acting for another user is not known on {platform.machine()}; run this worker as user "
                f"{self.uid}",
            )
        array = (ctypes.c_uint32 * len(groups))(*groups)
        if self._libc.syscall(ctypes.c_long(number), ctypes.c_size_t(len(groups)), array) != 0:
            code = ctypes.get_errno()
            raise PermissionError(code, f"this process cannot act for user {self.uid}: {os.strerror(code)}")
