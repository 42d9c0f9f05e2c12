"""The documentation and the files: each that is named is there, and each that is there is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
SOURCE = sorted((ROOT / "src/sapwood").rglob("*.py"))
MODULES = [path for path in SOURCE if not path.stem.startswith("__")]
FILES = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
NAMED = re.compile(r"(?<![\w/*.])((?:\w+/)*\w+\.py)\b")
IN_A_FILE = re.compile(r"`((?:\w+/)*\w+\.py)` \((`\w+`(?:(?:,| and) `\w+`)*)")
MAX_LINE = 120
GENERATED = {"architectures.md"}  # by tests/models/sweep.py

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def named_by(name: str) -> list[Path]:
    return [path for path in FILES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]


def is_there(name: str) -> bool:
    return bool(named_by(name))


def prose(text: str) -> str:
    """The text without code and drawings."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, line by line, without heads."""
    lines = re.findall(r"^\| (.*) \|$", text, re.M)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    heads = {at - 1 for at, row in enumerate(cells) if set("".join(row)) <= set("- |")}
    return [row for at, row in enumerate(cells) if at not in heads and at - 1 not in heads]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page.read_text()), re.M):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*PAGES, *SOURCE], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    """In the documentation, and in comments of the source.

    Mutation: a file is moved, and a page keeps its old name.
    """
    assert [name for name in NAMED.findall(page.read_text()) if not is_there(name)] == []


def test_every_module_has_a_place_in_the_tables_of_files():
    """docs/files.md names each module once, by enough of its path that no other file of the source is meant.

    Mutation: a file is added, and no table says what lives there; or a name fits two modules.
    """
    placed = [name for row in rows((DOCS / "files.md").read_text()) for name in NAMED.findall(row[0])]
    meant = {name: [path for path in MODULES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")] for name in placed}
    assert {name: paths for name, paths in meant.items() if len(paths) != 1} == {}
    modules = [paths[0] for paths in meant.values()]
    assert len(placed) == len(set(placed)) and len(modules) == len(set(modules))
    assert [str(path.relative_to(ROOT)) for path in MODULES if path not in modules] == []


def test_names_of_files_are_matched_with_their_folders():
    """`files.md` names folders too, so that no two files go by the same name there.

    Mutation: `is_there` looks at the last part alone.
    """
    assert is_there("models/sizing.py") and is_there("sizing.py") and not is_there("loading/sizing.py")


@each_page
def test_names_beside_a_file_are_in_it(page):
    """Where a page says `file.py` (`name`), the file has that name.

    Mutation: a function is renamed, and docs/change.md keeps its old name.
    """
    missing = []
    for file, names in IN_A_FILE.findall(prose(page.read_text())):
        texts = [path.read_text() for path in named_by(file)]
        missing += [
            f"{name} in {file}"
            for name in re.findall(r"`(\w+)`", names)
            if not any(re.search(rf"\b_?{name}\b", text) for text in texts)
        ]
    assert missing == []


def test_every_word_of_the_glossary_has_its_file():
    """Words stand once, each with one or two sentences and a file that is there.

    Mutation: the file of a word goes, and its row stays; or a word has no file.
    """
    words = rows((DOCS / "glossary.md").read_text())
    assert len(words) > 100 and {len(row) for row in words} == {3}
    assert len({row[0] for row in words}) == len(words)
    assert [row[0] for row in words if not NAMED.findall(row[2]) or not row[1].endswith(".")] == []


def test_every_change_has_a_file_or_says_that_there_is_none():
    """docs/change.md answers each of its rows by a file, and a change without a home says so.

    Mutation: a row's file goes, and nothing takes its place.
    """
    changes = rows((DOCS / "change.md").read_text())
    assert len(changes) > 50 and {len(row) for row in changes} <= {2, 3}
    assert [row[0] for row in changes if not re.search(r"`[\w/]+/[\w.]*`", row[1])] == []


@each_page
def test_links_lead_somewhere(page):
    """To files of the repository, and to headings that are on their page.

    Mutation: a page or a heading is renamed, and a link keeps its old name.
    """
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@each_page
def test_lines_of_prose_are_short(page):
    """Tables and drawings may be wider, but for those of the README.

    Mutation: a paragraph is not wrapped.
    """
    text = page.read_text()
    if page.name == "README.md":
        lines = text.splitlines()
    elif page.name in GENERATED:
        lines = []
    else:
        lines = [line for line in prose(text).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_LINE] == []


def test_codes_in_names_of_tests_are_explained():
    """Each is in tests/README.md, once, and each that is there has a test.

    Mutation: a test has a code that is not in the list.
    """
    codes = re.findall(r"^\| ([A-Z]\d\d) \|", (ROOT / "tests/README.md").read_text(), re.M)
    names = [name for path in FILES for name in re.findall(r"def test_((?:[A-Za-z]\d\d_)+)", path.read_text())]
    used = {code.upper() for name in names for code in name.strip("_").split("_")}
    assert len(codes) == len(set(codes)) and set(codes) == used
