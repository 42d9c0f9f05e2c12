"""Stories of backups that failed, and are offered again (cases T08, T12, T16)."""

from __future__ import annotations

import pytest

from sapwood.cache import Namespace
from sapwood.scheduler import StoreUp
from sapwood.scheduler import backup_retries as module

from .driver import BASE, each_layout, toks
from .store_run import PAGE, StoreRun
from .test_store import PROMPT


def stats(run: StoreRun) -> dict[str, int]:
    return run.scheduler.stats()["store"]


def kept(run: StoreRun, prompt) -> bool:
    """Whether another engine on the same store is served all whole pages of a prompt."""
    other = StoreRun(run.layout, depot=run.depot)
    return other.serve("other", prompt).cached == (len(prompt) - 1) // PAGE * PAGE


class Lab(StoreRun):
    def __init__(self, layout: str = "full", **more) -> None:
        super().__init__(layout, **more)
        self.layout = layout

    def lose_backups(self) -> int:
        """Everything is carried out, and no backup is kept. Returns how many were tried."""
        lost = 0
        for _ in range(20):
            plan = self.turn()
            lost += self.land("backup", ok=False)
            if not self.land() and plan.empty:
                return lost
        raise AssertionError("it does not come to rest")


@each_layout
def test_t08_a_backup_that_failed_is_offered_again(layout):
    """The store refuses six pages and takes what is below them: a hole. A second later they are offered again, the plan
    says when to ask, and another engine is served all of it.

    Mutation: `Prefetch.backup_done` forgets what failed; or `Prefetch.wake_in` thinks of requests alone.
    """
    run = Lab(layout)
    run.serve("ann", PROMPT, but=("backup",))
    run.land("backup", ok=False)
    longer = PROMPT[: 6 * PAGE] + toks(2, 3 * PAGE + 1)
    run.serve("bob", longer)
    assert stats(run)["owed"] == 1 and not run.cache.check()
    first = run.cache.groups[0].name
    there = run.depot.there(first, run.cache.page_hashes(BASE, longer)).tolist()
    assert not all(there) and there[-1], "a hole"
    plan = run.turn()
    assert plan.empty and plan.wake_in == 100
    run.tick(99)
    assert run.turn().wake_in == 1
    run.tick(1)
    (backup,) = run.turn().backups
    assert backup.start_page + len(backup.hashes) == 6 and stats(run)["owed"] == 0
    run.land("backup")
    assert kept(run, longer) and run.turn().wake_in is None
    run.close()


@each_layout
def test_t08_what_fell_into_an_outage_is_backed_up_after_it(layout):
    """The store is away while six are served; when it is back, they are offered a few a plan, oldest first.

    Mutation: `Prefetch.back_up` only counts; or `BackupRetries.due` gives all at once, or nothing unless time has
    passed.
    """
    run = Lab(layout, pages=80, host=80)
    run.tell(StoreUp(False))
    prompts = {f"r{n}": toks(10 + n, 6 * PAGE + 1) for n in range(6)}
    for id, prompt in prompts.items():
        run.serve(id, prompt)
    assert stats(run)["owed"] == 6 and not run.depot.values
    run.tick(1000)
    plan = run.turn()
    assert plan.empty and plan.wake_in is None, "nothing is asked of a store that is away"
    run.tell(StoreUp(True))
    assert len(run.turn().backups) == 4
    assert len(run.turn().backups) == 2
    run.land("backup")
    assert stats(run)["owed"] == 0 and all(kept(run, prompt) for prompt in prompts.values())
    run.close()


def test_t08_a_value_that_is_always_refused_is_given_up():
    """Others get through, one never does: it is offered at growing distances, eight times in all.

    Mutation: `BackupRetries.add` does not count tries; or `BackupRetries.failed` always waits as long.
    """
    run = Lab(pages=80, host=80)
    run.serve("ann", PROMPT, but=("backup",))
    run.land("backup", ok=False)
    offered = []
    for second in range(1, 400):
        run.tick(100)
        if run.turn().backups:
            offered.append(second)
            run.land("backup", ok=False)
            run.scheduler._book.prefetch.owed.got_through(-1)  # something of somebody else's
    assert offered == [1, 3, 7, 15, 31, 63, 127]
    assert stats(run)["not_backed_up"] == 1 and stats(run)["owed"] == 0
    run.close()


def test_t08_a_store_that_takes_nothing_is_asked_with_one_span_at_a_time():
    """Ten spans are refused, and so is everything after: one is offered at a time, ever more rarely. When one gets
    through, the rest follow.

    Mutation: `BackupRetries.due` does not look at the pause.
    """
    run = Lab(pages=120, host=120)
    for n in range(10):
        run.serve(f"r{n}", toks(10 + n, 6 * PAGE + 1), but=("backup",))
    assert run.land("backup", ok=False) == 10 and stats(run)["owed"] == 10
    tried = []
    for _ in range(300):
        run.tick(100)
        tried.append(run.lose_backups())
    assert max(tried) == 1 and 3 <= sum(tried) <= 10, "it was asked too often, or not at all"
    run.tick(6400)
    assert len(run.turn().backups) == 1
    run.land("backup")
    run.tick(6400)
    run.settle()
    assert stats(run)["owed"] == 0
    assert all(kept(run, toks(10 + n, 6 * PAGE + 1)) for n in range(10))
    run.close()


@each_layout
@pytest.mark.parametrize("how", ["evicted", "unloaded", "flushed"])
def test_t08_what_host_has_lost_is_not_offered_again(layout, how):
    """Before the store is back the pages leave host, or their namespace goes: nothing is begun, and nothing is held.

    Mutation: `StoreFetches.backup_done` returns what was unhooked; or the spans keep their pages.
    """
    space = Namespace(salt="ann")
    run = Lab(layout, pages=20, host=12, batch=4)
    run.serve("ann", PROMPT, but=("backup",), namespace=space)
    run.land("backup", ok=False)
    run.serve("bob", toks(3, 4 * PAGE + 1), but=("backup",), namespace=space)
    if how == "evicted":
        run.land("backup", ok=False)
        assert stats(run)["owed"] == 2
        for n in range(8):
            run.serve(f"crowd{n}", toks(50 + n, 9 * PAGE), reads_cache=False)
    elif how == "unloaded":
        run.scheduler.evict_namespace(space)
    else:
        run.scheduler.flush()
    run.land("backup", ok=False)  # of what is gone
    assert stats(run)["owed"] == (2 if how == "evicted" else 1)
    run.tick(6400)
    while stats(run)["owed"]:
        assert not run.turn().backups and not run.executor.moving
    run.cache.check()
    run.close()


def test_t12_only_so_much_is_remembered(monkeypatch):
    """The oldest is dropped, and counted.

    Mutation: `BackupRetries.add` drops the newest, or nothing.
    """
    monkeypatch.setattr(module, "_MAX_SPANS", 3)
    run = Lab(pages=80, host=80)
    run.tell(StoreUp(False))
    for n in range(5):
        run.serve(f"r{n}", toks(10 + n, 6 * PAGE + 1))
    assert (stats(run)["owed"], stats(run)["not_backed_up"]) == (3, 2)
    run.tell(StoreUp(True))
    run.settle()
    assert [kept(run, toks(10 + n, 6 * PAGE + 1)) for n in range(5)] == [False, False, True, True, True]
    run.close()


def test_t16_a_span_is_offered_again_under_its_own_hashes_after_its_node_was_split():
    """The backup of six pages failed; another prompt branches off after three, which splits them, and somebody goes on
    behind: the six are offered again, as they are.

    Mutation: `StoreFetches.backup_done` returns pages of the node as it is now.
    """
    run = Lab(pages=80, host=80)
    run.serve("ann", PROMPT, but=("backup",))
    run.land("backup", ok=False)
    run.serve("bob", PROMPT[: 3 * PAGE] + toks(4, 3 * PAGE + 1))
    run.serve("eve", PROMPT[: 6 * PAGE] + toks(5, 3 * PAGE + 1))
    run.tick(100)
    (backup,) = run.turn().backups
    assert (backup.start_page, backup.hashes) == (0, run.cache.page_hashes(BASE, PROMPT))
    run.land("backup")
    assert kept(run, PROMPT)
    run.close()
