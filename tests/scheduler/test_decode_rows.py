"""The rows that decode, against lists of tokens: every page size, every place in the ring, rows that come and go."""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest

from sapwood.scheduler.decode import DecodeRows
from sapwood.scheduler.request import DECODING, ENDED, PREFILLING, Request, RequestSpec

NEW = 6  # so few different tokens are sampled that eos tokens come up


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpacked(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


class Rows:
    """`DecodeRows`, and beside it what every row knows, the newest token last."""

    def __init__(self, size: int, rows: int, seed: int) -> None:
        self.size, self.rows = size, rows
        self.rng = random.Random(seed)
        self.decoding = DecodeRows(size, rows)
        self.known: dict[Request, list[int]] = {}
        self.made = 0

    def request(self) -> Request:
        rng, nobody = self.rng, object()
        self.made += 1
        tokens = [rng.randrange(2**31) for _ in range(rng.randrange(1, 3 * self.size + 3))]
        most = rng.randrange(2, 4 * self.size + 8)
        eos = tuple(rng.sample(range(NEW), rng.randrange(3)))
        spec = RequestSpec(str(self.made), tokens, most, eos=eos, min_tokens=rng.randrange(most + 1))
        binding: Any = nobody
        request = Request(spec, packed(tokens), self.made, binding)
        lease: Any = nobody
        request.phase, request.lease, request.adapter = PREFILLING, lease, rng.choice([None, b"a", b"b"])
        request.slot, request.cached = rng.randrange(1000), rng.randrange(1000)
        return request

    def join(self, request: Request, known: list[int]) -> None:
        token = self.rng.randrange(NEW)
        self.decoding.join(request, token)
        self.known[request] = [*known, token]

    def come(self) -> None:
        often = 0.6 if self.rows <= 20 else 0.97
        while self.decoding.count < self.rows and self.rng.random() < often:
            request = self.request()
            self.join(request, unpacked(request.tokens))

    def go(self) -> None:
        rng = self.rng
        for request in [request for request in self.known if rng.random() < 0.1]:
            known = self.known.pop(request)
            if rng.random() < 0.4:
                self.over(request)
                continue
            self.decoding.leave(request)
            request.phase = PREFILLING
            assert unpacked(request.tokens) == known
            assert (request.position, request.row, request.pages) == (len(known) - 1, -1, [])
            if request.max_tokens - (len(known) - request.prompt) > 1 and rng.random() < 0.7:
                self.join(request, known)

    def over(self, request: Request) -> None:
        request.phase, request.lease = ENDED, None
        self.decoding.drop(request)

    def step(self) -> None:
        decoding, rng, known = self.decoding, self.rng, self.known
        if not decoding.count:
            return
        decoding.shown()
        handed_out, then = decoding.starts(), decoding.starts().copy()
        newest = [rng.choice([rng.randrange(NEW), rng.randrange(2**31)]) for _ in range(decoding.count)]
        rows, generation = decoding.requests.copy(), decoding.generation
        decoding.issued()
        for request, token in zip(decoding.requests, newest, strict=True):
            known[request].append(token)
        aborted = [request for request in known if rng.random() < 0.05]
        crossed = decoding.advance(rows, generation, np.array(newest, np.int32))
        assert handed_out.tolist() == then.tolist()
        assert set(crossed) == {request for request in known if (len(known[request]) - 1) % self.size == 0}
        for request, page in zip(crossed, decoding.full_pages(crossed), strict=True):
            assert unpacked(page) == known[request][-self.size - 1 : -1]
            request.pages.append(page)
        for request in aborted:
            del known[request]
            self.over(request)
        self.end(decoding.stopped() if decoding.has_eos_rows else [], self.stopped())
        self.end(decoding.used_up() if decoding.tick in decoding.ending else [], self.used_up())

    def stopped(self) -> list[Request]:
        known = self.known
        listening = [r for r in known if len(known[r]) - r.prompt >= r.min_tokens]
        return [request for request in listening if known[request][-1] in request.eos]

    def used_up(self) -> list[Request]:
        return [request for request in self.known if len(self.known[request]) - request.prompt >= request.max_tokens]

    def end(self, found: list[Request], right: list[Request]) -> None:
        assert set(found) == set(right)
        for request in found:
            if request.phase is DECODING:
                del self.known[request]
                self.over(request)

    def check(self) -> None:
        decoding, known = self.decoding, self.known
        rows = decoding.requests
        assert decoding.count == len(known) == len(rows)
        assert [request.row for request in rows] == list(range(len(rows)))
        assert set(decoding.standing) == {r for r in known if (len(known[r]) - 1) % self.size == 0}
        assert set(decoding.reaching_page_end()) == {r for r in known if len(known[r]) % self.size == 0}
        for foreseen in (decoding.ending, decoding.waking):
            assert all(tick > decoding.tick and there for tick, there in foreseen.items())
            assert all(request in known for there in foreseen.values() for request in there)
        assert decoding.adapters == dict(Counter(r.adapter for r in known if r.adapter is not None))
        shown = decoding.shown()
        assert decoding.starts().dtype == np.int32
        assert decoding.starts().tolist() == [len(known[request]) - 1 for request in rows]
        assert decoding.tokens().tolist() == [known[request][-1] for request in rows]
        assert shown.slots.tolist() == [request.slot for request in rows]
        assert shown.cached.tolist() == [request.cached for request in rows]
        assert shown.ids == [request.id for request in rows]


@pytest.mark.attack
@pytest.mark.parametrize("size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("rows", [1, 3, 20, 150])
def test_rows_know_their_tokens(size: int, rows: int) -> None:
    """Rows join with any part of a page, cross pages, leave with all their tokens, come back, stop and are used up.

    Mutation: `_write_ring` cuts one token off; `full_pages` leaves out the turn of the ring; `drop` forgets to move a
    field of the last row; `starts` handed out with a plan change with the next step.
    """
    for seed in range(2):
        told = Rows(size, rows, seed)
        for _ in range(40 if rows > 20 else 120):
            told.come()
            told.check()
            told.go()
            told.check()
            told.step()
            told.check()
        assert told.made > rows


def test_what_an_executor_does_to_its_plan_stays_there() -> None:
    """Somebody writes into the starts of a plan, against what `Batch` asks: the next plan is right all the same.

    Mutation: `DecodeRows.starts` hands out the array it counts from.
    """
    told = Rows(4, 2, 0)
    request = told.request()
    request.max_tokens = 100
    told.join(request, unpacked(request.tokens))
    for _ in range(40):
        told.decoding.shown()
        starts = told.decoding.starts()
        starts += 1000
        told.known[request].append(1)
        told.decoding.issued()
        told.decoding.advance([request], told.decoding.generation, np.array([1], np.int32))
        told.check()
