"""A factory of an engine that has run for years: all it counts begins at `at`, besides the flags of the paced one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sapwood.bench.paced import paced

from ..ages import age


def aged(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    given = dict(flags)
    at = given.pop("at")
    opened = paced(given, progress, events)
    age(opened.engine.scheduler, at)
    return opened
