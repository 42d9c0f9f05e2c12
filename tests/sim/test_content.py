"""The content double notices what it must: each test does one thing wrong, and it complains."""

from __future__ import annotations

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace, Operation, PageCopy
from sapwood.sim.content import ContentDouble, ContentError, ContentRow, prefix_digests

PAGE = 4
GROUPS = (
    CacheGroup("full", "full", 16, 16),
    CacheGroup("window", "window", 16, 16, window=5),
    CacheGroup("state", "state", 8, 8),
)
TOKENS = list(range(100, 112))
NS = Namespace()


def double(*names: str, **kwargs: int) -> ContentDouble:
    return ContentDouble(PAGE, [group for group in GROUPS if not names or group.name in names], **kwargs)


def row(
    name: str, start: int, length: int, group: str = "full", pages=(1, 2, 3), write_from: int = 0, samples: bool = False
) -> ContentRow:
    return ContentRow(name, start, length, {group: np.array(pages, np.int32)}, {group: write_from}, samples)


def computed(length: int = 12, group: str = "full") -> ContentDouble:
    """Somebody has computed the tokens into pages 1, 2, 3, and the step is done."""
    it = double(group)
    it.request("ann", NS, TOKENS)
    it.issue(1, [row("ann", 0, length, group)], [])
    it.done(1)
    return it


def saved(it: ContentDouble, op: int = 1, pages=(1,)) -> Operation:
    operation = Operation(op, NS, 0, {"full": (np.array(pages, np.int32), np.array(pages, np.int32) + 4)})
    it.start("save", operation)
    return operation


def test_a_reader_of_the_right_pages_is_content() -> None:
    """Sharing is no fault: another request with the same tokens reads what the first has written, and goes on."""
    it = computed()
    it.request("bob", NS, [*TOKENS[:8], 7, 7])
    it.issue(2, [row("bob", 8, 2, pages=(1, 2, 9), write_from=8)], [])
    it.done(2)
    assert it.computed == 14


def test_other_tokens_are_noticed() -> None:
    it = computed()
    it.request("bob", NS, [1, *TOKENS[1:8], 7])
    it.issue(2, [row("bob", 8, 1, pages=(1, 2, 9), write_from=8)], [])
    with pytest.raises(ContentError, match=r"reads full at position 0 .* page 1 holds something else"):
        it.done(2)


def test_another_namespace_is_noticed() -> None:
    it = computed()
    it.request("bob", Namespace(salt="bob"), TOKENS[:9])
    it.issue(2, [row("bob", 8, 1, pages=(1, 2, 9), write_from=8)], [])
    with pytest.raises(ContentError, match="holds something else"):
        it.done(2)


def test_equal_tokens_at_another_depth_have_other_digests() -> None:
    digests = prefix_digests(NS, [5, 5, 5, 5])
    assert len(set(digests.tolist())) == 4
    assert prefix_digests(NS, [5, 5])[1] == digests[1]


@pytest.mark.parametrize(("pages", "what"), [((1, 2, 0), "no page"), ((1, 0, 3), "null page"), ((1, 8, 3), "poisoned")])
def test_a_hole_where_it_reads_or_writes_is_noticed(pages, what: str) -> None:
    it = computed(8)
    it.issue(2, [row("ann", 8, 4, pages=pages, write_from=8)], [])
    with pytest.raises(ContentError, match=what):
        it.done(2)


def test_a_window_may_have_holes_behind_it_only() -> None:
    it = computed(8, "window")
    it.issue(2, [row("ann", 8, 2, "window", (0, 2, 3), 8)], [])
    it.done(2)
    it.issue(3, [row("ann", 10, 2, "window", (0, 0, 3), 8)], [])
    with pytest.raises(ContentError, match=r"reads window at position 6 .* null page"):
        it.done(3)


def test_writing_a_shared_page_is_noticed() -> None:
    it = computed()
    it.request("bob", NS, TOKENS)
    it.issue(2, [row("bob", 8, 4, write_from=8)], [])
    with pytest.raises(ContentError, match="writes into page 3, which ann has written"):
        it.done(2)


def test_writing_over_other_tokens_is_noticed() -> None:
    it = computed()
    it.issue(2, [row("ann", 8, 4, pages=(1, 2, 1), write_from=8)], [])
    with pytest.raises(ContentError, match="overwrites page 1"):
        it.done(2)


def test_a_state_that_stands_elsewhere_is_noticed() -> None:
    it = double("state")
    it.request("ann", NS, TOKENS)
    begin = PageCopy("state", 0, 1, PAGE, "before")
    it.issue(1, [row("ann", 0, 4, "state", (1,))], [begin])
    it.done(1)
    it.issue(2, [row("ann", 5, 2, "state", (1,))], [])
    with pytest.raises(ContentError, match="begins at 5, slot 1 holds a state after 4 tokens"):
        it.done(2)


def test_a_scan_cannot_be_repeated() -> None:
    it = double("state")
    it.request("ann", NS, TOKENS)
    it.issue(1, [row("ann", 0, 4, "state", (1,))], [PageCopy("state", 0, 1, PAGE, "before")])
    it.done(1)
    it.issue(2, [row("ann", 0, 4, "state", (1,))], [])
    with pytest.raises(ContentError, match="begins at 0"):
        it.done(2)


def test_what_a_failed_step_wrote_is_poisoned() -> None:
    for seed in range(4):  # whether it had run or not
        it = double("full", seed=seed)
        it.request("ann", NS, TOKENS)
        it.issue(1, [row("ann", 0, 8)], [])
        it.fail(1)
        it.issue(2, [row("ann", 8, 4, write_from=8)], [])
        with pytest.raises(ContentError, match=r"position 0 .* poisoned"):
            it.done(2)


def test_a_doomed_step_ruins_what_it_touches_when_it_ends() -> None:
    """Memory of a doomed step given to a transfer too early ends up poisoned there."""
    it = double("full")
    it.request("ann", NS, TOKENS)
    it.issue(1, [row("ann", 0, 4)], [])
    it.issue(2, [row("ann", 4, 4)], [])
    it.fail(1)
    it.memory["full", "device"].values[2] = 99
    it.done(2)
    assert (it.memory["full", "device"].values[2] != 99).all()


def test_a_transfer_takes_nothing_before_its_step_is_done() -> None:
    it = double("full")
    it.request("ann", NS, TOKENS)
    it.issue(1, [row("ann", 0, 4)], [])
    it.issue(2, [row("ann", 4, 4)], [])
    it.done(1)
    it._run_up_to(2)
    saved(it, 1, (1,))
    with pytest.raises(ContentError, match="before its step is done"):
        saved(it, 2, (2,))


def test_a_transfer_takes_nothing_part_filled() -> None:
    it = computed(6)
    with pytest.raises(ContentError, match="poisoned or part-filled"):
        saved(it, 1, (2,))


@pytest.mark.parametrize(
    ("tier", "page", "what"), [("device", 1, "source page was changed"), ("host", 5, "somebody else wrote")]
)
def test_pages_of_a_transfer_are_left_alone(tier: str, page: int, what: str) -> None:
    it = computed()
    saved(it)
    it.memory["full", tier].values[page] = 3
    with pytest.raises(ContentError, match=what):
        it.land(1, True)


def test_a_round_trip_brings_the_same_bytes_and_a_failed_one_garbage() -> None:
    for ok in (True, False):
        it = computed()
        saved(it)
        it.land(1, ok)
        host = it.memory["full", "host"].values[5]
        assert np.array_equal(host, it.memory["full", "device"].values[1]) == ok


def test_a_copy_before_the_batch_takes_real_pages_only() -> None:
    it = double("full")
    it.request("ann", NS, TOKENS)
    it.request("bob", NS, [*TOKENS[:2], 7, 7])
    it.issue(1, [row("ann", 0, 4)], [])
    it.issue(2, [row("bob", 2, 2, pages=(9,), write_from=2)], [PageCopy("full", 1, 9, 2, "before")])
    it._run_up_to(1)
    with pytest.raises(ContentError, match="before it is real"):
        it._run_up_to(2)


def test_samples_are_the_same_however_often_they_are_drawn() -> None:
    """Sampling depends on the tokens alone: with sharing or without, the same output."""
    drawn = set()
    for start, write_from in ((0, 0), (8, 8)):
        it = computed(8)
        it.request("bob", NS, TOKENS[:9])
        pages = (4, 5, 6) if not start else (1, 2, 6)
        it.issue(2, [row("bob", start, 9 - start, pages=pages, write_from=write_from, samples=True)], [])
        drawn.add(it.done(2)["bob"])
    assert len(drawn) == 1


def test_steps_come_in_order() -> None:
    it = computed()
    it.issue(5, [], [])
    with pytest.raises(ContentError, match="step 4 was issued after step 5"):
        it.issue(4, [], [])
