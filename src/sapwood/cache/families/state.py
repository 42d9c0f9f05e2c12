"""Recurrent state: one snapshot, exactly at the boundary. A scan can be neither read early nor undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Family, PathView, Span

if TYPE_CHECKING:
    from ..group import CacheGroup


class State(Family):
    shape = "slot"
    reads_promised = False
    undoable = False

    @classmethod
    def validate(cls, group: CacheGroup) -> None:
        if group.window is not None:
            raise ValueError(f"window of group {group.name!r} must be None for family 'state', got {group.window}")

    def reads(self, start: int) -> tuple[Span, ...]:
        return ()

    def deepest(self, path: PathView, limit: int, length: int) -> int:
        # A state cannot start behind its snapshot, and at least one token must be left to compute.
        return path.deepest_slot(self.index, min(limit, (length - 1) // self.page_size))
