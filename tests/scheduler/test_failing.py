"""Steps that fail, and requests that are aborted under them (cases S09, P09, F07)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sapwood.cache import CacheGroup
from sapwood.scheduler import Abort, Finish, RequestSpec, StepFailed

from .driver import (
    BASE,
    LAYOUTS,
    Row,
    Run,
    answer,
    each_layout,
    full,
    groups_of,
    has_state,
    rows_of,
    state,
    toks,
)


def poisoned(run: Run, *bad: str) -> list[list[str]]:
    """Run to the end; every step with a row of `bad` fails. Returns the ids of the steps that failed."""
    failed = []
    while run.live:
        plan = run.plan()
        assert not plan.empty, f"nothing to run, while {sorted(run.live)} live"
        if set(plan.batch.ids) & set(bad):
            failed.append(plan.batch.ids)
            run.fail("poison")
        else:
            run.done()
        assert len(run.rows) < 2000, "it goes on for ever"
    return failed


# ---- S09


@each_layout
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_s09_a_poisonous_row_is_found_by_halving(layout, when):
    """One row of 16 makes every step fail: it is alone after four halvings, is tried until `max_tries`, and ends as
    `failed` with the reason; the others go on and yield what they would have.

    Mutation: `Outcome.failed` puts all rows into one retry again.
    """
    run = Run(*groups_of(layout, 16, pages=200), budget=4096, max_tries=3)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 20 + n), 9) for n in range(16)])
    if when == "decode":
        run.step(4)
    failed = poisoned(run, "r11")
    assert {id: end.reason for id, end in run.ended.items()} == {
        f"r{n}": "failed" if n == 11 else "length" for n in range(16)
    }
    assert run.ended["r11"].detail == "poison"
    assert [len(ids) for ids in failed] == [16, 8, 4, 2, 1, 1, 1][: len(failed)] and len(failed) <= 7
    run.right_answers().all_free()
    assert run.scheduler.stats()["steps_failed"] == len(failed)


def test_s09_a_half_that_does_not_fit_in_one_batch_is_tried_bit_by_bit():
    """Rows that must go back to the beginning are longer than the batch they failed in: who finds no place in a retry
    is tried in the next one, so the culprit gets to be alone and nobody starts again for ever.

    Mutation: `Planner.drop_retried` drops the whole part instead of the rows that ran.
    """
    groups = CacheGroup("window", "window", 12, window=9), CacheGroup("state", "state", 3)
    run = Run(*groups, budget=16, max_tries=1, headroom=0)
    run.submit_all([RequestSpec(name, toks(n, k), 2) for n, (name, k) in enumerate([("a", 32), ("b", 30), ("c", 9)])])
    while run.live:
        plan = run.plan()
        if "c" in plan.batch.ids or plan.step == 3:
            run.fail("poison")
        else:
            run.done()
        assert len(run.rows) < 40, "it goes on for ever"
    assert {id: end.reason for id, end in run.ended.items()} == {"a": "length", "b": "length", "c": "failed"}
    run.right_answers().all_free()


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_s09_tries_are_bounded(tries):
    """A request that fails alone is tried `max_tries` times in all.

    Mutation: `Outcome.failed` compares tries with `>` (one try more), or never.
    """
    run = Run(full(), max_tries=tries)
    run.submit("bad", toks(1, 20), 5)
    assert len(poisoned(run, "bad")) == tries
    assert run.ended["bad"].reason == "failed" and run.ended["bad"].computed == 0
    run.all_free()


def test_s09_several_poisonous_rows():
    """Each is found; nobody else is given up.

    Mutation: `Outcome.failed` gives up the first row of a step that fails, alone or not.
    """
    run = Run(full(), budget=4096)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 20), 9) for n in range(13)])
    run.step(3)
    bad = {"r2", "r3", "r12"}
    poisoned(run, *bad)
    assert {id for id, end in run.ended.items() if end.reason == "failed"} == bad
    assert len(run.ended) == 13
    run.right_answers().all_free()


@pytest.mark.attack
@each_layout
def test_s09_bad_luck_is_no_poison(layout):
    """A step that fails now and then for no fault of its rows costs nobody more than computing again; what was computed
    again is counted apart.

    Mutation: `Request.tries` is not set back by a step that was done.
    """
    run = Run(*groups_of(layout, 16, pages=100), budget=48, max_tries=2, every=2)
    run.submit_all([RequestSpec(f"r{n}", toks(n % 3, 40 + n), 24) for n in range(6)])
    at = 0
    while run.live:
        run.plan()
        at += 1
        run.fail() if at % 5 == 0 else run.done()
        assert at < 2000
    assert {end.reason for end in run.ended.values()} == {"length"}
    run.right_answers().all_free()


def test_s09_a_failure_of_somebody_who_left():
    """The culprit is aborted while its last step runs, which then fails: the others are tried again and go on.

    Mutation: `Outcome.failed` takes all rows of the step, those that have ended too.
    """
    run = Run(full(), budget=256)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 20), 6) for n in range(4)])
    run.step(2)
    run.plan()
    run.abort("r1")
    run.fail()
    run.idle().right_answers()
    assert sorted(end.reason for end in run.ended.values()) == ["abort", "length", "length", "length"]
    run.all_free()


def test_s09_those_that_wait_for_their_retry_can_end():
    """Rows that are to be tried again are aborted or finished before their turn: nothing of them is planned.

    Mutation: `Planner._retry` takes a group as it was.
    """
    run = Run(full(), budget=256)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 20), 6) for n in range(4)])
    run.step(2)
    run.plan()
    run.fail()
    run.tell(Abort("r0"), Finish("r1"), Abort("r3"))
    assert [row.id for row in run.step()] == ["r2"]
    run.idle().right_answers()
    run.all_free()


def test_s09_who_comes_meanwhile_waits_for_its_turn():
    """New requests come in after the parts of a failed step have been tried.

    Mutation: `Outcome.done` does not strike the part that went well off the retries.
    """
    run = Run(full(), budget=256)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 20), 6) for n in range(4)])
    run.plan()
    run.fail()
    run.submit("new", toks(9, 20), 2)
    assert [[row.id for row in run.step()] for _ in range(2)] == [["r0", "r1"], ["r2", "r3"]]
    assert {row.id for row in run.step()} == {"r0", "r1", "r2", "r3", "new"}
    run.idle().right_answers()


# ---- S13

each_overlap = pytest.mark.parametrize("overlap", [0, 1])
STATEFUL = {**{name: groups_of(name, 16, pages=200) for name in LAYOUTS}, "state": [state(32)]}


def troubled(run: Run, fails: Callable[[list[Row]], bool], most: int) -> int:
    """Run to the end, planning ahead where that may be; steps fail as `fails` says of their rows. Returns how many."""
    count = 0
    while run.live or run.executor.flights:
        plan = run.plan()
        if plan.batch.ids and len(run.executor.flights) <= run.scheduler.config.overlap:
            continue
        flight = run.executor.flights[0]
        if flight.doomed or not fails(rows_of(flight.plan)):
            run.done()
        else:
            run.fail("poison")
            count += 1
        assert len(run.rows) < most, f"{sorted(run.live)} go on for ever"
    return count


@each_overlap
@pytest.mark.parametrize("layout", STATEFUL)
def test_s13_a_row_that_fails_beyond_its_first_chunk_ends_as_failed(layout, overlap):
    """A prompt of several chunks, the second of which always fails. A model with state goes back to its beginning every
    time, and its first chunk succeeds every time: the tries count all the same, and the others are served.

    Mutation: `Request.computes` forgets tries at any progress; `Planner.drop_retried` lets go of a row that has not got
    beyond where it failed.
    """
    for others in (0, 3):
        run = Run(*STATEFUL[layout], budget=64, max_tries=3, overlap=overlap, every=5)
        run.submit("bad", toks(1, 200), 4)
        for n in range(others):
            run.submit(f"r{n}", toks(5 + n, 20), 8)
        failed = troubled(run, lambda rows: any(row.id == "bad" and row.start > 0 for row in rows), 120)
        assert run.ended["bad"].reason == "failed" and run.ended["bad"].detail == "poison"
        assert {run.ended[f"r{n}"].reason for n in range(others)} <= {"length"}
        assert 3 <= failed <= 3 + 4
        tried = [{row.id for row in rows} for rows in run.rows if any(row.id == "bad" for row in rows)]
        alone = [ids == {"bad"} for ids in tried]
        assert all(alone[alone.index(True) :]), "once it is tried alone it stays so until it gets beyond"
        run.idle().right_answers()
        run.all_free()


@pytest.mark.attack
@each_overlap
@pytest.mark.parametrize("layout", STATEFUL)
def test_s13_every_second_step_fails(layout, overlap):
    """Or every third, whoever is in it. Everybody ends, done or failed, in bounded work: a row that others' failures
    take back again and again uses up no try by that, but what it computes again gives it none back either.

    Mutation: `Request.computes` forgets tries at any progress; `Planner.drop_retried` lets go of a row that has not got
    beyond where it failed.
    """
    for each in (2, 3):
        run = Run(*STATEFUL[layout], budget=64, max_tries=3, overlap=overlap, every=9)
        run.submit_all([RequestSpec(f"r{n}", toks(n, 90 + n), 6) for n in range(2 + each)])
        at = iter(range(1 << 20))
        troubled(run, lambda rows, at=at, each=each: next(at) % each == 1, 700)
        assert {end.reason for end in run.ended.values()} <= {"length", "failed"}
        assert len(run.ended) == 2 + each
        run.right_answers().all_free()


@each_overlap
@each_layout
def test_s13_failures_in_company_use_up_no_try(layout, overlap):
    """8 rows and 4 failures in a row with 3 tries: halving has not got to anybody alone, and nobody is given up.

    Mutation: `Outcome.failed` counts a try for every row of the step.
    """
    for tries in (1, 3):
        run = Run(*groups_of(layout, 16, pages=200), budget=1024, max_tries=tries, overlap=overlap)
        run.submit_all([RequestSpec(f"r{n}", toks(n, 30), 5) for n in range(8)])
        left = iter([True, True, True] + ([True] if tries > 1 else []))
        troubled(run, lambda rows, left=left: next(left, False), 100)
        assert {end.reason for end in run.ended.values()} == {"length"}
        run.right_answers().all_free()


@each_overlap
def test_s13_one_whose_company_left_is_not_charged(overlap):
    """Two rows are in the step; one is aborted while it runs, and it fails. The other was not alone in it.

    Mutation: `Outcome.failed` counts the rows that are left.
    """
    run = Run(full(), budget=64, max_tries=1, overlap=overlap)
    run.submit_all([RequestSpec("ann", toks(1, 20), 5), RequestSpec("bob", toks(2, 20), 5)])
    run.plan()
    run.abort("bob")
    run.fail()
    run.idle().right_answers()
    assert run.ended["ann"].reason == "length"


@each_overlap
def test_s13_who_was_only_in_the_later_plan_has_used_up_no_try(overlap):
    """Bob comes with the plan behind ann's, whose every step fails. He is alone in none of them.

    Mutation: `Outcome.failed` counts rows of the plans that go along.
    """
    run = Run(full(), budget=64, max_tries=1, overlap=overlap)
    run.submit("ann", toks(1, 20), 5)
    run.plan()
    run.submit("bob", toks(2, 20), 5)
    troubled(run, lambda rows: any(row.id == "ann" for row in rows), 60)
    assert {id: end.reason for id, end in run.ended.items()} == {"ann": "failed", "bob": "length"}


# ---- P09


@each_layout
@pytest.mark.parametrize("page", [1, 16])
def test_p09_a_failed_step_leaves_nothing_promised_behind(layout, page):
    """Two prompts share what the plan promises; the step fails. No event tells of it, the tree is empty, nobody finds
    any of it; both are computed again and are right. Events come once the pages are real.

    Mutation: `Outcome.failed` calls `step_commit` instead of `step_failed`; or leaves the rows where they were
    (without `rewind`).
    """
    run = Run(*groups_of(layout, page), page=page, events=True)
    prompt = toks(1, 3 * page + 1)
    run.submit("ann", prompt, 4)
    run.submit("bob", [*prompt, 7], 4)
    run.plan()
    assert run.scheduler.drain_events() == []
    run.fail()
    assert run.scheduler.drain_events() == []
    assert run.owned("tree") == dict.fromkeys(run.owned("tree"), 0)
    assert run.cache.explain(BASE, prompt).cached == 0
    run.step()
    assert run.scheduler.drain_events() != []
    run.idle().right_answers()
    for id in ("ann", "bob"):
        end = run.ended[id]
        assert end.cached + end.computed == end.prompt
    run.all_free()


@each_layout
def test_p09_readers_of_what_was_withdrawn_are_computed_again(layout):
    """A prompt is computed chunk by chunk; the second chunk fails in the plan in which somebody adopts it. What was
    done before stays, and who had adopted what failed computes it, and says so: it was not cached.

    Mutation: `Request.falls_to` leaves `cached` as the failed plan had it.
    """
    run = Run(*groups_of(layout, 16), budget=52)
    prompt = toks(1, 80)
    run.submit("ann", prompt, 3)
    run.step()
    run.submit("bob", prompt, 3)
    run.plan()
    if not has_state(layout):
        assert [(row.id, row.cached) for row in run.rows[-1]] == [("ann", 0), ("bob", 79)]
    run.fail()
    run.abort("ann")
    run.idle().right_answers()
    assert run.ended["bob"].cached == (0 if has_state(layout) else 48)
    assert run.ended["ann"].recomputed == 0
    run.all_free()


def test_p09_what_failed_counts_as_done_for_nobody():
    """`cached` and `computed` add up to the prompt also if the step of the first chunk, of a later one and of the first
    decode failed; nothing counts twice.

    Mutation: `Request.computes` is called when the plan is made.
    """
    run = Run(full(), budget=32)
    run.submit("ann", toks(1, 80), 3)
    for fails in (True, False, True, False, True, False, True, False, False):
        if not run.live:
            break
        run.plan()
        run.fail() if fails else run.done()
    run.idle().right_answers()
    end = run.ended["ann"]
    assert (end.cached, end.computed, end.recomputed, end.generated) == (0, 80, 0, 3)


# ---- F07

STATES = (
    "waiting",
    "first chunk runs",
    "between chunks",
    "chunk runs",
    "decoding",
    "decode runs",
    "sat out",
    "retracted",
)


def bring(run: Run, where: str) -> None:
    """Get request "ann" into a state."""
    prompt = toks(1, 70)
    if where in ("sat out", "retracted"):
        run.submit("bob", toks(2, 70), 60, priority=-1)
        run.submit("ann", prompt, 60)
        key = where.replace(" ", "_").replace("retracted", "retractions")
        for _ in range(500):
            if run.scheduler.stats()[key]:
                return
            run.step()
        raise AssertionError(f"never {where}")
    run.submit("ann", prompt, 60)
    if where == "waiting":
        return
    if where != "first chunk runs":
        run.step(1 if "chunk" in where else 6)
    if "runs" in where:
        run.plan()


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        (layout, where)
        for layout, groups in LAYOUTS.items()
        for where in STATES
        if "full" in groups or where not in ("sat out", "retracted")  # a window slides: its rows find pages here
    ],
)
def test_f07_abort_in_any_state_frees_everything(layout, where):
    """Wherever a request is, its abort gives back every page and slot of every group; those that a step still touches
    only when that is done, and its slot in the tables with them.

    Mutation: `Book.end` passes no `reading` step to `finish_request` (pages are free under the step that runs); or
    gives the slot back at once.
    """
    run = Run(*groups_of(layout, 16, pages=11, slots=3, windows=40), budget=32, headroom=0)
    bring(run, where)
    running = bool(run.executor.flights)
    touched = {group.name: len(set(run.table("ann", group.name)) - {0}) for group in run.cache.groups if running}
    assert run.abort("ann").reason == "abort"
    if running:
        for group, there in zip(run.cache.groups, run.cache.available(), strict=True):
            assert there <= group.device_pages - touched[group.name], "a page that the step touches could be taken"
        assert run.scheduler._book.live == 1, "its slot is not given out"
        run.submit("new", toks(5, 20), 2)
        assert run.scheduler.next_plan().empty
        run.done()
        assert not any(run.owned("flight").values())
        assert run.cache.available() == tuple(group.device_pages for group in run.cache.groups)
    run.submit("cyd", toks(4, 16 * 11 - 1) if layout == "full" else toks(4, 40), 2)
    run.idle().right_answers()
    run.all_free()


@each_layout
def test_f07_what_a_running_step_reads_is_not_given_out(layout):
    """A decode row is aborted while its step runs, and the step fails or is done: until then no page it reads or writes
    is free, nor its slot. Nobody else's row of that step sees anything (the executor checks its contents).

    Mutation: `Book.end` passes no `reading` step to `finish_request`.
    """
    for fails in (False, True):
        run = Run(*groups_of(layout, 16, pages=40), budget=64)
        prompt = toks(1, 40)
        run.run("first", prompt)
        run.submit("ann", prompt + toks(2, 20), 9)
        run.submit("bob", prompt + toks(2, 20) + [3], 9)
        run.step(3)
        run.plan()
        free = run.owned("free")
        run.abort("ann")
        assert all(run.owned("free")[name] <= free[name] for name in free)
        run.fail() if fails else run.done()
        run.idle().right_answers()
        run.all_free()


def test_abort_while_a_step_runs_keeps_the_slot_until_it_is_done():
    """The tables of a running plan stay as they are when one of its rows is aborted; the slot goes to the next request
    only after StepDone.

    Mutation: `Book.end` vacates the slot at once.
    """
    run = Run(full(), batch=1)
    run.submit("ann", toks(1, 20), 9)
    run.step()
    run.submit("bob", toks(2, 20), 2)
    plan = run.plan()
    before = plan.tables["full"].copy()
    run.abort("ann")
    assert (plan.tables["full"] == before).all()
    assert run.scheduler.next_plan().empty
    run.done()
    assert run.plan().batch.slots.tolist() == [0]
    run.done()
    run.idle().right_answers()
    assert run.ended["ann"].generated == 1, "the token of the step that ran under its abort does not count"


def test_a_finish_while_a_step_runs():
    """A stop string is found while the next step runs already: the request ends with the tokens it had, and what it
    computed before serves the next.

    Mutation: `Book.end` counts the token of the step that runs.
    """
    run = Run(full())
    run.submit("ann", toks(1, 30), 40)
    run.step(20)
    run.plan()
    (end,) = run.tell(Finish("ann"))
    assert (end.reason, end.generated) == ("finish", 20)
    run.done()
    known = toks(1, 30) + answer(BASE, toks(1, 30), 20)
    assert run.run("bob", [*known, 5]).cached == 48
    run.all_free()


def test_a_failure_that_comes_twice():
    """The event of a step that failed cannot come again.

    Mutation: `Outcome.failed` leaves the flight as it is.
    """
    run = Run(full())
    run.submit("ann", toks(1, 30), 4)
    step = run.plan().step
    run.fail()
    with pytest.raises(ValueError, match="no step runs"):
        run.tell(StepFailed(step, "again"))
    run.idle().right_answers()


def test_s08_a_reason_of_any_kind_is_told():
    """Whatever an engine gives as the reason of a failure, the request ends with it, in words.

    Mutation: `Outcome.failed` takes the reason for a string.
    """
    run = Run(full(), max_tries=1)
    run.submit("ann", toks(1, 30), 4)
    step = run.plan().step
    run.executor.fail("")
    (end,) = run.tell(StepFailed(step, RuntimeError("out of memory")))  # type: ignore[arg-type]
    assert (end.reason, end.detail) == ("failed", "out of memory")
    run.all_free()
