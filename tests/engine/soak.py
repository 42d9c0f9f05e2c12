"""`python -m tests.engine.soak --minutes M --seed N --uri URI`: two engines, one store, random traffic and trouble.

Whole engines with real bytes, one with its store on threads, the other with it in a process of its own. Requests of all
kinds go to either; they are aborted, their namespaces are evicted, caches flushed, steps fail, engines restart, their
ways to the store misbehave by turns, and the store's process is killed or stopped. Every read and arrival
is checked by content, the invariants and limits after every step, and in the end everybody has ended once and all
memory is free. The seed repeats traffic and trouble; what threads do in between is theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sapwood.scheduler import Ended
from sapwood.sim.depot import Depot
from sapwood.sim.executor import Life
from sapwood.sim.traffic import Traffic
from sapwood.store import Breaker, Faults
from sapwood.store.process import CAN_START
from sapwood.store.uri import nbytes, parse

from ..store.kit import within
from .machine import LAYOUTS, PAGE, Machine

SIZE = "2MiB"
TROUBLE = (
    *[Faults()] * 4,
    Faults(fail=1.0),
    Faults(fail=0.2, partial=0.2),
    Faults(slow=0.02),
    Faults(hang=0.5, hang_seconds=0.2),
    Faults(lie=0.7),
    Faults(corrupt=0.5),
    Faults(torn=0.3, corrupt=0.1, partial=0.1),
    Faults(full=0.7),
)
REMEMBERED = 100_000  # values the witnesses know by heart; of more, some are checked when they are read only


class Soak:
    def __init__(self, seed: int, uri: str, overlap: int | None = None) -> None:
        rng = self.random = random.Random(seed)
        self.overlap = overlap  # plans ahead; None: either
        self.uri = uri
        where = parse(uri)
        self.folder = Path(urlsplit(uri).path) if where.scheme == "file" else None
        self.limit = where.take("size", nbytes, 0)
        self.layout = rng.choice(LAYOUTS)
        self.depot = Depot()
        self.counts = Counter[str]()
        self.leaving: list[tuple[Machine, Life]] = []  # have ended, and may have a row in flight
        self.engines = [self.engine(at) for at in range(2)]
        longest = min(PAGE * group.device_pages for engine in self.engines for group in engine.groups[:1])
        self.traffic = Traffic(rng.getrandbits(32), PAGE, min(longest, 16 * PAGE), 97, rng.random() < 0.5)
        self.traffic.repeats()
        self.rounds = 0

    def engine(self, at: int) -> Machine:
        """A fresh engine, as after a restart. The second has its store in a process of its own, where that can be
        shared; how it misbehaves is settled when it is opened."""
        rng = self.random
        process = bool(at) and CAN_START and not self.uri.startswith("memory:")
        machine = Machine(
            self.layout,
            self._misbehaving() if process else self.uri,
            process=process,
            pages=rng.choice([20, 40]),
            host=rng.choice([12, 20, 60]),
            depot=self.depot,
            tick_seconds=0.001,
            breaker=Breaker(failures=3, seconds=0.1),
            queue_pages=rng.choice([16, 8192]),
            seed=rng.getrandbits(32),
            max_batch_tokens=rng.choice([16, 64, 256]),
            max_batch_size=rng.choice([4, 16]),
            host_policy=rng.choice(["through", "through", "evict"]),
            prefetch_threshold=rng.choice([1, 2]),
            lookup_ticks=rng.choice([20, 500]),
            fetch_ticks=rng.choice([20, 500]),
            headroom=rng.choice([0, 64]),
            policy=rng.choice(["fcfs", "prefix"]),
            overlap=rng.choice([0, 1]) if self.overlap is None else self.overlap,
        )
        machine.mover.chance = rng.choice([0.2, 1.0])
        machine.cache._publisher.save_pages = rng.choice([1, 2, 16])
        return machine

    def _misbehaving(self) -> str:
        """The store's URI with some of the trouble, but none that would be all there ever is."""
        rng = self.random
        faults = {name: value for name, value in vars(rng.choice(TROUBLE)).items() if value and value < 1}
        options = "&".join(f"{name}={value}" for name, value in {**faults, "seed": rng.getrandbits(30)}.items())
        return f"faulty+{self.uri}{'&' if '?' in self.uri else '?'}{options}"

    def run(self, seconds: float, rounds: int = 0) -> str:
        """Trouble for so many seconds, and so many rounds at least, then peace. Returns what happened."""
        until = time.monotonic() + seconds
        while time.monotonic() < until or self.rounds < rounds:
            self.round()
        for engine in self.engines:
            self.peace(engine)
            self.over(engine)
        for engine in self.engines:
            engine.close()
            self.count(engine)
        self.within_limits()
        told = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return f"{self.layout}: {self.rounds} rounds, {told}"

    def round(self) -> None:
        rng = self.random
        self.rounds += 1
        for at in range(len(self.engines)):
            if rng.random() < 0.05:
                self.disturb(at)
            engine = self.engines[at]
            if len(engine.loop.live) < 12 and rng.random() < 0.4:
                specs = self.traffic.arrivals()
                engine.submit_all(specs)
                self.counts["requests"] += len(specs)
            engine.step()
            self.over(engine)
        if self.rounds % 20 == 0:
            self.within_limits()
        if all(engine.loop._last and engine.loop._last.idle for engine in self.engines):
            self.engines[0].tiers.wait(0.002)
        if len(self.depot.values) > REMEMBERED:
            self.depot.lose(rng, 0.5)

    def disturb(self, at: int) -> None:
        rng, engine = self.random, self.engines[at]
        kinds = {"faults": 12, "abort": 12, "fail": 6, "evict": 4, "flush": 2, "restart": 1}
        (what,) = rng.choices(list(kinds), list(kinds.values()))
        self.counts[f"times: {what}"] += 1
        if what == "faults":
            self.trouble(engine)
        elif what == "abort":
            for id in rng.sample(sorted(engine.loop.live), min(2, len(engine.loop.live))):
                engine.abort(id)
        elif what == "fail":
            engine.executor.failures = rng.randint(1, 3)
        elif what == "evict":
            engine.scheduler.evict_namespace(rng.choice(self.traffic.spaces))
        elif what == "flush":
            engine.scheduler.flush()
        else:
            self.restart(at)

    def trouble(self, engine: Machine) -> None:
        """The store misbehaves otherwise from now on; or its process is killed, or stands still for a moment."""
        rng = self.random
        process = self.process_of(engine)
        if process is None:
            engine.backend.faults = rng.choice(TROUBLE)
            engine.backend.release()
        elif process["alive"] and rng.random() < 0.5:
            what = rng.choice([signal.SIGKILL, signal.SIGSTOP])
            self.counts[f"times: {what.name}"] += 1
            os.kill(process["pid"], what)
            if what is signal.SIGSTOP:
                engine.tiers.wait(rng.choice([0.001, 0.1]))
                with contextlib.suppress(ProcessLookupError):  # it had been killed just before, and is buried now
                    os.kill(process["pid"], signal.SIGCONT)

    def process_of(self, engine: Machine) -> dict[str, Any] | None:
        assert engine.store is not None
        return engine.store.stats().get("process")

    def calm(self, engine: Machine) -> None:
        """No more trouble, where it can be switched off."""
        if self.process_of(engine) is None:
            engine.backend.faults = Faults()
            engine.backend.release()

    def restart(self, at: int) -> None:
        """An engine is closed in the middle of everything, and a fresh one takes its place."""
        engine = self.engines[at]
        self.calm(engine)
        engine._close(engine.loop.close(5))
        assert not engine.loop.live and not engine.tiers.busy
        self.over(engine)
        self.count(engine)
        self.engines[at] = self.engine(at)

    def peace(self, engine: Machine) -> None:
        self.calm(engine)
        engine.executor.failures = 0
        engine.see_to(*engine.loop.live, timeout=240)

    def over(self, engine: Machine) -> None:
        """Those who have ended: with the right answer, and then forgotten."""
        if not engine.ended:
            return
        engine.right_answers()
        for name, end in engine.ended.items():
            life = engine.lives.pop(name)
            self.add(end)
            known = life.known[: life.prompt + end.generated]
            self.traffic.ended(engine.specs.pop(name), known, end.reason in ("stop", "length"))
            del engine.said[name]
            self.leaving.append((engine, life))
        engine.ended.clear()
        running = {id(life) for each in self.engines for flight in each.witness.flights for life in flight.lives}
        for gone, life in [(gone, life) for gone, life in self.leaving if id(life) not in running]:
            del gone.witness.double.requests[life.name]
        self.leaving = [(gone, life) for gone, life in self.leaving if id(life) in running]

    def add(self, end: Ended) -> None:
        self.counts[f"ended: {end.reason}"] += 1
        self.counts["tokens cached"] += end.cached
        self.counts["tokens computed"] += end.computed

    def count(self, engine: Machine) -> None:
        stats = engine.tiers.stats()
        for what in ("loads", "saves", "lookups", "fetches", "backups", "failed", "refused", "pages_fetched"):
            self.counts[what] += stats[what]
        self.counts["late"] += stats["store"]["late"]
        self.counts["bad values"] += sum(stats["store"]["bad"].values())

    def within_limits(self) -> None:
        if self.folder is not None and self.folder.exists():
            within(self.folder, self.limit)
        for engine in self.engines:
            for group in engine.groups:
                rows = engine.arena.pages[group.name]
                assert rows.nbytes == (group.host_pages + 1) * group.page_bytes
                assert engine.cache.stats()["pages"][group.name]["host"]["capacity"] == group.host_pages


def soak(seconds: float, seed: int, uri: str = "", overlap: int | None = None, rounds: int = 0) -> tuple[str, Soak]:
    """Run one. AssertionError with what repeats it, if anything is wrong."""
    folder = None if uri else tempfile.mkdtemp(prefix="sapwood-soak-")
    try:
        run = Soak(seed, uri or f"file://{folder}/store?size={SIZE}", overlap)
        return run.run(seconds, rounds), run
    except BaseException as error:
        again = f"python -m tests.engine.soak --minutes {seconds / 60:g} --seed {seed}"
        again += f" --rounds {rounds}" if rounds else ""
        again += f" --uri '{uri}'" if uri else ""
        again += f" --overlap {overlap}" if overlap is not None else ""
        raise AssertionError(f"{type(error).__name__}: {error}; to repeat: {again}") from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=0, help="at least so many, however long they take")
    parser.add_argument("--seed", type=int, default=None, help="default: one that is drawn, and printed")
    parser.add_argument("--uri", default="", help=f"a store of its own; default: files in a folder, {SIZE}")
    parser.add_argument("--overlap", type=int, choices=(0, 1), help="plans ahead; default: either")
    given = parser.parse_args()
    seed = random.randrange(2**32) if given.seed is None else given.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    told, _ = soak(given.minutes * 60, seed, given.uri, given.overlap, given.rounds)
    sys.stdout.write(told + "\n")


if __name__ == "__main__":
    main()
