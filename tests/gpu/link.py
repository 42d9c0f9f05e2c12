"""What small copies wait for while a large one runs on the link: `python -m tests.gpu.link`."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from sapwood.engine.kernels.steps import move
from sapwood.engine.transfer.torch_mover import _STREAM_ORDER, _Attributes, batch_copy

PAGE, PAGES = 2359296, 2048
WORDS = 80000  # of a step's buffer


def main() -> None:
    host = torch.empty(PAGES * PAGE, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(PAGES * PAGE, dtype=torch.uint8, device="cuda")
    small, there = torch.zeros(WORDS, dtype=torch.int32, pin_memory=True), torch.zeros(WORDS, dtype=torch.int32).cuda()
    back, stream, batch = torch.zeros(128, dtype=torch.int32, pin_memory=True), torch.cuda.Stream(), batch_copy()
    a, b = torch.randn(4096, 8192, device="cuda").bfloat16(), torch.randn(8192, 8192, device="cuda").bfloat16()

    def load(entries: int) -> torch.cuda.Event:
        sizes = np.full(entries, PAGES * PAGE // entries, np.int64)
        first = np.cumsum(sizes) - sizes
        targets, sources = first + card.data_ptr(), first + host.data_ptr()
        error = batch(
            *(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, entries),
            *(ctypes.byref(_Attributes(srcAccessOrder=_STREAM_ORDER)), ctypes.byref(ctypes.c_size_t(0)), 1),
            *(ctypes.byref(ctypes.c_size_t(0)), stream.cuda_stream),
        )
        assert not error, error
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def copied() -> None:
        there.copy_(small, non_blocking=True)

    def read() -> None:
        move(small, there)

    def returned() -> None:
        back.copy_(there[:128], non_blocking=True)

    def nothing() -> None:
        torch.matmul(a, b)

    ways: dict[str, Callable[[], None]] = {"copy": copied, "kernel": read, "read-back": returned, "product": nothing}
    for way in ways.values():
        way()
    torch.cuda.synchronize()
    for entries in (0, 1, 128, 2048):
        for name, way in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            event = load(entries) if entries else None
            issued = time.perf_counter() - begin
            taken = []
            while len(taken) < 60 if event is None else not event.query():
                now = time.perf_counter()
                way()
                torch.cuda.current_stream().synchronize()
                taken.append(1e6 * (time.perf_counter() - now))
            whole = time.perf_counter() - begin
            told = f"{len(taken)} times, median {np.median(taken):.0f} us, most {max(taken):.0f} us"
            sys.stdout.write(f"{entries} entries ({1e3 * issued:.1f} of {1e3 * whole:.0f} ms), {name}: {told}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
