"""Two plans in flight (case S14; P02, P03, P09, P12, F07, F16, T02 with `overlap=1`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import Abort, Ended, Finish, ProtocolError, RequestSpec, StepDone, StepFailed
from sapwood.sim.event_replay import Replay
from sapwood.sim.executor import ContentExecutor

from .driver import BASE, LAYOUTS, Run, adapter, answer, each_layout, full, groups_of, has_state, rows_of, toks
from .store_run import StoreRun


class Piped(Run):
    """Always plans ahead: `step` makes a plan, and then the one before it is done."""

    def __init__(self, *groups: CacheGroup, **config) -> None:
        super().__init__(*groups, **{"overlap": 1, **config})

    def step(self, times: int = 1):
        for _ in range(times):
            plan = self.plan()
            if len(self.executor.flights) > 1 or (plan.empty and self.executor.flights):
                self.done()
            elif plan.empty:
                raise AssertionError(f"nothing to run, while {sorted(self.live)} live")
        return self.rows[-1] if self.rows else []

    def idle(self) -> Run:
        self.until(*self.live)
        while self.executor.flights:
            self.done()
        return super().idle()


# ---- what a plan shows


def test_s14_rows_of_a_plan_in_flight_come_again_with_unknown_tokens():
    """A prompt that ends in plan N decodes in N+1, its token -1; decode rows go on likewise; and when N is done, N+2 is
    like N+1. With two plans in flight there is no third.

    Mutation: `DecodeRows.tokens` shows what stands in the ring; `Book.look_ahead` joins nobody; `next_plan` does not
    count the plans in flight.
    """
    run = Piped(full(), budget=64)
    run.submit("ann", toks(1, 20), 9)
    one = run.plan()
    assert one.batch.tokens.tolist() == toks(1, 20) and one.batch.decodes == 0
    two = run.plan()
    assert (two.batch.ids, two.batch.starts.tolist(), two.batch.tokens.tolist()) == (["ann"], [20], [-1])
    assert two.batch.decodes == 1 and two.batch.samples.tolist() == [True]
    assert run.plan().empty and run.scheduler.stats()["decoding"] == 1
    run.done()
    three = run.plan()
    assert (three.batch.starts.tolist(), three.batch.tokens.tolist()) == ([21], [-1])
    assert three.batch.generation == two.batch.generation
    run.done(), run.done()
    four = run.plan()
    assert four.batch.tokens.tolist() == [run.known("ann")[-1]], "all is known: the plan says it"
    run.idle().right_answers()


def test_s14_a_row_that_ends_by_length_is_not_in_the_next_plan():
    """What the plan in flight brings to its last token is in no later one; what ends with its very first token neither.

    Mutation: `DecodeRows.retire` returns nobody; `Book.look_ahead` joins who ends with its first token.
    """
    run = Piped(full())
    run.submit("one", toks(1, 20), 1)
    run.submit("two", toks(2, 20), 2)
    run.submit("ten", toks(3, 20), 10)
    assert run.plan().batch.ids == ["one", "two", "ten"]
    assert run.plan().batch.ids == ["two", "ten"]
    run.done()
    assert [end.id for end in run.ended.values()] == ["one"]
    assert run.plan().batch.ids == ["ten"]
    run.done()
    assert run.ended["two"].reason == "length" and run.ended["two"].generated == 2
    run.idle().right_answers()
    run.all_free()


@each_layout
def test_s14_one_found_ended_late_has_a_row_for_nobody(layout):
    """A request stops by eos with plan N, and has a row in N+1: nobody is told its token, nothing of it is published,
    and its pages and its slot are given out only after N+1.

    Mutation: `Book.end` passes no `reading` step to `finish_request`; or vacates the slot at once; `Outcome.done` tells
    of the row that was left.
    """
    prompt = toks(1, 37)
    said = answer(BASE, prompt, 12)
    stop = next(at for at in range(2, 12) if said[at] not in said[:at])
    run = Piped(*groups_of(layout, 16, pages=40), batch=2)
    run.submit("ann", prompt, 40, eos=[said[stop]])
    run.submit("bob", toks(2, 10), 40)
    while "ann" in run.live:
        run.step()
    assert run.ended["ann"].reason == "stop" and run.ended["ann"].generated == stop + 1
    assert "ann" in run.rows[-1][0].id or any(row.id == "ann" for row in run.rows[-1]), "its row is in flight"
    run.submit("cyd", toks(3, 10), 2)
    assert run.scheduler._book.live == 2, "its slot is not free"
    run.done()
    assert run.scheduler._book.live == 1
    run.idle().right_answers()
    assert run.cache.explain(BASE, prompt + said).cached <= 37 + stop
    run.all_free()


@each_layout
def test_s14_min_tokens_holds_for_a_row_that_joined_ahead(layout):
    """Its eos tokens count from the token that `min_tokens` says, however early it joined.

    Mutation: `DecodeRows.join` wakes a row by the steps planned instead of those done.
    """
    for least in range(1, 7):
        said = answer(BASE, toks(1, 31), 8)
        for overlap in (0, 1):
            run = (Piped if overlap else Run)(*groups_of(layout, 16))
            run.submit("ann", toks(1, 31), 8, eos=said, min_tokens=least)
            run.idle()
            assert (run.ended["ann"].reason, run.ended["ann"].generated) == ("stop", least)


def test_s14_a_prompt_that_ends_at_a_page_end_publishes_it_once():
    """A row that joined ahead stands at a page end when the step before it is done: its page is the prompt's own.

    Mutation: `DecodeRows.advance` counts rows that joined ahead among those that crossed a page.
    """
    run = Piped(full())
    run.submit("ann", toks(1, 32), 40)
    run.step(3)
    run.cache.check()
    run.submit("bob", toks(2, 8), 40)
    run.step(2)
    assert run.known("ann")[:32] == toks(1, 32)
    run.idle().right_answers()
    assert run.run("cyd", run.known("ann") + [5]).cached == 64


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("page", [1, 4, 16])
def test_s14_no_unknown_token_gets_into_the_tree(layout, page):
    """Under pressure, when pages are read again, a page with an unknown token in it would show: `check` looks for one,
    and chats find what they extend.

    Mutation: the ring has one column less (`page_size + 1`); `full_pages` takes the column to come.
    """
    run = Piped(*groups_of(layout, page, pages=24, slots=9, windows=40), page=page, headroom=0, budget=40, batch=6)
    for n in range(6):
        run.submit(f"r{n}", toks(n % 2, 2 * page + n), 4 * page + 3)
    run.idle().right_answers()
    with pytest.raises(AssertionError, match="negative"):
        binding = run.cache.bind(BASE)
        match = run.cache.match_prefix(binding, [9] * page + [1])
        lease, _ = run.cache.admit(match, page + 1)
        run.cache.publish(lease, np.full(page, -1, np.int32).tobytes() + bytes(4), 1, 10_000)
        run.cache.check()


# ---- events in between


def test_s14_finish_and_abort_count_known_tokens_only():
    """Finish cannot happen before a token is known, though a row is in flight that will bring one; then it can.

    Mutation: `Scheduler._finish` takes any decode row for one that has yielded; `Book.position` counts steps planned.
    """
    run = Piped(full())
    run.submit("ann", toks(1, 20), 9)
    run.plan(), run.plan()
    with pytest.raises(ProtocolError, match="yielded no token yet"):
        run.tell(Finish("ann"))
    run.done()
    run.plan()
    (end,) = run.tell(Finish("ann"))
    assert (end.reason, end.generated) == ("finish", 1)
    run.done(), run.done()
    run.submit("bob", toks(2, 20), 9)
    run.plan(), run.plan()
    assert run.abort("bob").generated == 0
    run.done(), run.done()
    run.idle()
    run.all_free()


@each_layout
@pytest.mark.parametrize("first", ["prompt", "decode"])
def test_p09_a_failed_step_takes_the_one_behind_it_along(layout, first):
    """N fails with N+1 in flight: both are withdrawn, N+1's event counts as failed whatever it says, no plan is made
    before it has come, and memory that N+1 touches stays. Nobody but the only row of N has used up a try.

    Mutation: `Outcome.failed` tells the cache of step N alone; plans go on beside a doomed one; `_written_off` takes
    its tokens.
    """
    for late in ("done", "failed"):
        run = Piped(*groups_of(layout, 16, pages=60), budget=48, max_tries=1)
        run.submit("ann", toks(1, 70), 30)
        if first == "decode":
            run.step(6)
            while run.executor.flights:
                run.done()
        run.plan()
        run.submit("bob", toks(2, 20), 5)
        two = run.plan()
        assert {"ann", "bob"} >= set(two.batch.ids)
        alone = len(run.rows[-2]) == 1
        run.fail()
        assert run.scheduler.stats()["steps_failed"] == 1
        assert ("ann" in run.ended) == alone, "it was alone, and has no more tries"
        assert "bob" in run.live
        assert run.plan().empty, "the pipe drains"
        run.fail("late") if late == "failed" else run.done()
        assert run.scheduler.stats()["steps_failed"] == 2
        run.idle().right_answers()
        assert run.ended["bob"].reason == "length"
        run.all_free()


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("abort", [None, "ann", "bob"])
def test_f07_abort_between_two_plans_frees_everything(layout, abort):
    """A request is aborted with rows in two plans, which are done, or fail, or one of them: everything comes back, and
    nothing that a step touches before that step is over (the executor looks).

    Mutation: `Book.reading` tells the oldest step with a row instead of the newest.
    """
    for ends in ("done done", "fail done", "done fail", "fail fail"):
        for before in range(4):
            run = Piped(*groups_of(layout, 16, pages=40), budget=40)
            run.submit("ann", toks(1, 60), 30)
            run.submit("bob", toks(1, 60) + [3], 30)
            run.step(before)
            while len(run.executor.flights) < 2 and not run.plan().empty:
                pass
            for how in ends.split():
                if abort and abort in run.live:
                    run.abort(abort)
                if run.executor.flights:
                    run.done() if how == "done" else run.fail()
            run.idle().right_answers()
            run.all_free()


def test_s09_named_culprits_are_tried_alone_and_the_others_together():
    """An executor that knows whose fault it was says so: no halving. A name that is in no row is dropped; what is no
    list of names is refused.

    Mutation: `Outcome.failed` does not look at `culprits`.
    """
    for overlap in (0, 1):
        run = (Piped if overlap else Run)(full(), overlap=overlap)
        run.submit_all([RequestSpec(f"r{n}", toks(n, 20), 6) for n in range(9)])
        run.plan()
        (failed,) = run.executor.fail("r3 and r5 are bad")
        with pytest.raises(ProtocolError, match="culprits must be a list"):
            run.scheduler.advance([replace(failed, culprits="r3")])
        run.tell(replace(failed, culprits=["r3", "r5", "nobody"]))
        rows = []
        for _ in range(3):
            rows.append(sorted(run.plan().batch.ids))
            run.done()
        assert rows == [["r3"], ["r5"], [f"r{n}" for n in (0, 1, 2, 4, 6, 7, 8)]]
        run.idle().right_answers()


# ---- sharing goes on


@each_layout
def test_p02_equal_prompts_cost_one_prefill_with_two_plans_in_flight(layout):
    """Computed prompt tokens are one prompt and the others' tails, chunk by chunk.

    Mutation: `PlanBuilder._chunk` neither adopts nor waits while the request has a row in flight.
    """
    run = Piped(*groups_of(layout, 16, pages=200), budget=64)
    prompt = toks(1, 16 * 9 + 5)
    run.submit_all([RequestSpec(f"r{n}", prompt, 3) for n in range(5)])
    run.idle().right_answers()
    assert run.computed() == len(prompt) + 4 * 5
    run.all_free()


@each_layout
def test_p03_chunks_are_adopted_while_their_prompt_runs(layout):
    """A second prompt with the same beginning comes while the first is in the middle, both with rows in every plan.

    Mutation: `PlanBuilder._chunk` neither adopts nor waits while the request has a row in flight.
    """
    run = Piped(*groups_of(layout, 4, pages=400), page=4, budget=64)
    prompt = toks(1, 200)
    run.submit("ann", prompt, 2)
    run.step(2)
    run.submit("bob", [*prompt, 7, 8, 9], 2)
    run.idle().right_answers()
    assert run.computed() <= 200 + (40 if has_state(layout) else 4)


def test_p03_a_prompt_with_a_row_in_flight_adopts_what_another_has_computed():
    """Ann and bob compute the same prompt from different places (her first pages were not cached when she came). What
    is there already he does not compute, though he has a row in every plan.

    Mutation: `PlanBuilder._chunk` neither adopts nor waits while the request has a row in flight.
    """
    run = Piped(full(400), page=4, budget=24, batch=8)
    prompt = toks(1, 160)
    run.submit("bob", prompt, 2, priority=1)
    run.step(2)
    run.submit("ann", prompt, 2)  # more urgent: from now on she has the budget
    run.step(3)
    run.idle().right_answers()
    assert run.computed() <= 160 + 24


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("how", ["stop", "length", "finish", "abort"])
def test_p12_what_is_published_ends_at_the_last_computed_position(layout, how):
    """However a request ends with a plan ahead of it, its whole computed pages serve the next, and no more: the same as
    with one plan at a time.

    Mutation: `Outcome._publish` leaves out rows that were retired; `Book.end` counts the row in flight as computed.
    """
    said = answer(BASE, toks(1, 37), 40)
    stop = next(at for at in range(6, 30) if said[at] not in said[:at])
    cached = {}
    for overlap in (0, 1):
        for new in range(stop, stop + 17):
            run = (Piped if overlap else Run)(*groups_of(layout, 16, pages=80), checkpoint_interval=1)
            run.submit(
                "ann", toks(1, 37), new + 1 if how == "length" else 60, eos=[said[stop]] if how == "stop" else []
            )
            while "ann" in run.live:
                if how in ("finish", "abort") and len(run.said("ann")) > new:
                    run.tell(Finish("ann") if how == "finish" else Abort("ann"))
                else:
                    run.step()
            run.idle()
            generated = run.ended["ann"].generated
            cached[overlap, new] = run.run("bob", toks(1, 37) + said[:generated] + [3]).cached
            assert cached[overlap, new] <= 37 + generated
            if overlap and not has_state(layout):
                assert cached[1, new] == cached[0, new]
            elif overlap:
                assert cached[0, new] - cached[1, new] in (0, 16), "at most the checkpoint at the very end"


@each_layout
def test_f16_tables_equal_leases_and_duplicates_give_way_with_plans_in_flight(layout):
    """Two requests compute the same pages; the second's give way to the first's while there is always a plan in flight,
    and are free again (`LoadResult` compares tables and leases in every plan).

    Mutation: `StepCommits.commit` settles duplicates only when nothing is in flight.
    """
    run = Piped(*groups_of(layout, 4, pages=200), page=4, budget=400)
    prompt = toks(1, 20)
    run.submit("ann", prompt, 60)
    run.submit("bob", prompt, 60)
    run.submit("eve", toks(9, 4), 200)
    while "ann" in run.live or "bob" in run.live:
        run.step()
        assert run.executor.flights, "never idle"
    assert run.cache.stats()["steps"]["duplicates_freed"] > 0
    run.abort("eve")
    run.idle().right_answers()
    run.all_free()


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state"])
def test_t02_the_store_is_asked_under_constant_load(layout):
    """A stream that always has a plan in flight: a new request's lookup goes out with the next plan, its pages come,
    and it uses them.

    Mutation: `Scheduler.next_plan` looks for new requests only while nothing is in flight.
    """
    one = StoreRun(layout)
    prompt = toks(1, 33)
    one.serve("first", prompt, 2)
    run = StoreRun(layout, depot=one.depot, overlap=1)
    run.submit("eve", toks(9, 5), 80)
    run.plan()
    run.submit("ann", [*prompt, 5], 2)
    for _ in range(70):
        plan = run.plan()
        if len(run.executor.flights) > 1 or plan.empty:
            run.done()
        assert run.executor.flights, "there is always a plan in flight"
        run.land()
        if "ann" in run.ended:
            break
    assert run.ended["ann"].cached >= 28
    while run.executor.flights:
        run.done()
    run.close()


# ---- the same as one plan at a time


@dataclass
class Story:
    """What happens, tied to requests and what is known of them, so that it is the same however plans are made."""

    specs: list[RequestSpec]
    after: list[tuple[int, int] | None]  # submit when this other request has yielded so many tokens, or has ended
    fails: set[tuple[str, int]]  # the step fails that has a row of this one when it has yielded so many, once
    poison: dict[str, int]  # and always
    aborts: dict[str, int]
    unloads: dict[str, int]


def story(seed: int, layout: str) -> Story:
    rng = random.Random(f"{layout} {seed}")
    specs: list[RequestSpec] = []
    after: list[tuple[int, int] | None] = []
    spaces = [BASE, BASE, adapter("a"), adapter("b"), Namespace(salt="s")]
    for n in range(rng.randint(8, 14)):
        space = rng.choice(spaces)
        tokens = toks(rng.randrange(3), rng.randint(1, 50))
        if specs and rng.random() < 0.4:
            other = rng.choice(specs)
            space, tokens = other.namespace, [*other.tokens, *toks(100 + n, rng.randint(0, 9))]
        most = rng.randint(1, 30)
        eos = rng.sample(range(97), rng.choice([0, 0, 3, 20]))
        spec = RequestSpec(f"r{n}", tokens, most, space, rng.choice([0, 0, 1, -1]), eos, rng.randint(0, most))
        specs.append(spec)
        after.append((rng.randrange(n), rng.choice([0, 1, 5, 99])) if n and rng.random() < 0.6 else None)
    pick = lambda: (rng.choice(specs).id, rng.randrange(12))  # noqa: E731
    return Story(
        specs,
        after,
        {pick() for _ in range(rng.choice([0, 0, 2, 6]))},
        dict([pick()] if rng.random() < 0.2 else []),
        dict([pick(), pick()] if rng.random() < 0.5 else []),
        dict([pick()] if rng.random() < 0.3 else []),
    )


def told(run: Run, story: Story, overlap: int) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Tell a story to a scheduler. Returns how everybody ended."""
    fails, unloads, waiting = set(story.fails), dict(story.unloads), list(range(len(story.specs)))
    known = lambda id: len(run.lives[id].generated)  # noqa: E731
    for _ in range(20_000):
        for n in list(waiting):
            other = story.after[n]
            if other is not None:
                id = story.specs[other[0]].id
                if id not in run.lives or (id in run.live and known(id) < other[1]):
                    continue
            waiting.remove(n)
            run.submit_all([story.specs[n]])
        if not run.live and not waiting:
            break
        plan = run.plan()
        flights = run.executor.flights
        if plan.batch.ids and len(flights) <= overlap:
            continue
        if not flights:
            run.tell(*[run.executor.land(op, True) for op in list(run.executor.moving)])
            continue
        ids = [life.id for life in flights[0].lives if life.id in run.live]
        if flights[0].doomed:
            run.done()
            continue
        bad = [id for id in ids if (id, known(id)) in fails or known(id) >= story.poison.get(id, 1 << 30)]
        fails -= {(id, known(id)) for id in bad}
        run.fail() if bad else run.done()
        run.tell(*[run.executor.land(op, True) for op in list(run.executor.moving)])
        for id in [id for id in ids if id in run.live]:
            if known(id) >= story.aborts.get(id, 1 << 30):
                run.abort(id)
            if id in run.live and known(id) >= unloads.get(id, 1 << 30):
                del unloads[id]
                run.scheduler.evict_namespace(run.specs[id].namespace)
    else:
        raise AssertionError(f"{sorted(run.live)} do not end")
    while run.executor.flights:
        run.done()
    run.cache.check()
    return {id: (end.reason, end.generated, tuple(run.said(id)[: end.generated])) for id, end in run.ended.items()}


@pytest.mark.attack
@pytest.mark.parametrize("layout", [*LAYOUTS, "full@host", "full+2windows+state@host", "full+state@host"])
@pytest.mark.parametrize("size", ["roomy", "tight"])
def test_s14_the_same_tokens_and_the_same_ends_as_with_one_plan(layout, size):
    """Random traffic with adapters, priorities, eos, faults, aborts and unloads tied to what is known of a request,
    retraction and host: every request ends as with `overlap=0`, with the same tokens.

    Mutation: any of those above; `Outcome._yields` forgets eos for a row that was retired.
    """
    name, host = layout.removesuffix("@host"), layout.endswith("@host")
    for seed in range(6):
        tale = story(seed, layout)
        ends = []
        for overlap in (0, 1):
            groups = groups_of(name, 4, pages=100 if size == "roomy" else 22, slots=12, windows=60)
            if host:
                groups = [replace(group, host_pages=40) for group in groups]
            config = {"max_loras": seed % 2, "headroom": 0 if size == "tight" else 64}
            run = Run(*groups, page=4, budget=28, batch=7, overlap=overlap, every=4, max_overtaken=6, **config)
            ends.append(told(run, tale, overlap))
            run.scheduler.flush()
            run.cache.check()
        assert ends[0] == ends[1], f"seed {seed}"


def test_s14_what_a_doomed_event_says_does_not_matter():
    """The event of a plan behind one that failed may have any tokens, or none.

    Mutation: `Outcome.done` checks the tokens of a plan that counts as failed.
    """
    for event in (StepDone, StepFailed):
        run = Piped(full())
        run.submit("ann", toks(1, 20), 9)
        run.plan()
        step = run.plan().step
        run.fail()
        run.executor.done()
        run.tell(event(step, {} if event is StepDone else "late"))
        run.idle().right_answers()


def test_s14_cached_is_the_same_when_each_comes_after_what_it_extends():
    """Chats, turn by turn, on a roomy pool: `cached` is what it is with one plan at a time.

    Mutation: `Outcome._publish` leaves out the last page of a row that was retired.
    """

    def chat(overlap: int) -> list[Ended]:
        run = (Piped if overlap else Run)(full(200), page=4, overlap=overlap)
        ends, known = [], {n: toks(n, 5 + n) for n in range(4)}
        for turn in range(5):
            run.submit_all([RequestSpec(f"{n}.{turn}", known[n], 7 + n) for n in known])
            run.idle()
            for n in known:
                ends.append(run.ended[f"{n}.{turn}"])
                known[n] = run.known(f"{n}.{turn}") + toks(50 + n, 3)
        return ends

    assert chat(0) == chat(1)


def test_plans_tell_changes_and_seats():
    """An executor with tables of its own on the device follows `changes` alone (the content executor compares every
    plan); after a failed step and after tables have grown it is told everything; with `max_columns` they never grow,
    and who would need more is refused; slots are told with their new owners.

    Mutation: `Tables.take_changes` forgets rows written as a whole; `_withdraw` does not have everything shown again;
    `Book.admit` seats nobody.
    """
    for columns in (0, 40):
        run = Run(full(400), page=4, batch=4, max_columns=columns)
        run.submit("ann", toks(1, 30), 100)
        plan = run.plan()
        width = plan.tables["full"].shape[1]
        assert width == (columns or 16) and plan.seated == [(0, "ann")]
        places, values = plan.changes["full"]
        if not columns:
            assert places.tolist() == list(range(8)) and (values > 0).all()
        run.done()
        run.submit("bob", toks(2, 9), 40)
        assert run.plan().seated == [(1, "bob")]
        run.done()
        assert [len(run.plan().changes["full"][0]), run.done()][0] == 0, "nobody has got a page"
        run.step(40)
        assert (run.plans[-1].tables["full"].shape[1] > width) == (columns == 0)
        run.plan()
        run.fail()
        assert len(run.plan().changes["full"][0]) == run.plans[-1].tables["full"].size
        run.done()
        run.idle().right_answers()
    with pytest.raises(ValueError, match="takes 41 pages, and tables are 40 wide"):
        run.submit("long", toks(1, 161), 1)


def test_generations_of_decode_rows():
    """`generation` is the same while the decode rows are; 0 where there are none.

    Mutation: `DecodeRows._forget` counts nothing.
    """
    run = Run(full())
    run.submit("ann", toks(1, 20), 30)
    assert run.plan().batch.generation == 0
    run.done()
    seen = []
    for _ in range(3):
        seen.append(run.plan().batch.generation)
        run.done()
    run.submit("bob", toks(2, 20), 3)
    for _ in range(5):
        seen.append(run.plan().batch.generation)
        run.done()
    assert seen[0] == seen[1] == seen[2] == seen[3] != seen[4] == seen[5] != seen[6] == seen[7]
    assert rows_of(run.plans[4])[0].id == "ann" and isinstance(run.executor, ContentExecutor)
    run.idle()


# ---- what a later plan was made on


@pytest.mark.parametrize("layout", ["full", "full+window"])
def test_s14_a_page_is_told_of_after_the_page_it_follows(layout):
    """A prompt of another request ends with the token that a decode row has just yielded: its last page is promised by
    the plan behind that row's, and the row goes on below it. When that plan is done, both become real, and routers hear
    of the upper page first.

    Mutation: `HybridPrefixCache.publish_rows` does not call `computed`; or `Outcome._publish` does not name the step.
    """
    run = Piped(*groups_of(layout, 1), page=1, events=True)
    replay = Replay(run.cache)
    prompt = toks(1, 8)
    run.submit("one", prompt, 6)
    run.plan(), run.plan()
    run.done()
    run.submit("other", prompt + answer(BASE, prompt, 1), 3)
    assert [(row.id, row.start) for row in rows_of(run.plan())] == [("one", 9), ("other", 8)]
    run.done()
    run.done()
    replay.hear(run.scheduler.drain_events())
    replay.compare()
    run.idle().right_answers()


@pytest.mark.parametrize("evicted", ["before", "after"])
def test_s14_what_became_real_stays_with_a_row_whose_namespace_goes(evicted):
    """A request begins on what the plan before its own promised. That one is done, its own fails, and the namespace is
    evicted before or after: it goes on from there, with pages that were its own all along.

    Mutation: `StepCommits.rewind` sends every detached lease back to 0.
    """
    run = Piped(full())
    prompt = toks(1, 32)
    run.submit("one", prompt, 4)
    run.plan()
    run.submit("two", prompt + toks(2, 16), 4)
    assert [(row.id, row.start) for row in rows_of(run.plan())] == [("one", 32), ("two", 32)]
    if evicted == "before":
        run.scheduler.evict_namespace(BASE)
    run.done()
    run.fail()
    if evicted == "after":
        run.scheduler.evict_namespace(BASE)
    rows = len(run.rows_by("two"))
    run.idle().right_answers()
    assert run.rows_by("two")[rows].start == 32
    run.all_free()
