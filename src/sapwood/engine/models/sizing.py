"""How much memory each group gets, from what is free or from flags; and what that is in contexts, to be printed.

Memory is divided by what a resident context needs, one that a later request can go on with:

    full        a page for page_size tokens
    window      the windows at its end and at the end of its last prompt, and a little before that (cache/begins.py)
    state       four slots: one that works, and snapshots at its prompt's end, behind its answer and where others
                branch off. docs/design.md has what was measured with fewer and more

A window costs a context of 1,000 tokens as much as one of 100,000, and nobody knows how long they will be. So windows
get the share with which as little is lost where contexts are short (SHORT) as where they are long (LONG). Slots are
weighed against contexts of 8,192 tokens. On the device rows that run need windows and slots, whatever else is
resident: if the slots of max_num_seqs rows would take more than half of the memory, fewer rows run at a time, and that
is said; their windows take no more than half.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sapwood.cache import NEAR_TOKENS, CacheGroup
from sapwood.store.uri import nbytes

from ..flags import EngineConfig
from ..transfer.arena import available_bytes, readable
from .kv_groups import GroupSpec, longest_context

CONTEXT_TOKENS = 8192  # tokens of the context that slots are weighed against, and in which room is told
SHORT_TOKENS, LONG_TOKENS = 1024, 16384  # tokens of contexts that windows are weighed against
SLOTS_PER_CONTEXT = 4  # of a resident context
_SPARE_COLUMNS = 2  # columns of a window beyond those it covers: it begins inside a page, and grows into a new one


log = logging.getLogger(__name__)
_CPU_SHARE = 0.4  # of the memory that is free, for the device's pages
_HOST_SHARE, _HOST_SHARE_CPU = 0.33, 0.1  # the same for host's
_HOST_MAX_BYTES = 64 << 30
_CPU_TOKENS, _GPU_TOKENS = 2048, 8192  # in a step
_GPU_MIXED_TOKENS = 512  # in a step in which a request decodes
_DEFAULT_CONTEXT_TOKENS = 8192  # of a context, where the model does not say


class TooLittleHost(ValueError):
    """The host memory does not hold a page of every group."""


class Sized(NamedTuple):
    """The groups with their pages, and what had to be changed for them."""

    groups: tuple[CacheGroup, ...]
    max_num_seqs: int
    max_model_len: int
    notes: tuple[str, ...]


def step_tokens(config: EngineConfig, device: torch.device) -> int:
    """The most tokens of a step."""
    return config.max_num_batched_tokens or (_GPU_TOKENS if device.type == "cuda" else _CPU_TOKENS)


def mixed_tokens(config: EngineConfig, device: torch.device, max_num_seqs: int) -> int:
    """The most tokens of a step in which a request decodes; 0: as many as of any other."""
    asked = config.max_mixed_tokens
    if asked is None:
        asked = max(_GPU_MIXED_TOKENS, 2 * max_num_seqs) if device.type == "cuda" else 0
    return asked if asked < step_tokens(config, device) else 0


def size_for(config: EngineConfig, groups: Sequence[GroupSpec], text: Any, device: torch.device) -> Sized:
    """The groups of a model in the memory of this machine, as far as flags do not say otherwise. `text`: the model's
    text config, which knows how long contexts may be."""
    longest = config.max_model_len or getattr(text, "max_position_embeddings", None) or _DEFAULT_CONTEXT_TOKENS
    limit = longest_context(text)
    if limit is not None and limit[0] < longest:
        log.warning("max_model_len lowered from %d to %d: %s", longest, *limit)
        longest = limit[0]
    if config.device_cache != "auto":
        room = nbytes("device_cache", str(config.device_cache))
    elif device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        room = int(free - (1 - config.gpu_memory_utilization) * whole)
    else:
        room = int(_CPU_SHARE * (available_bytes() or 1 << 32))
    if config.host_cache != "auto":
        host = nbytes("host_cache", str(config.host_cache))
    else:
        share = _HOST_SHARE if device.type == "cuda" else _HOST_SHARE_CPU
        host = min(_HOST_MAX_BYTES, int(share * (available_bytes() or 1 << 32)))
    wanted, chunk = (groups, room, config.page_size, config.max_num_seqs, longest), step_tokens(config, device)
    try:
        return size(*wanted, host, chunk)
    except TooLittleHost as problem:
        if config.host_cache != "auto" or config.store is not None:
            raise
        log.warning("no host cache: %s", problem)
        return size(*wanted, 0, chunk)


def size(
    remembered: Sequence[GroupSpec],
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
    slot = sum(group.layout.page_bytes for group in remembered if group.family == "state")
    free = _without_null_pages(remembered, nbytes)
    if slot and slot * (max_num_seqs + 2) > free // 2:
        fewer = max(1, free // (2 * slot) - 2)
        notes.append(
            f"max_num_seqs lowered from {max_num_seqs} to {fewer}: a state of {readable(slot)} for each would take "
            f"more than half of {readable(nbytes)}"
        )
        max_num_seqs = fewer
    pages = _divided(remembered, free, page_size, max_model_len, max_num_seqs, max_chunk)
    flags = "device_cache, gpu_memory_utilization"
    _enough(remembered, pages, nbytes, page_size, "device memory", flags, " or lower max_num_seqs")
    full = [pages[group.name] for group in remembered if group.family == "full"]
    if full and min(full) * page_size < max_model_len:
        room = min(full) * page_size
        notes.append(f"max_model_len lowered from {max_model_len} to {room}: the cache holds no more tokens")
        max_model_len = room
    groups = tuple(
        CacheGroup(group.name, group.family, pages[group.name], window=group.window, page_bytes=group.layout.page_bytes)
        for group in remembered
    )
    if host_bytes:
        host = _divided(remembered, _without_null_pages(remembered, host_bytes), page_size, max_model_len, 0, 0)
        _enough(remembered, host, host_bytes, page_size, "host memory", "host_cache")
        groups = tuple(replace(group, host_pages=host[group.name]) for group in groups)
        length = min(SHORT_TOKENS, max_model_len)
        if not contexts(groups, "host", length, page_size):
            notes.append(
                f"host_cache is small: {readable(host_bytes)} have no room for one context of {length:,} tokens, so "
                "that little can be kept there, or reach a store"
            )
    return Sized(groups, max_num_seqs, max_model_len, tuple(notes))


def _without_null_pages(remembered: Sequence[GroupSpec], nbytes: int) -> int:
    return nbytes - sum(group.layout.page_bytes for group in remembered)


def _enough(
    remembered: Sequence[GroupSpec],
    pages: dict[str, int],
    nbytes: int,
    page_size: int,
    what: str,
    flags: str,
    other: str = "",
) -> None:
    for group in remembered:
        least = 1 if group.family == "full" or what == "host memory" else 2
        if group.window and what == "device memory":
            least = -(-group.window // page_size) + 2
        if pages[group.name] < least:
            raise (TooLittleHost if what == "host memory" else ValueError)(
                f"{readable(nbytes)} of {what} for the cache are too little for this model: group {group.name!r} would "
                f"have {max(0, pages[group.name])} pages; give it more ({flags}){other}"
            )


def _divided(
    remembered: Sequence[GroupSpec], free: int, page_size: int, max_model_len: int, rows: int, chunk: int
) -> dict[str, int]:
    """By group: its pages of `free` bytes, where `rows` run with chunks of so many tokens together (0: none do)."""
    nbytes = {group.name: group.layout.page_bytes for group in remembered}
    full, windows, states = (
        [group for group in remembered if group.family == family] for family in ("full", "window", "state")
    )
    short, context, long = (
        {
            group.name: resident_pages(group.family, group.window, min(each, max_model_len), page_size)
            for group in remembered
        }
        for each in (SHORT_TOKENS, CONTEXT_TOKENS, LONG_TOKENS)
    )
    pages: dict[str, int] = {}
    if states:
        slot = sum(nbytes[group.name] for group in states)
        each = sum(context[group.name] * nbytes[group.name] for group in remembered)
        slots = (
            max(SLOTS_PER_CONTEXT * max(0, free) // each, rows + 2 if rows else 1) if full or windows else free // slot
        )
        pages = {group.name: slots for group in states}
        free -= slots * slot
    if windows:
        share = _share_of_windows(
            [
                [sum(need[group.name] * nbytes[group.name] for group in some) for some in (windows, full)]
                for need in (short, long)
            ]
        )
        whole = sum(short[group.name] * nbytes[group.name] for group in windows)
        columns = -(-max_model_len // page_size)
        busy = {
            group.name: max(rows, 2) * min(-(-(group.window or 0) // page_size) + _SPARE_COLUMNS, columns)
            + -(-chunk // page_size)
            for group in windows
        }
        running = sum(busy[group.name] * nbytes[group.name] for group in windows)
        scale = min(1.0, free / 2 / running) if running and full else 1.0
        for group in windows:
            own = int(share * free * short[group.name] / whole)
            pages[group.name] = max(own, int(scale * busy[group.name])) if full else own
        free -= sum(pages[group.name] * nbytes[group.name] for group in windows)
    if full:
        page = sum(nbytes[group.name] for group in full)
        pages |= {group.name: max(0, free) // page for group in full}
    return pages


def _share_of_windows(costs: list[list[int]]) -> float:
    """Which part of memory windows get, if contexts cost so many bytes (windows, full), short ones and long ones: each
    then find the same part of the room that they would have if all of it were divided for them."""
    (short, long) = (windows / (windows + full) for windows, full in costs)
    return short / (short + 1 - long) if long < 1 else 1.0


def resident_pages(family: str, window: int | None, length: int, page_size: int) -> int:
    """What of a group a resident context of so many tokens needs."""
    columns = -(-length // page_size)
    if family == "state":
        return SLOTS_PER_CONTEXT
    if window is None:
        return columns
    return min(columns, 2 * -(-window // page_size) + -(-NEAR_TOKENS // page_size))


def contexts(groups: Sequence[CacheGroup], tier: str, length: int, page_size: int) -> int:
    """How many resident contexts of so many tokens have room in a tier ("device", "host")."""
    pages = {group.name: group.device_pages if tier == "device" else group.host_pages for group in groups}
    return min(pages[group.name] // resident_pages(group.family, group.window, length, page_size) for group in groups)


def contexts_in(groups: Sequence[CacheGroup], nbytes: int, length: int, page_size: int) -> int:
    """The same for a store of so many bytes."""
    pages = [resident_pages(group.family, group.window, length, page_size) for group in groups]
    return nbytes // sum(n * group.page_bytes for n, group in zip(pages, groups, strict=True))


def in_words(sized: Sized, page_size: int, store_bytes: int = 0) -> list[str]:
    """What was chosen, in words a user can check: tokens, not pages; and for how many contexts that is."""
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
    lengths = sorted({min(length, sized.max_model_len) for length in (SHORT_TOKENS, CONTEXT_TOKENS)})
    room = {"on the device": [contexts(sized.groups, "device", length, page_size) for length in lengths]}
    if all(group.host_pages for group in sized.groups):
        room["on host"] = [contexts(sized.groups, "host", length, page_size) for length in lengths]
    if store_bytes:
        room["in the store"] = [contexts_in(sized.groups, store_bytes, length, page_size) for length in lengths]
    for where, counts in room.items():
        found = " or ".join(f"{n:,} of {length:,} tokens" for n, length in zip(counts, lengths, strict=True))
        lines.append(f"contexts that a later request can go on with: {where} {found}")
    return lines
