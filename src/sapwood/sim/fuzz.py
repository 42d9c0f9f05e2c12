"""Random traffic and faults against a scheduler, from one seed: everything is checked after every step.

    arrive -> disturb -> plan -> disturb, arrive (in flight) -> done or fail -> check

Even seeds have one plan in flight at a time, odd ones two (`overlap`).

Contents are checked by the executor, invariants by `cache.check()`, and beside them stands a naive memory: a set of
every prefix that was computed in each namespace since it was last evicted (with a store: ever, by anybody).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from sapwood.cache import Namespace
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

from .content import Digests, prefix_digests
from .depot import Depot
from .executor import ContentExecutor, Life, batch_bytes
from .layouts import LAYOUTS
from .replay import Replay
from .traffic import Traffic

_LONGEST = 12  # pages of the longest request where no group sets a limit


@dataclass(frozen=True)
class FuzzReport:
    """What happened, by number. `digest` is of every plan and every end."""

    layout: str
    seed: int
    digest: str
    steps: int  # plans with rows
    requests: int
    refused: int
    ended: dict[str, int]  # by reason
    retractions: int
    failed_steps: int
    evictions: int  # of namespaces, flushes included
    transfers: int
    cached: int
    computed: int
    recomputed: int
    events: int
    backups: int = 0
    fetches: int = 0  # begun
    fetched: int = 0  # pages from the store that were of use
    joined: int = 0  # requests that waited for what another had asked for
    shortened: int = 0  # fetches cut to what host could take
    partial: int = 0  # fetches of which a part came
    lost: int = 0  # ... and nothing that was of use
    late: int = 0  # deadlines that passed
    stays: int = 0  # what was fetched, held on host for one that waits
    again: int = 0  # backups of what the store had not kept

    def __str__(self) -> str:
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(self.ended.items()))
        return (
            f"{self.digest[:16]}  {self.layout}, seed {self.seed}: {self.steps} steps ({self.failed_steps} failed), "
            f"{self.requests} requests ({ends}; {self.refused} refused), {self.retractions} retractions, "
            f"{self.evictions} evictions of namespaces, {self.transfers} transfers, {self.events} events, "
            f"{self.backups} backups ({self.again} again), "
            f"{self.fetches} fetches ({self.fetched} pages; {self.joined} joined, "
            f"{self.shortened} shortened, {self.partial} in part, {self.lost} lost), {self.stays} stays, "
            f"{self.late} deadlines missed, "
            f"prompt tokens {self.cached} cached, {self.computed} computed, {self.recomputed} again"
        )


@dataclass
class _Request:
    """A live request as the driver knows it."""

    spec: RequestSpec
    life: Life
    epoch: int  # of its namespace when it came
    poisonous: bool
    asked: list[str] = field(default_factory=list)  # "abort", "finish": what we have told the scheduler
    held: int = 0  # how much of it was real in the cache when one of its rows began there
    failed: int = 0  # steps with a row of it that failed
    alone: bool = False  # the last of them had no other row
    final: tuple[int, int] | None = None  # tokens and work it had when it was ended, if a step was done just after


class _Row(NamedTuple):
    request: _Request
    start: int
    length: int


@dataclass
class _FuzzedStep:
    rows: list[_Row]
    doomed: bool = False


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
    reports = [each.run(0) for each in (one, two)]
    ended = {reason: sum(r.ended.get(reason, 0) for r in reports) for reason in {**one.ended, **two.ended}}
    numbers = {
        name.name: sum(getattr(r, name.name) for r in reports)
        for name in fields(FuzzReport)
        if name.name not in ("layout", "seed", "digest", "ended")
    }
    digest = hashlib.sha256(" ".join(r.digest for r in reports).encode()).hexdigest()
    return replace(reports[0], digest=digest, ended=ended, **numbers)


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
        self.depot = other.depot if other else Depot()
        self.executor = ContentExecutor(self.scheduler, rng.getrandbits(32), depot=self.depot)
        limits = [group.device_pages for group in self.config.groups if group.family == "full"]
        page = self.config.page_size
        self.limit = min(limits) * page if limits else 0
        longest = min(self.limit or 1 << 30, _LONGEST * max(page, 8))
        crowded = not self.config.headroom
        traffic = other.traffic.seed if other else rng.getrandbits(32)
        self.traffic = Traffic(traffic, page, longest, self.executor.double.vocabulary, crowded)
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
            self.unloads = rng.choice([0.03, 0.06])  # after it the store has what nobody else has
            self.arriving = max(self.arriving, 0.2)
            self.traffic.repeats()
        self.ahead = rng.choice([0.5, 0.9, 1.0])  # how often a plan is made before the one in flight is done
        self.hung: set[int] = set()  # operations that do not come back for now
        self.up = True  # the store, as the scheduler was told
        self.peace = False  # everything has ended, and no fault is left

        self.live: dict[str, _Request] = {}
        self.epochs: dict[Namespace, int] = {}
        self.memory: dict[Namespace, set[int]] = {}  # digests of every prefix computed in this epoch
        self.stored: dict[Namespace, set[int]] = other.stored if other else {}  # ... that a store may have
        self.flying: list[_FuzzedStep] = []  # plans with rows that are out, oldest first
        self.digest = hashlib.sha256()
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
        if plan.empty and not self.flying:
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
        if len(self.flying) <= self.config.overlap:
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
        """No more arrivals and no more faults, but poisonous requests stay what they are. Everybody gets to an end."""
        self.load = self.failing = self.trouble = self.unloads = 0.0
        todo = sum(r.life.prompt + r.spec.max_tokens for r in self.live.values())
        most = 200 + 20 * todo + 100 * len(self.live)
        rounds = 0
        while self.live or self.flying:
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
            epoch = self.epochs.get(spec.namespace, 0)
            requests.append(_Request(spec, life, epoch, rng.random() < self.poison))
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
        """Aborts and finishes: of one, of several, of everybody, of those that have ended or never were."""
        rng = self.random
        events: list[Event] = []
        ids = list(self.live)
        much = len(ids) if rng.random() < 0.03 else rng.choice([1, 1, 2])
        for id in rng.sample(ids, min(much, len(ids))):
            if self.live[id].life.generated and rng.random() < 0.5:  # only who has yielded a token can be finished
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
                if request.epoch == self.epochs.get(request.spec.namespace, 0) and request.spec.reads_cache:
                    request.held = self.remembered(request.spec.namespace, self.digests(request))
        if rng.random() < 0.3:
            self.scheduler.flush()
            gone = list(self.traffic.spaces)
        else:
            gone = [rng.choice(self.traffic.spaces)]
            self.scheduler.evict_namespace(gone[0])
        for namespace in gone:
            self.epochs[namespace] = self.epochs.get(namespace, 0) + 1
            self.memory.pop(namespace, None)
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
        """Questions change nothing, and promise nothing that nobody has computed."""
        spec = self.random.choice(list(self.live.values())).spec if self.live else None
        self.scheduler.stats()
        if spec is None:
            return
        tokens = self.live[spec.id].life.known
        before = self.cache.stats()
        found = self.cache.explain(spec.namespace, tokens)
        assert self.cache.stats() == before, "explain changed something"
        most = self.remembered(spec.namespace, prefix_digests(spec.namespace, tokens))
        assert found.cached <= most, f"explain promises {found.cached} tokens, {most} were computed"

    # ---- plans and their ends

    def plan(self) -> Any:
        plan = self.scheduler.next_plan()
        self.write_down(plan)
        if plan.empty:
            assert not (plan.copies or plan.loads or plan.saves or plan.lookups or plan.fetches or plan.backups), (
                "an empty plan with something to do"
            )
        else:
            rows = []
            for id, start, length in zip(plan.batch.ids, plan.batch.starts, plan.batch.lengths, strict=True):
                assert id in self.live, f"step {plan.step} has a row of {id}, which is not live"
                rows.append(_Row(self.live[id], int(start), int(length)))
            if rows:
                self.flying.append(_FuzzedStep(rows))
            for row in rows:
                self.believe(row.request, row.start)
        self.close(plan.ended)
        self.check()
        return plan

    def finish(self) -> None:
        """The oldest plan in flight is done, or it fails. Some events come with its own, before it or after it."""
        rng = self.random
        flight = self.flying[0]
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
        if flight.doomed:  # a step before it has failed: it counts for nothing, whatever it says
            told = self.executor.fail("too late") if rng.random() < 0.5 else self.executor.done()
        elif poisoned or rng.random() < self.failing:
            told = self.executor.fail("poison" if poisoned else "bad luck")
            if rng.random() < 0.3:
                named = [row.spec.id for row in rows if (row.poisonous if poisoned else rng.random() < 0.5)]
                told = [replace(told[0], culprits=(*named, "nobody"))]
            self.counts["failed_steps"] += 1
            for later in self.flying:
                later.doomed = True
            for row in rows:
                row.failed += 1
                row.alone = len(rows) == 1
                most = 8 * (self.config.max_tries + self.config.max_batch_size)
                assert not row.poisonous or row.failed <= most, f"{row.spec.id} has failed {row.failed} times"
        else:
            told = self.executor.done()
            for one in flight.rows:
                namespace, digests = one.request.spec.namespace, self.promises(one)
                self.memory.setdefault(namespace, set()).update(digests)
                if self.config.store:
                    self.stored.setdefault(namespace, set()).update(digests)
            self.keep(flight)
        del self.flying[0]
        if rng.random() < self.trouble / 2:
            after = self.interruptions()
        self.advance([*before, *told, *after])
        for row in rows:
            if self.live.get(row.spec.id) is row:
                assert not self.verdict(row), f"{row.spec.id} should have ended: {self.verdict(row)}"

    def advance(self, events: list[Event]) -> None:
        self.close(self.scheduler.advance(events))
        self.check()

    def close(self, ended: list[Ended]) -> None:
        """Requests end once, for a reason that is true."""
        for end in ended:
            self.digest.update(repr(end).encode())
            assert end.id in self.live, f"{end} of a request that is not live"
            request = self.live.pop(end.id)
            spec, life = request.spec, request.life
            self.ended[end.reason] = self.ended.get(end.reason, 0) + 1
            for count in ("cached", "computed", "recomputed"):
                self.counts[count] += getattr(end, count)
            self.traffic.ended(spec, list(life.known), end.reason in ("stop", "length", "finish"))

            generated, work = request.final or (len(life.generated), life.work)
            assert end.prompt == life.prompt and end.generated == generated, f"{end}: {generated} were generated"
            assert min(end.cached, end.computed, end.recomputed) >= 0, f"{end}"
            if end.generated:
                assert end.cached + end.computed == end.prompt, f"{end}: does not add up"
            decoded = max(0, end.generated - 1)
            assert end.computed + end.recomputed + decoded == work, f"{end}: it has computed {work} positions"
            assert not (life.steady and end.recomputed), f"{end}: computed again, and nothing had failed"
            assert spec.reads_cache or not end.cached, f"{end}: reads nothing from the cache"
            verdict = self.verdict(request)
            if end.reason in ("stop", "length"):
                assert end.reason == verdict, f"{end}: {verdict or 'not yet'}"
            elif end.reason in ("abort", "finish"):
                assert end.reason in request.asked, f"{end}: nobody asked for that"
            else:
                assert end.reason == "failed" and request.failed >= self.config.max_tries, f"{end}: {request.failed}"
                assert request.alone, f"{end}: others were in the step that failed"
            self.same_output(request)

    def verdict(self, request: _Request) -> str:
        """Why a request is over by what it has generated; "" if it is not."""
        spec, generated = request.spec, request.life.generated
        if generated and len(generated) >= spec.min_tokens and generated[-1] in spec.eos:
            return "stop"
        return "length" if len(generated) >= spec.max_tokens else ""

    def same_output(self, request: _Request) -> None:
        """What it generated follows from its tokens alone: not from sharing, retraction or failures."""
        life, spec = request.life, request.spec
        digests = prefix_digests(life.namespace, life.known)
        drawn = (digests % np.uint64(self.executor.double.vocabulary)).tolist()
        assert life.generated == drawn[life.prompt - 1 : -1], f"{spec.id}: generated something else"
        early = [at for at, token in enumerate(life.generated, 1) if token in spec.eos and at >= spec.min_tokens]
        assert not early or early[0] == len(life.generated), f"{spec.id}: went on after its end"

    # ---- the naive memory

    def promises(self, row: _Row) -> list[int]:
        """What a row in flight computes may be read by rows of its own and of later plans, and by others once it is
        done. Of tokens that are not known yet nothing can be read."""
        request = row.request
        return self.shows(row) if request.epoch == self.epochs.get(request.spec.namespace, 0) else []

    def shows(self, row: _Row) -> list[int]:
        """What a row computes for all who share its root."""
        if not row.request.spec.writes_cache:
            return []
        digests: list[int] = self.digests(row.request)[row.start : row.start + row.length].tolist()
        return digests

    def keep(self, done: _FuzzedStep) -> None:
        """Rows of later plans began on what this one promised. It is real now, and theirs: should their own step fail
        they go on from there, even if their namespace is evicted meanwhile."""
        for row in [row for later in self.flying if later is not done for row in later.rows]:
            request = row.request
            root = (request.spec.namespace, request.epoch)
            same = [one for one in done.rows if (one.request.spec.namespace, one.request.epoch) == root]
            real = {value for one in same for value in self.shows(one)}
            begun = enumerate(self.digests(request)[: row.start].tolist(), 1)
            request.held = max([request.held, *(at for at, value in begun if value in real)])

    def believe(self, request: _Request, start: int) -> None:
        """A row that begins beyond what its request has computed found the rest in the cache; somebody of its namespace
        must have computed it, since the namespace was last evicted."""
        life, space = request.life, request.spec.namespace
        if start <= max(life.end if life.flying else life.real, request.held):
            return
        assert request.spec.reads_cache, f"{request.spec.id}: starts at {start}, and reads nothing from the cache"
        assert request.epoch == self.epochs.get(space, 0), f"{request.spec.id}: adopts in a namespace that was evicted"
        digests = self.digests(request)[:start]
        most = self.remembered(space, digests)
        assert most == start, f"{request.spec.id}: starts at {start}, {most} tokens were computed"
        real = self.memory.get(space, set()) | self.stored.get(space, set())
        request.held = max([at for at, value in enumerate(digests.tolist(), 1) if value in real], default=0)

    def remembered(self, space: Namespace, digests: Digests) -> int:
        """How many tokens from the start somebody has computed, or the plan in flight will have."""
        memory, stored = self.memory.get(space, ()), self.stored.get(space, ())
        rows = [row for flight in self.flying if not flight.doomed for row in flight.rows]
        promised = {value for row in rows if row.request.spec.namespace == space for value in self.promises(row)}
        known = [
            at
            for at, value in enumerate(digests.tolist(), 1)
            if value in memory or value in promised or value in stored
        ]
        return known[-1] if known else 0

    def digests(self, request: _Request) -> Digests:
        return self.executor.double.requests[request.life.name].digests

    # ---- after every step

    def check(self) -> None:
        self.cache.check()
        old = any(r.epoch != self.epochs.get(r.spec.namespace, 0) for r in self.live.values())
        under_way = self.scheduler.stats()
        waiting = under_way["waiting"] + under_way["fetching"]
        assert under_way["store"]["staying"] <= waiting, "pages stay on host for somebody who does not wait"
        if not self.flying and not old and not under_way["transfers"] and not under_way["store"]["backing"]:
            stats = self.cache.stats()
            held = sum(tiers["device"]["unhooked"] for tiers in stats["pages"].values())
            assert not held and not stats["unhooked"], f"{held} pages of evicted namespaces that nobody needs are held"
        events = self.scheduler.drain_events()
        if self.config.events:
            for replay in self.replays:
                replay.hear(events)
                if not self.flying:
                    replay.compare()
        else:
            assert not events, "events, and nobody wants them"

    def write_down(self, plan: Any) -> None:
        """Every byte of a plan goes into the digest."""
        say = self.digest.update
        say(f"plan {plan.step} {plan.wake_in} {plan.copies!r} {plan.ended!r}".encode())
        for operation in [*plan.loads, *plan.saves]:
            say(f"{operation.op} {operation.start_page} {operation.namespace!r}".encode())
            for name, (sources, targets) in operation.pages.items():
                say(name.encode() + sources.tobytes() + targets.tobytes())
        for operation in [*plan.lookups, *plan.fetches, *plan.backups]:
            say(f"{operation.op} {operation.start_page} {operation.namespace!r}".encode() + b"".join(operation.hashes))
        for operation in [*plan.fetches, *plan.backups]:
            for name, pages in operation.pages.items():
                say(name.encode() + pages.tobytes())
        if plan.empty:
            return
        batch = plan.batch
        say(batch_bytes(batch))
        ends = np.asarray(batch.starts) + np.asarray(batch.lengths)
        for name in sorted(plan.tables):
            table = plan.tables[name]
            for slot, end in zip(np.asarray(batch.slots).tolist(), ends.tolist(), strict=True):
                columns = min(table.shape[1], -(-end // self.config.page_size))
                say(np.ascontiguousarray(table[slot][:columns]).tobytes())
