"""Claims: what was fetched for a request that waits stays on host until it comes in. Who has how much is decided here.

The cache holds the pages, and only so many for all claims together. They go by the order of the queue: who comes before
others may take theirs, and what is let go of is given to those who have too little, before the next plan.
"""

from __future__ import annotations

from sapwood.cache import HybridPrefixCache

from .request import Request

_MAX_RETRIES_PER_PLAN = 8  # claims looked at again before a plan: a walk of the tree each


class _Claim:
    __slots__ = ("pin", "short", "tries", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto  # pages of the prompt
        self.pin = 0  # its number in the cache; 0: nothing is held
        self.short = False  # the limit allows no more
        self.tries = 0


class Claims:
    def __init__(self, cache: HybridPrefixCache) -> None:
        self.cache = cache
        self.of: dict[Request, _Claim] = {}
        self.changed = False  # somebody let go of pages, or host got some: claims that lack pages may find them

    @property
    def held(self) -> int:
        """How many requests have pages that stay."""
        return sum([claim.pin > 0 for claim in self.of.values()])

    def make(self, request: Request, upto: int) -> None:
        """Host has the first `upto` pages of its prompt: so it shall be when it comes in."""
        self.drop(request)
        claim = self.of[request] = _Claim(upto)
        self._hold(request, claim)
        taken: list[Request] = []
        while claim.short and (other := self._last_behind(request)) is not None:
            taken.append(other)
            self._let_go(self.of[other])
            self._hold(request, claim)
        for other in reversed(taken):  # what it did not need after all
            self._hold(other, self.of[other])

    def drop(self, request: Request) -> None:
        """It has come in, where a load or its lease holds what it needs; or it is over."""
        claim = self.of.pop(request, None)
        if claim is not None:
            self._let_go(claim)
            self.changed = True

    def look_again(self) -> None:
        """Before a plan: can those who have too little have more now?"""
        self.changed = False
        lacking = [(claim.tries, request.key, request) for request, claim in self.of.items() if _lacks(claim)]
        for _, _, request in sorted(lacking)[:_MAX_RETRIES_PER_PLAN]:
            self.of[request].tries += 1
            self._hold(request, self.of[request])

    def _hold(self, request: Request, claim: _Claim) -> None:
        self._let_go(claim)
        claim.pin, claim.short = self.cache.pin_on_host(request.binding, request.tokens, claim.upto)

    def _let_go(self, claim: _Claim) -> None:
        self.cache.unpin_on_host(claim.pin)
        claim.pin, claim.short = 0, True

    def _last_behind(self, request: Request) -> Request | None:
        """Of those who come in after it, the last one that has anything."""
        behind = [other for other, claim in self.of.items() if claim.pin and other.key > request.key]
        return max(behind, key=lambda other: other.key, default=None)


def _lacks(claim: _Claim) -> bool:
    return claim.short or not claim.pin
