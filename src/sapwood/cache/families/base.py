"""The protocol of a family: the few questions the cache asks about a group, with the answers most families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from ..group import CacheGroup

Span = tuple[int, int]


class PathView(Protocol):
    """What a family sees of a matched path: how deep it goes, and where its group has nothing."""

    depth: int

    def last_missing(self, index: int, low: int, high: int) -> int:
        """The last page of [low, high) that group `index` has in no readable tier, or -1."""

    def deepest_closed(self, limit: int) -> int:
        """The deepest boundary up to `limit` to which every closed group has all pages in a readable tier."""

    def deepest_slot(self, index: int, limit: int) -> int:
        """The deepest boundary up to `limit` at which group `index` has a snapshot in a readable tier, or 0."""


class Family:
    """How the memory of one group may be reused. A new family subclasses this and is named with `register_family`.

    shape           "pages": one page for every page of tokens; "slot": one snapshot, standing at a boundary
    closed          a page is worth nothing without all pages before it (so eviction works leaf first)
    reads_promised  a row may read what a row of the same or an earlier plan will have written by then
    undoable        after a failed step the row can go on from where it was before
    plain           `deepest` is how far closed groups have their pages, and nothing else
    """

    shape: ClassVar[Literal["pages", "slot"]] = "pages"
    closed: ClassVar[bool] = False
    reads_promised: ClassVar[bool] = True
    undoable: ClassVar[bool] = True
    plain: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "deepest" in cls.__dict__ and "plain" not in cls.__dict__:
            cls.plain = False  # it has an answer of its own
        if "slid" in cls.__dict__ and "slid_ends" not in cls.__dict__:
            cls.slid_ends = Family.slid_ends  # type: ignore[method-assign]

    def __init__(self, group: CacheGroup, index: int, page_size: int) -> None:
        self.group = group
        self.index = index
        self.page_size = page_size

    @classmethod
    def validate(cls, group: CacheGroup) -> None:
        """Raise ValueError if the group's fields make no sense for this family."""

    @classmethod
    def least_pages(cls, group: CacheGroup, page_size: int) -> int:
        """The fewest device pages with which one request can run."""
        return 1

    def reads(self, start: int) -> tuple[Span, ...]:
        """The token ranges before `start` that a row beginning at `start` reads, in order.

        A token read from some start must be read from every start between the two: what is read only recedes.
        """
        raise NotImplementedError

    def protected_tail_pages(self) -> int:
        """How many pages before a leaf, a branch point or a snapshot are evicted last. 0: all are alike."""
        return 0

    def deepest(self, path: PathView, limit: int, length: int) -> int:
        """The deepest boundary (in pages, at most `limit`) from which a prompt of `length` tokens can begin."""
        boundary = limit
        while boundary > 0:
            for low, high in reversed(self.columns(boundary, length)):
                missing = path.last_missing(self.index, low, high)
                if missing >= 0:
                    boundary = missing
                    break
            else:
                return boundary
        return 0

    def columns(self, boundary: int, length: int) -> list[Span]:
        """The page ranges that must be there to begin at `boundary`, where a whole prompt computes its last token."""
        size = self.page_size
        if boundary * size < length:
            return self.pages_read(boundary * size)
        spans = self.pages_read(length - 1)
        if not spans or spans[-1][1] < boundary:
            spans.append((boundary - 1, boundary))  # the last token itself is read from its shared page
        return spans

    def pages_read(self, start: int) -> list[Span]:
        """`reads` in whole pages, overlapping ranges joined."""
        size = self.page_size
        spans: list[Span] = []
        for low, high in self.reads(start):
            if high <= low:
                continue
            first, last = low // size, -(-high // size)
            if spans and spans[-1][1] >= first:
                spans[-1] = (spans[-1][0], max(last, spans[-1][1]))
            else:
                spans.append((first, last))
        return spans

    def slid(self, low: int, now: int) -> tuple[list[Span], int]:
        """The pages from `low` on that a row at position `now` and later needs no more, and the new `low`."""
        keep = self.pages_read(now)
        end = keep[-1][0] if keep and keep[-1][1] * self.page_size >= now else now // self.page_size
        gone: list[Span] = []
        for first, last in keep:
            if low < min(first, end):
                gone.append((low, min(first, end)))
            low = max(low, min(last, end))
        if low < end:
            gone.append((low, end))
        return gone, max(low, end)

    def slid_ends(self, positions: Sequence[int]) -> list[int] | None:
        """For families that need nothing below one page, and everything from there on: that page, for rows at these
        positions. None: ask `slid` of each."""
        return None


_FAMILIES: dict[str, type[Family]] = {}


def register_family(name: str, family: type[Family]) -> None:
    """Make `family` known under `name`, for `CacheGroup(family=name)`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name of a family must be a non-empty string, got {name!r:.60}")
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise ValueError(f"family {name!r} must be a subclass of sapwood.cache.Family, got {family!r:.60}")
    if _FAMILIES.get(name, family) is not family:
        raise ValueError(f"family {name!r} is registered already; choose another name")
    _FAMILIES[name] = family


def family_class(name: str) -> type[Family]:
    """The family registered under `name`."""
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ValueError(f"family must be one of {', '.join(sorted(_FAMILIES))}, got {name!r:.60}")
    return _FAMILIES[name]
