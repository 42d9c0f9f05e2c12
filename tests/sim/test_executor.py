"""The content-checking executor notices what is wrong with a plan: each test spoils one thing, and it complains."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace, PageCopy
from sapwood.scheduler import Abort, Plan, RequestSpec, Scheduler, SchedulerConfig, StepDone, StepFailed
from sapwood.sim.content import ContentError
from sapwood.sim.executor import ContentExecutor

PAGE = 4
ADAPTER = Namespace(adapter=b"a" * 32)
OTHER = Namespace(adapter=b"b" * 32)
FULL, WINDOW, STATE = (
    CacheGroup("full", "full", 60),
    CacheGroup("window", "window", 60, window=6),
    CacheGroup("state", "state", 20),
)


class Bench:
    """A scheduler and its executor."""

    def __init__(self, *groups: CacheGroup, seed: int = 0, **options) -> None:
        options = {"max_batch_tokens": 64, "max_batch_size": 8, **options}
        self.scheduler = Scheduler(SchedulerConfig(PAGE, groups or (FULL, WINDOW), **options))
        self.executor = ContentExecutor(self.scheduler, seed)

    def submit(self, name: str, tokens, max_tokens: int = 4, **options) -> None:
        spec = RequestSpec(name, list(tokens), max_tokens, **options)
        self.executor.submit(spec)
        self.scheduler.submit([spec])

    def plan(self) -> Plan:
        plan = self.scheduler.next_plan()
        assert not plan.empty
        return plan

    def step(self) -> Plan:
        plan = self.plan()
        self.scheduler.advance(self.executor.execute(plan))
        self.scheduler.cache.check()
        return plan

    def idle(self) -> None:
        for _ in range(1000):
            plan = self.scheduler.next_plan()
            if plan.empty:
                return
            self.scheduler.advance(self.executor.execute(plan))
        raise AssertionError("does not end")


def spoiled(plan: Plan) -> Plan:
    """A copy of a plan whose arrays are its own, to be spoiled."""
    return copy.deepcopy(plan)


def running(*groups: CacheGroup) -> Bench:
    """One request decodes, with a page and a half computed; another has come."""
    bench = Bench(*groups)
    bench.submit("ann", range(6), namespace=ADAPTER)
    bench.step()
    bench.submit("bob", range(20, 30), 3)
    return bench


def test_a_right_plan_is_run() -> None:
    bench = running(FULL, WINDOW, STATE)
    bench.idle()
    assert len(bench.executor.lives["ann"].generated) == 4
    assert len(bench.executor.lives["bob"].generated) == 3
    assert bench.executor.double.computed == 6 + 3 + 10 + 2


def test_an_empty_plan_is_no_step() -> None:
    bench = Bench()
    assert bench.executor.execute(bench.scheduler.next_plan()) == []
    with pytest.raises(ValueError, match="no plan is in flight"):
        bench.executor.done()


def set_at(array, i: int, value) -> None:
    array[i] = value


NONE = np.zeros(1, np.int32)


def repage(plan, page: int) -> None:
    """Bob's first page is another one, and the plan says so."""
    table = plan.tables["full"]
    place = plan.batch.slots[1] * table.shape[1]
    table.reshape(-1)[place] = page
    places, values = plan.changes["full"]
    others = places != place
    plan.changes["full"] = (
        np.append(places[others], [place] * bool(page)).astype(np.int32),
        np.append(values[others], [page] * bool(page)).astype(np.int32),
    )


SPOILS = {
    "another token": (lambda p: set_at(p.batch.tokens, -1, 7), "token 9 is 29, the batch has 7"),
    "a token not known": (lambda p: set_at(p.batch.tokens, 0, -1), "token 6 is .* the batch has -1"),
    "too few tokens": (lambda p: setattr(p.batch, "tokens", p.batch.tokens[:-1]), "10 tokens in rows of 11"),
    "beyond what is known": (lambda p: set_at(p.batch.starts, 0, 7), "a row up to 8, only 7 tokens exist"),
    "a gap": (lambda p: (set_at(p.batch.starts, 1, 4), set_at(p.batch.lengths, 1, 6), cut(p, 1, 4)), "starts at 4"),
    "a step back": (lambda p: set_at(p.batch.starts, 0, 5), "token 5 is 5, the batch has"),
    "no token": (lambda p: (set_at(p.batch.lengths, 0, 0), cut(p, 0, 1)), "a row of 0 tokens"),
    "two in one slot": (lambda p: set_at(p.batch.slots, 1, p.batch.slots[0]), "two rows share a slot"),
    "another slot": (lambda p: set_at(p.batch.slots, 0, 7), "slots were lost 1 times, requests retracted 0 times"),
    "no such slot": (lambda p: set_at(p.batch.slots, 1, 99), "slot 99 of a table of"),
    "no sample at the end": (lambda p: set_at(p.batch.samples, 1, False), "samples is False for a row up to 10 of 10"),
    "a sample before the end": (
        lambda p: (set_at(p.batch.lengths, 1, 9), setattr(p.batch, "tokens", p.batch.tokens[:-1])),
        "samples is True for a row up to 9 of 10",
    ),
    "cached, and computed": (lambda p: set_at(p.batch.cached, 1, 4), "cached was 0 and is 4"),
    "all cached": (lambda p: set_at(p.batch.cached, 1, 10), "10 of 10 prompt tokens cached"),
    "cached after the first token": (lambda p: set_at(p.batch.cached, 0, 4), "was 0 at its first token, now 4"),
    "another adapter": (lambda p: p.batch.adapters.__setitem__(0, OTHER.adapter), "not that of its namespace"),
    "no adapter": (lambda p: p.batch.adapters.__setitem__(0, None), "not that of its namespace"),
    "written too early": (lambda p: set_at(p.batch.write_from["full"], 0, 2), "writes from 2, its row starts at 6"),
    "not written": (lambda p: set_at(p.batch.write_from["full"], 1, 5), "page .* is poisoned"),
    "a stranger": (lambda p: p.batch.ids.__setitem__(1, "eve"), "'eve' was never submitted"),
    "one twice": (lambda p: p.batch.ids.__setitem__(1, "ann"), "an id has two rows"),
    "a short array": (lambda p: setattr(p.batch, "cached", p.batch.cached[:1]), "cached has 1 entries for 2 rows"),
    "a group forgotten": (lambda p: p.batch.write_from.pop("window"), "write_from is of groups"),
    "a table forgotten": (lambda p: p.tables.pop("window"), "tables are of groups"),
    "no column": (lambda p: p.tables.update(full=p.tables["full"][:, :2]), "needs 3 columns, the table has 2"),
    "no such page": (lambda p: p.tables["full"].__setitem__((p.batch.slots[1], 0), 61), "no page .*61.*, there are 60"),
    "a hole": (lambda p: repage(p, 0), "into no page"),
    "another's page": (lambda p: repage(p, p.tables["full"][p.batch.slots[0], 0]), "overwrites page"),
    "a change that is not told": (lambda p: p.changes.update(full=(NONE, NONE)), "a change was not told"),
    "a change that is none": (lambda p: p.changes.update(full=(NONE + 120, NONE)), "a change that is none"),
    "nobody is seated": (lambda p: p.seated.clear(), "was not seated there"),
    "a copy of nothing": (lambda p: p.copies.append(PageCopy("full", 0, 9, 2, "before")), "copies 0 to 9"),
    "a copy nowhere": (lambda p: p.copies.append(PageCopy("full", 1, 0, 4, "before")), "copies 1 to 0"),
    "a copy of no group": (lambda p: p.copies.append(PageCopy("more", 1, 2, 4, "before")), "of group 'more'"),
    "a copy at no time": (lambda p: p.copies.append(PageCopy("full", 1, 9, 2, "later")), "runs 'later'"),
    "a step left out": (lambda p: setattr(p, "step", p.step + 1), "step 3 comes after step 1"),
    "a transfer of another tier": (lambda p: p.lookups.append(1), "there is no store"),
}


def cut(plan: Plan, row: int, tokens: int) -> None:
    """Take the first `tokens` tokens of a row out of the batch."""
    at = int(plan.batch.lengths[:row].sum())
    plan.batch.tokens = np.delete(plan.batch.tokens, slice(at, at + tokens))


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_plan_is_noticed(spoil: str) -> None:
    """Mutation: the check it is named after is left out of `ContentExecutor._read`."""
    change, complaint = SPOILS[spoil]
    bench = running()
    plan = spoiled(bench.plan())
    assert plan.batch.ids == ["ann", "bob"]
    change(plan)
    with pytest.raises(ContentError, match=complaint):
        bench.executor.execute(plan)


def test_a_state_that_is_not_begun_is_noticed() -> None:
    """A fresh request begins with a copy of the zero state into its working slot."""
    bench = running(FULL, STATE)
    plan = spoiled(bench.plan())
    assert plan.batch.ids == ["ann", "bob"] and plan.copies
    plan.copies = []
    with pytest.raises(ContentError, match=r"bob: step \d begins at 0, slot \d+ holds a state after"):
        bench.executor.execute(plan)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"max_batch_tokens": 10}, "11 tokens, max_batch_tokens is 10"),
        ({"max_batch_size": 1}, "2 rows, max_batch_size is 1"),
        ({"max_loras": 1}, "2 adapters, max_loras is 1"),
    ],
)
def test_a_batch_beyond_its_limits_is_noticed(option: dict, complaint: str) -> None:
    bench = Bench()
    bench.submit("ann", range(6), namespace=ADAPTER)
    bench.step()
    bench.submit("bob", range(20, 30), 3, namespace=OTHER)
    plan = bench.plan()
    config = bench.scheduler.config
    bench.executor.config = dataclasses.replace(config, **option)
    with pytest.raises(ContentError, match=complaint):
        bench.executor.execute(plan)


def test_who_reads_nothing_has_nothing_cached() -> None:
    """A prompt that must be computed whole, and is not, is noticed though all of it could be shared."""
    bench = Bench(FULL)
    bench.submit("ann", range(8), 1)
    bench.idle()
    bench.submit("bob", range(8), 1)
    plan = bench.plan()
    assert int(plan.batch.cached[0]) == 7
    bench.executor.lives["bob"].reads = False
    with pytest.raises(ContentError, match="7 tokens cached, and it reads nothing"):
        bench.executor.execute(plan)


def test_a_table_that_changes_under_a_step_is_noticed() -> None:
    bench = running()
    plan = spoiled(bench.plan())
    bench.executor.begin(plan)
    plan.tables["full"][plan.batch.slots[1], 1] += 1
    with pytest.raises(ContentError, match=r"full: entry 1 of slot 1 was \d+ when the plan went out"):
        bench.executor.done()


def test_what_a_row_does_not_read_may_change_under_it() -> None:
    """Entries beyond a row's end are nobody's business."""
    bench = running()
    plan = spoiled(bench.plan())
    bench.executor.begin(plan)
    plan.tables["full"][:, 3:] = 9
    bench.executor.done()


def test_a_batch_that_changes_under_a_step_is_noticed() -> None:
    bench = running()
    plan = spoiled(bench.plan())
    bench.executor.begin(plan)
    plan.batch.starts[0] += 1
    with pytest.raises(ContentError, match="the batch of step 2 changed in flight"):
        bench.executor.done()


def test_one_plan_at_a_time() -> None:
    bench = running()
    plan = bench.plan()
    bench.executor.begin(plan)
    later = spoiled(plan)
    later.step += 1
    with pytest.raises(ContentError, match="1 plans are in flight already"):
        bench.executor.begin(later)


def test_tokens_come_as_a_dict_or_as_an_array() -> None:
    """Both forms of StepDone are used, and say the same."""
    forms = set()
    for seed in range(8):
        bench = Bench(seed=seed)
        bench.submit("ann", range(6), 1)
        bench.submit("bob", range(9), 1)
        (done,) = bench.executor.execute(bench.plan())
        assert isinstance(done, StepDone)
        forms.add(type(done.tokens))
        values = list(done.tokens.values()) if isinstance(done.tokens, dict) else done.tokens.tolist()
        assert values == [bench.executor.lives[name].generated[0] for name in ("ann", "bob")]
    assert forms == {dict, np.ndarray}


def test_a_failed_step_says_so_and_is_done_again() -> None:
    """What it sampled never was, and the retry samples the same."""
    bench = running()
    bench.executor.begin(bench.plan())
    (failed,) = bench.executor.fail("no power")
    assert isinstance(failed, StepFailed) and failed.reason == "no power"
    assert len(bench.executor.lives["ann"].generated) == 1
    bench.scheduler.advance([failed])
    bench.idle()
    calm = running()
    calm.idle()
    for name in ("ann", "bob"):
        assert bench.executor.lives[name].generated == calm.executor.lives[name].generated


def test_an_id_used_again_is_another_request() -> None:
    """Aborted in flight and submitted again with other tokens, it is told apart from what it was."""
    bench = running()
    plan = bench.plan()
    bench.executor.begin(plan)
    bench.scheduler.advance([Abort("bob")])
    bench.submit("bob", range(40, 47), 2)
    bench.scheduler.advance(bench.executor.done())
    bench.idle()
    assert bench.executor.lives["bob"].known[:7] == list(range(40, 47))
    assert len(bench.executor.lives["bob"].generated) == 2


def test_a_retracted_request_may_come_back_elsewhere() -> None:
    """Slots and positions may change when requests are retracted, and the output is the same."""
    bench = Bench(CacheGroup("full", "full", 8), headroom=0)
    calm = Bench(CacheGroup("full", "full", 80), headroom=0)
    for each in (bench, calm):
        for i in range(3):
            each.submit(f"r{i}", range(100 * i, 100 * i + 7), 20)
        each.idle()
    assert bench.scheduler.cache.stats()["retracted"] > 0 == calm.scheduler.cache.stats()["retracted"]
    for i in range(3):
        assert bench.executor.lives[f"r{i}"].generated == calm.executor.lives[f"r{i}"].generated
