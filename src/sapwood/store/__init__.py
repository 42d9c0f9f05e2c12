"""The third tier: pages in a store that survives restarts and is shared. Threads and blocking calls live behind it."""

from __future__ import annotations

from .breaker import Breaker, Missing
from .keys import Fingerprint, GroupLayout
from .opening import check_uri, open_store, store_folder
from .protocol import Backend, JobDone, Released, StoreError, timeout_for, unbroken_run
from .spawn import shared
from .store import Store
from .testing import Faults, FaultyBackend
from .threads import InterpreterYield

__all__ = [
    "Backend",
    "Breaker",
    "Faults",
    "FaultyBackend",
    "Fingerprint",
    "GroupLayout",
    "InterpreterYield",
    "JobDone",
    "Missing",
    "Released",
    "Store",
    "StoreError",
    "check_uri",
    "open_store",
    "shared",
    "store_folder",
    "timeout_for",
    "unbroken_run",
]
