"""How a scheduler is set up: frozen, and checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sapwood.cache import CacheGroup, validate_groups, whole_number

from .policy import POLICIES

_MOST = 2**31 - 1
_FETCH_TICKS_PER_PAGE = 1
HOST_POLICIES = ("through", "evict")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a scheduler may use, and how it chooses.

    max_batch_tokens     tokens computed in one step
    max_batch_size       live requests: those that hold memory
    mixed_tokens         tokens computed in one step that has decode rows, which wait for all of them. With as many
                         decode rows or more, prompts get a page in each step. 0: max_batch_tokens
    max_loras            different adapters in one batch; 0: no cap
    overlap              plans that may be made while another runs: with 1, the next one before the tokens of the last
                         are known
    host_policy          "through": pages are written to host when they are computed; "evict": only a few at a time, of
                         those the device will lose next, once less than an eighth of it is free (a burst loses some).
                         Without a group that keeps everything it is "through", since that cannot be foreseen
    policy               which waiting request comes in next, by name ("fcfs", "prefix")
    max_tries            how often a request that fails alone is tried before it ends as `failed`
    max_overtaken        how many later requests, more urgent ones too, may run before one that is ready and has no row
    headroom             tokens that every running request can still write before a new one comes in
    checkpoint_interval  pages between the snapshots a decoding request leaves, where a group needs them
    store                look in a store for what neither device nor host has; every group needs host pages then
    prefetch_threshold   pages that must be missing here, and be there, for a fetch to be worth it
    lookup_ticks         how long a request waits for the answer of the store
    fetch_ticks          how long it waits then for its pages, and a tick more for each
    max_columns          how many pages wide the tables of a plan are, allocated once; longer requests are refused.
                         0: they grow with the longest request
    prefix_caching       False: nothing is found or kept; the interface stays the same
    """

    page_size: int
    groups: Sequence[CacheGroup]
    max_batch_tokens: int
    max_batch_size: int
    max_loras: int = 0
    overlap: int = 0
    host_policy: str = "through"
    store: bool = False
    prefetch_threshold: int = 4
    events: bool = False
    policy: str = "fcfs"
    max_tries: int = 3
    max_overtaken: int = 128
    headroom: int = 64
    checkpoint_interval: int = 8
    prefix_caching: bool = True
    lookup_ticks: int = 100
    fetch_ticks: int = 1000
    max_columns: int = 0
    mixed_tokens: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.groups, str) or not isinstance(self.groups, Iterable):
            raise ValueError(f"groups must be a list of CacheGroup, got {self.groups!r:.60}")
        object.__setattr__(self, "groups", tuple(self.groups))
        validate_groups(self.page_size, tuple(self.groups))
        whole_number("max_batch_tokens", self.max_batch_tokens, 1, _MOST)
        whole_number("max_batch_size", self.max_batch_size, 1, 1 << 20)
        whole_number("max_loras", self.max_loras, 0, 1 << 20)
        whole_number("mixed_tokens", self.mixed_tokens, 0, self.max_batch_tokens)
        whole_number("overlap", self.overlap, 0, 1)
        whole_number("prefetch_threshold", self.prefetch_threshold, 1, _MOST)
        whole_number("max_tries", self.max_tries, 1, 1 << 20)
        whole_number("max_overtaken", self.max_overtaken, 0, _MOST)
        whole_number("headroom", self.headroom, 0, _MOST)
        whole_number("checkpoint_interval", self.checkpoint_interval, 1, _MOST)
        whole_number("lookup_ticks", self.lookup_ticks, 1, _MOST)
        whole_number("fetch_ticks", self.fetch_ticks, 1, _MOST)
        whole_number("max_columns", self.max_columns, 0, 1 << 24)
        for field in ("store", "events", "prefix_caching"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False, got {getattr(self, field)!r:.60}")
        if self.host_policy not in HOST_POLICIES:
            raise ValueError(f'host_policy must be "through" or "evict", got {self.host_policy!r:.60}')
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {self.policy!r:.60}")
        if self.store:
            bare = [group.name for group in self.groups if not group.host_pages]
            if bare:
                raise ValueError(
                    "store must be False unless every group has host pages, through which its pages come and go; "
                    f"{bare[0]!r:.60} has none, got True"
                )

    def fetch_patience(self, pages: int) -> int:
        """Ticks that a request waits for so many pages from the store."""
        return self.fetch_ticks + _FETCH_TICKS_PER_PAGE * pages
