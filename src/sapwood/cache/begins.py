"""Where later requests are likely to begin, and what a page of a sliding group is worth for that.

A window is read only by who begins behind it. Most requests begin where an earlier one ended, where its prompt ended
(models whose template leaves out what was thought), at a branch point, or at a snapshot; and some a little before the
end of a prompt, where a template or a client has changed its last words:

      BETWEEN             NEAR                 WINDOW          BETWEEN      WINDOW
    ------------[ NEAR_TOKENS before that ][ window ]P-------------------[ window ]E     P end of the last prompt
                                                                                         E end, branch point, snapshot
Eviction takes the least worth first, and a save takes nothing that is BETWEEN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree

BETWEEN: Final = 0
NEAR: Final = 1
WINDOW: Final = 2
NEAR_TOKENS: Final = 512


def reach(tree: Tree, g: int) -> int:
    """How many pages before the place where a request begins can be worth something. 0: all are worth the same."""
    window = tree.families[g].protected_tail_pages()
    return window + -(-NEAR_TOKENS // tree.page_size) if window else 0


def worth(tree: Tree, g: int, node: Node) -> npt.NDArray[np.uint8]:
    """By page of `node`: what it is worth to requests that begin in it or below."""
    window = tree.families[g].protected_tail_pages()
    found = np.zeros(node.n, np.uint8)
    far = reach(tree, g)
    start, end, prompt = node.start, node.start + node.n, node.prompt_end
    if prompt > start:
        found[max(0, prompt - far - start) : max(0, prompt - start)] = NEAR
    below, prompt_below = _next_below(tree, node, far)
    if prompt_below:
        found[max(0, prompt_below - far - start) :] = NEAR
        below = min(below, prompt_below) if below else prompt_below
    if below and below - window < end:
        found[max(0, below - window - start) :] = WINDOW
    if prompt > start:
        found[max(0, prompt - window - start) : prompt - start] = WINDOW
    depths = np.array(snapshots(tree, node), np.int64) - start
    if len(depths):  # a page is in a window, if the next snapshot from its end on is not too far away
        columns = np.arange(depths[-1])
        found[: depths[-1]][depths[np.searchsorted(depths, columns, "right")] - columns <= window] = WINDOW
    return found


def _next_below(tree: Tree, node: Node, far: int) -> tuple[int, int]:
    """From the end of `node` on: the first place where requests begin, and the first end of a prompt, down to where the
    path branches, at most `far` pages below. 0: none."""
    begins, at, end = 0, node, node.start + node.n
    while len(at.children) == 1 and at.start + at.n < end + far:
        at = next(iter(at.children.values()))
        inside = snapshots(tree, at)
        if inside and not begins:
            begins = inside[0]
        if at.prompt_end > at.start:
            return begins, at.prompt_end
    if not begins and len(at.children) != 1:
        begins = at.start + at.n
    return begins, 0


def snapshots(tree: Tree, node: Node) -> list[int]:
    """The depths at which snapshots of any group and tier stand in `node`, in order."""
    if not tree.slots:
        return []
    return sorted({depth for copy in node.copies for g in tree.slots for depth in copy.pages[g] or ()})
