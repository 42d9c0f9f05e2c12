"""The tree as an administrator looks at it: its nodes, the most recently used first. Touches nothing."""

from __future__ import annotations

from typing import Any

from .group import DEVICE, HOST
from .node import Node
from .tree import Tree

_SHOWN = 16  # tokens of a node


def outline(tree: Tree, most: int) -> dict[str, Any]:
    """Up to `most` nodes in all, parents before their children, and how many there are."""
    nodes: list[dict[str, Any]] = []
    total = 0
    waiting: list[tuple[Node, int]] = []
    for number, root in enumerate(tree.roots.values()):
        waiting += [(child, -1 - number) for child in _recent(root.top)]
    while waiting:
        node, parent = waiting.pop()
        total += 1
        if len(nodes) >= most:
            waiting += [(child, parent) for child in node.children.values()]
            continue
        nodes.append(_shown(tree, node, parent))
        waiting += [(child, len(nodes) - 1) for child in reversed(_recent(node))]
    spaces = [
        {
            "adapter": None if space.adapter is None else space.adapter.hex(),
            "salted": space.salt is not None,
            "version": space.version,
            "requests": root.bound,
        }
        for space, root in tree.roots.items()
    ]
    return {"namespaces": spaces, "nodes": nodes, "total": total}


def _recent(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: child.copies[DEVICE].used, reverse=True)


def _shown(tree: Tree, node: Node, parent: int) -> dict[str, Any]:
    """`parent`: the place of a node in the list; of a root, -1 less its place among the namespaces."""
    return {
        "parent": parent,
        "start": node.start * tree.page_size,
        "tokens": node.n * tree.page_size,
        "first_tokens": memoryview(bytes(node.edge[: 4 * _SHOWN])).cast("i").tolist(),
        "device_pages": node.copies[DEVICE].count,
        "host_pages": node.copies[HOST].count if tree.has_host else 0,
        "pinned": node.copies[DEVICE].holds > 0,
        "used": node.copies[DEVICE].used,
        "promised": bool(node.promised),
    }
