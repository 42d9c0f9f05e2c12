"""The compiled build is this package: the same modules, and tested as what it is said to be."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapwood import cache

from .scheduler.test_determinism import story

ROOT = Path(__file__).parents[1]


def outside(package: str) -> set[str]:
    """The modules of a package that setup.py leaves as they are."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if statement.targets[0].id == "OUTSIDE":
                names: set[str] = ast.literal_eval(statement.value)[package]
                return names
    raise AssertionError("setup.py does not say what is not compiled")


@pytest.mark.parametrize("package", ["cache", "scheduler"])
def test_what_is_tested_is_what_was_asked_for(package):
    """`make test-compiled` imports compiled rooms, `make test` none.

    Mutation: `make test-compiled` forgets PYTHONPATH; or setup.py compiles nothing.
    """
    asked = os.environ.get("SAPWOOD_COMPILE") == "1"
    assert asked == cache.COMPILED
    names = {path.stem for path in (ROOT / "src/sapwood" / package).glob("*.py")}
    assert outside(package) < names, "setup.py names a module that is not there"
    for name in names - {"__init__"}:
        module = importlib.import_module(f"sapwood.{package}.{name}")
        assert module.__file__ is not None
        assert module.__file__.endswith(".py") != (asked and name not in outside(package)), module.__file__


@pytest.mark.server
@pytest.mark.parametrize("layout", ["full", "full+2windows+state"])
def test_s06_this_build_plans_as_the_source_does(layout):
    """Plans, ends and events are the same, byte for byte, whatever is compiled.

    Mutation: in `build/compiled` alone, something is done in another order.
    """
    code = "from sapwood import cache; from tests.scheduler.test_determinism import story; "
    code += f"print(cache.COMPILED, story({layout!r}, True))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    source = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    assert source.stdout.split() == ["False", story(layout, True)]
