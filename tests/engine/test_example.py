"""examples/tiers.py runs, and what it prints is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tiers.py"


@pytest.mark.server
def test_t10_the_example_finds_after_a_restart_what_it_had_computed(tmp_path):
    """A newcomer runs the example twice on one folder: only its very first life computes the prompt, and every life
    says the same.

    Mutation: `EngineLoop.close` does not write back what is left.
    """
    lines = []
    for _ in range(2):
        command = [sys.executable, str(EXAMPLE), str(tmp_path / "store")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        lines += done.stdout.splitlines()
    said = [4950, 9900, 19800]
    cold = f"first life: 100 tokens asked, 0 cached, 100 computed: {said}"
    warm = f"life: 100 tokens asked, 96 cached, 4 computed: {said}"
    assert lines == [cold, f"second {warm}", f"first {warm}", f"second {warm}"]
