"""Random traffic and faults against a scheduler, from one seed: everything is checked after every step.

    arrive -> disturb -> plan -> disturb, arrive (in flight) -> done or fail -> check

Even seeds have one plan in flight at a time, odd ones two (`overlap`).

Contents are checked by the executor, invariants by `cache.check()`, and what a request finds by a naive memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sapwood.scheduler import (
    Abort,
    BackupDone,
    Ended,
    Event,
    FetchDone,
    Finish,
    LoadDone,
    LookupDone,
    ProtocolError,
    Refused,
    RequestSpec,
    Scheduler,
    StepDone,
    StepFailed,
    StoreUp,
    Tick,
)

from .content import prefix_digests
from .depot import Depot
from .event_replay import Replay
from .executor import ContentExecutor
from .fuzz_report import FuzzReport, PlanDigest
from .layouts import LAYOUTS
from .oracle import FuzzedRequest, FuzzedRow, FuzzedStep, NaiveMemory
from .traffic import Traffic

_LONGEST = 12  # pages of the longest request where no group sets a limit


def fuzz(seed: int, steps: int, layout: str) -> FuzzReport:
    """Attack a scheduler for `steps` rounds, then let everything come to its end. Everything follows from the seed."""
    if layout in LAYOUTS and LAYOUTS[layout].pair:
        return _run_pair(seed, steps, layout)
    return Fuzz(seed, layout).run(steps)


def _run_pair(seed: int, steps: int, layout: str) -> FuzzReport:
    """Two schedulers, each under an attack of its own, with similar requests and one store between them."""
    one = Fuzz(seed, layout)
    two = Fuzz(seed, layout, one)
    for _ in range(steps):
        for each in (one, two):
            each.arrive()
            each.round()
    return FuzzReport.of_all([each.run(0) for each in (one, two)])


class Fuzz:
    """One scheduler under attack."""

    def __init__(self, seed: int, layout: str, other: Fuzz | None = None) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        self.seed, self.layout = seed, layout
        rng = self.random = random.Random(f"{layout} {seed}" + (" again" if other else ""))
        config = LAYOUTS[layout].config(rng)
        few = (0, 0, 0, config.max_batch_size + 1, max(1, config.max_batch_size // 2))[seed % 5]
        mixed = few if few < config.max_batch_tokens else 0  # tokens in a plan with decode rows
        self.config = replace(config, overlap=seed % 2, mixed_tokens=mixed)
        self.scheduler = Scheduler(self.config)
        self.cache = self.scheduler.cache
        self.depot: Depot = other.depot if other else Depot()
        self.executor = ContentExecutor(self.scheduler, rng.getrandbits(32), depot=self.depot)
        limits = [group.device_pages for group in self.config.groups if group.family == "full"]
        page = self.config.page_size
        self.limit = min(limits) * page if limits else 0
        longest = min(self.limit or 1 << 30, _LONGEST * max(page, 8))
        crowded = not self.config.headroom
        seed = other.traffic.seed if other else rng.getrandbits(32)
        self.traffic: Traffic = Traffic(seed, page, longest, self.executor.double.vocabulary, crowded)
        self.replays = [Replay(self.cache)] + ([Replay(self.cache, "CPU")] if self.cache.has_host else [])

        self.load = rng.choice([0.4, 1.0] if crowded else [0.15, 0.4, 1.0])  # arrivals a round
        self.backlog = rng.choice([10, 25] if crowded else [3, 10, 25])
        self.failing = rng.choice([0.0, 0.0, 0.02, 0.1])
        self.poison = rng.choice([0.0, 0.0, 0.03])
        self.trouble = rng.choice([0.0, 0.05, 0.1 if crowded else 0.3])  # aborts and the like, a round
        self.unloads = rng.choice([0.0, 0.0, 0.01, 0.05])
        self.arriving = rng.choice([0.05, 0.3, 0.9])  # transfers that arrive in a round
        self.losing = rng.choice([0.0, 0.0, 0.2])
        self.hanging = self.lying = 0.0
        if self.config.store:
            self.hanging = rng.choice([0.0, 0.0, 0.05, 0.3])  # of what goes to the store
            self.lying = rng.choice([0.0, 0.0, 0.2])
            self.losing = rng.choice([0.0, 0.05, 0.3])
            self.unloads = rng.choice([0.03, 0.06])  # after it the store alone has some pages
            self.arriving = max(self.arriving, 0.2)
            self.traffic.repeats()
        self.ahead = rng.choice([0.5, 0.9, 1.0])  # how often a plan is made before the one in flight is done
        self.hung: set[int] = set()  # operations that do not come back for now
        self.up = True  # whether the store answers, as the scheduler has it
        self.peace = False  # everything has ended, and no fault is left

        self.live: dict[str, FuzzedRequest] = {}
        stored = other.memory.stored if other else None
        self.memory: NaiveMemory = NaiveMemory(self.executor.double, self.config.store, stored)
        self.in_flight = self.memory.in_flight
        self.digest = PlanDigest(page)
        self.counts = dict.fromkeys(
            (
                "steps",
                "requests",
                "refused",
                "failed_steps",
                "evictions",
                "transfers",
                "cached",
                "computed",
                "recomputed",
                "partial",
            ),
            0,
        )
        self.ended: dict[str, int] = {}

    # ---- the story

    def run(self, steps: int) -> FuzzReport:
        """The whole attack, and the peace after it."""
        for _ in range(steps):
            self.arrive()
            self.round()
        self.drain()
        self.leave_nothing()
        transfers, store = self.cache.stats()["transfers"], self.scheduler.stats()["store"]
        return FuzzReport(
            self.layout,
            self.seed,
            self.digest.hexdigest(),
            ended=self.ended,
            retractions=int(self.cache.stats()["retracted"]),
            events=self.replays[0].count,
            backups=transfers["backups"],
            fetches=transfers["fetches"],
            fetched=transfers["pages_fetched"],
            lost=transfers["fetches_failed"],
            joined=store["joined"],
            shortened=store["shortened"],
            late=store["late"],
            stays=transfers["stays"],
            again=store["offered_again"],
            **self.counts,
        )

    def round(self) -> None:
        """One plan, from its making to its end."""
        self.disturb()
        self.move(self.arriving)
        plan = self.plan()
        if plan.empty and not self.in_flight:
            patient = plan.wake_in and self.scheduler.stats()["fetching"]
            waits = self.executor.moving.keys() - self.hung or plan.ended or patient
            assert not self.live or waits, f"nothing to run and nothing in flight, while {sorted(self.live)} live"
            self.move(0.5)
            if plan.wake_in and self.random.random() < 0.5:
                self.advance([Tick(plan.wake_in)])
            return
        if not plan.empty:
            self.executor.begin(plan)
            self.hang(plan)
            self.counts["steps"] += 1
            if not plan.batch.ids:
                return
        self.move(self.arriving / 2)
        if self.random.random() < 0.3:
            self.disturb()
        if self.random.random() < 0.2:
            self.arrive()
        if len(self.in_flight) <= self.config.overlap:
            if not plan.empty and self.random.random() < self.ahead:
                return
        elif self.random.random() < 0.1:
            again = self.scheduler.next_plan()
            assert again.empty and not again.ended, "a plan more than may be in flight"
        self.finish()

    def move(self, chance: float) -> None:
        """Some transfers arrive, in any order; some of them have failed."""
        rng = self.random
        events: list[Event] = []
        if self.hung and rng.random() < 0.05:
            self.hung.remove(rng.choice(sorted(self.hung)))
        for op in rng.sample(list(self.executor.moving), len(self.executor.moving)):
            if rng.random() < chance and op not in self.hung:
                ok, lying = rng.random() >= self.losing, rng.random() < self.lying
                exchange = self.executor.double.exchanges.get(op)
                event = self.executor.land(op, ok, self.losing / 2, lying)
                events.append(event)
                self.counts["transfers"] += 1
                self.counts["partial"] += bool(
                    exchange and isinstance(event, FetchDone) and 0 < event.pages < len(exchange[1].hashes)
                )
        if self.config.store and rng.random() < 0.3:
            events.append(Tick(rng.choice([0, 1, 2, 20])))
        if self.config.store and not self.peace and rng.random() < (0.01 if self.up else 0.2):
            self.up = not self.up
            events.append(StoreUp(self.up))
        if events:
            self.advance(events)

    def hang(self, plan: Any) -> None:
        """Some operations of the store do not come back; and the store loses something."""
        for operation in [*plan.lookups, *plan.fetches, *plan.backups]:
            if self.random.random() < self.hanging:
                self.hung.add(operation.op)
        if self.config.store and self.random.random() < 0.005:
            self.depot.lose(self.random, self.random.random())

    def drain(self) -> None:
        """No more arrivals and no more faults, but poisonous requests stay what they are. All requests end."""
        self.load = self.failing = self.trouble = self.unloads = 0.0
        todo = sum(r.life.prompt + r.spec.max_tokens for r in self.live.values())
        most = 200 + 20 * todo + 100 * len(self.live)
        rounds = 0
        while self.live or self.in_flight:
            rounds += 1
            assert rounds <= most, f"{len(self.live)} requests do not come to an end in {most} rounds of peace"
            self.round()

    def leave_nothing(self) -> None:
        """After everything has ended nothing is held, and after a flush everything is free."""
        self.hanging, self.losing, self.hung, self.peace = 0.0, 0.0, set(), True
        if not self.up:
            self.up = True
            self.advance([StoreUp(True)])
        for _ in range(1000):  # the longest backlog of backups that failed, a few a plan
            plan = self.plan()
            if not plan.empty:  # what was left to save and to back up
                assert not plan.batch.ids, "rows of nobody"
                self.executor.begin(plan)
            elif not self.executor.moving and plan.wake_in is None:
                break
            self.move(1.0)
            if plan.wake_in:
                self.advance([Tick(plan.wake_in)])
        assert plan.empty and not plan.ended, "a plan for nobody"
        assert not self.scheduler.stats()["store"]["owed"], "the store is well, and was not offered what it lacks"
        stats = self.cache.stats()
        assert not any(stats["staying"].values()), f"pages stay for nobody: {stats['staying']}"
        assert not stats["leases"] and not stats["unhooked"], f"held by nobody: {stats}"
        for name, tiers in stats["pages"].items():
            for pages in tiers.values():
                assert pages["free"] + pages["tree"] == pages["capacity"], f"{name} leaks: {pages}"
        for space in stats["namespaces"]:
            assert not space["bound"], f"somebody is bound to {space['namespace']}, and nobody lives"
        self.scheduler.flush()
        self.check()
        stats = self.cache.stats()
        for name, tiers in stats["pages"].items():
            for pages in tiers.values():
                assert pages["free"] == pages["capacity"], f"{name} leaks: {pages}"
        assert not stats["namespaces"] and not stats["nodes"], f"namespaces stay: {stats['namespaces']}"
        assert not any(replay.held for replay in self.replays), "blocks stay announced after a flush"

    # ---- arrivals

    def arrive(self) -> None:
        rng = self.random
        if len(self.live) >= self.backlog or rng.random() >= self.load:
            return
        specs = self.traffic.arrivals()
        if rng.random() < 0.1:
            self.refuse(specs)
        requests = []
        for spec in specs:
            life = self.executor.submit(spec)
            epoch = self.memory.epoch(spec.namespace)
            requests.append(FuzzedRequest(spec, life, epoch, rng.random() < self.poison))
        self.submit(specs)
        for request in requests:
            self.live[request.spec.id] = request
        self.counts["requests"] += len(specs)

    def submit(self, specs: list[RequestSpec]) -> None:
        """Hand over requests that come together. The plans are the same if they are handed over one by one."""
        self.scheduler.submit(specs)

    def refuse(self, specs: list[RequestSpec]) -> None:
        """One bad request in a list refuses the list and changes nothing."""
        most = self.limit + 1 if 2 < self.limit < 1 << 14 else 0
        fields = self.traffic.refusable(list(self.live), most)
        before = self.cache.stats()
        at = self.random.randint(0, len(specs))
        try:
            self.scheduler.submit([*specs[:at], RequestSpec(**fields), *specs[at:]])
        except Refused as refusal:
            assert refusal.id == fields["id"] and refusal.reason, f"{fields} was refused as {refusal}"
        else:
            raise AssertionError(f"{fields} was not refused")
        assert self.cache.stats() == before, "a refused list changed something"
        self.counts["refused"] += 1

    # ---- faults

    def disturb(self) -> None:
        """What may happen at any time: aborts, ends, late and unknown events, namespaces that go."""
        rng = self.random
        if rng.random() < self.trouble:
            self.advance(self.interruptions())
        if rng.random() < self.unloads:
            self.evict()
        if rng.random() < 0.02:
            self.mistake()
        if rng.random() < 0.05:
            self.ask()

    def interruptions(self) -> list[Event]:
        """Aborts and finishes: of one request, of several, of all, of some that have ended or never were."""
        rng = self.random
        events: list[Event] = []
        ids = list(self.live)
        much = len(ids) if rng.random() < 0.03 else rng.choice([1, 1, 2])
        for id in rng.sample(ids, min(much, len(ids))):
            if self.live[id].life.generated and rng.random() < 0.5:  # there is a token: it can finish
                events.append(Finish(id))
                self.live[id].asked.append("finish")
            else:
                events.append(Abort(id))
                self.live[id].asked.append("abort")
            if rng.random() < 0.1:
                events.append(Abort(id))
                self.live[id].asked.append("abort")
        if rng.random() < 0.2:
            events.append(Abort("nobody") if rng.random() < 0.5 else Finish("nobody"))
        if rng.random() < 0.1:
            events.append(Tick(rng.randint(1, 3)))
        return events

    def evict(self) -> None:
        """An adapter is unloaded (and may come again), or everything is flushed."""
        rng = self.random
        self.counts["evictions"] += 1
        if self.cache.has_host:
            for request in self.live.values():  # what it was admitted to load it gets, though its namespace goes
                if self.memory.is_current(request) and request.spec.reads_cache:
                    request.held = self.memory.remembered(request.spec.namespace, self.memory.digests(request))
        if rng.random() < 0.3:
            self.scheduler.flush()
            gone = list(self.traffic.spaces)
        else:
            gone = [rng.choice(self.traffic.spaces)]
            self.scheduler.evict_namespace(gone[0])
        self.memory.evict(gone)
        self.check()

    def mistake(self) -> None:
        """Events that cannot happen raise, and change nothing."""
        runs = [flight.plan.step for flight in self.executor.flights]
        step = (self.executor.step or 0) + self.random.choice([1, 7] if runs else [-1, 1, 7])
        op = max([0, *self.executor.moving]) + self.random.choice([100, 10_000])
        wrong: list[Event] = [StepDone(step, {}), StepFailed(step, "mistake"), LoadDone(op, True)]
        if self.config.store:
            wrong += [LookupDone(op, 1), FetchDone(op, True, 1), BackupDone(op, True)]
        event = self.random.choice(wrong)
        before = self.cache.stats()
        try:
            self.scheduler.advance([event])
        except ProtocolError:
            pass
        else:
            raise AssertionError(f"{event} cannot happen, and raised nothing")
        assert self.cache.stats() == before, f"{event} changed something"

    def ask(self) -> None:
        """Questions change nothing, and promise nothing that was not computed."""
        spec = self.random.choice(list(self.live.values())).spec if self.live else None
        self.scheduler.stats()
        if spec is None:
            return
        tokens = self.live[spec.id].life.known
        before = self.cache.stats()
        found = self.cache.explain(spec.namespace, tokens)
        assert self.cache.stats() == before, "explain changed something"
        most = self.memory.remembered(spec.namespace, prefix_digests(spec.namespace, tokens))
        assert found.cached <= most, f"explain promises {found.cached} tokens, {most} were computed"

    # ---- plans and their ends

    def plan(self) -> Any:
        plan = self.scheduler.next_plan()
        self.digest.add_plan(plan)
        if plan.empty:
            assert not (plan.copies or plan.loads or plan.saves or plan.lookups or plan.fetches or plan.backups), (
                "an empty plan with something to do"
            )
        else:
            rows = []
            for id, start, length in zip(plan.batch.ids, plan.batch.starts, plan.batch.lengths, strict=True):
                assert id in self.live, f"step {plan.step} has a row of {id}, which is not live"
                rows.append(FuzzedRow(self.live[id], int(start), int(length)))
            if rows:
                self.in_flight.append(FuzzedStep(rows))
            for row in rows:
                self.memory.row_begins(row.request, row.start)
        self.close(plan.ended)
        self.check()
        return plan

    def finish(self) -> None:
        """The oldest plan in flight is done, or it fails. Some events come with its own, before it or after it."""
        rng = self.random
        flight = self.in_flight[0]
        rows = [row.request for row in flight.rows]
        before: list[Event] = []
        after: list[Event] = []
        if rng.random() < self.trouble / 2:
            before = self.interruptions()
            for event in before:
                if isinstance(event, (Abort, Finish)) and event.id in self.live:
                    life = self.live[event.id].life
                    self.live[event.id].final = (len(life.generated), life.work)
        poisoned = any(row.poisonous for row in rows)
        reports: Sequence[StepDone | StepFailed]
        if flight.doomed:  # a step before it has failed: it counts for nothing, whatever its event says
            reports = self.executor.fail("too late") if rng.random() < 0.5 else self.executor.done()
        elif poisoned or rng.random() < self.failing:
            failed = self.executor.fail("poison" if poisoned else "bad luck")
            if rng.random() < 0.3:
                named = [row.spec.id for row in rows if (row.poisonous if poisoned else rng.random() < 0.5)]
                failed = [replace(failed[0], culprits=(*named, "nobody"))]
            reports = failed
            self.counts["failed_steps"] += 1
            for later in self.in_flight:
                later.doomed = True
            for row in rows:
                row.failed += 1
                row.alone = len(rows) == 1
                most = 8 * (self.config.max_tries + self.config.max_batch_size)
                assert not row.poisonous or row.failed <= most, f"{row.spec.id} has failed {row.failed} times"
        else:
            reports = self.executor.done()
            self.memory.step_done(flight)
        del self.in_flight[0]
        if rng.random() < self.trouble / 2:
            after = self.interruptions()
        self.advance([*before, *reports, *after])
        for row in rows:
            if self.live.get(row.spec.id) is row:
                assert not row.verdict, f"{row.spec.id} should have ended: {row.verdict}"

    def advance(self, events: list[Event]) -> None:
        self.close(self.scheduler.advance(events))
        self.check()

    def close(self, ended: list[Ended]) -> None:
        """Requests end once, for a reason that is true."""
        for end in ended:
            self.digest.add_end(end)
            assert end.id in self.live, f"{end} of a request that is not live"
            request = self.live.pop(end.id)
            self.ended[end.reason] = self.ended.get(end.reason, 0) + 1
            for count in ("cached", "computed", "recomputed"):
                self.counts[count] += getattr(end, count)
            self.traffic.ended(request.spec, list(request.life.known), end.reason in ("stop", "length", "finish"))
            request.check_end(end, self.config.max_tries, self.executor.double.vocabulary)

    # ---- after every step

    def check(self) -> None:
        self.cache.check()
        old = not all(map(self.memory.is_current, self.live.values()))
        under_way = self.scheduler.stats()
        waiting = under_way["waiting"] + under_way["fetching"]
        assert under_way["store"]["staying"] <= waiting, "pages stay on host for somebody who does not wait"
        if not self.in_flight and not old and not under_way["transfers"] and not under_way["store"]["backing"]:
            stats = self.cache.stats()
            held = sum(tiers["device"]["unhooked"] for tiers in stats["pages"].values())
            assert not held and not stats["unhooked"], f"{held} pages of evicted namespaces that nobody needs are held"
        events = self.scheduler.drain_events()
        if self.config.events:
            for replay in self.replays:
                replay.hear(events)
                if not self.in_flight:
                    replay.compare()
        else:
            assert not events, "events, and nobody wants them"
