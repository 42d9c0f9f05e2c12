"""What a response was given: items that have ids, so that they can be kept with it and told page by page."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import bad, shown, unsupported
from ..http import Call, query_number, query_text, query_texts
from .response_request import INCLUDED

MOST_LISTED = 100
ORDERS = ("asc", "desc")
_LISTED = 20
_MOST_ID = 512  # characters
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def with_ids(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items that `item_messages` has taken, with what a client leaves out and reads in a list: their ids, their status,
    and texts as lists of parts."""
    return [_whole(item) for item in items]


def _whole(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    id = item.get("id")
    good = isinstance(id, str) and 0 < len(id) <= _MOST_ID
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
    """The list that a call asks for, of the items of these turns, which are JSON."""
    for name in query_texts(call, "include") + query_texts(call, "include[]"):
        if name not in INCLUDED:
            raise unsupported("include", f"it may have {' and '.join(INCLUDED)}, got {shown(name)}")
    if query_text(call, "before", ""):
        raise unsupported("before", "use after, with order the other way round")
    most = query_number(call, "limit", _LISTED, MOST_LISTED)
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
    """Clients may send an item twice; who asks for what comes after it must not get there again."""
    seen: dict[str, int] = {}
    made = []
    for id, item in named:
        count = seen[id] = seen.get(id, 0) + 1
        if count > 1:
            id = f"{id}_{count}"
            item = msgspec.Raw(msgspec.json.encode({**msgspec.json.decode(item), "id": id}))
        made.append((id, item))
    return made
