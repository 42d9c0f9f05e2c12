"""Responses that are kept for `previous_response_id`: in memory, so many and no more, the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MOST_RESPONSES = 4096
MOST_BYTES = 256 << 20


class Stored(NamedTuple):
    """`body`: the response as JSON. `turns`: all that was said up to its end, lists of items as JSON; a response that
    follows another shares those before."""

    owner: str | None  # the API key that made it
    body: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """As if nothing were shared: what is counted is never less than what is used."""
        return len(self.body) + sum(map(len, self.turns))


class ResponseStore:
    """`most` responses, `most_bytes` in all. One that belongs to another key is not there."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        return self._bytes

    def put(self, id: str, stored: Stored) -> None:
        """Ids are new. What alone is larger than everything may be is not kept."""
        if stored.size > self._most_bytes:
            return
        self._kept[id] = stored
        self._bytes += stored.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.size

    def get(self, id: str, owner: str | None) -> Stored | None:
        stored = self._kept.get(id)
        if stored is None or stored.owner != owner:
            return None
        self._kept.move_to_end(id)
        return stored

    def delete(self, id: str, owner: str | None) -> bool:
        """Whether it was there. Responses that follow it stay whole."""
        if self.get(id, owner) is None:
            return False
        self._bytes -= self._kept.pop(id).size
        return True
