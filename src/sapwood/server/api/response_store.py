"""Responses that are kept for `previous_response_id`, in memory and within a bound, and the items that they were given,
which clients read page by page."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import bad, shown, unsupported
from ..http import Call, query_number, query_text, query_texts
from ..limits import MAX_ITEM_ID_CHARACTERS, MAX_LISTED_ITEMS
from .response_request import INCLUDED

ORDERS = ("asc", "desc")
_LISTED_ITEMS = 20  # on a page, where the client does not say how many
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class StoredResponse(NamedTuple):
    """`body`: the response as JSON. `turns`: the conversation up to its end, lists of items as JSON; a response that
    follows another one shares the turns of that."""

    owner: str | None  # the API key that made it
    body: bytes
    turns: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """In bytes, as if no turns were shared: the count is never less than the use."""
        return len(self.body) + sum(map(len, self.turns))


class _Owner:
    """The responses of one key, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def remove(self, id: str) -> None:
        self.bytes -= self.kept.pop(id).size


class ResponseStore:
    """At most `most` responses of `most_bytes` bytes (--max-responses, --max-responses-bytes). A key sees its own
    responses only. Where there is no room, the key that has most loses its least recently used response: none loses
    one while it has less than an equal share."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._owners: dict[str | None, _Owner] = {}

    def __len__(self) -> int:
        return sum(len(owner.kept) for owner in self._owners.values())

    @property
    def bytes(self) -> int:
        return sum(owner.bytes for owner in self._owners.values())

    def put(self, id: str, stored: StoredResponse) -> None:
        """Keep a response under a new id. One that is larger than the whole store is not kept."""
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
        """Whether it was there. Responses that follow it keep their whole conversation."""
        if self.get(id, owner) is None:
            return False
        self._owners[owner].remove(id)
        return True

    def _forget(self, key: str | None) -> None:
        owner = self._owners[key]
        owner.remove(next(iter(owner.kept)))
        if not owner.kept:
            del self._owners[key]


# ---- the items that a response was given


def with_ids(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items that `item_messages` has accepted, with the fields that a client may leave out and that a list shows: ids,
    status, and texts as lists of parts."""
    return [_whole(item) for item in items]


def _whole(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    id = item.get("id")
    good = isinstance(id, str) and 0 < len(id) <= MAX_ITEM_ID_CHARACTERS
    made = {**item, "type": kind, "id": id if good else f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"}
    if made.get("status") is None:
        made["status"] = "completed"
    if kind == "message":
        content = item["content"]
        parts = [{"type": _text_of(item), "text": content}] if isinstance(content, str) else content
        made["content"] = [_part(part) for part in parts]
    elif kind == "reasoning":
        made.setdefault("summary", [])
    return made


def _text_of(item: Mapping[str, Any]) -> str:
    return "output_text" if item["role"] == "assistant" else "input_text"


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"annotations": [], "logprobs": [], **part} if part.get("type") == "output_text" else dict(part)


class _Named(msgspec.Struct):
    id: str


def page(turns: Sequence[bytes], call: Call) -> bytes:
    """The page that a call asks for, of the items of these turns (JSON)."""
    for name in query_texts(call, "include") + query_texts(call, "include[]"):
        if name not in INCLUDED:
            raise unsupported("include", f"it may have {' and '.join(INCLUDED)}, got {shown(name)}")
    if query_text(call, "before", ""):
        raise unsupported("before", "use after, with order the other way round")
    most = query_number(call, "limit", _LISTED_ITEMS, MAX_LISTED_ITEMS)
    order, after = query_text(call, "order", "desc"), query_text(call, "after", "")
    if order not in ORDERS:
        raise bad("order", f"order must be {' or '.join(ORDERS)}, got {shown(order)}")
    items = [item for turn in turns for item in msgspec.json.decode(turn, type=list[msgspec.Raw])]
    named = _unique([(msgspec.json.decode(item, type=_Named).id, item) for item in items])
    if order == "desc":
        named.reverse()
    begin = 0
    if after:
        begin = next((at + 1 for at, (id, _) in enumerate(named) if id == after), -1)
        if begin < 0:
            raise bad("after", f"after must be the id of an item in this list, got {shown(after)}")
    some = named[begin : begin + most]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [item for _, item in some],
            "first_id": some[0][0] if some else None,
            "last_id": some[-1][0] if some else None,
            "has_more": begin + most < len(named),
        }
    )


def _unique(named: list[tuple[str, msgspec.Raw]]) -> list[tuple[str, msgspec.Raw]]:
    """Clients may send an item twice. Its second id differs, so that a page after the second does not begin behind the
    first."""
    seen: dict[str, int] = {}
    made = []
    for id, item in named:
        count = seen[id] = seen.get(id, 0) + 1
        if count > 1:
            id = f"{id}_{count}"
            item = msgspec.Raw(msgspec.json.encode({**msgspec.json.decode(item), "id": id}))
        made.append((id, item))
    return made
