"""`python -m sapwood.sim`: the wind tunnel from the command line. A failure prints the command that repeats it."""

from __future__ import annotations

import argparse
import gc
import itertools
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .fuzz import fuzz
from .layouts import LAYOUTS
from .measured import MeasuredCost
from .trace import Replayed, read_trace, replay_trace, unlimited_rate


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return _replay(args) if args.command == "replay" else _fuzz(args)


def _replay(args: argparse.Namespace) -> int:
    """A trace through schedulers of several sizes, one line each."""
    try:
        every = itertools.product(args.device_pages, args.host_pages, args.store_pages)
        sizes = [(device, host, store) for device, host, store in every if host or not store]
        if not sizes:
            raise ValueError("--store-pages needs --host-pages, through which pages come")
        asked = read_trace(args.trace, args.limit)
        cost = None if args.cost is None else MeasuredCost.load(args.cost)
    except (OSError, ValueError) as error:
        said = f"{args.trace}: {error.strerror}" if isinstance(error, OSError) else error
        sys.stderr.write(f"python -m sapwood.sim replay: {said}\n")
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
            _progress(f"{what} pages [{bar}] {done}/{len(asked)} requests, hit rate {rate:.3f}, {spent:.0f} s")

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
        _progress("")
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


def _fuzz(args: argparse.Namespace) -> int:
    layouts = list(LAYOUTS) if args.layout == "all" else [args.layout]
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    runs = steps = 0
    for seed in _seeds(args.seed, args.count, end):
        for layout in layouts:
            if runs and end is not None and time.monotonic() >= end:
                break
            _progress(f"{runs} runs, {steps} steps; {layout}, seed {seed}")
            try:
                report = fuzz(seed, args.steps, layout)
            except Exception:
                _progress("")
                again = f"python -m sapwood.sim fuzz --seed {seed} --steps {args.steps} --layout {shlex.quote(layout)}"
                sys.stdout.write(f"{traceback.format_exc()}\nFAILED: repeat it with\n  {again}\n")
                return 1
            runs, steps = runs + 1, steps + report.steps
            _progress("")
            sys.stdout.write(f"{report}\n")
            sys.stdout.flush()
    return 0


def _seeds(first: int, count: int | None, end: float | None) -> Iterator[int]:
    """As many seeds as asked for; with a time limit alone, until it is over; else one."""
    seed = first
    most = count if count is not None else 1 if end is None else None
    while (most is None or seed < first + most) and (end is None or seed == first or time.monotonic() < end):
        yield seed
        seed += 1


def _progress(line: str) -> None:
    """The one line that says where we are, for somebody who watches."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sapwood.sim", description="Sapwood's wind tunnel.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "fuzz",
        help="random traffic and faults from one seed, everything checked after every step",
        description="Random traffic and faults against the scheduler, everything checked after every step. A seed "
        "prints the same digest of all plans on every machine.",
        epilog=f"layouts: {', '.join(LAYOUTS)}",
    )
    command.add_argument("--seed", type=_number(0), default=0, metavar="N", help="the first seed (default 0)")
    command.add_argument("--steps", type=_number(1), default=300, metavar="M", help="rounds of traffic (default 300)")
    command.add_argument(
        "--layout", choices=[*LAYOUTS, "all"], default="all", metavar="L", help="one of those below, or all (default)"
    )
    command.add_argument("--count", type=_number(1), metavar="K", help="how many seeds, from --seed on (default 1)")
    command.add_argument("--minutes", type=_minutes, metavar="X", help="go on with fresh seeds for so long")
    _add_replay(commands)
    return parser


def _add_replay(commands: Any) -> None:
    command = commands.add_parser(
        "replay",
        help="a real trace through the scheduler: hit rates and waiting times for caches of any size",
        description="Runs a trace (JSON lines with timestamp, input_length, output_length and hash_ids of 512-token "
        "blocks) through the real scheduler, with a cost model of an H200 and an 8B model instead of a GPU. Prints one "
        "line for each combination of sizes.",
    )
    command.add_argument("trace", help="the trace, a .jsonl file")
    command.add_argument(
        "--device-pages", type=_number(1), nargs="+", default=[65536], metavar="N", help="on the device (default 65536)"
    )
    command.add_argument(
        "--host-pages", type=_number(0), nargs="+", default=[0], metavar="N", help="in host memory (default 0)"
    )
    command.add_argument(
        "--store-pages", type=_number(0), nargs="+", default=[0], metavar="N", help="in a store behind it (default 0)"
    )
    command.add_argument("--page-size", "--block-size", type=_number(1), default=16, metavar="N", help="tokens (16)")
    command.add_argument("--max-num-batched-tokens", type=_number(1), default=8192, metavar="N", help="a step (8192)")
    command.add_argument("--max-num-seqs", type=_number(1), default=256, metavar="N", help="live requests (256)")
    command.add_argument("--cache-policy", choices=["fcfs", "prefix"], default="fcfs", help="who comes in next (fcfs)")
    command.add_argument(
        "--cost", metavar="FILE", help="step times of a machine, by `sapwood bench calibrate --output-json FILE`"
    )
    command.add_argument("--limit", type=_number(1), metavar="N", help="the first N requests only")


def _number(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} up, got {text!r}")
        return int(text)

    return number


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of minutes, got {text!r}")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
