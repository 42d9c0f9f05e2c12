"""What a model declares of its memory: its groups. That is all the core knows of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .arguments import whole_number
from .families import family_class

DEVICE: Final = 0
HOST: Final = 1
TIERS: Final = ("device", "host")
_MAX_PAGES = 2**31 - 2  # page ids are int32 and 0 is the null page


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of memory: a name, the family that rules its reuse, and how many pages it has.

    `device_pages` and `host_pages` are how many can be given out; ids run from 1 to that number, 0 is the null page.
    For a family of slots (`state`) they count slots.

    `page_bytes` is what one page (or slot) takes, all layers of the group together: a row of the host arena, and what a
    store keeps as one value. Arenas and movers need it, and refuse a group without it; it must be the
    same in the fingerprint of a store. The cache itself only multiplies with it, for `stats()["bytes"]`: an engine
    without host memory may leave it at 0.
    """

    name: str
    family: str
    device_pages: int
    host_pages: int = 0
    window: int | None = None
    page_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= 256:
            raise ValueError(f"name of a group must be a string of 1 to 256 characters, got {self.name!r:.60}")
        family = family_class(self.family)
        for field, low in (("device_pages", 1), ("host_pages", 0), ("page_bytes", 0)):
            whole_number(f"{field} of group {self.name!r}", getattr(self, field), low, _MAX_PAGES)
        if self.window is not None:
            whole_number(f"window of group {self.name!r}", self.window, 1, 2**31 - 1)
        family.validate(self)


def validate_groups(page_size: int, groups: tuple[CacheGroup, ...]) -> None:
    """What must hold between the groups of one model and its page size."""
    whole_number("page_size", page_size, 1, 65536)
    if not groups:
        raise ValueError("groups must name at least one CacheGroup, got none")
    seen: set[str] = set()
    for group in groups:
        if not isinstance(group, CacheGroup):
            raise ValueError(f"groups must hold CacheGroup objects, got {group!r:.60}")
        if group.name in seen:
            raise ValueError(f"groups must have different names, got {group.name!r} twice")
        seen.add(group.name)
        least = family_class(group.family).least_pages(group, page_size)
        if group.device_pages < least:
            raise ValueError(
                f"device_pages of group {group.name!r} must be at least {least} "
                f"for one request (family {group.family!r}, page_size {page_size}), got {group.device_pages}"
            )
