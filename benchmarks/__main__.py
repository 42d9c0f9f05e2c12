"""`python -m benchmarks [subject ...] [--quick]`: one table of what, how much, the bar and the peer."""

from __future__ import annotations

import argparse
import platform
import time

from . import cache, engine, peer, scheduler, server, store, tiers, transfer
from .timing import LOOP_SECONDS, Figure, loop_seconds

SUBJECTS = {
    "cache": cache.figures,
    "scheduler": scheduler.figures,
    "transfer": transfer.figures,
    "store": store.figures,
    "tiers": tiers.figures,
    "engine": engine.figures,
    "server": server.figures,
}


def line(figure: Figure) -> str:
    bar = "" if figure.bar is None else f"{figure.sense} {figure.bar:.4g}"
    measured = f"{figure.measured:.4g}" if figure.measured < 1000 else f"{figure.measured:.0f}"
    row = f"{figure.what:<58}{measured:>8} {figure.unit:<10}{bar:>9}  {figure.verdict:<5} {figure.beside}"
    return row.rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="subject", help=f"of {', '.join(SUBJECTS)}; all if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats and a smaller tree: a rough look")
    asked = parser.parse_args()
    unknown = [name for name in asked.subjects if name not in SUBJECTS]
    if unknown:
        parser.error(f"unknown subject {unknown[0]!r}; choose from {', '.join(SUBJECTS)}")
    begin = time.perf_counter()
    loops = sorted(loop_seconds() for _ in range(5))
    print(f"Python {platform.python_version()}; counting to a million takes {loops[2] * 1e3:.0f} ms here now;")
    print(f"scaled us: as if it took {LOOP_SECONDS * 1e3:.0f} ms. Thread CPU time, gc off, medians.")
    if not peer.installed():
        print(peer.MISSING)
    missed = bars = 0
    print(f"{'what':<58}{'measured':>8} {'':<10}{'bar':>9}")
    for name, figures in SUBJECTS.items():
        if asked.subjects and name not in asked.subjects:
            continue
        for figure in figures(asked.quick):
            print(line(figure), flush=True)
            bars += figure.bar is not None
            missed += figure.verdict == "MISS"
    print(f"{missed} of {bars} bars missed; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
