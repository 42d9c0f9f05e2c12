"""What an engine of Qwen3-8B's shape does on a GPU, beside the bars: `make gpu-bench`, or `python -m tests.gpu.bench`
with the names of some measurements. Random weights, the real scheduler, prompts of random tokens."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .adapted import adapted
from .figures import ANSWER, CHATS, TURNS, chats, decode, many, mixed, offline, sampled, staggered
from .foretold import foretold
from .hosted import hosted
from .kit import Line, say
from .shapes import QWEN3_8B, opened
from .start import started

FLAGS: dict[str, Any] = {"max_model_len": 40960, "max_num_seqs": 256}
ON_ONE = ("offline", "decode", "mixed", "sampled", "many", "chats", "staggered", "foretold")  # on one engine
ALL = (*ON_ONE, "hosted", "adapted", "uncached", "start")
_MOST = 7.5 * 60  # seconds, after which it ends with what there is


class Table:
    """Lines as they come, and all of them in the end."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted
        self.lines: list[Line] = []
        self.failed: list[str] = []

    def note(self, name: str, measure: Callable[[], Iterator[Line]]) -> None:
        if name not in self.wanted:
            return
        begin = time.perf_counter()
        try:
            for line in measure():
                self.lines.append(line)
                say(" | ".join(line.cells))
        except Exception as error:
            logging.exception("%s failed", name)
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
        say(f"-- {name}: {time.perf_counter() - begin:.0f} s")

    def told(self) -> str:
        rows = [("", "bar", "here", "", ""), *(line.cells for line in self.lines)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        forms = [f"{{:{widths[0]}}}", f"{{:>{widths[1]}}}", f"{{:>{widths[2]}}}", f"{{:{widths[3]}}}", "{}"]
        lines = ["  ".join(forms).format(*row).rstrip() for row in rows]
        return "\n".join([*lines, *(f"FAILED {each}" for each in self.failed)])


def on_one(table: Table, totals: dict[str, float]) -> None:
    """What one engine is enough for."""
    begin = time.perf_counter()
    with opened(QWEN3_8B, **FLAGS) as llm:
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in llm.engine.start.items())
        say(f"ready after {time.perf_counter() - begin:.1f} s ({parts})")

        def talk() -> Iterator[Line]:
            totals["chats"] = chats(llm)
            rate = CHATS * TURNS * ANSWER / totals["chats"]
            yield Line(
                f"{CHATS} chats x {TURNS} turns, total", None, totals["chats"], "{:.2f} s", more=f"{rate:.0f} tokens/s"
            )

        table.note("offline", lambda: offline(llm, totals))
        table.note("decode", lambda: decode(llm))
        table.note("mixed", lambda: mixed(llm))
        table.note("sampled", lambda: sampled(llm))
        table.note("many", lambda: many(llm, totals))
        table.note("chats", talk)
        table.note("staggered", lambda: staggered(llm))
        table.note("foretold", lambda: foretold(llm, totals))


def uncached(with_cache: float | None) -> Iterator[Line]:
    """The same chats with the cache off."""
    with opened(QWEN3_8B, enable_prefix_caching=False, **FLAGS) as llm:
        took = chats(llm)
    more = f"{took:.1f} s without"
    if with_cache is not None:
        yield Line("chats, throughput against no cache", 4, took / with_cache, "{:.1f}", at_least=True, more=more)


def start() -> Iterator[Line]:
    """Starts in processes of their own, with Triton's cache empty and with it filled."""
    with tempfile.TemporaryDirectory() as cache:
        for kind, bar in (("cold", 15), ("warm", 6)):
            found = started(cache)
            parts = ", ".join(f"{name} {spent:.1f}" for name, spent in found.items())
            yield Line(f"ready after imports and weights, {kind} caches", bar, found["ready"], "{:.1f} s", more=parts)
            graphs, more = found["graphs"], f"{found['kernels']:.1f} s to compile before"
            yield Line(f"all graphs captured, {kind} caches", 3, graphs, "{:.1f} s", more=more)
            yield Line(f"self-check of a start, {kind} caches", 1, found["self-check"], "{:.2f} s")
    yield Line("memory of graphs", 500, found["MiB of graphs"] * 2**20 / 1e6, "{:.0f} MB")


def main(names: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    for noisy in ("transformers", "torch", "filelock"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    table = Table(names or list(ALL))
    totals: dict[str, float] = {}

    def too_late() -> None:
        say(f"no time is left\n\n{table.told()}")
        os._exit(1)

    watch = threading.Timer(_MOST, too_late)
    watch.daemon = True
    watch.start()
    if set(ON_ONE) & set(table.wanted):
        on_one(table, totals)
    table.note("hosted", hosted)
    table.note("adapted", adapted)
    table.note("uncached", lambda: uncached(totals.get("chats")))
    table.note("start", start)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    say(f"{card}, torch {torch.__version__}\n\n{table.told()}")
    missed = sum(line.verdict == "MISSED" for line in table.lines)
    say(f"{len(table.lines)} figures, {missed} missed, {len(table.failed)} failed")
    sys.exit(bool(table.failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    main(parser.parse_args().names)
