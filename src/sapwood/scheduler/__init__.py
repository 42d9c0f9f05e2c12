"""Which request runs next: a deterministic scheduler on the hybrid prefix cache. numpy and the standard library only;
no clock, no I/O, no randomness."""

from .config import SchedulerConfig
from .events import (
    Abort,
    BackupDone,
    Ended,
    Event,
    FetchDone,
    Finish,
    LoadDone,
    LookupDone,
    ProtocolError,
    SaveDone,
    StepDone,
    StepFailed,
    StoreUp,
    Tick,
)
from .plan import Batch, Plan
from .policy import Policy, register_policy
from .request import Refused, RequestSpec
from .scheduler import Scheduler

__all__ = [
    "Abort",
    "BackupDone",
    "Batch",
    "Ended",
    "Event",
    "FetchDone",
    "Finish",
    "LoadDone",
    "LookupDone",
    "Plan",
    "Policy",
    "ProtocolError",
    "Refused",
    "RequestSpec",
    "SaveDone",
    "Scheduler",
    "SchedulerConfig",
    "StepDone",
    "StepFailed",
    "StoreUp",
    "Tick",
    "register_policy",
]
