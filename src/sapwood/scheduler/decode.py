"""The rows that decode, as arrays. A step touches a request's object only when it crosses a page, joins or ends.

Rows are compact: when one leaves, the last takes its place. Every row advances in every decode step (a row that
cannot leaves the arrays), so what will happen to a row and when is known when it joins, and nothing is compared step by
step:

    crossing[(-tick) % page]   rows that stand at a page end after `tick` steps: their page is full, they need a new one
    ending[tick]               rows that reach their last token with that step
    waking[tick]               rows whose eos tokens count from that step on

Not even positions are counted up: a row's is its `lead` plus the number of decode steps. Those planned (`planned`) say
where the next plan begins and which rows need a page; those done (`tick`) say which tokens are known. While steps are
in flight the first is ahead of the second, and a plan shows -1 for tokens that are not known yet. The rows here are
those of the next plan; each flight remembers its own.

The newest tokens of a row lie in a ring of page_size + 2 columns, a page, the newest one and one on its way; the column
of a step is the same for all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .request import DECODING, Request

Ints = npt.NDArray[np.int32]
SLOT, CACHED, _LEAD, _FINAL = range(4)
LENGTH, STARTS = _LEAD, _FINAL  # what a plan shows in their place
_NO_TOKEN = -2  # no token, and not UNKNOWN either
UNKNOWN = -1  # a token that a plan in flight samples
_POSITIONS_AHEAD_STEPS = 16  # steps for which the rows' positions are counted out in one go
_STEPS = np.arange(_POSITIONS_AHEAD_STEPS, dtype=np.int32)[:, None]
_SETTLED_STEPS = 4  # steps after which the same rows are likely to stay for a while
_NEVER = 1 << 62
_LOOP_MAX_ROWS = 8  # up to so many rows a loop beats numpy


class Shown(NamedTuple):
    """What a plan shows of the rows, row by row, and keeps."""

    ids: list[str]
    slots: Ints
    cached: Ints
    lengths: Ints
    fixed: Ints  # these three
    samples: npt.NDArray[np.bool_]
    adapters: list[bytes | None]
    unknown: Ints  # tokens of rows that are all in flight


class DecodeRows:
    def __init__(self, page_size: int, rows: int) -> None:
        self.page_size = page_size
        self.tick = 0  # decode steps done
        self.planned = 0  # and planned
        self.generation = 1  # how often rows have come and gone
        self.count = 0
        self.requests: list[Request] = []
        self.ids: list[str] = []
        self.adapters: dict[bytes, int] = {}  # how many rows each adapter has
        self.crossing: list[dict[Request, None]] = [{} for _ in range(page_size)]
        self.standing = self.crossing[0]  # those at a page end now: their pages are full, they need one more to go on
        self.ending: dict[int, dict[Request, None]] = {}
        self.waking: dict[int, dict[Request, None]] = {}
        self._rows = rows
        self._columns = page_size + 2
        self._take_memory(np.zeros((4, 0), np.int64), np.zeros((0, self._columns), np.int32))
        self._counted = np.zeros((0, 0), np.int32)
        self._eos = np.full((0, 0), _NO_TOKEN, np.int32)
        self.has_eos_rows = False  # whether any row has had eos tokens that count
        self._forget()

    def _take_memory(self, fields: npt.NDArray[np.int64], ring: Ints) -> None:
        """Arrays, and the same memory as bytes and numbers: for a single row those are written in a quarter of the time
        that numpy takes."""
        self._fields, self._ring = fields, ring
        self._numbers = [memoryview(row).cast("B").cast("q") for row in fields]
        self._ring_bytes = ring.reshape(-1).view(np.uint8).data
        self._true, self._unknown = np.ones(len(ring), np.bool_), np.full(len(ring), UNKNOWN, np.int32)

    def _forget(self) -> None:
        """Membership changes: what was handed out stays as it is, and is made anew."""
        self._shown: Shown | None = None
        self.generation += 1

    # ---- what a plan shows

    def shown(self) -> Shown:
        """What stays the same while no row joins or leaves."""
        if self._shown is None:
            n = self.count
            fixed = self._fields[:, :n].astype(np.int32)  # one call for all: small arrays cost what calls cost
            self._since, self._counted_from = self.planned, _NEVER
            # Positions are small; a lead is not, after so many steps, and what is in `fixed` of it means nothing.
            self._base: Ints = (self._fields[_LEAD, :n] + self.planned).astype(np.int32)
            fixed[LENGTH] = 1
            self._shown = Shown(
                self.ids.copy(),
                fixed[SLOT],
                fixed[CACHED],
                fixed[LENGTH],
                fixed,
                self._true[:n].copy(),
                [request.adapter for request in self.requests] if self.adapters else [None] * n,
                self._unknown[:n].copy(),
            )
        return self._shown

    def starts(self) -> Ints:
        """The position that each row computes next, counted out for several steps at once. Ask for `shown` first."""
        past = self.planned - self._since
        if not past:
            return self._base.copy()
        if past < _SETTLED_STEPS:
            soon: Ints = self._base + _STEPS[past]
            return soon
        at = past - self._counted_from
        if not 0 <= at < _POSITIONS_AHEAD_STEPS:
            self._counted, self._counted_from, at = self._base + (_STEPS + past), past, 0
        starts: Ints = self._counted[at]
        return starts

    def tokens(self) -> Ints:
        """The token that each row computes next. If a decode step is in flight, the tokens of all rows are on their
        way: a row that it does not have has joined ahead."""
        if self.planned > self.tick:
            return self.shown().unknown
        return self._ring[: self.count, self.tick % self._columns].copy()

    def position(self, request: Request) -> int:
        """Tokens computed, by steps that are done."""
        return request.lead + self.tick

    def generated(self, request: Request) -> int:
        """Tokens it is known to have yielded."""
        return self.position(request) + 1 - request.prompt

    def reaching_page_end(self) -> list[Request]:
        """Rows that will fill their page with the next step that is planned."""
        return list(self.crossing[-(self.planned + 1) % self.page_size])

    def room_ahead(self, headroom: int) -> int:
        """Pages that all rows together will take for their next `headroom` tokens."""
        if not self.count:
            return 0
        size = self.page_size
        have = self._fields[_LEAD, : self.count] + (self.planned + 1)
        want = np.minimum(self._fields[_FINAL, : self.count], have + headroom)
        pages = (want + (size - 1)) // size - (have + (size - 1)) // size
        return int(np.maximum(pages, 0).sum())

    # ---- members

    def join(self, request: Request, token: int) -> None:
        """A request that knows `tokens` and has just yielded `token` will compute that one next. UNKNOWN: it is on its
        way, and `arrives` will bring it."""
        row = self.count
        if row == len(self._ring):
            self._make_room()
        size, tick = self.page_size, self.planned
        position = len(request.tokens) // 4
        request.change_phase("joining the decodes")
        request.row = row
        request.column = -(-position // size)
        request.pages = []
        self.requests.append(request)
        self.ids.append(request.id)
        self.count += 1
        lead = request.lead = position - tick
        slots, cached, leads, finals = self._numbers
        leads[row], slots[row], cached[row], finals[row] = lead, request.slot, request.cached, request.final
        self._write_ring(row, request.tokens[len(request.tokens) - 4 * (position % size) :], token)
        self.crossing[lead % size][request] = None
        generated = position + 1 - request.prompt
        ends = request.ends = tick + request.max_tokens - generated
        scheduled = self.ending.get(ends)
        if scheduled is None:
            scheduled = self.ending[ends] = {}
        scheduled[request] = None
        if request.eos:
            wakes = tick + max(1, request.min_tokens - generated)
            if wakes == self.tick + 1:
                self._wake(request)
            else:
                request.wakes = wakes
                self.waking.setdefault(wakes, {})[request] = None
        if request.adapter is not None:
            self.adapters[request.adapter] = self.adapters.get(request.adapter, 0) + 1
        self._forget()

    def _write_ring(self, row: int, tail: bytes, token: int) -> None:
        """The tokens of a page that is not full, and the newest after them: that one in the column of this step."""
        width = 4 * self._columns
        ordered = tail.rjust(width - 4, b"\0") + token.to_bytes(4, "little", signed=True)
        cut = width - 4 - 4 * (self.planned % self._columns)
        self._ring_bytes[width * row : width * row + width] = ordered[cut:] + ordered[:cut]

    def arrives(self, request: Request, token: int) -> None:
        """The token with which a row has joined ahead is known."""
        self._ring[request.row, (len(request.tokens) // 4 - request.lead) % self._columns] = token
        request.ahead = False

    def leave(self, request: Request) -> None:
        """Take a row out; its request knows all its tokens again."""
        size = 4 * self.page_size
        position = self.position(request)
        width, end = 4 * self._columns, 4 * (self.tick % self._columns) + 4
        ring = self._ring_bytes[width * request.row : width * request.row + width].tobytes()
        tail = (ring[end:] + ring[:end])[width - 4 - 4 * (position % self.page_size) :]
        request.tokens = b"".join([request.tokens[: len(request.tokens) // size * size], *request.pages, tail])
        self.drop(request)
        request.has_decoded_to(position)

    def retire(self) -> list[Request]:
        """Take out the rows that the step in flight brings to their last token: the next plan has none of them."""
        if self.planned == self.tick:
            return []
        retired = list(self.ending.get(self.planned, ()))
        for request in retired:
            self.leave(request)
        return retired

    def drop(self, request: Request) -> None:
        """Take out a row of a request that is over: its tokens will not be asked for."""
        row, last = request.row, self.count - 1
        del self.crossing[request.lead % self.page_size][request]
        if request.ends > self.tick:
            self._cancel_scheduled(self.ending, request.ends, request)
        if request.wakes:
            self._cancel_scheduled(self.waking, request.wakes, request)
            request.wakes = 0
        if request.adapter is not None:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter]
        moved, id = self.requests.pop(), self.ids.pop()
        if moved is not request:
            self.requests[row], self.ids[row] = moved, id
            moved.row = row
            for numbers in self._numbers:
                numbers[row] = numbers[last]
            ring, width = self._ring_bytes, 4 * self._columns
            ring[width * row : width * row + width] = ring[width * last : width * last + width]
            if len(self._eos):
                self._eos[:, row] = self._eos[:, last]
        if len(self._eos):
            self._eos[:, last] = _NO_TOKEN
        self.count = last
        request.row, request.pages, request.ahead = -1, [], False
        self._forget()

    @staticmethod
    def _cancel_scheduled(scheduled: dict[int, dict[Request, None]], tick: int, request: Request) -> None:
        """Forget an event that was scheduled: nothing keeps a request that is over."""
        there = scheduled.get(tick)
        if there is not None:
            there.pop(request, None)
            if not there:
                del scheduled[tick]

    def _make_room(self) -> None:
        rows = min(self._rows, max(64, 2 * len(self._ring)))
        more = rows - len(self._ring)
        self._take_memory(
            np.concatenate([self._fields, np.zeros((4, more), np.int64)], axis=1),
            np.concatenate([self._ring, np.zeros((more, self._columns), np.int32)]),
        )
        self._eos = np.concatenate([self._eos, np.full((len(self._eos), more), _NO_TOKEN, np.int32)], axis=1)

    def _wake(self, request: Request) -> None:
        more = len(request.eos) - len(self._eos)
        if more > 0:
            self._eos = np.concatenate([self._eos, np.full((more, self._eos.shape[1]), _NO_TOKEN, np.int32)])
        self._eos[: len(request.eos), request.row] = request.eos
        self.has_eos_rows = True

    # ---- steps

    def issued(self) -> None:
        """A plan with all rows has gone out."""
        self.planned += 1
        self.standing = self.crossing[-self.planned % self.page_size]

    def withdrawn(self) -> None:
        """No step is in flight any more, and the rows of those that were have left."""
        assert self.planned == self.tick or not self.count
        self.planned = self.tick
        self.standing = self.crossing[-self.planned % self.page_size]

    def advance(self, rows: list[Request], generation: int, tokens: npt.NDArray[Any]) -> list[Request]:
        """These rows, all of those of `generation`, have computed their tokens and yielded the next. Returns those that
        are still here and whose page is full now."""
        tick = self.tick = self.tick + 1
        column = tick % self._columns
        if generation == self.generation:
            self._ring[: self.count, column] = tokens
        else:
            here = [at for at, request in enumerate(rows) if request.row >= 0]
            self._ring[[rows[at].row for at in here], column] = tokens[here]
        if tick in self.waking:
            for request in self.waking.pop(tick):
                if request.phase is DECODING and self.generated(request) >= request.min_tokens:
                    self._wake(request)
        crossed = self.crossing[-tick % self.page_size]
        if generation == self.generation:
            return list(crossed)
        return [request for request in crossed if not request.ahead]

    def full_pages(self, requests: list[Request]) -> list[bytes]:
        """The tokens of the pages these rows have just filled: all of the ring but the newest and the one to come."""
        columns, size = self._columns, 4 * self.page_size
        first, last = (self.tick + 2) % columns, self.tick % columns
        if len(requests) <= _LOOP_MAX_ROWS:
            rings, width = self._ring_bytes, 4 * columns
            rows = [rings[width * request.row : width * request.row + width].tobytes() for request in requests]
            first, last = 4 * first, 4 * last
            if first < last:
                return [row[first:last] for row in rows]
            return [row[first:] + row[:last] for row in rows]
        turning = self._ring.take([request.row for request in requests], 0)
        turned = turning[:, first:last]
        if first > last:
            turned = np.concatenate([turning[:, first:], turning[:, :last]], 1)
        raw = turned.tobytes()
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    def stopped(self) -> list[Request]:
        """Rows whose newest token ends them."""
        found: list[Request] = []
        newest = self._ring[: self.count, self.tick % self._columns]
        for eos in self._eos:
            hit = newest == eos[: self.count]
            if 1 in hit.tobytes():
                found += [self.requests[row] for row in hit.nonzero()[0].tolist()]
        return found

    def used_up(self) -> list[Request]:
        """Rows that have yielded all the tokens they may."""
        return [r for r in self.ending.pop(self.tick) if r.phase is DECODING and self.generated(r) >= r.max_tokens]
