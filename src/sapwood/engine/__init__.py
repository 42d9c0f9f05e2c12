"""The hands: what moves bytes and runs the model. Importing this package imports nothing of it, and not torch.

- `PageLayout`, `PagePart`: what a page of a group is made of.
- `HostArena`, `DeviceArena`, `with_host_bytes`: where the bytes of pages lie.
- `Mover`, `NumpyMover`, `open_mover`: how they get from one to the other.
- `Tiers`: the transfers of plans, with a mover and a store.
- `EngineLoop`, `Executor`, `Step`: scheduler, executor and tiers joined, step by step.

What needs torch is in modules of its own: `sapwood.engine.transfer_torch`. What reads adapters is in others, which a
process starts with that has nothing else to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arena import DeviceArena, HostArena, PageLayout, PagePart, with_host_bytes
    from .loop import EngineLoop, Executor, Step
    from .tiers import Tiers
    from .transfer import Mover, NumpyMover, open_mover

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

_ROOMS = {"EngineLoop": "loop", "Executor": "loop", "Step": "loop", "Tiers": "tiers"}
_ROOMS |= dict.fromkeys(("Mover", "NumpyMover", "open_mover"), "transfer")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_ROOMS.get(name, 'arena')}", __name__), name)
