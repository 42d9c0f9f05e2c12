"""Saves and loads with real bytes, by every mover: numpy's, the same on tensors, torch's on the CPU and on CUDA.

Runs alone, with pytest and numpy (and torch, for what needs it): PYTHONPATH=src python -m pytest tests/engine
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from sapwood.engine import NumpyMover
from sapwood.engine.transfer import movers as transfer
from sapwood.engine.transfer.movers import runs

from .memory import BACKENDS, LAYOUTS, World, need

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return need(request.param)


WAYS = {
    "numpy": ("by size", "by run", "gathered"),
    "tensors as numpy": ("by size",),
    "torch": ("by run", "at once"),
    "cuda": ("by run", "at once"),
}


@pytest.fixture(params=[(backend, way) for backend, ways in WAYS.items() for way in ways], ids=": ".join)
def moving(request, monkeypatch):
    """A backend that moves pages in one way, whatever their size: numpy's mover chooses by the length of runs, torch's
    by what the driver has, and both must be right either way."""
    name, way = request.param
    backend = need(name)
    if name == "numpy" and way != "by size":
        monkeypatch.setattr(transfer, "LONG_RUN_BYTES", 0 if way == "by run" else 1 << 40)
    if name == "cuda" and way == "by run":
        monkeypatch.setattr(transfer_torch(), "batch_copy", lambda: None)
    if name == "torch" and way == "at once":
        begin = transfer_torch().TorchMover.__init__

        def with_batches(mover, *args):
            begin(mover, *args)
            mover._batch = Driver()

        monkeypatch.setattr(transfer_torch().TorchMover, "__init__", with_batches)
    return backend


def transfer_torch():
    from sapwood.engine.transfer import torch_mover as transfer_torch

    return transfer_torch


class Driver:
    """cuMemcpyBatchAsync as cuda.h has it (12.8: nine arguments, attributes of 24 bytes), on main memory and called as
    the real one is: through ctypes, by addresses. The last copies come first: a batch promises no order."""

    def __init__(self, error=0):
        self.counts = []
        self.error = error
        self.call = ctypes.CFUNCTYPE(ctypes.c_int, *transfer_torch().BATCH_ARGUMENTS)(self._copy)

    def __call__(self, *args):
        return self.call(*args)

    def _copy(self, targets, sources, sizes, count, attributes, firsts, kinds, failed, stream):
        order, *rest = struct.unpack("6i", ctypes.string_at(attributes, 24))
        assert (order, rest, stream) == (1, [0] * 5, None)
        assert kinds == 1 and ctypes.c_size_t.from_address(firsts).value == 0 and failed
        columns = [(ctypes.c_size_t * count).from_address(column) for column in (targets, sources, sizes)]
        self.counts.append(count)
        for target, source, nbytes in reversed(list(zip(*columns, strict=True))):
            ctypes.memmove(target, source, nbytes)
            if self.error:
                return self.error
        return 0


def ids(*pages):
    return np.array(pages, np.int32)


# ---- bytes


@each_layout
def test_a_round_trip_brings_every_byte_back(moving, layout):
    """Pages are saved to scattered host pages and loaded into other device pages: those hold the same bytes, on host a
    page is the same bytes in the same order, and no other page has changed, the null page least of all.

    Mutation: a load takes sources for targets; the sizes of a batch are those of one page.
    """
    world = World(moving, layout)
    before = {group: world.device(group) for group in world.memory}
    host_before = {group: world.host[group].copy() for group in world.memory}
    homes = {group: world.ids(11, 40) for group in world.memory}
    saved = {group: world.ids(11, 24) for group in world.memory}
    assert world.done("save", {group: (saved[group], homes[group]) for group in world.memory})
    for group in world.memory:
        host_before[group][homes[group]] = before[group][saved[group]]
        assert np.array_equal(world.host[group], host_before[group]), group
        assert np.array_equal(world.device(group), before[group]), "a save changed the device"

    world.scramble()
    after = {group: world.device(group) for group in world.memory}
    back = {group: world.ids(11, 24) for group in world.memory}
    assert world.done("load", {group: (homes[group], back[group]) for group in world.memory})
    for group in world.memory:
        after[group][back[group]] = before[group][saved[group]]
        assert np.array_equal(world.device(group), after[group]), group
        assert np.array_equal(world.host[group], host_before[group]), "a load changed the host"


@pytest.mark.parametrize("kind", ["save", "load"])
@pytest.mark.parametrize("story", ["ascending", "descending", "runs", "holes", "one", "fan out"])
def test_every_pattern_of_ids(moving, kind, story):
    """Runs, pages in descending order, holes, single pages, one source for two targets: each target gets its source.

    Mutation: `runs` looks at the sources only; holes are moved as page 0.
    """
    world = World(moving, "hybrid", pages=40)
    patterns = {
        "ascending": (ids(*range(3, 23)), ids(*range(9, 29))),
        "descending": (ids(*range(22, 2, -1)), ids(*range(28, 8, -1))),
        "runs": (ids(1, 2, 3, 4, 8, 9, 10, 11, 12), ids(5, 6, 7, 1, 2, 3, 20, 21, 30)),
        "holes": (ids(0, 4, 5, 0, 6, 0), ids(0, 7, 8, 0, 9, 0)),
        "one": (ids(40), ids(40)),
        "fan out": (ids(7, 7, 8, 8), ids(1, 2, 3, 4)),
    }
    sources, targets = patterns[story]
    device, host = world.device("full"), world.host["full"].copy()
    there, here = (device, host) if kind == "save" else (host, device)
    here[targets[targets != 0]] = there[sources[sources != 0]]
    assert world.done(kind, {"full": (sources, targets)})
    assert np.array_equal(world.device("full"), device)
    assert np.array_equal(world.host["full"], host)


def test_groups_of_one_operation_have_pages_of_their_own(moving):
    """An operation of a hybrid model: all pages of one group, the last of another, one snapshot of the third.

    Mutation: the ids of the first group serve for all.
    """
    world = World(moving, "hybrid")
    device = {group: world.device(group) for group in world.memory}
    pages = {
        "full": (ids(1, 2, 3, 4), ids(10, 11, 12, 13)),
        "window": (ids(0, 0, 7, 9), ids(0, 0, 30, 2)),
        "state": (ids(0, 0, 0, 5), ids(0, 0, 0, 17)),
    }
    assert world.done("save", pages)
    for group, (sources, targets) in pages.items():
        part = sources != 0
        assert np.array_equal(world.host[group][targets[part]], device[group][sources[part]])
    stats = world.mover.stats()
    assert stats["save_pages"] == 7 and stats["under_way"] == 0
    sizes = {group.name: group.page_bytes for group in world.groups}
    assert stats["save_bytes"] == 4 * sizes["full"] + 2 * sizes["window"] + sizes["state"]


def test_nothing_to_move_is_done(backend):
    """An operation of holes only, or of no group, is acknowledged like others.

    Mutation: an operation without parts is never told of.
    """
    world = World(backend, "hybrid")
    first = world.start("save", {"full": (ids(0, 0), ids(0, 0)), "state": (ids(), ids())})
    second = world.start("load", {})
    told = []
    while len(told) < 2:
        told += world.mover.poll()
    assert sorted(told) == [(first, True), (second, True)]


def test_neighbours_go_in_one_copy(backend):
    """400 pages in two runs take two copies, not hundreds; 400 scattered small ones are gathered by numpy in one.

    Mutation: `runs` ends a run at every page; small scattered pages are copied one by one.
    """
    world = World(backend, "rows", pages=400, host_pages=500)
    assert world.done("save", {"full": (ids(*range(1, 401)), ids(*range(1, 201), *range(301, 501)))})
    assert world.mover.stats()["copies"] == 2
    if isinstance(world.mover, NumpyMover):
        world = World(backend, "hybrid", pages=400, host_pages=500)
        assert world.done("load", {"window": (world.ids(400, 500), world.ids(400, 400))})
        assert world.mover.stats()["copies"] == 1


def test_runs_are_where_both_sides_count_up():
    """Against the obvious way to find them, with random ids.

    Mutation: a run goes on where only one side counts up, or over the end.
    """
    random = np.random.default_rng(1)
    for _ in range(300):
        n = int(random.integers(1, 12))
        sources = np.cumsum(random.choice([1, 1, 1, 2, -1], n)).astype(np.int32) + 20
        targets = np.cumsum(random.choice([1, 1, 1, 3], n)).astype(np.int32)
        expected: list[list[int]] = []
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if expected and (source, target) == (sum(expected[-1][::2]), sum(expected[-1][1:])):
                expected[-1][2] += 1
            else:
                expected.append([source, target, 1])
        assert np.stack(runs(sources, targets), 1).tolist() == expected


# ---- what is wrong with an operation is found before anything moves

WRONG = {
    "source too high": {"full": (ids(1, 25), ids(1, 2))},
    "target too high": {"full": (ids(1, 2), ids(1, 41))},
    "negative source": {"full": (ids(1, -1), ids(1, 2))},
    "negative target": {"full": (ids(1, 2), ids(1, -2))},
    "no target": {"full": (ids(1, 2), ids(1, 0))},
    "no source": {"full": (ids(1, 0), ids(1, 2))},
    "target twice": {"full": (ids(1, 2, 3), ids(7, 8, 7))},
    "lengths": {"full": (ids(1, 2), ids(1))},
    "two axes": {"full": (ids(1, 2).reshape(1, 2), ids(1, 2).reshape(1, 2))},
    "not whole": {"full": (np.array([1.0]), np.array([1.0]))},
    "unknown group": {"half": (ids(1), ids(1))},
    "no pair": {"full": ids(1)},
    "no ids": {"full": (["a"], ["b"])},
    "nothing at all": {"full": None},
    "no mapping": None,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_wrong_operation_is_not_ok_and_moves_nothing(backend, kind, wrong):
    """A page that is not there, a target that comes twice, nonsense: told of by `poll` as not ok with a reason, not
    raised; and though another group of the same operation was right, no byte has moved. The next operation is fine.

    Mutation: groups are checked one by one as they are moved; the target ids are checked against the source's tier.
    """
    if kind == "load" and wrong in ("source too high", "target too high"):
        sources, targets = WRONG[wrong]["full"]
        pages = {"full": (targets, sources)}
    else:
        pages = WRONG[wrong]
    world = World(backend, "hybrid")
    if pages is not None:
        pages = {"window": (ids(1, 2, 3), ids(4, 5, 6)), **pages}
    device = {group: world.device(group) for group in world.memory}
    host = {group: world.host[group].copy() for group in world.memory}
    op = world.start(kind, pages)
    assert world.mover.poll() == [(op, False)]
    assert world.mover.reason(op)
    for group in world.memory:
        assert np.array_equal(world.device(group), device[group])
        assert np.array_equal(world.host[group], host[group])
    assert world.done(kind, {"full": (ids(24), ids(24))})
    assert world.mover.stats()["failed"] == 1


def test_a_caller_who_lost_count_is_told(backend):
    """An unknown kind, a number that is under way, waiting for what was told of: the caller's mistake, and raised. A
    number may be used again when it was told of.

    Mutation: a second `start` of a number replaces the first.
    """
    world = World(backend, "rows")
    pages = {"full": (ids(1), ids(1))}
    with pytest.raises(ValueError, match="kind must be"):
        world.mover.start("move", 1, pages)
    world.mover.start("save", 1, pages)
    with pytest.raises(ValueError, match="under way"):
        world.mover.start("load", 1, pages)
    assert world.mover.wait(1)
    with pytest.raises(ValueError, match="not under way"):
        world.mover.wait(1)
    assert world.mover.poll() == []
    world.mover.start("load", 1, pages)
    assert world.mover.wait(1)


def test_a_device_that_fails_is_told_of(backend, monkeypatch):
    """An error in the middle of an operation is told of as not ok, with its words; the mover goes on.

    Mutation: only RuntimeError is caught; the failed operation is told of as ok.
    """
    if backend.device:
        monkeypatch.setattr(transfer_torch(), "batch_copy", lambda: None)
    world = World(backend, "hybrid")
    real, moved = world.mover._move, []

    def fails_at_the_second(*args):
        moved.append(args)
        if len(moved) == 2:
            raise MemoryError("the device\nis on fire")
        real(*args)

    monkeypatch.setattr(world.mover, "_move", fails_at_the_second)
    pages = {group: (ids(1, 2), ids(3, 4)) for group in world.memory}
    op = world.start("save", pages)
    assert world.mover.wait(op) is False
    assert world.mover.reason(op) == "MemoryError: the device is on fire"
    assert world.mover.stats()["save_pages"] == 0
    assert world.done("save", pages)
    assert world.mover.stats()["save_pages"] == 6


def test_reasons_do_not_pile_up(backend):
    """A thousand failures later, the reasons of the latest few hundred are kept.

    Mutation: nothing is ever dropped from the reasons.
    """
    world = World(backend, "rows")
    for _ in range(1000):
        world.start("save", {"full": (ids(99), ids(1))})
    assert len(world.mover.poll()) == 1000
    assert world.mover.reason(1) == "" and world.mover.reason(1000)
    assert len(world.mover._reasons) <= 256


def test_a_closed_mover_takes_nothing(backend):
    """`close` ends what is under way and keeps its acknowledgements; what is started later is not ok.

    Mutation: `close` forgets what has not been told of.
    """
    world = World(backend, "rows")
    first = world.start("save", {"full": (ids(1), ids(1))})
    world.mover.close()
    later = world.start("save", {"full": (ids(1), ids(1))})
    assert sorted(world.mover.poll()) == [(first, True), (later, False)]
    world.mover.host.close()


# ---- many at once


def test_late_polls_tell_everything_once(backend):
    """Twenty operations are started and nobody asks for a while: then each is told of once, by `poll` or by `wait`.

    Mutation: `poll` tells of one operation at a time and drops the rest; what was waited for is told of again.
    """
    world = World(backend, "hybrid")
    ops = [world.start("save" if i % 2 else "load", {"full": (ids(i), ids(i))}) for i in range(1, 21)]
    assert all(world.mover.wait(op) for op in ops[3:6])
    told: list[tuple[int, bool]] = []
    while len(told) < 17:
        told += world.mover.poll()
    assert sorted(told) == [(op, True) for op in ops if op not in ops[3:6]]
    assert world.mover.poll() == [] and world.mover.stats()["under_way"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_saves_and_loads_beside_each_other(moving, seed):
    """Random operations of both kinds, several under way, polled now and then, some of them wrong; pages are used again
    as soon as they are told of. At the end every byte is where the story says.

    Mutation: all groups of an operation are moved with the ids of its first.
    """
    world = World(moving, "hybrid", pages=60, host_pages=80, seed=seed)
    random = world.random
    device = {group: world.device(group) for group in world.memory}
    host = {group: world.host[group].copy() for group in world.memory}
    limits = {"device": 60, "host": 80}
    free = {(group, tier): set(range(1, limits[tier] + 1)) for group in world.memory for tier in limits}
    under_way: dict[int, tuple[str, dict]] = {}

    def take(group, tier, n):
        pages = random.permutation(sorted(free[group, tier]))[:n].astype(np.int32)
        free[group, tier].difference_update(pages.tolist())
        return pages

    def land():
        for op, ok in world.mover.poll():
            kind, pages = under_way.pop(op)
            assert ok == (kind != "wrong"), world.mover.reason(op)
            for group, (there, here) in pages.items():
                if kind == "save":
                    host[group][here] = device[group][there]
                    free[group, "device"].update(there.tolist())
                    free[group, "host"].update(here.tolist())
                elif kind == "load":
                    device[group][here] = host[group][there]
                    free[group, "host"].update(there.tolist())
                    free[group, "device"].update(here.tolist())

    for _ in range(120):
        kind = str(random.choice(["save", "load", "load", "wrong"]))
        if kind == "wrong":
            pages = {"state": (ids(1, 2), ids(3, 3))}
            under_way[world.start("save", pages)] = (kind, pages)
        else:
            pages = {}
            for group in world.memory:
                n = int(random.integers(0, 9))
                there, here = take(group, "device", n), take(group, "host", n)
                n = min(len(there), len(here))
                free[group, "device"].update(there[n:].tolist())
                free[group, "host"].update(here[n:].tolist())
                pages[group] = (there[:n], here[:n]) if kind == "save" else (here[:n], there[:n])
            under_way[world.start(kind, pages)] = (kind, pages)
        if random.random() < 0.4:
            land()
    deadline = time.monotonic() + 240
    while under_way and time.monotonic() < deadline:
        land()
    assert not under_way
    for group in world.memory:
        assert np.array_equal(world.device(group), device[group])
        assert np.array_equal(world.host[group], host[group])


def test_other_threads_fill_other_host_pages_meanwhile(backend):
    """A store's thread writes host pages of its own while operations come and go: nobody's bytes are disturbed.

    Mutation: a load copies back the whole host arena.
    """
    world = World(backend, "large", pages=16, host_pages=32)
    stop = threading.Event()

    def store():
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            world.host["full"][17:33] = value
            assert (world.host["full"][17:33] == value).all()

    thread = threading.Thread(target=store)
    thread.start()
    try:
        before = world.device("full")
        for _ in range(10):
            assert world.done("save", {"full": (ids(*range(1, 17)), ids(*range(16, 0, -1)))})
            assert world.done("load", {"full": (ids(*range(16, 0, -1)), ids(*range(1, 17)))})
    finally:
        stop.set()
        thread.join()
    assert np.array_equal(world.device("full"), before)


# ---- torch


def test_an_operation_is_one_call_of_the_driver():
    """All groups and pages of an operation are one batch with an entry a run; an operation without pages is none.

    Mutation: a batch a group; an empty batch is issued, which the driver refuses.
    """
    world = World(need("torch"), "hybrid")
    driver = world.mover._batch = Driver()
    device = {group: world.device(group) for group in world.memory}
    pages = {"full": (ids(1, 2, 9), ids(4, 5, 8)), "window": (ids(0, 3, 2), ids(0, 1, 2)), "state": (ids(7), ids(40))}
    assert world.done("save", pages)
    assert driver.counts == [5] and world.mover.stats()["copies"] == 5
    for group, (sources, targets) in pages.items():
        assert np.array_equal(world.host[group][targets[targets != 0]], device[group][sources[sources != 0]])
    assert world.done("load", {"full": (ids(0), ids(0))}) and driver.counts == [5]


def test_a_driver_that_refuses_a_batch_is_not_asked_again(caplog):
    """A batch ends with an error, some of its copies made: the operation is carried out page by page and is ok, and so
    are all later ones; it is said once.

    Mutation: the error is passed over; the operation is not ok; the driver is asked every time.
    """
    world = World(need("torch"), "hybrid")
    driver = world.mover._batch = Driver(error=801)
    before = world.device("full")
    for _ in range(3):
        assert world.done("save", {"full": (ids(1, 5, 7), ids(4, 3, 2))})
        assert np.array_equal(world.host["full"][[4, 3, 2]], before[[1, 5, 7]])
    assert driver.counts == [3] and [record.args for record in caplog.records] == [(801,)]


def test_where_there_is_no_driver_there_are_no_batches(monkeypatch):
    """A machine without libcuda, and one whose driver is older than batches: pages are copied one by one.

    Mutation: only a missing library is thought of.
    """
    need("torch")

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert transfer_torch().batch_copy() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert transfer_torch().batch_copy() is None


def test_memory_made_in_inference_mode_is_moved_outside_of_it():
    """An engine makes its memory under torch.inference_mode; the step loop that starts transfers is not in it.

    Mutation: the mover writes outside of inference mode, and torch refuses.
    """
    backend = need("torch")
    import torch

    with torch.inference_mode():
        world = World(backend, "hybrid")
    before = world.device("full")
    assert world.done("save", {"full": (ids(1, 2), ids(1, 2))})
    assert world.done("load", {"full": (ids(1, 2), ids(3, 4))}), world.mover.reason(2)
    assert np.array_equal(world.device("full")[3:5], before[1:3])


def test_numpy_moves_without_torch():
    """The package and the numpy mover work where torch cannot be imported.

    Mutation: `sapwood.engine` imports transfer_torch at its top.
    """
    story = """
        import sys
        sys.modules["torch"] = None
        import numpy as np
        import sapwood.engine as engine
        from sapwood.cache import CacheGroup
        memory = np.arange(5 * 64, dtype=np.float32).reshape(5, 64)
        arena = engine.HostArena([CacheGroup("full", "full", 4, host_pages=8, page_bytes=256)])
        mover = engine.open_mover(engine.DeviceArena({"full": memory}), arena)
        mover.start("save", 1, {"full": (np.array([4]), np.array([7]))})
        assert mover.poll() == [(1, True)]
        assert arena.pages["full"][7].tobytes() == memory[4].tobytes()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(story)], check=True, timeout=600)


def test_importing_the_engine_does_not_import_torch():
    """`import sapwood.engine` is light: tools that only look at arenas do not wait for torch.

    Mutation: `sapwood.engine` imports transfer_torch at its top.
    """
    look = "import sys, sapwood.engine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=600)


# ---- CUDA: nothing waits but what must


@pytest.fixture
def cuda():
    need("cuda")
    import torch

    return torch


CYCLES = 400_000_000  # about a fifth of a second


@each_layout
def test_a_save_reads_what_the_steps_before_it_wrote(cuda, layout):
    """A step is still being computed when the save of its pages is started: `start` returns at once, nothing is told
    until the step is done, and the host gets what it wrote.

    Mutation: the copy stream does not wait for the current stream.
    """
    world = World(need("cuda"), layout)
    step = [array.fill_ for array in world.memory.values()]
    for write in step:  # the first use of a kernel waits for everything
        write(3)
    assert world.done("save", {group: (ids(1, 2, 3), ids(1, 2, 3)) for group in world.memory})
    cuda.cuda.synchronize()
    cuda.cuda._sleep(CYCLES)
    for write in step:
        write(7)
    written = cuda.cuda.current_stream().record_event()
    op = world.start("save", {group: (ids(3, 1, 2), ids(6, 5, 9)) for group in world.memory})
    assert not written.query() and world.mover.poll() == []
    assert world.mover.wait(op) and written.query()
    for group in world.memory:
        assert np.array_equal(world.host[group][[6, 5, 9]], world.device(group)[[3, 1, 2]])


def test_a_load_does_not_wait_for_the_step_in_flight(cuda):
    """While a step is computed, a load into pages it does not touch comes and is told of.

    Mutation: loads wait for the current stream too.
    """
    world = World(need("cuda"), "hybrid")
    pages = {group: (ids(1, 2, 3), ids(4, 5, 6)) for group in world.memory}
    assert world.done("load", pages)
    world.scramble()
    cuda.cuda.synchronize()
    cuda.cuda._sleep(10 * CYCLES)
    step = cuda.cuda.current_stream().record_event()
    assert world.done("load", pages)
    assert not step.query()
    cuda.cuda.synchronize()
    for group in world.memory:
        assert np.array_equal(world.device(group)[4:7], world.host[group][1:4])


def test_a_save_that_failed_half_way_is_told_of_when_nothing_writes_any_more(cuda, monkeypatch):
    """The second group of a save cannot be issued, while the first one's copies are still waiting for the step: its
    host pages are not free before they are done.

    Mutation: an exception in `start` ends the operation at once.
    """
    monkeypatch.setattr(transfer_torch(), "batch_copy", lambda: None)
    world = World(need("cuda"), "hybrid")
    real, moved = world.mover._move, []

    def fails_at_the_second(*args):
        moved.append(args)
        if len(moved) == 2:
            raise RuntimeError("no")
        real(*args)

    monkeypatch.setattr(world.mover, "_move", fails_at_the_second)
    cuda.cuda.synchronize()
    cuda.cuda._sleep(CYCLES)
    step = cuda.cuda.current_stream().record_event()
    op = world.start("save", {group: (ids(1), ids(2)) for group in world.memory})
    assert world.mover.poll() == [] and not step.query()
    assert world.mover.wait(op) is False and step.query()


def test_an_arena_on_cuda_is_pinned(cuda):
    """The host arena is pinned whole, stays the size it was asked for, and is let go of when it is closed.

    Mutation: `close` does not unpin.
    """
    from sapwood.engine.transfer.torch_mover import PinnedArena

    world = World(need("cuda"), "hybrid")
    for pages in world.host.values():
        assert cuda.from_numpy(pages).is_pinned() and cuda.from_numpy(pages[-1:]).is_pinned()
    kept = dict(world.host)
    world.mover.close()
    world.mover.host.close()
    assert not any(cuda.from_numpy(pages).is_pinned() for pages in kept.values())
    PinnedArena(world.groups).close()
    from sapwood.engine import HostArena
    from sapwood.engine.transfer.torch_mover import TorchArena, TorchMover

    with pytest.raises(ValueError, match="PinnedArena"):
        TorchMover(TorchArena(world.memory), HostArena(world.groups))
