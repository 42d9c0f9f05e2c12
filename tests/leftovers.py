"""What a test may not leave behind, because another test of the same process would see it."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_LOGGERS = ("", "sapwood", "uvicorn", "uvicorn.access", "uvicorn.error", "asyncio", "transformers")
_REGISTRIES = (  # module, attribute: where a name given by a test would stay
    ("sapwood.scheduler.policy", "POLICIES"),
    ("sapwood.cache.families.base", "_FAMILIES"),
    ("sapwood.engine.models.patches", "_FAMILIES"),
)


@functools.cache
def _variables() -> frozenset[str]:
    """Those of the first test: what a library adds when it is first used (Mooncake its log level) stays."""
    return frozenset(os.environ) - {"PYTEST_CURRENT_TEST"}


def _logging() -> Iterator[tuple[str, Any]]:
    for name in _LOGGERS:
        logger = logging.root.manager.loggerDict.get(name) if name else logging.root
        if isinstance(logger, logging.Logger):
            # Handlers of pytest itself, which come and go with each phase of a test, are not a test's.
            handlers = [each for each in logger.handlers if not type(each).__module__.startswith("_pytest")]
            yield f"logger {name or 'root'}", (handlers, logger.propagate, logger.disabled)
    yield "logging.disable", logging.root.manager.disable


def _everything() -> Iterator[tuple[str, Any]]:
    for module, name in _REGISTRIES:
        if module in sys.modules:
            yield f"{module}.{name}", list(getattr(sys.modules[module], name))
    yield from _logging()
    for name in sorted(_variables() | {name for name in os.environ if name.startswith("SAPWOOD_")}):
        yield f"environment variable {name}", os.environ.get(name)
    yield "working directory", os.getcwd()
    yield "where modules are looked for first", sys.path[0]  # a library may add its own at the end
    yield "sys.excepthook", (sys.excepthook, threading.excepthook)
    yield "switch interval", sys.getswitchinterval()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        yield f"handler of {number.name}", signal.getsignal(number)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        yield "torch", (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())


def now() -> dict[str, Any]:
    return dict(_everything())


def since(before: dict[str, Any]) -> list[str]:
    """One line for each thing that is other than it was. A registry or logger that was not there before is what an
    import brought; a variable of ours that was not there before was left by the test."""
    after = now()
    ours = {name for name in after if name.startswith("environment variable ")}
    return [
        f"{name}: {before.get(name)!r} before, {after.get(name)!r} after"
        for name in sorted(before.keys() | ours)
        if before.get(name) != after.get(name)
    ]
