"""A small engine loop on the facade, with the content double as its hands: what the tests' stories are told with.

Not a scheduler: it puts every request that can run into every step, in order of arrival, and does as it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sapwood.cache import CacheGroup, HybridPrefixCache, Lease, Namespace, Operation, Span, token_bytes
from sapwood.sim.content import ContentDouble, ContentRow

BASE = Namespace()


@dataclass
class Request:
    id: str
    namespace: Namespace
    tokens: list[int]  # prompt, then what was generated and is known
    prompt: int
    max_tokens: int
    reads: bool = True
    binding: object = None
    lease: Lease | None = None
    planned: int = 0  # positions computed or in a plan
    total: int = 0  # tokens known or about to be sampled
    real: int = 0  # positions really computed
    steps: list[int] = field(default_factory=list)  # steps in flight with one of its rows
    cached: int = 0  # tokens adopted at its (last) admission
    computed: int = 0
    host: bool = True
    ended: str = ""

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt :]


class Engine:
    """Drives a cache through requests' lives, checking contents and invariants all the way."""

    def __init__(
        self,
        page_size: int,
        *groups: CacheGroup,
        events: bool = False,
        hashes: bool = False,
        seed: int = 0,
        save: str = "",
        every: int = 1,
        **options: object,
    ) -> None:
        options.setdefault("save_pages", 1)
        self.cache = HybridPrefixCache(page_size, groups, events=events, hashes=hashes, **options)
        self.double = ContentDouble(page_size, groups, seed)
        self.double.attach(self.cache)
        self.page = page_size
        self.save = save
        self.every = every  # pages between rolling checkpoints
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.step = 0
        self.flights: dict[int, list[tuple[Request, int, int]]] = {}
        self.doomed: set[int] = set()
        self.operations: dict[int, str] = {}
        self.events: list[object] = []
        self.spans: list[Span] = []
        self.checks = True

    # ---- what a test says

    def submit(self, name: str, tokens, max_tokens: int = 1, ns: Namespace = BASE, reads: bool = True) -> Request:
        request = Request(name, ns, list(tokens), len(tokens), max_tokens, reads)
        request.binding = self.cache.bind(ns)
        request.total = len(tokens)
        self.requests[name] = request
        self.double.request(name, ns, tokens)
        self.waiting.append(request)
        return request

    def run(
        self, name: str, tokens, max_tokens: int = 1, ns: Namespace = BASE, reads: bool = True, chunk: int = 1 << 20
    ) -> Request:
        """Submit one request and see it through to its end, transfers and all."""
        request = self.submit(name, tokens, max_tokens, ns, reads)
        for _ in range(10_000):
            if request.ended:
                return request
            if not self.plan(chunk):
                assert self.operations, f"{name} cannot run and nothing is under way"
            self.settle()
        raise AssertionError(f"{name} does not end")

    def settle(self) -> None:
        """Finish every step and transfer in flight."""
        while self.flights or self.operations:
            if self.flights:
                self.done()
            for op in list(self.operations):
                self.land(op)

    def idle(self) -> None:
        """Go on until nothing is left to do."""
        for _ in range(100_000):
            if not self.waiting and not self.running and not self.flights and not self.operations:
                return
            if not self.plan():
                assert self.flights or self.operations, f"stuck: {[r.id for r in self.waiting + self.running]}"
            self.settle()
        raise AssertionError("does not come to rest")

    def check(self) -> None:
        if self.checks:
            self.cache.check()
        self.events += self.cache.drain_events()

    def pages(self, group: str, tier: str = "device") -> dict[str, int]:
        return self.cache.stats()["pages"][group][tier]

    # ---- plans

    def admit(self, request: Request, chunk: int) -> bool:
        tokens = token_bytes(request.tokens)
        if request.reads:
            match = self.cache.match_prefix(request.binding, tokens, host=request.host)
            if match.pending:
                return False
        else:
            match = self.cache.match_nothing(request.binding, tokens)
        upto = min(
            match.length, match.start + chunk, *(c * self.page for c in match.cuts if c * self.page > match.start)
        )
        admitted = self.cache.admit(match, upto)
        while admitted is None and upto > match.start + 1:
            upto = match.start + max(1, (upto - match.start) // 2)
            admitted = self.cache.admit(match, upto)
        if admitted is None:
            return False
        lease, operation = admitted
        request.lease = lease
        request.cached = request.planned = request.real = lease.start
        if operation is not None:
            self.begin("load", operation)
        return True

    def plan(self, chunk: int = 1 << 20) -> int:
        """One step with every row that can run. Returns its number, or 0 if there is nothing to run."""
        for request in list(self.waiting):
            if self.admit(request, chunk):
                self.waiting.remove(request)
                self.running.append(request)
        step = self.step + 1
        rows, copies, parts = [], [], []
        for request in list(self.running):
            made = self._row(request, chunk, step, copies)
            if made is not None:
                rows.append(made)
                parts.append((request, made.start, made.length))
        if not rows:
            self.check()
            return 0
        self.step = step
        self.flights[step] = parts
        self.double.issue(step, rows, copies)
        for request, _, _ in parts:
            request.steps.append(step)
        self.check()
        return step

    def _row(self, request: Request, chunk: int, step: int, copies: list) -> ContentRow | None:
        cache, lease = self.cache, request.lease
        if lease.loading or request.planned >= request.total:
            return None
        known = token_bytes(request.tokens)
        if request.reads and not request.steps and request.planned < request.prompt:
            at = cache.adopt(lease, known, request.planned)
            if at > request.planned and not request.computed:
                request.cached = at
            request.planned = request.real = at
        start = request.planned
        end = min(request.total, start + chunk)
        end = min([end, *(c * self.page for c in lease.cuts if c * self.page > start)])
        end = cache.growable(lease, end)
        if end <= start or not cache.grow(lease, end):
            return None
        copies += cache.opening(lease, step)
        write_from = cache.write_from(lease, start)
        cache.publish(lease, known, min(end, len(request.tokens)) // self.page, step)
        page, rest = divmod(end, self.page)
        if not rest and self.double.slots:
            if page in lease.cuts:
                copies += cache.checkpoint(lease, page, step)
            elif end > request.prompt and page % self.every == 0:
                copies += cache.roll_checkpoint(lease, page, step)
        request.planned = end
        samples = end == request.total
        request.total += samples
        tables = {group.name: cache.table(lease, group.name) for group in cache.groups}
        return ContentRow(request.id, start, end - start, tables, write_from, samples)

    # ---- events

    def done(self) -> None:
        """The oldest step in flight is done."""
        step = min(self.flights)
        parts = self.flights.pop(step)
        sampled = self.double.done(step)
        doomed = [request for request, _, _ in parts if step not in request.steps]
        ended = []
        for request, start, length in parts:
            if request in doomed or request.ended:
                continue
            request.steps.remove(step)
            request.real = start + length
            request.computed += length
            if request.id in sampled:
                request.tokens.append(sampled[request.id])
            self._publish(request, step)
            if len(request.generated) >= request.max_tokens:
                ended.append(request)
        commit = self.cache.step_commit(step, max(self.flights, default=None))
        for replaced in commit.replaced:
            assert self.cache.table(replaced.lease, replaced.group)[replaced.column] == replaced.page
        self.spans = []
        for span in commit.real:
            self.save_span(span)
        for request in ended:
            self.finish(request, "length")
        for request, _, _ in parts:
            if not request.ended and request.lease is not None:
                self.cache.slide(request.lease, request.real)
        self.check()

    def _publish(self, request: Request, step: int) -> None:
        """Generated pages that are full and computed go to the tree."""
        lease = request.lease
        known = token_bytes(request.tokens)
        while lease.depth < request.real // self.page:
            before = lease.depth
            page = known[4 * self.page * before : 4 * self.page * (before + 1)]
            self.cache.publish_rows([lease], [page], step)
            if lease.depth == before:
                return

    def fail(self) -> None:
        """The oldest step in flight fails, and with it all later ones."""
        step = min(self.flights)
        newest = max(self.flights)
        touched = {}
        if step not in self.doomed:
            touched = {
                r.id: r for s, parts in self.flights.items() for r, _, _ in parts if s in r.steps and not r.ended
            }
        self.double.fail(step)
        del self.flights[step]
        fallen = self.cache.step_failed(step, newest)
        for request in self.running:
            if request.lease in fallen:
                touched[request.id] = request
        if step in self.doomed:
            self.check()
            return
        self.doomed |= set(range(step, newest + 1))
        for request in touched.values():
            request.steps = []
            request.total = len(request.tokens)
            if request.lease.loading:
                self.retract(request)
                continue
            request.planned = request.real = self.cache.rewind(request.lease, request.real)
        self.check()

    def finish(self, request: Request, reason: str) -> None:
        lease = request.lease
        if lease is not None:
            span = self.cache.finish_request(lease, b"", request.real, max(request.steps, default=None))
            self.save_span(span)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.lease, request.ended = None, reason
        self.cache.unbind(request.binding)

    def abort(self, name: str) -> None:
        self.finish(self.requests[name], "abort")
        self.check()

    def retract(self, request: Request) -> None:
        self.save_span(self.cache.retract(request.lease, b"", request.real, max(request.steps, default=None)))
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.lease, request.steps = None, []
        request.total = len(request.tokens)
        self.check()

    # ---- transfers

    def save_span(self, span: Span | None) -> None:
        """Write through to host, or keep the span for a test that saves by hand."""
        if span is None:
            return
        if self.save == "through":
            self.begin("save", self.cache.begin_save(span))
        else:
            self.spans.append(span)

    def begin(self, kind: str, operation: Operation | None) -> int | None:
        if operation is None:
            return None
        self.operations[operation.op] = kind
        self.double.start(kind, operation)
        return operation.op

    def land(self, op: int, ok: bool = True) -> None:
        """A transfer is over."""
        kind = self.operations.pop(op)
        self.double.land(op, ok)
        if kind == "save":
            self.cache.save_done(op, ok)
        else:
            landed = self.cache.load_done(op, ok)
            for request in list(self.running):
                if request.lease in landed.failed:
                    request.host = False
                    self.retract(request)
        self.check()


def toks(seed: int, n: int) -> list[int]:
    """n tokens that no other seed shares."""
    return np.random.default_rng(seed).integers(1000 * (seed + 1), 1000 * (seed + 1) + 900, n).tolist()


def full(pages: int = 64, host: int = 0, name: str = "full") -> CacheGroup:
    return CacheGroup(name, "full", pages, host)


def window(size: int, pages: int = 64, host: int = 0, name: str = "window") -> CacheGroup:
    return CacheGroup(name, "window", pages, host, size)


def state(slots: int = 16, host: int = 0, name: str = "state") -> CacheGroup:
    return CacheGroup(name, "state", slots, host)
