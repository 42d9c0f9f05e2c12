"""The wind tunnel: stand-ins for an executor that check every plan, and random traffic with faults.

`sapwood fuzz --seed N --steps M --layout L` attacks the scheduler, and repeats any attack that failed.
`sapwood replay TRACE --device-pages N` runs a real trace through it.
"""

from .content import ContentDouble, ContentError
from .cost import CostModel, MeasuredCost, SimulatedExecutor
from .event_replay import Replay
from .executor import ContentExecutor
from .layouts import LAYOUTS, Layout
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
