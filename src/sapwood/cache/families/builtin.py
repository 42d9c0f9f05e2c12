"""The families that come with the cache: `full`, `window` and `state`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Family, PathView, Span

if TYPE_CHECKING:
    from ..group import CacheGroup


class _WithoutWindow(Family):
    @classmethod
    def validate(cls, group: CacheGroup) -> None:
        if group.window is not None:
            name, family = group.name, group.family
            raise ValueError(f"window of group {name!r} must be None for family {family!r}, got {group.window}")


class Full(_WithoutWindow):
    """Full attention: a row reads every token before it, so a page is worth nothing without all pages to the root."""

    closed = True
    plain = True

    def reads(self, start: int) -> tuple[Span, ...]:
        return ((0, start),)

    def deepest(self, path: PathView, limit: int, length: int) -> int:
        return path.deepest_closed(limit)


class Window(Family):
    """Sliding window: a query sees W keys, itself included; older pages may be holes."""

    def __init__(self, group: CacheGroup, index: int, page_size: int) -> None:
        super().__init__(group, index, page_size)
        assert group.window is not None
        self.window = group.window

    @classmethod
    def validate(cls, group: CacheGroup) -> None:
        if group.window is None:
            raise ValueError(
                f"window of group {group.name!r} must be the number of keys a query sees "
                "(at least 1, itself included) for family 'window', got None"
            )

    @classmethod
    def least_pages(cls, group: CacheGroup, page_size: int) -> int:
        assert group.window is not None
        return -(-group.window // page_size) + 2

    def reads(self, start: int) -> tuple[Span, ...]:
        return ((max(0, start - self.window + 1), start),)

    def pages_read(self, start: int) -> list[Span]:
        low = start - self.window + 1
        return [(low // self.page_size if low > 0 else 0, -(-start // self.page_size))] if start > max(low, 0) else []

    def slid(self, low: int, now: int) -> tuple[list[Span], int]:
        end = max(0, now - self.window + 1) // self.page_size
        return ([(low, end)], end) if low < end else ([], low)

    def slid_ends(self, positions: Sequence[int]) -> list[int]:
        size, before = self.page_size, self.window - 1
        return [(now - before) // size for now in positions]

    def protected_tail_pages(self) -> int:
        # A whole prompt begins at its last token, one before the boundary: its window reaches one token further back.
        return -(-self.window // self.page_size) + (1 if self.window % self.page_size else 0)


class State(_WithoutWindow):
    """Recurrent state: one snapshot, exactly at the boundary. A scan can be neither read early nor undone."""

    shape = "slot"
    reads_promised = False
    undoable = False

    def reads(self, start: int) -> tuple[Span, ...]:
        return ()

    def deepest(self, path: PathView, limit: int, length: int) -> int:
        # A state cannot start behind its snapshot, and at least one token must be left to compute.
        return path.deepest_slot(self.index, min(limit, (length - 1) // self.page_size))
