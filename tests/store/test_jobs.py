"""Jobs: they return at once, end by their deadline, and never let go of memory that a backend may still write to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sapwood.store import Breaker, Faults, FaultyBackend, JobDone, Missing, Released, open_store
from sapwood.store.protocol import Backend, PutResult

from . import kit


class Bad:
    """A desk whose backend misbehaves as told, at any time."""

    def __init__(self, faults: Faults | None = None, seed: int = 1, **options: Any) -> None:
        self.made: list[FaultyBackend] = []

        def wrap(backend: Backend) -> Backend:
            self.made.append(FaultyBackend(backend, seed, faults))
            return self.made[0]

        self.desk = kit.Desk("memory://", wrap=wrap, **options)
        self.backend = self.made[0]

    def __enter__(self) -> Bad:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.faults = Faults()
        self.backend.release()
        self.desk.store.close(kit.PATIENCE)


def test_t19_memory_is_held_until_the_backend_returns() -> None:
    """A get hangs past its deadline: reported as failed at once, its pages still held. Much later the backend writes
    there after all, and only then the pages are released.

    Mutation: `_Job.done` says that nothing is held.
    """
    with Bad() as bad:
        desk = bad.desk
        desk.put(range(4), ["full"])
        desk.wipe()
        bad.backend.faults = Faults(hang=1)
        done = desk.held(lambda: desk.store.get(kit.hashes(*range(4)), {"full": [1, 2, 3, 4]}, timeout=0.2))
        assert done.run() == 0
        assert desk.store.stats()["held_pages"] == 4
        assert not desk.released(done.job, 0.3) and (desk.memory["full"] == 0xEE).all()
        bad.backend.faults = Faults()
        bad.backend.release()
        assert desk.released(done.job)
        assert (desk.memory["full"][1] != 0xEE).any(), "the backend wrote late, into memory nobody else had"
        assert desk.store.stats()["held_pages"] == 0
        assert sum(isinstance(report, JobDone) and report.job == done.job for report in desk.reports) == 1


def test_t19_a_put_reads_until_it_is_released() -> None:
    """The same for a backup: what is stored after its deadline is what the page held, because nobody else got it.

    Mutation: `_Job.done` says that nothing is held.
    """
    with Bad(Faults(hang=1)) as bad:
        desk = bad.desk
        sources = desk.write([7], ["full"])
        done = desk.held(lambda: desk.store.put(kit.hashes(7), sources, timeout=0.1))
        assert done.run() == 0
        bad.backend.faults = Faults()
        bad.backend.release()
        assert desk.released(done.job)
        assert desk.get([7], ["full"]).run() == 1


def test_what_was_in_time_counts() -> None:
    """The deadline passes in the middle of a job: pages that came before are a hit, and nothing after them is begun.

    Mutation: `_expire` forgets what is ok.
    """
    with Bad(Faults()) as bad:
        desk = bad.desk
        bad.backend.part_pages = 4
        desk.put(range(40), ["full"])
        real, go_on = bad.backend.get, threading.Event()

        def three_parts(items: Any) -> Iterator[Any]:
            if not parts.acquire(blocking=False):
                go_on.wait()
            yield from real(items)

        bad.backend.get = three_parts
        for seconds in (0.3, 1, 4, 15, 60, 240):  # until it is enough for the first part
            parts = threading.Semaphore(3)
            done = desk.wait(desk.store.get(kit.hashes(*range(40)), {"full": list(range(1, 41))}, timeout=seconds))
            desk.right(done, range(40))
            assert done.failed == "timeout" and done.run() < 40
            if done.run():
                break
            go_on.set()
            assert not done.held or desk.released(done.job)
            go_on.clear()
        assert done.run()
        go_on.set()
        assert not done.held or desk.released(done.job)


def test_a_job_that_never_began_holds_nothing() -> None:
    """All threads hang; a job still in the queue at its deadline has touched no memory.

    Mutation: a job that is given up stays in the queue.
    """
    with Bad() as bad:
        desk = bad.desk
        desk.put([1], ["full"])
        bad.backend.faults = Faults(hang=1)
        stuck = [desk.store.get(kit.hashes(1), {"full": [i]}, timeout=kit.PATIENCE) for i in range(1, 3)]
        desk.taken(0)
        late = desk.store.get(kit.hashes(1), {"full": [9]}, timeout=0.1)
        done = desk.wait(late)
        assert (done.failed, done.held) == ("timeout", False)
        bad.backend.faults = Faults()
        bad.backend.release()
        assert all(desk.wait(job).run() == 1 for job in stuck)
        assert (desk.memory["full"][9] != kit.content("full", 1, desk.memory["full"].shape[1])).any()
        assert Released(late) not in desk.reports


def test_a_full_queue_drops_and_counts() -> None:
    """More backups than the queue holds: the rest is refused at once and counted; nothing waits.

    Mutation: `_submit` does not look at the queue.
    """
    with Bad(Faults(hang=1), queue_pages=8) as bad:
        desk = bad.desk
        sources = desk.write(range(4), ["full"])
        jobs = [desk.store.put(kit.hashes(*range(4)), sources, timeout=kit.PATIENCE) for _ in range(10)]
        taken = sum(job is not None for job in jobs)
        assert 2 <= taken <= 4 and desk.store.stats()["dropped"] == 10 - taken


def test_reads_go_before_writes() -> None:
    """Behind a long backup, a get does not wait: one thread is always left for reads.

    Mutation: `_take` gives all threads to puts.
    """
    with Bad() as bad:
        desk = bad.desk
        desk.put([0], ["full"])
        bad.backend.faults = Faults(hang=1)
        sources = desk.write(range(1, 33), ["full"])
        bad.backend.part_pages = 4
        put = desk.store.put(kit.hashes(*range(1, 33)), sources, timeout=kit.PATIENCE)
        desk.taken(28)
        time.sleep(0.05)  # in which the other thread would take a part too
        bad.backend.faults = Faults()
        assert desk.wait(desk.store.get(kit.hashes(0), {"full": [40]}, timeout=kit.PATIENCE)).run() == 1
        bad.backend.release()
        assert desk.wait(put).run() == 32


def test_no_call_waits_for_a_lock_that_a_worker_has() -> None:
    """A worker loses its processor while it has the lock of the store: jobs are taken and polled all the same, and one
    whose deadline passes meanwhile is told of afterwards.

    Mutation: `_submit` or `poll` waits for the lock.
    """
    with Bad() as bad:
        desk, store = bad.desk, bad.desk.store
        desk.put(range(4), ["full"])
        desk.wipe()
        told: list[Any] = []

        def step() -> None:
            told.append(store.get(kit.hashes(*range(4)), {"full": [1, 2, 3, 4]}, timeout=0.01))
            told.append(store.get([], {"full": []}, timeout=60))
            time.sleep(0.02)
            told.append([report.job for report in store.poll()])

        with store._lock:
            caller = threading.Thread(target=step, daemon=True)
            caller.start()
            caller.join(kit.PATIENCE)
            assert not caller.is_alive()
        assert told[2] == [told[1]], "what needs no worker is told at once"
        assert desk.wait(told[0]).job == told[0] and store.stats()["submitted"] == 3
        assert desk.get(range(4), ["full"]).run() == 4


def test_a_breaker_that_is_being_told_something_lets_nobody_through() -> None:
    """Nobody waits to be the probe. Mutation: `Breaker.allow` waits for its lock."""
    breaker = Breaker(failures=1, seconds=1e-9)
    breaker.failure()
    with breaker._lock:
        assert not breaker.allow()
    assert breaker.allow() and breaker.stats()["refused"] == 1


def test_no_call_waits_for_a_hanging_store() -> None:
    """exists, get, put and poll return while every backend call hangs, and every job is told of.

    Mutation: a worker holds the lock while it calls the backend.
    """
    with Bad(Faults(hang=1)) as bad:
        desk, store = bad.desk, bad.desk.store
        sources = desk.write(range(4), ["full"])
        jobs: list[int | None] = []
        told: list[int] = []

        def calls() -> None:
            for _ in range(20):
                jobs.append(store.exists(kit.hashes(*range(4)), {"full": [1] * 4}, timeout=0.05))
                jobs.append(store.get(kit.hashes(*range(4)), sources, timeout=0.05))
                jobs.append(store.put(kit.hashes(*range(4)), sources, timeout=0.05))
                desk.reports.extend(store.poll())
            told.extend(desk.wait(job).job for job in jobs)

        caller = threading.Thread(target=calls, daemon=True)
        caller.start()
        caller.join(kit.PATIENCE)
        assert not caller.is_alive() and told == jobs


@pytest.mark.parametrize(
    "faults",
    [
        Faults(partial=0.3),
        Faults(lie=1),
        Faults(corrupt=0.3),
        Faults(torn=0.3),
        Faults(full=0.5),
        Faults(fail=0.3),
        Faults(partial=0.1, lie=0.3, corrupt=0.1, torn=0.1, full=0.1, fail=0.1, slow=0.002),
    ],
    ids=lambda faults: "+".join(name for name, value in vars(faults).items() if value and name != "hang_seconds"),
)
def test_t08_a_store_that_misbehaves_costs_time_only(faults: Faults) -> None:
    """Partial, lying, corrupting, tearing, full, failing, and all at once: no wrong byte is ever reported as right, and
    when it stops, everything can be stored and found again.

    Mutation: `Item.check` does not compare checksums, or `_get` takes what is short.
    """
    with Bad(faults, seed=3) as bad:
        desk = bad.desk
        for round_ in range(4):
            names = [f"{round_} {i}" for i in range(20)]
            desk.put(names)
            seen = desk.exists([*names, "never put"])
            got = desk.get([*names, "never put"])
            assert got.run() <= 20
            if faults.lie == 1:
                assert seen.run() == 21 and got.run() == 20, "what exists says counts for nothing"
        assert sum(bad.backend.done.values()) > 0, "the faults were really made"
        if faults.corrupt:
            assert desk.store.stats()["bad"]["checksum"] > 0
        if faults.torn:
            assert desk.store.stats()["bad"]["short"] > 0
        bad.backend.faults = Faults()
        assert desk.put(names).run() == 20
        assert desk.get(names).run() == 20


def test_faults_repeat_by_their_seed() -> None:
    """The same seed makes the same faults, however threads run; another seed makes others.

    Mutation: `_hit` draws from a shared random generator.
    """

    def outcome(seed: int) -> list[bool]:
        with Bad(Faults(partial=0.5), seed=seed) as bad:
            bad.backend.part_pages = 3
            return bad.desk.put(range(30), ["full"]).ok["full"].tolist()

    assert outcome(5) == outcome(5) != outcome(6)


def test_t08_breaker_opens_and_recovers() -> None:
    """After three failures the store is not asked; after a while one probe is let through, and when that succeeds all
    is as before. All of it is counted.

    Mutation: `Breaker.allow` lets everybody through, or `success` does not close it.
    """
    now = [0.0]
    with Bad(breaker=Breaker(failures=3, seconds=10, clock=lambda: now[0])) as bad:
        desk = bad.desk
        desk.put([1], ["full"])
        bad.backend.faults = Faults(fail=1)
        for _ in range(3):
            assert desk.get([1], ["full"]).failed == "error"
        assert desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1) is None
        assert desk.store.put(kit.hashes(2), {"full": [1]}, timeout=1) is None
        now[0] += 11
        assert desk.get([1], ["full"]).failed == "error", "the probe fails: open again"
        assert desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1) is None
        bad.backend.faults = Faults()
        now[0] += 11
        probe = desk.store.get(kit.hashes(1), {"full": [1]}, timeout=kit.PATIENCE)
        assert (
            desk.store.get(kit.hashes(1), {"full": [1]}, timeout=kit.PATIENCE) is None
            or desk.store.breaker.state == "closed"
        )
        assert desk.wait(probe).run() == 1
        assert desk.get([1], ["full"]).run() == 1
        told = desk.store.stats()
        assert told["breaker"]["opened"] == 1 and told["breaker"]["recovered"] == 1 and told["refused"] >= 3


def fails_until_it_is_open(bad: Bad, breaker: Breaker, ask: Any) -> None:
    """On a busy machine that takes more jobs: one that nobody has begun in time says nothing if threads are free."""
    for _ in range(1000):
        assert bad.desk.wait(ask(kit.hashes(1), {"full": [1]}, timeout=0.05)).failed == "timeout"
        if breaker.state == "open":
            return
    raise AssertionError(f"it never opens: {bad.desk.store.stats()}")


def test_t08_timeouts_open_the_breaker() -> None:
    """A store that only hangs is given up too; misses alone are no failure.

    Mutation: `_report` counts errors only.
    """
    with Bad(breaker=Breaker(failures=2, seconds=60)) as bad:
        desk = bad.desk
        for i in range(5):
            assert desk.get([f"nothing {i}"], ["full"]).failed == ""
        bad.backend.faults = Faults(hang=1)
        fails_until_it_is_open(bad, desk.store.breaker, desk.store.get)
        assert desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1) is None
        assert desk.store.breaker.state == "open"


@pytest.mark.parametrize("verb", ["exists", "get", "put"])
def test_t08_a_store_whose_every_thread_hangs_is_given_up(verb: str) -> None:
    """Three failures open the breaker, and two threads hang: jobs that no thread could begin count too, for those who
    should have are beyond their time.

    Mutation: `_neglected` is `job.begun`: every request would wait for its deadline for ever.
    """
    with Bad(Faults(hang=1), breaker=Breaker(failures=3, seconds=60)) as bad:
        store = bad.desk.store
        ask = getattr(store, verb)
        fails_until_it_is_open(bad, store.write_breaker if verb == "put" else store.breaker, ask)
        assert ask(kit.hashes(9), {"full": [9]}, timeout=1) is None
        assert (store.write_breaker if verb == "put" else store.breaker).state == "open"


def test_t08_a_job_that_had_to_wait_for_others_says_nothing_about_the_store() -> None:
    """Both threads are busy with long jobs, which come along page by page: what does not get its turn in time has
    failed, and the breaker stays closed.

    Mutation: `_neglected` is always true.
    """
    with Bad(breaker=Breaker(failures=1, seconds=60)) as bad:
        store, real = bad.desk.store, bad.backend.put

        go_on = threading.Event()

        def slowly(items: Any) -> Iterator[PutResult]:
            for kept in real(items):
                yield kept
                go_on.wait()

        bad.backend.put = slowly
        bad.backend.part_pages = 100
        long = [store.put(kit.hashes(*range(low, low + 30)), {"full": range(1, 31)}, timeout=600) for low in (0, 100)]
        bad.desk.taken(30)
        late = store.put(kit.hashes(500), {"full": [1]}, timeout=0.1)
        assert bad.desk.wait(late).failed == "timeout"
        assert store.write_breaker.state == "closed"
        go_on.set()
        assert [bad.desk.wait(job).failed for job in long] == ["", ""]


def test_t08_answers_of_one_kind_do_not_hide_failures_of_another() -> None:
    """`exists` answers while every get fails, as when a provider of pages is dead and its index is not: the breaker
    opens all the same; let through again by an answer, it opens with the next failure. And a store that takes nothing
    is still read.

    Mutation: `Breaker.success` forgets the failures of all kinds; or puts and gets share one breaker.
    """
    now = [0.0]
    with Bad(breaker=Breaker(failures=2, seconds=10, clock=lambda: now[0])) as bad:
        desk = bad.desk
        desk.put([1], ["full"])
        real = bad.backend.get
        bad.backend.get = lambda items: (_ for _ in ()).throw(OSError("no provider"))
        for _ in range(2):
            assert desk.exists([1], ["full"]).run() == 1 and desk.get([1], ["full"]).failed == "error"
        assert desk.store.breaker.state == "open"
        now[0] += 11
        assert desk.exists([1], ["full"]).run() == 1 and desk.store.breaker.state == "closed"
        assert desk.get([1], ["full"]).failed == "error" and desk.store.breaker.state == "open"
        bad.backend.get = real
        now[0] += 11
        assert desk.get([1], ["full"]).run() == 1 and desk.store.breaker.state == "closed"
        bad.backend.put = lambda items: (_ for _ in ()).throw(OSError("read-only"))
        for i in range(2):
            assert desk.put([10 + i], ["full"]).failed == "error"
        assert desk.store.put(kit.hashes(1), {"full": [1]}, timeout=1) is None
        assert desk.get([1], ["full"]).run() == 1 and desk.store.stats()["write_breaker"]["state"] == "open"


@pytest.mark.attack
def test_t08_a_busy_store_is_not_a_dead_one() -> None:
    """While a backend works on something long, questions overtake reads, short reads take turns with long ones, and
    what does not get its turn in time says nothing against the store.

    Mutation: `_report` counts jobs that no worker has begun as failures; `_take` finishes one job before the next; or
    questions wait behind reads.
    """
    with Bad(breaker=Breaker(failures=1, seconds=60)) as bad:
        desk, backend = bad.desk, bad.backend
        backend.part_pages = 1
        desk.put(range(1, 31), ["full"])
        begun: list[int] = []  # the page that each part of a get goes to; 0: a question
        may = threading.Semaphore(0)  # get one page
        get, exists = backend.get, backend.exists

        def gets(items: Any) -> Iterator[Any]:
            begun.append(items[0].number)
            may.acquire()
            yield from get(items)

        def asks(names: Any) -> Any:
            begun.append(0)
            return exists(names)

        backend.get, backend.exists = gets, asks  # type: ignore[method-assign]
        many = kit.hashes(*range(1, 31))
        long = desk.store.get(many, {"full": list(range(1, 31))}, timeout=600)
        kit.until(lambda: len(begun) == 2, "both threads to be at it")
        late = [desk.store.get(kit.hashes(1), {"full": [40]}, timeout=0.01) for _ in range(3)]
        assert [desk.wait(job).failed for job in late] == ["timeout"] * 3
        assert desk.store.breaker.state == "closed"
        asked = desk.store.exists(kit.hashes(1), {"full": [1]}, timeout=600)
        short = desk.store.get(kit.hashes(2), {"full": [41]}, timeout=600)
        for n in (4, 5):  # one thread goes on: it takes the question, and a page; and then another page
            may.release()
            kit.until(lambda n=n: len(begun) == n, "the next part to begin")
        assert begun[2] == 0 and sorted(begun[3:]) == [3, 41]
        may.release(100)
        assert [desk.wait(job).run() for job in (asked, short, long)] == [1, 1, 30]


def test_t08_only_backups_are_dropped_for_want_of_room() -> None:
    """A queue full of backups has room for questions and reads.

    Mutation: `_submit` counts all kinds together.
    """
    with Bad(Faults(hang=1), queue_pages=4) as bad:
        store = bad.desk.store
        jobs = [store.put(kit.hashes(i), {"full": [i]}, timeout=20) for i in range(1, 12)]
        assert None in jobs and store.stats()["dropped"] > 0
        dropped = store.stats()["dropped"]
        wanted = kit.hashes(*range(1, 31))
        assert store.exists(wanted, {"full": [1] * 30}, timeout=20) is not None
        assert store.get(wanted, {"full": list(range(1, 31))}, timeout=20) is not None
        assert store.stats()["dropped"] == dropped
        bad.backend.release()


def test_missing_keys_are_remembered_for_a_short_time() -> None:
    """A key that a get did not find is not asked for again for a while, not even by exists of a store that lies; a put
    or the passing of time makes it worth asking again.

    Mutation: `_put` does not discard, or `Missing` never forgets.
    """
    now = [0.0]
    with Bad(Faults(lie=1), missing=Missing(seconds=10, clock=lambda: now[0])) as bad:
        desk = bad.desk
        assert desk.exists([1], ["full"]).run() == 1
        assert desk.get([1], ["full"]).run() == 0
        assert desk.exists([1], ["full"]).run() == 0
        assert desk.get([1], ["full"]).run() == 0
        assert desk.store.stats()["missing"]["spared"] == 2
        desk.put([1], ["full"])
        assert desk.get([1], ["full"]).run() == 1
        assert desk.get([2], ["full"]).run() == 0
        now[0] += 11
        assert desk.exists([2], ["full"]).run() == 1


def test_breaker_and_missing_on_a_clock() -> None:
    """Both on a clock of the test's own: half-open lets one through, and memory is bounded and forgets in time.

    Mutation: `Missing.add` never deletes; `allow` lets a second probe through.
    """
    now = [0.0]
    breaker = Breaker(failures=2, seconds=10, clock=lambda: now[0])
    assert breaker.allow() and not breaker.failure() and breaker.failure() and breaker.state == "open"
    assert not breaker.allow()
    now[0] = 10
    assert breaker.allow() and not breaker.allow() and breaker.state == "half-open"
    breaker.unknown()
    assert breaker.allow() and not breaker.failure() and not breaker.allow(), "failed: open for another ten seconds"
    now[0] = 20
    assert breaker.allow() and breaker.success() and breaker.allow() and breaker.state == "closed"
    assert not breaker.failure(), "the count began again"

    missing = Missing(seconds=5, capacity=3, clock=lambda: now[0])
    for name in "abcd":
        missing.add(name)
    assert [name in missing for name in "abcd"] == [False, True, True, True] and len(missing) == 3
    now[0] += 5
    assert "d" not in missing
    missing.add("e")
    assert len(missing) == 1
    for wrong in ({"failures": 0}, {"seconds": 0}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Breaker(**wrong)
    for wrong in ({"capacity": 0}, {"seconds": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Missing(**wrong)


def test_close_while_a_call_hangs() -> None:
    """`close` ends in time, every job is reported, and the memory stays alive for the backend that still has it.

    Mutation: `close` waits without a limit, or reports nothing.
    """
    bad = Bad(Faults(hang=1))
    desk = bad.desk
    jobs = [desk.store.get(kit.hashes(1), {"full": [i]}, timeout=600) for i in range(1, 6)]
    desk.taken(3)
    begin = time.monotonic()
    assert not desk.store.close(0.2)
    assert time.monotonic() - begin < kit.PATIENCE
    reports = desk.store.poll()
    assert sorted(r.job for r in reports if isinstance(r, JobDone)) == jobs
    assert all(r.failed == "closed" for r in reports if isinstance(r, JobDone))
    held = [r.job for r in reports if isinstance(r, JobDone) and r.held]
    assert len(held) == 2
    bad.backend.release()
    assert all(desk.released(job) for job in held)
    assert desk.store.close(kit.PATIENCE)


def test_wait_wakes_for_deadlines_and_reports() -> None:
    """`wait` returns when something can be polled, also when that is only a deadline; `on_report` is called.

    Mutation: `wait` sleeps for its whole timeout.
    """
    woken: list[float] = []
    with Bad(on_report=lambda: woken.append(time.monotonic())) as bad:
        desk = bad.desk
        desk.put([1], ["full"])
        assert woken
        bad.backend.faults = Faults(hang=1)
        desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.1)
        begin = time.monotonic()
        assert desk.store.wait(600) and time.monotonic() - begin < kit.PATIENCE
        assert not desk.store.wait(0) or desk.store.poll()


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"hashes": [b"short"]}, "hashes must be 32 bytes"),
    ({"hashes": b"short"}, "hashes must be 32 bytes"),
    ({"targets": {"none": [1]}}, "must be registered"),
    ({"targets": {"full": [1, 2]}}, "must be 1 integers"),
    ({"targets": {"full": [1.0]}}, "must be 1 integers"),
    ({"targets": {"full": [-1]}}, "must be from 0"),
    ({"targets": {"full": [64]}}, "must be from 0 to 63"),
    ({"timeout": 0}, "timeout must"),
    ({"timeout": float("nan")}, "timeout must"),
    ({"timeout": "1"}, "timeout must"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CALLS)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    """A page that is not there, hashes that are none, a group nobody registered: refused, and nothing is begun.

    Mutation: `_submit` leaves out that look.
    """
    with kit.Desk("memory://") as desk:
        call = {"hashes": kit.hashes(1), "targets": {"full": [1]}, "timeout": 1.0, **change}
        with pytest.raises(ValueError, match=message):
            desk.store.get(call["hashes"], call["targets"], timeout=call["timeout"])
        assert desk.store.stats()["submitted"] == 0


def test_wrong_memory_is_refused() -> None:
    """Memory of another shape, type or order is refused by name when it is registered, and so is a second time.

    Mutation: `Arena` takes what it is given.
    """
    store = open_store("memory://", kit.fingerprint(4096))
    right = kit.arena(4, 4096)
    for wrong in (right[:, ::2], right.view(np.int8), right[0], right.tolist(), kit.arena(4, 512), right[::-1]):
        with pytest.raises(ValueError, match="memory of group 'full' must"):
            store.register("full", wrong)
    still = right.copy()
    still.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        store.register("full", still)
    with pytest.raises(ValueError, match="group must be one of"):
        store.register("other", right)
    store.register("full", right)
    with pytest.raises(ValueError, match="once"):
        store.register("full", right)
    store.close()


def test_close_returns_when_the_backend_is_closed() -> None:
    """Who closes a store may take its memory away and ask for its statistics: the backend has let go of all by then.

    Mutation: `ThreadStore._loop` counts the last thread as gone before it has closed the backend.
    """
    bad = Bad()
    closed: list[bool] = []
    may = threading.Event()

    def slowly() -> None:
        may.wait()
        closed.append(True)

    bad.backend.close = slowly  # type: ignore[method-assign]
    assert not bad.desk.store.close(0.05) and not closed
    may.set()
    assert bad.desk.store.close(kit.PATIENCE) and closed


def test_an_open_breaker_costs_next_to_nothing() -> None:
    """While the breaker is open nothing is even built, and what is refused is counted by both; a closed store says so.

    Mutation: `Store._submit` looks at the breaker before it looks whether it is closed.
    """
    with Bad(Faults(fail=1.0), breaker=Breaker(failures=1, seconds=1000)) as bad:
        bad.desk.put([1])
        for _ in range(3):
            assert bad.desk.store.put(kit.hashes(1), {"full": [1]}, timeout=1) is None
        stats = bad.desk.store.stats()
        assert stats["refused"] == stats["write_breaker"]["refused"] == 3
        bad.desk.store.close(5)
        with pytest.raises(kit.StoreError, match="closed"):
            bad.desk.store.put(kit.hashes(1), {"full": [1]}, timeout=1)


def test_small_pages_are_handled_one_part_at_a_time_and_reads_come_before_writes() -> None:
    """A backend says that its pages are small: no two of its threads are at work at once, and a read that comes while
    many pages are written waits for a few of them only.

    Mutation: `_take` does not look at `_alone`; or `_returned` calls nobody for what had to wait.
    """
    with Bad() as bad:
        desk, backend = bad.desk, bad.backend
        backend.small_bytes = 1 << 30
        desk.put([100], ["full"])
        inside, most = 0, 0
        order: list[str] = []
        go_on = threading.Event()
        put, get = backend.put, backend.get

        def watched(call: Any, name: str) -> Any:
            def run(items: Any) -> Any:
                nonlocal inside, most
                inside += 1
                most = max(most, inside)
                order.append(name)
                go_on.wait()
                yield from call(items)
                inside -= 1

            return run

        backend.put, backend.get = watched(put, "put"), watched(get, "get")  # type: ignore[method-assign]
        sources = desk.write(range(48), ["full"])
        job = desk.store.put(kit.hashes(*range(48)), sources, timeout=600)
        kit.until(lambda: order, "the first part")
        read = desk.store.get(kit.hashes(100), {"full": [60]}, timeout=600)
        go_on.set()
        assert desk.wait(read).run() == 1 and desk.wait(job).run() == 48
        assert most == 1 and order == ["put", "get", "put", "put"], "sixteen pages a part"
