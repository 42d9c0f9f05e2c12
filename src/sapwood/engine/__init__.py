"""The engine: what moves bytes and runs the model. Importing this package imports nothing of it, and not torch.

- `PageLayout`, `PagePart`: what a page of a group is made of.
- `HostArena`, `DeviceArena`, `with_host_bytes`: where the bytes of pages lie.
- `Mover`, `NumpyMover`, `open_mover`: how they get from one to the other.
- `Tiers`: the transfers of plans, with a mover and a store.
- `EngineLoop`, `Executor`, `Step`: scheduler, executor and tiers joined, step by step.

What needs torch is in modules of its own, as transfer/torch_mover.py is. What reads adapters (lora/process.py,
lora/reader.py) runs in a process that has nothing else to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import EngineLoop, Executor, Step
    from .transfer.arena import DeviceArena, HostArena, PageLayout, PagePart, with_host_bytes
    from .transfer.movers import Mover, NumpyMover, open_mover
    from .transfer.tiers import Tiers

__all__ = [
    "DeviceArena",
    "EngineLoop",
    "Executor",
    "HostArena",
    "Mover",
    "NumpyMover",
    "PageLayout",
    "PagePart",
    "Step",
    "Tiers",
    "open_mover",
    "with_host_bytes",
]

_ROOMS = {"EngineLoop": "loop", "Executor": "loop", "Step": "loop", "Tiers": "transfer.tiers"}
_ROOMS |= dict.fromkeys(("Mover", "NumpyMover", "open_mover"), "transfer.movers")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_ROOMS.get(name, 'transfer.arena')}", __name__), name)
