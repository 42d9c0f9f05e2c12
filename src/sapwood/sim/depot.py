"""A store for digests: what several content-checking executors share, with the faults a store has."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]


class Depot:
    """Values by (group, chain hash). A value is what the page or snapshot held, and after how many tokens."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, bytes], tuple[Values, int]] = {}

    def put(self, group: str, key: bytes, values: Values, depth: int) -> bool:
        """Keep a value. False if the key stands for other content already: then a key is wrong."""
        known = self.values.get((group, key))
        self.values[group, key] = (values, depth)
        return known is None or bool(np.array_equal(known[0], values))

    def get(self, group: str, key: bytes) -> tuple[Values, int] | None:
        return self.values.get((group, key))

    def there(self, group: str, keys: list[bytes]) -> npt.NDArray[Any]:
        return np.array([(group, key) in self.values for key in keys], np.bool_)

    def lose(self, rng: random.Random, share: float) -> None:
        """The store makes room, or loses something: a request that counts on it finds it missing."""
        for key in [key for key in self.values if rng.random() < share]:
            del self.values[key]
