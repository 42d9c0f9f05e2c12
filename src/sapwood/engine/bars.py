"""Progress bars of the engine."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class bar:
    """A progress bar, where tqdm is there and somebody wants it; else None."""

    def __init__(self, total: int, what: str, wanted: bool) -> None:
        self.bar: Any = None
        if wanted:
            with suppress(ImportError):
                from tqdm.auto import tqdm

                self.bar = tqdm(total=total, desc=what, dynamic_ncols=True)

    def __enter__(self) -> Any:
        return self.bar

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
