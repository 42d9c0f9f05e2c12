"""What a caller can get wrong: each mistake is a clear error that names field and value, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from sapwood.cache import Binding, CacheGroup, HybridPrefixCache, Lease, Match, Namespace, PoolError, token_bytes
from sapwood.cache.pool import FREE, LEASE, TREE, PagePool

from .driver import BASE, full, state, toks, window
from .stories import PAGE

PROMPT = toks(1, 17)
RAW = token_bytes(PROMPT)


def refused(cache: HybridPrefixCache, message: str, call: Callable[[], object]) -> None:
    """The call raises a ValueError that says so, and the cache is what it was."""
    before, version = cache.stats(), cache._tree.version
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert not isinstance(caught.value, UnicodeError), "that is not our message"
    assert cache.stats() == before and cache._tree.version == version, "it was refused, and changed something"
    cache.check()


def some_cache(**options) -> HybridPrefixCache:
    options.setdefault("save_pages", 1)
    return HybridPrefixCache(PAGE, [full(16, 16), window(6, 16, 16), state(8, 8)], **options)


def admitted(cache: HybridPrefixCache, tokens: bytes = RAW) -> Lease:
    match = cache.match_prefix(cache.bind(BASE), tokens)
    lease, _ = cache.admit(match, match.start + 8)
    return lease


# ---- tokens


BAD_TOKENS = {
    "negative": ([1, -2, 3], "from 0 to 2..31 - 1, got -2"),
    "too large": ([1, 2**31], f"from 0 to 2..31 - 1, got {2**31}"),
    "far too large": ([1, 2**70], "tokens must be integers, got object"),
    "unsigned and too large": (np.array([2**63], np.uint64), f"from 0 to 2..31 - 1, got {2**63}"),
    "negative array": (np.array([5, -7], np.int64), "from 0 to 2..31 - 1, got -7"),
    "negative buffer": (bytearray(np.array([5, -7], np.int32).tobytes()), "from 0 to 2..31 - 1, got -7"),
    "fractions": ([1.5, 2.0], "tokens must be integers, got float64"),
    "booleans": ([True, False], "tokens must be integers, got bool"),
    "text": (["a", "b"], "tokens must be integers, got <U1"),
    "nested": ([[1, 2], [3, 4]], r"one non-empty row of integers, got shape \(2, 2\)"),
    "ragged": ([[1], [2, 3]], "tokens must be a list of integers or an int32 array"),
    "none at all": ([], r"one non-empty row of integers, got shape \(0,\)"),
    "nothing": (None, r"one non-empty row of integers, got shape \(\)"),
    "half a token": (bytearray(b"123456"), r"int32 values \(4 bytes each\), got 6 bytes"),
}
ASKING = {
    "match_prefix": lambda cache, binding, tokens: cache.match_prefix(binding, tokens),
    "match_nothing": lambda cache, binding, tokens: cache.match_nothing(binding, tokens),
    "explain": lambda cache, binding, tokens: cache.explain(BASE, tokens),
    "page_hashes": lambda cache, binding, tokens: cache.page_hashes(BASE, tokens),
}


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_tokens_that_are_none(kind, asking):
    """Tokens that are negative, not int32, not whole or not there are refused with the value, whatever asks.

    Mutation: `token_bytes` converts to int32 without looking (numpy wraps silently).
    """
    tokens, message = BAD_TOKENS[kind]
    cache = some_cache()
    binding = cache.bind(BASE)
    refused(cache, message, lambda: ASKING[asking](cache, binding, tokens))


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("raw", [b"", b"12345"], ids=["none", "half a token"])
def test_bytes_that_are_no_tokens(raw, asking):
    """Bytes that are empty or end inside a token are refused with their number, whatever asks.

    Mutation: `match_prefix` does not look at the rest of the division by four.
    """
    cache = some_cache()
    binding = cache.bind(BASE)
    expected = f"tokens .* got {len(raw)} bytes" if raw or asking != "explain" else "tokens must be one non-empty row"
    refused(cache, expected, lambda: ASKING[asking](cache, binding, raw))


# ---- what a model declares


@pytest.mark.parametrize("size", [0, -4, 65537, 4.0, "4", True, None])
def test_page_size(size):
    """A page of no tokens, of a part of one, or of far too many is refused with the value.

    Mutation: `validate_groups` does not look at `page_size`.
    """
    with pytest.raises(ValueError, match=f"page_size must be an integer from 1 to 65536, got {re.escape(repr(size))}"):
        HybridPrefixCache(size, [full(8)])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups must name at least one CacheGroup, got none"),
        ([full(8), full(9)], "groups must have different names, got 'full' twice"),
        ([full(8), window(4, 8, name="full")], "groups must have different names, got 'full' twice"),
        (["full"], "groups must hold CacheGroup objects, got 'full'"),
        ([full(8), window(9, 4)], r"device_pages of group 'window' must be at least 5 .*page_size 4\), got 4"),
        ([window(8, 3)], r"device_pages of group 'window' must be at least 4 .*page_size 4\), got 3"),
        ([window(1, 2)], r"device_pages of group 'window' must be at least 3 .*page_size 4\), got 2"),
    ],
)
def test_groups_that_do_not_fit_together(groups, message):
    """No group, a group twice, something else than a group, or a window pool in which no request could run is refused.

    Mutation: `validate_groups` does not keep the names it has seen; or `Window.least_pages` forgets the two pages that
    a window may begin and end in.
    """
    with pytest.raises(ValueError, match=message):
        HybridPrefixCache(PAGE, groups)


@pytest.mark.parametrize("pages", [3, 5, 6])
def test_the_smallest_window_pool_is_enough(pages):
    """A pool of exactly ceil(window / page_size) + 2 pages is accepted, and one request can run in it to its end.

    Mutation: `Window.least_pages` asks for one page more.
    """
    size = (pages - 2) * PAGE
    cache = HybridPrefixCache(PAGE, [window(size, pages)])
    lease = admitted(cache)
    for step, end in enumerate(range(8, 60), 1):
        assert cache.grow(lease, end), f"no page for position {end}"
        cache.publish(lease, token_bytes(range(60)), end // PAGE, step)
        cache.step_commit(step)
        cache.slide(lease, end)
        cache.check()


GROUP = {"name": "g", "family": "full", "device_pages": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_pages": 0}, "device_pages of group 'g' must be an integer from 1 to .*, got 0"),
        ({"device_pages": -1}, "device_pages of group 'g' must be .*, got -1"),
        ({"device_pages": 2.5}, "device_pages of group 'g' must be .*, got 2.5"),
        ({"device_pages": 2**31}, f"device_pages of group 'g' must be .*, got {2**31}"),
        ({"family": "state", "device_pages": 0}, "device_pages of group 'g' must be an integer from 1 to .*, got 0"),
        ({"host_pages": -1}, "host_pages of group 'g' must be an integer from 0 to .*, got -1"),
        ({"page_bytes": -1}, "page_bytes of group 'g' must be an integer from 0 to .*, got -1"),
        ({"family": "window", "window": 0}, "window of group 'g' must be an integer from 1 to .*, got 0"),
        ({"family": "window", "window": -3}, "window of group 'g' must be .*, got -3"),
        ({"family": "window"}, "window of group 'g' must be the number of keys a query sees .*, got None"),
        ({"window": 4}, "window of group 'g' must be None for family 'full', got 4"),
        ({"family": "state", "window": 4}, "window of group 'g' must be None for family 'state', got 4"),
        ({"family": "fulll"}, "family must be one of .*full.*, got 'fulll'"),
        ({"family": None}, "family must be one of .*full.*, got None"),
        ({"name": ""}, "name of a group must be a string of 1 to 256 characters, got ''"),
        ({"name": 7}, "name of a group must be a string of 1 to 256 characters, got 7"),
    ],
)
def test_group_fields(fields, message):
    """A group with no pages, a window of none, a window where there is none to have, or an unknown family is refused
    when it is made, naming the group, the field and the value.

    Mutation: `CacheGroup.__post_init__` does not look at the field.
    """
    with pytest.raises(ValueError, match=message):
        CacheGroup(**{**GROUP, **fields})


@pytest.mark.parametrize("value", [-1, 1.5, "1"])
@pytest.mark.parametrize("option", ["ghost_bytes", "save_pages"])
def test_numbers_of_the_cache(option, value):
    """A ghost memory of less than nothing, or saves of less than a page, are refused with the value.

    Mutation: `HybridPrefixCache` does not look at the option.
    """
    with pytest.raises(ValueError, match=f"{option} must be an integer from . to .*, got {value!r}"):
        some_cache(**{option: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": "name"}, "adapter must be None or a content digest of 1 to 256 bytes, got 'name'"),
        ({"adapter": b""}, "adapter must be .*, got b''"),
        ({"adapter": b"x" * 257}, "adapter must be .*, got b'xxx"),
        ({"salt": ""}, "salt must be None or a string of 1 to 4096 characters, got ''"),
        ({"salt": 5}, "salt must be .*, got 5"),
        ({"salt": "x" * 4097}, "salt must be .*, got 'xxx"),
        ({"version": -1}, "version must be an integer from 0 to .*, got -1"),
        ({"version": True}, "version must be .*, got True"),
        ({"version": 2**63}, f"version must be .*, got {2**63}"),
    ],
)
def test_namespace_fields(fields, message):
    """A namespace that is no digest, no salt or no version is refused when it is made, naming the field and the value.

    Mutation: `Namespace.__post_init__` does not look at the field.
    """
    with pytest.raises(ValueError, match=message):
        Namespace(**fields)


def test_a_salt_that_has_no_bytes():
    """A salt with half a surrogate pair (JSON can spell one) is refused when the namespace is made, not at first use.

    Mutation: `Namespace.__post_init__` does not try to encode the salt.
    """
    with pytest.raises(ValueError, match="salt must be") as caught:
        Namespace(salt="tenant \ud800")
    assert not isinstance(caught.value, UnicodeError), "that is not our message"


@pytest.mark.parametrize("namespace", ["base", None, b"a" * 32])
@pytest.mark.parametrize("asking", ["bind", "evict_namespace", "explain", "page_hashes"])
def test_something_else_than_a_namespace(asking, namespace):
    """An adapter's name where a Namespace belongs is refused with the value, and makes no root.

    Mutation: `bind` does not look at what it is given.
    """
    cache = some_cache()
    call = getattr(cache, asking)
    tokens = [PROMPT] if asking in ("explain", "page_hashes") else []
    refused(cache, "namespace must be a Namespace, got", lambda: call(namespace, *tokens))


# ---- handles


def test_an_ended_binding():
    """A request that is over can neither ask, nor be admitted, nor end again.

    Mutation: `unbind` does not mark the binding as ended (it would end twice).
    """
    cache = some_cache()
    host_pins = cache.bind(BASE)
    binding = cache.bind(BASE)
    match = cache.match_prefix(binding, RAW)
    cache.unbind(binding)
    message = "this binding has ended; bind the request to a namespace again"
    for call in (
        lambda: cache.unbind(binding),
        lambda: cache.match_prefix(binding, RAW),
        lambda: cache.match_nothing(binding, RAW),
        lambda: cache.admit(match, 8),
    ):
        refused(cache, message, call)
    assert cache.stats()["namespaces"][0]["bound"] == 1 and host_pins.live


@pytest.mark.parametrize("handle", [None, 7, "binding", object()])
def test_something_else_than_a_binding(handle):
    """What was never a binding is refused like one that has ended.

    Mutation: `_bound` looks only at `live`.
    """
    cache = some_cache()
    for call in (cache.unbind, lambda it: cache.match_prefix(it, RAW), lambda it: cache.match_nothing(it, RAW)):
        refused(cache, "binding", lambda call=call: call(handle))


LEASED = {
    "opening": lambda cache, lease: cache.opening(lease, 1),
    "adopt": lambda cache, lease: cache.adopt(lease, RAW, 8),
    "growable": lambda cache, lease: cache.growable(lease, 17),
    "grow": lambda cache, lease: cache.grow(lease, 17),
    "grow_rows": lambda cache, lease: cache.grow_rows([lease]),
    "slide": lambda cache, lease: cache.slide(lease, 17),
    "publish": lambda cache, lease: cache.publish(lease, RAW, 2, 1),
    "publish_rows": lambda cache, lease: cache.publish_rows([lease], [RAW[: 4 * PAGE]]),
    "checkpoint": lambda cache, lease: cache.checkpoint(lease, 2, 1),
    "roll_checkpoint": lambda cache, lease: cache.roll_checkpoint(lease, 2, 1),
    "rewind": lambda cache, lease: cache.rewind(lease, 8),
    "retract": lambda cache, lease: cache.retract(lease, b"", 8, None),
    "finish_request": lambda cache, lease: cache.finish_request(lease, b"", 8, None),
}


@pytest.mark.parametrize("doing", LEASED)
def test_a_finished_lease(doing):
    """A lease that has ended takes, gives and publishes nothing any more.

    Mutation: `_live` is not asked.
    """
    cache = some_cache()
    lease = admitted(cache)
    cache.finish_request(lease, b"", 0, None)
    refused(cache, "this lease has ended; match and admit the request again", lambda: LEASED[doing](cache, lease))


@pytest.mark.parametrize("doing", LEASED)
def test_a_lease_of_another_cache(doing):
    """A lease of another cache is no lease here, and stays what it is there.

    Mutation: `_live` looks at the lease and not at the cache's own.
    """
    cache, other = some_cache(), some_cache()
    lease = admitted(other)
    before = other.stats()
    refused(cache, "this lease has ended", lambda: LEASED[doing](cache, lease))
    assert other.stats() == before
    other.check()


def test_a_binding_of_another_cache():
    """A binding, or a match, of another cache is refused here: it would mix the pages of two pools.

    Mutation: `_bound` does not look whose binding it is.
    """
    cache, other = some_cache(), some_cache()
    binding = other.bind(BASE)
    match = other.match_prefix(binding, RAW)
    assert isinstance(binding, Binding) and isinstance(match, Match)
    refused(cache, "binding", lambda: cache.match_prefix(binding, RAW))
    refused(cache, "binding", lambda: cache.admit(match, 8))
    refused(cache, "binding", lambda: cache.unbind(binding))
    other.check()


@pytest.mark.parametrize("upto", [0, -1, 18, 2.5, None, "8"])
def test_admission_up_to_no_token(upto):
    """A request is admitted up to one of its own tokens, at least one of them to compute.

    Mutation: `admit` does not look at `upto`.
    """
    cache = some_cache()
    match = cache.match_prefix(cache.bind(BASE), RAW)
    message = f"upto must be an integer from 1 to 17, got {re.escape(repr(upto))}"
    refused(cache, message, lambda: cache.admit(match, upto))


@pytest.mark.parametrize("ending", ["finish_request", "retract"])
def test_fill_that_is_no_whole_page(ending):
    """What a request publishes when it ends is whole pages; else it is refused, and the lease lives on.

    Mutation: `finish_request` drops the rest of `fill` without a word.
    """
    cache = some_cache()
    lease = admitted(cache)
    refused(
        cache,
        "fill must be whole pages of 16 bytes, got 12 bytes",
        lambda: getattr(cache, ending)(lease, RAW[:12], 8, None),
    )
    assert cache.grow(lease, 9)


# ---- transfers


def saved(cache: HybridPrefixCache) -> int:
    """A prompt is computed, and its save is under way."""
    lease = admitted(cache)
    cache.opening(lease, 1)
    cache.publish(lease, RAW, 2, 1)
    (span,) = cache.step_commit(1).real
    operation = cache.begin_save(span)
    assert operation is not None
    return operation.op


@pytest.mark.parametrize("number", [0, -1, 99, None, "1", 1.5])
@pytest.mark.parametrize("ok", [True, False])
def test_an_unknown_transfer(number, ok):
    """The end of a transfer that was never begun is refused with its number.

    Mutation: `PendingTransfers.end` takes whatever number it is given.
    """
    cache = some_cache()
    saved(cache)
    refused(cache, f"no save with number {re.escape(repr(number))} is under way", lambda: cache.save_done(number, ok))
    refused(cache, f"no load with number {re.escape(repr(number))} is under way", lambda: cache.load_done(number, ok))


@pytest.mark.parametrize("ok", [True, False])
def test_a_transfer_that_is_over(ok):
    """A transfer ends once; news of it again, and news of a save as a load, are refused with its number.

    Mutation: `PendingTransfers.end` keeps the transfer; or does not look which way it goes.
    """
    cache = some_cache()
    op = saved(cache)
    refused(cache, f"no load with number {op} is under way", lambda: cache.load_done(op, ok))
    cache.save_done(op, ok)
    refused(cache, f"no save with number {op} is under way", lambda: cache.save_done(op, ok))
    refused(cache, f"no load with number {op} is under way", lambda: cache.load_done(op, ok))


def test_a_load_that_is_over():
    """A load ends once; news of it again, and news of it as a save, are refused with its number.

    Mutation: `PendingTransfers.end` keeps the transfer; or does not look which way it goes.
    """
    cache = HybridPrefixCache(PAGE, [full(4, 16)], save_pages=1)
    lease = admitted(cache, RAW[:36])
    cache.publish(lease, RAW, 2, 1)
    (span,) = cache.step_commit(1).real
    cache.save_done(cache.begin_save(span).op, True)
    cache.finish_request(lease, b"", 9, None)
    other = admitted(cache, token_bytes(toks(2, 16)))
    assert cache.grow(other, 16)
    cache.finish_request(other, b"", 0, None)
    match = cache.match_prefix(cache.bind(BASE), RAW[:36])
    assert match.load
    _, operation = cache.admit(match, 9)
    refused(cache, f"no save with number {operation.op} is under way", lambda: cache.save_done(operation.op, True))
    cache.load_done(operation.op, True)
    refused(cache, f"no load with number {operation.op} is under way", lambda: cache.load_done(operation.op, True))


# ---- steps


def test_a_step_whose_event_has_come():
    """Each step has one event: a second one, of whatever kind, is refused with its number.

    Mutation: `StepCommits._in_order` does not look at `last`.
    """
    cache = some_cache()
    admitted(cache)
    cache.step_commit(1)
    refused(cache, "the event of step 1 has come already", lambda: cache.step_commit(1))
    refused(cache, "the event of step 1 has come already", lambda: cache.step_failed(1, 1))
    cache.step_failed(2, 2)
    refused(cache, "the event of step 2 has come already", lambda: cache.step_commit(2))
    refused(cache, "the event of step 2 has come already", lambda: cache.step_failed(2, 2))
    refused(cache, "the event of step 1 has come already", lambda: cache.step_commit(1))


PLANNING = {
    "opening": lambda cache, lease, step: cache.opening(lease, step),
    "publish": lambda cache, lease, step: cache.publish(lease, RAW, 2, step),
    "checkpoint": lambda cache, lease, step: cache.checkpoint(lease, 2, step),
    "roll_checkpoint": lambda cache, lease, step: cache.roll_checkpoint(lease, 2, step),
}


@pytest.mark.parametrize("doing", PLANNING)
@pytest.mark.parametrize("past", ["done", "failed", "doomed", "overtaken"])
def test_planning_a_step_that_is_over(doing, past):
    """Nothing can be promised by a step that is done, has failed, is doomed by an earlier one, or was planned before
    another that is in flight.

    Mutation: `StepCommits.flight` makes a flight for any number.
    """
    cache = some_cache()
    lease = admitted(cache)
    other = admitted(cache, token_bytes(toks(2, 9)))
    step = 3
    if past == "done":
        cache.step_commit(3)
    elif past == "failed":
        cache.step_failed(3, 3)
    elif past == "doomed":
        cache.step_failed(2, 3)
    else:
        cache.opening(other, 4)
    message = f"step {step} cannot be planned any more: steps are planned in order, each once"
    refused(cache, message, lambda: PLANNING[doing](cache, lease, step))


def test_events_of_steps_out_of_order():
    """The event of a later step before that of an earlier one in flight is refused: the earlier one could never end.

    Mutation: `StepCommits._in_order` does not look at the steps in flight.
    """
    cache = some_cache()
    lease = admitted(cache)
    cache.opening(lease, 1)
    cache.publish(lease, RAW, 2, 1)
    refused(cache, "step 2", lambda: cache.step_commit(2))
    refused(cache, "step 2", lambda: cache.step_failed(2, 2))
    cache.step_commit(1)


# ---- page pools


def pool_of(pages: int, **options) -> PagePool:
    return PagePool("full on device", pages, **options)


def pool_refuses(pool: PagePool, message: str, call: Callable[[], object]) -> None:
    before = (list(pool.counts), bytes(pool.owner), pool.free_ids().tolist(), pool.readers.tolist(), pool.idle)
    with pytest.raises(PoolError, match=message):
        call()
    after = (list(pool.counts), bytes(pool.owner), pool.free_ids().tolist(), pool.readers.tolist(), pool.idle)
    assert after == before, "it was refused, and changed something"


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def allocated(pool: PagePool, n: int, owner: int) -> np.ndarray:
    return np.frombuffer(pool.allocate(n, owner), np.int32)


@pytest.mark.parametrize("pages", [1, 7, 100])
def test_pool_never_gives_out_page_0(pages):
    """All pages from 1 to the capacity are given out, each once, and page 0 never.

    Mutation: the free list of `PagePool` begins at 0.
    """
    pool = pool_of(pages)
    first = allocated(pool, pages // 2, LEASE)
    rest = allocated(pool, pages - pages // 2, TREE)
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(1, pages + 1))
    assert pool.free == 0 and len(allocated(pool, 0, LEASE)) == 0
    pool.release(rest.tobytes(), TREE)
    assert sorted(allocated(pool, len(rest), LEASE).tolist()) == sorted(rest.tolist())


def test_pool_over_allocation():
    """More pages than are free, or less than none, are refused with both numbers.

    Mutation: `allocate` does not look at how many are free.
    """
    pool = pool_of(8)
    allocated(pool, 3, LEASE)
    pool_refuses(pool, "full on device: 6 pages asked for, 5 of 8 are free", lambda: allocated(pool, 6, LEASE))
    pool_refuses(pool, "-1 pages asked for", lambda: allocated(pool, -1, LEASE))
    assert len(allocated(pool, 5, TREE)) == 5
    pool_refuses(pool, "1 pages asked for, 0 of 8 are free", lambda: allocated(pool, 1, LEASE))


@pytest.mark.parametrize("many", [1, 2, 40])
def test_pool_double_release(many):
    """Pages are given back once: again, or by somebody who does not own them, is refused with the page and its owner.

    Mutation: `release` does not look at the owner.
    """
    pool = pool_of(100)
    mine, theirs = allocated(pool, many, LEASE), allocated(pool, many, TREE)
    pool.release(mine.tobytes(), LEASE)
    pool_refuses(pool, f"page {mine[0]} belongs to free, not to a lease", lambda: pool.release(mine.tobytes(), LEASE))
    mixed = np.concatenate([allocated(pool, 1, LEASE), theirs])
    pool_refuses(
        pool, f"page {theirs[0]} belongs to the tree, not to a lease", lambda: pool.release(mixed.tobytes(), LEASE)
    )
    pool_refuses(
        pool, f"page {theirs[0]} belongs to the tree, not to a lease", lambda: pool.move(mixed.tobytes(), LEASE, TREE)
    )


@pytest.mark.parametrize("page", [0, -1, 9, 2**31 - 1])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_pool_unknown_page(page, others):
    """A page that is not one of the pool's, alone or among others, is refused with its number.

    Mutation: `_owned` takes negative ids for places from the end (numpy does).
    """
    pool = pool_of(8)
    mine = allocated(pool, 8, LEASE)
    wrong = np.concatenate([mine[:others], ids(page)])
    message = rf"full on device: unknown page {page} \(pages are 1 to 8\)"
    pool_refuses(pool, message, lambda: pool.release(wrong.tobytes(), LEASE))
    pool_refuses(pool, message, lambda: pool.move(wrong.tobytes(), LEASE, TREE))


@pytest.mark.parametrize("many", [2, 32, 33, 60])
def test_pool_the_same_page_twice(many):
    """The same page twice in one call is refused, for few pages and for many.

    Mutation: `release` does not look whether its pages are different (one would be free twice).
    """
    pool = pool_of(64)
    mine = allocated(pool, many - 1, LEASE)
    for at in {0, many // 2, many - 1}:
        twice = np.insert(mine, at, mine[-1])
        pool_refuses(
            pool, "the same page is named twice in one call", lambda twice=twice: pool.release(twice.tobytes(), LEASE)
        )
    pool.release(mine.tobytes(), LEASE)
    assert pool.free == 64


def test_pool_a_reader_that_is_not_there():
    """A reader that never came cannot leave.

    Mutation: `unread_unhooked` lets the count fall below zero.
    """
    pool = pool_of(8, by_page=True)
    mine = allocated(pool, 3, LEASE)
    pool.read_unhooked(mine[:2].tobytes())
    pool_refuses(pool, f"page {mine[2]} has no reader to leave", lambda: pool.unread_unhooked(mine.tobytes()))


def test_pool_knows_its_bytes():
    """The bytes in use are those of the pages that are given out, whoever owns them.

    Mutation: `used_bytes` counts the free pages.
    """
    pool = pool_of(8, page_bytes=1000)
    assert pool.used_bytes == 0
    mine = allocated(pool, 3, LEASE)
    assert pool.used_bytes == 3000
    pool.move(mine[:2].tobytes(), LEASE, TREE)
    assert pool.used_bytes == 3000
    pool.release(mine[2:].tobytes(), LEASE)
    assert pool.used_bytes == 2000 and pool.counts[FREE] == 6
