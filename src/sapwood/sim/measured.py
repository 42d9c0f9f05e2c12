"""What a step costs on a machine that was measured: `sapwood bench calibrate` writes what is read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Curve = tuple[tuple[int, float], ...]  # (how many, seconds), rising


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
        tokens of one row, by as much as was measured, whoever runs beside them. `shared`: of what they read, the share
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
