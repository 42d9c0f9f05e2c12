"""The hands: what moves bytes and runs the model. Importing this package does not import torch.

- `PageLayout`, `PagePart`: what a page of a group is made of.
- `HostArena`, `DeviceArena`, `with_host_bytes`: where the bytes of pages lie.
- `Mover`, `NumpyMover`, `open_mover`: how they get from one to the other.
- `Tiers`: the transfers of plans, with a mover and a store.
- `EngineLoop`, `Executor`, `Step`: scheduler, executor and tiers joined, step by step.

What needs torch is in modules of its own: `sapwood.engine.transfer_torch`.
"""

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
