"""At most `max_loras` different adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterable


class AdapterCap:
    """Made for one plan. An adapter counts once one of its rows is in the batch; the base model never does."""

    def __init__(self, cap: int, running: Iterable[bytes]) -> None:
        self.cap = cap
        self.inside = set(running) if cap else set()
        self.closed = False

    def admits_new(self, adapter: bytes) -> bool:
        """Whether a row that is no decode row may enter."""
        return not self.closed and self.admits_decoding(adapter)

    def admits_decoding(self, adapter: bytes) -> bool:
        """Whether a row that decodes, and has sat out, may go on."""
        if not self.cap or adapter in self.inside:
            return True
        return not self.closed and len(self.inside) < self.cap

    def enter(self, adapter: bytes) -> None:
        if self.cap:
            self.inside.add(adapter)

    def close(self) -> None:
        """Somebody has been passed over too often and lacks a place: until it has one, nobody new enters with an
        adapter. The base model does, and rows that decode go on."""
        self.closed = True
