"""The README's example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_example_runs_and_prints_what_it_says(capsys) -> None:
    """A newcomer who pastes the example sees the line under it. Fails if a facade name or the hit changes."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert "# " + printed == example.strip().splitlines()[-1]


def test_commands_exist() -> None:
    """Every `make` target the README names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert "test" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} does not exist"
