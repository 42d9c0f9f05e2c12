"""Transfers on a GPU, checked and measured: `PYTHONPATH=src python -m tests.engine.gpu_transfer`. Needs torch, numpy.

Both ways in which pages are copied (a batch an operation, a memcpy a run of pages) move random pages there and back and
must bring every byte; saves must see what the step before them writes, loads must not wait for it. Then a table of
speeds, beside one memcpy of as many contiguous bytes. `... gpu_transfer cpu` runs what can be run without a GPU.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sapwood.cache import CacheGroup
from sapwood.engine import HostArena, PageLayout, PagePart
from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena, TorchMover

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
CUDA = DEVICE == "cuda"
CYCLES = 400_000_000  # about a fifth of a second
WAYS = ("batched", "page by page") if CUDA else ("page by page",)

QWEN = PageLayout([PagePart(i, kv, (16, 8, 128), torch.bfloat16) for i in range(36) for kv in "kv"])  # 2.36 MB
SMALL = PageLayout([PagePart(i, kv, (16, 8, 32), torch.bfloat16) for i in range(4) for kv in "kv"])  # 64 KiB
TINY = PageLayout([PagePart(0, "conv", (11, 3), torch.bfloat16), PagePart(0, "ssm", (3, 5, 4), torch.float32)])


class World:
    """Memory of some groups on both sides, full of random bytes, and a mover that copies in one way."""

    def __init__(self, way: str, layouts: dict[str, PageLayout], pages: int, host_pages: int) -> None:
        self.groups = [CacheGroup(g, "full", pages, host_pages, None, each.page_bytes) for g, each in layouts.items()]
        self.way = way
        self.device = TorchArena.allocate(self.groups, layouts, device=DEVICE)
        self.arena = PinnedArena(self.groups) if CUDA else HostArena(self.groups)
        self.host = {name: torch.from_numpy(rows) for name, rows in self.arena.pages.items()}
        self.scramble()
        self.mover = TorchMover(self.device, self.arena)
        if way != "batched":
            self.mover._batch = None
        elif self.mover._batch is None:
            raise SystemExit("this driver has no cuMemcpyBatchAsync: it is from before CUDA 12.8")
        self.random = np.random.default_rng(0)
        self.op = 0

    def scramble(self) -> None:
        for name, rows in self.device.rows.items():
            rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8, device=DEVICE))
            self.host[name][1:].copy_(
                torch.randint(0, 256, self.host[name][1:].shape, dtype=torch.uint8, device=DEVICE)
            )
        synchronize()

    def ids(self, n: int, limit: int) -> Any:
        return (self.random.permutation(limit)[:n] + 1).astype(np.int32)

    def start(self, kind: Any, pages: Any) -> int:
        self.op += 1
        self.mover.start(kind, self.op, pages)
        return self.op

    def done(self, kind: Any, pages: Any) -> None:
        op = self.start(kind, pages)
        assert self.mover.wait(op), self.mover.reason(op)
        assert self.way != "batched" or self.mover._batch is not None, "the driver refused the batch: see the warning"

    def close(self) -> None:
        self.mover.close()
        self.host.clear()
        self.arena.close()


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def every_byte_comes(way: str) -> None:
    """Random pages, runs and holes of three groups, there and back; nothing else changes."""
    world = World(way, {"full": SMALL, "window": QWEN, "state": TINY}, pages=40, host_pages=60)
    device = {g: rows.cpu() for g, rows in world.device.rows.items()}
    host = {g: rows.clone() for g, rows in world.host.items()}
    for _ in range(6):
        for kind in ("save", "load"):
            pages = {}
            for group in device:
                there, here = world.ids(12, 40), world.ids(12, 60)
                there[3:7], here[3:7] = 17 + np.arange(4), 33 + np.arange(4)  # neighbours
                _, first = np.unique(there, return_index=True)
                _, second = np.unique(here, return_index=True)
                keep = np.intersect1d(first, second)
                there, here = np.append(there[keep], 0), np.append(here[keep], 0)
                a, b = torch.from_numpy(there[:-1]).long(), torch.from_numpy(here[:-1]).long()
                if kind == "save":
                    host[group][b] = device[group][a]
                else:
                    device[group][a] = host[group][b]
                pages[group] = (there, here) if kind == "save" else (here, there)
            world.done(kind, pages)
            for group in device:
                assert torch.equal(world.device.rows[group].cpu(), device[group]), (way, kind, group)
                assert torch.equal(world.host[group], host[group]), (way, kind, group)
    world.close()


def layers_see_what_was_loaded(way: str) -> None:
    """What a layer writes through its view is saved, and read through its view from another page when loaded."""
    world = World(way, {"full": SMALL}, pages=8, host_pages=8)
    key = world.device.view("full", 2, "k")
    key[3] = value = torch.randn(16, 8, 32, device=DEVICE).to(torch.bfloat16)
    world.done("save", {"full": (np.array([3]), np.array([5]))})
    world.done("load", {"full": (np.array([5]), np.array([7]))})
    assert torch.equal(key[7], value)
    world.close()


def streams_are_in_order(way: str) -> None:
    """A save of what a step is still to write waits for it; `start` does not, and a load does not either."""
    world = World(way, {"full": SMALL}, pages=64, host_pages=64)
    some, pages = np.arange(1, 33, dtype=np.int32), np.array([*range(40, 56), *range(30, 14, -1)], np.int32)
    world.device.rows["full"].fill_(1)  # the first use of a kernel waits for everything
    world.done("save", {"full": (some, pages)})
    world.done("load", {"full": (pages, some)})
    for value in (7, 9):
        synchronize()
        torch.cuda._sleep(CYCLES)
        world.device.rows["full"].fill_(value)
        written = torch.cuda.current_stream().record_event()
        begin = time.perf_counter()
        op = world.start("save", {"full": (some, pages)})
        took = time.perf_counter() - begin
        assert not written.query() and world.mover.poll() == [] and took < 0.1, (way, took)
        assert world.mover.wait(op) and written.query()
        assert (world.host["full"][pages] == value).all(), way
    synchronize()
    torch.cuda._sleep(5 * CYCLES)
    step = torch.cuda.current_stream().record_event()
    world.done("load", {"full": (pages, some + 32)})
    assert not step.query(), f"{way}: a load waited for the step"
    synchronize()
    assert (world.device.rows["full"][33:] == 9).all()
    world.close()


def any_thread_may_start(way: str) -> None:
    """A thread that never touched the device starts a load, then a save."""
    world = World(way, {"full": SMALL}, pages=8, host_pages=8)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            world.done("load", {"full": (np.array([1, 5]), np.array([2, 4]))})
            world.done("save", {"full": (np.array([2, 4]), np.array([7, 8]))})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed, (way, failed)
    assert torch.equal(world.host["full"][[1, 5]], world.host["full"][[7, 8]])
    world.close()


def measure(n: int, layout: PageLayout) -> None:
    world = World(WAYS[0], {"full": layout}, pages=n, host_pages=n)
    batch, total = world.mover._batch, n * layout.page_bytes
    device, host = world.device.rows["full"][1:], world.host["full"][1:]

    def rate(run: Callable[[], Any]) -> str:
        taken = []
        for _ in range(6):
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            taken.append(time.perf_counter() - begin)
        return f"{total / statistics.median(taken[1:]) / 1e9:6.1f}"

    name = f"{n:,} x {layout.page_bytes / 1e6:.2f} MB"
    save = rate(lambda: host.copy_(device, non_blocking=True))
    load = rate(lambda: device.copy_(host, non_blocking=True))
    tell(f"| {name:18} | {'one memcpy':12} | {save} | {load} |           |")
    for way in WAYS:
        world.way, world.mover._batch = way, batch if way == "batched" else None
        taken: list[float] = []

        def scattered(kind: Any, taken: list[float] = taken) -> None:
            pages = {"full": (world.ids(n, n), world.ids(n, n))}
            begin = time.perf_counter()
            op = world.start(kind, pages)
            taken.append(time.perf_counter() - begin)
            assert world.mover.wait(op), world.mover.reason(op)

        save, load = rate(lambda: scattered("save")), rate(lambda: scattered("load"))
        tell(f"| {name:18} | {way:12} | {save} | {load} | {statistics.median(taken) * 1e3:9.2f} |")
    world.close()


def main() -> None:
    if CUDA and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here")
    tell(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name() if CUDA else DEVICE}")
    for way in WAYS:
        for story in (every_byte_comes, layers_see_what_was_loaded, streams_are_in_order, any_thread_may_start):
            if CUDA or story is not streams_are_in_order:
                story(way)
                tell(f"ok: {story.__name__.replace('_', ' ')}, {way}")
    tell("| scattered pages    | way          | save, GB/s | load | start, ms |\n| --- | --- | --- | --- | --- |")
    measure(1024, SMALL)
    measure(2048 if CUDA else 64, QWEN)


if __name__ == "__main__":
    main()
