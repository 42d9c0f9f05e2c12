"""Full attention: a row reads every token before it, so a page is worth nothing without all pages back to the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Family, PathView, Span

if TYPE_CHECKING:
    from ..group import CacheGroup


class Full(Family):
    closed = True
    plain = True

    @classmethod
    def validate(cls, group: CacheGroup) -> None:
        if group.window is not None:
            raise ValueError(f"window of group {group.name!r} must be None for family 'full', got {group.window}")

    def reads(self, start: int) -> tuple[Span, ...]:
        return ((0, start),)

    def deepest(self, path: PathView, limit: int, length: int) -> int:
        return path.deepest_closed(limit)
