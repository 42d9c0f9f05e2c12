"""A request: what was asked, what is known of it, the table of its phases; and a queue of requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import Binding, HybridPrefixCache, Lease, Namespace, token_bytes, whole_number

from .events import ProtocolError

_MOST = 2**31 - 1
_MOST_EOS = 64
_DEFAULT = Namespace()
_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What is asked. `tokens`: a list, an int32 array or a buffer of int32. `priority`: lower is more urgent. `eos`:
    tokens that end it, once it has yielded `min_tokens`. Checked by `Scheduler.submit`."""

    id: str
    tokens: Sequence[int] | bytes | bytearray | memoryview | npt.NDArray[Any]
    max_tokens: int
    namespace: Namespace = _DEFAULT
    priority: int = 0
    eos: Sequence[int] = ()
    min_tokens: int = 0
    reads_cache: bool = True
    writes_cache: bool = True


class Refused(ValueError):
    """A request that cannot be taken, and why. Nothing of its list was taken."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(f"request {id!r:.80} is refused: {reason}")
        self.id = id
        self.reason = reason


WAITING: Final = "waiting"  # holds no memory; after a retraction it has generated tokens already
FETCHING: Final = "fetching"  # holds no memory; what it lacks is looked for in the store, or on its way from there
LOADING: Final = "loading"  # holds a lease; its prefix is on its way from host
PREFILLING: Final = "prefilling"  # holds a lease; has more than its last token to compute, or sits out
DECODING: Final = "decoding"  # one token in every step
ENDED: Final = "ended"

# (phase, event) -> phase. What is not here cannot happen.
_NEXT = {
    (WAITING, "looking in the store"): FETCHING,
    (FETCHING, "the store's last word"): WAITING,
    (FETCHING, "its end"): ENDED,
    (WAITING, "admission"): PREFILLING,
    (WAITING, "admission to load"): LOADING,
    (LOADING, "its load"): PREFILLING,
    (LOADING, "retraction"): WAITING,
    (LOADING, "its end"): ENDED,
    (PREFILLING, "joining the decodes"): DECODING,
    (DECODING, "leaving the decodes"): PREFILLING,
    (PREFILLING, "retraction"): WAITING,
    (WAITING, "its end"): ENDED,
    (PREFILLING, "its end"): ENDED,
    (DECODING, "its end"): ENDED,
}
_AFTER: dict[str, dict[str, str]] = {ENDED: {}}
for (_before, _event), _after in _NEXT.items():
    _AFTER.setdefault(_before, {})[_event] = _after


class LastRefusal(NamedTuple):
    """When a request did not fit, and what there was then."""

    step: int  # of the last plan before
    needed: int  # pages it would have taken of each closed group
    available: tuple[int, ...] | None  # by group; None: the pages of closed groups alone were too few


class Request:
    """One request. `tokens` are those known of it, except while it decodes: then the newest are in the arrays."""

    __slots__ = (
        "adapter",
        "ahead",
        "arrival",
        "binding",
        "cached",
        "column",
        "computed",
        "done",
        "ends",
        "eos",
        "failed_at",
        "fetched",
        "final",
        "host",
        "id",
        "key",
        "lead",
        "lease",
        "loaded",
        "max_tokens",
        "min_tokens",
        "overtaken",
        "pages",
        "phase",
        "position",
        "priority",
        "prompt",
        "ran",
        "reached",
        "reads",
        "recomputed",
        "refusal",
        "row",
        "sat_out",
        "settled",
        "since",
        "slot",
        "step",
        "tokens",
        "tries",
        "wakes",
        "writes",
    )

    def __init__(self, spec: RequestSpec, tokens: bytes, arrival: int, binding: Binding) -> None:
        self.id = spec.id
        self.tokens = tokens
        self.prompt = len(tokens) // 4
        self.max_tokens = spec.max_tokens
        self.final = self.prompt + spec.max_tokens - 1  # positions it computes at most
        self.eos = tuple(spec.eos)
        self.min_tokens = spec.min_tokens
        self.adapter = spec.namespace.adapter
        self.priority = spec.priority
        self.arrival = arrival
        self.key = (spec.priority, arrival)
        self.reads = spec.reads_cache
        self.writes = spec.writes_cache
        self.binding = binding
        self.phase = WAITING
        self.host = True  # may be served from host; not after a load for it has failed
        self.lease: Lease | None = None
        self.slot = -1
        self.step = 0  # the newest plan with a row of it that is not one of the decode rows
        self.since = 0  # while it decodes: the first plan that has it among the decode rows
        self.ahead = False  # it decodes, and the chunk that yields its first token there is still in flight
        self.lead = 0  # while it decodes: where its next row begins, less the decode steps planned so far
        self.row = -1  # its place in the arrays while it decodes
        self.column = 0  # the next page it will need while it decodes
        self.ends = 0  # while it decodes: the step that brings its last token
        self.wakes = 0  # and from which its eos tokens count, if they do not yet
        self.pages: list[bytes] = []  # whole pages of tokens since it began to decode
        self.done = 0  # tokens computed
        self.position = 0  # and those that plans in flight compute
        self.cached = 0
        self.computed = 0
        self.recomputed = 0
        self.loaded = 0  # of `cached`: tokens whose pages host had, and the device had not
        self.fetched = 0  # of `loaded`: those that a store had and host had not
        self.reached = 0  # the furthest position it has been at: what is computed below counts as again
        self.settled = (0, 0)  # `cached` and `reached` as of its last step that was done
        self.tries = 0  # steps that failed with this row alone in them, since it last got further than ever
        self.failed_at = -1  # the furthest position at which a row of it began that failed; -1: it has got beyond
        self.ran = False  # it has had a row
        self.overtaken = 0  # later requests that got their first row while it was ready and had none
        self.sat_out = 0  # for how many plans it could not grow
        self.refusal: LastRefusal | None = None  # while it waits, and has been tried

    def change_phase(self, event: str) -> None:
        """Go to the phase behind `event`. ProtocolError if that cannot happen in this one."""
        phase = _AFTER[self.phase].get(event)
        if phase is None:
            raise ProtocolError(f"{event} cannot happen to request {self.id!r:.80} while it is {self.phase}")
        self.phase = phase

    @property
    def generated(self) -> int:
        """Tokens it has yielded, while it does not decode."""
        return len(self.tokens) // 4 - self.prompt

    @property
    def decodes(self) -> bool:
        """Whether it holds memory, is not one of the decode rows, and has all but its newest token computed."""
        known = len(self.tokens)
        return self.phase is PREFILLING and known == 4 * self.position + 4 and known > 4 * self.prompt

    @property
    def prefills(self) -> bool:
        """Whether it has more than that to compute. Neither: what it knows is computed, or in flight."""
        return len(self.tokens) > 4 * self.position and not self.decodes

    def begins_at(self, position: int) -> None:
        """It goes on at `position`: what lies beyond where it has been was found in the cache."""
        self.position = self.done = position
        reached, prompt = self.reached, self.prompt
        if position > reached:
            if reached < prompt:
                self.cached += (position if position < prompt else prompt) - reached
            self.reached = position

    def has_decoded_to(self, position: int) -> None:
        """It leaves the decode rows, in which positions are not counted."""
        self.position = self.done = position
        if position > self.reached:
            self.reached = position
        self.settled = (self.cached, self.reached)

    def gives_back(self) -> None:
        """It is retracted: what it had adopted since its last step that was done, it never used."""
        self.cached, self.reached = self.settled

    def falls_to(self, position: int) -> None:
        """Its step failed: what it had adopted for it may be gone again."""
        self.gives_back()
        self.begins_at(position)

    def computes(self, start: int, end: int) -> None:
        """It has computed its tokens [start, end)."""
        reached, prompt = self.reached, self.prompt
        if start < reached:
            self.recomputed += (end if end < reached else reached) - start
        if end > reached:
            begin = start if start > reached else reached
            if begin < prompt:
                self.computed += (end if end < prompt else prompt) - begin
            self.reached = end
            self.overtaken = self.tries = 0
        self.done = end
        self.settled = (self.cached, self.reached)
        if end > self.failed_at:
            self.failed_at = -1


class Queue:
    """Requests by urgency, then arrival, as a sorted list: most join at its end and leave near its beginning."""

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


def _check_numbers(spec: RequestSpec) -> None:
    most, least, priority = spec.max_tokens, spec.min_tokens, spec.priority
    if type(most) is int and type(least) is int and type(priority) is int:
        if 0 <= least <= most and 0 < most <= _MOST and -_MOST <= priority <= _MOST:
            if type(spec.reads_cache) is bool and type(spec.writes_cache) is bool:
                return
    whole_number("max_tokens", most, 1, _MOST)
    whole_number("min_tokens", least, 0, most)
    whole_number("priority", priority, -_MOST, _MOST)
    for name in ("reads_cache", "writes_cache"):
        if not isinstance(getattr(spec, name), bool):
            raise ValueError(f"{name} must be True or False, got {getattr(spec, name)!r:.60}")


def _check_eos(eos: object) -> None:
    if isinstance(eos, (str, bytes)) or not isinstance(eos, Collection):
        raise ValueError(f"eos must be a list of tokens, got {eos!r:.60}")
    if len(eos) > _MOST_EOS:
        raise ValueError(f"eos must be at most {_MOST_EOS} tokens, got {len(eos)}")
    for token in eos.tolist() if isinstance(eos, np.ndarray) else eos:
        whole_number("a token of eos", token, 0, _MOST)


def checked(spec: RequestSpec, cache: HybridPrefixCache, max_columns: int) -> bytes:
    """The tokens of a spec that is right in itself, as bytes of int32; else Refused, with the reason."""
    if not isinstance(spec, RequestSpec):
        raise Refused("", f"a RequestSpec is wanted, got {spec!r:.60}")
    if not isinstance(spec.id, str) or not 0 < len(spec.id) <= 512:
        raise Refused(f"{spec.id!s:.80}", f"id must be a string of 1 to 512 characters, got {spec.id!r:.60}")
    try:
        tokens = token_bytes(spec.tokens)
        _check_numbers(spec)
        if not isinstance(spec.namespace, Namespace):
            raise ValueError(f"namespace must be a Namespace, got {spec.namespace!r:.60}")
        if type(spec.eos) is not tuple or spec.eos:
            _check_eos(spec.eos)
    except (ValueError, TypeError) as error:
        raise Refused(spec.id, str(error)) from None
    length = len(tokens) // 4
    if length + spec.max_tokens > _MOST:
        raise Refused(spec.id, f"prompt and max_tokens must stay below 2**31, got {length} + {spec.max_tokens}")
    why = cache.too_long(length + spec.max_tokens - 1)
    pages = -(-(length + spec.max_tokens - 1) // cache.page_size)
    if max_columns and pages > max_columns and cache.has_pages:
        why = f"that takes {pages} pages, and tables are {max_columns} wide (max_columns)"
    if why:
        raise Refused(spec.id, f"it can never fit: {length} prompt + {spec.max_tokens} new tokens: {why}")
    return tokens
