"""What has run for years: every number that a scheduler and its cache count up, set as if they had got so far."""

from __future__ import annotations

from sapwood.scheduler import Scheduler

# What 31, 32 and 53 bits (a double) hold. Nothing can count as far as 63 bits: a million a second take 300,000 years.
LIMITS = (2**31, 2**32, 2**53)


def age(scheduler: Scheduler, at: int) -> None:
    """Nobody has come yet: steps, ticks, operations and all else that only ever grows begin at `at`."""
    book, cache = scheduler._book, scheduler.cache
    tree, steps, decoding = cache._tree, cache._steps, book.decoding
    assert not book.requests and not steps.flights
    scheduler._arrivals = at
    book.step = steps.last = steps.newest = at
    decoding.tick = decoding.planned = decoding.generation = at
    decoding.standing = decoding.crossing[-at % decoding.page_size]
    book.prefetch.ticks = at
    book.prefetch.owed._numbers = at
    tree.clock.now = tree.seq = tree.version = at
    cache._transfers.next_op = at
    cache._host_pins._last = at
    for counts in (book.counts, book.prefetch.counts, book.prefetch.owed.counts, scheduler._outcome.counts):
        counts.update(dict.fromkeys(counts, at))
    for counts in (steps.counts, cache._transfers.counts, cache._checkpoints.counts, cache._statistics.tally):
        counts.update(dict.fromkeys(counts, at))
