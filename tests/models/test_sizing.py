"""How device memory is divided among the groups of a model."""

from __future__ import annotations

import pytest

from sapwood.engine.arena import PageLayout, PagePart
from sapwood.engine.remembers import Remembered
from sapwood.engine.sizing import SLOTS, size, told

from .zoo import torch

MIB = 1 << 20
PAGE = 16


def group(family: str, page_bytes: int, window: int | None = None) -> Remembered:
    layout = PageLayout([PagePart(0, "k", (page_bytes,), torch.uint8)])
    return Remembered(family if window is None else f"window{window}", family, window, layout)


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
    assert len(told(sized, PAGE)) == len(sized.groups) + len(sized.notes)


def test_slots_of_a_hybrid():
    """As many contexts of 8,192 tokens as fit with four slots each; at least one for each row and two more; and if
    those took more than half, fewer rows run, which is said.

    Mutation: `SLOTS` counts once; `size` lowers nothing.
    """
    nbytes = 40000 * MIB
    sized = size([FULL, STATE], nbytes, PAGE, 64, 32768)
    full, state = sized.groups
    each = 8192 // PAGE * FULL.layout.page_bytes + SLOTS * STATE.layout.page_bytes
    assert state.device_pages == SLOTS * ((nbytes - 64 * 1024 - 8 * MIB) // each)
    assert full.device_pages > 8192 // PAGE and sized.max_num_seqs == 64 and not sized.notes
    few = size([FULL, STATE], 1000 * MIB, PAGE, 50, 4096)
    assert few.groups[1].device_pages >= few.max_num_seqs + 2
    tight = size([FULL, STATE], 1000 * MIB, PAGE, 200, 4096)
    assert tight.max_num_seqs < 200 and "max_num_seqs lowered from 200" in tight.notes[0]
    assert (tight.max_num_seqs + 2) * 8 <= 500


def test_windows_get_twice_what_rows_read():
    """And no more than their contexts have.

    Mutation: `size` gives windows what the full group should have.
    """
    sized = size([FULL, WINDOW], 20000 * MIB, PAGE, 8, 32768, 0, 2048)
    assert sized.groups[1].device_pages == 2 * 8 * (512 // PAGE + 2) + 2048 // PAGE
    short = size([FULL, WINDOW], 20000 * MIB, PAGE, 8, 64, 0, 2048)
    assert short.groups[1].device_pages == 2 * 8 * 4 + 2


def test_a_context_that_does_not_fit_is_lowered_and_too_little_is_refused():
    """Mutation: `size` leaves max_model_len as it is; or gives a group nothing."""
    sized = size([FULL], 10 * MIB, PAGE, 4, 32768)
    assert sized.max_model_len == sized.groups[0].device_pages * PAGE < 32768
    assert "max_model_len lowered from 32768" in sized.notes[0]
    with pytest.raises(ValueError, match="too little for this model"):
        size([FULL, STATE], 9 * MIB, PAGE, 4, 32768)
