"""Nobody who is ready is passed over for ever, wherever it stands (cases S12, S01, L11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sapwood.scheduler import RequestSpec

from .driver import Run, adapter, each_layout, full, groups_of, toks

MOST = 12
each_overlap = pytest.mark.parametrize("overlap", [0, 1])


class Stream(Run):
    """Requests keep coming. `later` are those that came after `whom` and have had a row."""

    def __init__(self, *groups, **config) -> None:
        super().__init__(*groups, **{"max_overtaken": MOST, "every": 7, **config})
        self.number = 0

    def turn(self) -> list[str]:
        """One plan, and, unless it may run beside the next, the end of the oldest. All transfers arrive."""
        plan = self.plan()
        if self.executor.flights and (not plan.batch.ids or len(self.executor.flights) > self.scheduler.config.overlap):
            self.done()
        self.tell(*[self.executor.land(op, True) for op in list(self.executor.moving)])
        return list(plan.batch.ids)

    def one_more(self, tokens: int = 20, max_tokens: int = 2, **more) -> None:
        self.number += 1
        self.submit(f"s{self.number}", toks(1000 + self.number, tokens), max_tokens, **more)

    def later(self) -> int:
        return len([id for id in self.first_rows() if id.startswith("s")])

    def finish(self) -> None:
        while self.live or self.executor.flights:
            self.turn()
        self.right_answers()


def passed_over(run: Stream, id: str, come, plans: int = 400) -> list[int]:
    """Let others come (`come`) until `id` has ended. Returns, for each of its steps, how many later ones got their
    first row since the one before."""
    gaps, seen, rows = [], run.later(), len(run.rows_by(id))
    for n in range(plans):
        come(n)
        run.turn()
        if len(run.rows_by(id)) > rows:
            gaps.append(run.later() - seen)
            seen, rows = run.later(), len(run.rows_by(id))
        if id not in run.live:
            return gaps
    raise AssertionError(f"{id} has {rows} rows after {plans} plans, {run.later()} later ones have run")


@each_overlap
def test_l11_one_admitted_to_load_is_not_kept_out_by_a_hot_adapter(overlap):
    """`max_loras=1`. Ann's prefix is on host, so she is admitted to load; when it has come, adapter B has rows that end
    at different times, for ever. B gets no new row once she was passed over too often.

    Mutation: `Planner._count_overtaken` looks at those that wait only; `PlanBuilder.give_way_to` does not close the cap
    for one that holds memory.
    """
    run = Stream(replace(full(60), host_pages=100), max_loras=1, overlap=overlap, batch=6, budget=128, headroom=0)
    a, b = adapter("a"), adapter("b")
    prompt = toks(1, 16 * 6)
    run.submit("first", prompt, 2, namespace=a)
    while run.live or run.executor.moving:
        run.turn()
    while (
        run.cache.explain(a, prompt).reason == "hit" and run.cache.match_prefix(run.cache.bind(a), prompt).load is False
    ):
        run.one_more(16 * 20, 2)
        while run.live:
            run.turn()
    for n in range(3):
        run.one_more(20, 4 + n, namespace=b)
    run.turn()
    run.submit("ann", prompt, 3, namespace=a)
    gaps = passed_over(run, "ann", lambda n: run.one_more(20, 3 + n % 4, namespace=b))
    assert gaps[0] <= MOST + 6 + 6
    assert run.ended["ann"].cached >= 80
    run.finish()


@pytest.mark.attack
@each_overlap
@each_layout
@pytest.mark.parametrize("adapters", [False, True])
def test_s12_a_prompt_between_two_chunks_goes_on(layout, adapters, overlap):
    """A less urgent prompt has computed its first chunk; urgent ones keep coming and fill every plan, with and without
    adapters (at most one in a batch).

    Mutation: `Planner._count_overtaken` looks at those that wait only; `Planner._fill` does not begin with the overdue.
    """
    run = Stream(*groups_of(layout, 16, pages=200), budget=64, batch=8, max_loras=int(adapters), overlap=overlap)
    mine, theirs = (adapter("a"), adapter("b")) if adapters else (adapter("x"), adapter("x"))
    run.submit("long", toks(1, 64 * 4), 2, priority=5, namespace=mine)
    run.turn()
    gaps = passed_over(run, "long", lambda n: [run.one_more(60, 3, namespace=theirs) for _ in range(2)])
    assert max(gaps) <= MOST + 8 + 2, gaps
    run.finish()


@each_overlap
def test_s12_several_are_overdue_at_once(overlap):
    """Three less urgent prompts, between two chunks, under a stream that fills every plan: all get on, by arrival.

    Mutation: `Planner._fill` serves the oldest of the overdue alone.
    """
    run = Stream(full(400), budget=64, batch=10, overlap=overlap)
    for n in range(3):
        run.submit(f"long{n}", toks(n, 30), 1, priority=5 - n)
    run.turn()
    for n in range(3, 6):
        run.submit(f"long{n}", toks(n, 150), 2, priority=9 - n)
    for _ in range(120):
        run.one_more(60, 3)
        run.one_more(60, 3)
        run.turn()
        if not any(id.startswith("long") for id in run.live):
            break
    ends = [id for id in run.ended if id.startswith("long")]
    assert ends[-3:] == ["long3", "long4", "long5"]
    run.finish()


@pytest.mark.attack
@each_overlap
@pytest.mark.parametrize("layout", ["full", "full+window", "full+state"])
def test_s12_a_victim_gets_on(layout, overlap):
    """`headroom=0`, host pages, an endless stream of urgent requests: ann is retracted again and again. Once she was
    passed over too often she comes in first, and nobody but an older overdue one takes her memory until she has
    computed something new.

    Mutation: `Pressure.rank` does not look at who is overdue; `Book.admit` sets the count back.
    """
    groups = [replace(group, host_pages=60) for group in groups_of(layout, 4, pages=24, slots=6, windows=40)]
    run = Stream(*groups, page=4, headroom=0, overlap=overlap, budget=64, batch=5)
    run.submit("ann", toks(1, 21), 50, priority=9)
    run.turn()
    gaps = passed_over(run, "ann", lambda n: run.one_more(17, 12, priority=-1), plans=3000)
    assert max(gaps) <= MOST + 5 + 5, gaps
    assert run.ended["ann"].generated == 50
    run.finish()


@each_overlap
def test_s01_nobody_waits_for_one_that_waits_for_a_snapshot(overlap):
    """A model with state: bob waits for the snapshot that ann is making, and is passed over often. Others run then.

    Mutation: `PlanBuilder.serve` counts a request that waits for a snapshot as one that does not fit.
    """
    run = Stream(
        *groups_of("full+state", 16, pages=400, slots=40), overlap=overlap, budget=64, batch=20, max_overtaken=2
    )
    prompt = toks(1, 64 * 8)
    run.submit("ann", prompt, 2)
    run.turn()
    run.submit("bob", [*prompt, 4], 2, priority=-1)
    seen = set()
    for _ in range(6):
        run.one_more(8, 1, priority=-1)
        seen.update(run.turn())
    assert "bob" not in seen and len([id for id in seen if id.startswith("s")]) >= 4
    run.finish()


@each_overlap
def test_l11_base_rows_and_decode_rows_go_on_while_the_gate_is_closed(overlap):
    """Ann waits for a place under the cap: base requests come in, rows that decode with B go on, no new one enters.

    Mutation: `AdapterCap.admits_decoding` looks at `closed` first; `PlanBuilder.serve` holds back requests without an
    adapter.
    """
    run = Stream(full(400), max_loras=1, overlap=overlap, max_overtaken=3, batch=30, budget=400)
    a, b = adapter("a"), adapter("b")
    run.submit("hot", toks(2, 20), 40, namespace=b)
    run.turn()
    run.submit("ann", toks(1, 20), 2, namespace=a)
    for _ in range(3):
        run.one_more(20, 30, namespace=b)
        run.turn()
    while run.executor.flights:
        run.done()
    before = run.later()
    run.one_more(20, 2, namespace=b)
    run.submit("base", toks(3, 20), 2)
    rows = run.turn()
    assert "base" in rows and "hot" in rows and "ann" not in rows and run.later() == before
    run.finish()
    assert run.first_rows().index("ann") < run.first_rows().index("s4")


def test_s12_the_count_is_set_back_by_progress_only():
    """A request that comes in again and computes what it had computed before is still overdue; with the first new
    position it no longer is.

    Mutation: `Request.computes` sets the count back at any progress.
    """
    run = Run(full(60), budget=16, max_overtaken=1)
    run.submit("ann", toks(1, 60), 4, priority=1)
    run.step(2)
    request = run.scheduler._book.requests["ann"]
    request.overtaken = 5
    run.scheduler._book.retract(request)
    run.scheduler.flush()
    counts = []
    while request.done < 32 or not counts:
        run.step()
        counts.append(request.overtaken)
    run.step()
    assert counts[:2] == [5, 5] and request.overtaken == 0
    run.idle().right_answers()


@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
@each_overlap
def test_s12_crowds_of_all_kinds_end(policy, overlap):
    """Priorities, adapters and retractions at once, with a small bound: everybody ends.

    Mutation: two overdue requests retract each other (`Pressure.rank` by priority first).
    """
    groups = groups_of("full+window", 4, pages=30, windows=40)
    run = Stream(*groups, page=4, headroom=0, budget=24, batch=6, max_loras=1, policy=policy, overlap=overlap)
    run.submit_all(
        [
            RequestSpec(f"r{n}", toks(n % 5, 10 + 3 * n), 12, priority=n % 3, namespace=adapter("abc"[n % 3]))
            for n in range(20)
        ]
    )
    for _ in range(3000):
        if not run.live:
            break
        run.turn()
    run.finish()
    assert {end.reason for end in run.ended.values()} == {"length"}
