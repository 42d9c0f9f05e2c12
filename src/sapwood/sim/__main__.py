"""`python -m sapwood.sim`: the wind tunnel from the command line. A failure prints the command that repeats it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from .fuzz import fuzz
from .layouts import LAYOUTS


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
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
    return parser


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
