"""Stories of the facade and its families: what every mix of groups must do through `HybridPrefixCache` (cases F)."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
import pytest

import sapwood.cache
from sapwood.cache import CacheGroup, Family, Lease, Namespace, Operation, Reserve, register_family, token_bytes
from sapwood.cache.group import DEVICE, HOST

from .chaos import common
from .driver import BASE, Engine, Request, full, state, toks, window
from .stories import (
    LAYOUTS,
    PAGE,
    all_free,
    compute,
    crowd,
    empty_device,
    engine_of,
    hit,
    leave,
    newcomer,
    owned,
    save,
    sit,
    step,
    write_back,
)

SINKS = 4  # tokens at the start that the toy family never lets go of


class Sinks(Family):
    """A toy family: a query sees the first tokens of the prompt, and a window of the latest."""

    def reads(self, start: int) -> tuple[tuple[int, int], ...]:
        low = max(0, start - self.group.window + 1)
        return ((0, min(SINKS, low)), (low, start))


register_family("sinks", Sinks)


def sinks(pages: int = 24, host: int = 0) -> CacheGroup:
    return CacheGroup("sinks", "sinks", pages, host, 6)


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---- F01


@pytest.mark.parametrize("layout", [(), (full(24, 24),), (full(24, 24), state(4, 4))], ids=["alone", "full", "state"])
def test_f01_a_toy_family_lives_through_the_facade(layout):
    """A family defined in this file is matched, admitted, committed, evicted, written back and loaded like any other.

    Mutation: `Family.slid` forgets what is kept between (the sinks of a running request go); `Path.last_missing` does
    not look at `node.copies[HOST]`.
    """
    engine = engine_of(sinks(24, 24), *layout, save="through", every=1)
    prompt = toks(1, 41)
    first = engine.submit("first", prompt, max_tokens=7)
    step(engine, 8, times=9)
    table = engine.cache.table(first.lease, "sinks")
    assert table[0], "the sinks of a running request stay"
    assert not table[1:9].any() and table[9:].all(), "between the sinks and the window it holds nothing"
    engine.idle()
    assert not engine.operations

    second = engine.run("second", prompt)
    assert second.cached == 40 and second.computed == 1

    empty_device(engine)
    assert hit(engine, prompt, host=False).boundary == 0
    found = hit(engine, prompt)
    assert (found.boundary, found.load) == (10, True)
    before = engine.cache.stats()["transfers"]["pages_loaded"]
    third = engine.run("third", prompt)
    assert third.cached == 40 and third.computed == 1
    loaded = engine.cache.stats()["transfers"]["pages_loaded"] - before
    whole = sum(10 if g.family == "full" else 1 for g in layout)
    assert loaded == whole + 3, "of the sinks, the first page and the two of the window came back, no other"
    all_free(engine)


def test_f01_a_toy_family_without_its_sinks_is_no_hit():
    """When eviction takes the sinks, no boundary is offered; computing again puts them back.

    Mutation: `Family.deepest` looks only at the last of `columns`.
    """
    engine = engine_of(sinks(12), full(24))
    prompt = toks(1, 41)
    engine.run("first", prompt, chunk=8)
    assert hit(engine, prompt).boundary == 10
    crowd(engine, 1, engine.pages("sinks")["free"] + 1)
    found = hit(engine, prompt)
    assert (found.boundary, found.depth) == (0, 10), "the full pages are there, the first page of sinks is not"
    again = engine.run("again", prompt, chunk=8)
    assert again.cached == 0
    assert hit(engine, prompt).boundary == 10
    all_free(engine)


def families_named(source: str) -> list[str]:
    """Where a module speaks of a particular family: by its name as a string, or by importing it."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("full", "window", "state"):
            found.append(f"line {node.lineno}: {node.value!r}")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if "families" in (getattr(node, "module", "") or "") or {"Full", "Window", "State"} & set(names):
                found.append(f"line {node.lineno}: imports {', '.join(names)}")
        elif isinstance(node, ast.Attribute) and node.attr == "family":
            found.append(f"line {node.lineno}: asks for a family")
    return found


def test_f01_the_facade_and_the_scheduler_name_no_family():
    """Neither the facade nor any file of the scheduler names a family, imports one or asks a group for its own.

    Mutation: `if group.family == "state"` anywhere in facade.py or in scheduler/.
    """
    cache = Path(sapwood.cache.__file__).parent
    assert families_named((cache / "families" / "__init__.py").read_text()), "the search itself works"
    for file in [cache / "facade.py", *sorted((cache.parent / "scheduler").rglob("*.py"))]:
        assert not families_named(file.read_text()), f"{file.name} names a family"


# ---- F02, F03


@every_layout
def test_f02_what_was_evicted_from_the_device_comes_back_from_host(layout):
    """A prefix written to host and evicted from the device is served from host by every group, none of it computed.

    Mutation: `Path.last_missing` or `Path.deepest_slot` or `Path.deepest_closed` does not look at `node.copies[HOST]`.
    """
    engine = engine_of(*LAYOUTS[layout](), save="through")
    prompt = toks(1, 26)
    first = engine.run("first", prompt, max_tokens=3)
    assert engine.cache.stats()["transfers"]["saves"] >= 1
    empty_device(engine)
    assert hit(engine, prompt, host=False).boundary == 0, "nothing is left on the device"
    found = hit(engine, prompt)
    assert (found.boundary, found.load) == (6, True)

    again = engine.run("again", prompt, max_tokens=3)
    assert again.cached == 24
    assert again.computed == 2 + 2, "the rest of the prompt, and two generated tokens"
    assert again.generated == first.generated
    transfers = engine.cache.stats()["transfers"]
    assert transfers["loads"] == 1 and transfers["loads_failed"] == 0
    all_free(engine)


@pytest.mark.parametrize("group", [full(24, 4), window(6, 24, 4), state(8, 2)], ids=["full", "window", "state"])
def test_f03_what_was_just_written_to_host_is_the_last_to_leave_it(group):
    """Host memory under pressure gives up what was written back longest ago, not what was computed longest ago.

    Mutation: nothing sets `used` when a save lands (the line in `Saves.save_done` and the one in `Tree.unpin`).
    """
    engine = engine_of(group)
    old, new, latest = toks(1, 9), toks(2, 9), toks(3, 9)
    of_old = compute(engine, "old", old)
    of_new = compute(engine, "new", new)
    write_back(engine, of_new)
    of_latest = compute(engine, "latest", latest)
    write_back(engine, of_old)  # computed first, written back last
    write_back(engine, of_latest)  # host has room for two of the three
    empty_device(engine)
    assert [hit(engine, tokens).boundary for tokens in (old, new, latest)] == [2, 0, 2]
    all_free(engine)


# ---- F04, F05: slots


def test_f04_a_batch_that_just_fits_fits_and_one_more_does_not():
    """As many requests run as there are slots: each needs one, and no room is kept for its checkpoint.

    Mutation: `Admission.wish` asks for two slots.
    """
    engine = engine_of(full(64), state(3))
    for name in "abc":
        engine.submit(name, toks(ord(name), 9), max_tokens=4)
    late = engine.submit("late", toks(7, 9))
    step(engine)
    assert [r.id for r in engine.running] == ["a", "b", "c"] and late.lease is None
    assert owned(engine, "leases")["state"] == 3
    counts = engine.cache.stats()["steps"]
    assert (counts["checkpoints"], counts["checkpoints_skipped"]) == (0, 3), "there was no slot for a checkpoint"
    engine.abort("b")
    step(engine, times=2)
    assert late.ended == "length"
    engine.idle()
    all_free(engine)


def test_f04_a_checkpoint_takes_the_slot_of_an_idle_snapshot():
    """When no slot is free, a checkpoint is made in the place of a snapshot nobody uses.

    Mutation: `Checkpoints.checkpoint` asks for a free slot instead of `Tier.can_make`.
    """
    engine = engine_of(full(64), state(2))
    engine.run("a", toks(1, 9))
    assert hit(engine, toks(1, 9)).boundary == 2
    engine.run("b", toks(2, 9))
    assert hit(engine, toks(2, 9)).boundary == 2, "one slot to work in, and the other for its checkpoint"
    assert hit(engine, toks(1, 9)).boundary == 0
    assert engine.cache.stats()["steps"]["checkpoints_skipped"] == 0


def test_f04_no_credit_for_slots_that_are_about_to_be_snapshots():
    """A slot that a step in flight will fill with a checkpoint is given to nobody before that step is done.

    Mutation: `Tier.available` counts slots in flight.
    """
    engine = engine_of(full(64), state(2))
    maker = engine.submit("maker", toks(1, 9), max_tokens=3)
    assert engine.plan()
    assert owned(engine, "flight")["state"] == 1, "its checkpoint is on its way"
    assert newcomer(engine, 1) is None
    engine.done()
    guest = newcomer(engine, 1)
    assert guest is not None, "now the snapshot is idle, and makes room"
    assert maker.lease is not None
    leave(engine, guest)
    engine.idle()
    all_free(engine)


def test_f04_pages_kept_for_rows_that_run_are_kept_from_one_that_adopts_much():
    """Two rows run and two window pages are to be left for them, but none is free. A prompt whose window is there far
    beyond its first chunk takes no new page, and yet what it would read could be evicted for nobody any more: no.

    Mutation: `Admission._ahead` counts the pages it adopts beyond the chunk against those it must leave.
    """
    engine = Engine(4, full(64), window(32, 12), state(4))
    prompt = toks(1, 40)
    engine.run("one", [*prompt, 99])  # ten window pages in the tree
    for n in range(2):  # two rows run, and take the last
        nothing = engine.cache.match_nothing(engine.cache.bind(BASE), token_bytes([500 + n]))
        assert engine.cache.admit(nothing, 1) is not None
    match = engine.cache.match_prefix(engine.cache.bind(BASE), token_bytes(prompt[:36] + toks(2, 8)))
    assert (match.boundary, match.depth) == (0, 9)
    assert engine.cache.admit(match, match.start + 4, keep=Reserve(rows=2)) is None
    assert engine.cache.admit(match, match.start + 4) is not None
    engine.cache.check()


class Start(Family):
    """Reads the first eight tokens, and nothing between them and itself."""

    def reads(self, start):
        return ((0, min(start, 8)),)


register_family("start", Start)


def test_f01_a_family_that_reads_far_back_and_nothing_near_is_given_just_that():
    """What lies between what it reads and where it begins is not read, and can be evicted for others.

    Mutation: `Admission.wish` takes one span for a window that reaches to the boundary.
    """
    engine = Engine(4, full(64), CacheGroup("start", "start", 16))
    prompt = toks(1, 41)
    engine.run("one", prompt)
    match = engine.cache.match_prefix(engine.cache.bind(BASE), token_bytes([*prompt, *toks(2, 8)]))
    lease, _ = engine.cache.admit(match._replace(sibling=None), match.boundary * 4 + 4)
    table = engine.cache.table(lease, "start").tolist()
    assert all(table[:2]) and not any(table[2:10]) and table[10]
    other = engine.cache.match_nothing(engine.cache.bind(BASE), token_bytes(toks(3, 32)))
    assert engine.cache.admit(other, 32) is not None, "eight pages are idle"
    engine.cache.check()


@pytest.mark.parametrize("where", ["device", "host"])
def test_f04_a_pool_of_one_slot_serves_a_second_turn(where):
    """A state request needs one slot, so in a pool of one it also runs when its own snapshot would take that slot.

    Mutation: `HybridPrefixCache.admit` does not fall back to `admit_from_zero`.
    """
    engine = engine_of(full(64, 64), state(1, 1), save="through", save_pages=16)
    engine.run("first", toks(1, 8))
    if where == "host":
        engine.settle()
        crowd(engine, 1, 1)
    found = hit(engine, toks(1, 9))
    assert (found.boundary, found.load) == (2, where == "host"), "its working slot stood on a boundary, and was kept"
    second = engine.run("second", toks(1, 9))
    assert second.ended == "length" and second.computed == 9
    all_free(engine)


def test_f05_a_request_that_ends_on_a_boundary_leaves_its_state_there():
    """A request that ends between two checkpoints, exactly at a page end, publishes its working slot as a snapshot.

    Mutation: `finish_request` does not call `publish_state`.
    """
    engine = engine_of(full(64), state(4))
    first = engine.run("first", toks(1, 6), max_tokens=7)  # computes 6 + 6 tokens: three whole pages
    turn = first.tokens + toks(2, 3)
    assert engine.cache.stats()["steps"]["states_published"] == 1
    assert hit(engine, turn).boundary == 3
    second = engine.run("second", turn)
    assert second.cached == 12 and second.computed == len(turn) - 12
    all_free(engine)


def test_f05_a_request_that_ends_inside_a_page_says_so_and_leaks_nothing():
    """A state between two boundaries cannot be kept: it is counted as dropped, and its slot is free at once.

    Mutation: `publish_state` does not look at `rest` (a state is offered at a depth at which it does not stand).
    """
    engine = engine_of(full(64), state(4))
    first = engine.run("first", toks(1, 6), max_tokens=8)  # computes 6 + 7 tokens
    counts = engine.cache.stats()["steps"]
    assert (counts["states_published"], counts["states_dropped"]) == (0, 1)
    assert owned(engine, "free")["state"] == 3 and owned(engine, "tree")["state"] == 1, "the checkpoint of its prompt"
    second = engine.run("second", first.tokens + toks(2, 3))
    assert second.cached == 4, "the last boundary with a snapshot"
    all_free(engine)


# ---- F06: acknowledgements


def parent_and_child(engine: Engine) -> tuple[list[int], list[int], int, int]:
    """A prompt of two pages and one that goes on for a third, each with its own save under way."""
    prompt = toks(1, 9)
    longer = prompt[:8] + toks(2, 5)
    (upper,) = save(engine, compute(engine, "upper", prompt))
    (lower,) = save(engine, compute(engine, "lower", longer))
    return prompt, longer, upper, lower


@pytest.mark.parametrize("groups", [(full(12, 12),), (full(12, 12), window(6, 12, 12))], ids=["full", "full+window"])
def test_f06_an_acknowledgement_shows_only_what_was_written(groups):
    """When the save of a longer path lands first, host has its page and nothing of what stands above it.

    Mutation: `ClosedPages.land` does not split where the run before is not there yet (`count < first`).
    """
    engine = engine_of(*groups, events=True)
    _, longer, upper, lower = parent_and_child(engine)
    engine.events.clear()
    engine.land(lower)
    assert set(owned(engine, "tree", "host").values()) == {1}
    assert set(owned(engine, "flight", "host").values()) == {2}
    (told,) = engine.events
    hashes = [int.from_bytes(digest[:8], "big", signed=True) for digest in engine.cache.page_hashes(BASE, longer)]
    assert (told.medium, told.block_hashes, told.parent_block_hash) == ("CPU", [hashes[2]], hashes[1])
    engine.land(upper)
    assert set(owned(engine, "tree", "host").values()) == {3}
    empty_device(engine)
    again = engine.run("again", longer)
    assert again.cached == 12, "and all of it is what it should be"
    all_free(engine)


def test_f06_a_page_whose_ancestors_never_reached_host_is_not_offered():
    """If the save above fails, what was written below it is served from no tier once the device has let go.

    Mutation: `_evict_tail` does not call `prune_below` (a host copy stays that nobody can reach).
    """
    engine = engine_of(full(12, 12))
    _, longer, upper, lower = parent_and_child(engine)
    engine.land(lower)
    engine.land(upper, ok=False)
    assert owned(engine, "tree", "host") == {"full": 1}
    assert hit(engine, longer).boundary == 3
    empty_device(engine)
    assert hit(engine, longer).boundary == 0
    assert owned(engine, "free", "host") == {"full": 12}
    all_free(engine)


# ---- F07: abort


def waits(engine):
    engine.submit("victim", toks(1, 30), max_tokens=20)


def sits(engine):
    waits(engine)
    sit(engine, engine.requests["victim"])


def runs_its_first_chunk(engine):
    waits(engine)
    assert engine.plan(8)


def is_between_chunks(engine):
    waits(engine)
    step(engine, 8)


def decodes(engine):
    waits(engine)
    step(engine, times=3)
    assert engine.plan()


def is_two_steps_ahead(engine):
    waits(engine)
    step(engine, times=4)
    assert engine.plan() and engine.plan()


def has_failed_under_overlap(engine):
    is_two_steps_ahead(engine)
    engine.fail()


def is_saved(engine):
    engine.save = "through"
    waits(engine)
    step(engine)
    assert engine.operations


def loads(engine):
    engine.save = "through"
    engine.run("before", toks(1, 30))
    empty_device(engine)
    engine.submit("victim", toks(1, 30))
    engine.plan()
    assert engine.requests["victim"].lease.loading and engine.operations


PHASES = [
    waits,
    sits,
    runs_its_first_chunk,
    is_between_chunks,
    decodes,
    is_two_steps_ahead,
    has_failed_under_overlap,
    is_saved,
    loads,
]


@pytest.mark.parametrize("layout", ["full", "window", "state", "full+window+state"])
@pytest.mark.parametrize("phase", PHASES, ids=[phase.__name__ for phase in PHASES])
def test_f07_abort_frees_everything_in_every_state(layout, phase):
    """Whatever a request is doing when it is aborted, its lease is gone at once and its memory as soon as nothing in
    flight touches it.

    Mutation: `StepCommits._drop` does not release `lease.working`; `StepCommits.end` leaves its lease among the waiters
    of a load.
    """
    engine = engine_of(*LAYOUTS[layout](), every=1)
    phase(engine)
    engine.abort("victim")
    assert engine.cache.stats()["leases"] == 0
    assert not any(owned(engine, "leases").values()), "nobody holds a page for it"
    engine.settle()
    assert not any(owned(engine, "flight").values()) and not any(owned(engine, "flight", "host").values())
    empty_device(engine)
    all_free(engine)


@pytest.mark.parametrize("prompt", [24, 22], ids=["whole pages", "a part-filled page"])
def test_f07_memory_of_an_aborted_row_is_given_to_no_transfer_while_its_step_runs(prompt):
    """A load has to wait for the pages that the step of an aborted request still writes.

    Mutation: `StepCommits.end` drops the lease at once, whatever still reads it.
    """
    engine = engine_of(full(6, 6))
    stored = toks(1, 9)
    write_back(engine, compute(engine, "stored", stored))
    empty_device(engine)
    engine.submit("victim", toks(2, prompt), max_tokens=2)
    assert engine.plan()
    engine.abort("victim")
    back = engine.submit("back", stored)
    assert not engine.plan() and not engine.operations and back.lease is None
    engine.done()
    engine.plan()
    assert back.lease.loading
    engine.idle()
    assert back.cached == 8
    all_free(engine)


def test_f07_a_page_that_is_being_saved_is_given_to_nobody_after_abort():
    """What a save still reads stays where it is, though its request is gone and others want room.

    Mutation: `Saves.begin_save` makes its Holder on no tier (`()` in the place of `(DEVICE,)`).
    """
    engine = engine_of(full(4, 4), save="through")
    engine.submit("victim", toks(1, 8), max_tokens=9)
    step(engine)
    engine.abort("victim")
    assert newcomer(engine, 1, pages=3) is None, "two pages are free, two are being read"
    engine.settle()
    guest = newcomer(engine, 1, pages=4)
    assert guest is not None
    leave(engine, guest)
    assert hit(engine, toks(1, 9)).load, "and the copy is good"
    assert engine.run("after", toks(1, 9)).cached == 8
    all_free(engine)


# ---- F08: snapshots and the pages under them


def test_f08_evicting_a_snapshot_keeps_the_attention_pages():
    """Pressure on slots takes snapshots and not one page; the prompt is computed again in place, and then hits.

    Mutation: `PageQueue.evict` prunes the node of a snapshot in the place of `Snapshots.drop`.
    """
    engine = engine_of(full(24), state(3))
    prompt = toks(1, 26)
    engine.run("first", prompt)
    crowd(engine, 3, 1)
    found = hit(engine, prompt)
    assert (found.boundary, found.depth, found.reason) == (0, 6, "no_snapshot")
    again = engine.run("again", prompt)
    assert again.cached == 0
    assert owned(engine, "tree") == {"full": 6, "state": 1}, "no page was written twice"
    assert engine.run("third", prompt).cached == 24


def test_f08_evicting_attention_pages_drops_the_snapshots_that_stand_on_them():
    """Pressure on pages takes the tail of a path with the snapshot at its end, and leaves the snapshot further up.

    Mutation: `Tree._free_from` frees no slots.
    """
    engine = engine_of(full(24), state(8))
    prompt = toks(1, 26)
    engine.run("short", prompt[:13])
    engine.run("long", prompt)
    assert owned(engine, "tree") == {"full": 6, "state": 2}
    crowd(engine, 1, 19)
    assert owned(engine, "tree") == {"full": 5, "state": 1}
    found = hit(engine, prompt)
    assert (found.boundary, found.depth) == (3, 5)
    crowd(engine, 1, 22)
    assert owned(engine, "tree") == {"full": 2, "state": 0}
    assert owned(engine, "free")["state"] == 8
    all_free(engine)


# ---- F09: any mix of groups


def random_groups(rng: random.Random) -> list[CacheGroup]:
    """One to four groups; their memory is scarce."""
    host = rng.choice([(0, 0, 0), (12, 10, 4), (12, 10, 4), (12, 10, 0), (0, 10, 4)])
    sizes = [rng.choice([1, 3, 4, 7, 9]) for _ in range(rng.randint(0, 2))]
    groups = [window(size, rng.randint(5, 9), host[0], f"window {i}") for i, size in enumerate(sizes)]
    if rng.random() < 0.7:
        groups.append(full(rng.randint(12, 20), host[1]))
    if rng.random() < 0.6 or not groups:
        groups.append(state(rng.randint(3, 6), host[2]))
    return groups


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings."""
    prompts: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(prompts)[: rng.randint(0, 32)] if prompts and rng.random() < 0.8 else []
        prompts.append((head + [rng.randint(0, 2) for _ in range(rng.randint(1, 16))])[:32])
    return prompts


def holdings(engine: Engine, tokens) -> tuple[int, dict[str, np.ndarray]]:
    """Node by node: how many pages of `tokens` the tree knows, and which of them each group has in any tier."""
    tree = engine.cache._tree
    root = tree.roots.get(BASE)
    held = {group.name: np.zeros(len(tokens) // PAGE + 1, bool) for group in engine.cache.groups}
    depth = 0
    stack = [] if root is None else [(child, []) for child in root.top.children.values()]
    while stack:
        node, before = stack.pop()
        path = before + np.frombuffer(bytes(node.edge), np.int32).tolist()
        same = common(tokens, path) // PAGE
        depth = max(depth, same)
        for g, group in enumerate(engine.cache.groups):
            for copy in node.copies:
                if group.name in engine.double.slots:
                    for end in copy.pages[g] or ():
                        if end <= same:
                            held[group.name][end - 1] = True
                else:
                    there = np.frombuffer(bytes(copy.pages[g] or b""), np.int32) != 0
                    for column in (there.nonzero()[0] + node.start).tolist():
                        if column < same:
                            held[group.name][column] = True
        stack += [(child, path) for child in node.children.values()]
    return depth, held


def servable(engine: Engine, tokens, boundary: int, held: dict[str, np.ndarray]) -> bool:
    """Word for word what a family needs to begin at `boundary`."""
    start = min(boundary * PAGE, len(tokens) - 1)
    for group in engine.cache.groups:
        have = held[group.name]
        if group.family == "state":
            if boundary and not (have[boundary - 1] and boundary * PAGE < len(tokens)):
                return False
            continue
        first = 0 if group.family == "full" else max(0, start - group.window + 1) // PAGE
        if not have[first:boundary].all():
            return False
    return True


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(16))
def test_f09_any_mix_of_groups_hits_what_all_can_serve_in_any_order(seed):
    """The boundary found is the deepest that every group has what it needs for, whatever the order of the groups.

    Mutation: `Matcher.boundary` is content too early (`settled` starts at 1).
    """
    rng = random.Random(seed)
    groups = random_groups(rng)
    shuffled = groups[::-1] if seed % 2 else rng.sample(groups, len(groups))
    engines = [engine_of(*order, save="through", seed=seed, every=2) for order in (groups, shuffled)]
    for number, prompt in enumerate(random_prompts(rng, 18)):
        found = []
        for engine in engines:
            match = hit(engine, prompt)
            depth, held = holdings(engine, prompt)
            best = max(b for b in range(depth + 1) if servable(engine, prompt, b, held))
            assert match.boundary == best, f"{prompt}: {best} pages can be served"
            found.append((match.boundary, match.depth, match.cuts, engine.run(f"r{number}", prompt, 3).generated))
        assert found[0] == found[1], "the order of the groups made a difference"
    for engine in engines:
        all_free(engine)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["window first", "state first"])
def test_f09_a_boundary_that_one_group_lowers_is_asked_of_the_others_again(order):
    """The window reaches to the end, the only snapshot stands at page 2, and there the window is gone: no hit.

    Mutation: `Matcher.boundary` asks every family once.
    """
    groups = (window(4, 16), state(4))
    engine = engine_of(*(groups[at] for at in order))
    prompt = toks(1, 33)
    engine.run("short", prompt[:9])
    engine.run("long", prompt)
    reader = engine.submit("reader", prompt[:32] + toks(2, 1), max_tokens=4)
    step(engine)  # from now on it reads the window before page 8, and the snapshot there is idle
    sit(engine, engine.submit("other", prompt[:8] + toks(3, 1)))  # so the snapshot at page 2 is the last one used
    engine.abort("other")
    assert reader.cached == 32
    guests = [newcomer(engine, 1, pages=13), newcomer(engine, 2)]
    assert all(guests)
    _, held = holdings(engine, prompt)
    assert held["state"].nonzero()[0].tolist() == [1] and held["window"].nonzero()[0].tolist() == [7]
    assert hit(engine, prompt).boundary == 0
    leave(engine, *guests)
    engine.idle()
    assert engine.run("again", prompt).cached == 0
    all_free(engine)


# ---- F10: windows


def test_f10_window_pages_that_a_lease_reads_are_never_taken():
    """While a request decodes, others get every page of the window group but those in its window.

    Mutation: `Publisher._fill` does not count the publisher as a reader of what it hands over.
    """
    engine = engine_of(window(8, 12))
    reader = engine.submit("reader", toks(1, 24), max_tokens=6)
    step(engine, times=2)
    mine = [page for page in engine.cache.table(reader.lease, "window").tolist() if page]
    guest = newcomer(engine, 1, pages=12 - len(mine))
    assert guest is not None, "all but the window could be had"
    assert not set(mine) & set(engine.cache.table(guest, "window").tolist())
    assert newcomer(engine, 2) is None, "and nothing more"
    leave(engine, guest)
    engine.idle()
    all_free(engine)


@pytest.mark.parametrize("layout", [(), (full(64),)], ids=["window alone", "with full"])
def test_f10_pages_between_go_before_the_windows_of_leaves_and_branch_points(layout):
    """Under pressure the window group keeps, to the last, what makes leaves and the branch point hits.

    Mutation: `worth` finds every page worth as little.
    """
    engine = engine_of(window(8, 26), *layout)
    trunk = toks(1, 32)
    left, right = trunk + toks(2, 24), trunk + toks(3, 24)
    engine.run("left", left, chunk=16)
    engine.run("right", right, chunk=16)
    assert owned(engine, "tree")["window"] == 8 + 6 + 6
    crowd(engine, 1, 26 - 3 * 2)
    assert owned(engine, "tree")["window"] == 6, "two pages for each of the two leaves and the branch point"
    assert hit(engine, left).boundary == 14 and hit(engine, right).boundary == 14
    other = trunk + toks(4, 9)
    assert hit(engine, other).boundary == 8
    for name, prompt in (("left again", left), ("right again", right), ("other", other)):
        engine.run(name, prompt, chunk=16)
    crowd(engine, 1, 26)
    assert owned(engine, "tree")["window"] == 0, "when all is wanted, all goes"
    all_free(engine)


@pytest.mark.parametrize("layout", [(), (full(64),)], ids=["window alone", "with full"])
def test_f10_a_hit_needs_only_its_window(layout):
    """Holes before the window do not matter: a prompt starts at its end, and its table is empty where the holes are.

    Mutation: `Window.closed = True`; or `Window.reads` begins at 0.
    """
    engine = engine_of(window(6, 16), *layout)
    prompt = toks(1, 40)
    engine.run("first", prompt, chunk=8)
    kept = 3
    crowd(engine, 1, 16 - kept)
    _, held = holdings(engine, prompt)
    assert held["window"].nonzero()[0].tolist() == [7, 8, 9], "only the end is left"
    follow = engine.submit("follow", prompt + toks(2, 3))
    assert engine.plan()
    assert follow.cached == 40
    table = engine.cache.table(follow.lease, "window")
    assert not table[:8].any() and table[8:].all()
    engine.idle()
    assert hit(engine, prompt[:24]).boundary == 0, "and where the window is gone there is no hit"
    all_free(engine)


@pytest.mark.parametrize("size", [1, 3])
def test_f10_a_whole_prompt_needs_the_page_of_its_last_token(size):
    """A prompt of whole pages computes only its last token, and reads it from the shared page: without that, no hit
    to the end.

    Mutation: `Family.columns` does not add the last page when the window does not reach it.
    """
    engine = engine_of(window(size, 8), full(24))
    prompt = toks(1, 8)
    engine.run("first", prompt)
    assert hit(engine, prompt).boundary == 2
    crowd(engine, 1, 8)
    found = hit(engine, prompt)
    assert (found.boundary, found.depth) == (1 if size == 1 else 0, 2), "a window of one needs nothing at page 1"
    assert engine.run("again", prompt).cached == found.start
    assert engine.run("third", prompt).cached == 7
    all_free(engine)


# ---- F12: all or none

FULL_LAST = (window(6, 24), state(4), full(9))
WINDOW_LAST = (full(24), state(4), window(6, 9))
STATE_LAST = (full(24), window(6, 24), state(2))


@pytest.mark.parametrize(
    ("groups", "guests", "pages"),
    [(FULL_LAST, 1, 7), (WINDOW_LAST, 1, 7), (STATE_LAST, 2, 1)],
    ids=["full last", "window last", "state last"],
)
def test_f12_a_group_without_room_leaves_the_others_as_they_were(groups, guests, pages):
    """An admission that fails in the last group has evicted, pinned and taken nothing in the groups before it.

    Mutation: `Tier.can_make` returns after its first group.
    """
    engine = engine_of(*groups)
    cached = toks(1, 9)
    engine.run("cached", cached)
    others = [newcomer(engine, seed, pages) for seed in range(guests)]
    before = engine.cache.stats(), free_lists(engine), holdings_lists(engine, cached)
    all_that_could_be_had = 24 - guests * pages
    assert newcomer(engine, 9, all_that_could_be_had) is None
    assert (engine.cache.stats(), free_lists(engine), holdings_lists(engine, cached)) == before
    leave(engine, *others)
    all_free(engine)


def holdings_lists(engine: Engine, tokens) -> dict[str, list[int]]:
    return {name: there.nonzero()[0].tolist() for name, there in holdings(engine, tokens)[1].items()}


def free_lists(engine: Engine) -> list[list[int]]:
    return [pool.free_ids().tolist() for pool in engine.cache._tree.device.pools]


@pytest.mark.parametrize("groups", [(full(24), window(6, 6)), (window(6, 24), full(6))], ids=["window", "full"])
def test_f12_growing_takes_pages_of_all_groups_or_of_none(groups):
    """A lease that cannot grow in its last group gets no page of the first, one by one or with others in one call.

    Mutation: `HybridPrefixCache.grow` or `grow_rows` does not ask `can_make`.
    """
    engine = engine_of(*groups)
    one, two = newcomer(engine, 1, pages=2), newcomer(engine, 2, pages=3)
    before, free = engine.cache.stats(), free_lists(engine)
    assert not engine.cache.grow(one, 4 * PAGE)
    assert engine.cache.grow_rows([one, two]) is None
    assert (engine.cache.stats(), free_lists(engine)) == (before, free)
    assert engine.cache.growable(one, 4 * PAGE) == 3 * PAGE
    assert engine.cache.grow(one, 3 * PAGE)
    leave(engine, one, two)
    all_free(engine)


# ---- F13: stats


def test_f13_stats_alone_draw_the_dashboard():
    """Pages by group, tier and owner, hits, misses with reasons, evictions, transfers, namespaces: all are in stats.

    Mutation: `_count` does not fill the tally of the root; `ClosedPages.free_from` does not count what it evicts.
    """
    tenant = Namespace(salt="tenant")
    engine = engine_of(
        CacheGroup("full", "full", 24, 24, page_bytes=100), window(6, 24, 24), state(4, 4), save="through"
    )
    prompt = toks(1, 26)
    engine.run("miss", prompt)
    engine.run("hit", prompt)
    engine.run("tenant", prompt, ns=tenant)
    live = engine.submit("diverged", prompt[:16] + toks(2, 9), max_tokens=9)
    step(engine, times=2)
    assert engine.plan()
    stats = engine.cache.stats()

    for group in engine.cache.groups:
        for tier, capacity in (("device", group.device_pages), ("host", group.host_pages)):
            pages = stats["pages"][group.name][tier]
            assert pages["capacity"] == capacity
            assert sum(pages[who] for who in ("free", "tree", "leases", "flight", "unhooked")) == capacity
    device, host = stats["pages"]["full"]["device"], stats["pages"]["full"]["host"]
    assert (device["tree"], device["leases"]) == (6 + 6 + 2, 1)
    assert stats["bytes"]["full"] == {"device": 1500, "host": 1400}
    assert (host["tree"], host["flight"]) == (12, 2), "the pages of the request that still runs are on their way"
    assert stats["pages"]["state"]["device"]["leases"] == 1

    assert (stats["requests"], stats["prompt_tokens"], stats["cached_tokens"]) == (4, 26 * 3 + 25, 24)
    assert stats["reasons"] == {"empty": 2, "hit": 1, "no_snapshot": 1}
    by = {entry["namespace"]: entry for entry in stats["namespaces"]}
    assert by[BASE]["misses"] == {"empty": 1, "no_snapshot": 1} and by[tenant]["misses"] == {"empty": 1}
    assert (by[BASE]["requests"], by[BASE]["cached_tokens"], by[BASE]["bound"]) == (3, 24, 1)
    assert (by[tenant]["requests"], by[tenant]["cached_tokens"], by[tenant]["bound"]) == (1, 0, 0)

    engine.abort(live.id)
    engine.settle()
    empty_device(engine)
    stats = engine.cache.stats()
    assert stats["evicted"]["full"] == {"device": 14, "host": 0}
    assert stats["evicted"]["state"]["device"] >= 2
    engine.run("from host", prompt)
    transfers = engine.cache.stats()["transfers"]
    assert transfers["saves"] >= 2 and transfers["loads"] == 1
    assert transfers["pages_loaded"] == 6 + 2 + 1, "six full pages, a window of two, one snapshot"
    all_free(engine)


# ---- F14: one save for all groups


def groups_with_part(operation: Operation) -> dict[str, int]:
    return {name: int(np.count_nonzero(sources)) for name, (sources, _) in operation.pages.items()}


@pytest.mark.parametrize("ok", [True, False], ids=["lands", "fails"])
def test_f14_one_save_carries_all_groups_or_shows_nothing(ok):
    """Full pages, window pages and a snapshot travel in one save; if it fails, host offers nothing and keeps nothing.

    Mutation: `save_done` goes on when `not ok`.
    """
    engine = engine_of(*LAYOUTS["full+window+state"]())
    prompt = toks(1, 26)
    engine.submit("first", prompt)
    step(engine)
    operations = [operation for span in engine.spans if (operation := engine.cache.begin_save(span))]
    (operation,) = operations
    assert groups_with_part(operation) == {"full": 6, "window": 6, "state": 1}
    engine.begin("save", operation)
    engine.land(operation.op, ok)
    engine.idle()
    empty_device(engine)
    assert hit(engine, prompt).boundary == (6 if ok else 0)
    assert engine.cache.stats()["transfers"]["saves_failed"] == (not ok)
    if not ok:
        assert owned(engine, "free", "host") == {"full": 24, "window": 24, "state": 4}
    assert engine.run("again", prompt).cached == (24 if ok else 0)
    all_free(engine)


def test_f14_a_save_that_one_group_has_no_room_for_is_not_begun():
    """When the host slots are all in use, nothing of the save is begun: no page is taken in the groups before.

    Mutation: `Saves.make_room` does not ask `can_make`, or does not let its holder go.
    """
    engine = engine_of(full(24, 24), window(6, 24, 24), state(4, 1))
    (held,) = save(engine, compute(engine, "held", toks(1, 9)))
    spans = compute(engine, "second", toks(2, 26))
    before = owned(engine, "free", "host")
    assert save(engine, spans) == []
    assert owned(engine, "free", "host") == before
    assert engine.cache.stats()["transfers"]["saves_skipped"] == 2, "its pages and its snapshot; the windows need them"
    engine.land(held)
    assert len(save(engine, spans)) == 1, "once the other has landed, its host slot can be had"
    engine.idle()
    empty_device(engine)
    assert hit(engine, toks(2, 26)).boundary == 6
    assert hit(engine, toks(1, 9)).boundary == 0
    all_free(engine)


# ---- F15, F17: snapshots in use


def test_f15_a_snapshot_about_to_be_copied_is_not_given_away():
    """From its admission until the step with the copy is done, the snapshot a request starts from cannot be evicted.

    Mutation: `Checkpoints.opening` hands the snapshot to no holder; or `Admission._read` does not count the lease a
    reader.
    """
    engine = engine_of(full(64), state(3))
    engine.run("first", toks(1, 9))
    reader = engine.submit("reader", toks(1, 8) + toks(2, 3), max_tokens=3)
    sit(engine, reader)
    guest = newcomer(engine, 1)
    assert guest is not None and owned(engine, "free")["state"] == 0
    assert newcomer(engine, 2) is None, "admitted: it will copy from the snapshot"
    assert engine.plan()
    assert newcomer(engine, 2) is None, "planned: the copy has not been made"
    engine.done()
    second = newcomer(engine, 2)
    assert second is not None, "done: the snapshot is idle again"
    assert reader.cached == 8
    leave(engine, guest, second)
    engine.idle()
    all_free(engine)


def test_f15_a_snapshot_under_copy_survives_the_eviction_of_its_namespace():
    """A namespace that is forgotten while a copy from its snapshot is planned keeps that slot until the step is done.

    Mutation: `detach_namespace` frees a page that has one reader.
    """
    engine = engine_of(full(64), state(3))
    engine.run("first", toks(1, 9))
    reader = engine.submit("reader", toks(1, 8) + toks(2, 3), max_tokens=3)
    sit(engine, reader)
    engine.cache.evict_namespace(BASE)
    engine.check()
    assert owned(engine, "unhooked")["state"] == 1
    guest = newcomer(engine, 1)
    assert guest is not None and newcomer(engine, 2) is None
    engine.idle()
    assert reader.ended == "length" and reader.cached == 8
    leave(engine, guest)
    all_free(engine)


def decoding_with_a_checkpoint(slots: int) -> tuple[Engine, Request]:
    """A request that has rolled its checkpoint to its second page end, and has computed 11 tokens."""
    engine = engine_of(full(64), state(slots), every=1)
    request = engine.submit("request", toks(1, 6), max_tokens=20)
    while request.real < 11:
        step(engine)
    assert hit(engine, request.tokens).boundary == 2
    return engine, request


def test_f17_without_a_slot_for_a_checkpoint_the_old_one_stays():
    """When no slot can be had, the request goes on, a counter says so, and its last checkpoint is still good.

    Mutation: `Checkpoints.checkpoint` does not read the old checkpoint while it makes room (that one is evicted).
    """
    engine, request = decoding_with_a_checkpoint(slots=4)
    guests = [newcomer(engine, seed) for seed in range(2)]
    assert all(guests) and owned(engine, "tree")["state"] == 1, "its working slot, its last checkpoint, two guests"
    before = engine.cache.stats()["steps"]
    step(engine)
    assert request.real == 12
    after = engine.cache.stats()["steps"]
    assert after["checkpoints_skipped"] == before["checkpoints_skipped"] + 1
    assert after["checkpoints"] == before["checkpoints"]
    assert hit(engine, request.tokens).boundary == 2
    leave(engine, *guests)
    step(engine)
    engine.abort("request")
    again = engine.run("again", request.tokens)
    assert again.cached == 8, "and what it holds is right"
    all_free(engine)


def test_f17_the_old_checkpoint_serves_when_the_step_of_the_new_one_fails():
    """A row whose checkpointing step fails goes on from its last checkpoint, and says the same tokens as without.

    Mutation: `Checkpoints.checkpoint` drops the old checkpoint when it makes the new one, not when that is real.
    """
    undisturbed = engine_of(full(64), state(4)).run("request", toks(1, 6), max_tokens=20).generated
    engine, request = decoding_with_a_checkpoint(slots=3)
    assert engine.plan()
    engine.fail()
    assert request.real == 8
    engine.idle()
    assert request.generated == undisturbed
    all_free(engine)


# ---- F16: tables


class Watched(Engine):
    """An engine that looks, when a step is done, whether its rows' tables are still what their leases hold."""

    compared = 0

    def done(self) -> None:
        at = min(self.flights)
        for row in self.double.steps[at].rows:
            request = self.requests[row.id]
            if at in request.steps and not request.ended:
                self.compare(row, request.lease)
        super().done()

    def compare(self, row, lease: Lease) -> None:
        for group, family in self.double.families.items():
            spans = [*family.reads(row.start), (row.start, row.start + row.length)]
            used = sorted({position // PAGE for low, high in spans for position in range(low, high)})
            columns = [0] if group in self.double.slots else used
            ours, theirs = row.tables[group][columns], self.cache.table(lease, group)[columns]
            there = self.double.memory[group, "device"].values
            assert (there[ours] == there[theirs]).all(), f"{row.id}: the table of {group} changed under its step"
            assert ours.all(), f"{row.id}: reads or writes a hole of {group}"
            self.compared += 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f16_tables_are_the_leases_in_every_phase(layout):
    """Through chunks, decode, overlap, a split under it, a retraction and a return, rows read what their leases hold.

    Mutation: `StepCommits.commit` settles duplicates whether or not a later step reads (`reading is None` removed).
    """
    engine = Watched(PAGE, *LAYOUTS[layout](), every=1)
    prompt = toks(1, 26)
    first = engine.submit("first", prompt, max_tokens=12)
    twin = engine.submit("twin", prompt, max_tokens=12, reads=False)
    for _ in range(5):  # chunks of both, always one step ahead
        engine.plan(8)
        engine.plan(8)
        engine.done()
        engine.done()
    assert len(first.generated) >= 1 and len(twin.generated) >= 1
    other = engine.submit("other", prompt[:13] + toks(2, 8), max_tokens=3)
    step(engine, times=2)
    assert other.lease is not None, "it branched off inside their path"
    engine.retract(first)
    step(engine, times=2)
    assert first.lease is not None, "it came back"
    engine.idle()
    assert first.generated == twin.generated
    assert engine.compared > 20
    all_free(engine)


@pytest.mark.parametrize("groups", [(full(24),), (full(24), window(8, 24))], ids=["full", "full+window"])
def test_f16_a_replaced_duplicate_is_in_the_table_and_counted_once(groups):
    """Two requests that computed the same pages at once end with one copy, and both tables name it.

    Mutation: `Publisher.settle` does not write the tree's page into the table, or does not free the duplicate.
    """
    engine = Watched(PAGE, *groups)
    first = engine.submit("first", toks(1, 10), max_tokens=9)
    twin = engine.submit("twin", toks(1, 10), max_tokens=9, reads=False)
    assert engine.plan() and engine.plan()
    mine = {group.name: engine.cache.table(twin.lease, group.name)[:2].tolist() for group in groups}
    engine.done()
    for group in groups:
        assert engine.pages(group.name)["flight"] == 2, "a step in flight reads its own pages"
    engine.done()
    for group in groups:
        assert engine.pages(group.name)["flight"] == 0
        tables = [engine.cache.table(request.lease, group.name)[:2].tolist() for request in (first, twin)]
        assert tables[0] == tables[1] != mine[group.name]
        assert engine.pages(group.name)["tree"] == 2
    assert engine.cache.stats()["steps"]["duplicates_freed"] == 2 * len(groups)
    engine.idle()
    all_free(engine)


def test_f16_pages_given_to_many_rows_at_once_are_those_in_their_tables():
    """What `grow_rows` returns is, row by row and group by group, the page that its lease's table ends with.

    Mutation: `grow_rows` hands the ids to the leases in another order than it returns them.
    """
    engine = engine_of(full(24), window(6, 24))
    leases = [newcomer(engine, seed, pages) for seed, pages in enumerate((1, 3, 2))]
    before = {
        (at, g.name): engine.cache.table(lease, g.name) for at, lease in enumerate(leases) for g in engine.cache.groups
    }
    grown = engine.cache.grow_rows(leases)
    engine.check()
    for (at, group), table in before.items():
        more = int.from_bytes(grown[group][4 * at : 4 * at + 4], "little")
        assert engine.cache.table(leases[at], group).tolist() == [*table.tolist(), more]
    leave(engine, *leases)
    all_free(engine)


# ---- F18: holes


def lose_window(engine: Engine) -> None:
    crowd(engine, 1, engine.pages("window")["capacity"])


def lose_snapshot(engine: Engine) -> None:
    crowd(engine, 4, 1)


def lose_device_copy(engine: Engine) -> None:
    empty_device(engine)


@pytest.mark.parametrize(
    ("lose", "groups"),
    [
        (lose_window, (full(24), window(6, 8))),
        (lose_snapshot, (full(24), state(4))),
        (lose_snapshot, (full(24), window(6, 24), state(4))),
        (lose_device_copy, (full(24, 24),)),
        (lose_device_copy, (full(24, 24), window(6, 24, 24), state(4, 4))),
    ],
    ids=["window", "snapshot", "snapshot beside a window", "device copy", "all device copies"],
)
def test_f18_holes_heal_in_place(lose, groups):
    """What is missing from a path is filled when somebody computes it again: nothing is kept twice, the next one hits.

    Mutation: `Publisher._put` is not called for a node that is on host only; `Publisher._fill` adds nothing to holes;
    `write_from` lets rows write pages that the tree has.
    """
    engine = engine_of(*groups, save="through")
    prompt = toks(1, 26)
    engine.run("first", prompt, chunk=8)
    before = owned(engine, "tree")
    lose(engine)
    lost = hit(engine, prompt, host=False)
    assert lost.boundary == 0
    nodes = engine.cache.stats()["nodes"]

    healer = engine.submit("healer", prompt)
    healer.host = False
    engine.idle()
    assert healer.cached == 0
    assert owned(engine, "tree") == before, "everything is there again, and nothing twice"
    assert engine.cache.stats()["nodes"] <= nodes + 1, "the path is the old one, at most cut where a snapshot stands"
    found = hit(engine, prompt, host=False)
    assert (found.boundary, found.load) == (6, False)
    assert engine.run("next", prompt).cached == 24
    all_free(engine)


@pytest.mark.parametrize("lose", [lose_window, lose_snapshot], ids=["window", "snapshot"])
def test_f18_two_that_heal_the_same_hole_end_with_one_copy(lose):
    """When two compute the missing part at the same time, one copy stays and the duplicates are freed.

    Mutation: `Publisher._fill` overwrites what another has put there; `Snapshots.put` keeps the second snapshot.
    """
    engine = engine_of(full(64), window(6, 16), state(4))
    prompt = toks(1, 14)
    engine.run("first", prompt)
    before = owned(engine, "tree")
    lose(engine)
    assert hit(engine, prompt).boundary == 0
    engine.submit("one", prompt, max_tokens=2, reads=False)
    engine.submit("two", prompt, max_tokens=2, reads=False)
    engine.idle()
    assert owned(engine, "tree") == before
    assert engine.run("next", prompt).cached == 12
    all_free(engine)


def test_f18_a_healed_page_carries_its_hash_again():
    """A page that was evicted from the middle of a path and computed again is announced under the hash it had.

    Mutation: `Publisher.became_real` tells nothing of fills when there is no closed group.
    """
    engine = engine_of(window(6, 16), events=True)
    prompt = toks(1, 41)
    engine.run("first", prompt, chunk=8)
    crowd(engine, 1, 13)  # what is left is the window at the end
    engine.events.clear()
    engine.run("healer", prompt[:14])
    hashes = [int.from_bytes(digest[:8], "big", signed=True) for digest in engine.cache.page_hashes(BASE, prompt)]
    told = [(event.block_hashes, event.parent_block_hash) for event in engine.events if hasattr(event, "tokens")]
    assert told == [(hashes[:3], None)]
    assert hit(engine, prompt[:14]).boundary == 3 and hit(engine, prompt).boundary == 10
    all_free(engine)


# ---- F19: closure


def family_on_host(engine: Engine) -> tuple[list[int], list[int], list[int]]:
    """A trunk of two pages with two branches of one page, written to host from the root down."""
    trunk = toks(1, 8)
    left, right = trunk + toks(2, 5), trunk + toks(3, 5)
    spans = [
        compute(engine, name, tokens) for name, tokens in (("trunk", trunk + [7]), ("left", left), ("right", right))
    ]
    for each in spans:
        write_back(engine, each)
    return trunk, left, right


def test_f19_host_gives_up_children_before_the_parent_they_need():
    """Host pressure takes the branches of a trunk first, though the trunk was written back before them.

    Mutation: `ClosedPages.evict` does not skip nodes with `backed_children`.
    """
    engine = engine_of(full(12, 4))
    trunk, left, right = family_on_host(engine)
    empty_device(engine)
    served = []
    for seed in (4, 5):
        served.append([hit(engine, tokens).boundary for tokens in (left, right)])
        write_back(engine, compute(engine, f"other {seed}", toks(seed, 5)))
        empty_device(engine)
    served.append([hit(engine, tokens).boundary for tokens in (left, right)])
    assert served == [[3, 3], [2, 3], [2, 2]], "the older branch goes, then the other, and the trunk stays"
    assert engine.run("trunk again", trunk + [9]).cached == 8
    all_free(engine)


def test_f19_a_parent_in_use_keeps_its_children_on_host_within_reach():
    """A trunk that is on the device alone is kept while it is read, and with it what its branch has on host; when it
    must go, the branch's host copy goes too and is not left behind.

    Mutation: `ClosedPages._evict_tail` does not call `prune_below`.
    """
    engine = engine_of(full(6, 6))
    trunk, branch = toks(1, 8), toks(1, 8) + toks(2, 5)
    compute(engine, "trunk", trunk + [7])  # never saved
    write_back(engine, compute(engine, "branch", branch))
    engine.submit("reader", trunk + toks(3, 1), max_tokens=5)
    step(engine)
    crowd(engine, 1, 3)  # all that the reader does not hold
    assert hit(engine, branch, host=False).boundary == 2
    assert hit(engine, branch).boundary == 3, "its last page comes from host"
    assert engine.run("branch again", branch).cached == 12
    engine.idle()
    empty_device(engine)
    assert hit(engine, branch).boundary == 0
    assert owned(engine, "free", "host") == {"full": 6}
    all_free(engine)


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(6))
def test_f19_nothing_in_any_tier_becomes_unreachable(seed):
    """After random traffic with saves that fail or come late, whatever a tier holds can be reached from the root.

    Mutation: `ClosedPages._evict_tail` does not call `prune_below`; `ClosedPages.evict` does not skip nodes with
    `backed_children`.
    """
    rng = random.Random(seed)
    engine = engine_of(full(10, 7), *([state(4, 3)] if seed % 2 else []))
    for number, prompt in enumerate(random_prompts(rng, 40)):
        request = engine.submit(f"r{number}", prompt, rng.randint(1, 4))
        while not request.ended:
            if engine.plan(rng.choice([4, 8, 64])):
                engine.done()
                save(engine, [span for span in engine.spans if rng.random() < 0.7])
            if rng.random() < 0.5 or not engine.running:
                for op in sorted(engine.operations):
                    engine.land(op, ok=rng.random() < 0.7)
        every_page_can_be_reached(engine)
    all_free(engine)


def every_page_can_be_reached(engine: Engine) -> None:
    root = engine.cache._tree.roots.get(BASE)
    stack = [] if root is None else [(child, []) for child in root.top.children.values()]
    while stack:
        node, before = stack.pop()
        path = before + np.frombuffer(bytes(node.edge), np.int32).tolist()
        end = max(node.start + node.copies[DEVICE].count, node.start + node.copies[HOST].count)
        if end > node.start:
            _, held = holdings(engine, path)
            assert held["full"][:end].all(), "a page stands below one that is nowhere"
        stack += [(child, path) for child in node.children.values()]
