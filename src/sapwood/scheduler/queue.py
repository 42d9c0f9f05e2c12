"""Requests in order of urgency, then arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from .request import Request

_key = attrgetter("key")


class Queue:
    """A sorted list: almost everybody joins at its end and leaves near its beginning."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Request] = []

    def add(self, request: Request) -> None:
        items = self.items
        if not items or items[-1].key < request.key:
            items.append(request)
        else:
            insort(items, request, key=_key)

    def remove(self, request: Request) -> None:
        items = self.items
        at = 0 if items[0] is request else bisect_left(items, request.key, key=_key)
        assert items[at] is request
        del items[at]

    def __len__(self) -> int:
        return len(self.items)
