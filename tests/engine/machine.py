"""One engine with real bytes: scheduler, witness, arenas, mover, store and loop, for stories told request by request.

The witness's digests lie in the device arena; a mover and a store carry them about; every read and every arrival is
checked. So a wrong byte fails a test by itself, whatever the test is about.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.engine import DeviceArena, EngineLoop, HostArena, Mover, NumpyMover, Step, Tiers
from sapwood.engine.transfer.arena import aligned
from sapwood.scheduler import Abort, Ended, Event, Plan, RequestSpec, Scheduler, SchedulerConfig
from sapwood.sim.depot import Depot
from sapwood.sim.executor import Life
from sapwood.sim.witness import Witness, least_page_bytes
from sapwood.store import Breaker, FaultyBackend, Fingerprint, GroupLayout, Missing, Store, open_store
from sapwood.store.keys import key_prefix

from ..scheduler.driver import BASE, answer, groups_of, toks
from .memory import need

__all__ = ["BASE", "PAGE", "PROMPT", "Machine", "answer", "each_hand", "each_layout", "toks"]

PAGE = 4
PROMPT = toks(1, 6 * PAGE + 1)  # six pages and a token
PATIENCE = 240.0  # seconds after which something hangs: in a test that passes, no machine is as slow as that
LAYOUTS = ("full", "full+window", "full+state", "full+2windows+state")
HYBRID = LAYOUTS[-1]
EXTRA = {"full": 4096 - 8 * PAGE - 8, "wide": 293, "narrow": 0, "state": 77}  # bytes of a page beyond its digests
WEIGHTS = b"weights of the machine".ljust(32, b".")
OPEN: list[Machine] = []  # of this test: conftest.py closes those that it leaves open
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_hand = pytest.mark.parametrize("hands", ["numpy", "late", "torch"])


class Watched(Tiers):
    """Tiers whose every event is looked at before it counts."""

    witness: Witness
    ahead = False  # the executor is in two halves, and sees plans with rows only

    def begin(self, plan: Plan) -> None:
        super().begin(plan)
        if self.ahead and not plan.batch.ids:
            self.witness.begin(plan)

    def poll(self) -> list[Event]:
        events = super().poll()
        for event in events:
            self.witness.arrived(event)
        return events


class Sticky(FaultyBackend):
    """A faulty backend in which whole kinds of calls hang until `release`, and then do their work."""

    stuck: tuple[str, ...] = ()

    def _begin(self, call: str, names: Sequence[str]) -> None:
        free = self._free
        if call in self.stuck:
            free.wait(600)
        super()._begin(call, names)


class Late(NumpyMover):
    """Moves bytes when it is asked what is over, as often as `chance` says, in any order; none while it is `stuck`."""

    stuck = False
    chance = 1.0

    def __init__(self, device: DeviceArena, host: HostArena) -> None:
        super().__init__(device, host)
        self.random = random.Random(0)
        self.waiting: dict[int, tuple[Any, list[Any]]] = {}

    def _begin(self, kind: Any, op: int, parts: list[Any]) -> None:
        self.waiting[op] = (kind, parts)

    def _advance(self) -> None:
        for op in self.random.sample(list(self.waiting), len(self.waiting)):
            if not self.stuck and self.random.random() < self.chance:
                kind, parts = self.waiting.pop(op)
                super()._begin(kind, op, parts)

    def _block(self, op: int) -> None:
        kind, parts = self.waiting.pop(op)
        super()._begin(kind, op, parts)


class Failing:
    """An executor that fails the next `failures` plans with rows."""

    def __init__(self, witness: Witness) -> None:
        self.witness = witness
        self.failures = 0

    def execute(self, plan: Plan) -> Sequence[Event]:
        if not self.failures or not plan.batch.ids:
            return self.witness.execute(plan)
        self.failures -= 1
        self.witness.begin(plan)
        return self.witness.fail("as the test wants it")


class Piped(Failing):
    """The same in two halves, for a loop that plans ahead."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(witness)
        self.begin = witness.begin

    def finish(self, block: bool = True) -> Sequence[Event]:
        if not self.failures:
            return self.witness.done()
        self.failures -= 1
        return self.witness.fail("as the test wants it")


class Machine:
    """Pages of 4 tokens; a lookup is worth it from 2 pages on. `fingerprint`: what another model has of its own.
    `process`: the store is in a process of its own, and its faults come by its URI. Who waits for a store waits for as
    long as it takes, if not told otherwise."""

    def __init__(
        self,
        layout: str = "full",
        uri: str = "",
        *,
        pages: int = 40,
        host: int = 40,
        hands: str = "late",
        page: int = PAGE,
        weights: bytes = WEIGHTS,
        depot: Depot | None = None,
        tick_seconds: float = 0.01,
        backup_seconds: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        fingerprint: dict[str, Any] | None = None,
        breaker: Breaker | None = None,
        mover: type[NumpyMover] = Late,
        queue_pages: int = 8192,
        process: bool = False,
        groups: Sequence[CacheGroup] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> None:
        made = groups_of(layout, page, pages, slots=20) if groups is None else groups
        made = [replace(group, host_pages=group.host_pages or host) for group in made]
        self.groups = [replace(group, page_bytes=self._bytes(page, group)) for group in made]
        patient = {"lookup_ticks": round(PATIENCE / tick_seconds), "fetch_ticks": round(PATIENCE / tick_seconds)}
        config = {"max_batch_tokens": 256, "max_batch_size": 16, "prefetch_threshold": 2, **patient, **config}
        config = {"store": bool(uri), **config}
        self.scheduler = Scheduler(SchedulerConfig(page, self.groups, **config))
        self.cache = self.scheduler.cache
        self.device = {g.name: aligned((g.device_pages + 1, g.page_bytes)) for g in self.groups}
        self.arena = HostArena(self.groups)
        memory = {(name, "device"): rows for name, rows in self.device.items()}
        memory |= {(name, "host"): rows for name, rows in self.arena.pages.items()}
        self.witness = Witness(self.scheduler, memory, seed, depot=depot)
        self.mover = self._mover(hands, mover)
        self.backend: Sticky  # unless the store is in a process of its own
        self.store: Store | None = None
        if uri:
            layouts = tuple(GroupLayout(g.name, g.family, g.page_bytes, g.window) for g in self.groups)
            fields = {"weights": weights, "dtype": "bfloat16", "page_size": page, "groups": layouts}
            self.fingerprint = Fingerprint(**{**fields, "rank": 0, "ranks": 1, **(fingerprint or {})})
            self.store = open_store(
                uri,
                self.fingerprint,
                breaker=breaker or Breaker(failures=1000),
                missing=Missing(seconds=0),
                queue_pages=queue_pages,
                wrap=None if process else self._wrap,
                process=process,
            )
        times: dict[str, Any] = {"tick_seconds": tick_seconds, "backup_seconds": backup_seconds, "clock": clock}
        self.tiers = Watched(self.scheduler, self.mover, self.store, **times)
        self.tiers.witness = self.witness
        self.tiers.ahead = self.scheduler.config.overlap > 0
        self.executor = (Piped if self.tiers.ahead else Failing)(self.witness)
        self.loop = EngineLoop(self.scheduler, self.executor, self.tiers)
        OPEN.append(self)
        self.lives: dict[str, Life] = {}
        self.specs: dict[str, RequestSpec] = {}
        self.ended: dict[str, Ended] = {}
        self.said: dict[str, list[int]] = {}  # as steps told it
        self.look: Callable[[], None] = lambda: None  # after every step

    @staticmethod
    def _bytes(page: int, group: CacheGroup) -> int:
        return least_page_bytes(page, group) + EXTRA.get(group.name, 5)

    def _mover(self, hands: str, kind: type[NumpyMover]) -> Mover:
        if hands != "torch":
            return (NumpyMover if hands == "numpy" else kind)(DeviceArena(self.device), self.arena)
        need("torch")
        import torch

        from sapwood.engine.transfer.torch_mover import TorchArena, TorchMover

        tensors = {name: torch.from_numpy(rows) for name, rows in self.device.items()}
        return TorchMover(TorchArena(tensors), self.arena)

    def _wrap(self, inner: Any) -> Sticky:
        self.backend = Sticky(inner, 7)
        return self.backend

    # ---- what a test says

    def submit(self, id: str, tokens: Any, max_tokens: int = 3, **more: Any) -> None:
        self.submit_all([RequestSpec(id, tokens, max_tokens, **more)])

    def submit_all(self, specs: Sequence[RequestSpec]) -> None:
        for spec in specs:
            self.lives[spec.id], self.specs[spec.id] = self.witness.submit(spec), spec
            self.said[spec.id] = []
            self.ended.pop(spec.id, None)
        self.loop.submit(specs)

    def abort(self, id: str) -> Ended:
        (end,) = self.loop.tell([Abort(id)])
        self._close([end])
        return end

    def step(self) -> Step:
        step = self.loop.step()
        for id, token in step.tokens().items():
            self.said[id].append(token)
        self._close(step.ended)
        self.cache.check()
        self.look()
        return step

    def until(self, true: Callable[[], Any], timeout: float = PATIENCE, what: str = "it") -> None:
        """Go on until something is true."""
        end = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < end, f"waited {timeout} s for {what}: {self.scheduler.stats()}"
            self.step()
            self.loop.rest(0.2)

    def see_to(self, *ids: str, timeout: float = PATIENCE) -> None:
        self.until(lambda: all(id in self.ended for id in ids), timeout, f"the end of {ids}")

    def settle(self, timeout: float = PATIENCE) -> None:
        """Until nothing is under way and nothing is left to do."""
        end = time.monotonic() + timeout
        while not (step := self.step()).plan.empty or step.in_flight or self.tiers.busy:
            assert time.monotonic() < end, f"it does not come to rest: {self.tiers.stats()}"
            self.loop.rest(0.2)

    def until_it_is(self, id: str, state: str) -> None:
        """Go on until a request is looking, fetching, loading or decoding. It stays so until `go_on`."""
        self.backend.stuck = {"looking": ("exists",), "fetching": ("get",)}.get(state, ())
        if isinstance(self.mover, Late):
            self.mover.stuck = state == "loading"
        begun = {"looking": "lookups", "fetching": "fetches", "loading": "loads"}
        if state == "decoding":
            self.until(lambda: self.said[id])
        else:
            self.until(lambda: self.tiers.stats()[begun[state]] == 1)

    def until_a_fetch_is_held(self, tokens: Any) -> str:
        """A request whose fetch hangs in the backend beyond its time. On a busy machine that may not be the first one:
        nobody had begun it, or had an answer to the question before it."""
        self.backend.stuck = ("get",)
        for n in range(1000):
            self.submit(f"late {n}", tokens)
            self.until(lambda id=f"late {n}": self.tiers.stats()["held"] or id in self.ended)
            if self.tiers.stats()["held"]:
                return f"late {n}"
            self.scheduler.flush()
        raise AssertionError(f"no fetch is held: {self.tiers.stats()}")

    def go_on(self) -> None:
        """Nothing hangs any more."""
        self.backend.stuck = ()
        self.backend.release()
        if isinstance(self.mover, Late):
            self.mover.stuck = False

    def serve(self, id: str, tokens: Any, max_tokens: int = 3, **more: Any) -> Ended:
        """One request to its end, and all it has left to do."""
        self.submit(id, tokens, max_tokens, **more)
        self.see_to(id)
        self.settle()
        return self.ended[id]

    def crowd(self, times: int = 6, first: int = 50, pages: int = 0, **more: Any) -> None:
        """Others come, each with so many pages: if not told otherwise, with almost all there are."""
        pages = pages or min(group.device_pages for group in self.groups if group.family == "full") - 2
        for n in range(first, first + times):
            self.serve(f"crowd {n}", toks(n, pages * PAGE), 1, **{"reads_cache": False, **more})

    def close(self) -> None:
        """Everything is over: the answers were right, and after a flush all memory of both tiers is free."""
        self.see_to(*self.loop.live)
        self.right_answers()
        self.settle()
        self.scheduler.flush()
        self.settle()
        self.cache.check()
        self.all_free()
        OPEN.remove(self)
        assert self.loop.close(PATIENCE) == []
        assert not self.tiers.busy

    # ---- what a test asks

    def right_answers(self) -> None:
        """Everybody has yielded what the model says, to the last token, and the loop has told every one of them."""
        for id, end in self.ended.items():
            life = self.lives[id]
            want = answer(self.specs[id].namespace, life.known[: life.prompt], end.generated)
            said = life.generated[: end.generated]  # a row that ran on after its end has yielded for nobody
            assert said == want == self.said[id], f"{id} yields something else"
            if end.generated:
                assert end.cached + end.computed == end.prompt

    def all_free(self) -> None:
        for name, tiers in self.cache.stats()["pages"].items():
            for tier, pages in tiers.items():
                assert pages["free"] == pages["capacity"], f"{name} leaks on {tier}: {pages}"

    def pages(self, tier: str, owner: str) -> dict[str, int]:
        return {name: tiers[tier][owner] for name, tiers in self.cache.stats()["pages"].items()}

    @property
    def moved(self) -> dict[str, int]:
        return self.cache.stats()["transfers"]

    def names(self, tokens: Any, namespace: Namespace = BASE, group: str = "full") -> list[str]:
        """The keys of a prompt's pages in the store."""
        groups = [layout.name for layout in self.fingerprint.in_order()]
        prefix = key_prefix(self.fingerprint.digest(), groups.index(group))
        return [prefix + digest.hex() for digest in self.cache.page_hashes(namespace, tokens)]

    def stored(self, tokens: Any, namespace: Namespace = BASE, group: str = "full") -> list[bool]:
        """Which pages of a prompt the store has."""
        return self.backend.inner.exists(self.names(tokens, namespace, group))

    def _close(self, ended: list[Ended]) -> None:
        for end in ended:
            assert end.id in self.specs and end.id not in self.ended, f"{end} of a request that is not live"
            self.ended[end.id] = end
