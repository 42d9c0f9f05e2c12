"""Sharing while running (cases P) and what is said of it (M05, M06), through the scheduler, checked by content."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sapwood.scheduler import Abort, Finish, RequestSpec
from sapwood.sim.content import POISON, prefix_digests

from .driver import BASE, LAYOUTS, Run, answer, each_layout, each_page, full, groups_of, has_state, toks, wide, window

SHARED = [layout for layout in LAYOUTS if not has_state(layout)]
WINDOWS = [layout for layout in LAYOUTS if "wide" in LAYOUTS[layout]]
each_shared = pytest.mark.parametrize("layout", SHARED)
each_window = pytest.mark.parametrize("layout", WINDOWS)


def most_cached(layout: str, length: int, page: int) -> int:
    """How much of a prompt that somebody has computed need not be computed again."""
    if has_state(layout):
        return (length - 1) // page * page
    return min(length // page * page, length - 1)


# ---- P01


@each_layout
@each_page
@pytest.mark.parametrize("tail", [0, 5])
def test_p01_a_prompt_is_shared_while_its_first_request_decodes(layout, page, tail):
    """While A still decodes, B with the same prompt adopts all its whole pages (the last token is computed), and reads
    the same physical ones.

    Mutation: `PlanBuilder._chunk` publishes nothing (pages would be found only at the end).
    """
    run = Run(*groups_of(layout, page, pages=200), page=page)
    prompt = toks(1, 3 * page + tail)
    run.submit("ann", prompt, 40)
    while not run.said("ann"):
        run.step()
    run.step()
    run.submit("bob", prompt, 2)
    run.plan()
    assert run.rows[-1][-1].cached == most_cached(layout, len(prompt), page)
    for group in run.cache.groups:
        ours, theirs = run.table("bob", group.name), run.table("ann", group.name)
        if group.family == "full":
            pages = len(prompt) // page
            assert ours[:pages].tolist() == theirs[:pages].tolist()
    run.done()
    assert "ann" in run.live
    run.abort("ann")
    run.idle().right_answers()


# ---- P02


@each_layout
@each_page
@pytest.mark.parametrize("tail", [0, 5])
def test_p02_equal_prompts_cost_one_prefill(layout, page, tail):
    """8 equal prompts submitted together compute one prompt and 7 tails. Where every group can read what the same step
    writes, all 8 are in the first batch; with a state group the others wait for the first one's snapshot.

    Mutation: `PlanBuilder._chunk` publishes after the batch is made up (at StepDone); for state, `_admit` does not look
    at `match.pending`.
    """
    run = Run(*groups_of(layout, page, pages=200), page=page)
    prompt = toks(1, 3 * page + tail)
    run.submit_all([RequestSpec(f"r{n}", prompt, 3) for n in range(8)])
    run.plan()
    length, cached = len(prompt), most_cached(layout, len(prompt), page)
    if not has_state(layout):
        assert [(row.start, row.length) for row in run.rows[0]] == [(0, length)] + [(cached, length - cached)] * 7
    else:
        assert [(row.id, row.start) for row in run.rows[0]] == [("r0", 0)]
    run.done()
    run.idle().right_answers()
    assert run.computed() == length + 7 * (length - cached)
    assert run.recomputed() == 0


# ---- P03


@each_shared
@pytest.mark.parametrize("page", [1, 16])
def test_p03_each_chunk_can_be_adopted_before_the_prefill_ends(layout, page):
    """A long prompt is computed in chunks of two pages; after each chunk somebody more urgent, who shares just what is
    computed so far, adopts all of it. (A state group offers its snapshots only.)

    Mutation: `PlanBuilder._chunk` publishes only the chunk that ends the prompt.
    """
    run = Run(*groups_of(layout, page, pages=200), page=page, budget=2 * page)
    prompt = toks(1, 20 * page)
    run.submit("long", prompt, 2)
    for chunk in range(4):
        start, length = run.step()[-1][1:3]
        assert run.rows[-1][-1].id == "long"
        whole = (start + length) // page * page
        assert run.run(f"s{chunk}", prompt[:whole] + toks(9 + chunk, 1), 1, priority=-1).cached == whole
        assert not run.said("long"), "its prefill has not ended"
    run.idle().right_answers()


@each_layout
def test_p03_two_long_prompts_share_chunk_by_chunk(layout):
    """A prompt may adopt more before each of its chunks: two long ones that come together compute little more than one.

    Mutation: `PlanBuilder._chunk` does not call `adopt`.
    """
    run = Run(*groups_of(layout, 16, pages=200), budget=48)
    prompt = toks(1, 200)
    run.submit("ann", prompt, 2)
    run.submit("bob", prompt, 2, priority=0)
    run.idle().right_answers()
    assert run.computed() <= 200 + 16
    run = Run(*groups_of(layout, 16, pages=200), budget=48)
    run.submit("ann", prompt, 2)
    run.step()
    run.submit("bob", prompt[:190] + toks(2, 20), 2, priority=-1)
    run.idle().right_answers()
    assert run.computed() <= 200 + 20 + (16 if not has_state(layout) else 200)


# ---- P05


def reads_of(run: Run, plan) -> None:
    """What each row of a plan is about to read of its windows, by this test's own arithmetic: a query at s sees W keys,
    itself included. Everything before the row's start must be there, with the digest of the row's own tokens."""
    memory = run.executor.double.memory
    for row in run.rows[-1]:
        digests = prefix_digests(run.specs[row.id].namespace, run.known(row.id))
        for group in run.cache.groups:
            if group.family == "state":
                continue
            table = plan.tables[group.name][row.slot]
            low = max(0, row.start - group.window + 1) if group.window else 0
            for position in range(low, row.start):
                page = int(table[position // run.page])
                value = memory[group.name, "device"].values[page, position % run.page]
                promised = value == POISON  # written by a row of this very plan, or by the copy before it
                assert page and (promised or value == digests[position]), f"{row.id} {group.name} {position}"


@pytest.mark.attack
@each_window
@each_page
def test_p05_the_same_tokens_with_sharing_on_and_off(layout, page):
    """Prompts longer than the windows, shared while running: each yields the tokens it yields with prefix caching
    off, and every position of its window is in its pages when its row runs.

    Mutation: `Window.slid` gives up one page too many; or `Window.reads`, `pages_read` and `slid` all begin a page late
    (the cache and the executor would agree on too little).
    """
    system = toks(1, 4 * page + 3)
    specs = [
        RequestSpec(f"r{n}", system[: len(system) - n % 3] + toks(2 + n % 4, 1 + n), min(page, 24) + 4)
        for n in range(4)
    ]
    said = []
    for caching in (True, False):
        run = Run(*groups_of(layout, page, pages=200), page=page, budget=3 * page + 2, prefix_caching=caching, every=3)
        for spec in specs:
            run.submit_all([spec])
            reads_of(run, run.plan())
            run.done()
        while run.live:
            reads_of(run, run.plan())
            run.done()
        said.append({spec.id: run.said(spec.id) for spec in specs})
        assert caching == any(end.cached for end in run.ended.values())
        run.right_answers()
    assert said[0] == said[1]


# ---- P06


def test_p06_no_boundary_without_its_window_pages():
    """The full pages of a prompt are there and its window pages are gone: it is not offered, and says why. It computes
    from the beginning; the executor would have seen a hole.

    Mutation: `Matcher.boundary` asks only the first family.
    """
    run = gone_window()
    prompt = toks(1, 64)
    assert run.cache.explain(BASE, prompt).reason == "window_gone"
    run.submit("again", prompt, 2)
    run.plan()
    (row,) = run.rows[-1]
    assert (row.start, row.cached) == (0, 0)
    run.done()
    run.idle().right_answers()


def gone_window() -> Run:
    """Full pages of a 64-token prompt are cached, and nothing of its window group: others have passed through that."""
    run = Run(full(60), window(40, 8))
    run.run("first", toks(1, 64))
    run.run("other", toks(2, 128), 2)
    tree = run.cache.stats()["pages"]
    assert tree["full"]["device"]["tree"] == 12
    return run


@pytest.mark.attack
@each_window
def test_p06_random_prompts_in_small_window_pools(layout):
    """Prompts that branch off each other everywhere, with window pools so small that holes are everywhere: whatever is
    offered can be served.

    Mutation: `Family.deepest` looks at the last page of its window only.
    """
    rng = random.Random(layout)
    run = Run(*groups_of(layout, 4, pages=120, slots=6, windows=9), page=4, budget=40, batch=6, every=2)
    bodies = [toks(1, 60), toks(2, 60)]
    for n in range(30):
        body = rng.choice(bodies)
        prompt = body[: rng.randrange(1, len(body))] + toks(3 + n, rng.randrange(1, 6))
        bodies.append(prompt)
        run.submit(f"r{n}", prompt, rng.randrange(1, 12))
        for _ in range(rng.randrange(5)):
            if run.live:
                run.step()
    run.idle().right_answers().all_free()


# ---- P10


@each_layout
@pytest.mark.parametrize("page", [1, 4, 16])
def test_p10_two_that_computed_the_same_end_with_one_copy(layout, page):
    """Two requests that answer the same in step fill the same pages in the same steps: the tree keeps one, the
    duplicate is freed, and the table of its request shows the shared page.

    Mutation: `Outcome.done` does not write what `step_commit` replaced into the tables.
    """
    run = Run(*groups_of(layout, page, pages=200), page=page)
    prompt = toks(1, 2 * page)
    run.submit("ann", prompt, 2 * page + 4)
    run.submit("bob", prompt, 2 * page + 4)
    run.step(2)
    while "bob" in run.live and "ann" in run.live and len(run.said("bob")) < 2 * page + 3:
        run.step()
    if not has_state(layout):
        assert run.cache.stats()["steps"]["duplicates_freed"] > 0
        run.plan()
        for group in run.cache.groups:
            ours, theirs = run.table("ann", group.name), run.table("bob", group.name)
            whole = int(run.rows[-1][0].start) // page
            assert ours[:whole].tolist() == theirs[:whole].tolist(), "they share what they both computed"
        run.done()
    run.idle().right_answers()
    tree = run.owned("tree")
    if "full" in tree:
        assert tree["full"] == (len(prompt) + 2 * page + 3) // page
    run.all_free()


def test_p10_who_reads_nothing_leaves_no_second_copy():
    """A prompt computed again by a request that reads nothing from the cache is there once when both have ended.

    Mutation: `Lease.private` forgets duplicates (they would leak).
    """
    for layout in LAYOUTS:
        run = Run(*groups_of(layout, 16))
        prompt = toks(1, 70)
        run.submit("ann", prompt, 9)
        run.step()
        run.submit("bob", prompt, 9, reads_cache=False)
        run.idle().right_answers()
        assert run.ended["bob"].computed == 70
        if "full" in LAYOUTS[layout]:
            assert run.owned("tree")["full"] == 4, layout
        run.all_free()


# ---- P11


@each_window
@pytest.mark.parametrize("page", [1, 16])
def test_p11_generated_tokens_beyond_the_window_are_adopted(layout, page):
    """A has answered far beyond its window and goes on; B asks all that and one thing more: it
    adopts all whole pages of it, and says what it says with sharing off.

    Mutation: `Outcome._publish` hands nothing to the tree.
    """
    run = Run(*groups_of(layout, page, pages=300), page=page, checkpoint_interval=1)
    run.submit("ann", toks(1, page + 1), 5 * wide(page) + 30)
    while len(run.said("ann")) < 2 * wide(page) + 3:
        run.step()
    so_far = run.known("ann")
    run.submit("bob", [*so_far, 5], 6)
    while "bob" in run.live:
        run.step()
    assert "ann" in run.live, "it still decodes"
    cached = run.ended["bob"].cached
    assert cached == (len(so_far) - 1) // page * page, "whole pages up to the last computed position"
    assert run.said("bob") == answer(BASE, [*so_far, 5], 6)
    run.abort("ann")
    run.idle().right_answers()


# ---- P12


def computed_pages(run: Run, id: str) -> int:
    """Whole pages of what a request has computed: the last token it yielded was never computed."""
    return (len(run.known(id)) - 1) // run.page


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("how", ["length", "stop", "finish", "abort", "abort in flight"])
def test_p12_what_is_published_ends_at_the_last_computed_position(layout, page, how):
    """However a request ends, also exactly at a page end, only whole pages of what it has computed can be found: not
    the page that its last token would fill. The next turn reads no other (the executor would see it).

    Mutation: `Book.end` hands the page that the last token fills to `finish_request`, as if it were computed.
    """
    for short in range(3 if page == 1 else page):
        if page == 16 and 2 < short < 14:
            continue
        run = Run(*groups_of(layout, page, pages=100), page=page, checkpoint_interval=1)
        prompt = toks(1, 2 * page + 1)
        most = 2 * page - short + 3
        said = answer(BASE, prompt, most)
        if how == "length":
            run.submit("ann", prompt, most)
        elif how == "stop":
            first = said.index(said[-1]) + 1
            run.submit("ann", prompt, 9 * page, eos=(said[-1],), min_tokens=min(most, 9 * page) if first < most else 0)
        else:
            run.submit("ann", prompt, 9 * page)
        while "ann" in run.live and len(run.said("ann")) < most:
            run.step()
        if how == "abort in flight":
            run.plan()
            run.abort("ann")
            run.done()
            del run.lives["ann"].known[-1]  # the token of the step that ran under the abort: nobody has it
        elif how == "finish":
            run.tell(Finish("ann"))
        elif how == "abort":
            run.tell(Abort("ann"))
        run.idle()
        assert len(run.said("ann")) == most
        pages = computed_pages(run, "ann")
        if "full" in LAYOUTS[layout]:
            assert run.owned("tree")["full"] == pages, f"{len(run.known('ann'))} tokens are known"
        if not has_state(layout):
            found = run.run("next", [*run.known("ann"), 96, 95], 2).cached
            assert found == pages * page
        else:
            found = run.run("next", [*run.known("ann"), 96, 95], 2).cached
            assert found <= pages * page
        run.right_answers()


# ---- P14


def test_p14_only_the_holes_are_filled_where_window_pages_are_gone():
    """A prompt whose window pages are gone is computed from the beginning: its full pages stay shared, `write_from`
    says that nothing of them is written, none is taken; the window's holes are filled, and the next one hits.

    Mutation: `HybridPrefixCache.write_from` returns `start` for every group.
    """
    run = gone_window()
    prompt = toks(1, 64)
    before = run.owned("tree")["full"]
    run.submit("again", prompt, 1)
    plan = run.plan()
    assert plan.batch.starts.tolist() == [0] and plan.batch.lengths.tolist() == [64]
    assert plan.batch.write_from["full"].tolist() == [64] and plan.batch.write_from["window"].tolist() == [0]
    assert run.owned("leases")["full"] == 0, "not one page of the full group is taken"
    run.done()
    run.idle().right_answers()
    assert run.owned("tree")["full"] == before and run.cache.stats()["steps"]["duplicates_freed"] == 0
    assert run.run("third", prompt).cached == 63


@pytest.mark.parametrize("page", [1, 16])
def test_p14_only_the_holes_are_filled_where_the_snapshot_is_gone(page):
    """The same where the snapshot was evicted: the state is computed from zero, the full pages stay shared.

    Mutation: as above.
    """
    run = Run(*groups_of("full+state", page, pages=60, slots=2), page=page, budget=32 * page)
    prompt = toks(1, 4 * page + 1)
    run.run("first", prompt)
    run.run("other", toks(2, 4 * page + 1))
    run.submit_all([RequestSpec(f"x{n}", toks(3 + n, 2), 4) for n in range(2)])  # both slots, so no snapshot is left
    run.idle()
    assert run.cache.explain(BASE, prompt).reason == "no_snapshot"
    before = run.owned("tree")["full"]
    run.submit("again", prompt, 1)
    plan = run.plan()
    assert plan.batch.starts.tolist() == [0]
    there = (4 * page + 1) // page * page
    assert plan.batch.write_from["full"].tolist() == [there] and plan.batch.write_from["state"].tolist() == [0]
    run.done()
    run.idle().right_answers()
    assert run.owned("tree")["full"] == before and run.cache.stats()["steps"]["duplicates_freed"] == 0
    assert run.run("third", prompt).cached == 4 * page


# ---- M05


def really_adopted(run: Run, id: str) -> int:
    """Prompt tokens that a request passed by adopting them and not by computing, from the rows of its plans alone."""
    at = adopted = 0
    for row in run.rows_by(id):
        if row.start > at:
            adopted += min(row.start, len(run.specs[id].tokens)) - min(at, len(run.specs[id].tokens))
        at = max(at, row.start + row.length)
    return adopted


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("pages", [9, 60])
def test_m05_cached_is_what_was_really_adopted(layout, pages):
    """`Ended.cached`, and `cached` of the batch of its first token, equal the prompt tokens that the request's rows
    skipped the first time; `cached` and `computed` make the prompt; a retraction changes neither (`recomputed`).

    Mutation: `Request.begins_at` counts from 0 and not from where the request has been (twice after a retraction).
    """
    rng = random.Random(pages)
    run = Run(*groups_of(layout, 16, pages=pages, slots=4), headroom=0, budget=40, batch=5, every=3)
    bodies = [toks(1, 80)]
    for n in range(24):
        body = rng.choice(bodies)
        keep = len(body) if n % 3 else rng.randrange(len(body))
        prompt = (body[:keep] + toks(2 + n % 5, rng.randrange(1, 12)))[:90]
        bodies.append(prompt)
        run.submit(f"r{n}", prompt, rng.randrange(1, 30))
        for _ in range(rng.randrange(7)):
            if run.live:
                run.step()
    run.idle().right_answers()
    if pages == 9 and layout == "full":
        assert run.scheduler.stats()["retractions"] > 0
    assert any(end.cached for end in run.ended.values())
    computed = sum(row.length for rows in run.rows for row in rows)
    for id, end in run.ended.items():
        assert end.cached == really_adopted(run, id), id
        assert end.cached + end.computed == end.prompt
        first = next(row for row in run.rows_by(id) if row.samples)
        assert first.cached == end.cached
    assert computed == sum(end.computed + end.recomputed + end.generated - 1 for end in run.ended.values())


# ---- M06


@each_layout
@each_page
@pytest.mark.parametrize("tail", [0, 1, 5])
def test_m06_the_same_prompt_twice_in_a_row(layout, page, tail):
    """The second computes at least one token, no more than its tail, and says the same.

    Mutation: `Matcher.match` lets a prompt start at its very end (`boundary * size` without `length - 1`).
    """
    run = Run(*groups_of(layout, page, pages=100), page=page)
    prompt = toks(1, 2 * page + tail)
    first, second = (run.run(id, prompt, 4) for id in ("one", "two"))
    assert first.cached == 0 and run.said("one") == run.said("two")
    assert second.computed == len(prompt) - most_cached(layout, len(prompt), page) >= 1
    assert np.sum(run.plans[0].batch.lengths) >= 1
    run.right_answers()
