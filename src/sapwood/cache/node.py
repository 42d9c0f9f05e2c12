"""The plain data of the tree: nodes, and their copies in a tier. The rules that move them live in tree.py.

     root (a namespace)
      |  edge: the bytes of whole pages of int32 tokens
    node ---------------------- start, n: the pages [start, start + n) of the path
   /    \\                       copies: what it has in each tier
node    node
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flight import Promise
    from .roots import Root
    from .transfer import Transfer


class Copy:
    """What a node has in one tier.

    holds   own pins + children with holds, in this tier
    backed_children  children that have closed pages in this tier
    count   closed pages here: on device all or none; on host the first `count` of the node
    pages   by group: closed: `count` int32 ids as bytes; not closed: up to n ids, or None; 0 is a hole, and so is
            what lies behind them; slots: by the depth at which a snapshot stands (in order), or None
    reads   by group that is not closed: how many read each of its first columns, or None; those behind them have
            no reader (see readers.py)
    seen    by depth: when a snapshot that stands there was last used, the longest ago first
    used    its rank in the order of eviction: the step it was last used in
    queued  bits of the eviction queues it stands in
    """

    __slots__ = ("backed_children", "count", "holds", "pages", "queued", "reader_overflow", "reads", "seen", "used")

    def __init__(self, pages: list[Any], used: int, reads: list[bytearray | None]) -> None:
        self.holds = 0
        self.backed_children = 0
        self.count = 0
        self.pages = pages
        self.used = used
        self.queued = 0
        self.reads = reads
        self.reader_overflow: dict[tuple[int, int], int] | None = (
            None  # (group, column): readers beyond what `reads` can count
        )
        self.seen: dict[int, int] | None = None


class Node:
    """A path-compressed run of pages. `edge` is a bytearray while it grows and bytes when it rests."""

    __slots__ = (
        "__weakref__",  # so that a test can see a dropped tree go
        "children",
        "copies",
        "crc",
        "edge",
        "hashes",
        "held",
        "loading",
        "n",
        "parent",
        "promised",
        "prompt_end",
        "recent",
        "root",
        "saving",
        "seq",
        "start",
        "tried",
    )

    def __init__(
        self,
        root: Root,
        parent: Node | None,
        edge: bytes | bytearray,
        start: int,
        n: int,
        seq: int,
        copies: tuple[Copy, ...],
    ) -> None:
        self.root = root
        self.parent = parent
        self.edge = edge
        self.start = start
        self.n = n
        self.seq = seq
        self.copies = copies  # by tier
        self.children: dict[bytes, Node] = {}
        self.recent: Node | None = None
        self.hashes: bytearray | None = None  # sha256 digests of the first pages, as far as they were wanted
        self.promised: list[Promise] | None = None
        self.loading: Transfer | None = None
        self.saving: list[Transfer] | None = None  # saves under way that read some of its pages
        self.prompt_end = 0  # where the last prompt ended that ends in this node, in pages of the path; or 0
        self.tried = -1  # when its device copy was last used, as its last save began
        self.held = 0  # pins on the device that are not of leases: it may grow under them
        self.crc: int | None = None  # of all tokens up to the node's end, while that end stays where it is

    @property
    def end(self) -> int:
        return self.start + self.n

    @property
    def alive(self) -> bool:
        return self.parent is not None

    def is_real(self, g: int, column: int, closed: bool) -> bool:
        """Whether the page here at `column` of the path is computed, and not only promised."""
        return not self.promised or not any(promise.covers(g, column, closed) for promise in self.promised)
