"""The gate: whoever is at work shuts it and never waits; the others stop, but not for ever."""

from __future__ import annotations

import threading
import time

from sapwood.store import InterpreterYield


def passing(gate: InterpreterYield, n: int = 1) -> list[threading.Thread]:
    """Threads that give way once."""
    threads = [threading.Thread(target=gate.give_way, daemon=True) for _ in range(n)]
    for thread in threads:
        thread.start()
    return threads


def over(threads: list[threading.Thread], seconds: float) -> int:
    """How many of them are through by then."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return sum(not thread.is_alive() for thread in threads)


def test_an_open_gate_stops_nobody():
    gate = InterpreterYield(patience=60)
    assert over(passing(gate, 3), 5) == 3


def test_a_shut_gate_stops_all_until_it_is_opened():
    gate = InterpreterYield(patience=60)
    with gate:
        threads = passing(gate, 3)
        assert over(threads, 0.1) == 0
    assert over(threads, 5) == 3
    assert over(passing(gate), 5) == 1


def test_nobody_is_stopped_for_longer_than_the_patience():
    gate = InterpreterYield(patience=0.05)
    with gate:
        assert over(passing(gate, 3), 5) == 3
    assert not gate._stopped  # and they are not remembered


def test_an_error_opens_it():
    gate = InterpreterYield(patience=60)
    try:
        with gate:
            threads = passing(gate)
            raise KeyError
    except KeyError:
        assert over(threads, 5) == 1


def test_opened_and_shut_all_the_time_nobody_is_forgotten():
    gate = InterpreterYield(patience=60)
    rounds = [0] * 3

    def work(me: int) -> None:
        for _ in range(2000):
            gate.give_way()
            rounds[me] += 1

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(3)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        with gate:
            time.sleep(0)
    assert rounds == [2000] * 3
