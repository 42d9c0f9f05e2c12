"""A factory of an engine that does not load before a file is there: `until`, besides the flags of the paced one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sapwood.bench.paced import paced


def late(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    given = dict(flags)
    file = Path(given.pop("until"))
    progress("waiting for the test")
    while not file.exists():
        time.sleep(0.01)
    return paced(given, progress, events)
