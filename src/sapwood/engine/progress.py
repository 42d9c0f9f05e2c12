"""What a user sees while an engine works: bars, and how long each part of a start took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

log = logging.getLogger(__name__)


@contextmanager
def bar(total: int, what: str, wanted: bool, delay: float = 0.0) -> Iterator[Any]:
    """A progress bar, or None where tqdm is not there or no bar is wanted. `delay`: shown only if it takes that many
    seconds."""
    make: Any = None
    if wanted:
        with suppress(ImportError):
            from tqdm.auto import tqdm

            make = tqdm
    if make is None:
        yield None
        return
    with make(total=total, desc=what, dynamic_ncols=True, delay=delay) as shown:
        yield shown


class Phases(dict[str, float]):
    """Seconds of the parts of a start, by name, logged when the start is over."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """What runs in here is this part, or more of it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - begin

    def over(self) -> None:
        """The start is over: log its parts."""
        self["total"] = time.perf_counter() - self._began
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in self.items() if name != "total" and spent >= 0.05)
        log.info("ready after %.1f s%s", self["total"], f" ({parts})" if parts else "")
