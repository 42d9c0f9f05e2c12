"""At most `max_loras` different adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterable


class Gate:
    """Made for one plan. An adapter counts once one of its rows is in the batch; the base model never does."""

    def __init__(self, cap: int, running: Iterable[bytes]) -> None:
        self.cap = cap
        self.inside = set(running) if cap else set()
        self.closed = False

    def lets_in(self, adapter: bytes) -> bool:
        if not self.cap:
            return True
        return not self.closed and (adapter in self.inside or len(self.inside) < self.cap)

    def enter(self, adapter: bytes) -> None:
        if self.cap:
            self.inside.add(adapter)

    def close(self) -> None:
        """Somebody has waited for an adapter long enough: only the base model comes in until there is room for it."""
        self.closed = True
