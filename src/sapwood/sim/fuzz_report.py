"""What an attack of the fuzzer came to: counts, and one digest of every plan and every end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from sapwood.scheduler import Ended

from .executor import batch_bytes


@dataclass(frozen=True)
class FuzzReport:
    """What happened, by number. `digest` is of every plan and every end."""

    layout: str
    seed: int
    digest: str
    steps: int  # plans with rows
    requests: int
    refused: int
    ended: dict[str, int]  # by reason
    retractions: int
    failed_steps: int
    evictions: int  # of namespaces, flushes included
    transfers: int
    cached: int
    computed: int
    recomputed: int
    events: int
    backups: int = 0
    fetches: int = 0  # begun
    fetched: int = 0  # pages from the store that were of use
    joined: int = 0  # requests that waited for what another had asked for
    shortened: int = 0  # fetches cut to what host could take
    partial: int = 0  # fetches of which a part came
    lost: int = 0  # ... and nothing that was of use
    late: int = 0  # deadlines that passed
    stays: int = 0  # what was fetched, held on host for one that waits
    again: int = 0  # backups of what the store had not kept

    @classmethod
    def of_all(cls, reports: Sequence[FuzzReport]) -> FuzzReport:
        """One report of several attacks on one layout."""
        words = ("layout", "seed", "digest", "ended")
        counts = {
            field.name: sum(getattr(report, field.name) for report in reports)
            for field in fields(cls)
            if field.name not in words
        }
        reasons = dict.fromkeys(reason for report in reports for reason in report.ended)
        ended = {reason: sum(report.ended.get(reason, 0) for report in reports) for reason in reasons}
        digest = hashlib.sha256(" ".join(report.digest for report in reports).encode()).hexdigest()
        return replace(reports[0], digest=digest, ended=ended, **counts)

    def __str__(self) -> str:
        ends = ", ".join(f"{n} {reason}" for reason, n in sorted(self.ended.items()))
        return (
            f"{self.digest[:16]}  {self.layout}, seed {self.seed}: {self.steps} steps ({self.failed_steps} failed), "
            f"{self.requests} requests ({ends}; {self.refused} refused), {self.retractions} retractions, "
            f"{self.evictions} evictions of namespaces, {self.transfers} transfers, {self.events} events, "
            f"{self.backups} backups ({self.again} again), "
            f"{self.fetches} fetches ({self.fetched} pages; {self.joined} joined, "
            f"{self.shortened} shortened, {self.partial} in part, {self.lost} lost), {self.stays} stays, "
            f"{self.late} deadlines missed, "
            f"prompt tokens {self.cached} cached, {self.computed} computed, {self.recomputed} again"
        )


class PlanDigest:
    """A digest of every byte of all plans, and of all ends."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._sha256 = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()

    def add_end(self, end: Ended) -> None:
        self._sha256.update(repr(end).encode())

    def add_plan(self, plan: Any) -> None:
        add = self._sha256.update
        add(f"plan {plan.step} {plan.wake_in} {plan.copies!r} {plan.ended!r}".encode())
        for operation in [*plan.loads, *plan.saves]:
            add(f"{operation.op} {operation.start_page} {operation.namespace!r}".encode())
            for name, (sources, targets) in operation.pages.items():
                add(name.encode() + sources.tobytes() + targets.tobytes())
        for operation in [*plan.lookups, *plan.fetches, *plan.backups]:
            add(f"{operation.op} {operation.start_page} {operation.namespace!r}".encode() + b"".join(operation.hashes))
        for operation in [*plan.fetches, *plan.backups]:
            for name, pages in operation.pages.items():
                add(name.encode() + pages.tobytes())
        if plan.empty:
            return
        batch = plan.batch
        add(batch_bytes(batch))
        ends = np.asarray(batch.starts) + np.asarray(batch.lengths)
        for name in sorted(plan.tables):
            table = plan.tables[name]
            for slot, end in zip(np.asarray(batch.slots).tolist(), ends.tolist(), strict=True):
                columns = min(table.shape[1], -(-end // self._page_size))
                add(np.ascontiguousarray(table[slot][:columns]).tobytes())
