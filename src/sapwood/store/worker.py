"""The process of a store: reads jobs from its socket, gives them to a `ThreadStore`, and sends its reports.

process.py starts it. It ends when the socket is closed, whatever is under way: no caller is left.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from typing import Any

from . import wire
from .breaker import Breaker, Missing
from .jobs import ThreadStore, _Job
from .keys import Fingerprint
from .opening import open_backend
from .protocol import Backend, JobDone
from .spawn import ENDS_AT, attach
from .store import log
from .threads import Wakeup

_PROGRESS_SECONDS = 0.02  # seconds between two looks at how far long jobs have come
_NEVER = 10**9  # failures: whether to ask at all is decided before a job comes here


class _Served(ThreadStore):
    """A store that only records what each job showed of the backend: the breakers are in the caller's process."""

    def __init__(
        self, backend: Backend, fingerprint: Fingerprint, shown: str, missing: Missing, wakeup: Wakeup
    ) -> None:
        options: dict[str, Any] = {
            "breaker": Breaker(failures=_NEVER),
            "missing": missing,
            "on_report": self._part_over,
        }
        self._wakeup = wakeup
        self._sent_taken = b""
        self._outcomes: dict[int, tuple[bool, bool, str]] = {}  # by job: neglected, answered, why
        super().__init__(backend, fingerprint, shown=shown, **options)
        self.names = [layout.name for layout in fingerprint.in_order()]

    def take(self, job: wire.SentJob) -> None:
        arenas = [self._arenas[self.names[index]] for index in job.groups]
        self._begin(job.id, job.kind, job.hashes, arenas, job.pages, job.deadline)

    def _judge_job(self, job: _Job, failed: str) -> None:
        self._outcomes[job.id] = (self._neglected(job), job.answered > 0, job.why)

    @property
    def abreast(self) -> int:
        """How many threads handle pages side by side: one, if all pages are so small that it is mostly Python."""
        small = all(arena.page_bytes < self._backend.small_bytes for arena in self._arenas.values())
        return 1 if small else self._backend.workers

    def _part_over(self) -> None:
        if self._reports:
            self._wakeup.ring()

    def seconds(self) -> float:
        """Until the next look, unless a thread rings before."""
        return min(max(0.0, self._first_deadline - time.monotonic()), _PROGRESS_SECONDS if self._live else math.inf)

    def news(self) -> bytes:
        """Frames of all reports, and of counts that have changed."""
        self.wait(0)  # looks at deadlines, also if a worker has the lock
        reports = self.poll()
        frames = []
        taken = wire.taken(self._taken)
        if taken != self._sent_taken:
            frames.append(taken)
            self._sent_taken = taken
        if reports:
            frames.append(wire.frame(wire.COUNTS, json.dumps(self.stats(), default=str).encode()))
        for report in reports:
            if isinstance(report, JobDone):
                frames.append(wire.JobReport.of(report, *self._outcomes.pop(report.job)).frame())
            else:
                frames.append(wire.released(report.job))
        return b"".join(frames)


class _JobServer:
    """Takes the caller's frames, and sends reports back."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._link = wire.Connection(end)
        self._wakeup = Wakeup()
        self._store: _Served | None = None
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)

    def serve(self) -> None:
        while not self._link.lost:
            self._sleep()
            for kind, body in self._link.receive():
                if kind == wire.OPEN:
                    self._open(wire.Opening.read(body))
                    continue
                assert self._store is not None
                if kind == wire.JOB:
                    self._store.take(wire.SentJob.read(body))
                elif kind == wire.REGISTER:
                    self._register(self._store, body)
                elif kind == wire.CLOSE:
                    self._close(self._store, wire.read_closing(body))
                    return
            self._link.flush()
            if self._store is not None and not self._link.unsent:  # else news wait, and are sent together
                self._wakeup.clear()
                if news := self._store.news():
                    self._link.send(news)

    def _sleep(self) -> None:
        """Until frames come, there are reports to send, or a deadline passes."""
        seconds = self._store.seconds() if self._store is not None and not self._link.unsent else math.inf
        self._poller.register(self._end, select.POLLIN | (select.POLLOUT if self._link.unsent else 0))
        self._poller.poll(None if seconds == math.inf else math.ceil(seconds * 1e3))

    def _open(self, opening: wire.Opening) -> None:
        try:
            backend, shown = open_backend(opening.uri)
        except Exception as error:
            self._send_all(wire.refusal(error))
            self._link.lost = True
            return
        missing = Missing(opening.missing_seconds, opening.missing_capacity)
        self._store = _Served(backend, opening.fingerprint, shown, missing, self._wakeup)
        self._send_all(wire.frame(wire.OPENED))

    def _register(self, store: _Served, body: bytes) -> None:
        group, shape, offset = wire.read_register(body)
        try:
            store.register(store.names[group], attach(self._link.files.popleft(), offset, shape))
        except Exception as error:
            self._send_all(wire.refusal(error))
        else:
            if store.abreast == 1:
                _never_preempt()
            self._send_all(wire.registered(store.abreast))

    def _close(self, store: _Served, seconds: float) -> None:
        store.close(seconds)
        self._send_all(store.news() + wire.frame(wire.COUNTS, json.dumps(store.stats(), default=str).encode()))

    def _send_all(self, frames: bytes) -> None:
        """Send frames that the caller waits for, before anything else is done."""
        self._link.send(frames)
        while self._link.unsent and not self._link.lost:
            self._sleep()
            self._link.flush()


def _never_preempt() -> None:
    """A thread of this process that is woken takes no processor from a step: it waits until one is free. For several
    threads that work side by side and wake each other all the time, that would cost a third of their speed beside
    other processes; one thread alone is not slower."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))


def _end_with(end: socket.socket) -> None:
    """End this process when the other end is closed or its process dies, however busy the threads here are."""
    poller = select.poll()
    poller.register(end, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # they end the engine, and it closes its stores
        signal.signal(each, signal.SIG_IGN)
    os.closerange(ENDS_AT + 1, 1 << 20)  # files that other parts of the engine left open
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    end = socket.socket(fileno=ENDS_AT)
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    try:
        _JobServer(end).serve()
    except BaseException:
        log.exception("the process of a store ends")
        os._exit(1)
    os._exit(0)  # threads may still be in the backend


if __name__ == "__main__":
    main()
