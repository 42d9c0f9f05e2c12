"""Figures of moving pages: save and load of scattered pages against memcpy of as many bytes, and a single page.

The yardstick is one numpy copy of one contiguous block between two arenas of the same size, in the same run. Both sides
take other pages in every repeat, so neither finds its bytes in a cache. On CUDA the yardstick is one copy of a
contiguous block over the link, and time is the wall clock's: the copying is not done by this thread.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine import DeviceArena, HostArena, Mover, open_mover
from sapwood.engine.transfer.arena import aligned

from .timing import Figure, alternate, calls, clock

KIB = 1024
PAGE_BYTES = 64 * KIB
PAGES = 4096  # 256 MiB a side: more than any cache holds
SCALED = "scaled us"


class Bench:
    """A mover over one group, and operations on pages that were not touched lately."""

    def __init__(self, mover: Mover, pages: int = PAGES) -> None:
        self.mover = mover
        self.pages = pages
        self.random = np.random.default_rng(0)
        self.op = 0

    def scattered(self, n: int) -> dict[str, tuple[Any, Any]]:
        draw = self.random.permutation
        return {"full": ((draw(self.pages)[:n] + 1).astype(np.int32), (draw(self.pages)[:n] + 1).astype(np.int32))}

    def move(self, kind: Any, pages: dict[str, tuple[Any, Any]]) -> None:
        """Start an operation and wait for its acknowledgement."""
        self.op += 1
        self.mover.start(kind, self.op, pages)
        ok = self.mover.wait(self.op)
        assert ok, self.mover.reason(self.op)

    def run(self, kind: Any, n: int, now: Callable[[], float] = clock) -> Callable[[], float]:
        def run() -> float:
            pages = self.scattered(n)
            begin = now()
            self.move(kind, pages)
            return now() - begin

        return run


def arena(pages: int = PAGES, page_bytes: int = PAGE_BYTES) -> list[CacheGroup]:
    return [CacheGroup("full", "full", pages, pages, page_bytes=page_bytes)]


def memcpy(there: Any, here: Any, n: int, random: np.random.Generator) -> Callable[[], float]:
    def run() -> float:
        a, b = random.integers(1, len(there) - n, 2).tolist()
        begin = clock()
        np.copyto(here[b : b + n], there[a : a + n])
        return clock() - begin

    return run


def figures(quick: bool) -> Iterator[Figure]:
    yield from on_numpy(quick)
    if importlib.util.find_spec("torch"):
        yield from on_torch(quick)


def on_numpy(quick: bool) -> Iterator[Figure]:
    device = aligned((PAGES + 1, PAGE_BYTES))  # as torch's memory is; numpy's own begins at odd multiples of 16
    device[:] = 1
    host = HostArena(arena())
    host.pages["full"][:] = 2
    bench = Bench(open_mover(DeviceArena({"full": device}), host))
    yield from against_memcpy(bench, "", device, host, quick, bar=0.6)
    for kind in ("save", "load"):
        one = bench.scattered(1)
        taken = alternate(5 if quick else 25, it=calls(200, lambda kind=kind, one=one: bench.move(kind, one)))
        yield Figure(f"{kind} 1 page of 64 KiB, acknowledged", taken["it"].us, SCALED, 25)


def against_memcpy(
    bench: Bench, what: str, device: Any, host: HostArena, quick: bool, bar: float | None
) -> Iterator[Figure]:
    for n in (64, 1024):
        taken = alternate(
            (5 if quick else 15) if n > 64 else (15 if quick else 61),
            save=bench.run("save", n),
            down=memcpy(device, host.pages["full"], n, bench.random),
            load=bench.run("load", n),
            up=memcpy(host.pages["full"], device, n, bench.random),
        )
        for kind, yardstick in (("save", "down"), ("load", "up")):
            speed = n * PAGE_BYTES / taken[kind].seconds / 1e9
            yield Figure(
                f"{kind} {n} scattered pages of 64 KiB{what}",
                1 / taken[kind].over(taken[yardstick]),
                "of memcpy",
                bar,
                f"{speed:.1f} GB/s",
                ">=",
            )


def on_torch(quick: bool) -> Iterator[Figure]:
    import torch

    from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena, TorchMover

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the others' time would not be seen
        tensor = torch.ones((PAGES + 1, PAGE_BYTES), dtype=torch.uint8)
        host = HostArena(arena())
        host.pages["full"][:] = 2
        bench = Bench(TorchMover(TorchArena({"full": tensor}), host))
        yield from against_memcpy(bench, " by torch", tensor.numpy(), host, quick, bar=None)
        torch.set_num_threads(threads)
        return

    # CUDA: pages of 64 KiB and the 2 MiB of an 8B model, over the link.
    for n, page_bytes in ((64, PAGE_BYTES), (1024, PAGE_BYTES), (512, 2048 * KIB)):
        pages = 2048
        groups = arena(pages, page_bytes)
        pinned = PinnedArena(groups)
        kv = torch.ones((pages + 1, page_bytes), dtype=torch.uint8, device="cuda")
        bench = Bench(TorchMover(TorchArena({"full": kv}), pinned), pages)
        block = torch.empty(n * page_bytes, dtype=torch.uint8, device="cuda")
        there = torch.from_numpy(pinned.pages["full"]).view(-1)[: n * page_bytes]

        def link(target: Any, source: Any) -> Callable[[], float]:
            def run() -> float:
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                return time.perf_counter() - begin

            return run

        def issue(bench: Bench = bench, n: int = n) -> float:
            moved = bench.scattered(n)
            bench.op += 1
            begin = time.perf_counter()
            bench.mover.start("save", bench.op, moved)
            taken = time.perf_counter() - begin
            bench.mover.wait(bench.op)
            return taken

        taken = alternate(
            5 if quick else 15,
            save=bench.run("save", n, time.perf_counter),
            down=link(there, block),
            load=bench.run("load", n, time.perf_counter),
            up=link(block, there),
            issue=issue,
        )
        for kind, yardstick in (("save", "down"), ("load", "up")):
            speed = n * page_bytes / taken[kind].seconds / 1e9
            yield Figure(
                f"CUDA: {kind} {n} scattered pages of {page_bytes // KIB} KiB",
                1 / taken[kind].over(taken[yardstick]),
                "of memcpy",
                0.6 if n > 64 else None,  # 4 MiB pass the link in less time than Python takes to say so
                f"{speed:.1f} GB/s",
                ">=",
            )
        yield Figure(
            f"CUDA: starting the save of {n} pages of {page_bytes // KIB} KiB", taken["issue"].us, SCALED, None
        )
        bench.mover.close()
        pinned.close()
