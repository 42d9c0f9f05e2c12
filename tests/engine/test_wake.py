"""A resting engine is woken by everything that is new, whatever else rings meanwhile (case S15)."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine import EngineLoop
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig, StepDone


class Seven:
    """Whatever is asked, the answer is 7."""

    def execute(self, plan):
        if not plan.batch.ids:
            return []
        return [StepDone(plan.step, np.full(int(plan.batch.samples.sum()), 7, np.int32))]


def test_s15_a_submit_to_a_resting_engine_is_planned_at_once(monkeypatch):
    """A door thread leaves 1,000 requests one by one and wakes the engine, which rests between them; a store's thread
    rings meanwhile, as it does for every part of a job, also in the middle of what the engine does. Each request is
    planned at once, not when the rest would have ended by itself.

    Mutation: `Wakeup` has a flag that says whether it was rung.
    """
    loop = EngineLoop(Scheduler(SchedulerConfig(4, [CacheGroup("full", "full", 40)], 64, 4)), Seven())
    read = os.read

    def giving_way(*words):
        time.sleep(0)
        return read(*words)

    monkeypatch.setattr(os, "read", giving_way)
    inbox, ended = deque(), threading.Semaphore(0)
    over = threading.Event()

    def engine():
        while not over.is_set():
            while inbox:
                loop.submit([inbox.popleft()])
            for _ in loop.step().ended:
                ended.release()
            loop.rest(15)

    def store():
        while not over.is_set():
            loop.tiers._wakeup.ring()
            time.sleep(0)

    threads = [threading.Thread(target=engine), threading.Thread(target=store)]
    for thread in threads:
        thread.start()
    try:
        for n in range(1000):
            inbox.append(RequestSpec(f"r{n}", [n, 1, 2], 1))
            loop.wake()
            assert ended.acquire(timeout=240), f"request {n} was left lying"
    finally:
        over.set()
        loop.wake()
        for thread in threads:
            thread.join()
    loop.close()
