"""Windows on host: what a save takes of them, what it does where host is small, and what is counted (case F20)."""

from __future__ import annotations

import pytest

from sapwood.cache import NEAR_TOKENS, CacheGroup, Operation, Span

from .driver import Engine, full, toks, window
from .stories import PAGE, all_free, compute, empty_device, engine_of, hit, write_back

NEAR = NEAR_TOKENS // PAGE  # pages before the window of a prompt's end
LONG = NEAR + 70  # pages of a prompt


def groups(host: int, *windows: tuple[int, int]) -> list[CacheGroup]:
    """Full attention with so many host pages, and windows of so many tokens with so many."""
    slide = [window(size, 3 * LONG, pages, f"window {size}") for size, pages in windows]
    return [full(3 * LONG, host), *slide]


def begun(engine: Engine, span: Span) -> Operation | None:
    operation = engine.cache.begin_save(span)
    engine.begin("save", operation)
    return operation


def columns(operation: Operation, group: str) -> list[int]:
    """Which pages of a path a save takes."""
    sources, targets = operation.pages[group]
    assert ((sources == 0) == (targets == 0)).all()
    return (operation.start_page + sources.nonzero()[0]).tolist()


def counted(engine: Engine) -> tuple[int, int]:
    """Saves that were not begun, and pages that were not saved, for lack of room."""
    found = engine.cache.stats()["transfers"]
    return found["saves_skipped"], found["pages_skipped"]


@pytest.mark.parametrize(("size", "pages"), [(1, 2), (3, 2), (4, 1), (8, 2), (9, 4)])
def test_f20_a_save_takes_what_a_later_request_can_begin_with(size, pages):
    """Of a prompt of 198 pages all go to host, and of its windows the last one, with what is near the prompt's end; who
    comes again is served from there.

    Mutation: `worth` finds every page worth as much; `reach` is that of the window alone.
    """
    engine = engine_of(*groups(LONG, (size, NEAR + pages)), save_pages=LONG)
    prompt = toks(1, LONG * PAGE)
    (span,) = compute(engine, "ann", prompt)
    operation = begun(engine, span)
    assert columns(operation, "full") == list(range(LONG))
    assert columns(operation, f"window {size}") == list(range(LONG - NEAR - pages, LONG))
    engine.settle()
    assert counted(engine) == (0, 0)
    empty_device(engine)
    assert hit(engine, prompt).boundary == LONG
    assert hit(engine, prompt[: (LONG - NEAR) * PAGE]).boundary == LONG - NEAR, "a few words before its end are others"
    again = engine.run("bob", prompt)
    assert again.cached == LONG * PAGE - 1
    all_free(engine)


def test_f20_groups_with_different_windows_each_save_their_own():
    """A window of one page, and one that reaches further back than what is near a prompt's end; at the end of a prompt,
    and where another parts from it.

    Mutation: `_to_save_of_windows` looks as far before a span as the first group needs.
    """
    small, large, pages, at = 1, NEAR + 20, 3 * NEAR + 120, 200
    engine = engine_of(*groups(600, (small * PAGE, 600), (large * PAGE, 600)), save_pages=pages)
    one, other = toks(1, pages * PAGE), toks(2, PAGE)
    (span,) = compute(engine, "ann", one)
    operation = begun(engine, span)
    for each in (small, large):
        assert columns(operation, f"window {each * PAGE}") == list(range(pages - NEAR - each, pages))
    engine.settle()
    (span,) = compute(engine, "bob", one[: at * PAGE] + other)
    operation = begun(engine, span)
    assert columns(operation, f"window {small * PAGE}")[-1] == at
    assert columns(operation, f"window {large * PAGE}") == list(range(at - large, at + 1))
    engine.settle()
    empty_device(engine)
    assert hit(engine, one).boundary == pages
    assert hit(engine, one[: at * PAGE] + toks(3, PAGE)).boundary == at
    all_free(engine)


def test_f20_where_a_path_branches_its_window_is_saved():
    """Two prompts part in the middle of what was not saved of the first: with the second, the window there is. A third
    that parts from them at the same place is served from host.

    Mutation: `_to_save_of_windows` looks at the pages of the span alone; `_next_below` looks for leaves only.
    """
    engine = engine_of(*groups(3 * LONG, (8, 2 * LONG)), save_pages=LONG)
    one = toks(1, LONG * PAGE)
    at = LONG - NEAR - 20
    (span,) = compute(engine, "ann", one)
    write_back(engine, [span])
    (span,) = compute(engine, "bob", one[: at * PAGE] + toks(2, 8 * PAGE))
    operation = begun(engine, span)
    assert columns(operation, "full") == list(range(at, at + 8))
    assert columns(operation, "window 8") == list(range(at - 2, at + 8))
    engine.settle()
    empty_device(engine)
    assert hit(engine, one[: at * PAGE] + toks(3, 8 * PAGE)).boundary == at
    all_free(engine)


def test_f20_the_end_of_a_prompt_is_kept_behind_a_long_answer():
    """A turn whose next one leaves the answer out: it goes on where the prompt ended, on host too, when that has little
    room left.

    Mutation: `_note_prompt_end` notes nothing; `Tree.split` leaves `prompt_end` at the wrong half.
    """
    prompt, answer = 3 * PAGE, 40 * PAGE
    engine = engine_of(*groups(200, (8, 7)), save_pages=4)
    tokens = toks(1, prompt)
    request = engine.submit("ann", tokens, answer)
    spans: list[Span] = []
    while not request.ended:
        engine.plan()
        engine.done()
        spans += engine.spans
    assert len(spans) > 8
    for span in spans:
        write_back(engine, [span])
    (span,) = compute(engine, "bob", request.tokens[: 20 * PAGE] + toks(2, PAGE))  # the answer is quoted, in part
    write_back(engine, [span])
    empty_device(engine)
    assert hit(engine, request.tokens).boundary == 42
    assert hit(engine, request.tokens[: 20 * PAGE] + toks(4, PAGE)).boundary == 20
    write_back(engine, compute(engine, "eve", toks(5, 2 * PAGE)))  # for hers the end of the answer goes, used least
    assert not counted(engine)[0]
    empty_device(engine)
    assert hit(engine, tokens).boundary == 3
    assert hit(engine, tokens + toks(3, 9 * PAGE)).boundary == 3
    assert hit(engine, request.tokens).boundary < 42
    all_free(engine)


def test_f20_a_small_host_gets_what_is_worth_most():
    """Host has room for the prompt's pages and one window: these are saved, and what was left out is counted.

    Mutation: `begin_save` does not try again without what is near; or does not count it.
    """
    engine = engine_of(*groups(LONG, (8, 2)), save_pages=LONG)
    (span,) = compute(engine, "ann", prompt := toks(1, LONG * PAGE))
    operation = begun(engine, span)
    assert columns(operation, "window 8") == [LONG - 2, LONG - 1]
    assert counted(engine) == (0, NEAR)
    engine.settle()
    assert engine.cache.begin_save(Span(LONG - 1, LONG, span.node)) is None
    assert counted(engine) == (0, 2 * NEAR), "there was no more room than before"
    empty_device(engine)
    assert hit(engine, prompt).boundary == LONG
    all_free(engine)


@pytest.mark.parametrize(("host", "room"), [(LONG, 1), (LONG - 1, LONG)])
def test_f20_what_does_not_fit_is_counted(host, room):
    """Host has no room for a window, or not for all pages: nothing is begun, every page of it is counted, and host is
    as it was.

    Mutation: `begin_save` does not count `pages_skipped`, or counts what is worth most alone.
    """
    engine = engine_of(*groups(host, (8, room)), save_pages=LONG)
    (span,) = compute(engine, "ann", toks(1, LONG * PAGE))
    assert begun(engine, span) is None
    assert counted(engine) == (1, LONG + NEAR + 2)
    assert engine.pages("full", "host")["free"] == host and engine.pages("window 8", "host")["free"] == room
    assert engine.cache.pages_skipped == LONG + NEAR + 2
    all_free(engine)


def test_f20_windows_of_a_shorter_span_are_saved_beside_one_that_is_on_its_way():
    """All of a path is being saved, and then a request that ended in the middle of it offers what is before that: its
    last window is saved by itself, lands first, and can be used when the rest has come.

    Mutation: `_closed_on_host` does not look at saves under way; a save leaves out the last window of its span, where
    another has gone on.
    """
    engine = engine_of(full(2 * LONG, LONG), window(8, 2 * LONG, LONG, "window 8"), save_pages=LONG)
    (span,) = compute(engine, "ann", prompt := toks(1, LONG * PAGE))
    first, second = begun(engine, span), begun(engine, Span(39, 40, span.node))
    assert first is not None and second is not None and list(second.pages) == ["window 8"]
    assert columns(second, "window 8") == [38, 39]
    assert begun(engine, Span(39, 40, span.node)) is None, "it is on its way"
    engine.land(second.op)
    assert begun(engine, Span(39, 40, span.node)) is None
    engine.land(first.op)
    empty_device(engine)
    assert hit(engine, prompt[: 40 * PAGE] + toks(2, PAGE)).boundary == 40
    all_free(engine)
