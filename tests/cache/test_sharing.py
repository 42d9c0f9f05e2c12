"""Stories of pages shared by reference, and of publishing while running (cases M and P), through the facade."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sapwood.cache import BlockStored, HybridPrefixCache, Namespace, token_bytes

from .driver import BASE, Engine, Request, full, state, toks, window
from .stories import PAGE, all_free, crowd, engine_of, hit, leave, newcomer, owned, step

WIDE = 400  # a window that sees everything in these stories

SHARED = {
    "full": lambda: (full(24),),
    "window": lambda: (window(WIDE, 103),),
    "full+window": lambda: (full(24), window(WIDE, 103)),
}
ALL = {
    "full": lambda: (full(24, 24),),
    "window": lambda: (window(6, 24, 24),),
    "full+window": lambda: (full(24, 24), window(6, 24, 24)),
    "full+state": lambda: (full(24, 24), state(8, 8)),
    "full+window+state": lambda: (full(24, 24), window(6, 24, 24), state(8, 8)),
}

each_shared = pytest.mark.parametrize("layout", SHARED)
each_layout = pytest.mark.parametrize("layout", ALL)


def table(engine: Engine, request: Request, group: str) -> np.ndarray:
    return engine.cache.table(request.lease, group)


def used(engine: Engine, group: str) -> int:
    pages = engine.pages(group)
    return pages["capacity"] - pages["free"]


def bytes_of(engine: Engine, group: str, page: int) -> np.ndarray:
    """What stands in a device page of the content double."""
    return engine.double.memory[group, "device"].values[page].copy()


def reach(engine: Engine, tokens) -> int:
    """How many pages of a prompt others could find: the full ones if there are such, else those it can begin behind."""
    match = hit(engine, tokens)
    return match.depth if any(group.family == "full" for group in engine.cache.groups) else match.boundary


def by_twos(engine: Engine) -> None:
    """Two steps at a time: the second is planned before the token of the first is known, so the page that this token
    fills is not published with a plan, but when the step is done."""
    assert engine.plan() and engine.plan()
    engine.done()
    engine.done()


each_pace = pytest.mark.parametrize("pace", [step, by_twos], ids=["in step", "by twos"])


# ---- M01


@each_shared
def test_m01_two_live_requests_read_the_same_pages(layout):
    """Two live requests with one prefix read the same physical pages, and the pool counts them once.

    Mutation: `Tree.walk` finds nothing (the second request computes pages of its own).
    """
    engine = engine_of(*SHARED[layout]())
    prefix = toks(1, 16)
    ann = engine.submit("ann", prefix + toks(2, 3), 5)
    step(engine)
    bob = engine.submit("bob", prefix + toks(3, 3), 5)
    engine.plan()
    assert bob.cached == 16
    for group in engine.cache.groups:
        theirs, ours = table(engine, ann, group.name), table(engine, bob, group.name)
        assert theirs[:4].all() and np.array_equal(theirs[:4], ours[:4]), f"{group.name}: they read different pages"
        assert theirs[4] != ours[4], f"{group.name}: what each writes is its own"
        assert used(engine, group.name) == len({*theirs.tolist(), *ours.tolist()}), f"{group.name}: counted twice"
    engine.idle()
    all_free(engine)


# ---- M02


@each_shared
def test_m02_adopting_copies_nothing(layout):
    """Adopting a cached prefix copies no page and takes none: it is served by reference to the last token.

    Mutation: `Admission.grow` gives `columns` new pages without subtracting those the lease has already.
    """
    engine = engine_of(*SHARED[layout]())
    prompt = toks(1, 32)
    engine.run("ann", prompt)
    before = owned(engine, "free")
    bob = engine.submit("bob", prompt, 2)
    engine.plan()
    assert bob.cached == 31
    assert owned(engine, "free") == before, "to adopt a prefix takes no page"
    assert engine.cache.stats()["copies"] == 0 and not engine.double.steps[engine.step].copies
    (row,) = engine.double.steps[engine.step].rows
    assert (row.start, row.length) == (31, 1) and set(row.write_from.values()) == {32}
    engine.idle()
    all_free(engine)


# ---- M03


@each_shared
def test_m03_a_request_that_diverges_inside_a_page_gets_its_own_copy(layout):
    """Who diverges inside a page computes on in a copy of it; the shared page stays byte for byte what it was.

    Mutation: `Checkpoints.opening` (copies before the batch) leaves out the copy of `lease.source`; or its target is
    the source itself.
    """
    engine = engine_of(*SHARED[layout]())
    prompt = toks(1, 16)
    ann = engine.submit("ann", prompt, 9)
    step(engine)
    shared = {g.name: int(table(engine, ann, g.name)[2]) for g in engine.cache.groups}
    before = {name: bytes_of(engine, name, page) for name, page in shared.items()}

    bob = engine.submit("bob", prompt[:11] + toks(2, 5), 4)
    engine.plan()
    assert bob.cached == 11, "two whole pages and three tokens of the third"
    copies = {copy.group: copy for copy in engine.double.steps[engine.step].copies}
    assert set(copies) == set(shared), "one copy a group"
    for name, copy in copies.items():
        mine = int(table(engine, bob, name)[2])
        assert (copy.source, copy.target, copy.tokens, copy.when) == (shared[name], mine, 3, "before")
        assert mine != shared[name]
    engine.idle()
    assert engine.cache.stats()["copies"] == len(shared)
    for name, page in shared.items():
        assert np.array_equal(bytes_of(engine, name, page), before[name]), f"{name}: the shared page was written"
    assert ann.cached == 0 and len(ann.generated) == 9, "the content double has checked every token it read"
    assert engine.run("cyd", prompt + [1]).cached == 16
    all_free(engine)


@each_shared
def test_m03_the_page_under_copy_is_held_until_its_step_is_done(layout):
    """The source of a copy on write cannot be evicted between admission and the end of the step that copies it.

    Mutation: `opening` lets go of `lease.source` instead of handing it to the flight of the step.
    """
    engine = engine_of(*(group for group in SHARED[layout]()))
    prompt = toks(1, 8)
    engine.run("ann", prompt)
    name = engine.cache.groups[0].name
    page = engine.submit("see", prompt, 1)
    engine.plan()
    source = int(table(engine, page, name)[1])
    engine.settle()

    engine.submit("bob", prompt[:6] + toks(2, 2), 1)
    engine.plan()
    assert engine.double.steps[engine.step].copies[0].source == source
    rest = min(g.device_pages for g in engine.cache.groups) - 3
    assert newcomer(engine, 1, rest + 1) is None, "only by taking the page under copy could this fit"
    lease = newcomer(engine, 1, rest)
    assert lease is not None, "all other memory is there to be had"
    engine.settle()
    engine.cache.finish_request(lease, b"", 0, None)
    engine.cache.unbind(lease.binding)
    assert newcomer(engine, 2, rest + 1) is not None, "now it can go"


def test_m03_no_room_for_the_copy_means_no_copy():
    """A request that fits only if the page it would copy is evicted is admitted without the copy.

    Mutation: `Admission.admit` gives up (returns None) when the sibling cannot be held as well.
    """
    engine = engine_of(full(3))
    engine.run("ann", toks(1, 4))
    bob = engine.submit("bob", toks(1, 2) + toks(2, 10), 1)
    assert engine.plan(), "with three pages for three pages it must run"
    assert bob.cached == 0 and not engine.double.steps[engine.step].copies
    engine.idle()
    all_free(engine)


# ---- M04


@each_layout
@each_pace
@pytest.mark.parametrize("answer", [8, 10])
def test_m04_a_finished_request_serves_the_next_prompt_and_answer_alike(layout, pace, answer):
    """The full pages of a finished request, prompt and generated tokens, serve the next; its part-filled tail is gone.

    Mutation: `publish_rows` hands nothing to the tree (generated pages are lost); or `StepCommits._drop` does not
    release `lease.private` (the tail leaks).
    """
    engine = engine_of(*ALL[layout](), every=1)
    ann = engine.submit("ann", toks(1, 5), answer)
    while not ann.ended:
        pace(engine)
    assert ann.real == 4 + answer, "the last sampled token is never computed"
    assert owned(engine, "leases") == dict.fromkeys(owned(engine, "leases"), 0)
    for group in engine.cache.groups:
        if group.family == "full":
            assert engine.pages(group.name)["tree"] == 3, "three whole pages are kept, a part-filled one is not"
    bob = engine.run("bob", ann.tokens[:13] + toks(2, 3))
    assert bob.cached == 12
    all_free(engine)


def test_m04_pages_filled_since_the_last_publish_are_given_at_the_end():
    """An engine that publishes only when a request ends hands over all its whole pages with `fill`.

    Mutation: `finish_request` does not publish `fill`.
    """
    cache = HybridPrefixCache(PAGE, [full(8)])
    binding = cache.bind(BASE)
    tokens = token_bytes(toks(1, 14))
    lease, _ = cache.admit(cache.match_prefix(binding, tokens), 14)
    cache.step_commit(1)
    cache.finish_request(lease, tokens[: 3 * PAGE * 4], 14, None)
    cache.check()
    assert cache.stats()["pages"]["full"]["device"]["tree"] == 3
    assert cache.match_prefix(binding, tokens).start == 12


# ---- M07


@each_shared
def test_m07_pages_go_when_the_last_reader_ends(layout):
    """While one of two readers lives nothing of the prefix can be evicted; when the last ends all of it can.

    Mutation: `Tree.unpin` treats every unpin as the last (`copy.holds = 0`), or `PagePool.unread` takes all readers.
    """
    engine = engine_of(*SHARED[layout]())
    prefix = toks(1, 16)
    for name in ("ann", "bob"):
        engine.submit(name, prefix + [ord(name[0])], 30)
    step(engine)
    engine.abort("ann")
    bob = engine.requests["bob"]
    prefix_pages = {g.name: table(engine, bob, g.name)[:4].tolist() for g in engine.cache.groups}

    room = min(engine.pages(g.name)["free"] for g in engine.cache.groups)
    tight = next(g.name for g in engine.cache.groups if engine.pages(g.name)["free"] == room)
    assert room == engine.pages(tight)["capacity"] - 5, "four shared pages, and one bob has begun"
    assert newcomer(engine, 1, room + 1) is None, "bob still reads the prefix"
    guest = newcomer(engine, 2, room)
    assert guest is not None
    assert {g.name: table(engine, bob, g.name)[:4].tolist() for g in engine.cache.groups} == prefix_pages
    step(engine, times=2)

    engine.cache.finish_request(guest, b"", 0, None)
    engine.cache.unbind(guest.binding)
    engine.abort("bob")
    assert hit(engine, prefix).boundary == 4, "nobody reads it, and nobody has needed its place yet"
    assert newcomer(engine, 3, engine.pages(tight)["capacity"]) is not None, "now all of it can go"
    assert hit(engine, prefix).boundary == 0


@each_shared
def test_m07_an_unhooked_prefix_goes_with_its_last_reader(layout):
    """The pages of an evicted namespace are freed when the last of its readers ends, and not before.

    Mutation: `detach_namespace` releases pages that have readers (double free), or `PagePool.unread` keeps unhooked
    ones.
    """
    engine = engine_of(*SHARED[layout]())
    prefix = toks(1, 16)
    for name in ("ann", "bob"):
        engine.submit(name, prefix + [ord(name[0])], 30)
    step(engine)
    engine.cache.evict_namespace(BASE)
    engine.check()
    assert set(owned(engine, "unhooked").values()) == {4}
    step(engine)
    engine.abort("ann")
    assert set(owned(engine, "unhooked").values()) == {4}, "bob still reads them"
    step(engine)
    engine.abort("bob")
    for group in engine.cache.groups:
        assert engine.pages(group.name)["free"] == group.device_pages


# ---- P04


@each_shared
def test_p04_what_is_published_is_pinned_by_its_publisher(layout):
    """What a request has published cannot be evicted while it runs: prompt, chunks and generated pages alike.

    Mutation: `Publisher._append` makes the new child without a hold (`copy.holds = 0`); for windows, `_fill` adds no
    reader to the pages it hands over.
    """
    engine = engine_of(*SHARED[layout]())
    ann = engine.submit("ann", toks(1, 16), 30)
    smallest = min(group.device_pages for group in engine.cache.groups)
    for chunk in (8, 8, 4, 4, 4, 4, 4, 4):
        step(engine, chunk)
        tables = {g.name: table(engine, ann, g.name).tolist() for g in engine.cache.groups}
        mine = max(len(ids) for ids in tables.values())
        assert newcomer(engine, chunk, smallest - mine + 1) is None, "only by taking ann's pages could this fit"
        crowd(engine, 1, smallest - mine)
        assert {g.name: table(engine, ann, g.name).tolist() for g in engine.cache.groups} == tables
        assert hit(engine, ann.tokens).depth == ann.real // PAGE, "published, and found by others"
    engine.idle()
    all_free(engine)


# ---- P08


@each_pace
@pytest.mark.parametrize("namespace", [BASE, Namespace(adapter=b"a" * 32)], ids=["base", "adapter"])
def test_p08_pages_published_while_running_carry_their_hashes(namespace, pace):
    """Each page published by a running request is announced under the hash of its whole prefix, and the hashes of a
    prompt that extends it go on from there.

    Mutation: `Publisher.publish_rows` (pages of decoding rows) announces nothing; or `ensure_hashes` begins a node's
    chain without its parent's last digest.
    """
    engine = engine_of(*ALL["full"](), events=True)
    ann = engine.submit("ann", toks(1, 9), 20, namespace)
    while ann.real < 20:
        pace(engine)
    assert not ann.ended
    told = [event for event in engine.events if isinstance(event, BlockStored)]
    digests = b"".join(event.digests for event in told)
    right = engine.cache.page_hashes(namespace, ann.tokens[:20])
    assert digests == b"".join(right) and len(right) == 5, "every full page so far, once, in order"
    for before, after in itertools.pairwise(told):
        assert after.parent_digest == before.digests[-32:]
    assert told[0].parent_digest is None

    bob = engine.submit("bob", ann.tokens[:20] + toks(2, 9), 1, namespace)
    engine.events.clear()
    engine.plan()
    engine.settle()
    (more,) = [event for event in engine.events if isinstance(event, BlockStored)]
    assert bob.cached == 20
    assert more.parent_digest == right[4], "bob's first page follows ann's last"
    assert more.digests == b"".join(engine.cache.page_hashes(namespace, bob.tokens)[5:7])
    engine.idle()


def test_p08_hashes_are_kept_for_a_store_without_events():
    """With `hashes` and without events, every real page of a running request has its hash when it is offered to save.

    Mutation: `Publisher.became_real` and `publish_rows` hash only when events are announced.
    """
    engine = engine_of(full(24, 24), hashes=True)
    ann = engine.submit("ann", toks(1, 10), 20)
    keys = {}
    for _ in range(13):
        step(engine, 4)
        for span in engine.spans:
            for page in range(span.first, span.last):
                at = 32 * (page - span.node.start)
                keys[page] = bytes(span.node.hashes[at : at + 32])
    assert [keys[page] for page in sorted(keys)] == engine.cache.page_hashes(BASE, ann.tokens[:20])


def test_p08_hashes_are_those_of_the_public_vector():
    """Tokens 1..32 in pages of 16 hash to the two digests of the public contract.

    Mutation: `chain` hashes tokens big-endian, or puts the parent's digest behind them.
    """
    cache = HybridPrefixCache(16, [full(8)])
    first, second = cache.page_hashes(BASE, list(range(1, 33)))
    assert first.hex().startswith("77d735ce838418aa") and second.hex().startswith("1170426cf2449ceb")


# ---- P09


def nothing_of(engine: Engine, *prompts) -> None:
    """No event, no host copy, nothing to find: as if it had never been planned."""
    assert not [event for event in engine.events if isinstance(event, BlockStored)], "an uncomputed page was announced"
    assert not engine.operations, "an uncomputed page is being saved"
    for group in engine.cache.groups:
        assert engine.pages(group.name, "host")["free"] == group.host_pages
    for prompt in prompts:
        assert hit(engine, prompt).cached == 0 and reach(engine, prompt) == 0
        assert engine.cache.explain(BASE, prompt).cached == 0


@each_layout
def test_p09_a_failed_step_leaves_nothing_promised_behind(layout):
    """After a failed step nothing it promised can be found, announced or saved, and its readers compute it again.

    Mutation: `StepCommits.failed` does not `withdraw` the promises of the step.
    """
    engine = engine_of(*ALL[layout](), events=True, save="through")
    prompt = toks(1, 14)
    ann = engine.submit("ann", prompt + [1, 2], 6)
    bob = engine.submit("bob", prompt + [3], 6)
    engine.plan()
    if "state" not in layout:
        assert bob.cached >= 12, "bob reads what ann promised in the same step"
    engine.fail()
    nothing_of(engine, ann.tokens, bob.tokens)
    assert ann.real == bob.real == 0, "both begin again"
    engine.idle()
    assert len(ann.generated) == len(bob.generated) == 6
    assert ann.computed == 16 + 5, "the failed step counts for nothing"
    assert reach(engine, prompt + [9]) == 3
    all_free(engine)


@each_layout
@pytest.mark.parametrize("second", ["done", "fail"])
def test_p09_under_overlap_the_later_step_falls_with_the_first(layout, second):
    """With two steps in flight, the failure of the first withdraws what both promised, whatever the second reports.

    Mutation: `StepCommits.failed` withdraws only the promises of the step itself, or `commit` takes the word of a
    doomed one.
    """
    engine = engine_of(*ALL[layout](), events=True, save="through")
    prompt = toks(1, 24)
    ann = engine.submit("ann", prompt, 6)
    engine.plan(8)
    bob = engine.submit("bob", prompt + [3], 6)
    assert engine.plan(8) == 2
    assert len(engine.flights) == 2
    memory = owned(engine, "free")
    engine.fail()
    nothing_of(engine, prompt, prompt + [3])
    assert owned(engine, "free") == memory, "memory that the second step still touches is given to nobody"
    assert sum(owned(engine, "flight").values()) > 0
    engine.done() if second == "done" else engine.fail()
    nothing_of(engine, prompt, prompt + [3])
    assert ann.computed == bob.computed == 0
    engine.idle()
    assert len(ann.generated) == len(bob.generated) == 6
    assert reach(engine, prompt + [9]) == 6
    all_free(engine)


@each_layout
def test_p09_what_was_real_before_stays(layout):
    """A failed step takes back its own promises only: pages of earlier steps stay, and nobody computes them again.

    Mutation: `StepCommits._fall_back_all` takes every dependency of a lease, not those from the failed step on.
    """
    engine = engine_of(*ALL[layout](), events=True, every=1)
    prompt = toks(1, 24)
    ann = engine.submit("ann", prompt, 3)
    step(engine, 8)
    engine.events.clear()
    engine.plan(8)
    engine.plan(8)
    engine.fail()
    engine.done()
    assert not engine.events
    assert reach(engine, prompt) == 2
    assert engine.cache.explain(BASE, prompt).cached <= 8
    if "state" not in layout:
        assert ann.real == 8 and engine.cache.explain(BASE, prompt).cached == 8
    engine.idle()
    all_free(engine)


@each_layout
def test_p09_a_reader_that_ends_while_its_step_fails_leaks_nothing(layout):
    """Maker and reader both end while their steps are in flight; then the first fails: every page comes back.

    Mutation: `StepCommits.end` drops a lease at once although a step in flight has its rows.
    """
    engine = engine_of(*ALL[layout](), save="through")
    prompt = toks(1, 14)
    engine.submit("ann", prompt + [1], 6)
    engine.submit("bob", prompt + [2], 6)
    engine.plan(8)
    engine.plan(8)
    before = owned(engine, "free")
    engine.abort("ann")
    engine.abort("bob")
    assert owned(engine, "free") == before, "the steps in flight still write there"
    engine.fail()
    engine.done()
    for group in engine.cache.groups:
        assert engine.pages(group.name)["free"] == group.device_pages


@each_layout
def test_p09_memory_of_a_doomed_step_is_given_to_nobody(layout):
    """The first of two steps fails and the request is aborted: what the second still writes is given to nobody until
    its event has come.

    Mutation: `StepCommits.fall_back` (pages) or `StepCommits.end` (working slots) frees at once while a doomed step is
    in flight.
    """
    engine = engine_of(*ALL[layout]())
    engine.submit("ann", toks(1, 30), 6)
    engine.plan(7)
    engine.plan(7)
    touched = {
        (name, page)
        for row in engine.double.steps[2].rows
        for name, pages in row.tables.items()
        for page in pages[row.start // PAGE if name != "state" else 0 :].tolist()
        if page
    }
    engine.fail()
    engine.abort("ann")
    guests = [newcomer(engine, seed) for seed in range(60)]
    given = {
        (group.name, page)
        for lease in guests
        if lease is not None
        for group in engine.cache.groups
        for page in engine.cache.table(lease, group.name).tolist()
    }
    assert given and touched and not given & touched, "step 2 may still write there"
    engine.done()
    leave(engine, *(lease for lease in guests if lease is not None))
    all_free(engine)


# ---- P10


@each_layout
def test_p10_two_that_compute_the_same_pages_end_with_one_copy(layout):
    """Two requests that compute the same prompt in one step end with the same pages; the duplicates are freed.

    Mutation: `Publisher.settle` keeps the lease's own page.
    """
    engine = engine_of(*ALL[layout]())
    prompt = toks(1, 17)
    ann, bob = (engine.submit(name, prompt, 8, reads=False) for name in ("ann", "bob"))
    engine.plan()
    for group in engine.cache.groups:
        if group.family != "state":
            ours, theirs = (set(table(engine, who, group.name).tolist()) for who in (ann, bob))
            assert not ours & theirs, "neither reads the other's: it was told not to"
    engine.done()
    while ann.real < 17:
        step(engine)
    for group in engine.cache.groups:
        if group.family != "state":
            ours, theirs = (table(engine, who, group.name)[:4] for who in (ann, bob))
            assert np.array_equal(ours[theirs != 0], theirs[theirs != 0]), f"{group.name}: two copies"
            assert engine.pages(group.name)["tree"] == 4
            assert engine.pages(group.name)["leases"] == 2, "the fifth page, part-filled, is each one's own"
    assert engine.cache.stats()["steps"]["duplicates_freed"] > 0
    engine.idle()
    all_free(engine)


@each_pace
@pytest.mark.parametrize("layout", ["full", "window", "full+window"])
def test_p10_two_samples_that_agree_share_what_they_generate(layout, pace):
    """Two samples of one prompt that generate the same tokens end with one copy of the generated pages.

    Mutation: `Publisher.publish_rows` returns no duplicates for the commit to settle.
    """
    engine = engine_of(*ALL[layout]())
    ann, bob = (engine.submit(name, toks(1, 9), 20) for name in ("ann", "bob"))
    while ann.real < 16:
        pace(engine)
    assert ann.generated == bob.generated
    for group in engine.cache.groups:
        pages = engine.pages(group.name)
        assert (pages["tree"], pages["leases"]) == (4, 0), f"{group.name}: one copy of each page"
        ours, theirs = (table(engine, who, group.name) for who in (ann, bob))
        assert np.array_equal(ours, theirs)
    assert engine.cache.stats()["steps"]["duplicates_freed"] > 0
    engine.idle()
    all_free(engine)


@each_shared
def test_p10_a_duplicate_stays_while_a_step_in_flight_reads_it(layout):
    """A duplicate's table entry is replaced as soon as the tree's page is real; the duplicate is free only after the
    newest step in flight, which may still read it.

    Mutation: `Publisher.settle` frees a duplicate at once; or `StepCommits.commit` settles only while nothing is in
    flight.
    """
    engine = engine_of(*SHARED[layout]())
    prompt = toks(1, 10)
    ann, bob = (engine.submit(name, prompt, 3, reads=False) for name in ("ann", "bob"))
    engine.plan()
    engine.plan()
    name = engine.cache.groups[0].name
    assert table(engine, ann, name)[:2].tolist() != table(engine, bob, name)[:2].tolist()
    engine.done()
    assert table(engine, ann, name)[:2].tolist() == table(engine, bob, name)[:2].tolist()
    assert engine.pages(name)["flight"] == 2, "step 2 reads them"
    assert engine.cache.stats()["steps"]["duplicates_freed"] == 2 * len(engine.cache.groups)
    engine.done()
    assert engine.pages(name)["flight"] == 0
    engine.idle()
    all_free(engine)


# ---- P12


@each_layout
@pytest.mark.parametrize("generated", range(1, 10))
def test_p12_what_is_published_ends_at_the_last_computed_position(layout, generated):
    """Whenever a request stops, what others find of it ends at its last computed position: the last sampled token has
    no K/V, even where it would just fill a page.

    Mutation: `Checkpoints.publish_state` publishes a state that stands inside a page (state layouts); `publish` hands
    over one page more than it was told (`upto + 1`).
    """
    engine = engine_of(*ALL[layout]())
    ann = engine.run("ann", toks(1, 6), generated)
    computed = 6 + generated - 1
    assert reach(engine, ann.tokens + toks(2, 9)) == computed // PAGE
    bob = engine.run("bob", ann.tokens + toks(2, 9))
    assert bob.cached <= computed // PAGE * PAGE
    if "state" not in layout:
        assert bob.cached == computed // PAGE * PAGE
    all_free(engine)


@each_layout
@pytest.mark.parametrize("outcome", ["done", "fail"])
def test_p12_abort_in_flight_keeps_what_the_step_really_computed(layout, outcome):
    """A request aborted during its prefill leaves the pages of that step if the step succeeds, and nothing if it fails.

    Mutation: `StepCommits.end` drops the lease at once although its step is in flight.
    """
    engine = engine_of(*ALL[layout]())
    prompt = toks(1, 24)
    engine.submit("ann", prompt, 6)
    step(engine, 8)
    engine.plan(8)
    engine.abort("ann")
    assert engine.cache.explain(BASE, prompt).cached <= 8, "what is in flight is not there yet"
    engine.done() if outcome == "done" else engine.fail()
    assert reach(engine, prompt) == (4 if outcome == "done" else 2)
    assert engine.run("bob", prompt).cached <= 16, "and the content double reads no token that was not computed"
    all_free(engine)


@each_layout
def test_p12_under_overlap_a_stop_publishes_no_page_of_the_step_after_it(layout):
    """A request stops on the token of step N while step N + 1 already runs its next row: that row is thrown away.

    Mutation: `finish_request` publishes `fill` although a step in flight has rows of the request.
    """
    engine = engine_of(*ALL[layout](), every=1)
    ann = engine.submit("ann", toks(1, 6), 40)
    while ann.real < 6:
        step(engine)
    engine.plan()  # computes position 6
    engine.plan()  # computes position 7: the second page would be full
    engine.done()
    assert ann.real == 7 and len(ann.generated) == 2
    known = ann.tokens + [0]  # what would fill the page is not known to be computed
    fill = token_bytes(known[4:8])
    engine.cache.finish_request(ann.lease, fill, 8, max(ann.steps))
    engine.cache.unbind(ann.binding)
    engine.running.remove(ann)
    ann.ended, ann.lease, ann.steps = "stop", None, []
    engine.check()
    assert hit(engine, known + [1]).depth == 1, "only the prompt's whole page"
    engine.done()
    assert hit(engine, known + [1]).depth == 1
    all_free(engine)


# ---- P14


def computed_again(engine: Engine, name: str, prompt) -> tuple[Request, int]:
    """Run a prompt whose memory has holes; the row it begins with, and the pages of the full group it reads."""
    request = engine.submit(name, prompt, 1)
    before = engine.pages("full")["tree"]
    starts = []
    while not request.ended:
        engine.plan()
        row = engine.double.steps[engine.step].rows[0]
        starts.append(row.start)
        assert row.write_from["full"] >= len(prompt) // PAGE * PAGE, "what is there is not written again"
        assert engine.pages("full")["leases"] <= 1, "it has a page of its own for the last token only"
        engine.settle()
    assert engine.pages("full")["tree"] == before, "no full page was added"
    return request, starts[0]


def test_p14_lost_window_pages_are_filled_in_place():
    """A prompt whose window pages are gone is computed from an earlier boundary, fills only the holes of the window
    group, and shares every full page.

    Mutation: `write_from` gives `start` for every group (the row writes over shared pages); or neither `Admission.wish`
    nor `Follower.adopt` follows full pages beyond the boundary (they are duplicated).
    """
    engine = engine_of(full(64), window(6, 12))
    prompt = toks(1, 33)
    engine.run("ann", prompt)
    crowd(engine, 1, 12)
    match = hit(engine, prompt)
    assert (match.boundary, match.depth, match.reason) == (0, 8, "window_gone")

    bob, start = computed_again(engine, "bob", prompt)
    assert start == 0 and bob.computed == 33
    assert hit(engine, prompt).boundary == 8, "the holes are filled"
    again = engine.run("cyd", prompt)
    assert again.cached == 32
    all_free(engine)


def test_p14_only_what_is_missing_is_written():
    """A prompt that has lost its snapshot but none of its window pages writes neither full nor window pages again.

    Mutation: `Admission.wish` ignores the run of window pages behind the boundary (`end = boundary`: they are
    duplicated).
    """
    engine = engine_of(full(64), window(6, 24), state(2))
    prompt = toks(1, 17)
    engine.run("ann", prompt)
    crowd(engine, 2, 1)
    match = hit(engine, prompt)
    assert (match.boundary, match.depth, engine.pages("window")["tree"]) == (0, 4, 4)

    bob = engine.submit("bob", prompt, 1)
    engine.plan()
    (row,) = engine.double.steps[engine.step].rows
    assert row.start == 0 and row.write_from == {"full": 16, "window": 16, "state": 0}
    assert owned(engine, "leases") == {"full": 0, "window": 0, "state": 1}, "nothing is there to write, but the state"
    engine.idle()
    assert bob.computed == 17 and engine.pages("window")["tree"] == 4
    assert engine.run("cyd", prompt).cached == 16
    all_free(engine)


def test_p14_a_lost_snapshot_is_made_again_over_shared_pages():
    """A prompt whose snapshot is gone is computed from the zero state, while every full page stays shared.

    Mutation: neither `Admission.wish` nor `Follower.adopt` follows full pages beyond the boundary.
    """
    engine = engine_of(full(64), state(2))
    prompt = toks(1, 33)
    engine.run("ann", prompt)
    crowd(engine, 2, 1)
    match = hit(engine, prompt)
    assert (match.boundary, match.depth, match.reason) == (0, 8, "no_snapshot")

    bob, start = computed_again(engine, "bob", prompt)
    assert start == 0 and bob.computed == 33
    assert hit(engine, prompt).boundary == 8, "its snapshot stands there again"
    assert engine.run("cyd", prompt).cached == 32
    all_free(engine)
