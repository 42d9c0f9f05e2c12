"""What the log, /metrics and recorded traces show alike: a request that is over, and how full the tiers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.engine.cache_report import CacheReport


class FinishedPrompt(NamedTuple):
    """A prompt of a request."""

    ids: npt.NDArray[np.int32]
    cache: CacheReport
    queued: float  # seconds until it was first computed


class Finished(NamedTuple):
    """A request is over. Times are seconds of the monotonic clock."""

    id: str
    path: str  # of the API, such as /v1/chat/completions
    status: int
    model: str
    adapter: str | None  # its name
    namespace: bytes  # a digest of adapter and salt: equal for requests that may share
    prompts: list[FinishedPrompt]
    completion_tokens: int
    uncounted_tokens: int  # of these: not in /metrics before it was over
    reasons: list[str]  # of its samples: stop, length, tool_calls, abort, error
    arrived: float
    first: float | None  # token
    ended: float
    gaps: list[float]  # seconds between tokens of a sample
    error: str
    text: str | None  # of the prompt; None unless the log is to have it
    n: int  # samples of each prompt
    max_tokens: int  # limit of each sample: the request's, or what the context left


class PageUse(NamedTuple):
    """Of the pages of a tier, from 0 to 1, in the group that has least left."""

    held: float  # in use: eviction cannot free them
    used: float  # held or cached


def page_use(stats: Mapping[str, Any], tier: str) -> PageUse:
    """From the engine's stats. If they do not have what eviction could free, cached pages that running requests read do
    not count as held."""
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
