"""A store in a process of its own: killed, stopped, hanging, clogged; and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.store import Breaker, Faults, JobDone, Missing, Released, StoreError, open_store, shared
from sapwood.store.process import CAN_START

from . import kit
from .test_file import ready, run_python, strays
from .test_jobs import BAD_CALLS
from .test_opening import SECRET

pytestmark = [pytest.mark.server, pytest.mark.skipif(not CAN_START, reason="needs Linux: memfd_create, epoll")]


def away(uri: str, **options: Any) -> kit.Desk:
    """A desk whose store is in a process of its own, and is asked again soon after it failed."""
    options.setdefault("breaker", Breaker(failures=1000, seconds=0.05))
    return kit.Desk(uri, process=True, **options)


def pid_of(desk: kit.Desk) -> int:
    return int(desk.store.stats()["process"]["pid"])


def is_gone(pid: int) -> bool:
    """No such process, or only its name is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def back(desk: kit.Desk, restarts: int = 1) -> None:
    """Wait until the process was started again so many times, and may be asked."""

    def may() -> bool:
        desk.reports += desk.store.poll()
        process = desk.store.stats()["process"]
        return process["restarts"] == restarts and process["alive"] and desk.store.breaker.state != "open"

    kit.until(may, "the process to run again")


@pytest.fixture(autouse=True)
def whatever_the_system_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To end a process that was killed."""
    monkeypatch.setattr("sapwood.store.process._KILL_TIMEOUT_SECONDS", kit.PATIENCE)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No file, no process and no thread more than before: after every test here."""

    def files() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of this look itself
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return sorted(found)

    def children() -> set[str]:
        """Those of stores, and those of which only the name is left."""
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found |= {pid for pid in (task / "children").read_text().split() if is_worker(pid)}
        return found

    def is_worker(pid: str) -> bool:
        return is_gone(int(pid)) or "sapwood.store.worker" in Path(f"/proc/{pid}/cmdline").read_text()

    gc.collect()
    before, threads, kids = files(), threading.active_count(), children()
    yield
    gc.collect()
    after = files()
    assert len(after) <= len(before), f"{after} instead of {before}"
    assert children() <= kids and threading.active_count() <= threads


# ---- killed


def test_t10_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed again and again while it reads and writes: every job is reported once, what was under way
    as failed and not held, nothing wrong is ever ok, and each time the store works again.

    Mutation: `_bury` says that jobs went well; or leaves them without a report; or nobody starts another process.
    """
    monkeypatch.setattr("sapwood.store.process._STEADY_SECONDS", 0.0)  # each is started again at once
    dice = random.Random(10)
    jobs = set()
    with away(f"file://{tmp_path}/store?size=100MiB") as desk:
        desk.put(range(40))
        for n in range(8):
            desk.wipe()
            pages = {group: list(range(1, 41)) for group in desk.groups}
            job = desk.store.get(kit.hashes(*range(40)), pages, timeout=600)
            more = desk.store.put(kit.hashes(*(f"{n} {i}" for i in range(20))), {"full": range(41, 61)}, timeout=600)
            assert job is not None and more is not None
            jobs |= {job, more}
            time.sleep(dice.uniform(0, 0.03))
            os.kill(pid_of(desk), signal.SIGKILL)
            done = desk.wait(job)
            desk.right(done, range(40))
            assert not done.held and done.failed in ("", "error") and not desk.wait(more).held
            back(desk, n + 1)
        assert desk.get(range(40)).run() == 40
        told = [report.job for report in desk.reports if isinstance(report, JobDone) and report.job in jobs]
        assert sorted(told) == sorted(jobs)
        assert not any(isinstance(report, Released) for report in desk.reports)
        stats = desk.store.stats()
        assert stats["process"]["restarts"] == 8 and stats["breaker"]["opened"] >= 1 and not sum(stats["bad"].values())
        assert stats["hit"] >= 120, "what was counted before is not forgotten"


def test_the_breaker_opens_and_no_call_waits_while_there_is_no_process(tmp_path: Path) -> None:
    """From the moment the end of the process is noticed everything is refused, and calls return, until another runs.

    Mutation: `_submit` does not look whether somebody is there; or `poll` waits for the new process.
    """
    with away(f"file://{tmp_path}/store?size=10MiB", breaker=Breaker(seconds=0.01)) as desk:
        desk.put([1], ["full"])
        pid = pid_of(desk)
        os.kill(pid, signal.SIGKILL)
        kit.until(lambda: is_gone(pid), "its end")
        refused, polls, until = 0, 0, time.monotonic() + kit.PATIENCE
        while not desk.store.stats()["process"]["alive"] or not refused:
            refused += desk.store.get(kit.hashes(1), {"full": [1]}, timeout=600) is None
            desk.reports += desk.store.poll()
            polls += not desk.store.stats()["process"]["alive"]
            assert time.monotonic() < until
            time.sleep(0.001)
        assert refused and polls > 1, "who polls does not wait until another one runs"
        assert desk.store.stats()["refused"] >= refused
        back(desk)
        assert desk.get([1], ["full"]).run() == 1


def test_a_store_whose_process_runs_again_is_asked_at_once(tmp_path: Path) -> None:
    """The process is killed and started again: jobs are taken as soon as it runs, not when the breakers would have
    tried by themselves. A kind of job that had failed before opens the breaker again with its next failure.

    Mutation: `_hear` leaves a breaker open when the process is ready; or `renew` forgets the failures.
    """
    with away(f"file://{tmp_path}/store?size=10MiB", breaker=Breaker(failures=3, seconds=1000)) as desk:
        desk.put([1], ["full"])
        desk.store.breaker.failure("exists")
        desk.store.breaker.failure("exists")
        pid = pid_of(desk)
        os.kill(pid, signal.SIGKILL)
        kit.until(lambda: (desk.store.poll(), desk.store.breaker.state)[1] == "open", "its end to be noticed")
        assert desk.store.write_breaker.state == "open"
        back(desk)
        assert (desk.store.breaker.state, desk.store.write_breaker.state) == ("closed", "closed")
        assert desk.get([1], ["full"]).run() == 1 and desk.put([2], ["full"]).run() == 1
        assert desk.store.breaker.failure("exists"), "the third in a row"
        breaker = desk.store.breaker
        assert (breaker.opened, breaker.recovered, desk.store.write_breaker.recovered) == (2, 1, 1)


PARENT = """
import sys, time
from tests.store import kit
desk = kit.Desk(f"file://{sys.argv[1]}?size=8MiB", kit.fingerprint(256 * kit.KIB), process=True)
desk.write(range(40))
print("ready", flush=True)
print(desk.store.stats()["process"]["pid"], flush=True)
while True:
    pages = {group: list(range(1, 41)) for group in desk.groups}
    desk.wait(desk.store.put(kit.hashes(*range(40)), pages, timeout=600))
"""


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """An engine is killed in the middle of a backup: the store's process ends too, and no lock is left.

    Mutation: the worker does not look for the end of its socket.
    """
    parent = run_python(PARENT, str(tmp_path / "store"))
    ready(parent)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    time.sleep(0.05)
    parent.kill()
    parent.wait()
    kit.until(lambda: is_gone(pid), "the store's process to end")
    kit.until(lambda: not strays(tmp_path / "store"), "its locks to be let go")
    parent.stdout.close()


def test_a_store_that_nobody_closed_is_cleaned_up() -> None:
    """Mutation: nothing ends the process of a store that is forgotten."""
    store = open_store("memory://", kit.fingerprint(), process=True)
    pid = store.stats()["process"]["pid"]
    assert not is_gone(pid)
    del store
    gc.collect()
    assert is_gone(pid)


def test_ctrl_c_is_the_engines_affair() -> None:
    """The process is in a group of its own, and ignores an interrupt and SIGTERM: the engine closes it when it has
    drained. It is in the session of the engine, or it could not stand back for it.

    Mutation: it is started in the group of the engine; or the worker leaves one of them as it is.
    """
    with away("memory://") as desk:
        assert os.getpgid(pid_of(desk)) != os.getpgid(0) and os.getsid(pid_of(desk)) == os.getsid(0)
        assert os.getpriority(os.PRIO_PROCESS, pid_of(desk)) > os.getpriority(os.PRIO_PROCESS, 0)
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid_of(desk), each)
        assert desk.put([1]).run() == 1 and desk.get([1]).run() == 1
        assert desk.store.stats()["process"]["restarts"] == 0


# ---- slow, hanging, standing still


def test_t19_a_backend_that_hangs_past_the_deadline() -> None:
    """A get hangs past its deadline: reported in time and held; when the backend returns, released.

    Mutation: the worker does not tell of what is released; or `_done` forgets that a job is held.
    """
    with away("faulty+memory://?hang=1&hang_seconds=2") as desk:
        done = desk.held(lambda: desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.2))
        assert done.run() == 0 and desk.released(done.job)
        told = [report for report in desk.reports if getattr(report, "job", 0) == done.job]
        assert told == [done, Released(done.job)] and desk.store.stats()["held_pages"] == 0


def test_a_process_that_stands_still() -> None:
    """It is stopped: jobs end by their deadlines all the same, held, because it may go on at any time; the breaker
    opens; when it goes on they are released, and all is well.

    Mutation: `_expire` does nothing; or says that nothing is held; or a job that was late is reported twice.
    """
    now = [0.0]
    with away("memory://", breaker=Breaker(failures=2, seconds=10, clock=lambda: now[0])) as desk:
        desk.put(range(4), ["full"])
        os.kill(pid_of(desk), signal.SIGSTOP)
        jobs = [desk.store.get(kit.hashes(*range(4)), {"full": [1, 2, 3, 4]}, timeout=0.1) for _ in range(2)]
        for job in jobs:
            done = desk.wait(job)
            assert (done.failed, done.held) == ("timeout", True)
        assert desk.store.breaker.state == "open" and desk.store.stats()["held_jobs"] == 2
        assert desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1) is None
        os.kill(pid_of(desk), signal.SIGCONT)
        assert all(desk.released(job) for job in jobs if job)
        now[0] += 11
        assert desk.get(range(4), ["full"]).run() == 4
        told = [report.job for report in desk.reports if isinstance(report, JobDone)]
        assert len(told) == len(set(told)) and desk.store.stats()["process"]["restarts"] == 0


def test_more_than_the_socket_takes() -> None:
    """The process reads nothing for a while, and more is asked than fits between: no call waits, what has to wait is
    bounded and sent on later, and everything is answered.

    Mutation: `Connection.send` waits; `Connection.flush` forgets what was not sent; or the bound is not looked at.
    """
    with away("memory://", pages=1001, queue_pages=1000) as desk:
        names = range(1000)
        desk.put(names, ["full"])
        os.kill(pid_of(desk), signal.SIGSTOP)
        jobs = [desk.store.get(kit.hashes(*names), {"full": range(1, 1001)}, timeout=600) for _ in range(20)]
        assert [job is None for job in jobs] == [False] * 16 + [True] * 4 and desk.store.stats()["dropped"] == 4
        assert desk.store._child.link.unsent > 0  # type: ignore[attr-defined]
        desk.wipe()
        os.kill(pid_of(desk), signal.SIGCONT)
        assert all(desk.wait(job).run() == 1000 for job in jobs if job)
        desk.right(desk.reports[-1], names)  # type: ignore[arg-type]
        assert desk.store.stats()["waiting"] == 0


def test_close_while_a_call_hangs() -> None:
    """`close` ends in time: every job is reported, and the process is gone with all that could touch the memory.

    Mutation: `close` waits for a process that does not go; or a held job is never released.
    """
    desk = away("faulty+memory://?hang=1")
    pid = pid_of(desk)
    jobs = [desk.store.get(kit.hashes(1), {"full": [i]}, timeout=600) for i in range(1, 6)]
    assert desk.store.close(0.2)
    reports = desk.store.poll()
    told = [report for report in reports if isinstance(report, JobDone)]
    assert sorted(report.job for report in told) == jobs and all(report.failed == "closed" for report in told)
    assert {report.job for report in told if report.held} == {r.job for r in reports if isinstance(r, Released)}
    assert is_gone(pid) and desk.store.close(1) and not desk.store.wait(0.01) and desk.store.drain(0.01)
    with pytest.raises(StoreError, match="closed"):
        desk.store.get(kit.hashes(1), {"full": [1]}, timeout=1)


def test_close_of_a_process_that_stands_still() -> None:
    """Mutation: `close` asks it to go and leaves it at that."""
    desk = away("memory://")
    pid = pid_of(desk)
    os.kill(pid, signal.SIGSTOP)
    job = desk.store.put(kit.hashes(1), {"full": [1]}, timeout=600)
    assert desk.store.close(0.1) and is_gone(pid)
    (done,) = desk.store.poll()
    assert isinstance(done, JobDone) and (done.job, done.failed, done.held) == (job, "closed", False)


# ---- the same as on threads


def test_close_of_a_process_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes longer to end it than `close` waits: that is said, and whoever polls afterwards meets no error.

    Mutation: `_watch` takes a closed socket out of the epoll.
    """
    desk = away("memory://")
    store: Any = desk.store
    os.kill(pid_of(desk), signal.SIGSTOP)  # or it would close its end first
    process = store._child.process
    gone = process.gone
    with monkeypatch.context() as slow:
        slow.setattr(process, "gone", lambda: False)
        slow.setattr("sapwood.store.process._KILL_TIMEOUT_SECONDS", 0.05)
        slow.setattr("sapwood.store.process._CLOSE_GRACE_SECONDS", 0.0)
        assert not store.close(0.0) and store.poll() == []
    assert process.gone == gone and store.close(1.0)


@pytest.mark.parametrize(
    "faults",
    ["partial=0.3", "corrupt=0.3&torn=0.3", "full=0.5", "fail=0.3", "lie=1&partial=0.1&corrupt=0.1&slow=0.002"],
)
def test_t08_a_store_that_misbehaves_costs_time_only(faults: str) -> None:
    """Mutation: `Item.check` does not compare checksums, or `_done` mixes up groups or pages."""
    with away(f"faulty+memory://?seed=3&{faults}", missing=Missing(seconds=0)) as desk:
        for round_ in range(3):
            names = [f"{round_} {i}" for i in range(20)]
            desk.put(names)
            seen, got = desk.exists([*names, "never put"]), desk.get([*names, "never put"])
            assert got.run() <= 20 and (seen.run() == 21 or "lie" not in faults)
        stats = desk.store.stats()
        assert sum(stats["backend"]["faults"].values()) > 0
        if "corrupt" in faults:
            assert stats["bad"]["checksum"] > 0


def test_groups_and_holes() -> None:
    """Each group has its own pages and holes; what comes back is the unbroken run over all of them.

    Mutation: the pages of a job travel in another order than its groups.
    """
    with away("memory://") as desk:
        desk.put(range(12), ["full"])
        desk.put([3, 4, 5, 6, 7], ["state"])
        desk.wipe()
        targets = {"state": [0, 0, 0, 1, 2, 3, 4, 5, 6, 7], "full": list(range(11, 21))}
        done = desk.wait(desk.store.get(kit.hashes(*range(10)), targets, timeout=600))
        assert done.run() == 8 and list(done.ok) == ["state", "full"]
        assert done.ok["state"].tolist() == [False] * 3 + [True] * 5 + [False] * 2 and done.ok["full"].all()
        assert np.array_equal(desk.memory["state"][3], kit.content("state", 5, desk.memory["state"].shape[1]))
        assert all((memory[0] == 0xEE).all() for memory in desk.memory.values())


def test_wrong_calls_are_refused_before_anything_is_sent() -> None:
    """Mutation: the process store leaves the look at arguments to its process."""
    with away("memory://") as desk:
        for change, message in BAD_CALLS:
            call = {"hashes": kit.hashes(1), "targets": {"full": [1]}, "timeout": 1.0, **change}
            with pytest.raises(ValueError, match=message):
                desk.store.get(call["hashes"], call["targets"], timeout=call["timeout"])
        assert desk.store.stats()["submitted"] == 0


def test_two_stores_in_one_process(tmp_path: Path) -> None:
    """Two stores, two processes, one folder and one memory: what one keeps the other finds, and when one is killed or
    closed the other does not notice.

    Mutation: a process has the other's end of the socket too, so that it never sees its own end.
    """
    uri = f"file://{tmp_path}/store?size=10MiB"
    with away(uri) as one, away(uri) as two:
        assert pid_of(one) != pid_of(two)
        assert one.put(range(4)).run() == 4 and two.get(range(4)).run() == 4
        os.kill(pid_of(one), signal.SIGKILL)
        assert two.get(range(4)).run() == 4
        back(one)
        assert one.store.close(5) and two.get(range(4)).run() == 4 and two.store.stats()["process"]["restarts"] == 0


# ---- opening


@pytest.mark.parametrize("uri", ["file:///x", "http://host/", "file:///proc/x?size=1GiB", "redis://127.0.0.1:1/0", ""])
def test_what_is_wrong_is_said_as_on_threads(uri: str) -> None:
    """Mutation: errors of the process come as StoreError, whatever they were."""
    said = []
    for process in (False, True):
        with pytest.raises((ValueError, StoreError)) as caught:
            open_store(uri, kit.fingerprint(), process=process)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


def test_what_cannot_go_to_another_process() -> None:
    """Functions and memory of this process only: refused, with what to use instead.

    Mutation: `register` takes memory that the process cannot see, and copies go nowhere.
    """
    print_ = kit.fingerprint(4096)
    with pytest.raises(ValueError, match="wrap must be None with process=True"):
        open_store("memory://", print_, process=True, wrap=lambda backend: backend)
    with pytest.raises(ValueError, match="on_report must be None with process=True"):
        open_store("memory://", print_, process=True, on_report=lambda: None)
    with pytest.raises(ValueError, match="queue_pages must be"):
        open_store("memory://", print_, process=True, queue_pages=0)
    store = open_store("memory://", print_, process=True)
    for wrong in (np.zeros((4, 4096), np.uint8), shared((4, 4096)).copy()):
        with pytest.raises(ValueError, match=r"memory of group 'full' must be .*sapwood.store.shared"):
            store.register("full", wrong)
    with pytest.raises(ValueError, match="writeable C-contiguous uint8"):
        store.register("full", shared((4, 512)))
    store.register("full", shared((8, 4096))[4:])
    with pytest.raises(ValueError, match="once"):
        store.register("full", shared((4, 4096)))
    assert store.close()


def test_a_page_that_does_not_fit_is_said_when_it_is_registered(tmp_path: Path) -> None:
    """What only the backend knows is said by `register` too. Mutation: the worker does not answer what failed."""
    store = open_store(f"file://{tmp_path}/store?size=8KiB", kit.fingerprint(), process=True)
    with pytest.raises(StoreError, match="one page of group 'full' needs"):
        store.register("full", shared((4, 64 * kit.KIB)))
    assert store.close()


def test_credentials_are_seen_by_nobody(tmp_path: Path) -> None:
    """The URI goes through the socket: it is neither among the arguments nor in the environment of the process.

    Mutation: the URI is passed on the command line.
    """
    if kit.NO_REDIS:
        pytest.skip(kit.NO_REDIS)
    server, port = kit.redis_server(tmp_path, "--requirepass", SECRET)
    try:
        with away(f"redis://:{SECRET}@127.0.0.1:{port}/0") as desk:
            assert desk.put(range(8)).run() == 8 and desk.get(range(8)).run() == 8
            for name in ("cmdline", "environ"):
                assert SECRET.encode() not in Path(f"/proc/{pid_of(desk)}/{name}").read_bytes()
            assert SECRET not in f"{desk.store.stats()} {desk.store!r}"
        with pytest.raises(StoreError, match="does not accept") as caught:
            open_store(f"redis://:{SECRET}x@127.0.0.1:{port}/0", kit.fingerprint(), process=True)
        assert SECRET not in str(caught.value)
    finally:
        server.kill()


def test_faults_come_by_uri_only() -> None:
    """Every fault that tests use can be asked for in a URI. Mutation: `open_backend` leaves one out."""
    options = "&".join(f"{name}=0.001" for name in vars(Faults()))
    with away(f"faulty+memory://?{options}") as desk:
        assert desk.put([1], ["full"]).failed in ("", "error")


def test_deadlines_of_a_caller_who_rarely_polls() -> None:
    """Somebody polls every tenth of a second only, and the process stands still: his jobs end all the same.

    Mutation: `_expire` waits for somebody who polls more often.
    """
    with away("memory://") as desk:
        desk.put([1], ["full"])
        os.kill(pid_of(desk), signal.SIGSTOP)
        job = desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.05)
        reports: list[Any] = []
        until = time.monotonic() + kit.PATIENCE
        while not reports and time.monotonic() < until:
            time.sleep(0.1)
            reports += desk.store.poll()
        os.kill(pid_of(desk), signal.SIGCONT)
        assert [(report.job, report.failed, report.held) for report in reports] == [(job, "timeout", True)]


# ---- standing aside


def processors_of(desk: kit.Desk) -> set[int]:
    """On which the threads of its process may run."""
    tasks = os.listdir(f"/proc/{pid_of(desk)}/task")
    return set().union(*(os.sched_getaffinity(int(task)) for task in tasks))


@pytest.fixture
def processors() -> Iterator[set[int]]:
    """Those of this thread, which the test may change."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is one processor only: nobody can stand aside")
    yield before
    os.sched_setaffinity(0, before)


def test_the_process_leaves_the_processor_of_its_caller(tmp_path: Path, processors: set[int]) -> None:
    """Where the thread that asks runs, no thread of the store's process may run; it goes along when that one moves.

    Mutation: `_keep_off_this_processor` moves the main thread of that process only, or is called once.
    """
    with away(f"file://{tmp_path}/store?size=10MiB") as desk:  # small pages: one thread at a time
        for here in [*sorted(processors)[:2], min(processors)]:
            os.sched_setaffinity(0, {here})
            assert desk.put([here], ["full"]).run() == 1
            assert processors_of(desk) == processors - {here}


def test_threads_that_need_all_processors_keep_them(processors: set[int]) -> None:
    """A backend that handles pages side by side on as many threads as there are processors is not crowded together.

    Mutation: `_keep_off_this_processor` does not count.
    """
    here = min(processors)
    with away("memory://") as desk:  # two threads, pages of any size
        os.sched_setaffinity(0, {here})
        assert desk.put([1], ["full"]).run() == 1
        left = processors - {here}
        assert processors_of(desk) == (left if len(left) >= 2 else processors)
