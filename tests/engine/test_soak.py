"""Two engines, one store, random traffic and trouble (see soak.py): no wrong byte, limits held, everybody ends once."""

from __future__ import annotations

import pytest

from .soak import soak

pytestmark = [pytest.mark.attack, pytest.mark.server]


def test_soak_for_a_while() -> None:
    """A short one in every run of the tests, and it does what it is for: things are fetched, lost and refused.

    Mutation: `Tiers._over` tells of a job that is held; `StoreFetches.fetch_done` lands one page too many.
    """
    told, run = soak(0, 7, rounds=400)
    counts = run.counts
    ended = sum(n for what, n in counts.items() if what.startswith("ended"))
    assert ended == counts["requests"] > 0, told
    assert counts["pages_fetched"] and counts["loads"] and counts["backups"] and counts["failed"], told


@pytest.mark.long
def test_soak_for_ten_minutes() -> None:
    """Ten minutes, a fresh seed every minute."""
    for seed in range(1000, 1010):
        told, run = soak(60, seed)
        assert run.counts["pages_fetched"] and run.counts["tokens cached"], told
