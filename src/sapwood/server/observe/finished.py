"""What is known of a request when it is over: for the log, the metrics and a recorded trace."""

from __future__ import annotations

from typing import NamedTuple

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
    uncounted_tokens: int  # of these: what /metrics was not told while it ran
    reasons: list[str]  # of its samples: stop, length, tool_calls, abort, error
    arrived: float
    first: float | None  # token
    ended: float
    gaps: list[float]  # seconds between tokens of a sample
    error: str
    text: str | None  # of the prompt, only where the log shall have it
    n: int  # samples of each prompt
    max_tokens: int  # that each was to have at most: what was asked for, or what the context left
