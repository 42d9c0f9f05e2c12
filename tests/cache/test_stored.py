"""The book-keeping of a store: where fetched pages land, what a backup holds, what could be served (cases T, the
facade)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sapwood.cache import HybridPrefixCache, Namespace, StoreOperation, token_bytes

from .driver import BASE, Engine, full, state, toks, window
from .stories import PAGE, all_free, compute, empty_device, engine_of, hit, save, write_back

LAYOUTS = {
    "full": lambda host=24: (full(24, host),),
    "window": lambda host=24: (window(6, 24, host),),
    "full+window": lambda host=24: (full(24, host), window(6, 24, host)),
    "full+state": lambda host=24: (full(24, host), state(12, min(host, 12))),
    "window+state": lambda host=24: (window(6, 24, host), state(12, min(host, 12))),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
PROMPT = toks(1, 6 * PAGE + 1)


def engine_for(layout: str, host: int = 24, **options) -> Engine:
    return engine_of(*LAYOUTS[layout](host), hashes=True, **options)


def asks(engine: Engine, tokens, first: int, last: int, ns: Namespace = BASE) -> StoreOperation | None:
    """Somebody begins a fetch, and leaves."""
    binding = engine.cache.bind(ns)
    operation = engine.cache.begin_fetch(binding, tokens, first, last)
    if operation is not None:
        engine.double.exchange("fetch", operation)
    engine.cache.check()
    engine.keep = binding  # the root stays
    return operation


def arrives(engine: Engine, operation: StoreOperation, ok: bool = True, pages: int | None = None) -> bool:
    """What the depot has arrives, or the first `pages` of it."""
    run = engine.double.fetched(operation.op, ok)
    landed = engine.cache.fetch_done(operation.op, ok, run if pages is None else min(run, pages))
    engine.check()
    return landed


def back_up(engine: Engine, spans, ok: bool = True) -> list[StoreOperation]:
    """Save spans and back them up."""
    begun = []
    for op in save(engine, spans):
        engine.operations.pop(op)
        engine.double.land(op, True)
        span = engine.cache.save_done(op, True)
        assert span is not None
        begun += engine.cache.begin_backups(span)
        engine.check()
    for operation in begun:
        engine.double.exchange("backup", operation)
    for operation in begun if ok else ():
        engine.double.backed_up(operation.op, True)
        engine.cache.backup_done(operation.op, True)
        engine.check()
    return begun


def stocked(layout: str, host: int = 24, **options) -> Engine:
    """An engine that has nothing, and a store with the prompt."""
    engine = engine_for(layout, host, **options)
    back_up(engine, compute(engine, "maker", PROMPT))
    engine.cache.flush()
    engine.check()
    return engine


# ---- fetches


@each_layout
def test_a_fetch_lands_and_can_be_loaded(layout):
    """All six pages arrive: the next request loads them and computes its last token only; hashes are the chain's.

    Mutation: `StoreFetches._where` asks for too few pages of a window; or `StoreFetches._grown` attaches wrong tokens.
    """
    engine = stocked(layout, events=True)
    operation = asks(engine, PROMPT, 0, 6)
    assert operation.hashes == engine.cache.page_hashes(BASE, PROMPT)
    assert hit(engine, PROMPT).boundary == 0, "visible only when it has arrived"
    assert arrives(engine, operation)
    assert hit(engine, PROMPT).boundary == 6 and hit(engine, PROMPT, host=False).boundary == 0
    assert engine.run("ann", PROMPT).cached == 24
    all_free(engine)


@each_layout
def test_a_fetch_asks_for_what_is_needed_and_no_more(layout):
    """Of closed groups every page, of windows what a request at the end reads, of states the last snapshot.

    Mutation: `StoreFetches._where` takes all pages of all groups.
    """
    engine = engine_for(layout)
    operation = asks(engine, PROMPT, 1, 6)
    expected = {"full": [1, 1, 1, 1, 1], "window": [0, 0, 0, 1, 1], "state": [0, 0, 0, 0, 1]}
    for name, pages in operation.pages.items() if operation else ():
        assert (pages != 0).astype(int).tolist() == expected[name], name
    if "full" in layout:
        assert operation is None, "page 0 is not here: nobody could reach what follows"
        operation = asks(engine, PROMPT, 0, 6)
    engine.cache.fetch_done(operation.op, False, 0)
    engine.check()
    all_free(engine)


@each_layout
@pytest.mark.parametrize("pages", range(7))
def test_an_unbroken_run_lands_and_the_rest_is_free(layout, pages):
    """Whatever number of pages arrives, only those land, nothing leaks, and nothing wrong is served.

    Mutation: `StoreFetches.fetch_done` frees nothing beyond the run; or lands a snapshot that is beyond it.
    """
    engine = stocked(layout)
    operation = asks(engine, PROMPT, 0, 6)
    arrives(engine, operation, pages=pages)
    for group in engine.cache.groups:
        owners = engine.pages(group.name, "host")
        wanted = np.count_nonzero(operation.pages[group.name][:pages])
        assert owners["flight"] == 0 and owners["tree"] == wanted
    if layout == "full":
        assert hit(engine, PROMPT).boundary == pages
    engine.run("ann", PROMPT)
    all_free(engine)


@each_layout
def test_what_host_has_already_is_not_taken_twice(layout):
    """The same pages are fetched twice, computed meanwhile, and saved before the second fetch or after it: each page is
    kept once.

    Mutation: `ClosedPages.land` puts pages where there are some.
    """
    engine = stocked(layout)
    one, two = asks(engine, PROMPT, 0, 6), asks(engine, PROMPT, 0, 6)
    spans = compute(engine, "ann", PROMPT)
    under_way = save(engine, spans)
    arrives(engine, one)
    for op in under_way:
        engine.land(op)
    write_back(engine, spans)
    before = {group.name: engine.pages(group.name, "host")["tree"] for group in engine.cache.groups}
    arrives(engine, two)
    assert before == {group.name: engine.pages(group.name, "host")["tree"] for group in engine.cache.groups}
    empty_device(engine)
    assert hit(engine, PROMPT).boundary == 6
    all_free(engine)


def test_room_for_a_fetch_is_made_by_others():
    """Host is full: others go, not the prefix that the fetch extends, though it is longest unused; if only that could
    go, there is no fetch.

    Mutation: `StoreFetches.begin_fetch` makes room without holding the path.
    """
    engine = engine_for("full", host=8)
    back_up(engine, compute(engine, "maker", PROMPT))
    engine.cache.flush()
    back_up(engine, compute(engine, "head", PROMPT[:13]))
    back_up(engine, compute(engine, "other", toks(2, 20)))
    empty_device(engine)
    assert engine.pages("full", "host")["free"] == 0
    operation = asks(engine, PROMPT, 3, 6)
    assert hit(engine, PROMPT).boundary == 3 and hit(engine, toks(2, 20)).boundary == 2
    assert arrives(engine, operation) and hit(engine, PROMPT).boundary == 6
    longer = PROMPT[:24] + toks(3, 41)
    before = engine.cache.stats()["pages"]
    assert asks(engine, longer, 6, 12) is None
    assert engine.cache.stats()["pages"] == before
    all_free(engine)


@pytest.mark.parametrize("layout", ["window", "full+window", "full+state", "window+state"])
def test_t14_a_prefix_can_be_served_while_what_extends_it_is_fetched(layout):
    """Host is full of windows and snapshots, that of the prefix longest unused. Whatever goes for a fetch, the request
    could still begin where it can now: the fetch may bring nothing.

    Mutation: `Saves._keep` keeps what is read at the end of the fetch only; or no snapshots.
    """
    pages = {"full": 24, "window": 4, "state": 2}
    groups = [replace(group, host_pages=pages[group.family]) for group in LAYOUTS[layout]()]
    engine = engine_of(*groups, hashes=True)
    back_up(engine, compute(engine, "head", PROMPT[:9]))
    back_up(engine, compute(engine, "other", toks(2, 9)))
    empty_device(engine)
    assert hit(engine, PROMPT).boundary == 2 and hit(engine, toks(2, 9)).boundary == 2
    operation = asks(engine, PROMPT, 2, 6)
    assert operation is not None and hit(engine, PROMPT).boundary == 2 and hit(engine, toks(2, 9)).boundary == 0
    assert not arrives(engine, operation) and hit(engine, PROMPT).boundary == 2
    all_free(engine)


@each_layout
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("host", range(1, 9))
def test_how_much_of_a_fetch_fits(layout, first, host):
    """Host is small and full, in part with the prefix and with what a backup holds: so many pages as `fetchable_run`
    says find room, and not one more. Asking changes nothing.

    Mutation: `StoreFetches.fetchable_run` counts what is free, or what could be evicted if the prefix could.
    """
    engine = engine_for(layout, host=host)
    if first:
        back_up(engine, compute(engine, "head", PROMPT[: first * PAGE + 1]))
    back_up(engine, compute(engine, "other", toks(2, 9)))
    begun = back_up(engine, compute(engine, "held", toks(3, 5)), ok=False)
    empty_device(engine)
    if "full" in layout and hit(engine, PROMPT).boundary < first:
        first = 0
    binding = engine.cache.bind(BASE)
    before = engine.cache.stats()
    fits = engine.cache.fetchable_run(binding, PROMPT, first, 6)
    assert engine.cache.stats() == before and 0 <= fits <= 6 - first
    for pages in range(6 - first, 0, -1):
        operation = engine.cache.begin_fetch(binding, PROMPT, first, first + pages)
        assert (operation is not None) is (pages <= fits), pages
        if operation is not None:
            engine.cache.fetch_done(operation.op, False, 0)
        engine.cache.check()
    engine.cache.unbind(binding)
    for operation in begun:
        engine.cache.backup_done(operation.op, False)
    all_free(engine)


def test_nothing_fits_where_nobody_could_reach_it():
    """Below pages that are gone, and in a namespace that is gone, no page can be fetched.

    Mutation: `StoreFetches.fetchable_run` asks for room alone.
    """
    engine = engine_for("full")
    binding = engine.cache.bind(BASE)
    assert engine.cache.fetchable_run(binding, PROMPT, 0, 6) == 6
    assert engine.cache.fetchable_run(binding, PROMPT, 2, 6) == 0
    engine.cache.flush()
    assert engine.cache.fetchable_run(binding, PROMPT, 0, 6) == 0
    engine.cache.unbind(binding)


@each_layout
@pytest.mark.parametrize("gone", ["flush", "forgotten"])
def test_a_fetch_of_a_namespace_that_is_gone_frees(layout, gone):
    """The namespace was evicted, or forgotten because nothing was left of it: what comes is freed.

    Mutation: `StoreFetches._landable` does not ask whether the root is hooked.
    """
    engine = stocked(layout)
    operation = asks(engine, PROMPT, 0, 6)
    if gone == "flush":
        engine.cache.flush()
    engine.cache.unbind(engine.keep)
    assert not arrives(engine, operation)
    assert not engine.cache.stats()["namespaces"]
    all_free(engine)


def test_a_fetch_that_is_not_known_or_too_long():
    """Wrong numbers raise ValueError and change nothing.

    Mutation: `StoreFetches.fetch_done` forgets the fetch before it has looked at `pages`.
    """
    engine = stocked("full")
    operation = asks(engine, PROMPT, 0, 6)
    for op, pages in ((operation.op + 1, 0), (operation.op, 7), (operation.op, -1), (operation.op, True)):
        with pytest.raises(ValueError):
            engine.cache.fetch_done(op, True, pages)
    with pytest.raises(ValueError):
        engine.cache.backup_done(operation.op, True)
    with pytest.raises(ValueError):
        engine.cache.begin_fetch(engine.keep, PROMPT, 0, 7)
    assert arrives(engine, operation)
    all_free(engine)


# ---- backups


@each_layout
def test_a_failed_backup_lets_go(layout):
    """Whether it went well or not, a backup holds nothing afterwards.

    Mutation: `StoreFetches.backup_done` lets go only if it is ok.
    """
    engine = engine_for(layout)
    (operation,) = back_up(engine, compute(engine, "ann", PROMPT), ok=False)
    engine.cache.backup_done(operation.op, False)
    engine.check()
    all_free(engine)


def test_saves_out_of_order_are_backed_up_when_the_first_has_come():
    """Pages 3 to 6 are on host before those above them: they could not be held there; their backup comes with that of
    the others.

    Mutation: `StoreFetches._begin_backup` drops what must wait; or holds pages below some that are on the device alone.
    """
    engine = engine_for("full")
    compute(engine, "ann", PROMPT[:13])
    upper = engine.spans
    lower = compute(engine, "bob", PROMPT)
    first, second = save(engine, upper), save(engine, lower)
    landed = []
    for op in second + first:
        engine.operations.pop(op)
        engine.double.land(op, True)
        landed.append(engine.cache.begin_backups(engine.cache.save_done(op, True)))
        engine.check()
    assert [len(operations) for operations in landed] == [0, 2]
    ranges = sorted((o.start_page, o.start_page + len(o.hashes)) for o in landed[1])
    assert ranges == [(0, 3), (3, 6)]
    empty_device(engine)
    for operation in landed[1]:
        engine.cache.backup_done(operation.op, True)
    all_free(engine)


# ---- what could be served


def there(text: str) -> np.ndarray:
    return np.array([mark == "x" for mark in text])


@pytest.mark.parametrize(
    ("pages", "start", "run"),
    [
        ({"full": "xxxxxx"}, 0, 6),
        ({"full": "xxx.xx"}, 0, 3),
        ({"full": ".xxxxx"}, 2, 0),
        ({"full": "xxxxxx", "window": "xxxxxx"}, 0, 6),
        ({"full": "xxxxxx", "window": "...xxx"}, 0, 6),
        ({"full": "xxxxxx", "window": "....x."}, 0, 0),
        ({"full": "xxxxxx", "window": "xx...."}, 0, 2),
        ({"full": "xxxxxx", "window": "x....."}, 5, 1),
        ({"full": "xxxxxx", "state": "..x..."}, 0, 3),
        ({"full": "xx.xxx", "state": "..x..x"}, 0, 0),
        ({"full": "xxxxxx", "window": "xx.xx.", "state": ".x..x."}, 0, 5),
        ({"full": "xxxxxx", "window": "xx..x.", "state": ".x..x."}, 0, 2),
        ({"window": "xxxxxx", "state": "......"}, 3, 0),
    ],
)
def test_how_far_a_store_could_serve(pages, start, run):
    """The deepest boundary that all groups together can begin at, from what the store is said to have.

    Mutation: `StoreFetches.servable_run` takes the least of what each group could do by itself.
    """
    made = {"full": full(24, 24), "window": window(6, 24, 24), "state": state(4, 4)}
    cache = HybridPrefixCache(PAGE, [made[name] for name in pages], hashes=True)
    assert cache.servable_run(start, {name: there(marks) for name, marks in pages.items()}) == run
    assert cache.servable_run(start, {}) == 0


@each_layout
def test_what_is_missing(layout):
    """`missing` tells the pages beyond what is here, up to the last that could be served, if they are enough.

    Mutation: `HybridPrefixCache.missing` counts a page that a state could not begin behind.
    """
    engine = engine_for(layout)
    binding = engine.cache.bind(BASE)
    exact = token_bytes(PROMPT[:24])
    most = 5 if "state" in layout else 6
    missing = engine.cache.missing(binding, exact, 1)
    assert (missing.first, len(missing.hashes)) == (0, most)
    assert engine.cache.missing(binding, exact, most) and not engine.cache.missing(binding, exact, most + 1)
    compute(engine, "ann", PROMPT[:13])
    missing = engine.cache.missing(binding, exact, 1)
    assert (missing.first, missing.hashes) == (3, engine.cache.page_hashes(BASE, PROMPT)[3:most])
    engine.cache.flush()
    assert engine.cache.missing(binding, exact, 1) is None, "nobody could find what came"
    engine.cache.unbind(binding)
    all_free(engine)
