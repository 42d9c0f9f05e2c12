"""The wake-up file: no ring is lost, and none stays behind (case S15)."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sapwood.store.threads import Wakeup

TIMES = 10**5
SLOW = 5000  # of these, the first


@pytest.fixture(params=["eventfd", "pipe"])
def wakeup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wakeup:
    """Of either kind: where the system has no eventfd it is a pipe."""
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return Wakeup()


@pytest.mark.attack
def test_s15_no_ring_is_lost(wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread posts 10^5 numbers, and rings before and after each; the other clears, looks, and sleeps if there is
    nothing new. At first they take turns in the middle of `ring` and `clear`, and no number is posted before the last
    one was seen; then they go on as fast as they can. The sleeper is always woken, and in the end the bell is silent.

    Mutation: `ring` or `clear` does nothing if a flag says that somebody has rung already, or nobody has.
    """

    def giving_way(call: Callable[..., Any]) -> Callable[..., Any]:
        def later(*words: Any) -> Any:
            if posted < SLOW:
                time.sleep(0)
            return call(*words)

        return later

    monkeypatch.setattr(os, "read", giving_way(os.read))
    monkeypatch.setattr(os, "write", giving_way(os.write))
    posted = seen = 0
    lost = False

    def ringing() -> None:
        nonlocal posted
        while posted < TIMES and not lost:
            wakeup.ring()  # also when there is no news
            if posted == seen or posted > SLOW:
                posted += 1
                wakeup.ring()

    sleeper = select.poll()
    sleeper.register(wakeup, select.POLLIN)
    thread = threading.Thread(target=ringing)
    thread.start()
    while seen < TIMES and not lost:
        wakeup.clear()
        lost = seen == posted and not sleeper.poll(5000)
        seen = posted
    thread.join()
    assert not lost, f"after {seen} of {TIMES}"
    wakeup.clear()
    assert not sleeper.poll(0), "nobody rings any more"


def test_s15_a_bell_that_nobody_clears(wakeup: Wakeup) -> None:
    """Ringing never waits, however often; one `clear` is enough for all of it, and one more does not wait either.

    Mutation: the file blocks; `clear` reads less than all there is.
    """
    for _ in range(TIMES):
        wakeup.ring()
    sleeper = select.poll()
    sleeper.register(wakeup, select.POLLIN)
    assert sleeper.poll(0)
    wakeup.clear()
    assert not sleeper.poll(0)
    wakeup.clear()
