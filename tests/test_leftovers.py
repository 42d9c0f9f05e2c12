"""What a test may not leave behind is found, and what a library does for itself is not held against it."""

from __future__ import annotations

import logging
import os

import pytest

from sapwood.scheduler import policy

from . import leftovers


def test_what_a_test_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered name, a variable that was changed or is ours, a logger's handler.

    Mutation: `since` looks at the names of `before` alone.
    """
    before = leftovers.now()
    monkeypatch.setitem(policy.POLICIES, "left", policy.POLICIES["fcfs"])
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("SAPWOOD_LEFT", "1")
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    named = [line.split(":")[0] for line in leftovers.since(before)]
    assert named == [
        "environment variable HOME",
        "environment variable SAPWOOD_LEFT",
        "logger root",
        "sapwood.scheduler.policy.POLICIES",
    ]


def test_what_a_library_sets_for_itself_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake sets its log level when it is first opened.

    Mutation: every new variable counts.
    """
    before = leftovers.now()
    assert "GLOG_of_a_library" not in os.environ
    monkeypatch.setenv("GLOG_of_a_library", "3")
    assert leftovers.since(before) == []
