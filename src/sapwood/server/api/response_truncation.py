"""`truncation: "auto"`: what of a conversation is left out where it is longer than the context.

Whole turns go, the oldest first: a message of the user with all that came of it. Where that is not enough, so do the
model's own steps since the last message of the user, each with what its calls returned. These stay: instructions,
messages of the system and of developers, the last message of the user, and the end: the last item, or the results that
came last with their calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..errors import ApiError
from ..generation import Prompt

Item = Mapping[str, Any]
_ANSWER = 16  # of the context, the part that is left for an answer of no certain length, where something must go


async def fitting(
    items: Sequence[Item], make: Callable[[Sequence[Item]], Awaitable[Prompt]], limit: int, answer: int | None
) -> Prompt:
    """The prompt that `make` makes of these items, or of as many of them as leave room for the answer. ApiError as
    `make` raises it, where none of what may go is enough."""
    whole = await _made(make, items)
    if whole is not None and len(whole.ids) + (answer or 1) <= limit:
        return whole
    groups = _groups(items)
    room = limit - (answer or max(1, limit // _ANSWER))
    least, most = 1, len(groups)
    best = None
    while least <= most:
        some = (least + most) // 2
        made = await _made(make, _without(items, groups[:some]))
        if made is not None and len(made.ids) <= room:
            best, most = made, some - 1
        else:
            least = some + 1
    return best or await make(_without(items, groups))


async def _made(make: Callable[[Sequence[Item]], Awaitable[Prompt]], items: Sequence[Item]) -> Prompt | None:
    """None: far too long."""
    try:
        return await make(items)
    except ApiError as error:
        if error.code == "context_length_exceeded":
            return None
        raise


def _groups(items: Sequence[Item]) -> list[list[int]]:
    """What goes together, the oldest first; what always stays is in none of them."""
    asked = max((at for at, item in enumerate(items) if _is_of(item, "user")), default=-1)
    stays = {asked, *_end(items)}
    groups: list[list[int]] = []
    for at, item in enumerate(items):
        if at in stays or _is_of(item, "system", "developer"):
            continue
        step = at == asked + 1 or (at > asked and _is(items[at - 1], "function_call_output"))
        if not groups or _is_of(item, "user") or (step and not _is(item, "function_call_output")):
            groups.append([])
        groups[-1].append(at)
    return groups


def _end(items: Sequence[Item]) -> set[int]:
    """The last item, or results with the calls that they answer."""
    at = len(items)
    while at and _is(items[at - 1], "function_call_output"):
        at -= 1
    calls = {item["call_id"] for item in items[at:]}
    answered = {i for i, item in enumerate(items[:at]) if _is(item, "function_call") and item["call_id"] in calls}
    return answered | {*range(at, len(items))} or {len(items) - 1}


def _without(items: Sequence[Item], groups: Sequence[Sequence[int]]) -> list[Item]:
    """What is left, but for results of calls that are gone."""
    gone = {at for group in groups for at in group}
    left: list[Item] = []
    calls = set()
    for at, item in enumerate(items):
        if at in gone or (_is(item, "function_call_output") and item["call_id"] not in calls):
            continue
        if _is(item, "function_call"):
            calls.add(item["call_id"])
        left.append(item)
    return left


def _is(item: Item, kind: str) -> bool:
    return (item.get("type") or "message") == kind


def _is_of(item: Item, *roles: str) -> bool:
    return _is(item, "message") and item.get("role") in roles
