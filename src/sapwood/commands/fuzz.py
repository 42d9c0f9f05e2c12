"""`sapwood fuzz`: random attacks on the scheduler. A failure prints the command that repeats it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

from sapwood.sim import LAYOUTS
from sapwood.sim.fuzz import fuzz

from .terminal import at_least, show_progress


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    layouts = list(LAYOUTS) if args.layout == "all" else [args.layout]
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    runs = steps = 0
    for seed in _seeds(args.seed, args.count, end):
        for layout in layouts:
            if runs and end is not None and time.monotonic() >= end:
                break
            show_progress(f"{runs} runs, {steps} steps; {layout}, seed {seed}")
            try:
                report = fuzz(seed, args.steps, layout)
            except Exception:
                show_progress("")
                again = f"sapwood fuzz --seed {seed} --steps {args.steps} --layout {shlex.quote(layout)}"
                sys.stdout.write(f"{traceback.format_exc()}\nFAILED: repeat it with\n  {again}\n")
                return 1
            runs, steps = runs + 1, steps + report.steps
            show_progress("")
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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sapwood fuzz",
        description="Random traffic and faults against the scheduler, everything checked after every step. A seed "
        "prints the same digest of all plans on every machine.",
        epilog=f"layouts: {', '.join(LAYOUTS)}",
    )
    made.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="the first seed (default 0)")
    made.add_argument("--steps", type=at_least(1), default=300, metavar="M", help="rounds of traffic (default 300)")
    made.add_argument(
        "--layout", choices=[*LAYOUTS, "all"], default="all", metavar="L", help="one of those below, or all (default)"
    )
    made.add_argument("--count", type=at_least(1), metavar="K", help="how many seeds, from --seed on (default 1)")
    made.add_argument("--minutes", type=_minutes, metavar="X", help="go on with fresh seeds for so long")
    return made


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of minutes, got {text!r}")
    return minutes
