"""The compiled build is this package: the same modules, and tested as what it is said to be."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

from sapwood import cache

ROOT = Path(__file__).parents[2]


def rooms() -> set[str]:
    """The modules that setup.py leaves as they are."""
    told = ast.parse((ROOT / "setup.py").read_text())
    (outside,) = [
        node.value
        for node in told.body
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["OUTSIDE"]
    ]
    names: set[str] = ast.literal_eval(outside)
    return names


def test_what_is_tested_is_what_was_asked_for():
    """`make test-compiled` imports compiled rooms, `make test` none.

    Mutation: `make test-compiled` forgets PYTHONPATH; or setup.py compiles nothing.
    """
    asked = os.environ.get("SAPWOOD_COMPILE") == "1"
    assert asked == cache.COMPILED
    names = {path.stem for path in (ROOT / "src/sapwood/cache").glob("*.py")}
    assert rooms() < names, "setup.py names a module that is not there"
    for name in names - {"__init__"}:
        module = importlib.import_module(f"sapwood.cache.{name}")
        assert module.__file__ is not None
        assert module.__file__.endswith(".py") != (asked and name not in rooms()), module.__file__
