"""examples/embed.py runs, is short, and what it prints is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "embed.py"


def test_the_example_runs_and_shares_the_prefix():
    """A newcomer runs the example: one of the three prompts is computed whole, the others compute their own tails,
    though all come at once; five tokens each.

    Mutation: `PlanBuilder._chunk` publishes nothing when it makes the plan (each would compute the system prompt).
    """
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    lines = re.findall(r"(\w+): (\d+) prompt tokens, (\d+) cached, (\d+) computed; (\d+) new", done.stdout)
    assert len(lines) == len(done.stdout.splitlines()) == 3
    told = {name: tuple(map(int, numbers)) for name, *numbers in lines}
    assert told == {"ann": (131, 0, 131, 5), "bob": (130, 128, 2, 5), "cyd": (168, 128, 40, 5)}


def test_the_example_is_short():
    """It is what one can read in a minute: the whole interface in about 40 lines.

    Mutation: the example grows.
    """
    assert len(EXAMPLE.read_text().splitlines()) <= 50
