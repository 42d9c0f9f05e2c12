"""The engine process as the API process holds it: its start, its two sockets in a folder of their own, and its end.

The folder is in the temporary directory, for this user alone, and what servers that were killed left there is swept.
The owner of a folder holds a lock on a file in it, which the kernel releases however a process ends: a folder whose
lock can be had has no owner. The sweeper keeps the lock while it removes, so an owner that has just made its folder and
does not get the lock, or finds the file gone, makes another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from .messages import IGNORED_SIGNALS, STOP_SIGNAL, Settings, encode

_PREFIX = "sapwood-"
_LOCK = "sapwood-server.lock"
_CONNECT_MILLISECONDS = 1000  # milliseconds that a message waits for an engine that has just begun


class EngineChild:
    """One engine process. `on_message` is called when messages may have come, `on_exit` when it has ended, both by the
    event loop that calls everything else. ValueError if no process can be started."""

    def __init__(self, settings: Settings, on_message: Callable[[], None], on_exit: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._folder = PrivateFolder()
        self._context = zmq.Context()
        self._context.linger = 0  # without `close`, the end of this process waits for no message either
        self.inward, self._outward = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, name in ((self.inward, "api"), (self._outward, "engine")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.SNDTIMEO, _CONNECT_MILLISECONDS)
            socket.bind(f"ipc://{self._folder.path}/{name}")
        # A process inherits what is blocked: Ctrl-C goes to both, and until the engine ignores it, it is a traceback.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sapwood.server.process.engine_process", str(self._folder.path)],
                stdin=subprocess.PIPE,
            )
        except OSError as error:
            self._context.destroy(linger=0)
            self._folder.close()
            raise ValueError(f"no process for the engine can be started: {error}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._pidfd = os.pidfd_open(self.process.pid)
        loop.add_reader(self._pidfd, on_exit)
        loop.add_reader(self.inward.fileno(), on_message)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self.process.stdin.close()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        raw = encode(message)
        try:
            self._outward.send(raw, zmq.NOBLOCK)
        except zmq.Again:  # no peer: the engine has just begun, or it is dead and the event loop does not know yet
            if self.running:
                with contextlib.suppress(zmq.Again):
                    self._outward.send(raw)

    async def stop(self, seconds: float) -> bool:
        """Ask the engine to end. False if it had to be killed after so many seconds."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self.process.send_signal(STOP_SIGNAL)
        try:
            await asyncio.wait_for(loop.run_in_executor(None, self.process.wait), seconds)
        except TimeoutError:
            self.process.kill()
            await loop.run_in_executor(None, self.process.wait)
            return False
        return True

    def kill(self) -> None:
        if self.running:
            self.process.kill()
            self.process.wait()
            self._folder.close()

    def close(self) -> None:
        """The process has ended: close its sockets and remove their folder. May be called again."""
        if self._pidfd < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        loop.remove_reader(self.inward.fileno())
        self._context.destroy(linger=0)
        self._folder.close()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"


class PrivateFolder:
    """`path` until `close`. Made after the folders of dead servers beside it were removed."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if _locked(self._lock) and os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)  # another server sweeps it

    def close(self) -> None:
        """May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(where: Path) -> None:
    """Remove folders of this user whose owner is dead. A folder without a lock file is not a server's, and stays."""
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
