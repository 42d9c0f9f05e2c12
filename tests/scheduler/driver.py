"""A scheduler with the content-checking executor as its hands: what the tests of the scheduler tell their stories with.

`LoadResult` looks at everything after every step: the cache's invariants, the contents of every page that is read (the
executor does), that the tables a plan shows equal what the leases hold, and that every request ends once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import Abort, Ended, Plan, RequestSpec, Scheduler, SchedulerConfig
from sapwood.sim.content import prefix_digests
from sapwood.sim.executor import ContentExecutor, Life

from ..cache.driver import BASE, full, state, toks, window

__all__ = [
    "BASE",
    "LAYOUTS",
    "Row",
    "Run",
    "adapter",
    "answer",
    "each_layout",
    "each_page",
    "full",
    "groups_of",
    "has_state",
    "state",
    "toks",
    "wide",
    "window",
]

LAYOUTS = {
    "full": ("full",),
    "window": ("wide",),
    "full+window": ("full", "wide"),
    "full+state": ("full", "state"),
    "full+2windows+state": ("full", "wide", "narrow", "state"),
    "window+state": ("wide", "state"),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_page = pytest.mark.parametrize("page", [1, 16, 64])


def wide(page: int) -> int:
    return 2 * page + page // 2 + 1


def narrow(page: int) -> int:
    return page // 2 + 2


def groups_of(layout: str, page: int, pages: int = 64, slots: int = 32, windows: int | None = None) -> list[CacheGroup]:
    """The groups of a layout, with `pages` pages (`windows` in window groups) and `slots` slots."""
    made = {
        "full": full(pages),
        "wide": window(wide(page), windows or pages, name="wide"),
        "narrow": window(narrow(page), windows or pages, name="narrow"),
        "state": state(slots),
    }
    return [made[name] for name in LAYOUTS[layout]]


def has_state(layout: str) -> bool:
    return "state" in LAYOUTS[layout]


def adapter(name: str) -> Namespace:
    return Namespace(adapter=name.encode().ljust(32, b"."))


def answer(namespace: Namespace, prompt: Sequence[int], n: int, vocabulary: int = 97) -> list[int]:
    """What the executor's "model" says to a prompt: it follows from namespace and tokens alone, so it is what a
    request must yield with no sharing, no retraction and no failure as with all of them."""
    known = list(prompt)
    for _ in range(n):
        known.append(int(prefix_digests(namespace, known)[-1] % np.uint64(vocabulary)))
    return known[len(prompt) :]


class Row(NamedTuple):
    """One row of one plan."""

    id: str
    start: int
    length: int
    cached: int
    samples: bool
    slot: int


class Run:
    """One scheduler from its first request to its last. Long stories check the invariants `every` few events only."""

    def __init__(
        self, *groups: CacheGroup, page: int = 16, budget: int = 1 << 14, batch: int = 64, every: int = 1, **config
    ) -> None:
        self.scheduler = Scheduler(SchedulerConfig(page, groups, budget, batch, **config))
        self.executor = ContentExecutor(self.scheduler)
        self.cache = self.scheduler.cache
        self.page = page
        self.every = every
        self.looks = 0
        self.lives: dict[str, Life] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.live: set[str] = set()
        self.ended: dict[str, Ended] = {}
        self.plans: list[Plan] = []  # those with a step
        self.rows: list[list[Row]] = []  # theirs

    # ---- what a test says

    def submit(self, id: str, tokens, max_tokens: int = 1, **more) -> Life:
        (life,) = self.submit_all([RequestSpec(id, tokens, max_tokens, **more)])
        return life

    def submit_all(self, specs: Sequence[RequestSpec]) -> list[Life]:
        """Several at once, as one call."""
        self.scheduler.submit(specs)
        for spec in specs:
            self.lives[spec.id], self.specs[spec.id] = self.executor.submit(spec), spec
            self.live.add(spec.id)
        self.check()
        return [self.lives[spec.id] for spec in specs]

    def plan(self) -> Plan:
        """The next plan goes out. It is in flight until `done` or `fail`."""
        plan = self.scheduler.next_plan()
        self.executor.begin(plan)
        self._close(plan.ended)
        self.check()
        if not plan.empty:
            self._tables_equal_leases(plan)
            self.plans.append(plan)
            self.rows.append(rows_of(plan))
        return plan

    def done(self) -> list[Ended]:
        """The plan in flight is done."""
        return self.tell(*self.executor.done())

    def fail(self, reason: str = "bad luck") -> list[Ended]:
        return self.tell(*self.executor.fail(reason))

    def tell(self, *events) -> list[Ended]:
        ended = self.scheduler.advance(list(events))
        self._close(ended)
        self.check()
        return ended

    def abort(self, id: str) -> Ended:
        (end,) = self.tell(Abort(id))
        return end

    def step(self, times: int = 1) -> list[Row]:
        """Whole steps. Returns the rows of the last."""
        for _ in range(times):
            assert not self.plan().empty, f"nothing to run, while {sorted(self.live)} live"
            self.done()
        return self.rows[-1]

    def until(self, *ids: str) -> None:
        """Go on until these have ended."""
        for _ in range(20_000):
            if not self.live & set(ids):
                return
            self.step()
        raise AssertionError(f"{sorted(self.live & set(ids))} do not end")

    def idle(self) -> Run:
        """Go on until nobody is left; then all memory is free or in the tree."""
        self.until(*self.live)
        assert self.scheduler.next_plan().empty
        self.cache.check()
        for name, tiers in self.cache.stats()["pages"].items():
            pages = tiers["device"]
            assert pages["free"] + pages["tree"] == pages["capacity"], f"{name} leaks: {pages}"
        return self

    def run(self, id: str, tokens, max_tokens: int = 1, **more) -> Ended:
        """One request from its submission to its end."""
        self.submit(id, tokens, max_tokens, **more)
        self.until(id)
        return self.ended[id]

    def all_free(self) -> None:
        """Everything is over; forget it all, and every page of every group is free."""
        self.idle()
        self.scheduler.flush()
        self.cache.check()
        assert self.owned("free") == {g.name: g.device_pages for g in self.cache.groups}, "something leaks"

    # ---- what a test asks

    def said(self, id: str) -> list[int]:
        """What a request has yielded."""
        return self.lives[id].generated

    def known(self, id: str) -> list[int]:
        """Its prompt and what it has yielded."""
        return list(self.lives[id].known)

    def owned(self, owner: str) -> dict[str, int]:
        """Device pages by group that are "free", in the "tree", of "leases", in "flight" or "unhooked"."""
        return {name: tiers["device"][owner] for name, tiers in self.cache.stats()["pages"].items()}

    def used(self) -> dict[str, int]:
        return {name: t["device"]["capacity"] - t["device"]["free"] for name, t in self.cache.stats()["pages"].items()}

    def computed(self) -> int:
        """Prompt tokens that requests which have ended computed, once each."""
        return sum(end.computed for end in self.ended.values())

    def recomputed(self) -> int:
        return sum(end.recomputed for end in self.ended.values())

    def first_rows(self) -> list[str]:
        """Ids in the order in which they first had a row."""
        return list(dict.fromkeys(row.id for rows in self.rows for row in rows))

    def rows_by(self, id: str) -> list[Row]:
        return [row for rows in self.rows for row in rows if row.id == id]

    def table(self, id: str, group: str) -> np.ndarray:
        """The pages of a live request as the last plan shows them, without the zeros at its end."""
        row = self.plans[-1].tables[group][self.rows_by(id)[-1].slot]
        return np.trim_zeros(row, "b").copy()

    # ---- what always holds

    def check(self) -> None:
        self.looks += 1
        if self.looks % self.every == 0:
            self.cache.check()

    def right_answers(self) -> Run:
        """Everybody that was not aborted or given up has yielded what it must, to the last token."""
        for id, end in self.ended.items():
            spec, life = self.specs[id], self.lives[id]
            want = answer(spec.namespace, life.known[: life.prompt], len(life.generated))
            assert life.generated == want, f"{id} yields something else"
            if end.reason == "length":
                assert len(life.generated) == spec.max_tokens
        return self

    def _tables_equal_leases(self, plan: Plan) -> None:
        """F16: what the executor sees is what the leases hold, in every group."""
        book = self.scheduler._book
        leases = {request.id: lease for lease, request in book.owners.items()}
        for row in rows_of(plan):
            for group in self.cache.groups:
                seen = plan.tables[group.name][row.slot]
                held = self.cache.table(leases[row.id], group.name)
                assert np.array_equal(seen[: len(held)], held) and not seen[len(held) :].any(), (
                    f"step {plan.step}: {row.id}: {group.name}: the plan shows {np.trim_zeros(seen, 'b')}, "
                    f"the lease holds {held}"
                )

    def _close(self, ended: list[Ended]) -> None:
        for end in ended:
            assert end.id in self.live, f"{end} of a request that is not live"
            self.live.remove(end.id)
            self.ended[end.id] = end
            if end.generated:
                assert end.cached + end.computed == end.prompt, f"{end}: does not add up"


def rows_of(plan: Plan) -> list[Row]:
    batch = plan.batch
    columns = (batch.ids, batch.starts.tolist(), batch.lengths.tolist(), batch.cached.tolist())
    return [Row(*row) for row in zip(*columns, batch.samples.tolist(), batch.slots.tolist(), strict=True)]
