"""Snapshots stand anywhere in a node: chats of hybrid models grow in place, and start from the deepest one they can."""

from __future__ import annotations

import pytest

from sapwood.cache import CacheGroup
from sapwood.cache.group import DEVICE, HOST
from sapwood.cache.page_ids import first_of
from sapwood.cache.pool import FLIGHT
from sapwood.cache.tree import Tree

from .driver import BASE, Engine, full, state, toks, window
from .stories import PAGE, all_free, crowd, empty_device, engine_of, hit, leave, newcomer, owned

MIXES = {
    "full+state": lambda: (full(96, 96), state(24, 24)),
    "full+window+state": lambda: (full(96, 96), window(8, 96, 96), state(24, 24)),
}
every_mix = pytest.mark.parametrize("mix", MIXES)


def chat(engine: Engine, turns: int, said: int = 9, answer: int = 6) -> list[list[int]]:
    """A chat of some turns. What has been said at the end of each."""
    tokens: list[int] = []
    texts = []
    for turn in range(turns):
        tokens = tokens + toks(turn + 1, said)
        tokens = engine.run(f"turn {turn}", tokens, answer).tokens
        texts.append(tokens)
    return texts


def nodes(engine: Engine) -> int:
    return engine.cache.stats()["nodes"]


@every_mix
@pytest.mark.parametrize("save", ["through", None], ids=["saved", "not saved"])
def test_f03_a_chat_is_one_node_however_many_snapshots_it_has(mix, save):
    """Each turn goes on where the last one ended: the leaf gets longer, under the saves that read it, and every
    snapshot stays where it stands.

    Mutation: `can_grow` says no where a snapshot stands; `PinHolder` does not count itself in `Node.held`.
    """
    engine = engine_of(*MIXES[mix](), save=save, every=1)
    texts = chat(engine, 4)
    assert nodes(engine) == 1
    assert owned(engine, "tree")["state"] >= 4, "one a turn at least"
    last = texts[-1] + toks(9, 3)
    found = hit(engine, last)
    assert found.boundary * PAGE > len(texts[-1]) - 2 * PAGE, "from the last checkpoint on"
    assert engine.run("next", last).cached == found.start
    all_free(engine)


@every_mix
def test_f03_who_goes_another_way_starts_from_the_deepest_snapshot_before(mix):
    """Somebody says something else in the middle of a chat: what is served ends at a snapshot inside the node, at or
    before the place; and the chat itself is served as before.

    Mutation: `deepest_slot` takes any snapshot of the node; `Snapshots.split` leaves all of them in the lower half.
    """
    engine = engine_of(*MIXES[mix](), every=1)
    texts = chat(engine, 4)
    (root,) = engine.cache._tree.roots.values()
    depths = sorted(root.top.recent.copies[DEVICE].pages[-1])
    assert len(depths) > 3
    for cut in range(2, len(texts[-1]) // PAGE):
        other = texts[-1][: cut * PAGE] + toks(50 + cut, 7)
        best = max((depth for depth in depths if depth <= cut), default=0)
        assert hit(engine, other).boundary == best
    place = len(texts[1]) // PAGE
    other = engine.run("other", texts[-1][: place * PAGE] + toks(99, 7))
    assert other.cached == max(depth for depth in depths if depth <= place) * PAGE
    assert hit(engine, texts[-1]).boundary == max(depth for depth in depths if depth * PAGE < len(texts[-1]))
    all_free(engine)


def test_f03_the_snapshot_that_was_not_used_for_longest_goes_first():
    """Of the snapshots in one node, those go first that nobody has started from for longest, wherever they stand.

    Mutation: `_take_slot` takes the deepest.
    """
    engine = engine_of(full(96), state(5), every=1000)
    texts = chat(engine, 3, said=9, answer=1)
    (root,) = engine.cache._tree.roots.values()
    depths = sorted(root.top.recent.copies[DEVICE].pages[1])
    assert len(depths) == 3 and nodes(engine) == 1
    engine.run("again", texts[-1][: depths[0] * PAGE] + texts[-1][depths[0] * PAGE : depths[0] * PAGE + 1])
    guests = [newcomer(engine, seed) for seed in range(3)]  # two slots are free, so one snapshot goes
    assert all(guests)
    there = {depth for node in root.top.children.values() for depth in _depths(node)}
    assert there == {depths[0], depths[2]}, "the second was used longest ago"
    leave(engine, *guests)
    all_free(engine)


def test_f03_snapshots_of_a_node_go_in_the_order_of_their_use():
    """Mutation: `Snapshots.use` does not move a snapshot to the end of `seen`."""
    tree = Tree(PAGE, (full(8), state(8)), False, False, 0)
    node = tree.attach(tree.root_of(BASE).top, bytes(8 * 4 * PAGE), 8)
    for depth in (2, 5, 4, 7):
        tree.clock.step_over()
        assert tree.snapshots.put(node, DEVICE, 1, depth, first_of(tree.device.pools[1].allocate(1, FLIGHT)))
    assert list(node.copies[DEVICE].pages[1]) == [2, 4, 5, 7]
    tree.clock.step_over()
    tree.snapshots.use(node.copies[DEVICE], 2)
    tree.pin(node, DEVICE)
    tree.device.pools[1].read(node.copies[DEVICE].pages[1][5])
    gone = []
    for _ in range(3):
        before = set(node.copies[DEVICE].pages[1])
        tree.device.queues[1].evict(1)
        gone += before - set(node.copies[DEVICE].pages[1])
    assert gone == [4, 7, 2] and list(node.copies[DEVICE].seen) == [5], "and never the one that is read"


def _depths(node) -> set[int]:
    found = set(node.copies[DEVICE].pages[1] or ())
    for child in node.children.values():
        found |= _depths(child)
    return found


@every_mix
def test_m03_all_snapshots_of_a_node_come_back_from_host(mix):
    """Everything was saved, and the device is emptied: each boundary that had a snapshot is served by loading.

    Mutation: `_to_save` saves the snapshot at the end of a node alone; `Snapshots.land` puts it at the node's end.
    """
    engine = engine_of(*MIXES[mix](), save="through", every=1, save_pages=64)
    texts = chat(engine, 3)
    engine.settle()
    (root,) = engine.cache._tree.roots.values()
    depths = sorted(root.top.recent.copies[HOST].pages[-1])  # and those that later ones have replaced on the device
    assert set(depths) >= set(root.top.recent.copies[DEVICE].pages[-1])
    empty_device(engine)
    wide = any(group.family == "window" for group in engine.cache.groups)
    for depth in depths if not wide else depths[-1:]:
        found = hit(engine, texts[-1][: depth * PAGE] + toks(70 + depth, 5))
        assert (found.boundary, found.load) == (depth, True)
    assert engine.run("again", texts[-1] + toks(9, 3)).cached == depths[-1] * PAGE
    all_free(engine)


def test_f10_windows_before_snapshots_inside_a_node_go_last():
    """A window group runs short: what lies between goes first, and a prompt can still begin at every snapshot.

    Mutation: `worth` looks at the end of the node alone.
    """
    groups: tuple[CacheGroup, ...] = (full(96), window(5, 26), state(8))
    engine = engine_of(*groups, every=1000)
    tokens = toks(1, 33)
    engine.run("first", tokens)
    engine.run("second", tokens + toks(2, 32))
    (root,) = engine.cache._tree.roots.values()
    assert nodes(engine) == 1 and sorted(root.top.recent.copies[DEVICE].pages[2]) == [8, 16]
    crowd(engine, 1, 20)
    assert owned(engine, "tree")["window"] < 16, "some had to go"
    assert hit(engine, tokens[:32] + toks(5, 3)).boundary == 8
    assert hit(engine, tokens + toks(2, 32) + toks(5, 3)).boundary == 16
    all_free(engine)


def test_f03_tokens_behind_the_last_snapshot_do_not_outlive_a_split():
    """Without a group that needs every page, a node may end with tokens of which nothing is kept. Somebody branches off
    before them: the rest holds nothing and goes.

    Mutation: `Tree.split` keeps a lower half in which nothing is left.
    """
    engine = engine_of(state(6), every=1000)
    engine.run("first", toks(1, 17), 14)  # its snapshot stands at page 4, its tokens go on for three pages
    (root,) = engine.cache._tree.roots.values()
    engine.run("second", toks(1, 17)[:16] + toks(2, 9))
    held = list(root.top.children.values())
    while held:
        node = held.pop()
        assert node.copies[DEVICE].pages[0] or node.children
        held += node.children.values()
    all_free(engine)
