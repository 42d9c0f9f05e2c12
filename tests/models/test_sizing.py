"""How device memory is divided among the groups of a model."""

from __future__ import annotations

import pytest

from sapwood.engine.models.kv_groups import GroupSpec
from sapwood.engine.models.sizing import SLOTS_PER_CONTEXT, TooLittleHost, contexts, in_words, resident_pages, size
from sapwood.engine.transfer.arena import PageLayout, PagePart

from .zoo import torch

MIB = 1 << 20
PAGE = 16


def group(family: str, page_bytes: int, window: int | None = None) -> GroupSpec:
    layout = PageLayout([PagePart(0, "k", (page_bytes,), torch.uint8)])
    return GroupSpec(family if window is None else f"window{window}", family, window, layout)


FULL = group("full", 64 * 1024)
WINDOW = group("window", 32 * 1024, 512)
STATE = group("state", 8 * MIB)
LAYOUTS = {
    "full": [FULL],
    "full + window": [FULL, WINDOW],
    "full + state": [FULL, STATE],
    "all": [FULL, WINDOW, STATE],
    "window": [WINDOW],
    "state": [STATE],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mib", [600, 3000, 40000])
def test_all_memory_is_given_out_and_no_more(layout, mib):
    """Null pages included; what is left over is less than a page of each, unless nobody could use it.

    Mutation: `size` forgets the null pages, or the windows' memory.
    """
    remembered = LAYOUTS[layout]
    sized = size(remembered, mib * MIB, PAGE, 16, 32768, 0, 2048)
    used = sum((g.device_pages + 1) * g.page_bytes for g in sized.groups)
    assert used <= mib * MIB
    assert used >= 0.97 * mib * MIB - sum(g.page_bytes for g in sized.groups)
    assert [g.name for g in sized.groups] == [g.name for g in remembered]
    assert len(in_words(sized, PAGE)) == len(sized.groups) + 1
    assert len(in_words(sized, PAGE, 1 << 40)) == len(sized.groups) + 2
    assert contexts(sized.groups, "device", 1024, PAGE) > 0


def test_slots_of_a_hybrid():
    """As many contexts of 8,192 tokens as fit with four slots each; at least one for each row and two more; and if
    those took more than half, fewer rows run, which is said.

    Mutation: `SLOTS_PER_CONTEXT` counts once; `size` lowers nothing.
    """
    nbytes = 40000 * MIB
    sized = size([FULL, STATE], nbytes, PAGE, 64, 32768)
    full, state = sized.groups
    each = 8192 // PAGE * FULL.layout.page_bytes + SLOTS_PER_CONTEXT * STATE.layout.page_bytes
    assert state.device_pages == SLOTS_PER_CONTEXT * (nbytes - 64 * 1024 - 8 * MIB) // each
    assert full.device_pages > 8192 // PAGE and sized.max_num_seqs == 64 and not sized.notes
    few = size([FULL, STATE], 1000 * MIB, PAGE, 50, 4096)
    assert few.groups[1].device_pages >= few.max_num_seqs + 2
    tight = size([FULL, STATE], 1000 * MIB, PAGE, 200, 4096)
    assert tight.max_num_seqs < 200 and "max_num_seqs lowered from 200" in tight.notes[0]
    assert (tight.max_num_seqs + 2) * 8 <= 500


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("page_bytes", [16 * 1024, 64 * 1024, 320 * 1024])
def test_windows_lose_as_little_for_short_contexts_as_for_long_ones(tier, page_bytes):
    """Whatever a page of each costs: with contexts of 1,024 tokens as with those of 16,384 the same part, more than six
    tenths, of those fit that would if memory were divided for them alone; on host as on the device.

    Mutation: `_share_of_windows` is that of one of the two; `size` divides host memory as the device's is.
    """
    window = group("window", page_bytes, 512)
    nbytes = 20000 * MIB
    host = nbytes if tier == "host" else 0
    sized = size([FULL, window], nbytes, PAGE, 8, 32768, host, 2048)
    parts = []
    for length in (1024, 16384):
        need = [resident_pages(g.family, g.window, length, PAGE) * g.layout.page_bytes for g in (FULL, window)]
        parts.append(contexts(sized.groups, tier, length, PAGE) / (nbytes / sum(need)))
    assert min(parts) > 0.6 and abs(parts[0] - parts[1]) < 0.03, parts


def test_room_is_told_in_contexts_for_each_tier():
    """Mutation: `contexts` forgets the windows; `in_words` leaves out a tier."""
    sized = size([FULL, WINDOW], 1000 * MIB, PAGE, 8, 32768, 2000 * MIB, 2048)
    lines = [line for line in in_words(sized, PAGE, 4000 * MIB) if line.startswith("contexts")]
    each = 1024 // PAGE * (FULL.layout.page_bytes + WINDOW.layout.page_bytes)
    assert [line.partition(": ")[2].rpartition(" or ")[0] for line in lines] == [
        f"on the device {contexts(sized.groups, 'device', 1024, PAGE)} of 1,024 tokens",
        f"on host {contexts(sized.groups, 'host', 1024, PAGE)} of 1,024 tokens",
        f"in the store {4000 * MIB // each} of 1,024 tokens",
    ]
    assert contexts(sized.groups, "host", 1024, PAGE) == sized.groups[1].host_pages // (1024 // PAGE)


def test_windows_of_rows_that_run():
    """Where memory is short windows have what rows read, and a chunk; but no more than half of it.

    Mutation: `_divided` leaves `busy` out, or gives it all.
    """
    sized = size([FULL, WINDOW], 100 * MIB, PAGE, 8, 32768, 0, 2048)
    assert sized.groups[1].device_pages >= 8 * (512 // PAGE + 2) + 2048 // PAGE
    many = size([FULL, WINDOW], 100 * MIB, PAGE, 64, 32768, 0, 2048)
    full, window = (g.device_pages * g.page_bytes for g in many.groups)
    assert 0.45 < window / (full + window) <= 0.5 or window < 40 * MIB


def test_a_host_too_small_for_a_context_is_said():
    """And one that has room for a window at least keeps that.

    Mutation: `size` adds no note; windows get their share of a small host alone.
    """
    sized = size([FULL, WINDOW], 2000 * MIB, PAGE, 8, 32768, 3 * MIB)
    assert sized.groups[1].host_pages >= 512 // PAGE + 1
    assert "have no room for one context of 1,024 tokens" in sized.notes[-1]
    with pytest.raises(TooLittleHost, match="host memory for the cache are too little"):
        size([FULL, STATE], 2000 * MIB, PAGE, 8, 32768, 8 * MIB)


def test_a_context_that_does_not_fit_is_lowered_and_too_little_is_refused():
    """Mutation: `size` leaves max_model_len as it is; or gives a group nothing."""
    sized = size([FULL], 10 * MIB, PAGE, 4, 32768)
    assert sized.max_model_len == sized.groups[0].device_pages * PAGE < 32768
    assert "max_model_len lowered from 32768" in sized.notes[0]
    with pytest.raises(ValueError, match="too little for this model"):
        size([FULL, STATE], 9 * MIB, PAGE, 4, 32768)
    with pytest.raises(ValueError, match=r"group 'window512' would have \d+ pages; give it more \(device_cache"):
        size([FULL, WINDOW], 1 * MIB, PAGE, 4, 32768)
