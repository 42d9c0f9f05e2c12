"""What the engine tells the scheduler, and what it is told of the ends of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from sapwood.cache import Explanation

Reason = Literal["stop", "length", "finish", "abort", "failed"]


class ProtocolError(ValueError):
    """An event that cannot happen: the engine and the scheduler disagree. Nothing was changed by it."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A plan's batch has run. `tokens`: id -> token for exactly the rows that sample, or an int32 array in their
    order."""

    step: int
    tokens: Mapping[str, int] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A plan's batch has failed; nothing it wrote can be trusted, nor what later plans in flight write. `culprits`:
    ids of rows that are known to be at fault; they are tried alone next, and the others together."""

    step: int
    reason: str
    culprits: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The engine has found a reason to stop a request that yields tokens (a stop string, say)."""

    id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants this request any more."""

    id: str


@dataclass(frozen=True, slots=True)
class LoadDone:
    op: int
    ok: bool


@dataclass(frozen=True, slots=True)
class SaveDone:
    op: int
    ok: bool


@dataclass(frozen=True, slots=True)
class LookupDone:
    """The store was asked for the pages of a lookup. `pages`: how many of them, from the first on, it could serve so
    that every group can begin behind them (a window needs its last pages there, a state its snapshot).
    `cache.servable_run(lookup.start_page, there)` tells it; `there` says by group, one entry for each of the lookup's
    hashes, what the store has. 0 if it has nothing or does not answer."""

    op: int
    pages: int


@dataclass(frozen=True, slots=True)
class FetchDone:
    op: int
    ok: bool
    pages: int


@dataclass(frozen=True, slots=True)
class BackupDone:
    op: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """n more ticks have passed."""

    n: int = 1


@dataclass(frozen=True, slots=True)
class StoreUp:
    """Whether the store answers; it does until told otherwise. While it does not, nothing new is asked of it; what
    comes to host meanwhile is backed up when it does, if host still has it then."""

    up: bool


Event = (
    StepDone | StepFailed | Finish | Abort | LoadDone | SaveDone | LookupDone | FetchDone | BackupDone | Tick | StoreUp
)


class Ended(NamedTuple):
    """A request is over. Of its `prompt` tokens `cached` were never computed for it and `computed` were (together they
    are the prompt, once it has yielded a token); what had to be computed again is in `recomputed`. Of the `cached` ones
    `loaded` were brought to the device for it, and of these `fetched` from the store. `found`: what its admission found
    of the prompt; None if it was never admitted."""

    id: str
    reason: Reason
    prompt: int
    cached: int
    computed: int
    recomputed: int
    generated: int
    detail: str = ""
    loaded: int = 0
    fetched: int = 0
    found: Explanation | None = None
