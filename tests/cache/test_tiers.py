"""Stories of device and host: what a save or load reads and makes room for, and news of it late, wrong or out of order
(cases T, the book-keeping of the facade)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sapwood.cache import BlockStored, Namespace

from .driver import BASE, Engine, full, state, toks, window
from .stories import (
    all_free,
    compute,
    crowd,
    empty_device,
    engine_of,
    hit,
    leave,
    newcomer,
    owned,
    save,
    step,
    write_back,
)

ADAPTER = Namespace(adapter=b"a" * 32)

LAYOUTS = {
    "full": lambda: (full(24, 24),),
    "window": lambda: (window(6, 24, 24),),
    "full+window": lambda: (full(24, 24), window(6, 24, 24)),
    "full+state": lambda: (full(24, 24), state(12, 12)),
    "full+window+state": lambda: (full(24, 24), window(6, 24, 24), state(12, 12)),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def transfers(engine: Engine) -> dict[str, int]:
    return engine.cache.stats()["transfers"]


def on_host(engine: Engine, seed: int, tokens: int, ns: Namespace = BASE) -> list[int]:
    """A prompt that was computed and written back."""
    prompt = toks(seed, tokens)
    write_back(engine, compute(engine, f"made {seed}", prompt, ns))
    return prompt


def only_on_host(engine: Engine, seed: int, tokens: int, ns: Namespace = BASE) -> list[int]:
    prompt = on_host(engine, seed, tokens, ns)
    empty_device(engine)
    return prompt


# ---- T14


def test_t14_a_save_does_not_evict_the_prefix_it_extends():
    """A save whose pages follow a prefix that is on host already makes room by evicting others, or is not begun; the
    prefix, though longest unused, stays.

    Mutation: `Saves.make_room` does not hold the path in the host tier.
    """
    engine = engine_of(full(24, 8))
    prefix = on_host(engine, 1, 16)
    other = on_host(engine, 2, 16)
    assert engine.pages("full", "host")["free"] == 0

    longer = prefix + toks(3, 12)
    write_back(engine, compute(engine, "longer", longer))
    assert hit(engine, longer).depth == 7
    empty_device(engine)
    assert hit(engine, longer).boundary == 7, "the prefix is there, or what follows it would be worth nothing"
    assert hit(engine, other).boundary == 1, "the other has given three pages for it"


@pytest.mark.parametrize(
    "groups", [(window(6, 24, 4),), (full(24, 24), window(6, 24, 4))], ids=["window", "full+window"]
)
def test_t14_a_save_does_not_evict_the_window_it_extends(groups):
    """The window pages on host that a request behind the saved pages would read, though longest unused, are not evicted
    to make room for those pages: without them, what is saved could never be served.

    Mutation: `Saves.make_room` holds the path for full groups only, and no window pages.
    """
    engine = engine_of(*groups)
    prefix = on_host(engine, 1, 8)
    on_host(engine, 2, 8)
    assert engine.pages("window", "host")["free"] == 0

    longer = prefix + toks(3, 4)
    write_back(engine, compute(engine, "longer", longer))
    empty_device(engine)
    assert transfers(engine)["saves_skipped"] == 0, "there was room to be had"
    assert hit(engine, longer).boundary == 3, "its window is two pages, one of them the prefix's"


def test_t14_a_save_without_room_beside_its_prefix_is_not_begun():
    """If only its own prefix could be evicted for it, a save is skipped and counted, with nothing changed.

    Mutation: `Saves.make_room` asks whether there is room before it holds the path.
    """
    engine = engine_of(full(24, 4))
    prefix = on_host(engine, 1, 16)
    spans = compute(engine, "longer", prefix + toks(3, 8))
    before = engine.cache.stats()
    assert save(engine, spans) == []
    after = engine.cache.stats()
    assert after["transfers"].pop("saves_skipped") == before["transfers"].pop("saves_skipped") + 1
    assert after["transfers"].pop("pages_skipped") > before["transfers"].pop("pages_skipped")
    assert after == before
    empty_device(engine)
    assert hit(engine, prefix).boundary == 4


def test_t14_a_load_does_not_evict_the_part_that_is_on_the_device():
    """A load brings the end of a prefix whose beginning is on the device: the beginning, though longest unused, is not
    evicted to make room for the end.

    Mutation: `Admission.admit` makes room before it pins what the lease reads.
    """
    engine = engine_of(full(8, 16))
    prompt = on_host(engine, 1, 24)
    crowd(engine, 1, 5)
    assert hit(engine, prompt, host=False).boundary == 3, "the end was evicted from the device"
    engine.run("other", toks(2, 20))
    assert hit(engine, prompt, host=False).boundary == 3 and engine.pages("full")["free"] == 0

    bob = engine.submit("bob", prompt + [1], 2)
    engine.plan()
    (operation,) = [operation for _, operation, _ in engine.double.transfers.values()]
    assert operation.start_page == 3 and len(operation.pages["full"][1]) == 3, "only the end is brought"
    engine.idle()
    assert bob.cached == 24 and bob.computed == 2


def test_t14_a_load_that_fits_only_by_evicting_its_own_prefix_is_not_admitted():
    """If a load could fit only by evicting the device part of its own prefix, the request is not admitted.

    Mutation: `Admission._less` does not count the pages that the pin takes out of reach.
    """
    engine = engine_of(full(8, 16))
    prompt = on_host(engine, 1, 32)
    crowd(engine, 1, 4)
    assert hit(engine, prompt, host=False).boundary == 4
    guest = newcomer(engine, 1, 2)
    binding = engine.cache.bind(BASE)
    before = engine.cache.stats()
    match = engine.cache.match_prefix(binding, prompt + [1])
    assert match.boundary == 8 and engine.cache.admit(match, match.length) is None
    assert engine.cache.stats() == before
    engine.check()
    leave(engine, guest)
    assert engine.cache.admit(match, match.length) is not None, "with that room it fits"
    engine.check()


@each_layout
def test_t14_host_pages_under_a_load_are_not_evicted(layout):
    """While a load reads its host pages, saves of others make room elsewhere or are not begun.

    Mutation: the holder of `begin_load` does not pin the path in the host tier, or takes no readers of host pages.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=3)
    prompt = only_on_host(engine, 1, 17)
    bob = engine.submit("bob", prompt, 2)
    engine.plan()
    (load,) = engine.operations
    held = {name: part[0][part[0] != 0].tolist() for name, part in engine.double.transfers[load][1].pages.items()}
    taken: dict[str, set[int]] = {name: set() for name in held}
    for seed in range(2, 10):  # more than host can hold
        for op in save(engine, compute(engine, f"other {seed}", toks(seed, 17))):
            for name, (_, targets) in engine.double.transfers[op][1].pages.items():
                taken.setdefault(name, set()).update(targets.tolist())
            engine.land(op)
    for name, pages in held.items():
        assert pages and not taken[name] & set(pages), f"{name}: a page under the load was given out"
    engine.idle()
    assert bob.cached == 16 and transfers(engine)["loads_failed"] == 0
    all_free(engine)


# ---- T16


def told_on_host(engine: Engine) -> dict[bytes, Namespace]:
    found = {}
    for event in engine.events:
        if isinstance(event, BlockStored) and event.medium == "CPU":
            for at in range(0, len(event.digests), 32):
                assert event.digests[at : at + 32] not in found, "announced twice"
                found[event.digests[at : at + 32]] = event.namespace
    return found


@each_layout
@pytest.mark.parametrize("ns", [BASE, ADAPTER], ids=["base", "adapter"])
@pytest.mark.parametrize("meanwhile", ["ended", "split", "extended"])
def test_t16_a_late_save_lands_under_its_own_hashes_and_namespace(layout, ns, meanwhile):
    """A save acknowledged after its request ended, or after its node was split or extended, is on host under its own
    tokens, hashes and namespace: what comes back from there is what was written.

    Mutation: `ClosedPages.land` takes pages by their place in the node and not in the transfer; or `Tree.split`
    does not split the host copy.
    """
    engine = engine_of(*LAYOUTS[layout](), events=True)
    prompt = toks(1, 17)
    ann = engine.submit("ann", prompt, 30, ns)
    spans = []
    while ann.real < 17:
        step(engine)
        spans += engine.spans
    ops = save(engine, spans)
    assert ops
    if meanwhile == "ended":
        engine.abort("ann")
    elif meanwhile == "split":
        compute(engine, "bob", prompt[:8] + toks(2, 9), ns)
    else:
        while ann.real < 25:
            step(engine)
    assert hit(engine, prompt, ns, host=True).load is False and not told_on_host(engine)
    for op in ops:
        engine.land(op)
    right = engine.cache.page_hashes(ns, prompt)
    expected = right if "full" in layout or layout == "window" else right[3:]
    assert told_on_host(engine) == dict.fromkeys(expected, ns)

    if not ann.ended:
        engine.abort("ann")
    empty_device(engine)
    match = hit(engine, prompt, ns)
    assert match.boundary == 4 and match.load
    again = engine.run("again", prompt, ns=ns)
    assert again.cached == 16, "and the content double has checked every token of it"
    all_free(engine)


@each_layout
def test_t16_the_span_that_is_handed_on_for_a_backup_covers_what_was_saved(layout):
    """`save_done` returns the pages that are on host now, by absolute number, also after the node was split.

    Mutation: `save_done` returns the span of the node, not of the transfer.
    """
    engine = engine_of(*LAYOUTS[layout](), hashes=True)
    prompt = toks(1, 17)
    spans = compute(engine, "ann", prompt)
    operations = [operation for span in spans if (operation := engine.cache.begin_save(span))]
    compute(engine, "bob", prompt[:8] + toks(2, 9))
    covered = set()
    for operation in operations:
        engine.double.start("save", operation)
        engine.double.land(operation.op, True)
        span = engine.cache.save_done(operation.op, True)
        engine.check()
        assert span is not None
        length = max(len(sources) for sources, _ in operation.pages.values())
        assert (span.first, span.last) == (operation.start_page, operation.start_page + length)
        covered |= set(range(span.first, span.last))
    assert covered == {0, 1, 2, 3}


@each_layout
def test_t16_a_save_of_an_unloaded_adapter_frees_and_shows_nothing(layout):
    """A save acknowledged after its adapter was unloaded frees its host pages and announces nothing.

    Mutation: `save_done` lands although the holder is detached.
    """
    engine = engine_of(*LAYOUTS[layout](), events=True)
    prompt = toks(1, 17)
    ops = save(engine, compute(engine, "ann", prompt, ADAPTER))
    engine.cache.evict_namespace(ADAPTER)
    engine.check()
    assert sum(owned(engine, "flight", "host").values()) > 0, "the transfer still writes there"
    assert sum(owned(engine, "unhooked").values()) > 0, "and reads here"
    for op in ops:
        kind = engine.operations.pop(op)
        engine.double.land(op, True)
        assert kind == "save" and engine.cache.save_done(op, True) is None
        engine.check()
    assert not told_on_host(engine)
    for group in engine.cache.groups:
        for tier, pages in (("device", group.device_pages), ("host", group.host_pages)):
            assert engine.pages(group.name, tier)["free"] == pages


@each_layout
def test_t16_a_failed_save_frees_and_shows_nothing_and_can_be_tried_again(layout):
    """A failed save gives its host pages back and offers nothing; the same pages can be saved again and then are there.

    Mutation: `save_done` does not clear `saving` for a failed save (it is never tried again), or keeps its targets.
    """
    engine = engine_of(*LAYOUTS[layout]())
    prompt = toks(1, 17)
    spans = compute(engine, "ann", prompt)
    for op in save(engine, spans):
        assert save(engine, spans) == [], "what is on its way is not sent twice"
        engine.land(op, ok=False)
    assert transfers(engine)["saves_failed"] == transfers(engine)["saves"] > 0 == transfers(engine)["pages_saved"]
    for group in engine.cache.groups:
        assert engine.pages(group.name, "host")["free"] == group.host_pages
    write_back(engine, spans)
    assert transfers(engine)["pages_saved"] > 0
    empty_device(engine)
    assert engine.run("again", prompt).cached == 16


@each_layout
def test_t16_acknowledgements_in_any_order_lead_to_the_same_host(layout):
    """Saves of a prompt, of its next turn and of a branch are acknowledged in every order: host ends with all of it.

    Mutation: `ClosedPages.land` puts pages behind a gap without splitting the node there.
    """
    ends = []
    turns = [toks(1, 9), toks(1, 9) + toks(2, 8), toks(1, 9)[:4] + toks(3, 5)]
    for order in itertools.permutations(range(3)):
        engine = engine_of(*LAYOUTS[layout]())
        parts = [save(engine, compute(engine, f"turn {i}", tokens)) for i, tokens in enumerate(turns)]
        for at in order:
            for op in parts[at]:
                engine.land(op)
        ends.append(owned(engine, "tree", "host"))
        empty_device(engine)
        for i, tokens in enumerate(turns):
            assert hit(engine, tokens).boundary == (len(tokens) - 1) // 4, f"turn {i} after order {order}"
            assert engine.run(f"again {i}", tokens).cached == (len(tokens) - 1) // 4 * 4
        all_free(engine)
    assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("first", ["parent", "child"])
def test_t16_a_child_whose_parent_failed_to_save_is_not_offered_alone(first):
    """The parent's save fails, its child's succeeds: while the parent is on the device the child can come from host;
    once it is evicted, nothing stands on host that could not be reached.

    Mutation: `ClosedPages._evict_tail` keeps the host copies below a node that loses its only copy.
    """
    engine = engine_of(full(24, 24))
    parent, child = toks(1, 8), toks(1, 8) + toks(2, 8)
    above = save(engine, compute(engine, "parent", parent))
    below = save(engine, compute(engine, "child", child))
    for ops, ok in ((above, False), (below, True)) if first == "parent" else ((below, True), (above, False)):
        for op in ops:
            engine.land(op, ok)
    assert engine.pages("full", "host")["tree"] == 2
    guest = newcomer(engine, 1, 22)
    assert hit(engine, child, host=False).boundary == 2
    match = hit(engine, child)
    assert match.boundary == 4 and match.load, "the parent from the device, the child from host"
    leave(engine, guest)
    empty_device(engine)
    assert hit(engine, child).boundary == 0
    assert engine.pages("full", "host")["free"] == 24, "what cannot be reached is not kept"


# ---- T18


@each_layout
def test_t18_two_requests_for_the_same_host_pages_cause_one_load(layout):
    """A second request for pages that are on their way joins their load; both go on when it has come.

    Mutation: `Admission._load_closed` (for windows and states `_load_one`) does not look whether a page is loading
    already.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=5)
    prompt = only_on_host(engine, 1, 17)
    ann = engine.submit("ann", prompt, 2)
    bob = engine.submit("bob", prompt[:16] + [7], 2)
    assert not engine.plan(), "both wait"
    assert transfers(engine)["loads"] == 1 and transfers(engine)["loads_joined"] == 1
    (op,) = engine.operations
    assert ann.lease.loading and bob.lease.loading
    engine.land(op)
    assert not ann.lease.loading and not bob.lease.loading
    engine.idle()
    assert ann.cached == bob.cached == 16 and ann.computed == bob.computed == 2
    assert transfers(engine)["loads"] == 1
    all_free(engine)


@each_layout
def test_t18_one_of_two_waiters_leaves_and_the_other_is_served(layout):
    """The request that caused a load is aborted: who joined it gets the pages all the same.

    Mutation: `StepCommits.end` takes all waiters from the load, not only the lease that ends.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=5)
    prompt = only_on_host(engine, 1, 17)
    engine.submit("ann", prompt, 2)
    bob = engine.submit("bob", prompt, 2)
    engine.plan()
    engine.abort("ann")
    engine.idle()
    assert bob.cached == 16 and transfers(engine)["loads"] == 1
    all_free(engine)


@each_layout
def test_t18_a_load_nobody_waits_for_any_more_still_lands(layout):
    """All who waited are gone when a load arrives: its pages are on the device for the next, and nothing leaks.

    Mutation: `Loads._land` frees what came when no waiter is left.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=5)
    prompt = only_on_host(engine, 1, 17)
    engine.submit("ann", prompt, 2)
    engine.plan()
    engine.abort("ann")
    assert sum(owned(engine, "flight").values()) > 0, "the backend still writes there"
    engine.settle()
    assert hit(engine, prompt, host=False).boundary == 4
    assert engine.run("bob", prompt).cached == 16 and transfers(engine)["loads"] == 1
    all_free(engine)


@each_layout
def test_t18_a_failed_load_fails_for_all_who_wait_and_they_compute(layout):
    """A load that fails gives its pages back; all who waited for it are told, and compute.

    Mutation: `Loads._land` tells only the first waiter, or keeps the targets of a failed load.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=5)
    prompt = only_on_host(engine, 1, 17)
    ann, bob = (engine.submit(name, prompt, 2) for name in ("ann", "bob"))
    engine.plan()
    (op,) = engine.operations
    engine.land(op, ok=False)
    assert engine.waiting == [bob, ann] or engine.waiting == [ann, bob], "both are told"
    assert set(owned(engine, "flight").values()) == {0}
    assert transfers(engine)["loads_failed"] == 1 and transfers(engine)["pages_loaded"] == 0
    engine.idle()
    assert len(ann.generated) == len(bob.generated) == 2
    assert ann.computed + bob.computed >= 17, "somebody computed it"
    all_free(engine)


def two_loads(engine: Engine) -> tuple[list[int], int, int]:
    """ann loads a prefix, bob joins her and loads what follows it: the numbers of the upper and the lower load."""
    prompt = toks(1, 17)
    write_back(engine, compute(engine, "short", prompt[:9]))
    write_back(engine, compute(engine, "long", prompt))
    empty_device(engine)
    engine.submit("ann", prompt[:9], 2)
    engine.plan()
    engine.submit("bob", prompt, 2)
    engine.plan()
    upper, lower = engine.operations
    return prompt, upper, lower


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state", "full+window+state"])
@pytest.mark.parametrize("order", ["upper first", "lower first"])
def test_t18_a_longer_prompt_joins_and_loads_only_the_rest(layout, order):
    """A request that needs more than what is on its way loads only the rest, and goes on when both have come, in
    whatever order they do.

    Mutation: `Loads._must_wait` is gone (full pages would be on the device without those above them).
    """
    engine = engine_of(*LAYOUTS[layout](), seed=7)
    prompt, upper, lower = two_loads(engine)
    ann, bob = engine.requests["ann"], engine.requests["bob"]
    pages = engine.double.transfers[lower][1]
    assert pages.start_page == 2 and len(pages.pages["full"][0]) == 2, "only what nobody brings already"
    assert transfers(engine)["loads_joined"] >= 1
    first, second = (upper, lower) if order == "upper first" else (lower, upper)
    engine.land(first)
    assert bob.lease.loading, "bob needs both"
    assert hit(engine, prompt, host=False).depth == (2 if order == "upper first" else 0)
    engine.land(second)
    assert not bob.lease.loading
    engine.idle()
    assert (ann.cached, bob.cached) == (8, 16) and transfers(engine)["loads"] == 2
    all_free(engine)


@pytest.mark.parametrize("layout", ["full", "full+window"])
@pytest.mark.parametrize("order", ["upper first", "lower first"])
def test_t18_the_upper_load_fails_and_the_lower_is_given_up_with_it(layout, order):
    """If the load of a prefix fails, what another load brought of its continuation is given up too, whichever comes
    first: nothing stands on the device that could not be reached.

    Mutation: `Loads._closed_above` always says yes.
    """
    engine = engine_of(*LAYOUTS[layout](), seed=7)
    prompt, upper, lower = two_loads(engine)
    ann, bob = engine.requests["ann"], engine.requests["bob"]
    for op in (upper, lower) if order == "upper first" else (lower, upper):
        engine.land(op, ok=op == lower)
    assert hit(engine, prompt, host=False).boundary == 0
    assert set(owned(engine, "flight").values()) == {0}
    assert {request.id for request in engine.waiting} == {"ann", "bob"}
    engine.idle()
    assert len(ann.generated) == len(bob.generated) == 2
    all_free(engine)


def test_t18_late_loads_find_their_pages_computed_meanwhile():
    """A prompt is computed by somebody who does not wait while its load is under way: the load, when it comes, frees
    what is there already, and its waiter reads the one copy.

    Mutation: `_land_on_device` puts its pages into a node that has a device copy by now.
    """
    engine = engine_of(full(24, 24), seed=9)
    prompt = only_on_host(engine, 1, 17)
    ann = engine.submit("ann", prompt, 4)
    engine.plan()
    (op,) = engine.operations
    engine.submit("bob", prompt, 4, reads=False)
    step(engine)
    assert engine.pages("full")["tree"] == 4
    engine.land(op)
    assert (engine.pages("full")["tree"], engine.pages("full")["flight"]) == (4, 0), "one copy"
    engine.plan()
    bob = engine.requests["bob"]
    tables = [engine.cache.table(who.lease, "full")[:4] for who in (ann, bob)]
    assert np.array_equal(*tables)
    engine.idle()
    assert ann.cached == 16
    all_free(engine)


@pytest.mark.parametrize("first", ["long", "middle"])
@pytest.mark.parametrize("fine", [True, False])
def test_t18_a_load_that_another_one_needs_lost_what_is_above_it(first: str, fine: bool) -> None:
    """Two loads, the second below the first. The first fails; before the second comes a third request wants all of it,
    and further pages below. Nothing ever stands on the device without what is above it, in whatever order they come:
    the third must do without host.

    Mutation: `Loads._closed_above` looks only above the first page that a load brings.
    """
    engine = engine_of(full(24, 24))
    prompt = only_on_host(engine, 1, 25)
    cache = engine.cache
    ops = {}
    leases = {}
    for name, tokens in (("short", 9), ("middle", 17), ("long", 25)):
        binding = cache.bind(BASE)
        match = cache.match_prefix(binding, np.array(prompt[:tokens], np.int32))
        assert match.start == tokens - 1
        admitted = cache.admit(match, tokens)
        assert admitted is not None
        leases[name], operation = admitted
        ops[name] = operation.op
        if name == "middle":
            failed = cache.load_done(ops["short"], False).failed
            assert failed == [leases["short"], leases["middle"]]
            for lease in failed:
                cache.finish_request(lease, b"", 0, None)
        cache.check()
    order = ["long", "middle"] if first == "long" else ["middle", "long"]
    failed = []
    for name in order:
        landed = cache.load_done(ops[name], fine or name == "middle")
        assert not landed.ready
        for lease in landed.failed:
            cache.finish_request(lease, b"", 0, None)
        failed += landed.failed
        cache.check()
    assert failed == [leases["long"]]
    cache.flush()
    assert cache.stats()["pages"]["full"]["device"]["free"] == 24
