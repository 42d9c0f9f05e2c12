"""Figures that several places show: of the pages in the engine's stats, and of a request that is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .finished import FinishedPrompt

TIERS = ("device", "host", "store", "shared")  # where cached tokens of a prompt come from


class PageUse(NamedTuple):
    """Of the pages of a tier, from 0 to 1, in the group that has least left."""

    held: float  # somebody needs them: no eviction can have them
    used: float  # these, and what is cached


def page_use(stats: Mapping[str, Any], tier: str) -> PageUse:
    """What the engine's stats say of a tier. Where they do not say what eviction could free, cached pages that running
    requests read do not count as held."""
    cache = stats["cache"]
    held = used = 0.0
    for group, tiers in cache["pages"].items():
        pages = tiers[tier]
        capacity = pages["capacity"]
        if capacity:
            left = cache.get("available", {}).get(group, {}).get(tier, pages["free"] + pages["tree"])
            held = max(held, 1 - left / capacity)
            used = max(used, 1 - pages["free"] / capacity)
    return PageUse(held, used)


def by_tier(prompt: FinishedPrompt) -> tuple[int, int, int, int]:
    """The cached tokens of a prompt in order of `TIERS`."""
    device = prompt.cached - prompt.host - prompt.store - prompt.shared
    return max(0, device), prompt.host, prompt.store, prompt.shared


def is_miss(prompt: FinishedPrompt) -> bool:
    """Whether it was computed, and less of it was cached than could have been."""
    return prompt.reason not in ("", "hit") and prompt.cached <= prompt.position
