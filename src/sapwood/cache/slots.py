"""Snapshots in the tree: at which depths of a node they stand, in what order they are used, how they come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .announce import tell_removed
from .pool import FLIGHT, TREE

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree


def put_slot(tree: Tree, node: Node, tier: int, g: int, depth: int, slot: int) -> bool:
    """A snapshot in flight becomes the tree's, at `depth` in `node`; it is freed if there is one already."""
    pool = tree.pools[tier][g]
    copy: Copy = node.host if tier else node.device  # type: ignore[assignment]
    slots = copy.pages[g]
    if not slots:
        copy.pages[g] = {depth: slot}
    elif depth in slots:
        pool.release_one(slot, FLIGHT)
        return False
    else:
        in_order = next(reversed(slots)) < depth
        slots[depth] = slot
        if not in_order:
            copy.pages[g] = dict(sorted(slots.items()))
    pool.move_one(slot, FLIGHT, TREE)
    pool.idle += 1
    use_slot(copy, depth, tree.now)
    tree.queues[g, tier].add(node, copy)
    return True


def use_slot(copy: Copy, depth: int, now: int) -> None:
    """The snapshot at `depth` is used now: `seen` is kept in the order in which snapshots were last used."""
    seen = copy.seen
    if not seen:
        copy.seen = {depth: now}
        return
    if depth in seen:
        del seen[depth]
    seen[depth] = now


def drop_slot(tree: Tree, node: Node, tier: int, g: int, depth: int) -> None:
    """Free the snapshot at `depth`. Nobody may read it."""
    copy = tree.copy_in(node, tier)
    slot = copy.pages[g].pop(depth)
    assert copy.seen is not None
    if all(depth not in (copy.pages[other] or ()) for other in tree.slots):
        del copy.seen[depth]
        for sliding in tree.sliding:  # the window before it may stand between others now
            if copy.pages[sliding]:
                tree.queues[sliding, tier].add(node, copy)
    if tree.announcing and g == tree.announced_group:
        tell_removed(tree, node, tier, range(depth - node.start - 1, depth - node.start))
    tree.pools[tier][g].release_one(slot, TREE)
    tree.pools[tier][g].idle -= 1
    tree.version += 1


def split_slots(tree: Tree, upper: Node, top: Copy, low: Copy, tier: int) -> None:
    """A node has been cut: `top`, the copy of its upper half, takes what stands there."""
    seen, end = low.seen, upper.start + upper.n
    assert seen is not None
    top.seen = {depth: at for depth, at in seen.items() if depth <= end} or None
    low.seen = {depth: at for depth, at in seen.items() if depth > end} or None
    for g in tree.slots:
        slots = low.pages[g]
        if slots:
            top.pages[g] = {depth: slot for depth, slot in slots.items() if depth <= end} or None
            low.pages[g] = {depth: slot for depth, slot in slots.items() if depth > end} or None
            if top.pages[g]:
                tree.queues[g, tier].add(upper, top)
