"""What callers and backends of a store agree on: jobs and their reports, the backend's few verbs, and the errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .threads import InterpreterYield
from .values import Item

Kind = Literal["exists", "get", "put"]

MISSING: Final = -1  # in `Got.size`: the backend has no such key
FAILED: Final = -2  # the backend could not tell, now


class StoreError(RuntimeError):
    """A store that cannot be used, and why. Never holds credentials."""


class JobDone(NamedTuple):
    """The outcome of a job. There is one for every job, by its deadline.

    `ok[group][i]`: page i of this group arrived whole (get), is stored (put), or seems to be there (exists, which is
    a hint). `asked[group][i]`: the job had a part there. Pages that are ok are final: the store does not write there
    any more. If `held`, the backend has not returned: the other pages stay in use until `Released` comes for this job.
    `failed` is empty, or "timeout", "error" or "closed"; pages that were done before are ok all the same.
    """

    job: int
    kind: Kind
    ok: dict[str, NDArray[np.bool_]]
    asked: dict[str, NDArray[np.bool_]]
    failed: str
    held: bool

    def run(self) -> int:
        """How many pages, from the first on, are ok in every group that has a part there."""
        return unbroken_run(self.ok, self.asked)


class Released(NamedTuple):
    """The backend has returned from a job that was reported as `held`: its memory is the caller's again."""

    job: int


def unbroken_run(ok: Mapping[str, ArrayLike], asked: Mapping[str, ArrayLike]) -> int:
    """The length of the run of pages, from the first on, that arrived in every group.

    In `asked`, anything but 0 means that the group has a part at that page, so page ids will do. After a *get* this is
    the number of pages of a store hit; the answers of `exists` do not count.
    """
    run: int | None = None
    for group, wanted in asked.items():
        lost = np.asarray(wanted).astype(np.bool_) & ~np.asarray(ok[group], np.bool_)
        here = int(lost.argmax()) if lost.any() else len(lost)
        run = here if run is None else min(run, here)
    return run or 0


def timeout_for(nbytes: int, seconds: float = 1.0, rate: float = 100e6) -> float:
    """A deadline that scales with size: `seconds` to answer at all, and `nbytes` at `rate` bytes a second."""
    return seconds + nbytes / rate


class Got(NamedTuple):
    """What a backend found for item `at`: the header it read and the bytes of page it put in place.

    `size` is MISSING or FAILED if no value was read.
    """

    at: int
    head: bytes | bytearray | memoryview
    size: int


class PutResult(NamedTuple):
    """Whether item `at` is stored now: `lost` is empty, or "full" or "error"."""

    at: int
    lost: str


class Backend(ABC):
    """A place for values. Its calls block, run on the store's threads, several at once, and may raise anything.

    `get` and `put` are generators: what they yield is final, the store may stop iterating, and then they clean up what
    is under way. Pages are read and written where they lie.
    """

    workers = 2  # threads that a store gives it
    part_pages = 32  # a job is given to it in parts of at most so many pages ...
    part_bytes = 8 << 20  # ... and bytes, if a page is not larger
    small_bytes = 0  # with pages below this size it gets one part at a time: handling them is mostly Python

    @cached_property
    def gate(self) -> InterpreterYield:
        """A backend whose calls do much in Python gives way here as often as it can: the store does so after every
        page of `get` and `put`."""
        return InterpreterYield()

    def register(self, group: str, array: NDArray[np.uint8]) -> None:  # noqa: B027
        """Host memory that pages will be read from and written to."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]: ...

    @abstractmethod
    def get(self, items: Sequence[Item]) -> Iterator[Got]: ...

    @abstractmethod
    def put(self, items: Sequence[Item]) -> Iterator[PutResult]: ...

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove damaged values, by key. Whole namespaces are never removed: keys do not show them."""

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:  # noqa: B027
        """Called once, after the last call has returned."""
