"""200 chats of 5 turns on the cache alone, as a scheduler drives it; and the same on the peer's whole scheduler.

All chats submit turn 1 at once, each next turn right after the one before has ended. A prompt is a shared system
prompt, then the whole conversation, then 200 new tokens; 64 tokens are generated. Timed is what lies between two looks
at the clock: cache calls and the bare loops around them. What a scheduler does besides (choosing rows, gathering
tokens) is prepared outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sapwood.cache import CacheGroup, HybridPrefixCache, Lease, Match, Namespace

from . import peer
from .timing import clock

PAGE = 16
PAGE_BYTES = 4 * PAGE
BATCH = 64
CHUNK = 8192
SYSTEM, USER, OUTPUT = 2048, 200, 64
SESSIONS, TURNS = 200, 5
REQUESTS = SESSIONS * TURNS
ROOMY = 22_739  # pages: more than all chats together need (17,492)
TIGHT = 10_635  # less than that: chats push each other out
ROLL = 4  # pages between the checkpoints a decoding request keeps of its state


class Ran(NamedTuple):
    """What one run took and found."""

    seconds: float  # inside the calls, a request
    hit_rate: float
    steps: int
    making: float = 0.0  # seconds a request to make the objects that the calls want


def conversations(seed: int = 7) -> list[bytes]:
    """Every chat from its first token to its last, as bytes of int32."""
    rng = np.random.default_rng(seed)
    system = rng.integers(1, 150_000, SYSTEM, np.int32)
    turns = rng.integers(1, 150_000, (SESSIONS, TURNS * (USER + OUTPUT)), np.int32)
    return [np.concatenate([system, row]).tobytes() for row in turns]


def prompt_length(turn: int) -> int:
    return SYSTEM + (turn + 1) * USER + turn * OUTPUT


def full_group() -> list[CacheGroup]:
    return [CacheGroup("full", "full", ROOMY)]


def hybrid_groups() -> list[CacheGroup]:
    return [
        CacheGroup("full", "full", ROOMY, 2 * ROOMY),
        CacheGroup("window", "window", ROOMY, 2 * ROOMY, 1024),
        CacheGroup("state", "state", 1024, 4096),
    ]


class Turn:
    """One request: one turn of one chat."""

    __slots__ = ("binding", "chat", "last", "lease", "length", "number", "position", "tokens")

    def __init__(self, chat: bytes, number: int, binding: object) -> None:
        self.chat = chat
        self.number = number
        self.length = prompt_length(number)
        self.tokens = chat[: 4 * self.length]
        self.last = self.length + OUTPUT - 1  # the last generated token is never computed
        self.position = 0  # tokens computed, or planned in the step that is being made
        self.binding = binding
        self.lease: Lease


class Driver:
    """The part of a scheduler that talks to the cache: one step is planned, then done."""

    def __init__(self, chats: Sequence[bytes], groups: Sequence[CacheGroup], events: bool) -> None:
        self.cache = HybridPrefixCache(PAGE, groups, events=events)
        self.events = events
        self.saves = any(group.host_pages for group in groups)
        self.slots = any(group.family == "state" for group in groups)
        self.namespace = Namespace()
        self.step = 0
        self.spent = 0.0
        self.prefilling: list[Turn] = []
        self.decoding: list[Turn] = []
        self.loading: dict[Lease, Turn] = {}
        self.operations: list[tuple[bool, int]] = []  # (is a save, number): acknowledged a step later
        self.waiting: list[Turn] = []
        for chat in chats:
            begin = clock()
            binding = self.cache.bind(self.namespace)
            self.spent += clock() - begin
            self.waiting.append(Turn(chat, 0, binding))

    def run(self) -> Ran:
        while self.waiting or self.prefilling or self.decoding or self.loading:
            self.step += 1
            rows = self.plan()
            self.done(rows)
        stats = self.cache.stats()
        assert stats["requests"] == REQUESTS and not stats["leases"]
        return Ran(self.spent / REQUESTS, stats["cached_tokens"] / stats["prompt_tokens"], self.step)

    def plan(self) -> list[Turn]:
        """Pages for rows that cross a page, the next chunk of those that prefill, and requests that can be admitted."""
        cache, step = self.cache, self.step
        growing = [turn.lease for turn in self.decoding if not turn.position % PAGE]
        rolling = []
        if self.slots:
            pages = [(turn.lease, *divmod(turn.position + 1, PAGE)) for turn in self.decoding]
            rolling = [(lease, page) for lease, page, rest in pages if not rest and not page % ROLL]
        budget = CHUNK - len(self.decoding)
        rows: list[Turn] = []
        begin = clock()
        if growing:
            assert cache.grow_rows(growing) is not None
        for lease, page in rolling:
            cache.roll_checkpoint(lease, page, step)
        for turn in self.prefilling:
            if budget > 0:
                turn.position = cache.adopt(turn.lease, turn.tokens, turn.position)
                budget -= self.chunk(turn, budget, step)
                rows.append(turn)
        free = BATCH - len(self.decoding) - len(self.prefilling) - len(self.loading)
        left: list[Turn] = []
        for at, turn in enumerate(self.waiting):
            if budget <= 0 or not free:
                left += self.waiting[at:]
                break
            match = cache.match_prefix(turn.binding, turn.tokens)
            if match.pending or not self.admit(turn, match, budget):
                left.append(turn)
                continue
            free -= 1
            if turn.lease in self.loading:
                continue
            budget -= self.chunk(turn, budget, step)
            self.prefilling.append(turn)
            rows.append(turn)
        self.waiting = left
        self.spent += clock() - begin
        return rows

    def admit(self, turn: Turn, match: Match, budget: int) -> bool:
        admitted = self.cache.admit(match, min(match.length, match.start + budget))
        if admitted is None:
            return False
        turn.lease, operation = admitted
        turn.position = turn.lease.start
        if operation is not None:
            self.operations.append((False, operation.op))
        if turn.lease.loading:
            self.loading[turn.lease] = turn
        return True

    def chunk(self, turn: Turn, budget: int, step: int) -> int:
        """Plan the next chunk of a prompt. Returns how many tokens it computes."""
        cache, lease, start = self.cache, turn.lease, turn.position
        end = min(turn.length, start + budget)
        for cut in lease.cuts:
            if start < cut * PAGE < end:
                end = cut * PAGE
        if cache.reach(lease) < end:
            assert cache.grow(lease, end)
        if not lease.opened:
            cache.opening(lease, step)
        cache.write_from(lease, start)
        cache.publish(lease, turn.tokens, end // PAGE, step)
        if end // PAGE in lease.cuts and not end % PAGE:
            cache.checkpoint(lease, end // PAGE, step)
        turn.position = end
        return end - start

    def done(self, rows: list[Turn]) -> None:
        """The step is done: what it computed is real, and its tokens are known."""
        cache, step = self.cache, self.step
        crossed, pages = [], []
        for turn in self.decoding:
            turn.position += 1
            if not turn.position % PAGE:
                crossed.append(turn)
                pages.append(turn.chat[4 * turn.position - PAGE_BYTES : 4 * turn.position])
        leases = [turn.lease for turn in crossed]
        over = [turn for turn in self.decoding if turn.position == turn.last]
        ending = set(map(id, over))
        sliding = [turn for turn in crossed + rows if id(turn) not in ending]
        positions = [turn.position for turn in sliding]
        slid = [turn.lease for turn in sliding]
        earlier, self.operations = self.operations, []
        bindings = []
        landed: list[Lease] = []
        begin = clock()
        if leases:
            cache.publish_rows(leases, pages, step)
        spans = list(cache.step_commit(step).real)
        for turn in over:
            span = cache.finish_request(turn.lease, b"", turn.last, None)
            if span is not None:
                spans.append(span)
            cache.unbind(turn.binding)
            if turn.number + 1 < TURNS:
                bindings.append(cache.bind(self.namespace))
        if self.saves:
            for span in spans:
                operation = cache.begin_save(span)
                if operation is not None:
                    self.operations.append((True, operation.op))
            for save, number in earlier:
                if save:
                    cache.save_done(number, True)
                else:
                    landed += cache.load_done(number, True).ready
        if slid:
            cache.slide_rows(slid, positions)
        if self.events:
            cache.drain_events()
        self.spent += clock() - begin
        for lease in landed:
            turn = self.loading.pop(lease)
            turn.position = lease.start
            self.prefilling.append(turn)
        self.decoding = [turn for turn in self.decoding if id(turn) not in ending]
        self.decoding += [turn for turn in rows if turn.position == turn.length]
        self.prefilling = [turn for turn in self.prefilling if turn.position < turn.length]
        again = [turn for turn in over if turn.number + 1 < TURNS]
        self.waiting += [Turn(t.chat, t.number + 1, b) for t, b in zip(again, bindings, strict=True)]


def run_peer(chats: Sequence[bytes], pages: int = ROOMY) -> Ran:
    """The same chats on the peer: CPU time inside submit, plan, reading the plan, and advance. What it
    takes to make its events, an object a row, is a figure of its own."""
    scheduler = peer.scheduler(PAGE, pages, BATCH, CHUNK)
    tokens = [np.frombuffer(chat, np.int32).tolist() for chat in chats]
    lengths: dict[str, int] = {}
    generated: dict[str, int] = {}
    seen: set[str] = set()
    prompts = cached = steps = 0
    spent = making = 0.0
    coming = [(chat, 0) for chat in range(len(chats))]
    while coming or generated:
        specs = []
        for chat, turn in coming:
            name = f"{chat}.{turn}"
            lengths[name] = prompt_length(turn)
            generated[name] = 0
            prompts += lengths[name]
            specs.append(peer.request(name, tokens[chat][: lengths[name]]))
        coming = []
        begin = clock()
        if specs:
            scheduler.submit_requests(specs)
        ids, sizes, prefixes, extends = peer.read(scheduler.next_execution_plan())
        spent += clock() - begin
        steps += 1
        results, ended = [], []
        for at, name in enumerate(ids):
            if at < extends:
                if name not in seen:
                    seen.add(name)
                    cached += prefixes[at]
                if prefixes[at] + sizes[at] < lengths[name]:
                    continue
            chat, turn = map(int, name.split("."))
            results.append((name, tokens[chat][lengths[name] + generated[name]]))
            generated[name] += 1
            if generated[name] == OUTPUT:
                ended.append(name)
                del generated[name]
                if turn + 1 < TURNS:
                    coming.append((chat, turn + 1))
        begin = clock()
        event = peer.sampled(results, ended)
        made = clock()
        scheduler.advance(event)
        spent += clock() - made
        making += made - begin
    return Ran(spent / REQUESTS, cached / prompts, steps, making / REQUESTS)
