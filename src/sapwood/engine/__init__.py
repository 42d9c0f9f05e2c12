"""The hands: what moves bytes and runs the model. Importing this package does not import torch.

- `HostArena`, `DeviceArena`, `with_host_bytes`: where the bytes of pages lie.
- `Mover`, `NumpyMover`, `open_mover`: how they get from one to the other.

What needs torch is in modules of its own: `sapwood.engine.transfer_torch`.
"""

from .arena import DeviceArena, HostArena, with_host_bytes
from .transfer import Mover, NumpyMover, open_mover

__all__ = ["DeviceArena", "HostArena", "Mover", "NumpyMover", "open_mover", "with_host_bytes"]
