"""The memory that requests hold, over all connections of a server: bodies that come or wait for their answers, answers
that are collected or that nobody takes. There is a budget for all of it. Where it is spent, somebody gives up what he
holds: of those that hold half the average or more, the one that began last. So a small request is served beside a flood
of large ones, and of many large ones some are served to their end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from typing import Protocol

log = logging.getLogger(__name__)
_TRIM_BYTES = 64 << 20  # bytes let go of, after which the system gets back what the C library keeps of them,
_TRIM_DELAY_SECONDS = 1.0  # seconds later: they are not free yet
_LOG_INTERVAL_SECONDS = 60.0  # seconds between two lines of the log


class BytesHolder(Protocol):
    """Whoever holds something. `held`: bytes, written by `Inflight` alone."""

    held: int

    def give_up(self) -> None:
        """Let go of everything, for others: with 503 where an answer has not begun."""


class Inflight:
    """`most`: the budget, in bytes. One event loop calls all of it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._holders: dict[BytesHolder, None] = {}  # in the order in which they began
        self._let_go = 0  # since memory was last given back to the system
        self._told = -_LOG_INTERVAL_SECONDS

    def hold(self, holder: BytesHolder, bytes: int) -> bool:
        """`holder` now holds so much. False if that is too much, and this one has to give it up: it counts no more."""
        more = bytes - holder.held
        if not more:
            return True
        holder.held = bytes
        self.used += more
        if more < 0:
            self._lets_go(-more)
        if not bytes:
            del self._holders[holder]
        elif bytes == more:
            self._holders[holder] = None
        if self.used <= self.most:
            return True
        self._tell()
        kept = True
        while self.used > self.most:
            least = self.used / len(self._holders) / 2
            one = next(each for each in reversed(self._holders) if each.held >= least)
            self.used -= one.held
            self._lets_go(one.held)
            one.held = 0
            del self._holders[one]
            if one is holder:
                kept = False
            else:
                one.give_up()
        return kept

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= _LOG_INTERVAL_SECONDS:
            self._told = now
            log.warning(
                "requests hold more than %d MiB together: some are refused with 503 (--inflight-bytes)", self.most >> 20
            )

    def _lets_go(self, bytes: int) -> None:
        self._let_go += bytes
        if self._let_go >= _TRIM_BYTES:
            self._let_go = 0
            loop = asyncio.get_running_loop()
            loop.call_later(_TRIM_DELAY_SECONDS, loop.run_in_executor, None, give_back)


def give_back() -> None:
    """What was freed goes to the system: glibc keeps pieces as large as a body comes in until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
