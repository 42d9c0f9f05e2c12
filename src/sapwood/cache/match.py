"""What the cache could serve a prompt: the deepest boundary all families agree on, and why it is not deeper."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from .ghosts import crc_at
from .group import DEVICE
from .lease import Binding, Match, Sibling
from .node import Node, Root
from .path import Path, agree
from .tree import Tree

_new = tuple.__new__  # a Match in a third of the time
_NEAR_PAGES = 8  # pages: who branches where a chat went on starts from a snapshot so far before it
_SIBLINGS = 4  # how many of the most recent siblings a copy on write looks at


class Explanation(NamedTuple):
    """What the cache would serve a prompt, and why it is not more.

    reason    hit           all that could be cached is, or nobody has sent more of this prompt before
              short         the prompt has no whole page
              empty         nothing is cached in this namespace
              diverged      other tokens follow at `position`
              evicted       it was cached, and had to make room at step `since`
              no_snapshot   a recurrent group has no snapshot so deep
              window_gone   a window group has lost pages it would need so deep
              off           the prefix cache is switched off
              other_namespace   another adapter, salt or version has more of it (told to an administrator only)
    position  the first token that has to be computed, or the first that differs (`diverged`)
    cached    tokens that would be served: whole pages, and the first tokens of one more that would be copied (copy on
              write inside a page). As `Match.cached`, without what is only promised
    """

    reason: str
    position: int
    cached: int
    since: int | None
    detail: str


class Matcher:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.can_copy = not tree.slots
        self.plain = all(family.plain for family in tree.families)
        # Those that are asked quickest come first: what they rule out, the others need not look at.
        self.families = [(g, tree.families[g]) for g in tree.slots + tree.closed + tree.sliding]

    def match(self, binding: Binding, tokens: bytes, length: int, tier: int) -> Match:
        tree = self.tree
        root = binding._root
        if not root.attached:
            return self.nothing(binding, tokens, length, "empty")
        path = tree.walk(root, tokens)
        if tier < path.tier:
            path.tier = tier
        if path.wrong:  # whoever comes next guesses right: a hint, it changes no answer
            for node in path.nodes:
                node.parent.recent = node  # type: ignore[union-attr]
        if self.plain:  # one answer for all questions
            boundary = depth = path.deepest_closed(path.depth)
            limiter = -1 if depth == path.depth else 0
        else:
            boundary, limiter = self.boundary(path, length)
            depth = path.deepest_closed(path.depth) if tree.closed else path.depth
        start = boundary * tree.page_size
        sibling = self.sibling(path, boundary, tokens, length) if self.can_copy else None
        if sibling is not None:
            start += sibling.tokens
        elif start >= length:
            start = length - 1
        cuts: tuple[int, ...] = ()
        pending = 0
        if tree.slots:
            cuts = self._cuts(path, boundary, depth, length)
            pending = self._pending(root, tokens, length, boundary)
        reason = self.reason(path, boundary, limiter, length)
        found = (
            boundary,
            start,
            start,
            depth,
            cuts,
            pending,
            length,
            reason,
            binding,
            tokens,
            path,
            sibling,
            tree.version,
        )
        return _new(Match, found)

    def nothing(self, binding: Binding, tokens: bytes, length: int, reason: str) -> Match:
        """A match that adopts nothing."""
        tree = self.tree
        path = Path(tree, binding._root, [], 0)
        return Match(
            0,
            0,
            0,
            0,
            self._cuts(path, 0, 0, length),
            0,
            length,
            reason,
            binding,
            tokens,
            path,
            None,
            tree.version,
        )

    def boundary(self, path: Path, length: int) -> tuple[int, int]:
        """The deepest boundary every family can serve, and the group that last lowered it (-1: the tree's tokens)."""
        boundary, limiter = path.depth, -1
        families = self.families
        settled = 0
        while settled < len(families):
            for g, family in families:
                lower = family.deepest(path, boundary, length)
                if lower < boundary:
                    boundary, limiter, settled = lower, g, 1
                else:
                    settled += 1
                if settled >= len(families) or not boundary:
                    return boundary, limiter
        return boundary, limiter

    def _cuts(self, path: Path, boundary: int, depth: int, length: int) -> tuple[int, ...]:
        """Where a prompt's chunks end so that a snapshot can be taken: where others branched, and its last page end."""
        if not self.tree.slots:
            return ()
        last = (length - 1) // self.tree.page_size
        if boundary < depth < last:
            end = path.nodes[-1]
            # A chat that merely goes on: nobody has branched here, and a chunk of a few pages would cost it a step.
            goes_on = not end.children and end.start + end.n == depth and depth - boundary <= _NEAR_PAGES
            return (last,) if goes_on else (depth, last)
        return (last,) if boundary < last else ()

    def _pending(self, root: Root, tokens: bytes, length: int, boundary: int) -> int:
        """A deeper boundary than ours at which a running request will leave a snapshot."""
        tree = self.tree
        last = (length - 1) // tree.page_size
        deepest = 0
        size = tree.page_bytes
        for cut, makers in root.makers.items():
            if max(boundary, deepest) < cut <= last:
                end = cut * size
                for maker in makers.get(tokens[end - size : end], ()):
                    if tokens.startswith(memoryview(maker.tokens)[:end]):
                        deepest = cut
                        break
        return deepest

    def sibling(self, path: Path, boundary: int, tokens: bytes, length: int) -> Sibling | None:
        """The real page beside the end of the path that shares most tokens with the prompt, if the first of them can be
        copied: the prompt is served to the end of the path, and nothing of it must be loaded first."""
        tree = self.tree
        if not self.can_copy or boundary < path.depth:
            return None
        offset = path.depth * tree.page_bytes
        most = min(tree.page_size, length - 1 - path.depth * tree.page_size)
        if most < 1:
            return None
        last = path.nodes[-1] if path.nodes else path.root.top
        inside = last.start + last.n > path.depth
        if not (inside or last.children):
            return None
        if path.tier and tree.closed and path.device_closed(boundary) < boundary:
            return None
        token = tokens[offset : offset + 4]
        if inside:
            at = path.depth - last.start
            beside = [last] if last.edge.startswith(token, at * tree.page_bytes) else []
        else:
            at = 0
            beside = [c for c in islice(reversed(last.children.values()), _SIBLINGS) if c.edge.startswith(token)]
        best: Sibling | None = None
        for node in beside:
            page = node.edge[at * tree.page_bytes : (at + 1) * tree.page_bytes]
            same = min(agree(page, tokens, offset, 4), most)
            if same > (best.tokens if best else 0) and self._copyable(node, at):
                best = Sibling(node, node.start + at, same)
        return best

    def _copyable(self, node: Node, at: int) -> bool:
        tree = self.tree
        if tree.closed and not node.copies[DEVICE].count:
            return False
        for g in tree.sliding:
            pages = node.copies[DEVICE].pages[g]
            if pages is None or not any(pages[4 * at : 4 * at + 4]):
                return False
        return all(node.is_real(g, node.start + at, g in tree.closed) for g in range(len(tree.groups)))

    def reason(self, path: Path, boundary: int, limiter: int, length: int) -> str:
        tree = self.tree
        most = (length - 1 if tree.slots else length) // tree.page_size
        if not most:
            return "short"
        if boundary >= most:
            return "hit"
        if limiter >= 0 and boundary < min(path.depth, most):
            return "no_snapshot" if tree.families[limiter].shape == "slot" else "window_gone"
        last = path.nodes[-1] if path.nodes else path.root.top
        if not path.nodes and not last.children:
            return "empty"
        return "diverged" if last.children or last.end > path.depth else "hit"

    def most_pages(self, length: int) -> int:
        """How many pages of a prompt of `length` tokens could be served at best."""
        return (length - 1) // self.tree.page_size if self.tree.slots else length // self.tree.page_size

    def found(self, match: Match) -> Explanation:
        """What admission finds of a prompt, in numbers: the answer that a request keeps and the statistics count."""
        boundary = match.boundary
        for node in match.path.nodes:
            for promise in node.promised or ():
                boundary = min(boundary, promise.low)
        real = match.start if boundary == match.boundary else boundary * self.tree.page_size
        reason = self._refined(match)
        position = match.start
        if reason == "diverged" and match.sibling is None:
            position = self._parts_at(match)
        return Explanation(reason, position, real, None, "")

    def _parts_at(self, match: Match) -> int:
        """The first token at which a prompt differs from the most similar of the last pages beside it."""
        tree, path = self.tree, match.path
        offset, size = path.depth * tree.page_bytes, tree.page_bytes
        last = path.nodes[-1] if path.nodes else path.root.top
        if last.end > path.depth:
            beside = [(last, path.depth - last.start)]
        else:
            beside = [(child, 0) for child in islice(reversed(last.children.values()), _SIBLINGS)]
        pages = (node.edge[at * size : (at + 1) * size] for node, at in beside)
        same = max((agree(page, match.tokens, offset, 4) for page in pages), default=0)
        return path.depth * tree.page_size + same

    def _refined(self, match: Match) -> str:
        """The reason of a match, with the ghosts asked."""
        tree = self.tree
        reason = match.reason
        if reason in ("diverged", "empty", "hit") and len(tree.ghosts):
            path = match.path
            at = path.depth * tree.page_bytes
            page = match.tokens[at : at + tree.page_bytes]
            if len(page) == tree.page_bytes:
                last = path.nodes[-1] if path.nodes else path.root.top
                crc = crc_at(last, path.depth - last.start, tree.page_bytes)
                if tree.ghosts.since(path.root.digest, path.depth, crc, page) is not None:
                    return "evicted"
        return reason
