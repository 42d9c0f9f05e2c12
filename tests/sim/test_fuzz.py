"""Random traffic and faults against the scheduler; and that the attack sees what it must see."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest

from sapwood.cache import CacheGroup, HybridPrefixCache
from sapwood.commands import fuzz as command
from sapwood.scheduler import RequestSpec, Scheduler, StepFailed
from sapwood.sim.executor import ContentExecutor
from sapwood.sim.fuzz import Fuzz, FuzzReport, fuzz
from sapwood.sim.layouts import LAYOUTS
from sapwood.sim.oracle import NaiveMemory

from ..cache.chaos import fresh_seeds

pytestmark = pytest.mark.attack
STEPS = 150
SEEDS = 3  # of each layout, in every run of the tests
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def attack(layout: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            fuzz(seed, STEPS, layout)
        except Exception as error:
            error.add_note(f"repeat it: sapwood fuzz --seed {seed} --steps {STEPS} --layout {layout}")
            raise


@each_layout
def test_fuzz(layout: str) -> None:
    """Contents, invariants, events, ends and the naive memory agree after every step; then everything is free."""
    attack(layout, range(SEEDS))


FAILED = [("full/1", 2095532889), ("full+window/1", 3738515317)]
FAILED += [("full@pair", 944916825), ("window+state@store", 4273965496)]


@pytest.mark.parametrize(("layout", "seed"), FAILED)
def test_seeds_that_once_failed(layout: str, seed: int) -> None:
    """A page told of before its parent; a row that goes on, in an evicted namespace, from what had become real; a step
    that fails when host has a part of what it had promised; a save that loses its node to the room it makes.

    Mutation: `_lose_device` does not `split`; or `begin_save` keeps `span.node`.
    """
    attack(layout, [seed])


@pytest.mark.long
@each_layout
def test_fuzz_for_long(layout: str) -> None:
    """The same for an hour over all layouts, from seeds that are drawn."""
    attack(layout, fresh_seeds(seconds=3600 / len(LAYOUTS)))


# ---- the same seed, the same plans


def printed(hash_seed: str, layout: str, seed: int) -> str:
    """What the command prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "sapwood", "fuzz", "--seed", str(seed), "--steps", "60", "--layout", layout],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("layout", "seed"), [("full", 1), ("full+2windows+state", 2), ("tiny-full+window", 4), ("full+state/64", 1)]
)
def test_s06_a_seed_prints_the_same_digest_in_every_process(layout: str, seed: int) -> None:
    """Two processes with different hash seeds make the same plans, byte for byte.

    Mutation: the scheduler goes through a set of ids, or the traffic draws from one.
    """
    one = printed("1", layout, seed)
    assert one and one == printed("2", layout, seed)
    assert one.split()[0] == fuzz(seed, 60, layout).digest[:16]


class OneByOne(Fuzz):
    """Hands over requests that come together one by one."""

    def submit(self, specs: list[RequestSpec]) -> None:
        for spec in specs:
            self.scheduler.submit([spec])


@pytest.mark.parametrize("layout", ["full", "full+window", "full+2windows+state/4", "tiny-full"])
def test_s06_requests_may_be_submitted_in_one_call_or_in_many(layout: str) -> None:
    """The plans are the same, byte for byte.

    Mutation: arrival is counted by call.
    """
    for seed in range(3):
        assert OneByOne(seed, layout).run(60) == fuzz(seed, 60, layout)


def test_another_seed_makes_other_plans() -> None:
    assert len({fuzz(seed, 40, "full").digest for seed in range(5)}) == 5


# ---- the attack is one


def test_everything_happens() -> None:
    """Over a few seeds every kind of end, fault and pressure has been there, and all that a store can do to a fetch:
    the attack does not pass by idling."""
    reports: list[FuzzReport] = []
    total, reasons = dict.fromkeys(COUNTS, 0), set()
    layouts = ("full", "tiny-full+window", "full+state", "full@pair", "full+window@store-evict")
    for seed, layout in itertools.product(range(40), layouts):
        reports.append(fuzz(seed, 100, layout))
        total = {name: n + getattr(reports[-1], name) for name, n in total.items()}
        reasons |= set(reports[-1].ended)
        if all(total.values()) and len(reasons) == 5:
            break
    assert all(total.values()), total
    assert reasons == {"stop", "length", "finish", "abort", "failed"}
    assert total["requests"] == sum(sum(report.ended.values()) for report in reports)


COUNTS = [name for name in FuzzReport.__dataclass_fields__ if name not in ("layout", "seed", "digest", "ended")]


def found(layout: str, seeds: int = 8, steps: int = 80) -> str:
    """The first complaint of an attack, with every kind of fault in it, on something that was broken."""
    for seed in range(seeds):
        attack = Fuzz(seed, layout)
        attack.failing, attack.trouble, attack.unloads = 0.05, 0.1, 0.05
        try:
            attack.run(steps)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def lose_an_end(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.advance
    patch.setattr(Scheduler, "advance", lambda self, events: [e for e in right(self, events) if e.reason != "stop"])


def end_twice(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.advance
    patch.setattr(Scheduler, "advance", lambda self, events: 2 * right(self, events))


def never_let_go_of_a_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HybridPrefixCache, "unbind", lambda self, binding: None)


def keep_what_was_flushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "flush", lambda self: None)


def keep_an_unloaded_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "evict_namespace", lambda self, namespace: True)


def drop_an_event(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.drain_events
    patch.setattr(Scheduler, "drain_events", lambda self: right(self)[1:])


def believe_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HybridPrefixCache, "step_failed", lambda self, step, newest: (self.step_commit(step), [])[1])


def forget_the_namespace(patch: pytest.MonkeyPatch) -> None:
    right = HybridPrefixCache.bind
    default = RequestSpec("", [1], 1).namespace
    patch.setattr(HybridPrefixCache, "bind", lambda self, namespace: right(self, default))


def write_what_is_there(patch: pytest.MonkeyPatch) -> None:
    names = [group.name for group in Fuzz(0, "full").config.groups]
    patch.setattr(HybridPrefixCache, "write_from", lambda self, lease, start: dict.fromkeys(names, start))


def take_anything(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler.submit

    def submit(self: Scheduler, specs: list[RequestSpec]) -> None:
        with contextlib.suppress(ValueError):
            right(self, specs)

    patch.setattr(Scheduler, "submit", submit)


def stop_at_once(patch: pytest.MonkeyPatch) -> None:
    idle = Fuzz(0, "full").scheduler.next_plan()
    patch.setattr(Scheduler, "next_plan", lambda self: idle)


@pytest.mark.parametrize(
    ("breaks", "complaint"),
    [
        (lose_an_end, "should have ended: stop"),
        (end_twice, "of a request that is not live"),
        (never_let_go_of_a_name, "bound to|namespaces stay"),
        (keep_what_was_flushed, "."),
        (keep_an_unloaded_adapter, "were computed|was evicted"),
        (drop_an_event, "event|parent|was not there"),
        (believe_a_failed_step, "."),
        (forget_the_namespace, "holds something else|were computed|overwrites|nobody needs are held"),
        (write_what_is_there, "which .* has written"),
        (take_anything, "was not refused"),
        (stop_at_once, "nothing to run and nothing in flight"),
    ],
)
def test_what_is_broken_is_found(breaks, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each breaks one thing in the scheduler or the cache, and the attack finds it within a few seeds."""
    breaks(monkeypatch)
    assert re.search(complaint, found("full"))


def test_a_poisonous_request_ends_as_failed_and_the_others_go_on() -> None:
    """S09: every step with its row fails; it is given up, and everybody else gets the output they would have had."""
    poisoned = 0
    for seed in range(6):
        attack = Fuzz(seed, "full+window")
        attack.failing = attack.trouble = attack.unloads = 0.0
        attack.poison = 0.1
        report = attack.run(80)
        poisoned += report.ended.get("failed", 0)
        assert set(report.ended) <= {"stop", "length", "failed"}
    assert poisoned > 5


def two_in_a_row(seed: int = 1) -> Fuzz:
    """Two plans are in flight: in the second "two" begins at 32, on what "one" computes in the first. "late" waits."""
    attack = Fuzz(seed, "full")
    config = replace(attack.config, max_batch_tokens=64, max_batch_size=2, mixed_tokens=0, prefix_caching=True)
    attack.config = replace(config, events=False, groups=(CacheGroup("full", "full", 40),))
    attack.scheduler = Scheduler(attack.config)
    attack.cache = attack.scheduler.cache
    attack.executor = ContentExecutor(attack.scheduler)
    attack.memory = NaiveMemory(attack.executor.double, False, None)
    attack.in_flight = attack.memory.in_flight
    attack.failing = attack.trouble = attack.unloads = attack.poison = 0.0
    attack.traffic.spaces = [RequestSpec("", [1], 1).namespace]
    attack.load, attack.backlog = 2.0, 10
    prompt = list(range(1, 33))
    for id, tokens in (("one", prompt), ("two", [*prompt, *range(50, 60)]), ("late", [*prompt, 99])):
        attack.traffic.arrivals = lambda id=id, tokens=tokens: [RequestSpec(id, tokens, 4)]  # type: ignore[method-assign]
        attack.arrive()
        if id != "late":
            attack.executor.begin(attack.plan())
    assert [(row.request.spec.id, row.start) for row in attack.in_flight[1].rows] == [("one", 32), ("two", 32)]
    return attack


@pytest.mark.parametrize("evicted", ["before", "after"])
def test_a_row_may_go_on_from_what_became_real_before_its_namespace_went(evicted: str) -> None:
    """The first plan is done, the second fails, and the namespace is evicted before or after: "two" goes on from 32,
    and that is no adoption.

    Mutation: `NaiveMemory.step_done` does not call `_keep`; or that asks `promises`, which knows only the newest epoch.
    """
    attack = two_in_a_row()
    if evicted == "before":
        attack.evict()
    attack.finish()
    assert attack.live["two"].held == 32
    attack.failing = 1.0
    attack.finish()
    if evicted == "after":
        attack.evict()
    attack.drain()
    attack.leave_nothing()


def test_what_never_became_real_is_nobodys() -> None:
    """The first plan fails: "two" has nothing of it.

    Mutation: `Fuzz.finish` calls `step_done` whatever became of the step.
    """
    attack = two_in_a_row()
    attack.failing = 1.0
    attack.finish()
    assert attack.live["two"].held == 0
    attack.drain()
    attack.leave_nothing()


def test_who_waited_may_not_adopt_what_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story with a namespace that does not go: "late" had no row when it was evicted, and is caught.

    Mutation: `NaiveMemory._keep` raises `held` of every live request.
    """
    keep_an_unloaded_adapter(monkeypatch)
    keep_what_was_flushed(monkeypatch)
    attack = two_in_a_row()
    attack.finish()
    attack.failing = 1.0
    attack.finish()
    attack.evict()
    with pytest.raises(AssertionError, match="late: adopts in a namespace that was evicted"):
        attack.drain()


# ---- the command


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fails(seed: int, steps: int, layout: str) -> FuzzReport:
        if seed == 5:
            raise AssertionError("page 7 has two owners")
        return fuzz(seed, 1, layout)

    monkeypatch.setattr(command, "fuzz", fails)
    assert command.main(shlex.split("--seed 4 --count 3 --steps 9 --layout full+window/1")) == 1
    printed = capsys.readouterr().out
    assert "full+window/1, seed 4: " in printed and "page 7 has two owners" in printed
    assert "sapwood fuzz --seed 5 --steps 9 --layout full+window/1\n" in printed


def test_all_layouts_for_a_while(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """--count and --layout all: every layout by every seed. --minutes: until the time is over."""
    seen: list[tuple[int, str]] = []

    def notes(seed: int, steps: int, layout: str) -> FuzzReport:
        seen.append((seed, layout))
        return fuzz(0, 1, "full")

    monkeypatch.setattr(command, "fuzz", notes)
    assert command.main(["--count", "2"]) == 0
    assert seen == [(seed, layout) for seed in (0, 1) for layout in LAYOUTS]
    seen.clear()
    assert command.main(["--minutes", "0.001", "--layout", "full", "--seed", "3"]) == 0
    assert seen[0] == (3, "full") and len(seen) < 1000
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(LAYOUTS) + len(seen)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--seed x", "must be a whole number from 0 up, got 'x'"),
        ("--seed -1", "--seed"),
        ("--steps 0", "must be a whole number from 1 up, got '0'"),
        ("--count 0", "must be a whole number from 1 up"),
        ("--layout round", "invalid choice: 'round'"),
        ("--minutes nan", "must be a number of minutes"),
    ],
)
def test_bad_arguments_are_named(arguments: str, complaint: str, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        command.main(shlex.split(arguments))
    assert leaving.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match=r"layout must be one of full, .*, got 'round'"):
        fuzz(0, 1, "round")


def test_a_step_that_nobody_made_raises() -> None:
    """The attack's own mistakes are refused by the scheduler, and it would say so if they were not."""
    with pytest.raises(ValueError, match="no step runs"):
        Fuzz(0, "full").scheduler.advance([StepFailed(3, "mistake")])
