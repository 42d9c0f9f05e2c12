"""What must be true of a scheduler under attack, by simple means: how each request may end, and what it may find.

`NaiveMemory` has no tree, but a set of all prefixes that were computed in each namespace since it was last evicted, or
with a store ever, by any scheduler on it. A request must not begin behind anything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sapwood.cache import Namespace
from sapwood.scheduler import Ended, RequestSpec

from .content import ContentDouble, Digests, prefix_digests
from .executor import Life


@dataclass
class FuzzedRequest:
    """A live request as the fuzzer knows it."""

    spec: RequestSpec
    life: Life
    epoch: int  # of its namespace when it came
    poisonous: bool
    asked: list[str] = field(default_factory=list)  # "abort", "finish": events for it that were sent
    held: int = 0  # how much of it was real in the cache when one of its rows began there
    failed: int = 0  # steps with a row of it that failed
    alone: bool = False  # the last of them had no other row
    final: tuple[int, int] | None = None  # tokens and work it had when it was ended, if a step was done just after

    @property
    def verdict(self) -> str:
        """Why it is over by what it has generated; "" if it is not."""
        spec, generated = self.spec, self.life.generated
        if generated and len(generated) >= spec.min_tokens and generated[-1] in spec.eos:
            return "stop"
        return "length" if len(generated) >= spec.max_tokens else ""

    def check_end(self, end: Ended, max_tries: int, vocabulary: int) -> None:
        """A request ends once, for a reason that is true, and its counts add up."""
        spec, life = self.spec, self.life
        generated, work = self.final or (len(life.generated), life.work)
        assert end.prompt == life.prompt and end.generated == generated, f"{end}: {generated} were generated"
        assert min(end.cached, end.computed, end.recomputed) >= 0, f"{end}"
        if end.generated:
            assert end.cached + end.computed == end.prompt, f"{end}: does not add up"
        decoded = max(0, end.generated - 1)
        assert end.computed + end.recomputed + decoded == work, f"{end}: it has computed {work} positions"
        assert not (life.steady and end.recomputed), f"{end}: computed again, and nothing had failed"
        assert spec.reads_cache or not end.cached, f"{end}: reads nothing from the cache"
        if end.reason in ("stop", "length"):
            assert end.reason == self.verdict, f"{end}: {self.verdict or 'not yet'}"
        elif end.reason in ("abort", "finish"):
            assert end.reason in self.asked, f"{end}: no event asked for that"
        else:
            assert end.reason == "failed" and self.failed >= max_tries, f"{end}: {self.failed}"
            assert self.alone, f"{end}: others were in the step that failed"
        self._check_output(vocabulary)

    def _check_output(self, vocabulary: int) -> None:
        """What it generated follows from its tokens alone: not from sharing, retraction or failures."""
        life, spec = self.life, self.spec
        drawn = (prefix_digests(life.namespace, life.known) % np.uint64(vocabulary)).tolist()
        assert life.generated == drawn[life.prompt - 1 : -1], f"{spec.id}: generated something else"
        early = [at for at, token in enumerate(life.generated, 1) if token in spec.eos and at >= spec.min_tokens]
        assert not early or early[0] == len(life.generated), f"{spec.id}: went on after its end"


class FuzzedRow(NamedTuple):
    request: FuzzedRequest
    start: int
    length: int


@dataclass
class FuzzedStep:
    rows: list[FuzzedRow]
    doomed: bool = False


class NaiveMemory:
    """Digests of prefixes, by namespace. `stored`: what a store may have, which several of these share."""

    def __init__(self, double: ContentDouble, has_store: bool, stored: dict[Namespace, set[int]] | None) -> None:
        self.double = double
        self.has_store = has_store
        self.stored: dict[Namespace, set[int]] = {} if stored is None else stored
        self.computed: dict[Namespace, set[int]] = {}  # since the namespace was last evicted
        self.epochs: dict[Namespace, int] = {}  # how often each namespace was evicted
        self.in_flight: list[FuzzedStep] = []  # plans with rows that are out, oldest first

    def digests(self, request: FuzzedRequest) -> Digests:
        return self.double.requests[request.life.name].digests

    # ---- namespaces

    def epoch(self, namespace: Namespace) -> int:
        return self.epochs.get(namespace, 0)

    def is_current(self, request: FuzzedRequest) -> bool:
        """Whether the namespace of a request has not been evicted since it came."""
        return request.epoch == self.epoch(request.spec.namespace)

    def evict(self, namespaces: Iterable[Namespace]) -> None:
        for namespace in namespaces:
            self.epochs[namespace] = self.epoch(namespace) + 1
            self.computed.pop(namespace, None)

    # ---- steps

    def promises(self, row: FuzzedRow) -> list[int]:
        """What a row in flight computes may be read by rows of its own and of later plans, and by all once it is done.
        Of tokens that are not known yet nothing can be read."""
        return self.shows(row) if self.is_current(row.request) else []

    def shows(self, row: FuzzedRow) -> list[int]:
        """What a row computes for all requests that share its root."""
        if not row.request.spec.writes_cache:
            return []
        digests: list[int] = self.digests(row.request)[row.start : row.start + row.length].tolist()
        return digests

    def step_done(self, done: FuzzedStep) -> None:
        """The oldest step in flight has run."""
        for row in done.rows:
            namespace, digests = row.request.spec.namespace, self.promises(row)
            self.computed.setdefault(namespace, set()).update(digests)
            if self.has_store:
                self.stored.setdefault(namespace, set()).update(digests)
        self._keep(done)

    def _keep(self, done: FuzzedStep) -> None:
        """Rows of later plans began on what this one promised. It is real now, and theirs: should their own step fail
        they go on from there, even if their namespace is evicted meanwhile."""
        for row in [row for later in self.in_flight if later is not done for row in later.rows]:
            request = row.request
            root = (request.spec.namespace, request.epoch)
            same = [one for one in done.rows if (one.request.spec.namespace, one.request.epoch) == root]
            real = {value for one in same for value in self.shows(one)}
            begun = enumerate(self.digests(request)[: row.start].tolist(), 1)
            request.held = max([request.held, *(at for at, value in begun if value in real)])

    def row_begins(self, request: FuzzedRequest, start: int) -> None:
        """A row that begins beyond what its request has computed found the rest in the cache; a request of its
        namespace must have computed it, since the namespace was last evicted."""
        life, space = request.life, request.spec.namespace
        if start <= max(life.end if life.flying else life.real, request.held):
            return
        assert request.spec.reads_cache, f"{request.spec.id}: starts at {start}, and reads nothing from the cache"
        assert self.is_current(request), f"{request.spec.id}: adopts in a namespace that was evicted"
        digests = self.digests(request)[:start]
        most = self.remembered(space, digests)
        assert most == start, f"{request.spec.id}: starts at {start}, {most} tokens were computed"
        real = self.computed.get(space, set()) | self.stored.get(space, set())
        request.held = max([at for at, value in enumerate(digests.tolist(), 1) if value in real], default=0)

    def remembered(self, space: Namespace, digests: Digests) -> int:
        """How many tokens from the start have been computed, or will have been by the plans in flight."""
        computed, stored = self.computed.get(space, ()), self.stored.get(space, ())
        rows = [row for step in self.in_flight if not step.doomed for row in step.rows]
        promised = {value for row in rows if row.request.spec.namespace == space for value in self.promises(row)}
        known = [
            at
            for at, value in enumerate(digests.tolist(), 1)
            if value in computed or value in promised or value in stored
        ]
        return known[-1] if known else 0
