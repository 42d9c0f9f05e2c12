"""The wind tunnel: stand-ins for an executor that check what they are told to do, and random traffic with faults.

`python -m sapwood.sim fuzz --seed N --steps M --layout L` attacks the scheduler, and repeats any attack that failed.
`python -m sapwood.sim replay TRACE --device-pages N` runs a real trace through it.
"""

from .content import ContentDouble, ContentError
from .cost import CostModel, SimulatedExecutor
from .executor import ContentExecutor
from .layouts import LAYOUTS, Layout
from .measured import MeasuredCost
from .replay import Replay
from .traffic import Traffic
from .witness import Witness

__all__ = [
    "LAYOUTS",
    "ContentDouble",
    "ContentError",
    "ContentExecutor",
    "CostModel",
    "Layout",
    "MeasuredCost",
    "Replay",
    "SimulatedExecutor",
    "Traffic",
    "Witness",
]
