"""How much memory each group gets, from what is free or from flags; and what that is in tokens, to be printed.

    full        a page for page_size tokens; they get what the others leave
    window      twice what max_num_seqs rows can read
    state       a slot is large, worth hundreds or thousands of tokens. A resident context of L tokens costs its pages
                and four slots (one that works, and snapshots at its prompt's end, behind its answer and where others
                branch off): C such contexts fit, and 4 C slots are made, at least one for every row and two more.
                docs/design.md has what was measured with fewer and more

If the slots of max_num_seqs rows would take more than half of the memory, fewer rows run at a time, and that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sapwood.cache import CacheGroup

from .arena import readable, with_host_bytes
from .remembers import Remembered

CONTEXT = 8192  # tokens of the context that slots are weighed against
SLOTS = 4  # of a resident context
_SPARE = 2  # columns of a window beyond those it covers: it begins inside a page, and grows into a new one


class Sized(NamedTuple):
    """The groups with their pages, and what had to be changed for them."""

    groups: tuple[CacheGroup, ...]
    max_num_seqs: int
    max_model_len: int
    notes: tuple[str, ...]


def size(
    remembered: Sequence[Remembered],
    nbytes: int,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    host_bytes: int = 0,
    max_chunk: int = 0,
) -> Sized:
    """Pages for `nbytes` of device memory and `host_bytes` of host memory. ValueError if that is too little.
    `max_chunk`: tokens of a step, which a window's pool must hold beside what rows read."""
    notes: list[str] = []
    free = nbytes - sum(group.layout.page_bytes for group in remembered)  # null pages
    by_family = {
        family: [group for group in remembered if group.family == family] for family in ("full", "window", "state")
    }
    context = min(max_model_len, CONTEXT)
    columns = -(-context // page_size)

    slot = sum(group.layout.page_bytes for group in by_family["state"])
    if slot and slot * (max_num_seqs + 2) > free // 2:
        fewer = max(1, free // (2 * slot) - 2)
        notes.append(
            f"max_num_seqs lowered from {max_num_seqs} to {fewer}: a state of {readable(slot)} for each would take "
            f"more than half of {readable(nbytes)}"
        )
        max_num_seqs = fewer
    pages = {
        group.name: 2 * max_num_seqs * (-(-(group.window or 0) // page_size) + _SPARE) + -(-max_chunk // page_size)
        for group in by_family["window"]
    }
    # No window needs more pages than its context has, for every row.
    pages = {name: min(n, 2 * max_num_seqs * -(-max_model_len // page_size) + 2) for name, n in pages.items()}
    windows = sum(pages[group.name] * group.layout.page_bytes for group in by_family["window"])
    if by_family["window"] and not by_family["full"]:
        scale = max(1.0, (free - slot * 2 * max_num_seqs) / windows)  # nothing else wants it
        pages = {name: int(n * scale) for name, n in pages.items()}
        windows = int(windows * scale)
    if slot:
        each = columns * sum(group.layout.page_bytes for group in by_family["full"]) + SLOTS * slot
        slots = max(SLOTS * (max(0, free - windows) // each), max_num_seqs + 2)
        if not by_family["full"] and not by_family["window"]:
            slots = free // slot
        pages |= {group.name: slots for group in by_family["state"]}
    taken = sum(pages.get(group.name, 0) * group.layout.page_bytes for group in remembered)
    page = sum(group.layout.page_bytes for group in by_family["full"])
    if page:
        pages |= {group.name: max(0, free - taken) // page for group in by_family["full"]}
    least = 2 if not by_family["full"] else -(-1 // page_size) + 1
    short = [name for name, n in pages.items() if n < least]
    if short:
        raise ValueError(
            f"{readable(nbytes)} of device memory for the cache are too little for this model: group {short[0]!r} "
            f"would have {pages[short[0]]} pages; give it more (device_cache, gpu_memory_utilization) or lower "
            "max_num_seqs"
        )
    if page:
        room = min(pages[group.name] for group in by_family["full"]) * page_size
        if room < max_model_len:
            notes.append(f"max_model_len lowered from {max_model_len} to {room}: the cache holds no more tokens")
            max_model_len = room
    groups = tuple(
        CacheGroup(group.name, group.family, pages[group.name], window=group.window, page_bytes=group.layout.page_bytes)
        for group in remembered
    )
    if host_bytes:
        groups = with_host_bytes(groups, host_bytes)
    return Sized(groups, max_num_seqs, max_model_len, tuple(notes))


def told(sized: Sized, page_size: int) -> list[str]:
    """What was chosen, in words a user can check: tokens, not pages."""
    lines = []
    for group in sized.groups:
        tokens = (
            f"{group.device_pages * page_size:,} tokens"
            if group.family != "state"
            else f"{group.device_pages:,} states"
        )
        host = group.host_pages * page_size if group.family != "state" else group.host_pages
        more = f", and {host:,} on host" if host else ""
        window = f" of {group.window}" if group.window else ""
        size = readable(group.device_pages * group.page_bytes)
        lines.append(f"{group.family}{window}: {tokens} on the device ({size}){more}")
    return [*lines, *sized.notes]
