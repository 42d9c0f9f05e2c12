"""The hybrid, hierarchical prefix cache: what is remembered. numpy and the standard library only; no clock, no I/O."""

from .admission import Reserve
from .begins import NEAR_TOKENS
from .events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from .facade import HybridPrefixCache
from .families import Family, register_family
from .group import CacheGroup, validate_groups, whole_number
from .held import held_events
from .host_pins import PinnedOnHost
from .lease import Binding, Lease, Match, PageCopy, Span
from .load import Landed
from .match import Explanation
from .namespace import Namespace
from .pool import PoolError
from .publish import Replaced
from .steps import Commit
from .stored import MissingPages, StoreOperation
from .tokens import token_bytes
from .transfer import Operation

__all__ = [
    "NEAR_TOKENS",
    "AllBlocksCleared",
    "Binding",
    "BlockRemoved",
    "BlockStored",
    "CacheGroup",
    "Commit",
    "Explanation",
    "Family",
    "HybridPrefixCache",
    "KVEvent",
    "Landed",
    "Lease",
    "Match",
    "MissingPages",
    "Namespace",
    "Operation",
    "PageCopy",
    "PinnedOnHost",
    "PoolError",
    "Replaced",
    "Reserve",
    "Span",
    "StoreOperation",
    "held_events",
    "register_family",
    "token_bytes",
    "validate_groups",
    "whole_number",
]
