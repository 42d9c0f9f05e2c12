"""Where a request's cached tokens came from: `Ended.loaded`, `Ended.fetched`, and `Scheduler.brought` before that."""

from __future__ import annotations

import pytest

from .driver import each_layout
from .store_run import PAGE, StoreRun
from .test_host import Hosted
from .test_store import PROMPT, fetching, stocked


@each_layout
def test_what_the_store_had(layout):
    """All that was cached was fetched and loaded for it; a second request finds it on the device.

    Mutation: `Prefetch.fetch_done` notes nothing; `Ended` is made without `fetched`.
    """
    run = StoreRun(layout, depot=stocked(layout))
    end = run.serve("ann", PROMPT)
    assert end.cached == 6 * PAGE and end.fetched == end.loaded > 0
    if "full" in layout:
        assert end.loaded == end.cached
    again = run.serve("bob", PROMPT)
    assert again.cached == end.cached and (again.loaded, again.fetched) == (0, 0)
    run.close()


def test_it_is_known_with_the_first_token():
    """`brought` says it while the request runs; of one that is not there, nothing.

    Mutation: `brought` looks for `loaded` before the load is over.
    """
    run = StoreRun(depot=stocked())
    fetching(run)
    run.land("fetch")
    run.turn()
    run.land("load")
    run.turn()
    assert run.scheduler.brought("ann") == (24, 24)
    assert run.scheduler.brought("nobody") == (0, 0)
    run.close()


def test_what_host_had():
    """Lost on the device and loaded from host: loaded, and not fetched.

    Mutation: `Book.admit` counts from 0 instead of from what the device has.
    """
    hosted = Hosted("full")
    hosted.run("first", 1)
    for seed in range(2, 5):
        hosted.run(f"other{seed}", seed)
    hosted.run("again", 1)
    end = hosted.ended["again"]
    assert end.cached >= 36 and 0 < end.loaded <= end.cached and end.fetched == 0
    hosted.run("third", 1)
    assert hosted.ended["third"].loaded == 0 and hosted.ended["third"].cached >= 36


@pytest.mark.parametrize("ok", [True, False])
def test_a_load_that_fails_brings_nothing(ok):
    """It is computed: nothing is cached, and nothing was loaded.

    Mutation: `landed` keeps `loaded` of a load that failed.
    """
    hosted = Hosted("full")
    hosted.run("first", 1)
    for seed in range(2, 5):
        hosted.run(f"other{seed}", seed)
    hosted.submit("again", 1)
    hosted.step(land=False)
    hosted.tell(hosted.landed(ok))
    hosted.idle()
    end = hosted.ended["again"]
    assert (end.loaded > 0) is ok and end.loaded <= end.cached
