"""Machines that a test leaves open, because it is over where it is, are closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import machine


@pytest.fixture(autouse=True)
def machines_closed() -> Iterator[None]:
    yield
    while machine.OPEN:
        left = machine.OPEN.pop()
        if left.store is not None and hasattr(left, "backend"):
            left.go_on()
        left.tiers.close()
