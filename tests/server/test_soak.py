"""Clients that come, leave, stall and send nonsense: everything ends, and nothing is left."""

from __future__ import annotations

import pytest

from .soak import soak

pytestmark = [pytest.mark.server, pytest.mark.attack, pytest.mark.xdist_group("soak")]


def test_a_short_soak():
    """48 clients for a few seconds, with failing steps.

    Mutation: `EngineJob.close` drops nothing; `_Reading` does not look for the client; `_drop` forgets those that
    compile.
    """
    told = soak(8.0, 48, 1)
    assert sum(told["requests"].values()) > 100 and told["failed steps"] > 0


@pytest.mark.long
def test_a_long_soak():
    """256 clients for five minutes.

    Mutation: as above, and whatever leaks slowly.
    """
    told = soak(300.0, 256, 7)
    assert sum(told["requests"].values()) > 5000
