"""What commands of the simulator share: a number on the command line, and the line that shows progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from `low` up."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} up, got {text!r}")
        return int(text)

    return number


def show_progress(line: str) -> None:
    """On a terminal, in the place of the line before."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()
