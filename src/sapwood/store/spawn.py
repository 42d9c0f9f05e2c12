"""Starting a process without stopping this one.

`subprocess` keeps the interpreter while the new process is made, 4 ms and more. Here a thread that lives for this one
call is away in the C library meanwhile, and nobody waits for it.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import socket
import sys

ENDS_AT = 3  # the number that the socket has in the new process

_SETPGROUP, _SETSIGDEF, _SETSIGMASK = 0x02, 0x04, 0x08
_OPAQUE = 1024  # bytes: more than any C library's structures here take


class Process:
    """A Python process that runs `code`, with one end of a socket and without other files.

    It is in a process group of its own, so that what is typed at a terminal does not end it, but not in a session: by
    session Linux shares out processors (autogroups), and what is in another one cannot be told to stand back.

    `pid` is 0 until it was started; `gone` asks whether it is no more, and then it is reaped.
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
        """Now. OSError if it cannot be."""
        error = self._spawn()
        if error:
            raise OSError(error, os.strerror(error))

    def start_beside(self) -> None:
        """Soon, on a thread that is then gone. If it cannot be, it is as one that has ended."""
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
        except ChildProcessError:  # somebody else reaped it
            pid, status = self.pid, 0
        if pid:
            self._gone = True
            self.status = status
            if self.file >= 0:
                os.close(self.file)
                self.file = -1
        return self._gone

    def kill(self) -> None:
        if self.pid and not self.gone():  # not reaped: nobody else has its number
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
