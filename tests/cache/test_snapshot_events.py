"""What the tree holds, told to a router that comes late: as much as all events before, and no more (case E)."""

from __future__ import annotations

import random

import pytest

from sapwood.cache import AllBlocksCleared, BlockStored, held_events
from sapwood.cache.events import MEDIUM

from .chaos import LAYOUTS, Chaos, act, real_blocks
from .driver import BASE, full, state, toks, window
from .stories import PAGE, compute, engine_of, write_back
from .test_events import SPACES, Router, hashes_of, summary


def late_router(engine, closed: bool = True) -> Router:
    """A strict router that begins with what the tree holds."""
    router = Router(closed)
    for event in [AllBlocksCleared(), *held_events(engine.cache)]:
        router.hear(event)
    return router


def test_e01_a_late_router_hears_what_an_early_one_knows():
    """Two tiers, two namespaces, branches: the same blocks with the same parents, each tier from the roots down.

    Mutation: `held_events` forgets a tier, or tells children before their parents.
    """
    engine, early = engine_of(full(24, 24), events=True), Router()
    for number, ns in enumerate((BASE, SPACES["salt"])):
        for seed in (2, 3):
            write_back(engine, compute(engine, f"{number} {seed}", toks(1, 8) + toks(seed, 9), ns))
    early.agrees_with(engine)
    late = late_router(engine)
    assert late.held == early.held and len(late.held["GPU"]) == len(late.held["CPU"]) == 12
    tiers = [MEDIUM.index(event.medium) for event in held_events(engine.cache)]
    assert tiers == sorted(tiers), "one tier after the other"


def test_e01_asking_what_is_held_changes_nothing():
    """Events nobody has drained stay, none is added, and asking again gives the same.

    Mutation: `held_events` leaves its own list in `tree.events`, or does not put `undrained` back.
    """
    engine = engine_of(full(24), events=True)
    engine.run("one", toks(1, 17))
    engine.run("two", toks(1, 17), ns=SPACES["salt"])
    engine.cache.evict_namespace(BASE)
    before, stats = list(engine.cache._tree.events), engine.cache.stats()
    first = held_events(engine.cache)
    assert held_events(engine.cache) == first and all(isinstance(event, BlockStored) for event in first)
    assert len(first) == 1 and first[0].namespace == SPACES["salt"]
    assert engine.cache.stats() == stats
    assert before and engine.cache.drain_events() == before and engine.cache.drain_events() == []


def test_e01_what_is_only_promised_is_not_held():
    """Pages of a step that is still running are not told, and are once it is done.

    Mutation: `announced` counts promised pages.
    """
    engine = engine_of(full(24), events=True)
    engine.submit("request", toks(1, 17), max_tokens=2)
    assert engine.plan()
    assert held_events(engine.cache) == []
    engine.done()
    assert summary(held_events(engine.cache)) == [("stored", "GPU", hashes_of(engine, toks(1, 17)))]


def test_e01_windows_with_holes_are_told_run_by_run():
    """A path of a window with a hole in it: two events, each with the block before its first, held or not.

    Mutation: `_tell` tells all between the first and the last column.
    """
    engine = engine_of(window(8, 12), events=True)
    prompt = toks(1, 41)
    engine.run("request", prompt)
    known = hashes_of(engine, prompt)
    tree = engine.cache._tree
    (node,) = tree.roots[BASE].top.children.values()
    tree.sliding_pages[0].drop(node, 0, range(3, 6))  # as eviction takes what stands between windows
    held = held_events(engine.cache)
    assert summary(held) == [("stored", "GPU", known[:3]), ("stored", "GPU", known[6:])]
    assert [event.parent_block_hash for event in held] == [None, known[5]]
    assert [event.token_ids for event in held] == [prompt[: 3 * PAGE], prompt[6 * PAGE : 40]]


def test_e01_snapshots_of_state_are_told_one_by_one():
    """A layout of state alone holds the blocks at which its snapshots stand.

    Mutation: `_tell` leaves out nodes whose columns do not begin at 0.
    """
    engine = engine_of(state(4), events=True, every=2)
    prompt = toks(1, 26)
    engine.run("request", prompt)
    held = held_events(engine.cache)
    assert {block for event in held for block in event.block_hashes} == real_blocks(engine)["GPU"]
    assert all(len(event.block_hashes) == 1 for event in held) and held


@pytest.mark.attack
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_e01_after_any_traffic_it_is_what_the_tree_holds(layout):
    """Random traffic with evictions, failures and transfers: at any moment a late router knows what the tree holds.

    Mutation: `held_events` looks at one root only; `_tell` does not go below nodes that hold nothing.
    """
    rng = random.Random(layout)
    chaos = Chaos(layout, seed=5)
    closed = any(group.family == "full" for group in chaos.groups)
    most = 0
    for _ in range(250):
        act(rng, chaos)
        late = late_router(chaos.engine, closed)
        for medium, blocks in real_blocks(chaos.engine).items():
            assert set(late.held[medium]) == blocks
            most = max(most, len(blocks))
    assert most > 1
