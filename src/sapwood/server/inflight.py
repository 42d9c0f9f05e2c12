"""The memory that requests hold, over all connections of a server: bodies that arrive or wait for their answers, and
answers that are collected or that no client reads. All of it has one budget. Where the budget is exceeded, a connection
gives up what it holds: of those that hold half the average or more, the one that began last. So a small request is
served beside a flood of large ones, and of many large ones some are served to their end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from typing import Protocol

log = logging.getLogger(__name__)
_TRIM_BYTES = 64 << 20  # released, after which the C library is asked to return freed memory to the system
_TRIM_DELAY_SECONDS = 1.0  # until the memory of released bytes is really free
_LOG_INTERVAL_SECONDS = 60.0


class BytesHolder(Protocol):
    """A connection that holds memory. `held`: in bytes, written by `Inflight` alone."""

    held: int

    def give_up(self) -> None:
        """Release everything for other connections: with 503 where an answer has not begun."""


class Inflight:
    """The budget: `most` bytes. One event loop calls all of it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._holders: dict[BytesHolder, None] = {}  # in the order in which they began
        self._released = 0  # bytes, since memory last went back to the system
        self._logged = -_LOG_INTERVAL_SECONDS

    def hold(self, holder: BytesHolder, bytes: int) -> bool:
        """`holder` now holds so many bytes. False if that is too much and `holder` itself has to give them up: they are
        not counted any more."""
        more = bytes - holder.held
        if not more:
            return True
        holder.held = bytes
        self.used += more
        if more < 0:
            self._release(-more)
        if not bytes:
            del self._holders[holder]
        elif bytes == more:
            self._holders[holder] = None
        if self.used <= self.most:
            return True
        self._log()
        kept = True
        while self.used > self.most:
            least = self.used / len(self._holders) / 2
            one = next(each for each in reversed(self._holders) if each.held >= least)
            self.used -= one.held
            self._release(one.held)
            one.held = 0
            del self._holders[one]
            if one is holder:
                kept = False
            else:
                one.give_up()
        return kept

    def _log(self) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_INTERVAL_SECONDS:
            self._logged = now
            log.warning(
                "requests hold more than %d MiB together: some are refused with 503 (--inflight-bytes)", self.most >> 20
            )

    def _release(self, bytes: int) -> None:
        self._released += bytes
        if self._released >= _TRIM_BYTES:
            self._released = 0
            loop = asyncio.get_running_loop()
            loop.call_later(_TRIM_DELAY_SECONDS, loop.run_in_executor, None, give_back)


def give_back() -> None:
    """Return freed memory to the system: until it is asked, glibc keeps pieces of the size in which bodies arrive."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
