"""Every causal architecture of transformers is served as transformers says, or refused; and the documentation has what
the sweep finds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from .sweep import SAID, markdown, sweep
from .sweep_case import Result
from .sweep_configs import cases, types

PAGE = Path(__file__).parents[2] / "docs/architectures.md"
ENOUGH = 135


def told(page: str) -> dict[str, str]:
    """By architecture: what the table says has become of it."""
    return dict(re.findall(r"^\| (.+?) \| (served|refused|not tried|wrong|crash|hang) \|", page, re.M))


def test_f21_the_documentation_has_every_architecture():
    """Mutation: a type is left out of the table; one that is wrong gets in."""
    table = told(PAGE.read_text())
    assert list(table) == list(cases())
    assert set(table.values()) <= {"served", "refused", "not tried"}
    assert sum(table[kind] == "served" for kind in types()) >= ENOUGH


def test_the_table_says_what_users_want_to_know():
    """Mutation: `markdown` leaves the engine's words as they are."""
    some = [
        Result("llama", "llama", "equal", "", {"gathers": False}),
        Result("falcon", "falcon", "equal", "", {"gathers": True}),
        Result("bart", "bart", "refused", "bart cannot be served yet: it has an encoder", {}),
        Result(
            "gpt_neo", "gpt_neo", "refused", "gpt_neo cannot be served: its answers would not be those of x (y)", {}
        ),
    ]
    lines = markdown(some).splitlines()[-4:]
    assert lines[0] == "| llama | served |  |" and "slow" in lines[1]
    assert lines[2] == "| bart | refused | it has an encoder |" and lines[3].endswith("than transformers has |")


@pytest.mark.long
def test_f21_every_architecture_is_served_rightly_or_refused():
    """Mutation: any of those in test_parity.py; a guard of model.py is left out."""
    results = [result for result, _ in sweep(list(cases().values()), jobs=2, limit=900)]
    counts = Counter(result.outcome for result in results if result.name in types())
    bad = [(result.name, result.why) for result in results if result.outcome in ("wrong", "crash", "hang")]
    assert not bad and counts["equal"] >= ENOUGH, (counts, bad)
    assert told(PAGE.read_text()) == {result.name: SAID.get(result.outcome, result.outcome) for result in results}
