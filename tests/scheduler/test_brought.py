"""Where a request's cached tokens came from, and why it had no more: `loaded`, `fetched` and `found` of its end, and
`Scheduler.brought` and `Scheduler.found` before that."""

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


@each_layout
def test_what_admission_found_is_what_the_statistics_count(layout):
    """The reason and the position come with the end of a request; the position is the first token that differs, whether
    or not the tokens before it could be copied.

    Mutation: `Book.end` leaves `found` out; `Matcher.found` always gives the match's start as the position.
    """
    shop = StoreRun(layout)
    first = shop.serve("ann", PROMPT).found
    parted = [*PROMPT[: 4 * PAGE + 2], 7_777, *PROMPT[4 * PAGE + 3 :]]
    other = shop.serve("bob", parted).found
    again = shop.serve("cid", PROMPT).found
    assert [first.reason, first.position, first.cached] == ["empty", 0, 0]
    assert again.reason == "hit" and again.cached == shop.ended["cid"].cached > 0
    assert other.reason in ("diverged", "no_snapshot", "window_gone")
    if other.reason == "diverged":
        assert other.position == 4 * PAGE + 2
    counted = shop.scheduler.stats()["cache"]["reasons"]
    assert sum(counted.values()) == 3 and counted["empty"] == counted["hit"] == counted[other.reason] == 1
    shop.close()


def test_what_is_only_promised_counts_as_found_later():
    """A neighbour that comes while the same prompt is being computed has its pages, and admission found none of them
    real. Before its admission nothing is known.

    Mutation: `Matcher.found` counts promised pages as real; `Scheduler.found` looks at the lease alone.
    """
    shop = StoreRun()
    shop.submit("ann", PROMPT)
    shop.submit("bob", PROMPT)
    assert shop.scheduler.found("bob") is None and shop.scheduler.found("nobody") is None
    shop.see_to("ann", "bob")
    assert shop.ended["bob"].cached and not shop.ended["bob"].found.cached
    shop.close()
