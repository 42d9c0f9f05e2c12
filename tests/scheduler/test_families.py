"""Families seen from the scheduler (cases F): slots, snapshots, checkpoints, and tables that equal the leases."""

from __future__ import annotations

import random

import pytest

from sapwood.scheduler import RequestSpec

from .driver import BASE, LAYOUTS, Run, each_layout, full, groups_of, has_state, state, toks, window

STATES = [layout for layout in LAYOUTS if has_state(layout)]
each_state = pytest.mark.parametrize("layout", STATES)


def checkpoints(run: Run) -> dict[str, int]:
    return {name: run.cache.stats()["steps"][name] for name in ("checkpoints", "checkpoints_skipped")}


# ---- F04


@each_state
@pytest.mark.parametrize("slots", [1, 3])
def test_f04_a_batch_that_just_fits_fits(layout, slots):
    """As many requests run at once as there are slots; one more waits until a slot comes back. No slot is left for
    checkpoints, and none is held back for them.

    Mutation: `Admission.wish` asks for two slots a request; or `PlanBuilder._chunk` takes checkpoints before all have
    come in.
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=slots))
    run.submit_all([RequestSpec(f"r{n}", toks(n, 40), 6) for n in range(slots + 1)])
    first = [row.id for row in run.step()]
    assert first == [f"r{n}" for n in range(slots)], "just as many as there are slots"
    while f"r{slots - 1}" in run.live:
        assert f"r{slots}" not in [row.id for row in run.step()]
    run.idle().right_answers()
    assert len(run.ended) == slots + 1
    run.all_free()


@each_state
def test_f04_a_checkpoint_is_taken_when_a_slot_is_free(layout):
    """With a slot to spare the prompt's last page end is kept, and a snapshot that nobody uses makes room for a newer.

    Mutation: `Checkpoints.checkpoint` takes free slots only (no eviction).
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=2))
    for n in range(3):
        run.run(f"r{n}", toks(n, 40), 2)
        assert run.cache.explain(BASE, [*toks(n, 40), 1]).cached == 32, "its own is there"
    assert checkpoints(run) == {"checkpoints": 3, "checkpoints_skipped": 0}
    run.right_answers()


@each_state
def test_f04_one_slot_serves_one_after_the_other(layout):
    """A pool of a single slot: requests with one prompt run one by one, and nobody waits for ever for a snapshot that
    cannot be made.

    Mutation: `Admission.admit_from_zero` gives up.
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=1))
    run.submit_all([RequestSpec(f"r{n}", toks(1, 48 + 5 * (n % 2)), 1 + 4 * (n % 2)) for n in range(5)])
    run.step(2)  # r0 ends at a page end: its slot is a snapshot now, which r1 could start from with a second slot
    assert run.step()[0].id == "r1"
    run.idle().right_answers()
    assert run.first_rows() == [f"r{n}" for n in range(5)]
    assert all(len(rows) == 1 for rows in run.rows)


# ---- F11


@each_state
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("interval", [1, 4])
def test_f11_the_next_turn_of_a_chat_starts_near_its_end(layout, page, interval):
    """Every turn of a chat, whatever the length of prompts and answers, starts from a snapshot at most a page and the
    checkpoint interval before the end of what was computed.

    Mutation: `Planner._checkpoint` leaves none for decode rows (a long answer would be computed again).
    """
    rng = random.Random(page)
    run = Run(*groups_of(layout, page, pages=400), page=page, checkpoint_interval=interval, every=4)
    chat: list[int] = []
    for turn in range(4):
        computed = max(0, len(chat) - 1)
        prompt = chat + toks(turn, rng.randrange(1, 3 * page + 2))
        end = run.run(f"t{turn}", prompt, rng.randrange(1, 5 * page + 2))
        assert computed - end.cached <= page * (1 + interval), f"turn {turn} starts at {end.cached} of {computed}"
        chat = run.known(f"t{turn}")
    run.right_answers()


@each_state
def test_f11_a_prompt_seen_twice_starts_at_its_last_page_end(layout):
    """A prompt of any length is hit on second sight, up to the last page end before its last token.

    Mutation: `Matcher._cuts` leaves out `last`.
    """
    for length in (17, 31, 32, 33, 47, 48, 49, 100):
        run = Run(*groups_of(layout, 16, pages=60))
        run.run("one", toks(1, length), 1)
        assert run.run("two", toks(1, length), 1).cached == (length - 1) // 16 * 16
        run.right_answers()


@each_state
def test_f11_a_branch_in_the_middle_of_a_prompt_is_hit_on_third_sight(layout):
    """Three prompts share three pages and then part: the first computes, the second gets its chunk cut where they part,
    the third starts there.

    Mutation: `Matcher._cuts` leaves out `depth`.
    """
    run = Run(*groups_of(layout, 16, pages=100))
    shared = toks(1, 48)
    cached = [run.run(f"r{n}", shared + toks(2 + n, 40), 2).cached for n in range(4)]
    assert cached == [0, 0, 48, 48]
    second = [(row.start, row.start + row.length) for row in run.rows_by("r1")]
    assert (0, 48) in second, "cut at the branch point"
    run.right_answers()


@each_state
def test_f11_a_chat_that_merely_goes_on_is_not_cut_where_it_ended(layout):
    """The next turn is one chunk to its last page end, and one for the rest: nobody has branched where the turn before
    ended, and its checkpoint stands near. Who branches there starts from that; then it is a branch, and who comes next
    starts right there.

    Mutation: `Matcher._cuts` cuts at `depth` always, or never where a snapshot is near.
    """
    run = Run(*groups_of(layout, 16, pages=300), checkpoint_interval=8, every=4)
    run.run("one", toks(1, 40), 12)  # 51 tokens are computed: three pages, and snapshots at the second and the third
    run.run("two", [*run.known("one"), *toks(2, 20)], 12)  # 83: five pages, the last snapshot at the fourth
    chat = run.known("two")
    assert len(chat) == 84
    turns = [chat + toks(5 + n, 60) for n in range(4)]
    cached = [run.run(f"t{n}", turn, 2).cached for n, turn in enumerate(turns)]
    assert cached == [64, 64, 80, 80]
    ends = [{row.start + row.length for row in run.rows_by(f"t{n}")} for n in range(2)]
    assert 80 not in ends[0] and 128 in ends[0], "one chunk up to its last page end"
    assert 80 in ends[1], "now it is a branch: cut"
    run.right_answers()


@each_state
def test_f11_a_chat_whose_snapshot_is_far_is_cut_where_it_ended(layout):
    """The checkpoint of a turn is more than a few pages before its end: the next turn leaves one there for others.

    Mutation: `Matcher._cuts` leaves out `depth` wherever a chat goes on (`_NEAR_PAGES` is a great number).
    """
    run = Run(*groups_of(layout, 16, pages=300), checkpoint_interval=1000, every=4)
    run.run("one", toks(1, 40), 200)  # 239 are computed: fourteen pages, and the only snapshot at the second
    chat = run.known("one")
    cached = [run.run(f"t{n}", chat + toks(5 + n, 60), 2).cached for n in range(3)]
    assert cached == [32, 224, 240], "where one ended, and then where the others parted"
    run.right_answers()


# ---- F15


@pytest.mark.parametrize("layout", ["full+state", "window+state"])
def test_f15_a_snapshot_that_is_about_to_be_copied_stays(layout):
    """Three slots: one holds a snapshot that B starts from in this plan. C takes the other; D finds none, although
    nobody but B needs the snapshot any more once its copy is planned. After the step it can go.

    Mutation: `Checkpoints.opening` does not hand the snapshot to the flight (the plan would copy from a slot that it
    gives to D; the executor sees that it is poisoned).
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=3))
    prompt = toks(1, 40)
    run.run("ann", prompt, 2)
    run.submit("bob", prompt + toks(2, 5), 9)
    run.submit("cyd", toks(3, 10), 9)
    run.submit("dan", toks(4, 10), 9)
    plan = run.plan()
    assert plan.batch.ids == ["bob", "cyd"] and plan.batch.starts.tolist() == [32, 0]
    source = next(copy.source for copy in plan.copies if copy.source and copy.when == "before")
    working = [int(plan.tables["state"][slot][0]) for slot in plan.batch.slots]
    assert source not in working
    run.done()
    plan = run.plan()
    assert "dan" in plan.batch.ids, "now it may take its place"
    assert plan.tables["state"][plan.batch.slots[plan.batch.ids.index("dan")]][0] == source
    run.done()
    run.idle().right_answers()


@each_state
def test_f15_a_step_with_a_copy_fails(layout):
    """The step that copies a snapshot fails: the snapshot is still there, and the row starts from it again.

    Mutation: `Follower.start_from_snapshot` leaves the lease opened (its state would go on as garbage).
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=4))
    prompt = toks(1, 40)
    run.run("ann", prompt, 2)
    run.submit("bob", prompt + toks(2, 9), 4)
    for _ in range(2):
        run.plan()
        assert run.rows[-1][0].start == 32
        run.fail()
    run.idle().right_answers()
    assert run.ended["bob"].cached == 32


# ---- F16 (the driver compares tables and leases after every plan of every test; this one goes through all phases)


@pytest.mark.attack
@each_layout
@pytest.mark.parametrize("page", [1, 4])
def test_f16_the_tables_a_plan_shows_equal_the_leases(layout, page):
    """First chunk, later chunks, decode, retraction and return, splits by others, duplicates that were replaced,
    failures: in every plan each row's table equals its lease, group by group, and nothing else stands in it.

    Mutation: `Outcome._slide` does not clear what slid out; `Pressure._grow` does not append; `Outcome.done` does not
    write what was replaced.
    """
    groups = groups_of(layout, page, pages=17, slots=7, windows=30)
    run = Run(*groups, page=page, headroom=0, budget=3 * page + 2, batch=6, every=2)
    shared = toks(1, 4 * page + 1)
    for n in range(7):
        tokens = (shared[: len(shared) - (n % 3) * page] + toks(2 + n % 4, n % 5 + 1))[: 8 * page]
        run.submit(f"r{n}", tokens, 6 * page + n % 3)
        run.submit(f"s{n}", tokens, 6 * page + n % 3)  # answers in step with the other: duplicates
        for k in range(8):
            if run.plan().empty:
                break
            run.fail() if (n, k) in ((2, 2), (4, 1)) else run.done()
    run.idle().right_answers()
    stats = run.scheduler.stats()
    phases = {"retractions": stats["retractions"], "duplicates": stats["cache"]["steps"]["duplicates_freed"]}
    if (layout, page) == ("full", 4):
        assert all(phases.values()), f"the story was meant to have all of them: {phases}"
    run.all_free()


def test_f16_tables_grow_with_the_longest_request():
    """A request that gets longer than any before it finds columns; a plan that was handed out keeps its tables.

    Mutation: `Tables.append` does not widen.
    """
    run = Run(full(100), page=1, budget=64)
    run.submit("ann", toks(1, 5), 90)
    before = run.plan()
    run.done()
    run.idle().right_answers()
    assert before.tables["full"].shape[1] < run.plans[-1].tables["full"].shape[1]


# ---- F17


@each_state
def test_f17_without_a_slot_for_a_checkpoint_the_request_goes_on(layout):
    """Two slots: one works, one holds the last checkpoint. Later page ends find no slot: the request goes on, the
    counter says so, and the old checkpoint still serves the next turn.

    Mutation: `Checkpoints.checkpoint` evicts the request's own last checkpoint to make the next (it does not read it).
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=2), checkpoint_interval=1)
    run.run("ann", toks(1, 40), 60)
    assert checkpoints(run)["checkpoints_skipped"] > 0
    made = sum(copy.when == "after" for plan in run.plans for copy in plan.copies)
    assert made == checkpoints(run)["checkpoints"] > 0
    chat = run.known("ann")
    cached = run.cache.explain(BASE, [*chat, 5]).cached
    assert cached > 0, "a checkpoint is there"
    assert run.run("next", [*chat, 5], 2).cached == cached
    run.right_answers().all_free()


def test_f17_all_slots_at_work():
    """Where every slot is somebody's working slot there is no checkpoint at all, and everybody comes to an end.

    Mutation: `Checkpoints.checkpoint` allocates without asking whether there is room.
    """
    run = Run(full(100), state(3), checkpoint_interval=1)
    run.submit_all([RequestSpec(f"r{n}", toks(n, 40), 40) for n in range(3)])
    run.idle().right_answers()
    assert checkpoints(run)["checkpoints"] == 0 and checkpoints(run)["checkpoints_skipped"] > 0


@each_state
def test_f17_a_checkpoint_that_fails_leaves_the_old_one(layout):
    """A step that would have left a new checkpoint fails: the row goes back to the old one and is right.

    Mutation: `Checkpoints.land` is what frees the old one; if `checkpoint` did (when it is planned), the row would find
    no snapshot and start from zero.
    """
    run = Run(*groups_of(layout, 16, pages=100, slots=4), checkpoint_interval=1)
    run.submit("ann", toks(1, 40), 60)
    failures = 0
    while run.live:
        plan = run.plan()
        if failures < 2 and any(copy.when == "after" for copy in plan.copies) and len(run.said("ann")) > 9:
            failures += 1
            run.fail()
            run.plan()
            assert run.rows[-1][0].start >= 32, "it goes back to its last checkpoint and no further"
        run.done()
    run.idle().right_answers()
    assert failures == 2 and 0 < run.ended["ann"].recomputed <= 2 * 32


def test_windows_and_states_free_what_they_leave_behind():
    """A long answer in a window group holds no more than its window, whatever its length.

    Mutation: `Outcome.done` does not slide.
    """
    run = Run(window(20, 12), page=4)
    run.submit("ann", toks(1, 30), 200)
    most = 0
    while run.live:
        run.step()
        if run.live:
            most = max(most, len(set(run.table("ann", "window")) - {0}))
    assert most <= 30 // 4 + 2
    run.idle().right_answers()
