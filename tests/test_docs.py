"""The documentation and the files: each that is named is there, and each that is there is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCE = sorted((ROOT / "src/sapwood").rglob("*.py"))
FILES = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
NAMED = re.compile(r"(?<![\w/*.])((?:\w+/)*\w+\.py)\b")


def is_there(name: str) -> bool:
    return any(f"/{path.relative_to(ROOT)}".endswith(f"/{name}") for path in FILES)


@pytest.mark.parametrize("page", [*PAGES, *SOURCE], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    """In the documentation, and in comments of the source.

    Mutation: a file is moved, and a page keeps its old name.
    """
    assert [name for name in NAMED.findall(page.read_text()) if not is_there(name)] == []


def test_every_file_is_named():
    """Somebody who looks for the place of a change finds all there are in the documentation.

    Mutation: a file is added, and nobody says what lives there.
    """
    named = {name for page in PAGES for name in NAMED.findall(page.read_text())}
    modules = [path for path in SOURCE if not path.stem.startswith("__")]
    without = [path for path in modules if not any(f"/{path}".endswith(f"/{name}") for name in named)]
    assert [str(path.relative_to(ROOT)) for path in without] == []


def test_what_is_named_is_told_apart():
    """`files.md` names folders too, so that no two files go by the same name there.

    Mutation: `is_there` looks at the last part alone.
    """
    assert is_there("models/sizing.py") and is_there("sizing.py") and not is_there("loading/sizing.py")


def test_codes_in_names_of_tests_are_explained():
    """Each is in tests/README.md, once, and each that is there has a test.

    Mutation: a test has a code that nobody can look up.
    """
    told = re.findall(r"^\| ([A-Z]\d\d) \|", (ROOT / "tests/README.md").read_text(), re.M)
    names = [name for path in FILES for name in re.findall(r"def test_((?:[A-Za-z]\d\d_)+)", path.read_text())]
    used = {code.upper() for name in names for code in name.strip("_").split("_")}
    assert len(told) == len(set(told)) and set(told) == used
