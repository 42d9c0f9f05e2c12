"""Tiers and the step loop themselves: what is answered when, waiting that neither spins nor oversleeps, mistakes in
words (cases T08, T19, S08, S11)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, EngineLoop, HostArena, NumpyMover, Tiers
from sapwood.engine.transfer import tiers
from sapwood.scheduler import (
    Abort,
    BackupDone,
    FetchDone,
    LookupDone,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    StepDone,
    StepFailed,
    StoreUp,
    Tick,
)
from sapwood.store import Breaker, Faults, Fingerprint, GroupLayout, open_store
from sapwood.store.protocol import PutResult

from .machine import BASE, HYBRID, PAGE, PATIENCE, PROMPT, Machine, toks


def fetching(tmp_path, **more) -> Machine:
    """A machine whose first request has six pages in the store."""
    uri = f"memory://{tmp_path}"
    maker = Machine("full", uri)
    maker.serve("ann", PROMPT)
    maker.close()
    return Machine("full", uri, **more)


# ---- answers


def test_the_import_needs_no_torch():
    """The loop and the tiers are there without torch.

    Mutation: tiers.py imports transfer_torch.
    """
    code = "import sys; sys.modules['torch'] = None; from sapwood.engine import EngineLoop, Tiers; print(EngineLoop)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 and "EngineLoop" in ran.stdout, ran.stderr


def test_t08_what_the_store_refuses_is_answered_at_the_next_poll(tmp_path):
    """With an open breaker lookups, fetches and backups are answered at once, as nothing found or kept, and counted.

    Mutation: `Tiers._ask` forgets an operation that was refused.
    """
    machine = fetching(tmp_path, breaker=Breaker(failures=1, seconds=1000))
    machine.submit("ann", PROMPT)
    plan = machine.scheduler.next_plan()
    (lookup,) = plan.lookups
    machine.store.breaker.failure()  # it opens before the plan is carried out
    assert machine.store.breaker.state == "open"
    machine.tiers.begin(plan)
    assert not machine.loop.executor.execute(plan)
    events = machine.tiers.poll()
    assert LookupDone(lookup.op, 0) in events
    machine.scheduler.advance(events)
    machine.see_to("ann")
    machine.settle()
    stats = machine.tiers.stats()
    assert stats["refused"] == 1 and stats["under_way"] == 0
    machine.close()


def test_t10_time_that_passed_before_a_request_came_is_not_its_own(tmp_path):
    """An engine that has rested for much longer than anybody waits for the store: the next request is looked up, and
    served from it. The same when a step took that long while its lookup was answered.

    Mutation: `EngineLoop.step` plans before it tells the time; or patience begins before a fetch is handed out.
    """
    for attempt in range(20):  # a store that answers within the very step is no story
        now = [0.0]
        machine = fetching(tmp_path / str(attempt), clock=lambda now=now: now[0], lookup_ticks=100, fetch_ticks=100)
        now[0] += 100.0
        machine.submit("ann", PROMPT)
        assert machine.step().plan.lookups
        machine.until(lambda machine=machine: machine.tiers.wait(0.01))
        events = machine.tiers.poll()
        if [type(event) for event in events] == [LookupDone]:
            break
        machine.close()
    else:
        raise AssertionError("the lookup was always answered within its step")
    machine.scheduler.advance([*events, Tick(150)])  # the step was slow: the fetch is handed out after all that
    machine.see_to("ann")
    assert machine.ended["ann"].cached == 24 and machine.scheduler.stats()["store"]["late"] == 0
    machine.close()


def test_an_executor_that_raises_has_failed_its_step(tmp_path, caplog):
    """Whatever an executor raises is a failed step, logged: its rows are tried again and end well. What says that
    nothing can be trusted comes out.

    Mutation: `EngineLoop._finish` lets the exception out, or swallows an AssertionError.
    """
    machine = Machine("full")
    execute = machine.loop.executor.execute
    troubles = [RuntimeError("out of memory"), AssertionError("a wrong byte")]

    def troubled(plan):
        if troubles and plan.batch.ids:
            machine.witness.begin(plan)
            machine.witness.fail("raised")
            raise troubles.pop(0)
        return execute(plan)

    machine.loop.executor.execute = troubled
    machine.submit("ann", PROMPT)
    step = machine.step()
    assert StepFailed(step.plan.step, "RuntimeError: out of memory") in step.events and "step 1 failed" in caplog.text
    with pytest.raises(AssertionError, match="a wrong byte"):
        machine.step()


def test_t02_lookups_of_one_plan_share_a_job_and_have_answers_of_their_own(tmp_path, monkeypatch):
    """Four requests at once, one of them known to the store: one job asks for all (or two, if it would be too large),
    and each learns what is there of its own pages.

    Mutation: `Tiers._over` gives every lookup the answer of the first, or the wrong slice; or `_look_up` forgets who
    comes after a full job.
    """
    for keys, jobs in ((1024, 1), (12, 2)):
        machine = fetching(tmp_path / str(keys))
        monkeypatch.setattr(tiers, "_MAX_LOOKUP_PAGES", keys)
        for at, prompt in enumerate([toks(31, 6 * PAGE + 1), toks(32, 6 * PAGE + 1), PROMPT, toks(33, 6 * PAGE + 1)]):
            machine.submit(f"r{at}", prompt)
        before = machine.store.stats()["submitted"]
        first = machine.step()
        assert len(first.plan.lookups) == 4 and machine.store.stats()["submitted"] == before + jobs
        machine.see_to(*(f"r{at}" for at in range(4)))
        assert [machine.ended[f"r{at}"].cached for at in range(4)] == [0, 0, 24, 0]
        machine.close()


def test_t16_backups_of_one_plan_share_a_job_and_have_answers_of_their_own(tmp_path):
    """Two requests are saved and backed up with one plan, and the store keeps only half of the first: one job, and each
    backup is told of by itself.

    Mutation: `Tiers._over` looks at the whole job for every backup, or at the wrong slice.
    """
    machine = Machine("full", f"memory://{tmp_path}")
    machine.mover.stuck = True
    prompts = {"ann": toks(41, 6 * PAGE + 1), "ben": toks(42, 3 * PAGE + 1)}
    for id, prompt in prompts.items():
        machine.submit(id, prompt, reads_cache=False)
    machine.until(lambda: len(machine.ended) == 2)
    refused = set(machine.cache.page_hashes(BASE, prompts["ann"])[3:])
    put = machine.backend.inner.put

    def picky(items):
        for kept in put([item for item in items if item.hash not in refused]):
            yield kept._replace(at=[i for i, item in enumerate(items) if item.hash not in refused][kept.at])
        for i, item in enumerate(items):
            if item.hash in refused:
                yield PutResult(i, "full")

    machine.backend.inner.put = picky
    machine.mover.stuck = False
    events, backups = [], []
    while not any(isinstance(event, BackupDone) for event in events):
        step = machine.step()
        events += step.events
        backups += step.plan.backups
    assert sorted(len(backup.hashes) for backup in backups) == [3, 6] and machine.store.stats()["submitted"] == 1
    told = {event.op: event.ok for event in events if isinstance(event, BackupDone)}
    assert told == {backup.op: len(backup.hashes) == 3 for backup in backups}
    machine.close()


def test_t08_the_scheduler_learns_whether_the_store_answers(tmp_path):
    """A breaker opens: one StoreUp says so, nothing is asked of the store, and requests do not wait for it. When it may
    be asked again, another says that, and what the store has is fetched.

    Mutation: `Tiers.poll` never tells, or tells only that the store is down.
    """
    now = [0.0]
    machine = fetching(tmp_path, breaker=Breaker(failures=1, seconds=10, clock=lambda: now[0]))
    machine.store.breaker.failure()
    told = [event for _ in range(3) for event in machine.step().events if isinstance(event, StoreUp)]
    assert told == [StoreUp(False)]
    machine.submit("ann", toks(5, 6 * PAGE + 1))
    assert not machine.step().plan.lookups
    machine.see_to("ann")
    machine.settle()
    assert machine.store.stats()["refused"] == 0 and machine.tiers.stats()["backups"] == 0
    now[0] = 11.0
    assert StoreUp(True) in machine.step().events
    machine.serve("ben", PROMPT)
    assert machine.tiers.stats()["pages_fetched"] == 6 and machine.store.breaker.state == "closed"
    machine.close()


def test_t08_one_request_tries_whether_the_store_answers_again(tmp_path):
    """The store may be asked again, and hangs: of the requests of one plan the first waits for it, the others go on.

    Mutation: `Tiers._look_up` puts all lookups of a plan into one job whatever the breaker says.
    """
    now = [0.0]
    machine = fetching(tmp_path, breaker=Breaker(failures=1, seconds=10, clock=lambda: now[0]))
    machine.store.breaker.failure()
    machine.step()
    machine.backend.stuck = ("exists",)
    now[0] = 11.0
    machine.step()
    for n in range(4):
        machine.submit(f"r{n}", toks(20 + n, 6 * PAGE + 1))
    step = machine.step()
    asked = [lookup.op for lookup in step.plan.lookups]
    assert len(asked) == 4 and machine.store.breaker.probes == 1
    answered = [event.op for event in [*step.events, *machine.tiers.poll()] if isinstance(event, LookupDone)]
    assert answered == asked[1:]
    machine.go_on()
    machine.close()


def test_t08_a_full_queue_drops_backups_and_nothing_else(tmp_path):
    """More to back up than the queue takes while the backend hangs: dropped, counted, and no request waits for it.

    Mutation: `Tiers._ask` waits for room in the queue.
    """
    machine = Machine("full", f"memory://{tmp_path}", pages=100, host=100, queue_pages=8)
    machine.backend.stuck = ("put",)
    for n in range(8):
        machine.submit(f"r{n}", toks(n, 6 * PAGE + 1), reads_cache=False)
        machine.see_to(f"r{n}")
    machine.until(lambda: machine.tiers.stats()["backups"] >= 8)
    assert machine.store.stats()["dropped"] > 0
    assert machine.tiers.stats()["refused"] == machine.store.stats()["dropped"]
    machine.go_on()
    machine.close()


def test_a_store_that_is_closed_under_a_running_engine(tmp_path):
    """Somebody closes the store: what was under way is over, what comes later is refused, requests compute.

    Mutation: `Tiers._ask` lets StoreError out.
    """
    machine = fetching(tmp_path)
    assert machine.store.close(600)
    assert machine.serve("ann", PROMPT).cached == 0
    assert machine.tiers.stats()["refused"] >= 2
    machine.close()


def test_t19_a_held_job_is_told_when_the_backend_has_returned(tmp_path):
    """A fetch whose deadline has passed in the backend gives no FetchDone before `Released`, and then exactly one; a
    lookup has no memory to hold, and is answered at its deadline.

    Mutation: `Tiers._over` holds lookups too.
    """
    machine = fetching(tmp_path, tick_seconds=0.001, lookup_ticks=50, fetch_ticks=50)
    seen: list[object] = []
    poll = machine.tiers.poll
    machine.tiers.poll = lambda: seen.extend(events := poll()) or events
    machine.backend.stuck = ("exists",)
    machine.submit("ann", PROMPT)
    machine.until(lambda: any(isinstance(event, LookupDone) for event in seen))
    machine.see_to("ann")
    machine.scheduler.flush()
    machine.backend.stuck = ()
    machine.backend.release()
    bob = machine.until_a_fetch_is_held(PROMPT)
    machine.see_to(bob)
    fetches = machine.tiers.stats()["fetches"]
    assert sum(isinstance(event, FetchDone) for event in seen) == fetches - 1
    machine.go_on()
    machine.settle()
    assert sum(isinstance(event, FetchDone) for event in seen) == fetches
    machine.close()


def test_a_backup_is_ok_if_every_page_is_kept(tmp_path):
    """BackupDone says ok only if all groups kept all their pages.

    Mutation: `Tiers._over` looks at the first group only.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}")
    seen: list[object] = []
    poll = machine.tiers.poll
    machine.tiers.poll = lambda: seen.extend(events := poll()) or events
    machine.serve("ann", PROMPT)
    machine.backend.faults = Faults(full=0.3)
    machine.serve("bob", toks(8, 9 * PAGE + 1))
    oks = [event.ok for event in seen if isinstance(event, BackupDone)]
    assert oks == [True, False]
    machine.close()


# ---- time


def test_s11_ticks_follow_the_clock(tmp_path):
    """Ticks are told once each, however unevenly the clock is looked at; `seconds_to` is exact.

    Mutation: `Tiers.poll` rounds every interval for itself.
    """
    now = [100.0]
    tiers = Machine("full", f"memory://{tmp_path}", clock=lambda: now[0]).tiers
    told = 0
    for step in (0.004, 0.004, 0.004, 0.1, 0.0, 0.009, 3.0):
        now[0] += step
        told += sum(event.n for event in tiers.poll() if isinstance(event, Tick))
    assert told == 312
    assert tiers.seconds_to(1) == pytest.approx(0.009)


def test_without_a_store_nobody_counts_ticks():
    """No Tick without a store.

    Mutation: `Tiers.poll` always tells of ticks.
    """
    now = [0.0]
    tiers = Machine("full", clock=lambda: now[0]).tiers
    now[0] += 100
    assert tiers.poll() == []


@pytest.mark.parametrize("hangs", ["exists", "get"])
def test_s11_a_deadline_fires_while_nothing_runs(tmp_path, hangs):
    """Nothing runs but an operation that hangs: `rest` sleeps until the deadline of the scheduler and no longer, and
    the loop does not spin.

    Mutation: `EngineLoop.rest` does not look at `wake_in`.
    """
    machine = fetching(tmp_path, lookup_ticks=20, fetch_ticks=20)
    machine.backend.stuck = (hangs,)
    machine.submit("ann", PROMPT, 1)
    began, steps, sleeps, sleep = time.monotonic(), 0, [0], machine.tiers._sleep

    def counted(seconds: float) -> None:
        sleeps[0] += 1
        sleep(seconds)

    machine.tiers._sleep = counted
    while "ann" not in machine.ended:
        machine.step()
        machine.loop.rest()
        steps += 1
    assert 0.18 < time.monotonic() - began < PATIENCE
    assert steps < 40 and sleeps[0] < 100, f"{steps} steps, {sleeps[0]} sleeps"
    machine.go_on()
    machine.close()


def idle(machine: Machine) -> None:
    """Until a step has nothing to do: the one after a rest is told of the time."""
    while not machine.step().idle:
        pass


def test_s08_rest_ends_at_once_when_there_is_news(tmp_path):
    """`rest` returns when a store's job is over, and when another thread calls `wake`; with nothing it sleeps as long
    as it was told.

    Mutation: `Tiers` leaves `on_report` alone; or `wake` sets nothing.
    """
    machine = fetching(tmp_path, lookup_ticks=3000)
    machine.settle()
    idle(machine)
    began = time.monotonic()
    machine.loop.rest(0.15)
    assert 0.14 < time.monotonic() - began < PATIENCE
    idle(machine)
    began = time.monotonic()
    threading.Timer(0.05, machine.loop.wake).start()
    machine.loop.rest(600)
    assert 0.04 < time.monotonic() - began < PATIENCE
    idle(machine)
    machine.loop.wake()  # before anybody rests
    began = time.monotonic()
    machine.loop.rest(600)
    assert time.monotonic() - began < PATIENCE
    machine.submit("ann", PROMPT)
    machine.backend.stuck = ("exists",)
    idle(machine)
    threading.Timer(0.05, machine.go_on).start()
    began = time.monotonic()
    assert machine.tiers.wait(600) and time.monotonic() - began < PATIENCE
    assert any(isinstance(event, LookupDone) for event in machine.step().events)
    machine.close()


def test_no_step_waits_for_a_store_that_hangs(tmp_path, monkeypatch):
    """With a backend that hangs in everything, steps go on: they neither ask the store to wait nor meet its lock.

    Mutation: `Tiers.begin` waits for a job.
    """
    machine = Machine("full", f"memory://{tmp_path}", pages=200, host=200)
    machine.backend.stuck = ("exists", "get", "put")

    def waits(*_: object) -> None:
        raise AssertionError("a step waits for the store")

    for each in (machine.store, machine.tiers):
        monkeypatch.setattr(each, "wait", waits)
        monkeypatch.setattr(each, "drain", waits)
    for n in range(10):
        machine.submit(f"r{n}", toks(n, 8 * PAGE + 1), reads_cache=False)
    until = time.monotonic() + PATIENCE
    while machine.loop.live:
        assert time.monotonic() < until
        machine.step()
    monkeypatch.undo()
    machine.go_on()
    machine.close()


# ---- the loop


class Toy:
    """A model that says the sum of its row."""

    def execute(self, plan):
        if not plan.batch.ids:
            return []
        rows = np.split(plan.batch.tokens, np.cumsum(plan.batch.lengths)[:-1])
        said = [sum(row) % 1000 for row, samples in zip(rows, plan.batch.samples, strict=True) if samples]
        return [StepDone(plan.step, np.array(said, np.int32))]


def toy_loop() -> EngineLoop:
    return EngineLoop(Scheduler(SchedulerConfig(16, [CacheGroup("full", "full", 64)], 256, 8)), Toy())


def test_the_loop_alone_serves():
    """Without tiers, on a scheduler without host: requests go in, their tokens and ends come out, in order.

    Mutation: `Step.tokens` counts rows that do not sample.
    """
    loop = toy_loop()
    loop.submit([RequestSpec("a", list(range(40)), 3), RequestSpec("b", [1, 2], 2)])
    said: dict[str, list[int]] = {"a": [], "b": []}
    ended = []
    while loop.live:
        step = loop.step()
        for id, token in step.tokens().items():
            said[id].append(token)
        ended += step.ended
        loop.rest()
    assert said == {"a": [780, 780, 780], "b": [3, 3]}
    assert [end.id for end in ended] == ["b", "a"]


def test_closing_ends_everybody_once():
    """Closed while requests run: each ends as aborted, once; nobody new is taken.

    Mutation: `EngineLoop.close` forgets who is live.
    """
    loop = toy_loop()
    loop.submit([RequestSpec(id, [1, 2, 3], 50) for id in "abc"])
    loop.step()
    (end,) = loop.tell([Abort("b")])
    assert end.reason == "abort"
    assert [(end.id, end.reason) for end in loop.close()] == [("a", "abort"), ("c", "abort")]
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit([RequestSpec("d", [1], 1)])


def test_closing_writes_back_what_is_left(tmp_path):
    """A request has just ended when the engine is closed: its pages are saved and backed up before `close` returns.

    Mutation: `EngineLoop.close` closes the store first.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}")
    machine.submit("ann", PROMPT, 1)
    machine.see_to("ann")
    assert not machine.tiers.stats()["backups"]
    assert machine.loop.close(PATIENCE) == []
    assert machine.tiers.stats()["pages_backed_up"] >= 6 and all(machine.backend.inner.exists(machine.names(PROMPT)))


def test_closing_offers_again_what_the_store_could_not_keep(tmp_path):
    """A backup has failed, as on a machine that is busy, and its next try is a long time away when the engine is
    closed: it does not wait for that.

    Mutation: `EngineLoop.close` does not ask `offer_owed`, or `Prefetch.offer_all` offers what is due alone.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}", clock=lambda: 0.0)  # no tick ever comes
    machine.backend.faults = Faults(fail=1)
    machine.serve("ann", PROMPT, 1)
    assert machine.scheduler.stats()["store"]["owed"] > 0
    machine.backend.faults = Faults()
    assert machine.loop.close(60) == []
    assert all(machine.backend.inner.exists(machine.names(PROMPT))) and not machine.scheduler.unwritten()


def test_f20_what_host_has_no_room_for_is_said_once(caplog):
    """Three prompts, and no room on host for the window of any: a warning names the pages of the first and what would
    help, and says where they are counted. With room nothing is said.

    Mutation: `Tiers.poll` says it with every save, or not at all.
    """
    prompts = [toks(n, 20 * PAGE) for n in range(3)]
    for windows in (40, 1):
        machine = Machine(groups=[CacheGroup("full", "full", 80, 80), CacheGroup("window", "window", 40, windows, 12)])
        for n, prompt in enumerate(prompts):
            machine.serve(f"r{n}", prompt, 1)
        said = [record.getMessage() for record in caplog.records if "host memory has no room" in record.getMessage()]
        counted = machine.cache.stats()["transfers"]
        assert bool(counted["pages_skipped"]) == bool(said) == (windows == 1)
        machine.close()
    assert len(said) == 1 and "no room for 40 pages" in said[0] and "host_cache" in said[0]
    assert counted["saves_skipped"] == 3 and counted["pages_skipped"] == 3 * 40


def test_m09_what_could_not_be_written_is_logged(tmp_path, caplog):
    """A store that keeps nothing is asked a few times more when the engine is closed, with as many pages as ever; then
    it is logged how many pages that were, and how many bytes. Host memory is free for whoever looks.

    Mutation: `say_unwritten` is not called; `unwritten` counts a page once for each span, or leaves a group out.
    """
    machine = Machine(HYBRID, f"memory://{tmp_path}")
    machine.backend.faults = Faults(fail=1)
    machine.serve("ann", PROMPT, 1)
    machine.serve("bob", PROMPT[: 4 * PAGE] + toks(2, 2 * PAGE + 1), 1)
    held = machine.pages("host", "tree")
    assert machine.scheduler.unwritten() == held == machine.scheduler.unwritten()
    machine.loop.close(60)
    size = sum(
        pages * next(group.page_bytes for group in machine.groups if group.name == name) for name, pages in held.items()
    )
    said = f"{sum(held.values())} pages ({size} bytes) could not be written before the engine ended"
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1
    assert machine.pages("host", "flight") == dict.fromkeys(held, 0)
    machine.cache.check()


@pytest.mark.parametrize("come", ["not planned", "saving", "writing"])
def test_m09_when_there_is_no_time(tmp_path, caplog, come):
    """Closed at once: what was not saved yet, what was saved only now, and what the backend has and does not return.

    Mutation: `unwritten` does not look at saves, or at backups of no plan; `say_unwritten` not at what is held.
    """
    machine = Machine("full", f"memory://{tmp_path}")
    machine.backend.stuck = ("put",) if come == "writing" else ()
    machine.mover.stuck = come == "saving"
    machine.submit("ann", PROMPT, 1)
    machine.see_to("ann")
    if come != "not planned":
        done = {"saving": "saves", "writing": "backups"}[come]
        machine.until(lambda: machine.tiers.stats()[done] == 1)
    if come == "writing":
        machine.until(lambda: (found := machine.store.stats())["jobs"] and not found["waiting"])
    machine.loop.close(0)
    assert machine.tiers.stats()["held"] == (come == "writing")
    assert f"6 pages ({6 * machine.groups[0].page_bytes} bytes) could not be written" in caplog.text
    machine.go_on()
    assert machine.tiers.drain(60)


def test_closing_does_not_wait_for_ever(tmp_path):
    """A backend that hangs costs a close its timeout and no more; what it holds is told as held.

    Mutation: `EngineLoop.close` drains without a limit.
    """
    machine = Machine("full", f"memory://{tmp_path}")
    machine.backend.stuck = ("put",)
    machine.submit("ann", PROMPT, 1)
    machine.see_to("ann")
    machine.step()
    began = time.monotonic()
    machine.loop.close(0.3)
    assert time.monotonic() - began < PATIENCE
    assert machine.tiers.stats()["held"] >= 1
    machine.go_on()
    assert machine.tiers.drain(PATIENCE)


# ---- mistakes


def parts(**more):
    """A scheduler, a mover and a store that fit."""
    group = CacheGroup("full", "full", 8, 8, page_bytes=64)
    scheduler = Scheduler(SchedulerConfig(4, more.pop("groups", [group]), 64, 4, store=more.pop("config", True)))
    arena = more.pop("arena", [group])
    memory = {each.name: np.zeros((more.get("rows", 9), 64), np.uint8) for each in arena}
    more.pop("rows", None)
    mover = NumpyMover(DeviceArena(memory), HostArena(arena))
    layout = GroupLayout("full", "full", 64)
    fields = {"weights": b"w" * 32, "dtype": "f", "page_size": 4, "groups": (layout,), "rank": 0, "ranks": 1, **more}
    return scheduler, mover, open_store("memory://", Fingerprint(**fields))


GROUP = CacheGroup("full", "full", 8, 8, page_bytes=64)
MISTAKES = {
    "page size": ({"page_size": 8}, "page_size of the store's fingerprint must be the scheduler's 4, got 8"),
    "a group too many": (
        {"groups": [GROUP, CacheGroup("more", "full", 8, 8, page_bytes=64)]},
        r"the host arena must have group 'more', has \['full'\]",
    ),
    "host pages": ({"groups": [replace(GROUP, host_pages=9)]}, "the host arena must have 9 pages of group 'full'"),
    "device pages": ({"rows": 8}, "the device arena must have 8 pages of group 'full'.* has 7"),
    "no store wanted": ({"config": False}, "store must be given to Tiers and be True in SchedulerConfig, or neither"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_said_at_the_start(mistake):
    """Memory, scheduler and store that speak of different pages: a ValueError that names what and what would be right.

    Mutation: `_fit` is not called.
    """
    changes, words = MISTAKES[mistake]
    scheduler, mover, store = parts(**changes)
    with pytest.raises(ValueError, match=words):
        Tiers(scheduler, mover, store)
    store.close()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (GroupLayout("full", "full", 128), r"must have family, window and page_bytes \('full', None, 64\), got"),
        (GroupLayout("full", "window", 64, window=8), "must have family, window and page_bytes"),
        (GroupLayout("other", "full", 64), r"must be the scheduler's \['full'\], got \['other'\]"),
    ],
)
def test_a_fingerprint_that_does_not_fit(layout, words):
    """The same for the groups of the store's fingerprint.

    Mutation: `_fit_store` compares names only.
    """
    scheduler, mover, _ = parts()
    print_ = Fingerprint(b"w" * 32, "f", 4, (layout,), rank=0, ranks=1)
    with pytest.raises(ValueError, match=words):
        Tiers(scheduler, mover, open_store("memory://", print_))


def test_other_mistakes_are_said():
    """No mover for host pages, no store where the scheduler has one, a store whose reports go elsewhere, bad ticks.

    Mutation: `Tiers` takes over `on_report` silently.
    """
    scheduler, mover, store = parts()
    with pytest.raises(ValueError, match="mover must be given: group 'full' has 8 host pages"):
        Tiers(scheduler, None, store)
    with pytest.raises(ValueError, match="got none and True"):
        Tiers(scheduler, mover)
    with pytest.raises(ValueError, match="tick_seconds must be a number above 0, got 0"):
        Tiers(scheduler, mover, store, tick_seconds=0)
    with pytest.raises(ValueError, match="scheduler must be a Scheduler"):
        Tiers(mover, mover, store)
    store.on_report = store.poll
    with pytest.raises(ValueError, match="on_report of the store must be None"):
        Tiers(scheduler, mover, store)
    store.on_report = None
    assert Tiers(scheduler, mover, store).close()


def test_a_step_goes_before_the_threads_of_the_store(tmp_path):
    """While a step begins or polls, the gate of the store is shut; then it is open. When all is over, threads take
    turns as they did before.

    Mutation: `poll` does not go first, or `close` forgets the interval.
    """
    sys.setswitchinterval(0.005)  # Python's own
    machine = Machine("full", f"memory://{tmp_path}")
    store, seen = machine.loop.tiers._store, []
    poll = store.poll
    store.poll = lambda: (seen.append((store.gate._shut, sys.getswitchinterval())), poll())[1]
    machine.serve("ann", PROMPT)
    first = [interval for shut, interval in seen if shut]  # else it looked while it waited, and was in no hurry
    assert first and not store.gate._shut
    assert sys.getswitchinterval() < min(first)
    machine.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_engines_of_one_process_share_how_long_a_thread_keeps_the_interpreter(tmp_path):
    """The first that opens shortens it, the last that closes gives it back, in whatever order they go.

    Mutation: each gives back what it found: the second one the first one's.
    """
    sys.setswitchinterval(0.005)  # Python's own
    first, second = (Machine("full", f"memory://{tmp_path}/{name}") for name in "ab")
    short = sys.getswitchinterval()
    assert short < 0.001
    first.close()
    assert sys.getswitchinterval() == short
    first.tiers.close()  # once more changes nothing
    assert sys.getswitchinterval() == short
    second.close()
    assert sys.getswitchinterval() == pytest.approx(0.005)
