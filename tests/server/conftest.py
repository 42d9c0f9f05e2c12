"""Servers that tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from .kit import Running, paced_flags


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """A server with the paced engine, a tokenizer, host memory and adapters; no keys."""
    running = Running(*paced_flags(host_pages=2000, max_loras=2))
    try:
        yield running.ready()
    finally:
        running.kill()


@pytest.fixture
def logging_kept() -> Iterator[None]:
    """For a test that sets up logging, or calls a command that does: afterwards it is as it was."""
    root, ours = logging.getLogger(), logging.getLogger("sapwood")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
