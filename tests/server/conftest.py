"""Servers that tests share."""

from __future__ import annotations

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
