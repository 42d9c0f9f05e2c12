"""The self-check of a start, on a GPU: no architecture is refused by chance. What it costs is in `make gpu-bench`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

from sapwood import LLM
from sapwood.engine.models import self_check

from ..models.gpu import wide
from ..models.zoo import CONFIGS
from .kit import must, one_of_many, say
from .same import FEW

SEEDS = (1, 2)


def checked(names: Sequence[str] = ()) -> None:
    """Of what is tolerated, each uses less than two thirds, with any weights, with graphs."""
    flags: dict[str, Any] = {"max_model_len": 512, "device_cache": "512MiB", "max_num_seqs": 8, **FEW}
    for name in names or CONFIGS:
        with one_of_many(f"self-check, {name}"):
            used = [_used(name, seed, flags) for seed in SEEDS]
            say(f"self-check, {name:14} uses {', '.join(f'{each:.2f}' for each in used)} of what is tolerated")
            must(max(used) < 2 / 3, f"self-check: {name} uses {max(used):.2f} of what is tolerated")


def _used(name: str, seed: int, flags: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        wide(name, seed).save_pretrained(folder)
        with _Told() as told, LLM(folder, skip_tokenizer_init=True, progress=False, **flags):
            return told.used()


class _Told(logging.Handler):
    """What the self-check logs: how far it is off, and how far rounding takes it."""

    def __enter__(self) -> _Told:
        self._log = logging.getLogger(self_check.__name__)
        self._log.addHandler(self)
        self._before = self._log.level
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._before)

    def emit(self, record: logging.LogRecord) -> None:
        self.apart, self.rounding = record.args  # type: ignore[misc]

    def used(self) -> float:
        return float(self.apart) / (self_check._TOLERANCE * float(self.rounding))
