"""Histograms that take a thousand values at once, and the bounds of vLLM's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

# vLLM's, so that its dashboards and ours can be laid over each other.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
GAP = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP = (1.0, *(float(1 << power) for power in range(3, 15)))  # tokens
# What happens below them, where a quick server spends its time.
QUICK_GAP = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.015)
QUICK_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to `most`."""
    steps = (digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


class Histogram:
    """Counts by upper bound; a value that equals a bound is below it."""

    def __init__(self, *bounds: Sequence[float]) -> None:
        self.bounds = sorted({bound for some in bounds for bound in some})
        self.sum = 0.0
        self._edges = np.array(self.bounds)
        self._counts = np.zeros(len(self.bounds) + 1, np.int64)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: Sequence[float]) -> None:
        if values:
            these = np.asarray(values, np.float64)
            self._counts += np.bincount(self._edges.searchsorted(these), minlength=len(self._counts))
            self.sum += float(these.sum())

    def buckets(self, bounds: Sequence[float] | None = None) -> list[tuple[str, float]]:
        """How many values are up to each bound, for all bounds or for some of them; and how many there are."""
        upto = self._counts.cumsum().tolist()
        shown = self.bounds if bounds is None else bounds
        found = [(str(bound), upto[bisect_left(self.bounds, bound)]) for bound in shown]
        return [*found, ("+Inf", upto[-1])]
