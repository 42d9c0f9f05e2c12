"""The second tier through the scheduler: written to host, lost on the device, loaded back (cases T01, T11, T15, T18,
L18, F07, F20)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import Abort, LoadDone, ProtocolError, RequestSpec, SaveDone, Scheduler, SchedulerConfig
from sapwood.sim import ContentExecutor
from sapwood.sim.event_replay import Replay

LAYOUTS = {
    "full": [CacheGroup("full", "full", 24, 200)],
    "full+window": [CacheGroup("full", "full", 24, 200), CacheGroup("window", "window", 24, 200, 9)],
    "full+state": [CacheGroup("full", "full", 24, 200), CacheGroup("state", "state", 6, 40)],
    "window+state": [CacheGroup("window", "window", 12, 100, 9), CacheGroup("state", "state", 3, 40)],
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_policy = pytest.mark.parametrize("policy", ["through", "evict"])


class Hosted:
    """A scheduler with a host tier; transfers land when the test says so."""

    def __init__(self, layout: str | list[CacheGroup], policy: str = "through", **more: object) -> None:
        options: dict[str, object] = {"max_batch_tokens": 64, "max_batch_size": 4, **more}
        groups = LAYOUTS[layout] if isinstance(layout, str) else layout
        self.scheduler = Scheduler(SchedulerConfig(4, groups, host_policy=policy, **options))
        self.executor = ContentExecutor(self.scheduler)
        self.ended: dict[str, object] = {}
        self.rows: list[list[str]] = []

    def submit(self, name: str, seed: int, length: int = 40, new: int = 6, **more: bool) -> None:
        spec = RequestSpec(name, [1000 * seed + i for i in range(length)], new, **more)
        self.executor.submit(spec)
        self.scheduler.submit([spec])

    def step(self, land: bool = True, ok: bool = True) -> bool:
        """One plan; with `land`, all transfers arrive after it. Returns whether there was anything to do."""
        plan = self.scheduler.next_plan()
        self.executor.begin(plan)
        events = list(self.executor.done()) if plan.batch.ids else []
        self.rows.append(list(plan.batch.ids))
        if land:
            events += self.landed(ok)
        self.tell(events)
        return not plan.empty or bool(events)

    def landed(self, ok: bool = True) -> list[object]:
        return [self.executor.land(op, ok) for op in list(self.executor.moving)]

    def tell(self, events: list[object]) -> None:
        for end in self.scheduler.advance(events):
            self.ended[end.id] = end
        self.scheduler.cache.check()

    def idle(self) -> None:
        for _ in range(500):
            if not self.step():
                break
        stats = self.scheduler.stats()
        assert not (stats["waiting"] or stats["loading"] or stats["prefilling"] or stats["decoding"]), stats

    def run(self, name: str, seed: int, length: int = 40):
        self.submit(name, seed, length)
        self.idle()
        return self.ended[name]

    def forget_on_device(self) -> None:
        """Others need all the room there is."""
        for other in range(50, 56):
            self.run(f"other {other} {len(self.ended)}", other)

    @property
    def moved(self) -> dict[str, int]:
        return self.scheduler.cache.stats()["transfers"]


@each_policy
@each_layout
def test_t01_what_the_device_has_lost_is_loaded_from_host(layout, policy):
    """A prompt is computed, written to host, evicted from the device and asked for again: it is loaded, not computed,
    and every read is right.

    Mutation: `Book.match` asks for the device only; or `Transfers.save_cold` saves nothing.
    """
    run = Hosted(layout, policy)
    first = run.run("a", 1)
    assert first.cached == 0 and first.computed == 40
    run.forget_on_device()
    before = run.moved["loads"]
    again = run.run("again", 1)
    assert again.cached >= 36 and again.computed == 40 - again.cached and again.recomputed == 0
    assert run.moved["loads"] == before + 1


@each_policy
def test_f20_a_host_with_less_room_than_a_prompt_has_pages_in_a_window_group(policy):
    """Seven prompts of 40 pages, and host has 36 pages of windows of 3: each is loaded from there when the device has
    lost it, and no save was left out.

    Mutation: `_to_save_of_windows` wants every page, however little it is worth.
    """
    groups = [CacheGroup("full", "full", 64, 400), CacheGroup("window", "window", 64, 36, 9)]
    run = Hosted(groups, policy)
    for seed in range(7):
        assert run.run(f"first {seed}", seed, 160).cached == 0
    before = run.moved["loads"]
    for seed in range(6):
        assert run.run(f"again {seed}", seed, 160).cached == 159
    assert run.moved["loads"] == before + 6 and run.moved["saves_skipped"] == 0


@each_policy
def test_f20_a_host_without_room_for_a_window_is_counted(policy):
    """Nothing could be served from such a host, so nothing is saved there; each page is counted, and answers are right.

    Mutation: `begin_save` saves what fits of some groups; or counts nothing.
    """
    run = Hosted([CacheGroup("full", "full", 64, 400), CacheGroup("window", "window", 64, 2, 9)], policy)
    for n in range(2):
        for seed in range(3):
            assert run.run(f"{n} {seed}", seed, 160).cached == 0
    assert run.moved["saves"] == run.moved["loads"] == 0
    assert run.moved["saves_skipped"] >= 2 and run.moved["pages_skipped"] >= 2 * 40


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("hosted", [False, True])
def test_m05_the_statistics_count_what_requests_were_served(layout, hosted):
    """Retractions under pressure, failing steps, failing loads and aborts in every state: `cached_tokens` of the cache,
    and of each namespace, is what the ends of the requests say, and a request and its prompt count once.

    Mutation: `_begins` is not called by `retract`, `rewind` or `load_done`; or `_computed` not by `rewind` or
    `finish_request`.
    """
    rng = random.Random(5)
    groups = [replace(group, host_pages=group.host_pages if hosted else 0) for group in LAYOUTS[layout]]
    run = Hosted(groups, headroom=0, max_batch_tokens=24, max_tries=1000)
    spaces = [Namespace(salt="a"), Namespace(salt="b")]
    for space in spaces:
        run.scheduler.cache.bind(space)  # a namespace with nobody and nothing in it is forgotten, and what it counted
    body = list(range(100, 160))
    specs = {}
    for n in range(60):
        tokens = body[: rng.randrange(1, 60)] + [1000 * n + i for i in range(rng.randrange(6))]
        spec = specs[f"r{n}"] = RequestSpec(f"r{n}", tokens, rng.randrange(1, 30), rng.choice(spaces))
        run.executor.submit(spec)
        run.scheduler.submit([spec])
        for _ in range(rng.randrange(8)):
            plan = run.scheduler.next_plan()
            run.executor.begin(plan)
            if rng.random() < 0.08:
                run.tell([Abort(f"r{rng.randrange(n + 1)}")])
            events = []
            if plan.batch.ids:
                events += run.executor.fail("bad luck") if rng.random() < 0.2 else run.executor.done()
            run.tell(events + run.landed(rng.random() < 0.6))
    run.idle()

    stats = run.scheduler.stats()
    assert stats["steps_failed"] and (stats["retractions"] or layout == "window+state")
    assert run.moved["loads_failed"] or not hosted or layout == "window+state"
    assert {end.reason for end in run.ended.values()} == {"length", "abort"}
    served = {
        space: sum(end.cached for end in run.ended.values() if specs[end.id].namespace == space) for space in spaces
    }
    assert stats["cache"]["cached_tokens"] == sum(served.values())
    assert {entry["namespace"]: entry["cached_tokens"] for entry in stats["cache"]["namespaces"]} == served
    ended = [end.prompt for end in run.ended.values()]
    assert stats["cache"]["requests"] <= len(ended) and stats["cache"]["prompt_tokens"] <= sum(ended)


@pytest.mark.parametrize("ok", [True, False])
def test_s08_saving_before_eviction_comes_to_rest(ok):
    """The device is about to lose two prompts and host has room for one, or fails to take any: each is saved once, and
    the engine can sleep. Used again, a prompt is worth another try.

    Mutation: `HybridPrefixCache.cold_spans` does not look at what was tried; or tries nothing twice.
    """
    run = Hosted([CacheGroup("full", "full", 24, 12)], "evict")
    saves = [0]
    for name, seed in (("a", 1), ("b", 2), ("a again", 1), ("b again", 2)):
        run.submit(name, seed, 44, 1)
        for _ in range(20):
            run.step(ok=ok)
        assert name in run.ended and run.scheduler.next_plan().empty
        saves.append(run.moved["saves"])
    assert saves[2] <= 4 and saves[2] < saves[4]


@each_layout
def test_f07_abort_while_loading(layout):
    """A request that is aborted while its prefix is on its way ends at once; the load's pages are freed when it lands.

    Mutation: `Book.end` leaves it among those that load.
    """
    run = Hosted(layout)
    run.run("a", 1)
    run.forget_on_device()
    run.submit("b", 1)
    run.step(land=False)
    assert run.scheduler.stats()["loading"] == 1 and run.rows[-1] == []
    run.tell([Abort("b")])
    assert run.ended["b"].reason == "abort" and run.scheduler.stats()["loading"] == 0
    run.tell(run.landed())
    run.idle()
    run.scheduler.flush()
    run.scheduler.cache.check()
    for tiers in run.scheduler.cache.stats()["pages"].values():
        for pages in tiers.values():
            assert pages["free"] == pages["capacity"]


@each_layout
@pytest.mark.parametrize("fails", [True, False])
def test_p09_a_load_does_not_land_below_what_is_only_promised(layout, fails):
    """While a prompt is loaded, somebody who reads nothing from the cache computes its first pages again; the load
    arrives, and then that step fails: nothing of the load stands on the device without what is above it.

    Mutation: `Loads._land` does not look for promises.
    """
    run = Hosted(layout, events=True)
    run.run("a", 1)
    run.forget_on_device()
    run.submit("b", 1)
    run.step(land=False)
    assert run.scheduler.stats()["loading"] == 1
    run.submit("c", 1, length=9, reads_cache=False)
    run.executor.begin(run.scheduler.next_plan())
    run.tell(run.landed())
    run.tell(run.executor.fail("bad luck") if fails else run.executor.done())
    run.idle()
    assert run.ended["b"].reason == run.ended["c"].reason == "length"
    replay = Replay(run.scheduler.cache)
    replay.hear(run.scheduler.drain_events())
    replay.compare()


@each_layout
def test_t01_a_load_that_fails_is_computed(layout):
    """The bytes do not come: the request computes its prompt, is not counted as cached, and does not try host again.

    Mutation: `Book.landed` does not set `host` to False.
    """
    run = Hosted(layout)
    run.run("a", 1)
    run.forget_on_device()
    run.submit("b", 1)
    run.step(land=False)
    assert run.scheduler.stats()["loading"] == 1
    run.tell(run.landed(ok=False))
    run.idle()
    assert run.ended["b"].cached == 0 and run.ended["b"].computed == 40
    assert run.moved["loads_failed"] == 1


def test_t18_two_requests_wait_for_one_load():
    """Two requests that need the same pages from host cause one load, and both go on when it has come.

    Mutation: `Admission._load_closed` does not look whether a node is being loaded.
    """
    run = Hosted("full")
    run.run("a", 1)
    run.forget_on_device()
    before = run.moved["loads"]
    run.submit("b", 1)
    run.submit("c", 1)
    run.idle()
    assert run.moved["loads"] == before + 1
    assert run.ended["b"].cached >= 36 and run.ended["c"].cached >= 36


def test_t15_others_run_while_one_loads_and_it_keeps_its_place():
    """While a prefix is on its way those behind run; when it has come, the request goes before those that came later.

    Mutation: `Book.landed` gives it a new arrival.
    """
    run = Hosted("full", max_batch_tokens=8)
    run.run("a", 1)
    run.forget_on_device()
    run.submit("early", 1)
    run.submit("late", 7, length=30)
    run.step(land=False)
    assert run.rows[-1] == ["late"]
    run.tell(run.landed())
    run.step(land=False)
    assert run.rows[-1][0] == "early"
    run.idle()


def test_t11_a_retracted_request_comes_back_from_host():
    """Under pressure requests are retracted; what they had computed was written to host, and they go on from there:
    less than half is computed again.

    Mutation: `Book.retract` does not offer what was left for saving.
    """
    again = {}
    for pages in (0, 400):
        groups = [CacheGroup("full", "full", 40, pages)]
        scheduler = Scheduler(SchedulerConfig(4, groups, 64, 8, headroom=0))
        executor = ContentExecutor(scheduler)
        for n in range(8):
            spec = RequestSpec(f"r{n}", [1000 * n + i for i in range(20)], 40)
            executor.submit(spec)
            scheduler.submit([spec])
        ended = []
        for _ in range(2000):
            plan = scheduler.next_plan()
            executor.begin(plan)
            events = list(executor.done()) if plan.batch.ids else []
            events += [executor.land(op, True) for op in list(executor.moving)]
            ended += scheduler.advance(events)
            scheduler.cache.check()
            if len(ended) == 8:
                break
        assert [end.reason for end in ended] == ["length"] * 8 and scheduler.stats()["retractions"] > 0
        again[pages] = sum(end.recomputed for end in ended)
    assert again[400] < again[0] / 2, again


def test_events_of_transfers_that_cannot_be():
    """Unknown, repeated and mistaken acknowledgements raise and change nothing.

    Mutation: `Transfers._over` does not look at the kind.
    """
    run = Hosted("full")
    run.submit("a", 1)
    for _ in range(20):
        run.step(land=False)
    (op,) = run.executor.moving
    for event in (SaveDone(99, True), LoadDone(op, True), SaveDone(op, 1)):
        with pytest.raises(ProtocolError):
            run.scheduler.advance([event])
    run.tell(run.landed())
    with pytest.raises(ProtocolError):
        run.scheduler.advance([SaveDone(op, True)])


def test_l18_nobody_is_retracted_while_pages_wait_for_an_acknowledgement():
    """All that could be evicted is being saved: a plan is empty or short, and nobody is retracted or aborted.

    Mutation: `Pressure.break_deadlock` does not ask whether transfers are under way.
    """
    run = Hosted("full", max_batch_size=1)
    run.submit("a", 1, length=60, new=4)
    for _ in range(10):
        run.step(land=False)
    assert run.ended["a"].reason == "length" and run.executor.moving
    run.submit("b", 2, length=20, new=30)
    for _ in range(25):
        run.step(land=False)
    stats = run.scheduler.stats()
    assert run.rows[-1] == [] and stats["retractions"] == 0 and stats["prefilling"] == 1
    run.tell(run.landed())
    run.idle()
    assert run.ended["b"].reason == "length" and run.ended["b"].recomputed == 0
    assert run.scheduler.stats()["retractions"] == 0


@pytest.mark.parametrize("host", [1, 4, 12, 23])
@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_at_rest_saves_nothing(host, shared):
    """With less host than device memory and `host_policy="evict"`: what the device would lose next is saved, as far as
    host can have it all at once, and then nothing more is; no save pushes out what another has just brought.

    Mutation: `HybridPrefixCache.cold_spans` takes every leaf, whatever host holds.
    """
    groups = [CacheGroup("full", "full", 24, host)]
    scheduler = Scheduler(SchedulerConfig(4, groups, 64, 1, host_policy="evict"))
    executor = ContentExecutor(scheduler)
    for n in range(12):
        head = list(range(8)) if shared else []
        spec = RequestSpec(f"r{n}", head + [1000 * n + i + 50 for i in range(9)], 1)
        executor.submit(spec)
        scheduler.submit([spec])
    quiet = 0
    for _ in range(200):
        plan = scheduler.next_plan()
        quiet = quiet + 1 if plan.empty else 0
        executor.begin(plan)
        events = list(executor.done()) if plan.batch.ids else []
        scheduler.advance(events + [executor.land(op, True) for op in list(executor.moving)])
        scheduler.cache.check()
    assert quiet > 100, f"it still saves: {scheduler.cache.stats()['transfers']}"
    saved = scheduler.cache.stats()["pages"]["full"]["host"]["tree"]
    assert saved or host < 5, "what it was to lose was saved"
