"""`python -m benchmarks.windows [--trace FILE [--limit N]]`: what sliding windows cost in hit rate. Models with them,
whose memory is divided as `sapwood serve` divides it, beside full attention alone with as many resident tokens:

    same pages      as many full pages as the model with windows has
    same contexts   room for as many contexts of this traffic as the model with windows has

    chats           short ones: a system prompt of 200 tokens, 5 turns, each going on where the last answer ended
    thinking        the same, but each turn leaves out two thirds of the last answer and changes the rest
    trace           a file of real requests, whose blocks of 512 tokens are equal or not

By size: the device alone, with host memory, and with a store behind that.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import CacheGroup
from sapwood.engine.models.kv_groups import GroupSpec
from sapwood.engine.models.sizing import contexts, size
from sapwood.engine.transfer.arena import PageLayout, PagePart
from sapwood.scheduler import SchedulerConfig
from sapwood.sim.cost import CostModel, SimulatedExecutor
from sapwood.sim.trace import TraceReplay, read_trace

PAGE, ROWS, CHUNK = 16, 64, 2048
SHORT_SIZES = ((100_000, 0, 0), (50_000, 250_000, 0), (50_000, 100_000, 1_000_000))
LONG_SIZES = ((4_000_000, 0, 0), (1_000_000, 4_000_000, 0), (1_000_000, 2_000_000, 8_000_000))


class Shape(NamedTuple):
    """Layers of full attention, layers that slide, their window, and the bytes that a token costs in a layer."""

    full: int
    sliding: int
    window: int
    token_bytes: int

    def remembered(self) -> list[GroupSpec]:
        def group(name: str, layers: int, window: int | None) -> GroupSpec:
            import torch

            layout = PageLayout([PagePart(0, "k", (layers * self.token_bytes * PAGE,), torch.uint8)])
            return GroupSpec(name, "full" if window is None else "window", window, layout)

        return [group("full", self.full, None), group(f"window{self.window}", self.sliding, self.window)]


SHAPES = {
    "gpt-oss-20b": Shape(12, 12, 128, 2 * 8 * 64 * 2),
    "Gemma 3 4B": Shape(5, 29, 1024, 2 * 4 * 256 * 2),
}


class Turn(NamedTuple):
    """A request of a chat."""

    seconds: float
    prompt: npt.NDArray[np.int32]
    output: int
    blocks: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return len(self.prompt)

    def tokens(self) -> npt.NDArray[np.int32]:
        return self.prompt


def chats(thinking: bool, number: int = 800, turns: int = 5, seed: int = 1) -> list[Turn]:
    rng, draw = random.Random(seed), SimulatedExecutor()._draw
    system = [rng.randrange(32_000) for _ in range(200)]
    asked, begin = [], 0.0
    for _ in range(number):
        begin += rng.expovariate(2.0)
        at, known = begin, list(system)
        for _ in range(turns):
            known = [*known, *(rng.randrange(32_000) for _ in range(rng.randrange(20, 200)))]
            output = rng.randrange(50, 300)
            asked.append(Turn(at, np.array(known, np.int32), output))
            answer = [known[-1]]
            for position in range(len(known), len(known) + output):
                answer.append(int(draw(np.array(answer[-1:]), np.array([position]))[0]))
            known += [rng.randrange(32_000) for _ in range(output // 3)] if thinking else answer[1:]
            at += rng.uniform(20, 120)
    return sorted(asked, key=lambda turn: turn.seconds)


def hit_rate(asked: Sequence[Any], groups: Sequence[CacheGroup], store_tokens: int) -> float:
    store = store_tokens // PAGE * sum(group.page_bytes for group in groups)
    config = SchedulerConfig(PAGE, groups, CHUNK, ROWS, store=store > 0)
    return TraceReplay(asked, config, CostModel(), lambda done, rate: None, store).run().hit_rate


def divided(shape: Shape, device: int, host: int) -> list[CacheGroup]:
    """The groups, with full pages for so many tokens in each tier."""

    def sized(nbytes: int, host_bytes: int) -> list[CacheGroup]:
        return list(size(shape.remembered(), nbytes, PAGE, ROWS, 131_072, host_bytes, CHUNK).groups)

    nbytes = _least(lambda n: sized(n, 0)[0].device_pages * PAGE >= device)
    host_bytes = _least(lambda n: sized(nbytes, n)[0].host_pages * PAGE >= host) if host else 0
    return sized(nbytes, host_bytes)


def _least(enough: Callable[[int], bool]) -> int:
    low, high = 1 << 20, 1 << 44
    while high - low > 1 << 16:
        middle = (low + high) // 2
        try:
            low, high = (low, middle) if enough(middle) else (middle, high)
        except ValueError:  # too little for the model
            low = middle
    return high


def full_alone(groups: Sequence[CacheGroup], length: int | None) -> list[CacheGroup]:
    """Full attention with the same pages; or with room for the same number of contexts of so many tokens."""
    full = groups[0]
    device, host = full.device_pages, full.host_pages
    if length is not None:
        columns = -(-length // PAGE)
        device = min(device, columns * contexts(groups, "device", length, PAGE))
        host = min(host, columns * contexts(groups, "host", length, PAGE))
    return [CacheGroup("full", "full", max(device, 1), host, page_bytes=full.page_bytes)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows", description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="real requests, as `sapwood serve --record-trace` writes them")
    parser.add_argument("--limit", type=int, default=2500, help="requests of the trace")
    asked = parser.parse_args(arguments)
    traffic: dict[str, tuple[list[Any], Any]] = {
        "chats": (list(chats(False)), SHORT_SIZES),
        "thinking": (list(chats(True)), SHORT_SIZES),
    }
    if asked.trace:
        traffic["trace"] = list(read_trace(asked.trace, asked.limit)), LONG_SIZES
    sys.stdout.write(
        f"{'shape':12} {'traffic':9} {'device':>9} {'host':>9} {'store':>10} {'windows':>8} {'same pages':>11} "
        f"{'same contexts':>14}\n"
    )
    for name, shape in SHAPES.items():
        for kind, (requests, sizes) in traffic.items():
            length = int(np.mean([one.length + one.output for one in requests]))
            for device, host, store in sizes:
                groups = divided(shape, device, host)
                rates = [
                    hit_rate(requests, some, store)
                    for some in (groups, full_alone(groups, None), full_alone(groups, length))
                ]
                sys.stdout.write(
                    f"{name:12} {kind:9} {device:9,} {host:9,} {store:10,} {rates[0]:8.3f} {rates[1]:11.3f} "
                    f"{rates[2]:14.3f}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
