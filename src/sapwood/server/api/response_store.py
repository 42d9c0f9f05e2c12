"""Responses that are kept for `previous_response_id`: in memory, so many and no more, the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MOST_RESPONSES = 4096
MOST_BYTES = 256 << 20


class StoredResponse(NamedTuple):
    """`body`: the response as JSON. `turns`: all that was said up to its end, lists of items as JSON; a response that
    follows another shares those before."""

    owner: str | None  # the API key that made it
    body: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """As if nothing were shared: what is counted is never less than what is used."""
        return len(self.body) + sum(map(len, self.turns))


class _Owner:
    """The responses of one key, the longest unused first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def take(self, id: str) -> None:
        self.bytes -= self.kept.pop(id).size


class ResponseStore:
    """`most` responses, `most_bytes` in all. One that belongs to another key is not there. Where room is wanted, the
    key that has most gives it: none loses a response while it has less than an equal share."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._owners: dict[str | None, _Owner] = {}

    def __len__(self) -> int:
        return sum(len(owner.kept) for owner in self._owners.values())

    @property
    def bytes(self) -> int:
        return sum(owner.bytes for owner in self._owners.values())

    def put(self, id: str, stored: StoredResponse) -> None:
        """Ids are new. What alone is larger than everything may be is not kept."""
        if stored.size > self._most_bytes:
            return
        owner = self._owners.setdefault(stored.owner, _Owner())
        owner.kept[id] = stored
        owner.bytes += stored.size
        while len(self) > self._most:
            self._forget(max(self._owners, key=lambda key: len(self._owners[key].kept)))
        while self.bytes > self._most_bytes:
            self._forget(max(self._owners, key=lambda key: self._owners[key].bytes))

    def get(self, id: str, owner: str | None) -> StoredResponse | None:
        theirs = self._owners.get(owner)
        if theirs is None or id not in theirs.kept:
            return None
        theirs.kept.move_to_end(id)
        return theirs.kept[id]

    def delete(self, id: str, owner: str | None) -> bool:
        """Whether it was there. Responses that follow it stay whole."""
        if self.get(id, owner) is None:
            return False
        self._owners[owner].take(id)
        return True

    def _forget(self, key: str | None) -> None:
        owner = self._owners[key]
        owner.take(next(iter(owner.kept)))
        if not owner.kept:
            del self._owners[key]
