"""Who runs next (cases S01 to S03): arrival, priority, the token budget, pressure, policies."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sapwood.scheduler import Abort, RequestSpec, register_policy
from sapwood.scheduler.policy import POLICIES

from .driver import Run, each_layout, each_page, full, groups_of, has_state, toks, wide

# ---- S01


@each_layout
def test_s01_first_come_first_served_within_a_priority(layout):
    """Requests come in by priority, then arrival, whether they were submitted together or apart.

    Mutation: `Request.key` without the arrival, or without the priority.
    """
    run = Run(*groups_of(layout, 16), budget=40)
    run.submit_all([RequestSpec(f"a{n}", toks(n, 40), 2, priority=n % 2) for n in range(6)])
    for n in range(6, 9):
        run.submit(f"a{n}", toks(n, 40), 2, priority=n % 2)
    run.idle().right_answers()
    assert run.first_rows() == ["a0", "a2", "a4", "a6", "a8", "a1", "a3", "a5", "a7"]


def test_s01_who_came_first_computes_first():
    """A prompt that holds memory goes on before anybody new of its priority comes in; a more urgent one goes before it.

    Mutation: `Planner._fill` looks at those that wait before those that hold memory.
    """
    run = Run(full(), budget=32)
    run.submit("long", toks(1, 100), 1)
    run.step()
    run.submit("next", toks(2, 8), 1)
    assert [row.id for row in run.step()] == ["long"]
    run.submit("now", toks(3, 8), 1, priority=-1)
    assert [(row.id, row.length) for row in run.step()] == [("now", 8), ("long", 24)]
    run.idle()
    assert run.first_rows() == ["long", "now", "next"]


def crowded(run: Run, steps: int) -> int:
    """Short requests keep coming, two for each step, while a long one that needs nearly all pages waits since the
    beginning. After how many of them it came in."""
    for n in range(4):
        run.submit(f"early{n}", toks(1000 + n, 30), 3)
    run.step()
    run.submit("long", toks(1, 16 * 18), 2)
    for n in range(steps):
        for k in range(2):
            run.submit(f"s{n}.{k}", toks(2 * n + k + 2, 30), 3)
        if any(row.id == "long" for row in run.step()):
            return len([id for id in run.first_rows() if id.startswith("s")])
    return 1 << 30


@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
@pytest.mark.parametrize("most", [0, 5, 20])
def test_s01_a_long_prompt_does_not_starve(policy, most):
    """A prompt that needs nearly all memory gets it although shorter ones keep coming: at most `max_overtaken` (and
    those of the plan in which that number is passed) come in before it.

    Mutation: `Planner._fill` goes on admitting (no `free_places = 0`) behind one that was overtaken often enough.
    """
    run = Run(full(20), policy=policy, max_overtaken=most, budget=512)
    assert crowded(run, 80) <= most + 10
    assert run.scheduler.stats()["retractions"] == 0, "it waited for its room, and took it from nobody"
    run.idle().right_answers()


def test_s01_a_long_prompt_would_starve():
    """The story above is one: with no bound on overtaking the long prompt is not served.

    Mutation: none; it tells that the test above can fail.
    """
    assert crowded(Run(full(20), max_overtaken=1 << 20, budget=512), 80) == 1 << 30


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state", "full+2windows+state"])
def test_s01_a_short_prompt_is_not_stuck_behind_a_long_one(layout):
    """While the pages for a long prompt are not there, one that fits goes before it.

    Mutation: `Planner._fill` ends its loop (`break`) at the first that does not fit.
    """
    run = Run(*groups_of(layout, 16, pages=12), headroom=0)
    run.submit("ann", toks(1, 100), 20)
    run.step()
    run.submit("long", toks(2, 120), 2)
    run.submit("short", toks(3, 10), 2)
    assert [row.id for row in run.step()] == ["ann", "short"]
    run.idle().right_answers()
    assert run.first_rows() == ["ann", "short", "long"]
    assert run.scheduler.stats()["retractions"] == 0


# ---- S02


@each_page
@pytest.mark.parametrize("layout", ["full", "window", "full+window"])
def test_s02_chunks_fill_the_token_budget(layout, page):
    """While there are prompts to compute, every plan has exactly `max_batch_tokens` tokens; decodes come first, one
    token each, and prompts share what is left in order of arrival.

    Mutation: `Planner._begin` does not take the decode rows off the budget; `batch_of` puts chunks before decodes.
    """
    budget = 2 * page + 13
    run = Run(*groups_of(layout, page, pages=400), page=page, budget=budget)
    for n in range(5):
        run.submit(f"d{n}", toks(n, 3), 30)
    run.step()
    for n in range(4):
        run.submit(f"p{n}", toks(10 + n, 3 * page + 5), 1)
    while any(id.startswith("p") for id in run.live):
        rows = run.step()
        decodes = [row for row in rows if row.id[0] == "d"]
        assert rows[: len(decodes)] == decodes and len(decodes) == 5 and {row.length for row in decodes} == {1}
        total = sum(row.length for row in rows)
        assert total == budget or not any(id[0] == "p" for id in run.live), f"{total} of {budget}"
    prompts = [(row.id, row.start) for rows in run.rows for row in rows if row.id[0] == "p"]
    assert prompts == sorted(prompts), "in order of arrival, each from its beginning to its end"
    run.idle().right_answers()


@pytest.mark.parametrize("overlap", [0, 1])
def test_s02_who_streams_does_not_wait_for_long_prompts(overlap):
    """A plan with decode rows has `mixed_tokens` tokens at most, and all of them while there are prompts to compute; a
    plan without has `max_batch_tokens`. Without the number, both have as many.

    Mutation: `Planner._begin` takes `max_batch_tokens` for every plan, or `mixed_tokens`.
    """
    for mixed, most in ((24, 24), (0, 100)):
        run = Run(*groups_of("full", 16, pages=400), page=16, budget=100, batch=8, mixed_tokens=mixed, overlap=overlap)
        run.submit("long", toks(1, 250), 40)
        while not any(row.id == "long" and row.start == 250 for rows in run.rows for row in rows):
            run.step()
        assert [row.length for row in run.rows_by("long")][:3] == [100, 100, 50]
        for n in range(3):
            run.submit(f"new{n}", toks(2 + n, 90), 3)
        before = len(run.rows)
        while "new2" in run.live:
            run.step()
        totals = [sum(row.length for row in rows) for rows in run.rows[before:] if rows]
        assert max(totals) == most and totals.count(most) >= 270 // most - 1
        assert all(any(row.id == "long" for row in rows) for rows in run.rows[before:] if rows), "it goes on all along"
        run.idle().right_answers()


@pytest.mark.parametrize("overlap", [0, 1])
def test_s02_prompts_get_on_beside_as_many_streams_as_may_be(overlap):
    """`mixed_tokens` that the decode rows use up, and more: a prompt still gets a page in each step.

    Mutation: `Planner._begin` leaves the budget at 0 and below.
    """
    for mixed in (1, 5, 6):
        run = Run(*groups_of("full", 16, pages=400), page=16, budget=100, batch=8, mixed_tokens=mixed, overlap=overlap)
        for n in range(5):
            run.submit(f"stream{n}", toks(1 + n, 4), 60)
        while run.live and not all(
            run.rows_by(f"stream{n}")[-1:] and run.rows_by(f"stream{n}")[-1].start >= 4 for n in range(5)
        ):
            run.step()
        before = len(run.rows)
        run.submit("new", toks(9, 90), 1)
        while "new" in run.live:
            run.step()
        chunks = [row.length for row in run.rows_by("new")]
        assert sum(chunks) == 90 and chunks[0] == (16 if mixed < 6 else 1) and len(run.rows) - before < 100
        run.idle().right_answers()


@each_page
@pytest.mark.parametrize("layout", ["full+state", "full+2windows+state", "window+state"])
def test_s02_chunks_of_state_models_are_cut_where_a_snapshot_is_worth_having(layout, page):
    """The last page end before the last token ends a chunk, and a snapshot is taken there; all else fills the budget.

    Mutation: `PlanBuilder._end_at_cut` returns `end` as it came.
    """
    budget = 2 * page + 7
    length = 4 * page + 1 + page // 2
    run = Run(*groups_of(layout, page, pages=400), page=page, budget=budget)
    run.run("ann", toks(1, length), 2)
    chunks = [(row.start, row.length) for row in run.rows_by("ann")]
    last = (length - 1) // page * page
    want, start = [], 0
    while start < length:
        end = min(start + budget, last if start < last else length)
        want.append((start, end - start))
        start = end
    assert chunks == [*want, (length, 1)]
    copies = [copy for plan in run.plans for copy in plan.copies]
    assert [(copy.when, bool(copy.source)) for copy in copies] == [("before", False), ("after", True)]


def test_s02_more_decodes_than_the_budget():
    """No plan has more tokens than allowed, even if more requests could decode; all come to their end.

    Mutation: `Outcome._after_chunks` lets everybody join, however many decode (`decoding.count < most`).
    """
    run = Run(full(), budget=3)
    for n in range(8):
        run.submit(f"r{n}", toks(n, 4), 6)
    run.idle().right_answers()
    assert max(sum(row.length for row in rows) for rows in run.rows) == 3


# ---- S03


def tight(layout: str, share: float, requests: int, news: int, **config) -> Run:
    """Requests that could all run at once, in a pool of `share` of what all of them together need."""
    page = 16
    prompts = [(2 + n % 3) * page + n % page for n in range(requests)]
    pages = sum(-(-(prompt + news - 1) // page) for prompt in prompts)
    windows = int(share * requests * (wide(page) // page + 3))
    groups = groups_of(layout, page, pages=int(share * pages), slots=int(share * requests), windows=windows)
    run = Run(*groups, page=page, budget=8 * page, batch=requests, every=5, **config)
    run.submit_all([RequestSpec(f"r{n}", toks(n, k), news, priority=n % 2) for n, k in enumerate(prompts)])
    return run


def work(run: Run) -> float:
    """Tokens computed, over those there are to compute."""
    once = sum(end.prompt + end.generated - 1 for end in run.ended.values())
    return sum(row.length for rows in run.rows for row in rows) / once


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize(("headroom", "most"), [(0, 1.5), (64, 1.0)])
def test_s03_work_is_bounded_in_a_pool_of_a_third(layout, headroom, most):
    """24 requests in 0.35 of the memory that all of them need: all complete, none is aborted. Their answers are shorter
    than the usual headroom, so with it nothing is computed twice; without any, the work measured is 1.3 times the
    least (full), 1.07 (full and window) and 1.0 (others).

    Mutation: `PlanBuilder._admit` keeps nothing.
    """
    run = tight(layout, 0.35, 24, 37, headroom=headroom)
    run.idle().right_answers()
    assert {end.reason for end in run.ended.values()} == {"length"}
    assert work(run) <= most
    run.all_free()


@pytest.mark.attack
@pytest.mark.parametrize(("headroom", "most"), [(0, 2.0), (64, 1.4)])
def test_s03_work_is_bounded_with_long_answers(headroom, most):
    """16 requests with answers far longer than the headroom in 0.35 of what they need: some must be retracted, all
    complete. Measured: 1.8 times the least work without headroom, 1.2 with the usual.

    Mutation: `PlanBuilder._admit` keeps nothing (1.7 times with the usual headroom).
    """
    run = tight("full", 0.35, 16, 160, headroom=headroom)
    run.idle().right_answers()
    assert {end.reason for end in run.ended.values()} == {"length"}
    assert run.scheduler.stats()["retractions"] > 0
    assert work(run) <= most
    run.all_free()


def test_s03_the_victim_is_the_least_urgent_then_the_latest():
    """When a row cannot grow, the pages come from the least urgent request, and of those from the latest to arrive; who
    came before is not touched.

    Mutation: `Pressure._victim` takes the smallest key instead of the largest.
    """
    run = Run(full(8), headroom=0, budget=256)
    run.submit("first", toks(1, 30), 70)
    run.submit("urgent", toks(2, 30), 20, priority=-1)
    run.submit("second", toks(3, 30), 20)
    run.submit("later", toks(4, 30), 20)
    lost = []
    while run.live:
        held = {request.id for request in run.scheduler._book.holders()}
        run.step()
        now = {request.id for request in run.scheduler._book.holders()}
        lost += sorted(held - now - set(run.ended))
    run.right_answers()
    assert lost and lost[0] == "later", f"retracted, in this order: {lost}"
    assert "first" not in lost and "urgent" not in lost
    assert run.scheduler.stats()["retractions"] == len(lost)


def test_s03_a_victim_keeps_its_place():
    """Who was retracted comes back before anybody who arrived later, and goes on with the tokens it has.

    Mutation: `Book.retract` gives the request a new arrival.
    """
    run = Run(full(7), headroom=0, batch=3)
    run.submit("ann", toks(1, 30), 40)
    run.submit("bob", toks(2, 30), 40)
    while not run.scheduler.stats()["retractions"]:
        run.step()
    said = run.said("bob")
    assert said, "it had begun to answer"
    for n in range(4):
        run.submit(f"n{n}", toks(3 + n, 60), 9)
    before = len(run.rows)
    run.idle().right_answers()
    order = list(dict.fromkeys(row.id for rows in run.rows[before:] for row in rows if row.id != "ann"))
    assert order == ["bob", "n0", "n1", "n2", "n3"]
    assert run.ended["bob"].recomputed > 0 and run.ended["ann"].recomputed == 0


def test_s03_two_that_do_not_fit_together_do_not_chase_each_other():
    """Two requests that fit alone and not together both end, after few retractions: the later one waits.

    Mutation: `Pressure._victim` may choose somebody who came before the needy one (`r is not needy`).
    """
    run = Run(full(9), headroom=0)
    run.submit("ann", toks(1, 40), 90)
    run.submit("bob", toks(2, 40), 90)
    run.idle().right_answers()
    assert run.scheduler.stats()["retractions"] <= 4
    assert run.ended["ann"].recomputed == 0


def test_s03_nobody_is_retracted_for_nothing():
    """A victim whose end would free nothing is passed over: the latest reads only what an earlier one reads too.

    Mutation: `Pressure._victim` does not ask `would_free`.
    """
    run = Run(full(5), headroom=0)
    run.submit("ann", toks(1, 32), 20)  # two pages, and soon a third
    run.submit("cyd", toks(2, 40), 3)  # the other three
    run.submit("bob", toks(1, 32), 20)  # reads ann's
    run.step()
    assert run.owned("free") == {"full": 0}
    run.step(2)
    assert run.scheduler.stats()["retractions"] == 1
    holders = {request.id for request in run.scheduler._book.holders()}
    assert holders == {"ann", "bob"}, "cyd made room, not bob"
    run.idle().right_answers()


def test_s03_rows_sit_out_before_anybody_is_retracted():
    """A row that finds no page waits a plan; if somebody ends meanwhile nobody is retracted.

    Mutation: `Pressure.grow_decodes` retracts at once.
    """
    run = Run(full(6), headroom=0, page=4)
    run.submit("ann", toks(1, 8), 9)  # ends after 8 decodes, needs 4 pages
    run.submit("bob", toks(2, 7), 6)  # ends after 5, needs 3
    run.idle().right_answers()
    stats = run.scheduler.stats()
    assert stats["sat_out"] > 0 and stats["retractions"] == 0


# ---- policies


def waiting(run: Run, prompts: list[list[int]]) -> None:
    for n, prompt in enumerate(prompts):
        run.submit(f"r{n}", prompt, 1)


def test_policy_prefix_lets_in_first_what_is_cached():
    """With `policy="prefix"` those that wait come in by how much of them is cached; with fcfs, and where they have the
    same, by arrival.

    Mutation: `Prefix.order` sorts by what is cached, least first.
    """
    shared = toks(1, 64)
    prompts = [toks(2, 70), shared[:32] + toks(3, 40), shared + toks(4, 8), toks(5, 60)]
    for policy, order in (("fcfs", ["r0", "r1", "r2", "r3"]), ("prefix", ["r2", "r1", "r0", "r3"])):
        run = Run(full(), budget=128, batch=1, policy=policy)
        run.run("first", shared)
        waiting(run, prompts)
        run.idle().right_answers()
        assert run.first_rows() == ["first", *order]


@pytest.mark.parametrize("most", [0, 3, 10])
def test_policy_prefix_has_a_bound_on_overtaking(most):
    """A request of which nothing is cached is overtaken `max_overtaken` times and then comes next.

    Mutation: `Prefix.order` does not look at `overtaken`.
    """
    shared = toks(1, 64)
    run = Run(full(), budget=128, batch=1, policy="prefix", max_overtaken=most)
    run.run("first", shared)
    run.submit("new", toks(2, 100), 1)
    for n in range(30):
        run.submit(f"s{n}", [*shared, n], 1)
    run.idle()
    assert run.first_rows().index("new") == 1 + most


def test_policy_prefix_keeps_priorities():
    """What is urgent goes first, cached or not.

    Mutation: `Prefix.order` sorts by what is cached before priority.
    """
    shared = toks(1, 64)
    run = Run(full(), budget=128, batch=1, policy="prefix")
    run.run("first", shared)
    run.submit("cached", [*shared, 1], 1)
    run.submit("urgent", toks(2, 100), 1, priority=-5)
    run.idle()
    assert run.first_rows() == ["first", "urgent", "cached"]


@pytest.fixture
def policies() -> Iterator[None]:
    """What a test registers is known to that test alone."""
    before = dict(POLICIES)
    yield
    POLICIES.clear()
    POLICIES.update(before)


@pytest.mark.usefixtures("policies")
def test_a_policy_of_ones_own():
    """A policy is a class with `order`, known by a name.

    Mutation: `Planner` asks Fcfs whatever the configuration says.
    """

    class Latest:
        def order(self, waiting, overdue, peek):
            return list(reversed(waiting))

    register_policy("latest", Latest)
    register_policy("latest", Latest)
    run = Run(full(), batch=1, policy="latest")
    waiting(run, [toks(n, 5) for n in range(4)])
    run.idle()
    assert run.first_rows() == ["r3", "r2", "r1", "r0"]
    with pytest.raises(ValueError, match="registered already"):
        register_policy("fcfs", Latest)
    with pytest.raises(ValueError, match="non-empty string"):
        register_policy("", Latest)


@pytest.mark.attack
@each_layout
def test_random_crowds_come_to_an_end(layout):
    """Requests of all sizes and priorities in little memory, arriving all the time: each ends, each answer is right.

    Mutation: `Pressure.break_deadlock` retracts nobody.
    """
    rng = random.Random(layout)
    run = Run(*groups_of(layout, 16, pages=9, slots=3), headroom=16, budget=48, batch=6, max_overtaken=4, every=3)
    for n in range(20):
        length = rng.randrange(1, 90)
        run.submit(f"r{n}", toks(rng.randrange(4), length), rng.randrange(1, 40), priority=rng.randrange(3))
        for _ in range(rng.randrange(6)):
            if run.live:
                run.step()
    run.idle().right_answers()
    assert len(run.ended) == 20 and (has_state(layout) or run.computed() > 0)


def test_s03_the_less_urgent_do_not_starve():
    """A steady stream of urgent requests: after `max_overtaken` of them have come in before it, one that is less urgent
    gets its turn.

    Mutation: `Planner._count_overtaken` counts only those of the same urgency; or nobody looks first at who is overdue.
    """
    run = Run(full(), batch=2, max_overtaken=10)
    run.submit("patient", toks(1, 20), 2, priority=5)
    for at in range(40):
        run.submit(f"urgent {at}", toks(10 + at, 20), 2)
    overtaken = []
    while "patient" not in run.ended:
        run.plan()
        overtaken += [end.id for end in run.done()]
    assert 10 <= len([id for id in overtaken if id != "patient"]) <= 14
    run.idle().right_answers()


def test_nothing_keeps_a_request_that_is_over():
    """Requests that stop long before they have used their tokens are forgotten at once, prompts and all.

    Mutation: `DecodeRows.drop` leaves what was foreseen.
    """
    run = Run(full(1400))
    for at in range(4):
        run.submit(f"r{at}", toks(at, 20), 5000, eos=[96], min_tokens=3000)
    for _ in range(5):
        run.plan()
        run.done()
    decoding = run.scheduler._book.decoding
    assert decoding.ending and decoding.waking
    run.tell(*(Abort(f"r{at}") for at in range(4)))
    assert not decoding.ending and not decoding.waking
    run.idle()
    run.all_free()
