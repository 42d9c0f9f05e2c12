"""Figures of a run: as a table to read, and as JSON to compare a later run with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sapwood import __version__

Figures = Mapping[str, Mapping[str, float]]  # row -> column -> number


class BenchReport(NamedTuple):
    """What a bench has found. `forms` says how the numbers of a column are written, such as "{:.1f} ms"."""

    bench: str
    forms: Mapping[str, str]  # column -> form, from left to right
    figures: Figures
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = {}  # besides, in the JSON alone
    settings: Mapping[str, Any] = {}  # what was asked for: flags and sizes
    then: Sequence[BenchReport] = ()  # tables below, by what they are of


def as_text(report: BenchReport, older: Figures | None = None) -> str:
    """The table, with the ratio to an older run behind every column that both have."""
    rows = report.figures
    columns = [["", *rows]]
    for column, form in report.forms.items():
        columns.append([column, *(form.format(row[column]) if column in row else "" for row in rows.values())])
        before = {name: row[column] for name, row in (older or {}).items() if column in row}
        if before:
            columns.append(["/ older", *(_ratio(row.get(column), before.get(name)) for name, row in rows.items())])
    widths = [max(map(len, cells)) for cells in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    below = "".join(f"\n{table.bench}\n{as_text(table)}" for table in report.then)
    return "\n".join([*lines, *([""] if report.notes else []), *report.notes]) + "\n" + below


def _ratio(now: float | None, before: float | None) -> str:
    return f"{now / before:.2f} x" if now is not None and before else ""


def as_json(report: BenchReport) -> dict[str, Any]:
    return {
        "bench": report.bench,
        "sapwood": __version__,
        "settings": dict(report.settings),
        "figures": {name: dict(row) for name, row in report.figures.items()},
        "notes": list(report.notes),
        **({"tables": {table.bench: table.figures for table in report.then}} if report.then else {}),
        **report.more,
    }


def read_json(path: str, bench: str) -> dict[str, Any]:
    """An older run of the same bench. ValueError if it is none."""
    try:
        read = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"--compare: {path} cannot be read as JSON ({problem})") from None
    if not isinstance(read, dict) or read.get("bench") != bench or not _are_figures(read.get("figures")):
        raise ValueError(f"--compare: {path} must be what `sapwood bench {bench} --output-json` has written")
    return read


def _are_figures(read: Any) -> bool:
    return isinstance(read, dict) and all(
        isinstance(row, dict) and all(isinstance(number, int | float) for number in row.values())
        for row in read.values()
    )


def differences(report: BenchReport, older: Mapping[str, Any]) -> list[str]:
    """Settings in which an older run was another one, a line each: such ratios compare two things."""
    ours, theirs = dict(report.settings), older.get("settings")
    theirs = theirs if isinstance(theirs, dict) else {}
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return [f"{name}: {ours.get(name)} now, {theirs.get(name)} in the older run" for name in names]
