"""Figures of the pages in the engine's stats, as the log and `/metrics` show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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
