"""What a step costs on a real machine, by arithmetic or as measured; and an executor that spends that time instead of
computing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.scheduler import StepDone

Curve = tuple[tuple[int, float], ...]  # (how many, seconds), rising


class Cost(Protocol):
    """What a step costs."""

    @property
    def kv_bytes(self) -> float:
        """Of a token."""

    def seconds(self, starts: npt.NDArray[Any], lengths: npt.NDArray[Any], shared: float = 0.0) -> float:
        """How long a batch takes whose rows compute [start, start + length). `shared`: of what rows of one token read,
        the share that another of them reads too, and has read first."""


@dataclass(frozen=True)
class CostModel:
    """A machine and a model, by a roofline: a step takes as long as its matmuls or its memory traffic, whichever is
    more, and a fixed time to be launched. The defaults are an H200 and an 8B model in bf16."""

    flops: float = 795e12  # a second, bf16 matmul
    bandwidth: float = 4.2e12  # bytes a second, device memory
    weights_bytes: float = 16.4e9
    bytes_per_weight: float = 2.0
    kv_bytes: float = 147e3  # a token
    overhead: float = 0.5e-3  # seconds a step

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "weights_bytes", "bytes_per_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)!r}")
        for name in ("kv_bytes", "overhead"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")

    def seconds(self, starts: npt.NDArray[Any], lengths: npt.NDArray[Any], shared: float = 0.0) -> float:
        """How long a batch takes whose rows compute [start, start + length); whatever they share."""
        tokens = int(lengths.sum())
        if not tokens:
            return 0.0
        matmul = tokens * 2 * (self.weights_bytes / self.bytes_per_weight) / self.flops
        context = int(starts.sum(dtype=np.int64)) + 2 * tokens  # what is read, and what is written
        memory = (self.weights_bytes + context * self.kv_bytes) / self.bandwidth
        return self.overhead + max(matmul, memory)


@dataclass(frozen=True)
class MeasuredCost:
    """A machine and a model, by what steps have taken.

    tokens    seconds of a step with so many tokens in one row, without what its attention reads
    rows      seconds of a step with so many rows of one token, without what their attention reads; one behind the other
    key       seconds for each token that a row of one token reads
    again     the same for a token that another row of the step reads too: the device has it at hand
    pair      seconds for each token before a longer row that each token of the row reads
    own       seconds for each token of a longer row that each later one of the row reads
    kv_bytes  of a token
    padded    numbers of tokens that steps are filled up to, rising: one of fewer takes as long as one of the next of
              these. Larger steps than the last are as large as they are
    """

    tokens: Curve
    rows: Curve
    key: float
    pair: float
    own: float
    kv_bytes: float
    padded: tuple[int, ...] = ()
    again: float | None = None  # as `key`

    def __post_init__(self) -> None:
        for name in ("tokens", "rows"):
            curve = getattr(self, name)
            if not curve or any(n < 1 or not seconds > 0 for n, seconds in curve) or list(curve) != sorted(curve):
                raise ValueError(f"{name} must be pairs of a number and its seconds, rising, got {curve!r:.60}")
        for name in ("key", "pair", "own", "kv_bytes", "again"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if list(self.padded) != sorted(self.padded) or any(n < 1 for n in self.padded):
            raise ValueError(f"padded must be numbers of tokens, rising, got {self.padded!r:.60}")

    @classmethod
    def load(cls, path: str | Path) -> MeasuredCost:
        """From the file that `sapwood bench calibrate --output-json` has written. ValueError if it is none."""
        try:
            cost = json.loads(Path(path).read_bytes())["cost"]
            read: dict[str, Any] = {name: float(cost[name]) for name in ("key", "pair", "own", "kv_bytes")}
            for name in ("tokens", "rows"):
                read[name] = tuple((int(n), float(seconds)) for n, seconds in cost[name])
            read["padded"] = tuple(int(n) for n in cost.get("padded", ()))
            read["again"] = None if cost.get("again") is None else float(cost["again"])
            return cls(**read)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} must be what `sapwood bench calibrate` has written ({problem})") from None

    def seconds(self, starts: npt.NDArray[Any], lengths: npt.NDArray[Any], shared: float = 0.0) -> float:
        """How long a batch takes whose rows compute [start, start + length). Rows of one token cost more than as many
        tokens of one row, by as much as was measured, whatever runs beside them. `shared`: of what they read, the share
        that is read again."""
        tokens = int(lengths.sum())
        if not tokens:
            return 0.0
        single = lengths == 1
        rows = int(np.count_nonzero(single))
        taken = self._filled(self.tokens, tokens)
        if rows:
            taken += self._filled(self.rows, rows) - self._filled(self.tokens, rows)
        begins, chunks = starts[~single].astype(np.float64), lengths[~single].astype(np.float64)
        key = self.key if self.again is None else (1 - shared) * self.key + shared * self.again
        taken += key * float(starts[single].sum(dtype=np.int64))
        return taken + self.pair * float(begins @ chunks) + self.own * float(chunks @ chunks) / 2

    def _filled(self, curve: Curve, n: int) -> float:
        return _at(curve, next((size for size in self.padded if n <= size), n))


def _at(curve: Curve, n: int) -> float:
    """Between two points on the line that joins them; beyond the last, as much more as there is more."""
    counts, seconds = zip(*curve, strict=True)
    more: float = max(1.0, n / counts[-1])
    return more * float(np.interp(n, counts, seconds))


class SimulatedExecutor:
    """Executes plans by counting: time by the cost model, tokens drawn from the seed. Keeps no contents, and is fast.

    What a request generates depends on the seed, its last token and its position alone, so it is the same under every
    schedule.
    """

    def __init__(
        self, model: Cost | None = None, seed: int = 0, vocabulary: int = 32_000, page_size: int | None = None
    ) -> None:
        """`page_size`: that of the plans, where the cost model wants to know which pages rows share."""
        if vocabulary < 1:
            raise ValueError(f"vocabulary must be 1 or more, got {vocabulary}")
        self.model: Cost = CostModel() if model is None else model
        self.vocabulary = vocabulary
        self._page_size = page_size
        self.seconds = 0.0
        self.steps = 0
        self.prefill_tokens = 0  # in rows of two tokens or more
        self.decode_tokens = 0  # in rows of one
        self._seed = np.uint64(seed % 2**64)
        self._last = np.zeros(0, np.int32)  # by slot: the token it sampled last, for plans that do not know it

    def execute(self, plan: Any) -> list[StepDone]:
        """Spend the time a plan takes. Returns its StepDone; nothing for a plan without rows."""
        if plan.empty or not len(plan.batch.ids):
            return []
        batch = plan.batch
        starts, lengths = np.asarray(batch.starts), np.asarray(batch.lengths)
        shared = (self._shared(plan, starts, lengths),) if self._page_size else ()
        self.seconds += self.model.seconds(starts, lengths, *shared)
        self.steps += 1
        single = int(np.count_nonzero(lengths == 1))
        self.decode_tokens += single
        self.prefill_tokens += int(lengths.sum()) - single
        rows = np.asarray(batch.samples).nonzero()[0]
        slots = np.asarray(batch.slots)[rows]
        last = np.asarray(batch.tokens)[lengths.cumsum()[rows] - 1]
        if len(slots):
            if int(slots.max()) >= len(self._last):
                self._last = np.concatenate([self._last, np.zeros(int(slots.max()) + 1, np.int32)])
            last = np.where(last < 0, self._last[slots], last)
        sampled = self._draw(last, (starts + lengths)[rows])
        self._last[slots] = sampled
        return [StepDone(plan.step, sampled)]

    def _shared(self, plan: Any, starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> float:
        """Of the pages that rows of one token read, the share that is there a second time."""
        table = plan.tables.get("full")
        single = (lengths == 1).nonzero()[0]
        if table is None or len(single) < 2:
            return 0.0
        read = starts[single] // (self._page_size or 1)  # whole pages
        pages = table[np.asarray(plan.batch.slots)[single], : max(1, int(read.max()))]
        pages = pages[np.arange(pages.shape[1]) < read[:, None]]
        if not len(pages):
            return 0.0
        seen = np.zeros(int(pages.max()) + 1, bool)
        seen[pages] = True
        return 1.0 - np.count_nonzero(seen) / len(pages)

    def _draw(self, last: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Splitmix64 of (seed, last token, position), as a token."""
        mixed = (last.astype(np.uint64) << np.uint64(32)) ^ ends.astype(np.uint64) ^ self._seed
        mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        tokens: npt.NDArray[np.int32] = (mixed % np.uint64(self.vocabulary)).astype(np.int32)
        return tokens
