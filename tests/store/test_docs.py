"""The example of docs/store.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs" / "store.md"


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mutation: `unbroken_run` is one too short, or a public name of the example changes."""
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    exec(compile(example.replace("/tmp/sapwood-store", str(tmp_path / "store")), "store.md", "exec"), {})
    assert capsys.readouterr().out.split() == re.findall(r"print\(.*# (.*)", example)[0].split()
