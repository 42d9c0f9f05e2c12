"""A step fails while later ones are in flight: they are doomed, and still read, write and copy what they were given.

The content double complains if anything they touch is given back before their event has come.
"""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.cache import token_bytes
from sapwood.cache.group import DEVICE, HOST

from .driver import BASE, Engine, Request, full, state, toks
from .stories import all_free, compute, save


def plan_with(engine: Engine, *requests: Request, chunk: int = 1 << 20) -> None:
    """One step with the first chunk of these requests alone."""
    step, rows, copies = engine.step + 1, [], []
    for request in requests:
        assert engine.admit(request, chunk)
        engine.waiting.remove(request)
        engine.running.append(request)
        rows.append(engine._row(request, chunk, step, copies))
        request.steps.append(step)
    engine.step = step
    engine.flights[step] = [(request, row.start, row.length) for request, row in zip(requests, rows, strict=True)]
    engine.double.issue(step, rows, copies)
    engine.check()


def end_all(engine: Engine) -> None:
    engine.idle()
    all_free(engine)


def test_p09_a_doomed_step_copies_a_snapshot_whose_namespace_is_gone():
    """A request starts from a snapshot, its namespace is evicted, and a step before its own fails: the slot is kept
    until the doomed step, which copies it, is over.

    Mutation: `StepCommits.rewind` lets go of the snapshots of a detached lease at once.
    """
    engine = Engine(4, full(64), state(8))
    prompt = toks(1, 17)
    engine.run("one", prompt)
    engine.submit("other", toks(2, 9), max_tokens=5)
    engine.plan()
    later = engine.submit("later", [*prompt, 5], max_tokens=3)
    engine.plan()
    assert later.cached == 16
    (slot,) = later.lease.start_snapshot.values()
    engine.cache.evict_namespace(BASE)
    engine.check()
    engine.fail()
    assert engine.flights and engine.cache._tree.device.pools[1].owner[slot]
    engine.done()
    end_all(engine)


def test_p09_a_doomed_step_reads_pages_that_a_save_of_an_evicted_namespace_reads_too():
    """A save and a doomed step are the last readers of pages whose namespace is gone: the save is over first, and they
    stay until the step is.

    Mutation: `StepCommits.fall_back` hands to the doomed step only what nobody else reads.
    """
    engine = Engine(4, full(32, 32), save="")
    prompt = toks(1, 17)
    (span,) = compute(engine, "one", prompt)
    engine.submit("other", toks(2, 9), max_tokens=5)
    engine.plan()
    engine.submit("later", [*prompt[:16], 5, 6, 7], max_tokens=3)
    engine.plan()
    (op,) = save(engine, [span])
    engine.cache.evict_namespace(BASE)
    engine.fail()
    assert engine.flights
    engine.land(op)
    engine.done()
    end_all(engine)


def on_host_but_for_its_snapshot(engine: Engine, prompt: list[int]):
    """`prompt` has been computed; host has its pages, the device only its snapshot. Its node."""
    engine.run("one", prompt)
    engine.settle()
    engine.run("two", toks(2, 48))
    engine.settle()
    key = np.array(prompt[:4], np.int32).tobytes()
    node = engine.cache._tree.roots[BASE].top.children[key]
    while node.children:
        (node,) = node.children.values()
    assert not node.copies[DEVICE].count and node.copies[DEVICE].pages[1]
    return node


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "with a later step"])
def test_p09_a_request_that_began_on_promised_pages_lets_go_of_its_snapshot(overlap):
    """Pages of a path are computed again, and promised; a second request starts from the snapshot at their end. The
    step fails when host has let go of its copy: the second falls back to the beginning, and reads no snapshot.

    Mutation: `StepCommits._move_anchor` lets a lease fall back above the snapshot it reads.
    """
    engine = Engine(4, full(12, 24), state(8, 8), save="through")
    prompt = toks(1, 17)
    node = on_host_but_for_its_snapshot(engine, prompt)
    tree = engine.cache._tree
    first = engine.submit("first", prompt, max_tokens=1)
    second = engine.submit("second", [*prompt, 5, 6], max_tokens=3)
    first.host = second.host = False
    if overlap:
        plan_with(engine, first)
        plan_with(engine, second)
    else:
        plan_with(engine, first, second)
    assert second.cached == 16 and second.lease.start_snapshot
    tree.closed_pages.evict(1, tree.tiers[1].leaves.evictable)
    engine.check()
    assert node.alive and not node.copies[HOST].count
    engine.fail()
    end_all(engine)


def test_p09_what_a_doomed_step_writes_is_not_given_out_by_adopting():
    """A request goes back to its beginning and adopts what another has published meanwhile: the pages it had been given
    are written by its doomed step, and stay with that.

    Mutation: `HybridPrefixCache.adopt` does not tell `Follower.adopt` of the doomed step.
    """
    engine = Engine(4, full(32))
    prompt = toks(1, 9)
    plan_with(engine, engine.submit("before", toks(2, 9), max_tokens=5))
    one = engine.submit("one", prompt, max_tokens=2)
    plan_with(engine, one, chunk=2)
    page = int(engine.cache.table(one.lease, "full")[0])
    engine.fail()
    assert list(engine.flights) == [2] and one.planned == 0
    plan_with(engine, engine.submit("two", prompt, max_tokens=2))
    engine.cache.adopt(one.lease, token_bytes(prompt), 0)
    assert engine.cache._tree.device.pools[0].owner[page], "a page is free that a doomed step writes"
    one.planned = one.real = one.lease.start
    end_all(engine)


@pytest.mark.parametrize("page", [4, 1])
def test_p09_a_page_that_somebody_else_had_promised_goes_with_the_promise(page):
    """A request computes what another has promised in a later step, and goes on below it: when that step fails, its
    own pages there go too, and it computes them again.

    Mutation: `Publisher.publish` does not call `note_promises`; or `withdraw` does not call `_lose_below`.
    """
    twin = Engine(page, full(32))
    tokens = twin.run("twin", toks(1, 8), 16).tokens
    engine = Engine(page, full(32), events=True)
    one = engine.submit("one", toks(1, 8), max_tokens=16)
    while len(one.tokens) < 11:
        engine.plan()
        engine.done()
    ahead = 2 if page == 4 else 3
    for _ in range(ahead):
        engine.plan()
    while len(one.tokens) < 12 and page == 4:
        engine.done()
    other = engine.submit("other", tokens[:12] + [1, 2, 3] if page == 4 else tokens[:12], max_tokens=2)
    plan_with(engine, other)
    while len(engine.flights) > 1:
        engine.done()
    assert one.lease.depth * page >= 12 and one.lease.deps
    engine.fail()
    engine.abort("other")
    engine.check()
    end_all(engine)
    assert one.tokens == tokens and one.ended == "length"


def test_a_save_below_somebodys_promise_is_put_off():
    """What a request has computed below pages that another has only promised is not saved: they may be withdrawn. When
    their step is done, it is offered again.

    Mutation: `begin_save` forgets the span; or does not ask `_below_promises`.
    """
    tokens = Engine(1, full(32)).run("twin", toks(1, 8), 16).tokens
    engine = Engine(1, full(32, 32), events=True)
    one = engine.submit("one", toks(1, 8), max_tokens=6)
    while len(one.tokens) < 11:
        engine.plan()
        engine.done()
    for _ in range(3):
        engine.plan()
    plan_with(engine, engine.submit("other", tokens[:12], max_tokens=2))
    while len(engine.flights) > 1:
        engine.done()
    assert one.ended and one.tokens == tokens[:14], "it has gone on below what the other promised"
    (span,) = engine.spans
    assert span.last == 13 and engine.cache.begin_save(span) is None
    engine.done()
    assert span in engine.spans, "offered again, now that all above it is real"
    (op,) = save(engine, [span])
    engine.land(op)
    end_all(engine)
