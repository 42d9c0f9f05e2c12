"""The layouts the wind tunnel blows at, by name: which groups, how many tokens a page. The seed chooses the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sapwood.cache import CacheGroup
from sapwood.scheduler import SchedulerConfig

Random = random.Random


@dataclass(frozen=True)
class Layout:
    """Families of the groups and the size of a page. `tiny`: with as little memory as one request can run in. `store`:
    with host memory and a store behind it; `pair`: two schedulers share it. `evict`: host gets what leaves the
    device."""

    families: tuple[str, ...]
    page: int = 16
    tiny: bool = False
    host: bool = False
    store: bool = False
    pair: bool = False
    evict: bool = False

    def config(self, rng: Random) -> SchedulerConfig:
        """A scheduler's configuration with this layout. Everything else is drawn from `rng`. With a headroom of 0 more
        requests come in than there is memory for, so that some must be retracted."""
        page = self.page
        crowded = rng.random() < 0.5
        store: dict[str, Any] = {}
        if self.store:
            store = {
                "store": True,
                "prefetch_threshold": rng.choice([1, 1, 1, 2, 4]),
                "lookup_ticks": rng.choice([10, 100, 1000]),
                "fetch_ticks": rng.choice([10, 100, 1000]),
            }
        return SchedulerConfig(
            page_size=page,
            groups=self._groups(rng),
            max_batch_tokens=rng.choice([16, 2 * page + 1, 8 * page] if crowded else [1, 5, page, 64, 8 * page]),
            max_batch_size=rng.choice([6, 16] if crowded else [1, 3, 6]),
            max_loras=rng.choice([0, 1, 2]),
            events=rng.random() < 0.5,
            policy=rng.choice(["fcfs", "prefix"]),
            host_policy="evict" if self.evict else rng.choice(["through", "evict"]) if self.host else "through",
            max_tries=rng.choice([1, 3]),
            max_overtaken=rng.choice([0, 2, 64]),
            headroom=0 if crowded else rng.choice([1, page, 64]),
            checkpoint_interval=rng.choice([1, 2, 4]),
            prefix_caching=rng.random() < 0.95,
            **store,
        )

    def _groups(self, rng: Random) -> tuple[CacheGroup, ...]:
        makers: dict[str, Callable[[Random, str], CacheGroup]] = {
            "full": self._full,
            "window": self._window,
            "state": self._state,
        }
        names = [f"{family}{self.families[:i].count(family) or ''}" for i, family in enumerate(self.families)]
        groups = [makers[family](rng, name) for family, name in zip(self.families, names, strict=True)]
        if self.host or self.store:
            # A small host has to cut what a neighbour with a large one has put in the store.
            times = rng.choice([0.25, 2] if self.pair else [0.5, 1, 1, 2] if self.store else [1, 2, 5])
            groups = [replace(group, host_pages=max(1, int(times * group.device_pages))) for group in groups]
        return tuple(groups)

    def _full(self, rng: Random, name: str) -> CacheGroup:
        pages = rng.choice([1, 2, 3] if self.tiny else [7, 12, 25, 40] if self.store else [5, 7, 12, 40])
        return CacheGroup(name, "full", pages * max(1, 8 // self.page))

    def _window(self, rng: Random, name: str) -> CacheGroup:
        page = self.page
        window = rng.choice([1, page // 2 + 1, page, page + 1, 2 * page + 3, 4 * page])
        if set(self.families) == {"window"}:
            window = max(2, window)  # a model of windows of 1 reads nothing: any boundary serves, computed or not
        spare = rng.choice([0, 1] if self.tiny else [0, 3, 9, 30])
        return CacheGroup(name, "window", -(-window // page) + 2 + spare * max(1, 8 // page), window=window)

    def _state(self, rng: Random, name: str) -> CacheGroup:
        return CacheGroup(name, "state", rng.choice([1, 2] if self.tiny else [1, 3, 6, 20]))


_FULL, _WINDOW, _STATE = ("full",), ("window",), ("state",)
LAYOUTS: dict[str, Layout] = {
    "full": Layout(_FULL),
    "window": Layout(_WINDOW),
    "full+window": Layout(_FULL + _WINDOW),
    "full+state": Layout(_FULL + _STATE),
    "full+2windows+state": Layout(_FULL + _WINDOW + _WINDOW + _STATE),
    "window+state": Layout(_WINDOW + _STATE),
    "state": Layout(_STATE),
    "2full": Layout(_FULL + _FULL),
    "full/1": Layout(_FULL, 1),
    "full/64": Layout(_FULL, 64),
    "full+window/1": Layout(_FULL + _WINDOW, 1),
    "full+state/64": Layout(_FULL + _STATE, 64),
    "full+2windows+state/4": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4),
    "state+window+full/4": Layout(_STATE + _WINDOW + _FULL, 4),
    "full@host": Layout(_FULL, host=True),
    "window@host": Layout(_WINDOW, host=True),
    "full+window@host": Layout(_FULL + _WINDOW, host=True),
    "full+state@host": Layout(_FULL + _STATE, 4, host=True),
    "full+2windows+state@host": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4, host=True),
    "window+state@host": Layout(_WINDOW + _STATE, 4, host=True),
    "full/1@host": Layout(_FULL, 1, host=True),
    "tiny-full+state@host": Layout(_FULL + _STATE, 4, tiny=True, host=True),
    "tiny-full+window@host": Layout(_FULL + _WINDOW, 4, tiny=True, host=True),
    "full@store": Layout(_FULL, 4, store=True),
    "full+window@store": Layout(_FULL + _WINDOW, 4, store=True),
    "full+state@store": Layout(_FULL + _STATE, 4, store=True),
    "full+2windows+state@store": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4, store=True),
    "window+state@store": Layout(_WINDOW + _STATE, 4, store=True),
    "tiny-full+window@store": Layout(_FULL + _WINDOW, 4, tiny=True, store=True),
    "full@store-evict": Layout(_FULL, 4, store=True, evict=True),
    "full+window@store-evict": Layout(_FULL + _WINDOW, 4, store=True, evict=True),
    "full+2windows+state@store-evict": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4, store=True, evict=True),
    "full@pair": Layout(_FULL, 4, store=True, pair=True),
    "full+window@pair": Layout(_FULL + _WINDOW, 4, store=True, pair=True),
    "full+2windows+state@pair": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4, store=True, pair=True),
    "tiny-full": Layout(_FULL, 4, tiny=True),
    "tiny-window": Layout(_WINDOW, 4, tiny=True),
    "tiny-full+window": Layout(_FULL + _WINDOW, 4, tiny=True),
    "tiny-full+state": Layout(_FULL + _STATE, 4, tiny=True),
    "tiny-full+2windows+state": Layout(_FULL + _WINDOW + _WINDOW + _STATE, 4, tiny=True),
}
