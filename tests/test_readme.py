"""The examples of README and documentation run as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.S)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_and_prints_what_it_says(example, capsys) -> None:
    """A newcomer who pastes an example sees the lines under it. Fails if a public name, or what is cached, changes."""
    exec(compile(example, "library.md", "exec"), {})
    printed = ["# " + line for line in capsys.readouterr().out.splitlines()]
    assert printed and printed == example.strip().splitlines()[-len(printed) :]


def test_the_loop_holds_with_host_memory(capsys) -> None:
    """Somebody who gives the scheduler's example host pages gets plans without rows, and the same answers.

    Mutation: the loop answers `StepDone` to every plan; or answers no save.
    """
    (loop,) = [example for example in EXAMPLES if "next_plan" in example]
    names: dict[str, Any] = {}
    exec(compile(loop, "library.md", "exec"), names)
    plain = capsys.readouterr().out
    hosted = loop.replace("device_pages=4096", "device_pages=4096, host_pages=64")
    exec(compile(hosted, "library.md", "exec"), names)
    assert capsys.readouterr().out == plain and hosted != loop
    stats = names["scheduler"].stats()
    assert stats["cache"]["transfers"]["saves"] and not stats["transfers"] and not names["plan"].batch.ids


def test_there_are_examples() -> None:
    """Mutation: the page is renamed, and nothing is run."""
    assert len(EXAMPLES) >= 2


def test_commands_exist() -> None:
    """Every `make` target that a newcomer reads of is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md"))
    targets = set(re.findall(r"(?:^|`|: )make ([a-z-]+)", pages, re.M))
    assert "test" in targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} does not exist"
