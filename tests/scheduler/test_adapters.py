"""Adapters and namespaces through the scheduler (cases L): who shares, who may run together, and what goes with it."""

from __future__ import annotations

import pytest

from sapwood.cache import Namespace
from sapwood.scheduler import RequestSpec

from .driver import BASE, LAYOUTS, Run, adapter, each_layout, full, groups_of, toks

A, B, C, D = (adapter(name) for name in "abcd")


def crowd(run: Run, tokens, spaces, max_tokens: int = 3) -> None:
    run.submit_all(
        [RequestSpec(f"r{n}", tokens, max_tokens, namespace=space) for n, space in enumerate(spaces)],
    )


def inside(run: Run) -> list[set[bytes]]:
    """The adapters of every batch."""
    return [{digest for digest in plan.batch.adapters if digest is not None} for plan in run.plans]


# ---- L02


@each_layout
def test_l02_every_path_uses_the_namespace_of_its_request(layout):
    """The same tokens in five namespaces at once, through chunks, decode across pages, retraction and recovery, the end
    and the next turn: nobody reads another's memory (the executor would see it), each finds its own.

    Mutation: `Scheduler.submit` binds every request to `Namespace()`; or the adapter of a batch is not the request's.
    """
    spaces = [BASE, A, B, Namespace(salt="tenant"), Namespace(adapter=A.adapter, salt="tenant")]
    run = Run(*groups_of(layout, 16, pages=30, slots=12, windows=30), headroom=0, budget=24)
    prompt = toks(1, 60)
    crowd(run, prompt, spaces, 40)
    run.idle().right_answers()
    assert [run.ended[f"r{n}"].cached for n in range(5)] == [0] * 5
    if "full" in LAYOUTS[layout] and layout != "full+2windows+state":
        assert run.scheduler.stats()["retractions"] > 0, "the pool was meant to be too small"
    for n, space in enumerate(spaces):
        turn = [*run.known(f"r{n}"), 5, 6]
        first = run.run(f"t{n}", turn, 2, namespace=space)
        assert run.run(f"u{n}", turn, 2, namespace=space).cached >= 48 or first.cached == 0
        assert run.plans[-1].batch.adapters == [space.adapter]
    run.right_answers().all_free()


# ---- L04


@each_layout
def test_l04_unloading_an_adapter_under_its_requests(layout):
    """An adapter is unloaded while one of its requests decodes, one is in the middle of its prompt and one waits: they
    end with the right answers and find nothing of each other's; who comes after finds nothing of theirs; when the last
    has ended, nothing of the old is left.

    Mutation: `evict_namespace` does not call `detach_namespace`.
    """
    run = Run(*groups_of(layout, 16, pages=60), budget=40)
    prompt = toks(1, 40)
    run.submit("decoding", prompt, 40, namespace=A)
    run.step(3)
    run.submit("prefilling", prompt[:16] + toks(2, 64), 9, namespace=A)
    run.submit("base", prompt, 9)
    run.step()
    run.submit("waiting", prompt + toks(3, 9), 20, namespace=A)
    run.plan()  # and a step runs
    assert run.scheduler.evict_namespace(A)
    run.check()
    run.submit("new", prompt, 9, namespace=A)
    run.done()
    assert any(run.owned("unhooked").values()), "somebody still reads the old pages"
    run.idle().right_answers()
    assert run.ended["waiting"].cached == 0, "it was bound to what is gone"
    assert run.ended["new"].cached == 0
    assert not any(run.owned("unhooked").values())
    assert run.run("newer", prompt, 2, namespace=A).cached >= 32, "the new one has a cache of its own"
    assert run.scheduler.evict_namespace(A) and not run.scheduler.evict_namespace(A)
    run.scheduler.evict_namespace(BASE)
    assert run.owned("free") == {group.name: group.device_pages for group in run.cache.groups}


@each_layout
def test_l04_a_flush_under_everybody(layout):
    """`flush()` while requests run is the same for all namespaces; a retracted request comes back and computes.

    Mutation: `HybridPrefixCache.flush` forgets only the first root.
    """
    run = Run(*groups_of(layout, 16, pages=14, slots=4, windows=14), headroom=0, budget=64)
    crowd(run, toks(1, 40), [BASE, A, B, BASE], 30)
    for n in range(20):
        run.plan()
        if n % 6 == 3:
            run.scheduler.flush()
            run.check()
            assert not run.cache.stats()["nodes"] and not any(run.owned("tree").values())
        run.done()
    run.idle().right_answers()
    run.all_free()


# ---- L09


@pytest.mark.parametrize("most", [1, 2])
def test_l09_at_most_max_loras_adapters_in_a_batch(most):
    """No batch has more different adapters than `max_loras`, in prefill and decode; all get their turn; requests of the
    base model are in the first batch.

    Mutation: `AdapterCap.admits_new` always says yes; or the gate of a plan does not know the adapters that decode.
    """
    run = Run(full(200), max_loras=most, budget=256)
    crowd(run, toks(1, 20), [A, B, C, D, A, B, BASE, C, D, BASE], 6)
    run.idle().right_answers()
    assert max(len(adapters) for adapters in inside(run)) == most
    first = [row.id for row in run.rows[0]]
    assert "r6" in first and "r9" in first, "the base model counts toward no cap"
    assert len(run.ended) == 10


def test_l09_no_cap():
    """`max_loras=0` is no cap.

    Mutation: `AdapterCap` takes 0 as a number.
    """
    run = Run(full(200))
    crowd(run, toks(1, 20), [A, B, C, D], 6)
    run.idle().right_answers()
    assert len(inside(run)[0]) == 4


def test_l09_a_retry_keeps_the_cap():
    """The halves of a failed step, and what follows them, keep it too.

    Mutation: `AdapterCap.admits_new` always says yes.
    """
    run = Run(full(200), max_loras=2, budget=256)
    crowd(run, toks(1, 20), [A, B, A, B, C, D], 6)
    for n in range(40):
        if not run.live:
            break
        run.plan()
        run.fail() if n in (0, 4, 5, 9) else run.done()
    run.idle().right_answers()
    assert max(len(adapters) for adapters in inside(run)) == 2


def test_l09_base_requests_are_never_put_off():
    """While adapters wait for each other, the base model runs at once, also behind a gate that was closed for somebody
    who has waited long enough.

    Mutation: `AdapterCap.admits_new` looks at `closed` before it looks whether there is an adapter.
    """
    run = Run(full(200), max_loras=1, max_overtaken=0)
    run.submit("a", toks(1, 20), 60, namespace=A)
    run.step()
    run.submit("b", toks(2, 20), 5, namespace=B)
    run.submit("a2", toks(5, 20), 5, namespace=A)
    for n in range(5):
        run.submit(f"base{n}", toks(10 + n, 20), 2)
        assert f"base{n}" in [row.id for row in run.step()]
    run.idle().right_answers()


# ---- L10


@pytest.mark.parametrize("layout", ["full", "full+window", "full+state", "full+2windows+state"])
def test_l10_an_adapter_that_could_not_be_scheduled_blocks_nobody(layout):
    """The request of adapter A comes first and finds no pages: it takes no place under the cap, so B runs.

    Mutation: `PlanBuilder.serve` enters an adapter into the cap when it is admitted, not when its row is there.
    """
    run = Run(*groups_of(layout, 16, pages=12), max_loras=1, headroom=0)
    run.submit("base", toks(1, 100), 20)
    run.step()
    run.submit("a", toks(2, 120), 2, namespace=A)
    run.submit("b", toks(3, 10), 2, namespace=B)
    assert [row.id for row in run.step()] == ["base", "b"]
    run.idle().right_answers()
    assert run.first_rows() == ["base", "b", "a"]


# ---- L11


@pytest.mark.parametrize("policy", ["fcfs", "prefix"])
@pytest.mark.parametrize("most", [0, 4])
def test_l11_who_was_put_off_is_not_starved(most, policy):
    """A stream of requests of adapter A, of which one always runs, does not keep B out: after `max_overtaken` of them
    (and those of one plan) only the base model comes in until B can run.

    Mutation: `PlanBuilder.give_way_to` does not close the cap.
    """
    run = Run(full(200), max_loras=1, max_overtaken=most, policy=policy)
    run.submit("a", toks(1, 20), 6, namespace=A)
    run.step()
    run.submit("b", toks(2, 20), 6, namespace=B)
    for n in range(40):
        if "b" in run.first_rows():
            break
        run.submit(f"a{n}", toks(1, 20), 6, namespace=A)
        run.step()
    before = [id for id in run.first_rows() if id not in ("a", "b")]
    assert "b" in run.first_rows() and len(before) <= most + 1
    run.idle().right_answers()


# ---- L18


def test_l18_a_short_step_retracts_and_aborts_nobody():
    """Steps that are short because of the cap, and plans that are empty because a step runs, cost nobody anything.

    Mutation: `Planner.plan` calls `break_deadlock` for a plan without new rows, whether others run or not.
    """
    run = Run(full(40), max_loras=1, budget=64)
    crowd(run, toks(1, 40), [A, B, C, B, A, C], 9)
    while run.live:
        run.plan()
        for _ in range(3):
            assert run.scheduler.next_plan().empty
        run.done()
    stats = run.scheduler.stats()
    assert stats["retractions"] == 0 and stats["sat_out"] == 0
    assert {end.reason for end in run.ended.values()} == {"length"}
    assert run.recomputed() == 0
    run.right_answers()


def test_l18_prompts_that_the_cap_leaves_out_keep_what_they_have():
    """A prompt of adapter B in the middle of its chunks is left out while more urgent requests of A run; it keeps its
    pages and goes on where it was.

    Mutation: `PlanBuilder.resume` retracts holders that the gate does not let in.
    """
    run = Run(full(40), max_loras=1, budget=32)
    run.submit("b", toks(1, 90), 3, namespace=B)
    run.step()
    run.submit("a", toks(2, 20), 5, namespace=A, priority=-1)
    while "a" in run.live:
        assert [row.id for row in run.step()] == ["a"]
    assert (run.step()[0].id, run.rows[-1][0].start) == ("b", 32)
    run.idle().right_answers()
    assert run.scheduler.stats()["retractions"] == 0 and run.recomputed() == 0


# ---- L20


@each_layout
def test_l20_new_weights_match_nothing_older(layout):
    """Requests of version 1 find nothing of version 0 and share with each other; those of version 0 that run when the
    old is evicted end under it, with its answers.

    Mutation: `Namespace.version` takes no part in comparing (`compare=False`).
    """
    run = Run(*groups_of(layout, 16))
    new = Namespace(version=1)
    prompt = toks(1, 40)
    run.run("old", prompt, 3)
    run.submit("running", prompt, 30)
    run.step(2)
    assert run.run("first", prompt, 3, namespace=new).cached == 0
    assert run.scheduler.evict_namespace(BASE)
    run.idle().right_answers()
    assert run.ended["running"].generated == 30
    assert run.run("second", prompt, 3, namespace=new).cached >= 32
    assert run.said("first") == run.said("second") != run.said("old")
    run.scheduler.evict_namespace(new)
    assert run.owned("free") == {group.name: group.device_pages for group in run.cache.groups}
