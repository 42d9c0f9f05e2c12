"""The tree as an administrator sees it."""

from __future__ import annotations

import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig, StepDone


def served(*prompts, salts=()) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(4, [CacheGroup("full", "full", 200)], 512, 8))
    for at, prompt in enumerate(prompts):
        salt = salts[at] if salts else None
        scheduler.submit([RequestSpec(str(at), prompt, 1, Namespace(salt=salt))])
        while not (plan := scheduler.next_plan()).empty:
            scheduler.advance([StepDone(plan.step, dict.fromkeys(plan.batch.ids, 7))])
    return scheduler


def test_nodes_with_their_parents():
    """Two prompts that part: their common stem, and below it what each has of its own.

    Mutation: `_shown` counts pages for tokens; children come before their parents.
    """
    stem = list(range(100, 116))
    scheduler = served([*stem, *range(200, 208)], [*stem, *range(300, 312)])
    found = scheduler.cache.outline(100)
    first, *rest = found["nodes"]
    assert found["total"] == 3 and first["parent"] == -1 and first["first_tokens"] == stem
    assert first["tokens"] == 16 and first["device_pages"] == 4 and not first["pinned"]
    assert {(node["parent"], node["start"]) for node in rest} == {(0, 16)}
    assert {node["first_tokens"][0] for node in rest} == {200, 300}


def test_no_more_than_asked_for():
    """The rest is counted; salts are not shown.

    Mutation: `outline` ends its walk at `most`; a namespace shows its salt.
    """
    scheduler = served(*[list(range(at, at + 9)) for at in range(0, 600, 50)], salts=["secret"] * 12)
    found = scheduler.cache.outline(5)
    assert len(found["nodes"]) == 5 and found["total"] == 12
    assert "secret" not in repr(found) and found["namespaces"][0]["salted"] is True
    with pytest.raises(ValueError, match="most must be an integer from 1"):
        scheduler.cache.outline(0)


def test_what_could_be_given_out():
    """`available` counts what is free and what eviction could free: less, while a request holds pages.

    Mutation: `stats` tells the free pages alone.
    """
    scheduler = served(list(range(40)))
    assert scheduler.cache.stats()["available"] == {"full": {"device": 200}}
    assert scheduler.cache.stats()["pages"]["full"]["device"]["free"] < 200
    scheduler.submit([RequestSpec("runs", list(range(60)), 9)])
    scheduler.next_plan()
    assert scheduler.cache.stats()["available"]["full"]["device"] <= 200 - 15
