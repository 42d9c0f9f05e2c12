"""Readers that nobody has counted: they are counted before anything goes, and count as use all the same."""

from __future__ import annotations

import pytest

from sapwood.cache import Span, token_bytes
from sapwood.cache.group import DEVICE

from .driver import BASE, Engine, full, state, toks, window
from .stories import all_free, hit, save


def uncounted(engine: Engine) -> int:
    return len(engine.cache._tree.uncounted)


@pytest.mark.parametrize("groups", [(full(40), window(8, 12)), (window(8, 12),)], ids=["full+window", "window"])
def test_f10_who_reads_quietly_is_counted_before_anything_goes(groups):
    """While there is room nobody counts who reads; when there is none, what running requests read stays.

    Mutation: `Tier.available` or `Tier.make` does not call `count_all`.
    """
    engine = Engine(4, *groups)
    one = engine.submit("one", toks(1, 12), max_tokens=30)
    engine.plan()
    engine.done()
    assert uncounted(engine) == 1 and not one.lease.counted
    pages, g = engine.pages("window"), len(groups) - 1
    (window_read,) = one.lease.reading(g)
    idle = pages["tree"] - (window_read[1] - window_read[0])
    assert engine.cache.available()[g] == pages["free"] + idle and one.lease.counted and not uncounted(engine)
    engine.run("many", toks(2, 33), chunk=16)
    engine.idle()  # the content double complains if a page of `one` was given away
    assert one.ended == "length"
    all_free(engine)


def test_f10_what_a_newcomer_is_going_to_read_does_not_go_for_it():
    """A request begins in the middle of a path, where pages stand that go first when room is needed: its own stay.

    Mutation: `Tier.make` does not call `count_all`.
    """
    engine = Engine(4, full(40), window(8, 10))
    tokens = toks(1, 33)
    engine.run("first", tokens, chunk=16)
    engine.submit("second", tokens[:12] + toks(2, 28))
    assert engine.plan()
    engine.idle()
    all_free(engine)


def test_f10_what_others_read_quietly_is_not_counted_twice():
    """A newcomer reads what somebody else reads already: that costs no room, and it comes in.

    Mutation: `Admission._less` does not call `count_all`.
    """
    engine = Engine(4, full(40), window(8, 8))
    tokens = toks(1, 13)
    engine.submit("first", tokens, max_tokens=20)
    engine.plan()
    engine.done()
    binding = engine.cache.bind(BASE)
    match = engine.cache.match_prefix(binding, token_bytes(tokens[:12] + toks(2, 20)))
    assert match.boundary == 3 and engine.pages("window")["free"] == 4
    lease, _ = engine.cache.admit(match, 32)
    engine.check()
    engine.cache.finish_request(lease, b"", 12, None)
    engine.cache.unbind(binding)
    engine.idle()
    all_free(engine)


def test_f10_asking_for_a_snapshot_slot_counts_no_window():
    """Mutation: `Tier.available` or `Tier.make` counts whatever the group."""
    engine = Engine(4, full(40), window(8, 20), state(3))
    engine.run("first", toks(1, 9))
    engine.submit("one", toks(2, 9), max_tokens=12)
    engine.plan()
    engine.done()
    engine.run("second", toks(3, 9))
    assert uncounted(engine) == 1
    engine.idle()
    all_free(engine)


def test_f10_a_save_reads_quietly_and_keeps_its_pages():
    """A save under way is the only reader of a window; room is needed, and its pages stay until it is over.

    Mutation: `PinHolder.count_reads` counts nothing.
    """
    engine = Engine(4, full(40, 40), window(8, 8, 40), save="")
    spans = []
    engine.submit("one", toks(1, 17))
    while engine.waiting or engine.running:
        engine.plan()
        engine.done()
        spans += engine.spans
    (op,) = save(engine, spans)
    assert uncounted(engine) == 1
    other = engine.submit("other", toks(2, 17))
    for _ in range(8):
        if engine.plan(4):
            engine.done()
    assert not uncounted(engine) and other.ended == "length"
    engine.land(op)  # the content double complains if what it reads was given away
    engine.idle()
    all_free(engine)


def test_f10_reading_quietly_is_using():
    """A prefix at which requests begin again and again is used, also while a long request holds it from below: those
    that nobody asks for go first.

    Mutation: `Admission._read` does not call `use`.
    """
    engine = Engine(4, full(400), window(8, 40))
    prefix = toks(1, 16)
    engine.run("p", prefix + toks(50, 5))
    long = engine.submit("long", prefix + toks(60, 41), max_tokens=30)
    for _ in range(2):
        engine.plan()
        engine.done()
    for i in range(4):
        engine.run(f"stranger {i}", toks(100 + i, 17))
    engine.running.remove(long)  # it pauses
    for i in range(6):
        engine.run(f"guest {i}", prefix + toks(200 + i, 3))
    engine.run("big", toks(300, 4 * (engine.pages("window")["free"] + 22)))
    assert hit(engine, prefix + toks(400, 3)).cached == 16, "used just now"
    assert hit(engine, toks(100, 17)).cached == 0, "used long ago"
    engine.running.append(long)
    engine.idle()
    all_free(engine)


def test_a_window_that_ends_before_the_span_is_saved_as_far_as_it_is_there():
    """All windows of a node went, and a second request fills its first pages only: what is behind them is nowhere.

    Mutation: `Saves._to_save_of_windows` puts down runs of no page.
    """
    engine = Engine(4, full(64, 0), window(7, 12, 24), save="")
    tokens = toks(1, 41)
    engine.run("a", tokens, chunk=16)
    node = engine.cache._tree.root_of(BASE).top.recent
    engine.run("b", toks(2, 45), chunk=48)
    engine.submit("c", tokens)
    engine.plan(12)
    engine.done()
    assert node.n == 10 and len(node.copies[DEVICE].pages[1]) == 4 * 3
    operation = engine.cache.begin_save(Span(5, 10, node))
    assert operation is not None
    ((_, (sources, _)),) = operation.pages.items()
    assert operation.start_page == 0 and len(sources) == 3 and sources.all()
    engine.begin("save", operation)
    engine.idle()
    all_free(engine)
