"""Why a prompt missed: where its prefix parts from what is cached, and the reason. Touches nothing."""

from __future__ import annotations

import zlib
from itertools import islice
from typing import NamedTuple

import numpy as np

from .match import Explanation, Matcher
from .namespace import Namespace
from .node import Root
from .path import Path, agree
from .tree import Tree

_BESIDE = 64  # how many of the most recent siblings the nearest is looked for among


def explain(
    tree: Tree, matcher: Matcher, enabled: bool, namespace: Namespace, tokens: bytes, admin: bool
) -> Explanation:
    length = len(tokens) // 4
    size = tree.page_size
    if not enabled:
        return Explanation("off", 0, 0, None, "The prefix cache is switched off.")
    root = tree.roots.get(namespace)
    if not matcher.most_pages(length):
        cached = _served(tree, matcher, root, tokens, length).cached if root is not None else 0
        detail = f"The prompt has {length} tokens; only whole pages of {size} tokens are cached."
        return Explanation("short", cached, cached, None, detail)
    if root is None:
        found = Explanation("empty", 0, 0, None, "Nothing is cached in this namespace.")
        since = tree.ghosts.since(namespace.digest(), 0, 0, tokens[: tree.page_bytes])
        if since is not None:
            found = Explanation("evicted", 0, 0, since, f"It was cached and had to make room at step {since}.")
    else:
        found = _within(tree, matcher, root, tokens, length, admin)
    if admin and found.cached < length - 1:
        return _elsewhere(tree, matcher, namespace, tokens, length, found)
    return found


class _Served(NamedTuple):
    """What of a prompt has really been computed and would be served."""

    path: Path
    promised: bool  # there is more, which is only promised
    boundary: int
    limiter: int
    cached: int


def _served(tree: Tree, matcher: Matcher, root: Root, tokens: bytes, length: int) -> _Served:
    path = tree.walk(root, tokens)
    matched = path.depth
    for node in path.nodes:
        for promise in node.promised or ():
            path.depth = min(path.depth, promise.low)
    path.nodes = [node for node in path.nodes if node.start < path.depth]
    boundary, limiter = matcher.boundary(path, length)
    sibling = matcher.sibling(path, boundary, tokens, length)
    cached = boundary * tree.page_size + (sibling.tokens if sibling is not None else 0)
    return _Served(path, path.depth < matched, boundary, limiter, min(cached, length - 1))


def _within(tree: Tree, matcher: Matcher, root: Root, tokens: bytes, length: int, admin: bool) -> Explanation:
    path, promised, boundary, limiter, cached = _served(tree, matcher, root, tokens, length)
    reason = matcher.reason(path, boundary, limiter, length)
    served = f"{cached} of {length} tokens would be served"
    if reason in ("no_snapshot", "window_gone"):
        group = tree.groups[limiter].name
        lost = "has no snapshot" if reason == "no_snapshot" else "has lost pages of its window"
        return Explanation(
            reason,
            cached,
            cached,
            None,
            f"{served}; the tokens are known up to {path.depth * tree.page_size}, but group {group!r} {lost} there.",
        )
    if promised:
        return Explanation(
            "hit" if cached else "empty", cached, cached, None, f"{served}; more of it is being computed right now."
        )
    at = path.depth * tree.page_bytes
    page = tokens[at : at + tree.page_bytes]
    if boundary < matcher.most_pages(length) and len(page) == tree.page_bytes:
        since = tree.ghosts.since(root.digest, path.depth, zlib.crc32(tokens[:at]), page)
        if since is not None:
            return Explanation(
                "evicted", cached, cached, since, f"{served}; the rest was cached and had to make room at step {since}."
            )
    if reason == "diverged":
        return _diverged(tree, path, tokens, cached, served, admin)
    if reason == "empty":
        return Explanation("empty", 0, 0, None, "Nothing is cached in this namespace.")
    return Explanation(reason, cached, cached, None, f"{served}.")


def _diverged(tree: Tree, path: Path, tokens: bytes, cached: int, served: str, admin: bool) -> Explanation:
    """The first token at which the prompt differs from the most similar thing that is cached."""
    offset = path.depth * tree.page_bytes
    last = path.nodes[-1] if path.nodes else path.root.top
    if path.nodes and last.end > path.depth:
        beside = [(last, path.depth - last.start)]
    else:
        beside = [(child, 0) for child in islice(reversed(last.children.values()), _BESIDE)]
    size = tree.page_bytes
    pages = [
        bytes(node.edge[at * size : (at + 1) * size])
        for node, at in beside
        if all(node.is_real(g, path.depth, g in tree.closed) for g in tree.paged)
    ]
    if not pages:
        return Explanation(
            "hit" if cached else "empty", cached, cached, None, f"{served}; nobody has sent more of it before."
        )
    nearest = max(pages, key=lambda page: agree(page, tokens, offset, 4))
    same = agree(nearest, tokens, offset, 4)
    position = path.depth * tree.page_size + same
    if position * 4 >= len(tokens):
        return Explanation("hit", cached, cached, None, f"{served}; the rest does not fill a page.")
    detail = f"{served}; other tokens are cached from position {position} on."
    if admin:
        theirs = np.frombuffer(nearest, np.int32)[same : same + 8].tolist()
        ours = np.frombuffer(tokens, np.int32)[position : position + 8].tolist()
        detail += f" Cached: {theirs}, asked for: {ours}."
    return Explanation("diverged", position, cached, None, detail)


def _elsewhere(
    tree: Tree, matcher: Matcher, namespace: Namespace, tokens: bytes, length: int, found: Explanation
) -> Explanation:
    best, where = found.cached, None
    for other, root in tree.roots.items():
        if other != namespace:
            cached = _served(tree, matcher, root, tokens, length).cached
            if cached > best:
                best, where = cached, other
    if where is None:
        return found
    return Explanation(
        "other_namespace",
        found.position,
        found.cached,
        found.since,
        f"{where} has {best} of {length} tokens. In this namespace: {found.reason}. {found.detail}",
    )
