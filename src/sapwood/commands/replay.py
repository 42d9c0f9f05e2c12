"""`sapwood replay`: a recorded trace through schedulers of several sizes, one line each."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence

from sapwood.sim import MeasuredCost
from sapwood.sim.trace import Replayed, read_trace, replay_trace, unlimited_rate

from .terminal import at_least, show_progress


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    try:
        every = itertools.product(args.device_pages, args.host_pages, args.store_pages)
        sizes = [(device, host, store) for device, host, store in every if host or not store]
        if not sizes:
            raise ValueError("--store-pages needs --host-pages, through which pages come")
        asked = read_trace(args.trace, args.limit)
        cost = None if args.cost is None else MeasuredCost.load(args.cost)
    except (OSError, ValueError) as error:
        message = f"{args.trace}: {error.strerror}" if isinstance(error, OSError) else error
        sys.stderr.write(f"sapwood replay: {message}\n")
        return 2
    gc.disable()  # nothing here is in cycles, and full collections cost more than the scheduler
    mean, blocks = sum(one.length for one in asked) / len(asked), sum(len(one.blocks) for one in asked)
    sys.stdout.write(
        f"{len(asked)} requests of {mean:.0f} tokens in the mean, {blocks} blocks; "
        f"a cache without limits hits {unlimited_rate(asked):.3f} of them\n{_HEAD}\n"
    )
    for device, host, store in sizes:
        begin = time.monotonic()
        what = "+".join(str(pages) for pages in (device, host, store) if pages)

        def watch(done: int, rate: float, what: str = what, begin: float = begin) -> None:
            bar = ("#" * (30 * done // len(asked))).ljust(30, ".")
            spent = time.monotonic() - begin
            show_progress(f"{what} pages [{bar}] {done}/{len(asked)} requests, hit rate {rate:.3f}, {spent:.0f} s")

        done = replay_trace(
            asked,
            device,
            host,
            args.page_size,
            args.max_num_batched_tokens,
            args.max_num_seqs,
            args.cache_policy,
            model=cost,
            watch=watch,
            store_pages=store,
        )
        show_progress("")
        sys.stdout.write(f"{_line(done)}  {time.monotonic() - begin:6.0f}\n")
        sys.stdout.flush()
    return 0


_HEAD = (
    "  device    host   store  hit rate  by blocks  from host     fetched   computed   again  refused  retracted"
    "    queue mean/p99 s    first token mean/p99 s   hours   took s"
)


def _line(done: Replayed) -> str:
    return (
        f"{done.device_pages:8d}{done.host_pages:8d}{done.store_pages:8d}{done.hit_rate:10.3f}{done.block_rate:11.3f}{done.host_rate:11.3f}"
        f"{done.store_rate:12.3f}"
        f"{done.computed_tokens:11d}{done.recomputed_tokens:8d}{done.refused:9d}{done.retractions:11d}"
        f"{done.queueing[0]:11.2f} /{done.queueing[1]:8.2f}{done.first_token[0]:15.2f} /{done.first_token[1]:8.2f}"
        f"{done.seconds / 3600:8.2f}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sapwood replay",
        description="Runs a trace (JSON lines with timestamp, input_length, output_length and hash_ids of 512-token "
        "blocks) through the real scheduler, with a cost model of an H200 and an 8B model instead of a GPU. Prints one "
        "line for each combination of sizes.",
    )
    made.add_argument("trace", help="the trace, a .jsonl file")
    made.add_argument(
        "--device-pages",
        type=at_least(1),
        nargs="+",
        default=[65536],
        metavar="N",
        help="on the device (default 65536)",
    )
    made.add_argument(
        "--host-pages", type=at_least(0), nargs="+", default=[0], metavar="N", help="in host memory (default 0)"
    )
    made.add_argument(
        "--store-pages", type=at_least(0), nargs="+", default=[0], metavar="N", help="in a store behind it (default 0)"
    )
    made.add_argument("--page-size", "--block-size", type=at_least(1), default=16, metavar="N", help="tokens (16)")
    made.add_argument("--max-num-batched-tokens", type=at_least(1), default=8192, metavar="N", help="a step (8192)")
    made.add_argument("--max-num-seqs", type=at_least(1), default=256, metavar="N", help="live requests (256)")
    made.add_argument("--cache-policy", choices=["fcfs", "prefix"], default="fcfs", help="who comes in next (fcfs)")
    made.add_argument(
        "--cost", metavar="FILE", help="step times of a machine, by `sapwood bench calibrate --output-json FILE`"
    )
    made.add_argument("--limit", type=at_least(1), metavar="N", help="the first N requests only")
    return made
