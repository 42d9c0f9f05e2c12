"""A store on threads of this process: jobs that return at once, are polled, and end by their deadline.

exists / get / put --> queue --parts--> workers --> backend (blocks)
     |                   |                 |
  job id or None         '--- deadline ----+--> reports --> poll: JobDone, later Released if it was held

The caller, which submits and polls, never waits for a worker, not even for a lock: jobs and reports pass through queues
that need none, caller and workers have counts of their own, and where only a lock will do the caller tries again later
if it is taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .breaker import Breaker, Missing
from .keys import HASH_BYTES, Fingerprint
from .protocol import FAILED, MISSING, Backend, JobDone, Kind, Released
from .store import Store, log
from .threads import InterpreterYield
from .values import REASONS, Arena, Item

_SMALL_WRITES = 16  # keys in a part, where a read may have to wait for it


class _Job:
    """A job under way. Its keys stand in order of pages, all groups of a page together, and are handed out in parts."""

    __slots__ = (
        "alone", "answered", "arenas", "asked", "begun", "broken", "columns", "deadline", "hashes", "id", "kind",
        "next", "numbers", "ok", "over", "part", "rows", "running", "why",
    )  # fmt: skip

    def __init__(
        self, id: int, kind: Kind, hashes: bytes, arenas: list[Arena], pages: NDArray[np.int64], deadline: float
    ) -> None:
        self.id = id
        self.kind = kind
        self.hashes = hashes
        self.arenas = arenas
        rows, columns = np.nonzero(pages)
        self.numbers = pages[rows, columns].tolist()
        self.rows = rows.tolist()
        self.columns = columns.tolist()
        self.asked = {arena.group: pages[:, i] != 0 for i, arena in enumerate(arenas)}
        self.ok = [np.zeros(len(pages), np.bool_) for _ in arenas]
        self.deadline = deadline
        self.part = 1  # keys in a part
        self.alone = False  # one part of all such jobs at a time
        self.next = 0  # the first key that no worker has taken
        self.running = 0  # parts that workers have
        self.begun = False  # a worker has had a part of it
        self.over = False  # reported, or about to be: no further part is begun
        self.answered = 0  # keys that the backend answered
        self.broken = 0  # keys on which it failed
        self.why = ""

    def items(self, low: int, high: int) -> list[Item]:
        hashes, arenas = self.hashes, self.arenas
        begins = [HASH_BYTES * row for row in self.rows[low:high]]
        return [
            Item(arenas[self.columns[k]], self.numbers[k], hashes[at : at + HASH_BYTES])
            for k, at in zip(range(low, high), begins, strict=True)
        ]

    def mark(self, k: int) -> None:
        self.ok[self.columns[k]][self.rows[k]] = True

    def done(self, failed: str) -> JobDone:
        ok = {arena.group: mine.copy() for arena, mine in zip(self.arenas, self.ok, strict=True)}
        return JobDone(self.id, self.kind, ok, self.asked, failed, self.running > 0)


class ThreadStore(Store):
    """A store whose backend is called by threads of this process, on memory of any kind."""

    gate: InterpreterYield

    def __init__(
        self,
        backend: Backend,
        fingerprint: Fingerprint,
        *,
        shown: str = "",
        queue_pages: int = 8192,
        breaker: Breaker | None = None,
        missing: Missing | None = None,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(fingerprint, shown or type(backend).__name__, queue_pages, breaker, on_report)
        self._backend = backend
        self.missing = Missing() if missing is None else missing
        self.gate = backend.gate
        self._lock = threading.Lock()  # guards all that is not the caller's alone, but for queues, which need none
        self._reported = threading.Condition(self._lock)
        self._work: SimpleQueue[None] = SimpleQueue()  # an entry for each worker that should look for work
        # By kind, jobs with keys that no worker has taken yet.
        self._queues: dict[Kind, deque[_Job]] = {"exists": deque(), "get": deque(), "put": deque()}
        self._live: dict[int, _Job] = {}  # not reported
        self._late: dict[int, _Job] = {}  # reported, but the backend has not returned
        self._first_deadline = math.inf  # of live jobs, or earlier
        self._writing = 0  # workers with a put
        self._writers = max(1, backend.workers - 1)  # at most so many workers write: one is always left for reads
        self._alone = False  # a worker has a part of a job that runs alone
        self._counts: dict[str, int] = dict.fromkeys(
            ("done", "timeout", "error", "closed", "late", "found", "absent", "hit", "miss", "failed",
             "stored", "full", "lost", "bytes_read", "bytes_written"), 0
        )  # fmt: skip
        self._bad = dict.fromkeys(REASONS, 0)
        self._threads = [
            threading.Thread(target=self._loop, name=f"sapwood-store-{i}", daemon=True) for i in range(backend.workers)
        ]
        self._alive = len(self._threads)
        self._leaving = 0  # threads that take no more work
        for thread in self._threads:
            thread.start()

    # ---- what the caller does

    def poll(self) -> list[JobDone | Released]:
        if time.monotonic() >= self._first_deadline and self._lock.acquire(blocking=False):  # else the next time
            try:
                self._expire()
            finally:
                self._lock.release()
        reports = []
        while self._reports:  # no other thread takes any
            reports.append(self._reports.popleft())
        return reports

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        with self._lock:
            while True:
                self._expire()
                now = time.monotonic()
                if self._reports or now >= until:
                    return bool(self._reports)
                self._reported.wait(min(until, self._first_deadline) - now)

    def drain(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        with self._lock:
            while self._live or self._late:
                self._expire()
                now = time.monotonic()
                if (self._live or self._late) and now >= until:
                    return False
                if self._live or self._late:
                    self._reported.wait(min(until, self._first_deadline) - now)
        return True

    def close(self, timeout: float = 5.0) -> bool:
        """False if a backend call has not returned: the memory it may touch stays alive, and the backend is closed when
        it returns."""
        until = time.monotonic() + timeout
        with self._lock:
            if not self._closed:
                self._closed = True
                for job in [job for queue in self._queues.values() for job in queue]:
                    self._give_up(job)
                    if not job.running:
                        self._report(job, "closed")
                for _ in self._threads:
                    self._work.put(None)
            while self._alive and time.monotonic() < until:
                self._reported.wait(until - time.monotonic())
            self._expire()
            for job in list(self._live.values()):
                self._report(job, "closed")
            return not self._alive

    def stats(self) -> dict[str, Any]:
        with self._lock:
            counts = {**self._asked, **self._counts}
            counts["done"] += counts.pop("empty")
            now = {
                "waiting": sum(self._given.values()) - sum(self._taken.values()),
                "jobs": len(self._live),
                "held_jobs": len(self._late),
                "held_pages": sum(len(job.numbers) for job in self._late.values() if job.kind != "exists"),
                "bad": dict(self._bad),
            }
        return {
            "uri": self._shown,
            **counts,
            **now,
            "breaker": self.breaker.stats(),
            "write_breaker": self.write_breaker.stats(),
            "missing": self.missing.stats(),
            "backend": self._backend.stats(),
        }

    # ---- on the caller's thread

    def _register(self, arena: Arena) -> None:
        self._backend.register(arena.group, arena.array)

    def _begin(
        self, id: int, kind: Kind, hashes: bytes, arenas: list[Arena], pages: NDArray[np.int64], deadline: float
    ) -> None:
        job = _Job(id, kind, hashes, arenas, pages, deadline)
        page = max(arena.page_bytes for arena in arenas)
        fit = self._backend.part_bytes // page if kind != "exists" else self._backend.part_pages
        job.part = max(1, min(self._backend.part_pages, fit))
        job.alone = page < self._backend.small_bytes
        if job.alone and kind == "put":
            job.part = min(job.part, _SMALL_WRITES)
        self._live[id] = job
        self._first_deadline = min(self._first_deadline, deadline)
        self._queues[kind].append(job)  # from here on workers take parts of it
        self._call(-(-len(job.numbers) // job.part))

    def _call(self, workers: int) -> None:
        """Let so many workers look for work. As many calls as there are workers suffice: each looks after its call."""
        for _ in range(min(workers, len(self._threads) - self._work.qsize())):
            self._work.put(None)

    # ---- under the lock

    def _expire(self) -> None:
        """Report jobs whose deadline has passed. They are held while a worker has their memory."""
        now = time.monotonic()
        if now < self._first_deadline:
            return
        for job in [job for job in self._live.values() if job.deadline <= now]:
            self._give_up(job)
            self._report(job, "timeout")
        self._first_deadline = min((job.deadline for job in self._live.values()), default=math.inf)

    def _give_up(self, job: _Job) -> None:
        """No worker begins another part of it."""
        job.over = True
        left = len(job.numbers) - job.next
        if left:
            self._taken[job.kind] += left
            job.next = len(job.numbers)
            self._queues[job.kind].remove(job)

    def _report(self, job: _Job, failed: str) -> None:
        job.over = True
        del self._live[job.id]
        done = job.done(failed)
        if done.held:
            self._late[job.id] = job
            self._counts["late"] += 1
        self._counts[failed or "done"] += 1
        self._judge_job(job, failed)
        self._add_report(done)

    def _judge_job(self, job: _Job, failed: str) -> None:
        self._judge(job.kind, failed, self._neglected(job), job.answered > 0, job.why)

    def _neglected(self, job: _Job) -> bool:
        """Whether a job that failed counts against the backend: it had a part of the job, or it keeps all threads that
        could have begun it beyond their deadlines. A job that only waited for others does not count."""
        hung = [other for other in self._late.values() if other.running]
        if job.begun or not hung:
            return job.begun
        if job.alone and any(other.alone for other in hung):
            return True
        threads = sum(other.running for other in hung)
        writing = sum(other.running for other in hung if other.kind == "put")
        return threads >= len(self._threads) or (job.kind == "put" and writing >= self._writers)

    def _add_report(self, report: JobDone | Released) -> None:
        self._reports.append(report)
        self._reported.notify_all()

    # ---- on the workers' threads

    def _loop(self) -> None:
        while True:
            self.gate.give_way()
            with self._lock:
                taken = self._take()
                if taken is None and self._closed:
                    self._leaving += 1
                    last = self._leaving == len(self._threads)
                    break
            if taken is None:
                self._work.get()
                continue
            job, low, high = taken
            why = ""
            try:
                self._run(job, low, high)
            except Exception as error:  # any error of a backend is a failure of this part alone
                why = f"{type(error).__name__}: {error}"
            with self._lock:
                self._returned(job, why)
            if self.on_report is not None:
                self.on_report()
        if last:
            try:
                self._backend.close()
            except Exception as error:
                log.warning("closing store %s: %s", self._shown, error)
        with self._lock:  # only now: the caller of `close` may free the memory
            self._alive -= 1
            self._reported.notify_all()

    def _take(self) -> tuple[_Job, int, int] | None:
        """The next part: questions before reads before writes, and one worker is always left for reads. Jobs of a kind
        take turns, so that a long job does not keep short ones waiting."""
        queues = self._queues
        queue = queues["exists"] or queues["get"]
        if not queue:
            if not queues["put"] or self._writing >= self._writers:
                return None
            queue = queues["put"]
        if queue[0].alone and self._alone:
            return None
        job = queue.popleft()
        self._writing += job.kind == "put"
        self._alone |= job.alone
        low = job.next
        job.next = high = min(low + job.part, len(job.numbers))
        job.running += 1
        job.begun = True
        self._taken[job.kind] += high - low
        if high < len(job.numbers):
            queue.append(job)
        return job, low, high

    def _returned(self, job: _Job, why: str) -> None:
        """A worker has finished a part of the job, or failed."""
        job.running -= 1
        self._writing -= job.kind == "put"
        if job.alone:
            self._alone = False
        if (job.alone or job.kind == "put") and any(self._queues.values()):
            self._call(1)  # there may be work that had to wait for this part
        if why:
            job.why = why
            job.broken += 1
            log.debug("store %s: %s: %s", self._shown, job.kind, why)
        if job.running or job.next < len(job.numbers):
            return
        if job.id in self._late:
            del self._late[job.id]
            self._add_report(Released(job.id))
        elif job.id in self._live:
            failed = "closed" if job.over else "error" if job.broken and not job.answered else ""
            self._report(job, failed)

    def _run(self, job: _Job, low: int, high: int) -> None:
        """One part, on the backend. Pages are marked ok at once: they stay so if the deadline comes in between."""
        items = job.items(low, high)
        known = Counter[str]()
        bad: list[tuple[Item, str]] = []
        try:
            if job.kind == "put":
                self._put(job, low, items, known)
                return
            places: Sequence[int] = range(low, high)
            asked = items
            if self.missing:
                places = [k for k, item in enumerate(items, low) if item.name not in self.missing]
                asked = [items[k - low] for k in places]
            known["miss" if job.kind == "get" else "absent"] += len(items) - len(places)
            if not asked:
                return
            if job.kind == "get":
                self._get(job, places, asked, known, bad)
            else:
                self._exists(job, places, asked, known)
        finally:
            with self._lock:
                for name, n in known.items():
                    self._counts[name] += n
                for _, reason in bad:
                    self._bad[reason] += 1
        if bad:  # a key names all that a value must fit: a value that does not is damaged, whatever its header is
            self._backend.delete([item.name for item, _ in bad])

    def _exists(self, job: _Job, places: Sequence[int], items: list[Item], known: Counter[str]) -> None:
        there = self._backend.exists([item.name for item in items])
        job.answered += len(items)
        for k, yes in zip(places, there, strict=True):
            if yes:
                job.mark(k)
            known["found" if yes else "absent"] += 1

    def _get(
        self, job: _Job, places: Sequence[int], items: list[Item], known: Counter[str], bad: list[tuple[Item, str]]
    ) -> None:
        hits = nbytes = 0
        try:
            for at, head, size in self._backend.get(items):
                item = items[at]
                if size == FAILED:
                    job.broken += 1
                    known["failed"] += 1
                else:
                    job.answered += 1
                    reason = "" if size == MISSING else item.check(head, size)
                    if size == MISSING or reason:
                        known["miss"] += 1
                        self.missing.add(item.name)
                        if reason:
                            bad.append((item, reason))
                    else:
                        job.mark(places[at])
                        hits += 1
                        nbytes += size
                if job.over or time.monotonic() >= job.deadline:
                    break
                self.gate.give_way()
        finally:
            known["hit"] += hits
            known["bytes_read"] += nbytes

    def _put(self, job: _Job, low: int, items: list[Item], known: Counter[str]) -> None:
        for at, lost in self._backend.put(items):
            if lost == "error":
                job.broken += 1
                known["lost"] += 1
            else:
                job.answered += 1
                if lost:
                    known["full"] += 1
                else:
                    job.mark(low + at)
                    self.missing.discard(items[at].name)
                    known["stored"] += 1
                    known["bytes_written"] += len(items[at].page)
            if job.over or time.monotonic() >= job.deadline:
                break
            self.gate.give_way()
