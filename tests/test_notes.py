"""What tests say of the code is said of the code as it is: the names in their "Mutation:" notes exist."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src/sapwood"
WORDS = {*dir(builtins), *keyword.kwlist, "self"}


def code_of(path: Path) -> ast.Module:
    """A file without its docstrings: what only prose speaks of does not exist."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return tree


def names_in(tree: ast.AST) -> set[str]:
    """Everything that has a name in a piece of code, and the words of its strings: keys, slots, URIs."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\w+", node.value))
    return found


class Code:
    """What there is to speak of: names anywhere, and the names in each class."""

    def __init__(self, source: list[ast.Module], tests: list[ast.Module]) -> None:
        self.names = WORDS.union(*map(names_in, source))
        self.inside: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        for tree in tests:  # a note may be about a helper of the tests
            self.names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in [node for tree in source for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            self.inside.setdefault(node.name, set()).update(names_in(node))
            self.bases.setdefault(node.name, []).extend(base.id for base in node.bases if isinstance(base, ast.Name))

    def has(self, owner: str, name: str) -> bool:
        """Whether a class, or one it derives from, speaks of a name."""
        return name in self.inside.get(owner, ()) or any(self.has(base, name) for base in self.bases.get(owner, ()))

    def knows(self, dotted: str) -> bool:
        first, *rest = dotted.split(".")
        if first in self.inside and rest and not self.has(first, rest[0]):
            return False
        return {first, *rest} <= self.names

    def stale(self, note: str) -> list[str]:
        """The names in the backticks of a note that do not exist. Commands and paths are none."""
        spans = [span for span in re.findall(r"`([^`]+)`", note) if "/" not in span and not span.startswith("make ")]
        return [
            dotted for span in spans for dotted in re.findall(r"[^\W\d]\w*(?:\.\w+)*", span) if not self.knows(dotted)
        ]


FILES = sorted(TESTS.rglob("*.py"))
CODE = Code([code_of(path) for path in sorted(SOURCE.rglob("*.py"))], [code_of(path) for path in FILES])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_names_in_mutation_notes_exist(path):
    """Whoever tries the mutation of a note finds what it names: each name in backticks is one of the source, or a
    helper of the tests, and what is said to be in a class is there.

    Mutation: `StepCommits.rewind` is renamed and no note with it.
    """
    gone = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            note = (ast.get_docstring(node) or "").partition("Mutation:")[2]
            if stale := CODE.stale(note):
                gone[node.name] = stale
    assert not gone


def test_names_that_do_not_exist_are_found(tmp_path):
    """Single names, methods of a class that another class has, and names in expressions; not commands and paths.

    Mutation: `Code.knows` does not look into the class; `code_of` leaves docstrings in.
    """
    source = ast.parse("class A:\n    def f(self): self.x = 1\nclass B(A):\n    def g(self, y): return {'key': y}\n")
    code = Code([source], [ast.parse("def helper(): pass")])
    assert (
        code.stale("`A.f`, `B.f`, `B.x`, `f(y) < 0`, `helper`, `key`, `not len(y)`, `make test`, `build/a`, plain")
        == []
    )
    assert code.stale("`A.g` or `B.h`, `z`, `f(y) < w`; `C.f`") == ["A.g", "B.h", "z", "w", "C.f"]
    (tmp_path / "a.py").write_text('def f():\n    """Of prose."""\n    return "value"\n')
    assert names_in(code_of(tmp_path / "a.py")) == {"f", "value"}
