"""A folder in the temporary directory for the sockets of one server, for this user alone; and what servers that were
killed left there is swept.

Whoever owns a folder holds a lock on a file in it, and the kernel lets go of that, however a process ends: a folder
whose lock can be had is nobody's. The sweeper keeps the lock while it removes: an owner that has just made its folder
and does not get the lock, or finds the file gone, makes another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "sapwood-"
_LOCK = "sapwood-server.lock"


class PrivateFolder:
    """`path` until `close`. Made with what dead servers left beside it removed."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if _locked(self._lock) and os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)  # somebody sweeps it

    def close(self) -> None:
        """May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(where: Path) -> None:
    """Remove folders of this user whose owner is dead. What has no lock file is not ours to judge."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(where)):
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep(entry)


def _sweep(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _locked(lock):
            shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
