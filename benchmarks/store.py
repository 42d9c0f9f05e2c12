"""Figures of the file store: pages put and got, with checksums, beside one plain file of the same bytes.

The store is in a process of its own, as an engine has it.

Wall time, because disks and threads are what is measured; each repeat of ours is held against its neighbour in time.
Plain: one file, written and read from front to end in pieces of a page, by one thread, from and to the same memory.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from sapwood.store import Fingerprint, GroupLayout, JobDone, Store, open_store, shared

from .timing import Figure

KIB, MIB, GIB = 2**10, 2**20, 2**30
WEIGHTS = bytes(32)
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB}
YARDSTICK = {
    "put": "write of the same bytes to one new file, a page a call, one thread; neither side syncs, both begin synced",
    "get": "read of the same bytes from that file into the same memory; the page cache has both, just written",
    "cold get": "the same, with an empty page cache for both",
}
BARS = {
    ("get", "64 KiB"): 0.25,
    ("get", "1 MiB"): 0.7,
    ("get", "4 MiB"): 0.7,
    ("put", "1 MiB"): 0.5,
    ("put", "4 MiB"): 0.5,
}


def fingerprint(page_bytes: int) -> Fingerprint:
    return Fingerprint(WEIGHTS, "bfloat16", 16, (GroupLayout("full", "full", page_bytes),), rank=0, ranks=1)


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def opened(uri: str, page_bytes: int, pages: int) -> tuple[Store, np.ndarray]:
    """A store, and the memory it knows."""
    store = open_store(uri, fingerprint(page_bytes), process=True)
    array = shared((pages, page_bytes))
    store.register("full", array)
    return store, array


class Rival:
    """The same bytes, through a store and through one plain file, in one folder."""

    def __init__(self, folder: Path, page_bytes: int, pages: int) -> None:
        self.folder = folder
        self.ids = np.arange(1, pages + 1)
        self.store, self.array = opened(f"file://{folder}/store?size=100GiB", page_bytes, pages + 1)
        self.array[:] = np.random.default_rng(1).integers(0, 256, self.array.shape, np.uint8)
        self.rows = [memoryview(self.array[i]) for i in self.ids]
        self.bytes = pages * page_bytes
        self.round = 0

    def new_keys(self) -> None:
        """From now on the same pages go by other keys, so that a put writes."""
        self.round += 1
        self.hashes = b"".join(hashlib.sha256(f"{self.round} {i}".encode()).digest() for i in self.ids)

    def job(self, kind: str) -> None:
        job = getattr(self.store, kind)(self.hashes, {"full": self.ids}, timeout=120)
        self.store.wait(120)
        (done,) = self.store.poll()
        assert isinstance(done, JobDone) and done.job == job and done.run() == len(self.ids), self.store.stats()

    def plain_put(self) -> None:
        fd = os.open(self.folder / f"plain{self.round}", os.O_WRONLY | os.O_CREAT)
        for row in self.rows:
            os.write(fd, row)
        os.close(fd)

    def plain_get(self) -> None:
        fd = os.open(self.folder / f"plain{self.round}", os.O_RDONLY)
        for row in self.rows:
            os.readv(fd, [row])
        os.close(fd)


def cold() -> bool:
    """Empty the page cache, if we may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as folder:
        for name, page_bytes in SIZES.items():
            yield from race(Path(folder) / name.replace(" ", ""), name, page_bytes, quick)
        yield first_hit(Path(folder) / "restart", quick)


def race(folder: Path, name: str, page_bytes: int, quick: bool) -> Iterator[Figure]:
    folder.mkdir()
    total = (64 if quick else 256) * MIB
    rival = Rival(folder, page_bytes, total // page_bytes)
    taken: dict[str, list[float]] = {}

    def note(what: str, ours: Callable[[], object], plain: Callable[[], object], between: Callable[[], object]) -> None:
        order = [("ours", ours), ("plain", plain)]
        for name, run in order if rival.round % 2 else reversed(order):
            between()
            taken.setdefault(f"{what} {name}", []).append(seconds(run))

    may = cold()
    gc.disable()
    try:
        for _ in range(4 if quick else 8):
            rival.new_keys()
            note("put", lambda: rival.job("put"), rival.plain_put, os.sync)
            note("get", lambda: rival.job("get"), rival.plain_get, lambda: None)
            if may:
                note("cold get", lambda: rival.job("get"), rival.plain_get, cold)
    finally:
        gc.enable()
        rival.store.close()
    for what in ("put", "get", "cold get") if may else ("put", "get"):
        ours, plain = taken[f"{what} ours"][1:], taken[f"{what} plain"][1:]  # the first finds new memory, new folders
        ratio = median(p / o for o, p in zip(ours, plain, strict=True))
        beside = f"{total / median(ours) / 1e6:.0f} MB/s; plain {total / median(plain) / 1e6:.0f}: {YARDSTICK[what]}"
        yield Figure(
            f"file store: {what} of pages of {name}, over plain", ratio, "", BARS.get((what, name)), beside, ">="
        )


RESTART = """
import sys, time
import numpy as np
from benchmarks.store import *
folder, page_bytes, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store, array = opened(f"file://{folder}?size={size}", page_bytes, 2)
job = store.get([hashlib.sha256(b"7").digest()], {"full": [1]}, timeout=60)
store.wait(60)
assert store.poll()[0].run() == 1
print(time.time())
sys.stdout.flush()
os._exit(0)
"""


def first_hit(folder: Path, quick: bool) -> Figure:
    """A new process, a store of 5 GB: how long from its start to its first page?"""
    page_bytes, total = MIB, (1 if quick else 5) * 10**9
    pages = 64
    store, array = opened(f"file://{folder}?size={2 * total}", page_bytes, pages + 1)
    array[:] = 7
    for low in range(0, total // page_bytes, pages):
        names = [hashlib.sha256(str(i).encode()).digest() for i in range(low, low + pages)]
        store.put(names, {"full": np.arange(1, pages + 1)}, timeout=120)
        assert store.drain(120)
        store.poll()
    store.close(60)
    cold()
    taken = []
    for _ in range(3):
        begin = time.time()
        command = [sys.executable, "-c", RESTART, str(folder), str(page_bytes), str(2 * total)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        taken.append(float(done.stdout) - begin)
    what = f"file store: start of a process to its first hit, {total / 1e9:.0f} GB"
    return Figure(what, max(taken), "s", 2.0, "the slowest of three; the first with a cold page cache")
