"""Numbers on the command line: each with its bounds, which its help and its error name."""

from __future__ import annotations

import argparse

MOST_TOKENS = 1 << 24  # of a prompt or an answer; what a model can read is checked when it is there


def number(parser: argparse.ArgumentParser, name: str, default: int | None, low: int, high: int, what: str) -> None:
    """A whole number from `low` to `high`. Where the default is None, `what` says what that means."""

    def checked(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r:.60}")
        return value

    help = what if default is None else f"{what} (default {default})"
    parser.add_argument(name, type=checked, default=default, metavar="N", help=help)
