"""A process beside this one: its start, which does not stop this process, and memory that both can map.

`subprocess` keeps the interpreter while the new process is made, 4 ms and more. Here a thread that lives for this one
call is in the C library meanwhile, and no other thread waits for it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CAN_SHARE = hasattr(os, "memfd_create")
ENDS_AT = 3  # the number that the socket has in the new process

_SETPGROUP, _SETSIGDEF, _SETSIGMASK = 0x02, 0x04, 0x08
_OPAQUE = 1024  # bytes: more than any C library's structures here take


class Process:
    """A Python process that runs `code`, with one end of a socket and without other files.

    It is in a process group of its own, so that Ctrl-C at a terminal does not end it, but in the same session: Linux
    shares out processors by session (autogroups), and niceness has no effect on processes of another session.

    `pid` is 0 until it was started; `gone` asks whether it has ended, and reaps it then.
    """

    def __init__(self, code: str, end: socket.socket) -> None:
        self.pid = 0
        self.status = 0
        self.file = -1  # readable when it has ended, where the system has such files
        self._end = end
        self._gone = self._failed = False
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        self._actions, self._attributes, signals = (ctypes.create_string_buffer(_OPAQUE) for _ in range(3))
        libc.posix_spawn_file_actions_init(self._actions)
        libc.posix_spawn_file_actions_addopen(self._actions, 0, b"/dev/null", os.O_RDONLY, 0)
        if _is_open(2):
            libc.posix_spawn_file_actions_adddup2(self._actions, 2, 1)
        else:
            for file in (1, 2):
                libc.posix_spawn_file_actions_addopen(self._actions, file, b"/dev/null", os.O_WRONLY, 0)
        libc.posix_spawn_file_actions_adddup2(self._actions, end.fileno(), ENDS_AT)
        libc.posix_spawnattr_init(self._attributes)
        libc.posix_spawnattr_setflags(self._attributes, ctypes.c_short(_SETPGROUP | _SETSIGMASK | _SETSIGDEF))
        libc.sigemptyset(signals)
        libc.posix_spawnattr_setsigmask(self._attributes, signals)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            libc.sigaddset(signals, int(number))
        libc.posix_spawnattr_setsigdefault(self._attributes, signals)
        self._argv = _strings([os.fsencode(sys.executable), b"-P", b"-c", code.encode()])
        self._environment = _strings([name + b"=" + value for name, value in os.environb.items()])

    def start(self) -> None:
        """Start it now; OSError if that fails."""
        error = self._spawn()
        if error:
            raise OSError(error, os.strerror(error))

    def start_beside(self) -> None:
        """Start it soon, on a thread that ends then. If that fails, it counts as a process that has ended."""
        _thread.start_new_thread(self._spawn, ())

    def _spawn(self) -> int:
        pid = ctypes.c_int()
        path, argv, environment = os.fsencode(sys.executable), self._argv, self._environment
        error = int(self._libc.posix_spawn(ctypes.byref(pid), path, self._actions, self._attributes, argv, environment))
        self._end.close()
        if error:
            self._failed = True
        else:
            with contextlib.suppress(OSError, AttributeError):
                self.file = os.pidfd_open(pid.value)
            self.pid = pid.value
        return error

    def __del__(self) -> None:
        self._libc.posix_spawn_file_actions_destroy(self._actions)
        self._libc.posix_spawnattr_destroy(self._attributes)

    def gone(self) -> bool:
        """Never waits."""
        if self._gone or self._failed:
            return True
        if not self.pid:
            return False
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # reaped elsewhere
            pid, status = self.pid, 0
        if pid:
            self._gone = True
            self.status = status
            if self.file >= 0:
                os.close(self.file)
                self.file = -1
        return self._gone

    def kill(self) -> None:
        if self.pid and not self.gone():  # not reaped: no other process has its number
            os.kill(self.pid, signal.SIGKILL)

    def ending(self) -> str:
        """How it ended, in words."""
        if self._failed:
            return "could not be started"
        code = os.waitstatus_to_exitcode(self.status)
        return f"was ended by signal {-code}" if code < 0 else f"ended with {code}"


def _strings(given: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(given) + 1))(*given, None)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


# ---- memory that both processes map


class Mapping(mmap.mmap):
    """All of a memory file, which has no name and goes when no process maps it or has it open."""

    file: int


class SharedPlace(NamedTuple):
    """Where an array lies in a memory file."""

    file: int
    offset: int


def shared(shape: tuple[int, int]) -> NDArray[np.uint8]:
    """A uint8 array that a store in a process of its own can be given. It begins at a multiple of the system's page
    size, is all zeros, and its memory is taken when it is first written. MemoryError if there is none."""
    if not CAN_SHARE:
        raise MemoryError("memory for another process needs memfd_create, which this system has not got")
    nbytes = shape[0] * shape[1]
    file = os.memfd_create("sapwood", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, max(nbytes, 1))
        mapping = Mapping(file, max(nbytes, 1))
    except (OSError, ValueError, OverflowError) as error:
        os.close(file)
        raise MemoryError(f"{nbytes} bytes cannot be mapped: {error}") from None
    mapping.file = file
    weakref.finalize(mapping, os.close, file)
    with contextlib.suppress(OSError, AttributeError):  # some systems have no huge pages for such memory
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8, nbytes).reshape(shape)


def place_of(array: NDArray[np.uint8]) -> SharedPlace | None:
    """Where an array lies in memory that `shared` made; None if it lies elsewhere."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, Mapping):
        return None
    first = np.frombuffer(base, np.uint8, 1).ctypes.data
    return SharedPlace(base.file, int(array.ctypes.data) - first)


def attach(file: int, offset: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The array that another process has at this place. Closes `file`."""
    try:
        nbytes = shape[0] * shape[1]
        mapping = mmap.mmap(file, offset + nbytes)
    finally:
        os.close(file)
    return np.frombuffer(mapping, np.uint8, nbytes, offset).reshape(shape)
