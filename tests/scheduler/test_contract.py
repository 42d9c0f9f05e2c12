"""The contract (DESIGN 7): what plans say, what is refused, which events can happen, how requests end."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import get_type_hints

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace, Operation, StoreOperation
from sapwood.scheduler import (
    Abort,
    BackupDone,
    FetchDone,
    Finish,
    LoadDone,
    LookupDone,
    Plan,
    ProtocolError,
    Refused,
    RequestSpec,
    SaveDone,
    Scheduler,
    SchedulerConfig,
    StepDone,
    StepFailed,
    Tick,
)
from sapwood.scheduler.prefetch import Lookup

from .driver import LAYOUTS, Run, adapter, answer, each_layout, full, groups_of, toks, window


def plain(**config) -> Run:
    return Run(full(), **config)


# ---- the worked example


@pytest.mark.parametrize("layout", ["full", "window", "full+window"])
def test_the_worked_example(layout):
    """Page 16, a 32-token prompt whose 2 pages are cached in every group: starts 31, lengths 1, cached 31, write_from
    32, samples true, table [p0, p1].

    Mutation: `HybridPrefixCache.write_from` returns `start` for every group (the shared page would be written).
    """
    run = Run(*groups_of(layout, 16))
    prompt = toks(1, 32)
    run.submit("ann", prompt)
    run.plan()
    cached = {group.name: run.table("ann", group.name).tolist() for group in run.cache.groups}
    assert all(len(pages) == 2 for pages in cached.values())
    run.done()
    run.submit("bob", prompt)
    plan = run.plan()
    batch = plan.batch
    assert batch.ids == ["bob"] and batch.tokens.tolist() == prompt[31:]
    assert (batch.starts.tolist(), batch.lengths.tolist(), batch.cached.tolist()) == ([31], [1], [31])
    assert batch.samples.tolist() == [True] and batch.adapters == [None]
    assert {name: begin.tolist() for name, begin in batch.write_from.items()} == {name: [32] for name in cached}
    for name, pages in cached.items():
        row = plan.tables[name][batch.slots[0]]
        assert row[:2].tolist() == pages and not row[2:].any()
    assert not plan.copies
    run.done()
    assert (run.ended["bob"].cached, run.ended["bob"].computed) == (31, 1)


def typed(plan: Plan) -> None:
    for name in ("slots", "starts", "lengths", "tokens", "cached"):
        assert getattr(plan.batch, name).dtype == np.int32, name
    assert plan.batch.samples.dtype == np.bool_
    assert all(begins.dtype == np.int32 for begins in plan.batch.write_from.values())


def test_the_types_of_a_plan():
    """int32 arrays by row, flat tokens, tables by slot, digests of adapters, in plans of prompts and of decodes; a plan
    that has been handed out keeps what it says when the next is made.

    Mutation: `DecodeRows.starts` returns what it has, in 64 bits.
    """
    run = plain(batch=3, max_loras=2)
    run.submit("ann", toks(1, 20), 3, namespace=adapter("a"))
    run.submit("bob", toks(2, 20), 3)
    first = run.plan()
    typed(first)
    assert len(first.batch.tokens) == 40 and first.batch.tokens.tolist() == toks(1, 20) + toks(2, 20)
    assert first.batch.adapters == [adapter("a").adapter, None]
    assert first.tables["full"].dtype == np.int32 and len(first.tables["full"]) == 3
    assert not (first.loads or first.saves or first.lookups or first.fetches or first.backups)
    assert (first.step, first.empty, first.wake_in) == (1, False, None)
    run.done()
    second = run.plan()
    typed(second)
    assert second.step == 2 and second.batch.starts.tolist() == [20, 20]
    before = second.batch.starts.copy(), second.batch.tokens.copy()
    run.done()
    third = run.plan()
    assert third.batch.starts.tolist() == [21, 21]
    assert np.array_equal(second.batch.starts, before[0]) and np.array_equal(second.batch.tokens, before[1])


def test_operations_of_a_plan_are_typed():
    """A type checker knows what the operations of a plan are, for those who write an executor.

    Mutation: `Plan` has `list[Any]`.
    """
    hints = get_type_hints(Plan)
    assert hints["loads"] == hints["saves"] == list[Operation]
    assert hints["lookups"] == list[Lookup] and Lookup._fields == ("op", "namespace", "start_page", "hashes")
    assert hints["fetches"] == hints["backups"] == list[StoreOperation]


def test_a_request_keeps_its_slot():
    """From admission to its end a request has one slot, and nobody else has it; then it is given out again.

    Mutation: `Book.vacate` does not give the slot back (the third request finds none).
    """
    run = plain(batch=2)
    run.submit("ann", toks(1, 20), 9)
    run.submit("bob", toks(2, 20), 3)
    run.submit("cyd", toks(3, 20), 3)
    run.idle()
    slots = {id: {row.slot for row in run.rows_by(id)} for id in run.ended}
    assert slots == {"ann": {0}, "bob": {1}, "cyd": {1}}


# ---- S04: what is refused

BAD = {
    "an empty prompt": ({"tokens": []}, "token"),
    "a negative token": ({"tokens": [1, -1]}, "token"),
    "a token that is no int32": ({"tokens": [1, 2**31]}, "token"),
    "half a token": ({"tokens": b"12345"}, "token"),
    "no tokens at all": ({"tokens": None}, "token"),
    "no new tokens": ({"max_tokens": 0}, "max_tokens"),
    "a negative number of new tokens": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens that is no number": ({"max_tokens": "3"}, "max_tokens"),
    "max_tokens that is True": ({"max_tokens": True}, "max_tokens"),
    "negative min_tokens": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens over max_tokens": ({"min_tokens": 4}, "min_tokens"),
    "a negative eos": ({"eos": (-1,)}, "eos"),
    "an eos that is text": ({"eos": "stop"}, "eos"),
    "too many eos": ({"eos": tuple(range(65))}, "eos"),
    "a priority that is no number": ({"priority": 0.5}, "priority"),
    "a namespace that is a name": ({"namespace": "base"}, "namespace"),
    "reads_cache that is a number": ({"reads_cache": 1}, "reads_cache"),
    "writes_cache that is None": ({"writes_cache": None}, "writes_cache"),
    "an empty id": ({"id": ""}, "id"),
    "an id that is a number": ({"id": 7}, "id"),
    "a prompt that can never fit": ({"tokens": toks(9, 64 * 16), "max_tokens": 2}, "can never fit"),
    "an answer that can never fit": ({"max_tokens": 64 * 16}, "can never fit"),
    "an id that is live": ({"id": "ann"}, "live"),
    "an id twice in one list": ({"id": "good"}, "live"),
}


@pytest.mark.parametrize("what", BAD)
def test_s04_what_cannot_be_taken_is_refused_and_changes_nothing(what):
    """A bad spec among good ones refuses the list, naming the request and the field, before anything has changed; the
    good ones can be submitted afterwards.

    Mutation: `Scheduler.submit` adds each request as soon as it is checked; or `checked` leaves out one of its checks.
    """
    fields, field = BAD[what]
    run = plain()
    run.submit("ann", toks(1, 20), 5)
    run.step()
    before = run.scheduler.stats()
    bad = RequestSpec(**{"id": "bad", "tokens": toks(2, 3), "max_tokens": 3, **fields})
    good = RequestSpec("good", toks(3, 3), 3)
    with pytest.raises(Refused) as refusal:
        run.scheduler.submit([good, bad])
    assert refusal.value.id == str(bad.id) and field in refusal.value.reason
    assert isinstance(refusal.value, ValueError) and refusal.value.reason in str(refusal.value)
    assert run.scheduler.stats() == before
    run.submit_all([good])
    run.idle().right_answers()
    assert set(run.ended) == {"ann", "good"}


@each_layout
def test_s04_what_just_fits_is_taken(layout):
    """The bound is exact: the last token that is sampled is never computed, so it needs no room. A request of all pages
    runs; one token more is refused where a full group sets the limit, and runs where none does.

    Mutation: `checked` asks for `length + max_tokens` tokens; or `too_long` asks window groups as well.
    """
    run = Run(*groups_of(layout, 16, pages=6))
    run.run("just", toks(1, 90), 7)
    assert run.ended["just"].reason == "length"
    if "full" in LAYOUTS[layout]:
        with pytest.raises(Refused, match=r"97 tokens take 7 pages of group 'full', which has 6"):
            run.submit("more", toks(2, 90), 8)
    else:
        assert run.run("more", toks(2, 90), 8).generated == 8


def test_submit_takes_lists_arrays_and_buffers():
    """A list, an int32 array and a buffer of int32 are the same prompt.

    Mutation: `Scheduler.submit` hands `spec.tokens` on without `token_bytes`.
    """
    prompt = toks(1, 40)
    array = np.array(prompt, np.int32)
    for tokens in (prompt, array, array.astype(np.int64), array.tobytes(), memoryview(array), tuple(prompt)):
        run = plain()
        run.submit("ann", tokens, 2)
        run.idle().right_answers()
        assert run.known("ann")[:40] == prompt


def test_one_spec_is_not_a_list():
    """`submit(spec)` is a mistake that says so.

    Mutation: without the isinstance check, an obscure TypeError.
    """
    with pytest.raises(ValueError, match="list of RequestSpec"):
        plain().scheduler.submit(RequestSpec("ann", [1], 1))
    with pytest.raises(Refused, match="RequestSpec"):
        plain().scheduler.submit([("ann", [1], 1)])


# ---- configuration


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("overlap", 2, "overlap must be an integer from 0 to 1"),
        ("store", True, "store must be False unless every group has host pages"),
        ("lookup_ticks", 0, "lookup_ticks must be an integer from 1"),
        ("fetch_ticks", 0, "fetch_ticks must be an integer from 1"),
        ("store", 1, "store must be True or False"),
        ("max_batch_tokens", 0, "max_batch_tokens must be an integer from 1"),
        ("max_batch_size", 0, "max_batch_size must be an integer from 1"),
        ("max_batch_size", 2.0, "max_batch_size must be an integer from 1"),
        ("mixed_tokens", 65, "mixed_tokens must be an integer from 0 to 64"),
        ("mixed_tokens", -1, "mixed_tokens must be an integer from 0 to 64"),
        ("max_loras", -1, "max_loras must be an integer from 0"),
        ("max_tries", 0, "max_tries must be an integer from 1"),
        ("max_overtaken", -1, "max_overtaken must be an integer from 0"),
        ("headroom", -1, "headroom must be an integer from 0"),
        ("checkpoint_interval", 0, "checkpoint_interval must be an integer from 1"),
        ("prefetch_threshold", 0, "prefetch_threshold must be an integer from 1"),
        ("events", "yes", "events must be True or False"),
        ("prefix_caching", 0, "prefix_caching must be True or False"),
        ("host_policy", "back", 'host_policy must be "through" or "evict"'),
        ("policy", "lifo", "policy must be one of fcfs.*prefix"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(field, value, says):
    """Configuration is checked when it is made: the message names the field, the value and what would be right.

    Mutation: `__post_init__` leaves out the check of that field.
    """
    fields = {"page_size": 16, "groups": [full()], "max_batch_tokens": 64, "max_batch_size": 4, field: value}
    with pytest.raises(ValueError, match=rf"{says}.*, got ."):
        SchedulerConfig(**fields)


@pytest.mark.parametrize(
    ("page", "groups", "says"),
    [
        (0, [full()], "page_size"),
        (16, [], "group"),
        (16, [full(), full()], "full"),
        (16, [CacheGroup("w", "window", 3, 0, 32)], "w"),
        (16, None, "groups must be a list of CacheGroup"),
        (16, ["full"], "groups must hold CacheGroup objects"),
    ],
)
def test_wrong_groups_are_refused_when_the_configuration_is_made(page, groups, says):
    """What makes no sense to the cache is a ValueError right when the configuration is made.

    Mutation: `__post_init__` leaves the groups to the cache.
    """
    with pytest.raises(ValueError, match=says):
        SchedulerConfig(page, groups, 64, 4)


def test_the_configuration_is_frozen():
    """A configuration cannot be changed under a scheduler, not even through the list of groups it was given.

    Mutation: `__post_init__` keeps the caller's list.
    """
    groups = [full()]
    config = SchedulerConfig(16, groups, 64, 4)
    groups.append(full(name="more"))
    assert len(config.groups) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 8
    with pytest.raises(ValueError, match="SchedulerConfig"):
        Scheduler({"page_size": 16})


# ---- S05: events

IMPOSSIBLE = {
    "a step that never was": StepDone(7, {}),
    "a step that failed and never was": StepFailed(7, "why"),
    "a step that has been": StepDone(1, {"ann": 1, "bob": 1}),
    "a failure of a step that has been": StepFailed(1, "why"),
    "a step that is no number": StepDone(None, {}),
    "a load nobody asked for": LoadDone(1, True),
    "a save nobody asked for": SaveDone(1, False),
    "a lookup nobody asked for": LookupDone(1, 3),
    "a fetch nobody asked for": FetchDone(1, True, 3),
    "a backup nobody asked for": BackupDone(1, True),
    "no token for a row that samples": StepDone(2, {"ann": 5}),
    "a token for a stranger": StepDone(2, {"ann": 5, "bob": 5, "eve": 5}),
    "a token for somebody else": StepDone(2, {"ann": 5, "eve": 5}),
    "too few tokens": StepDone(2, np.array([5], np.int32)),
    "too many tokens": StepDone(2, np.array([5, 5, 5], np.int32)),
    "tokens in two dimensions": StepDone(2, np.array([[5], [5]], np.int32)),
    "tokens that are fractions": StepDone(2, np.array([5.0, 5.5])),
    "tokens that are text": StepDone(2, {"ann": "5", "bob": 5}),
    "a negative token": StepDone(2, {"ann": -1, "bob": 5}),
    "a token that is no int32": StepDone(2, {"ann": 2**31, "bob": 5}),
    "a token that is no number": StepDone(2, {"ann": None, "bob": 5}),
    "no tokens at all": StepDone(2, None),
    "a finish before any token": Finish("cyd"),
    "time that runs back": Tick(-1),
    "half a tick": Tick(0.5),
    "something else": "done",
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_s05_an_event_that_cannot_happen_raises_and_changes_nothing(what):
    """It raises ProtocolError that names the event, and everything goes on as if it had not come.

    Mutation: `Outcome.done` counts the step, or clears the flight, before `_tokens` has looked at them; or one of the
    checks of `_tokens`, `_flight` or `_finish` is left out.
    """
    run = plain(batch=2)
    run.submit("ann", toks(1, 20), 4)
    run.submit("bob", toks(2, 20), 4)
    run.submit("cyd", toks(3, 20), 4)
    run.step()
    run.plan()
    event, before = IMPOSSIBLE[what], run.scheduler.stats()
    with pytest.raises(ProtocolError) as error:
        run.tell(event)
    name = type(event).__name__ if not isinstance(event, str) else "advance"
    assert name in str(error.value)
    assert run.scheduler.stats() == before
    run.done()
    run.idle().right_answers()
    assert [end.reason for end in run.ended.values()] == ["length"] * 3


def test_s05_the_message_names_event_and_state():
    """Who debugs an engine learns what came and what the scheduler was doing.

    Mutation: the messages of `_flight` and `_finish` without the state.
    """
    run = plain(budget=16)
    run.submit("ann", toks(1, 40), 4)
    with pytest.raises(ProtocolError, match=r"StepDone\(1\) cannot happen now: no step runs"):
        run.tell(StepDone(1, {}))
    with pytest.raises(ProtocolError, match=r"Finish cannot happen to request 'ann' while it is waiting"):
        run.tell(Finish("ann"))
    run.plan()
    with pytest.raises(ProtocolError, match=r"StepFailed\(2\) cannot happen now: step 1 runs"):
        run.tell(StepFailed(2, ""))
    with pytest.raises(ProtocolError, match=r"Finish cannot happen to request 'ann' while it is prefilling"):
        run.tell(Finish("ann"))


def test_s05_events_of_those_that_ended_are_ignored():
    """An Abort or Finish that crosses with the end of its request, or is of a stranger, does nothing.

    Mutation: `_apply` looks requests up with `[event.id]`.
    """
    run = plain()
    run.run("ann", toks(1, 20), 2)
    before = run.scheduler.stats()
    assert run.tell(Abort("ann"), Finish("ann"), Abort("eve"), Finish("eve"), Tick(3)) == []
    assert run.scheduler.stats() == before
    run.submit("bob", toks(2, 20), 9)
    run.step()
    assert [end.reason for end in run.tell(Abort("bob"), Abort("bob"), Finish("bob"))] == ["abort"]


def test_s05_what_came_before_an_impossible_event_has_happened():
    """Of several events those before the impossible one are applied, and their ends are told by the next call.

    Mutation: `advance` clears `book.ended` when it raises.
    """
    run = plain()
    run.submit("ann", toks(1, 20), 9)
    run.submit("bob", toks(2, 20), 9)
    run.step()
    with pytest.raises(ProtocolError):
        run.scheduler.advance([Abort("ann"), LoadDone(3, True), Abort("bob")])
    assert [end.id for end in run.tell()] == ["ann"]
    run.idle()
    assert run.ended["bob"].reason == "length"


def test_ends_that_nobody_fetched_come_with_the_next_plan():
    """An end is told exactly once, by `advance` or by `plan.ended`, also by an empty plan.

    Mutation: `next_plan` does not take what is in `book.ended`.
    """
    run = plain()
    run.submit("ann", toks(1, 20), 9)
    with pytest.raises(ProtocolError):
        run.scheduler.advance([Abort("ann"), LoadDone(3, True)])
    plan = run.scheduler.next_plan()
    assert plan.empty and [end.id for end in plan.ended] == ["ann"]
    assert run.scheduler.next_plan().ended == [] and run.scheduler.advance([]) == []


def test_ticks_pass():
    """Tick is an event like others, in any number and at any time; here nothing waits for it.

    Mutation: `_apply` does not know Tick.
    """
    run = plain()
    assert run.tell(Tick(), Tick(0), Tick(10**12)) == []
    run.submit("ann", toks(1, 20), 2)
    run.plan()
    assert run.tell(Tick(5)) == []
    run.done()
    assert run.scheduler.next_plan().wake_in is None


@pytest.mark.parametrize("kind", ["dict", "int32", "int64", "uint32", "list"])
def test_tokens_of_a_step_come_as_dict_or_array(kind):
    """StepDone takes id -> token in any order, or an array in row order of the rows that sample, decodes and chunks.

    Mutation: `_tokens` takes a dict's values in the order in which they come.
    """
    run = plain(budget=40)
    run.submit("ann", toks(1, 20), 3)
    run.submit("bob", toks(2, 12), 3)
    run.step()
    run.submit("cyd", toks(3, 100), 3)  # its first chunks sample nothing
    while run.live:
        plan = run.plan()
        (event,) = run.executor.done()
        ids = [row.id for row in run.rows[-1] if row.samples]
        tokens = event.tokens if isinstance(event.tokens, dict) else dict(zip(ids, event.tokens.tolist(), strict=True))
        if kind == "dict":
            given = dict(reversed(tokens.items()))
        elif kind == "list":
            given = [tokens[id] for id in ids]
        else:
            given = np.array([tokens[id] for id in ids], kind)
        run.tell(StepDone(plan.step, given))
    run.right_answers()


# ---- S08: nothing to do


@each_layout
def test_s08_a_step_with_nothing_to_do_says_so(layout):
    """Without work, and while a plan runs, `next_plan` is empty, without a step and without `wake_in`; asking again and
    again changes nothing. After a submit, and after the event that gives pages back, the next plan has the work.

    Mutation: `next_plan` does not look at `book.flights`; or `PlanBuilder._admit` gives a request that did not fit no
    second look before `_RETRY_AFTER_PLANS` plans, although room was made.
    """
    run = Run(*groups_of(layout, 16, pages=9, slots=2), headroom=0)
    empty = run.scheduler.next_plan()
    assert (empty.empty, empty.step, empty.wake_in, empty.ended) == (True, None, None, [])
    assert empty.batch.ids == [] and not empty.tables and not empty.copies

    run.submit("ann", toks(1, 90), 7)
    run.submit("eve", toks(3, 10), 30)
    assert run.plan().batch.ids == ["ann", "eve"], "at once after a submit"
    run.submit("bob", toks(2, 90), 2)
    before = run.scheduler.stats()
    for _ in range(3):
        assert run.scheduler.next_plan().empty, "a plan beside the one that runs"
    assert run.scheduler.stats() == before
    run.done()
    if layout != "window":
        for _ in range(3):
            assert {row.id for row in run.step()} == {"ann", "eve"}, "there is no room for bob"
    run.abort("ann")
    assert "bob" in run.plan().batch.ids, "at once after room was made"
    run.done()
    run.idle()
    assert run.scheduler.next_plan().empty


def test_s08_empty_plans_count_no_step():
    """Only plans with rows have a number; they count up by one.

    Mutation: `next_plan` counts every plan.
    """
    run = plain()
    for n in range(3):
        assert run.scheduler.next_plan().step is None
        run.submit(f"r{n}", toks(n, 5))
        plan = run.plan()
        assert plan.step == n + 1
        assert run.scheduler.next_plan().step is None
        run.done()


def test_an_empty_plan_is_just_a_plan():
    """`Plan()` is an empty one, with arrays of no rows.

    Mutation: `_no_rows` shares one list between all plans.
    """
    one, other = Plan(), Plan()
    one.batch.ids.append("x")
    assert other.empty and other.batch.ids == [] and len(other.batch.tokens) == 0


# ---- S07: how requests end


def test_s07_every_end_reaches_the_caller():
    """length, stop, finish, abort, failed: each once, with its reason and counts; a refusal raises.

    Mutation: `Book.end` does not append to `ended` (nobody would be told).
    """
    run = plain(max_tries=2)
    prompts = {name: toks(n, 20) for n, name in enumerate(["long", "stop", "finish", "abort", "wait", "bad"])}
    stop = answer(Namespace(), prompts["stop"], 3)[2]
    run.submit("long", prompts["long"], 5)
    run.submit("stop", prompts["stop"], 99, eos=(stop,), min_tokens=3)
    run.submit("finish", prompts["finish"], 99)
    run.submit("abort", prompts["abort"], 99)
    run.step()
    run.submit("wait", prompts["wait"], 99)
    run.abort("wait")
    run.step(2)
    run.tell(Finish("finish"), Abort("abort"))
    run.idle()
    run.submit("bad", prompts["bad"], 5)
    while "bad" in run.live:
        run.plan()
        run.fail("it burns")
    with pytest.raises(Refused):
        run.submit("none", [], 5)
    ends = {end.id: (end.reason, end.generated, end.detail) for end in run.ended.values()}
    assert ends == {
        "long": ("length", 5, ""),
        "stop": ("stop", 3, ""),
        "finish": ("finish", 3, ""),
        "abort": ("abort", 3, ""),
        "wait": ("abort", 0, ""),
        "bad": ("failed", 0, "it burns"),
    }
    assert run.ended["wait"].cached == run.ended["wait"].computed == 0
    assert run.scheduler.stats()["ended"] == run.scheduler.stats()["submitted"] == 6
    run.all_free()


def test_s07_a_finish_in_the_same_call_as_the_end():
    """Events of one call that name a request after its end are dropped, and the end is told once.

    Mutation: `_finish` ends a request without looking whether it is still there.
    """
    run = plain()
    run.submit("ann", toks(1, 20), 2)
    run.step()
    run.plan()
    ended = run.tell(*run.executor.done(), Finish("ann"), Abort("ann"))
    assert [(end.id, end.reason) for end in ended] == [("ann", "length")]


def test_eos_and_min_tokens():
    """A token of `eos` ends a request that has yielded `min_tokens`, counting that one; before, it is a token like
    others. Several may be given.

    Mutation: `DecodeRows.join` wakes eos one step early or late; `_after_chunks` does not look at `min_tokens`.
    """
    prompt = toks(1, 20)
    said = answer(Namespace(), prompt, 24)
    for at in (1, 2, 17, 18):
        eos = (96, said[at - 1]) if said[at - 1] != 96 else (said[at - 1],)
        for min_tokens in {0, 1, at - 1, at, at + 1}:
            run = plain()
            run.submit("ann", prompt, 24, eos=eos, min_tokens=min_tokens)
            run.submit("bob", toks(2, 9), 24)
            run.idle().right_answers()
            ends = [n for n, token in enumerate(said, 1) if token in eos and n >= max(1, min_tokens)]
            want = ("stop", ends[0]) if ends else ("length", 24)
            assert (run.ended["ann"].reason, run.ended["ann"].generated) == want, (at, min_tokens)


def test_max_tokens_of_one():
    """One token: the request ends with the step of its prompt and never decodes.

    Mutation: `_after_chunks` lets a request join the decodes before it looks at `max_tokens`.
    """
    run = plain()
    end = run.run("ann", toks(1, 20), 1)
    assert (end.reason, end.generated, len(run.plans)) == ("length", 1, 1)
    assert run.scheduler.stats()["decoding"] == 0


def test_an_id_can_be_used_again():
    """After its Ended an id is free, also while the row of its last life still runs.

    Mutation: `Book.end` leaves the id in `requests` until the step is done.
    """
    run = plain()
    run.submit("ann", toks(1, 40), 9)
    run.step()
    with pytest.raises(Refused, match="Ended"):
        run.scheduler.submit([RequestSpec("ann", toks(2, 40), 1)])
    run.plan()
    run.abort("ann")
    run.submit("ann", toks(2, 40), 3)
    run.done()
    run.idle()
    assert run.ended["ann"].reason == "length" and run.said("ann") == answer(Namespace(), toks(2, 40), 3)
    run.all_free()


# ---- who reads and who writes


@each_layout
def test_reads_cache_false_reads_nothing(layout):
    """A request that must compute everything adopts nothing, neither at admission nor between its chunks; what it
    computes serves the next.

    Mutation: `PlanBuilder._chunk` adopts for everybody.
    """
    run = Run(*groups_of(layout, 16), budget=16)
    prompt = toks(1, 70)
    run.run("ann", prompt)
    end = run.run("bob", prompt, 3, reads_cache=False)
    assert (end.cached, end.computed) == (0, 70)
    run.submit("cyd", toks(2, 70), reads_cache=False)
    run.step()
    run.run("dan", toks(2, 70), priority=-1)
    run.until("cyd")
    assert run.ended["cyd"].cached == 0
    assert run.run("eve", prompt + [5]).cached == 64
    run.right_answers()


@each_layout
def test_writes_cache_false_writes_nothing(layout):
    """Of a request that leaves nothing, nothing can be found later, neither its prompt nor its answer; it can read.

    Mutation: `Book.admit` does not pass `writes` on.
    """
    run = Run(*groups_of(layout, 16))
    prompt = toks(1, 40)
    run.run("ann", prompt, 40, writes_cache=False)
    assert run.owned("tree") == {group.name: 0 for group in run.cache.groups}
    assert run.run("bob", prompt).cached == 0
    assert run.run("cyd", prompt, 9, writes_cache=False).cached >= 32
    run.right_answers().all_free()


@each_layout
def test_prefix_caching_off(layout):
    """Without prefix caching the interface is the same and every prompt is computed.

    Mutation: `Book` does not pass `enabled` on.
    """
    run = Run(*groups_of(layout, 16), prefix_caching=False)
    prompt = toks(1, 40)
    assert [run.run(f"r{n}", prompt, 20).cached for n in range(3)] == [0, 0, 0]
    assert not any(run.owned("tree").values())
    run.right_answers()


# ---- as a library


def test_scheduler_imports_without_torch():
    """Another engine can import the scheduler alone.

    Mutation: scheduler/__init__.py imports sapwood.sim, or torch.
    """
    code = "import sapwood.scheduler, sys; print(sorted({'torch', 'sapwood.sim'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_stats_of_the_scheduler():
    """`stats()` tells requests by state, counts, and the cache's figures.

    Mutation: `stats` reports waiting requests as prefilling.
    """
    run = plain(budget=24, batch=3)
    for n in range(5):
        run.submit(f"r{n}", toks(n, 20), 3)
    run.step()
    stats = run.scheduler.stats()
    assert (stats["waiting"], stats["prefilling"], stats["decoding"]) == (3, 1, 1)
    assert (stats["submitted"], stats["ended"], stats["steps"]) == (5, 0, 1)
    assert stats["cache"] == run.cache.stats()
    run.idle()
    stats = run.scheduler.stats()
    assert stats["ended"] == 5 and not stats["waiting"] + stats["prefilling"] + stats["decoding"]


def test_windows_that_are_too_small_to_share_still_serve():
    """A window group with the fewest pages allowed runs a prompt of any length, chunk by chunk.

    Mutation: `PlanBuilder._admit` asks for all tokens at once when nobody runs (`least` 0 in `_FIRST_RESERVE`).
    """
    run = Run(window(40, 5), budget=512)
    run.submit("ann", toks(1, 700), 40)
    run.submit("bob", toks(2, 700), 40)
    run.idle().right_answers()
    assert run.ended["ann"].reason == run.ended["bob"].reason == "length"
