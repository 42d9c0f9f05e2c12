"""What the cache did for a prompt: tokens by tier, and why no more of it was cached. Made by the engine with the first
token; the server's messages, its log and metrics, `cache_report` and `LLM` show this one."""

from __future__ import annotations

from typing import NamedTuple

TIERS = ("device", "host", "store", "shared")  # where cached tokens of a prompt come from


class CacheReport(NamedTuple):
    """`shared`: tokens that another request computed meanwhile. `reason`, `position`: as admission found them; "" for a
    prompt that was never computed."""

    cached: int = 0
    host: int = 0
    store: int = 0
    shared: int = 0
    reason: str = ""
    position: int = 0

    @property
    def by_tier(self) -> tuple[int, int, int, int]:
        """The cached tokens in order of `TIERS`."""
        device = self.cached - self.host - self.store - self.shared
        return max(0, device), self.host, self.store, self.shared

    @property
    def missed(self) -> bool:
        """Whether it was computed, and less of it was cached than could have been. What another request computed after
        the admission may reach beyond `position`: then nothing was missed."""
        return self.reason not in ("", "hit") and self.cached <= self.position


NOT_COMPUTED = CacheReport()
