"""A store in a process of its own: what it does can keep neither the interpreter nor a lock from the caller.

    caller's thread                         socket                     the process (worker.py)
    exists / get / put --> Link: never waits ----- JOB ----->  ThreadStore --> backend
    poll <-- JobDone, Released <-------- DONE, RELEASED ----'       |
                                                                    |
    memory that `shared` made  <------ pages, where they lie -------'

No thread of this process takes part: a caller that waits, waits for `fileno()`. Breakers are on this side, so that a
dead store costs nothing; deadlines are on both sides, so that a process that hangs is no worse than a backend that
hangs. A process that dies is started again without stopping the caller.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import math
import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import wire
from .breaker import Breaker, Missing
from .keys import Fingerprint
from .protocol import JobDone, Kind, Released, StoreError
from .spawn import CAN_SHARE, Process, place_of
from .store import Store, log
from .values import REASONS, Arena

CAN_START = CAN_SHARE and hasattr(select, "epoll")
_REPORT_GRACE_SECONDS = 0.05  # seconds after a deadline within which the process itself reports
_OPEN_TIMEOUT_SECONDS = 60.0  # seconds that opening a backend, or registering memory with it, may take
_CLOSE_GRACE_SECONDS = 0.25  # seconds beyond the time of `close` until the process is killed
_KILL_TIMEOUT_SECONDS = 2.0  # seconds that a killed process may take to be gone
_STEADY_SECONDS = 10.0  # a process that has lived for so many seconds is started again at once when it dies
_RESTART_BACKOFF_SECONDS = (0.1, 30.0)  # seconds until others are: the first time, doubled each time, at most
_POLL_SECONDS = 0.001  # seconds between two looks while no job is under way: memory released, the process's end
_MAX_UNSENT_BYTES = 64 << 20  # bytes that may wait to be sent
_COUNTED = ("found", "absent", "hit", "miss", "failed", "stored", "full", "lost", "bytes_read", "bytes_written")

# What the process runs. It yields to the engine from the start: with all processors busy it still has a thirtieth of
# them. Nicer (19) made no measurable difference.
_CODE = """
import os, sys
os.nice(15)
if {path!r} not in sys.path:
    sys.path.insert(0, {path!r})
from sapwood.store.worker import main
main()
"""


_processor: Callable[[], int] = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: -1)  # that this thread runs on


class _JobInFlight(NamedTuple):
    """A job that the process has, or will be sent."""

    id: int
    kind: Kind
    asked: dict[str, NDArray[np.bool_]]
    deadline: float
    keys: int

    def done(self, failed: str, held: bool, ok: bytes = b"") -> JobDone:
        n = len(next(iter(self.asked.values())))
        flags = np.frombuffer(bytearray(ok or bytes(n * len(self.asked))), np.bool_).reshape(len(self.asked), n)
        return JobDone(self.id, self.kind, dict(zip(self.asked, flags, strict=True)), self.asked, failed, held)


class _Child:
    """One process and the socket to it."""

    def __init__(self, hello: list[tuple[bytes, int | None]]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link = wire.Connection(mine)
        path = str(Path(__file__).resolve().parents[2])
        self.process = Process(_CODE.format(path=path), its)
        for data, file in hello:
            self.link.send(data, file)
        self.steady_at = math.inf  # when it will have lived for long enough
        self.ready = False  # it has opened the store and knows the memory
        self.known = 0  # groups of which it knows the memory
        self.abreast = 1 << 16  # threads that handle pages side by side

    def end(self, patience: float) -> bool:
        """Kill it, and wait until it is gone."""
        self.link.close()
        until = time.monotonic() + patience
        while not self.process.gone():
            self.process.kill()
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return True


class ProcessStore(Store):
    """A store in a process of its own. Memory that is registered must come from `sapwood.store.shared`."""

    def __init__(
        self,
        uri: str,
        fingerprint: Fingerprint,
        *,
        shown: str,
        queue_pages: int = 8192,
        breaker: Breaker | None = None,
        missing: Missing | None = None,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(fingerprint, shown, queue_pages, breaker, on_report)
        if on_report is not None:
            raise ValueError(
                "on_report must be None with process=True: there is no thread to call it; wait for fileno()"
            )
        if not CAN_START:
            raise StoreError("a store in a process of its own needs Linux: leave process out, or False")
        missing = Missing() if missing is None else missing
        self._opening = wire.Opening(uri, fingerprint, missing.seconds, missing.capacity)
        self._places: dict[str, tuple[int, bytes]] = {}  # by group: the file of its memory, and where in it
        self._live: dict[int, _JobInFlight] = {}  # not reported
        self._late: dict[int, _JobInFlight] = {}  # reported, but the process may still have their memory
        self._first_deadline = math.inf  # of live jobs, with their grace, or earlier
        self._looked = time.monotonic()
        self._extended = False  # jobs beyond their deadline got more time, because the caller had not looked
        self._counts = dict.fromkeys(("done", "timeout", "error", "closed", "late"), 0)
        self._before = collections.Counter[str]()  # counts of processes that are gone
        self._counts_frame = b""  # the last counts of the present process
        self._restarts = self._tries = 0
        self._restart_at = math.inf
        self._answer: tuple[int, bytes] | None = None  # to the last frame that has one
        self._processors = os.sched_getaffinity(0)  # on which it may run
        self._processor = -1  # the one that the process was last kept off
        self._epoll = select.epoll()
        self._watched = 0  # events of the socket for which `_epoll` waits
        self._child: _Child | None = None
        self._children: list[_Child] = []  # the same, for `_clean_up`
        self._files: list[int] = []  # of the memory: a process may be started after the caller has dropped its array
        self._end = weakref.finalize(self, _clean_up, self._children, self._files, self._epoll)
        try:
            self._begin_child()
            assert self._child is not None
            self._child.process.start()
            self._ask(wire.OPENED)
        except OSError as error:
            self._end()
            raise StoreError(f"the process of store {shown} could not be started: {error}") from None
        except BaseException:
            self._end()
            raise
        self._child.ready = True

    # ---- what the caller does

    def poll(self) -> list[JobDone | Released]:
        if self._live or time.monotonic() >= self._looked + _POLL_SECONDS:
            self._look()
        if not self._reports:
            return []
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def wait(self, timeout: float) -> bool:
        return self._until(lambda: bool(self._reports), timeout)

    def drain(self, timeout: float) -> bool:
        return self._until(lambda: not (self._live or self._late), timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Jobs under way when the time is up end with the process: after that the memory is not touched, unless the
        system itself cannot end it."""
        child = self._child
        if not self._closed:
            self._closed = True
            self._restart_at = math.inf
            if child is not None and child.ready:
                child.link.send(wire.closing(timeout))
                self._until(lambda: self._child is None, timeout + _CLOSE_GRACE_SECONDS)
        if self._child is not None:
            gone = self._child.end(_KILL_TIMEOUT_SECONDS)
            if not gone:
                return False
            self._bury()
        self._end()
        return True

    def stats(self) -> dict[str, Any]:
        now = self._counted()
        counts = {**self._asked, **self._counts}
        counts["done"] += counts.pop("empty")
        child = self._child
        process = child.process if child is not None else None
        return {
            "uri": self._shown,
            **counts,
            **{name: self._before[name] + now.get(name, 0) for name in _COUNTED},
            "waiting": sum(self._given.values()) - sum(self._taken.values()),
            "jobs": len(self._live),
            "held_jobs": len(self._late),
            "held_pages": sum(job.keys for job in self._late.values() if job.kind != "exists"),
            "bad": {reason: self._before[f"bad {reason}"] + now.get("bad", {}).get(reason, 0) for reason in REASONS},
            "breaker": self.breaker.stats(),
            "write_breaker": self.write_breaker.stats(),
            "missing": now.get("missing", {"keys": 0, "spared": 0}),
            "backend": now.get("backend", {}),
            "process": {
                "pid": process.pid if process is not None else 0,
                "alive": child is not None and child.ready and not child.link.lost,
                "restarts": self._restarts,
            },
        }

    def fileno(self) -> int:
        return self._epoll.fileno()

    # ---- jobs

    @property
    def _away(self) -> bool:
        child = self._child
        return child is None or not child.ready or child.link.lost

    @property
    def _clogged(self) -> bool:
        return self._child is not None and self._child.link.unsent > _MAX_UNSENT_BYTES

    def _register(self, arena: Arena) -> None:
        place = place_of(arena.array)
        if place is None or arena.pages >= 2**31:
            raise ValueError(
                f"memory of group {arena.group!r} must be such that the store's process can map it too: take it from "
                "sapwood.store.shared or an engine's HostArena, or open the store without process=True"
            )
        if self._away or self._closed:
            raise StoreError(f"the store {self._shown} is closed, or its process is gone for now")
        assert self._child is not None
        file = os.dup(place.file)
        self._files.append(file)
        frame = wire.register(arena.index, (arena.pages, arena.page_bytes), place.offset)
        self._child.link.send(frame, file)
        self._child.abreast = wire.read_registered(self._ask(wire.REGISTERED))
        self._processor = -1  # where it may run depends on that
        self._places[arena.group] = (file, frame)

    def _begin(
        self, id: int, kind: Kind, hashes: bytes, arenas: list[Arena], pages: NDArray[np.int64], deadline: float
    ) -> None:
        there = pages != 0
        asked = {arena.group: there[:, i] for i, arena in enumerate(arenas)}
        self._live[id] = _JobInFlight(id, kind, asked, deadline, int(np.count_nonzero(there)))
        self._first_deadline = min(self._first_deadline, deadline + _REPORT_GRACE_SECONDS)
        assert self._child is not None
        if _processor() != self._processor:
            self._keep_off_this_processor(self._child)
        groups = [arena.index for arena in arenas]
        self._child.link.send(wire.SentJob(id, kind, deadline, groups, hashes, pages).frame())
        self._watch()

    def _done(self, report: wire.JobReport) -> None:
        job = self._live.pop(report.id, None)
        if job is None:  # it was late
            if not report.held:
                self._release(report.id)
            return
        if report.held:
            self._late[job.id] = job
            self._counts["late"] += 1
        self._counts[report.failed or "done"] += 1
        self._judge(job.kind, report.failed, report.neglected, report.answered, report.why)
        self._reports.append(job.done(report.failed, report.held, report.ok))

    def _release(self, id: int) -> None:
        if self._late.pop(id, None) is not None:
            self._reports.append(Released(id))

    def _expire(self) -> None:
        """Report jobs of which the process should have sent a report by now. It may still have their memory."""
        now = time.monotonic()
        looked, self._looked = self._looked, now
        if now < self._first_deadline:
            return
        if (
            now > looked + _REPORT_GRACE_SECONDS and not self._extended
        ):  # the caller was away: reports may be on their way
            self._extended = True
            self._first_deadline = now + _REPORT_GRACE_SECONDS
            return
        self._extended = False
        for job in [job for job in self._live.values() if job.deadline + _REPORT_GRACE_SECONDS <= now]:
            del self._live[job.id]
            self._late[job.id] = job
            self._counts["late"] += 1
            self._counts["timeout"] += 1
            self._judge(job.kind, "timeout", True, False, "its process does not answer")
            self._reports.append(job.done("timeout", True))
        self._first_deadline = (
            min((job.deadline for job in self._live.values()), default=math.inf) + _REPORT_GRACE_SECONDS
        )

    # ---- the process

    def _look(self) -> None:
        """Do all that can be done now. Never waits."""
        child = self._child
        if child is not None:
            if _processor() != self._processor:
                self._keep_off_this_processor(child)
            for kind, body in child.link.receive():
                self._hear(child, kind, body)
            if child.link.unsent:
                child.link.flush()
            self._watch()
            if child.link.lost:
                child.process.kill()  # it may only have closed its socket
                if child.process.gone():
                    self._bury()
        elif time.monotonic() >= self._restart_at:
            self._restart_at = math.inf
            self._restarts += 1
            self._begin_child()
            assert self._child is not None
            self._child.process.start_beside()
        self._expire()

    def _keep_off_this_processor(self, child: _Child) -> None:
        """Keep the process off the processor that this thread runs on, if the others are enough for its threads. The
        kernel may wake one of them on this processor, and decide only at its next tick, milliseconds later, which
        thread runs. This thread sets the affinity itself: the process may be waiting for this very processor."""
        if not child.ready or not child.process.pid:
            return
        self._processor = _processor()
        others = self._processors - {self._processor}
        if len(others) < child.abreast:
            others = self._processors
        with contextlib.suppress(OSError):  # it may be gone
            for task in os.listdir(f"/proc/{child.process.pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task), others)

    def _hear(self, child: _Child, kind: int, body: bytes) -> None:
        if kind == wire.DONE:
            self._done(wire.JobReport.read(body))
        elif kind == wire.RELEASED:
            self._release(wire.read_released(body))
        elif kind == wire.TAKEN:
            self._taken = wire.read_taken(body)
        elif kind == wire.COUNTS:
            self._counts_frame = body
        elif child.ready or not self._restarts:
            self._answer = (kind, body)
        elif kind == wire.REFUSED:
            log.warning("store %s cannot be opened again for now: %s", self._shown, wire.read_refusal(body))
            child.process.kill()
        else:  # a process that was started again opened the store, or knows another group's memory
            if kind == wire.REGISTERED:
                child.known += 1
                child.abreast = wire.read_registered(body)
            if child.known == len(self._places):
                child.ready = True
                child.steady_at = time.monotonic() + _STEADY_SECONDS
                self.breaker.renew()  # it has opened the store
                self.write_breaker.renew()
                log.warning("the process of store %s runs again", self._shown)

    def _ask(self, want: int) -> bytes:
        """Wait for the answer to the frame that was sent."""
        self._answer = None
        if not self._until(lambda: self._answer is not None or self._child is None, _OPEN_TIMEOUT_SECONDS):
            raise StoreError(f"the process of store {self._shown} has not answered for {_OPEN_TIMEOUT_SECONDS:.0f} s")
        if self._answer is None:
            raise StoreError(f"the process of store {self._shown} ended before it could be used")
        kind, body = self._answer
        if kind != want:
            raise wire.read_refusal(body)
        return body

    def _begin_child(self) -> None:
        hello: list[tuple[bytes, int | None]] = [(self._opening.frame(), None)]
        hello += [(frame, file) for file, frame in self._places.values()]
        self._child = _Child(hello)
        self._processor = -1
        self._children[:] = [self._child]
        self._watched = 0
        self._watch()

    def _watch(self) -> None:
        """Let `fileno` wait for the socket; when that is closed, for the end of the process."""
        child = self._child
        if child is None:
            return
        if child.link.lost:
            want = -1
        else:
            want = select.EPOLLIN | (select.EPOLLOUT if child.link.unsent else 0)
        if want == self._watched:
            return
        if want < 0:
            if (file := child.link.fileno()) >= 0:  # a closed one has left the epoll by itself
                self._epoll.unregister(file)
            if child.process.file >= 0:
                self._epoll.register(child.process.file, select.EPOLLIN)
        elif self._watched:
            self._epoll.modify(child.link.fileno(), want)
        else:
            self._epoll.register(child.link.fileno(), want)
        self._watched = want

    def _bury(self) -> None:
        """The process is gone, so the memory is not touched any more."""
        child = self._child
        assert child is not None
        child.link.close()
        self._child = None
        self._children.clear()
        now = time.monotonic()
        failed = "closed" if self._closed else "error"
        for job in self._live.values():
            self._counts[failed] += 1
            self._reports.append(job.done(failed, False))
        self._live.clear()
        for id in list(self._late):
            self._release(id)
        self._first_deadline = math.inf
        self._given = dict.fromkeys(self._given, 0)
        self._taken = dict.fromkeys(self._taken, 0)
        if self._closed:
            return
        last = self._counted()
        self._before.update({name: last.get(name, 0) for name in _COUNTED})
        self._before.update({f"bad {reason}": n for reason, n in last.get("bad", {}).items()})
        self._counts_frame = b""
        self.breaker.trip()
        self.write_breaker.trip()
        if child.ready and now >= child.steady_at:
            self._tries = 0
        first, most = _RESTART_BACKOFF_SECONDS
        self._restart_at = now + (min(most, first * 2 ** (self._tries - 1)) if self._tries else 0.0)
        self._tries += 1
        log.warning(
            "the process of store %s %s, and is started again%s",
            self._shown,
            child.process.ending(),
            f" in {self._restart_at - now:.1f} s" if self._restart_at > now else "",
        )

    def _counted(self) -> dict[str, Any]:
        return json.loads(self._counts_frame) if self._counts_frame else {}

    # ---- waiting

    def _until(self, true: Callable[[], bool], timeout: float) -> bool:
        until = time.monotonic() + timeout
        while True:
            self._look()
            if true():
                return True
            now = time.monotonic()
            if now >= until or (self._closed and self._child is None):
                return False
            patience = min(until, self._first_deadline, self._restart_at) - now
            child = self._child
            if child is not None and child.link.lost and child.process.file < 0:
                patience = min(patience, 0.001)  # no file shows when it is gone
            with contextlib.suppress(InterruptedError):
                self._epoll.poll(max(0.0, patience), 1)


def _clean_up(children: list[_Child], files: list[int], epoll: select.epoll) -> None:
    """At the end of a store, also if it was not closed, or of this process."""
    for child in children:
        child.end(_KILL_TIMEOUT_SECONDS)
    children.clear()
    while files:
        os.close(files.pop())
    epoll.close()
