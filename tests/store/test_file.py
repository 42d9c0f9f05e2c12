"""The file store: several processes, kill -9, byte limits, torn and foreign files, full and unwritable disks."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sapwood.store import Breaker, StoreError, open_store
from sapwood.store.file import FileBackend
from sapwood.store.folder import UNCOUNTED, ByteLedger, charge

from . import kit

KIB, MIB = kit.KIB, kit.MIB
ROOT = Path(__file__).parent.parent.parent


def uri(folder: Path, size: str = "100MiB") -> str:
    return f"file://{folder}?size={size}"


def places(folder: Path, names: Sequence[object]) -> list[Path]:
    """The files of these pages, which one group has."""
    files = kit.values_in(folder)
    return [file for name in names for file in files if kit.hash_of(name) in file.read_bytes()[:128]]


# ---- a process of its own: backs up pages in a random order, and reads what it or others wrote

NEIGHBOUR = """
import random, sys
from tests.store import kit
folder, size, (seed, keys, turns) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
random = random.Random(seed)
desk = kit.Desk(f"file://{folder}?size={size}")
print("ready", flush=True)
hits = 0
for _ in range(turns):
    names = random.sample(range(keys), 6)
    desk.put(names)
    hits += sum(int(ok.sum()) for ok in desk.get(random.sample(range(keys), 6)).ok.values())
desk.store.close()
print("hits", hits, desk.store.stats()["bad"], flush=True)
"""


def run_python(code: str, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def neighbour(folder: Path, size: str, seed: int, keys: int, turns: int) -> subprocess.Popen[str]:
    return run_python(NEIGHBOUR, str(folder), size, str(seed), str(keys), str(turns))


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def most_bytes(folder: Path, processes: list[subprocess.Popen[str]]) -> int:
    """The most bytes seen on disk while these run: they are stopped for each look, so that it is exact."""

    def stopped(pid: int) -> bool:
        states = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                states.append((task / "stat").read_text().rpartition(") ")[2][0])
        return all(state in "TtZX" for state in states)

    most = 0
    while any(process.poll() is None for process in processes):
        time.sleep(0.02)
        living = [process for process in processes if process.poll() is None]
        for process in living:
            process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(FileNotFoundError):
            kit.until(lambda living=living: all(stopped(process.pid) for process in living), "a stop")
        most = max(most, kit.bytes_in(folder))
        for process in living:
            process.send_signal(signal.SIGCONT)
    return max(most, kit.bytes_in(folder))


BUSY = """
import random, sys
from tests.store import kit
folder, seed = sys.argv[1], int(sys.argv[2])
random = random.Random(seed)
desk = kit.Desk(f"file://{folder}?size=8MiB", kit.fingerprint(256 * kit.KIB))
desk.write(range(40))
print("ready", flush=True)
kept = False
while True:
    names = random.sample(range(40), 8)
    pages = {group: [name + 1 for name in names] for group in desk.groups}
    desk.wait(desk.store.put(kit.hashes(*names), pages, timeout=600))
    kept = kept or print("kept", flush=True) or True
"""


def strays(folder: Path) -> list[str]:
    """What is left in tmp/ after somebody has looked. The kernel may let go of a dead process's locks a moment late."""
    ByteLedger(str(folder), 8 * MIB).close()
    return [path.name for path in (folder / "tmp").iterdir()]


def kill_while_it_backs_up(folder: Path, times: int, seed: int) -> None:
    """The same folder, `times` processes one after the other, each killed at a random moment; then all is looked at."""
    limit, dice = 8 * MIB, random.Random(seed)
    found = 0
    for n in range(times):
        process = run_python(BUSY, str(folder), str(dice.randrange(2**30)))
        ready(process)
        if not n:  # one at least has written, on a slow machine too
            assert process.stdout is not None and process.stdout.readline() == "kept\n"
        time.sleep(dice.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert kit.bytes_in(folder) <= limit, f"seed {seed}, kill {n}"
        if n % 5 in (1, 4) or n == times - 1:
            with kit.Desk(uri(folder, "8MiB"), kit.fingerprint(256 * KIB)) as desk:
                # Whatever comes back is compared with what it must be, byte for byte.
                found += sum(int(ok.sum()) for ok in desk.get(range(40)).ok.values())
                assert sum(desk.store.stats()["bad"].values()) == 0, f"seed {seed}, kill {n}: a torn value has a name"
                assert desk.put(["room"]).run() == 1
            kit.until(lambda: not strays(folder), f"strays to be swept: {strays(folder)}")
            assert kit.bytes_in(folder) <= limit
    assert found > 0, "the processes did write"


@pytest.mark.server
def test_t10_killed_while_it_backs_up(tmp_path: Path) -> None:
    """Ten processes are killed with SIGKILL at random moments during backups: what they wrote is found again, never a
    torn or wrong page, no stray file stays, and the byte limit holds through all of it.

    Mutation: `_write` writes to the file's own place instead of a temporary one; `_sweep` leaves strays.
    """
    kill_while_it_backs_up(tmp_path / "store", 10, 1)


@pytest.mark.long
def test_t10_killed_a_hundred_times(tmp_path: Path) -> None:
    """The same a hundred times.

    Mutation: as above.
    """
    kill_while_it_backs_up(tmp_path / "store", 100, 2)


@pytest.mark.server
def test_t12_t13_three_processes_and_eviction(tmp_path: Path) -> None:
    """Three processes on one folder that holds a quarter of what they write: bytes on disk, temporary files included,
    never pass the limit; all of them hit, none reads a wrong byte, evicting breaks nobody.

    Mutation: `ByteLedger.take` counts what this process wrote only.
    """
    folder = tmp_path / "store"
    others = [neighbour(folder, "8MiB", seed, 220, 40) for seed in (1, 2, 3)]
    most = most_bytes(folder, others)
    assert 0.5 * 8 * MIB < most <= 8 * MIB
    ends = [process.communicate(timeout=600)[0].splitlines()[-1] for process in others]
    assert all(process.returncode == 0 for process in others)
    for end in ends:
        word, hits, *bad = end.split()
        assert word == "hits" and int(hits) > 0 and "".join(bad).count(":0") == 7, end
    ledger = ByteLedger(str(folder), 8 * MIB)
    assert kit.bytes_in(folder) <= ledger.used() <= 8 * MIB
    ledger.close()


MANY_JOBS = """
import sys
from tests.store import kit
with kit.Desk(f"file://{sys.argv[1]}?size=3MiB", pages=200) as desk:
    print("ready", flush=True)
    sources = desk.write(range(150), ["full"])
    for turn in range(6):
        names = kit.hashes(*range(150 * turn, 150 * turn + 150))
        for low in range(0, 150, 10):
            pages = [page if low < page <= low + 10 else 0 for page in sources["full"]]
            desk.store.put(names, {"full": pages}, timeout=600)
        assert desk.store.drain(600)
        assert all(report.run() == 150 for report in desk.store.poll())
    assert desk.store.stats()["backend"]["evicted"] > 500
"""


@pytest.mark.server
def test_t12_limit_under_threads(tmp_path: Path) -> None:
    """Many jobs at once from one process, twenty times what fits: the limit holds at every moment.

    Mutation: `_put` writes first and takes room afterwards.
    """
    folder = tmp_path / "store"
    process = run_python(MANY_JOBS, str(folder))
    most = most_bytes(folder, [process])
    assert process.returncode == 0
    assert 2 * MIB < most <= 3 * MIB


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Pages that were read, or put again, outlive those that nobody used since.

    Mutation: `_use` does not move what was used to the end.
    """
    with kit.Desk(uri(tmp_path / "store", "1500KiB"), pages=40) as desk:
        desk.put(range(20), ["full"])
        desk.get([0, 1, 2], ["full"])
        desk.put([3, 4], ["full"])
        desk.put(range(100, 110), ["full"])
        kept = desk.exists(range(20), ["full"]).ok["full"]
        assert kept[:5].all() and not kept[5:10].any()


def test_use_by_another_process_counts(tmp_path: Path) -> None:
    """A second server knows of use by the first: what the first one read stays, though the second never did.

    Mutation: `_evict` does not look at when a file was last used.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder, "1500KiB"), pages=40) as one, kit.Desk(uri(folder, "1500KiB"), pages=40) as two:
        one.put(range(20), ["full"])
        for path in kit.values_in(folder):
            os.utime(path, (1e9, 1e9))
        backend = two.store._backend
        assert isinstance(backend, FileBackend)
        backend._scanned.wait()
        backend._scan()
        one.store._backend._index.clear()  # as after a restart: its next use of a file is told to all
        one.get([0, 1, 2], ["full"])
        two.put(range(100, 110), ["full"])
        kept = two.exists(range(20), ["full"]).ok["full"]
        assert kept[:3].all() and kept.sum() < 15


def test_torn_files_are_misses(tmp_path: Path) -> None:
    """Files cut short, emptied, with a byte changed or replaced by something else: misses, counted and removed; a put
    mends them. A file that only got longer is still whole.

    Mutation: `check` does not look at the size, or `delete` does nothing.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder)) as desk:
        desk.put(range(6), ["full"])
        order = places(folder, range(6))
        os.truncate(order[0], 0)
        os.truncate(order[1], 100)
        os.truncate(order[2], order[2].stat().st_size - 1)
        with order[3].open("r+b") as file:
            file.seek(-5, 2)
            file.write(b"\0" if file.read(1) != b"\0" else b"1")
        with order[4].open("ab") as file:
            file.write(b"more")
        got = desk.get(range(6), ["full"])
        assert got.ok["full"].tolist() == [False, False, False, False, True, True]
        bad = desk.store.stats()["bad"]
        assert bad["short"] == 3 and bad["checksum"] == 1
        assert desk.exists(range(4), ["full"]).ok["full"].sum() == 0
        assert desk.put(range(6), ["full"]).run() == 6
        assert desk.get(range(6), ["full"]).run() == 6


def test_values_that_changed_places_are_misses(tmp_path: Path) -> None:
    """A file under another key's name, whole and with a right checksum, is not that key's value.

    Mutation: `check` does not compare the hash.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder)) as desk:
        desk.put([1, 2], ["full"])
        one, two = kit.values_in(folder)
        bytes_ = one.read_bytes(), two.read_bytes()
        one.write_bytes(bytes_[1])
        two.write_bytes(bytes_[0])
        assert not desk.get([1, 2], ["full"]).ok["full"].any()
        assert desk.store.stats()["bad"]["key"] == 2


def test_t10_found_again_after_a_restart(tmp_path: Path) -> None:
    """A new process finds what an old one wrote, at once, without an index. Its count of bytes is the old one.

    Mutation: a get waits for the scan.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder)) as desk:
        desk.put(range(10))
        used = desk.store.stats()["backend"]["used"]
    with kit.Desk(uri(folder)) as desk:
        backend = desk.store._backend
        assert isinstance(backend, FileBackend)
        with backend._scanning:  # a scan that takes for ever
            assert desk.get(range(10)).run() == 10
        backend._scanned.wait(10)
        assert desk.store.stats()["backend"]["used"] == used


def test_the_count_mends_itself(tmp_path: Path) -> None:
    """Room that a killed process had taken, files removed by hand, a lost record: counting the files sets it right, and
    until then nothing is written rather than too much.

    Mutation: `end_count` keeps what was there; a lost record counts as nothing used.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder, "1MiB")) as desk:
        desk.put(range(8), ["full"])
        backend = desk.store._backend
        assert isinstance(backend, FileBackend)
        truth = backend._ledger.used()
        assert truth == sum(charge(path.stat().st_size) for path in kit.values_in(folder))
        code = f"""
import os
from sapwood.store.folder import ByteLedger
ledger = ByteLedger({str(folder)!r}, 2**20)
assert ledger.take(300_000) == 0
open(ledger.temporary(), "wb").write(bytes(100))
os._exit(9)
"""
        assert subprocess.run([sys.executable, "-c", code]).returncode == 9
        assert backend._ledger.used() == truth + 300_000
        backend._scan()
        assert backend._ledger.used() == truth
        assert [path.suffix for path in (folder / "tmp").iterdir()] == [".owner"]
        kit.values_in(folder)[0].unlink()
        backend._scan()
        assert backend._ledger.used() == truth - charge(64 * KIB + 4096)
        os.truncate(folder / "usage", 0)
        assert backend._ledger.take(1) == UNCOUNTED
        assert desk.put(["new"], ["full"]).run() == 1, "counted again, then written"
        assert backend._ledger.used() == truth


def test_a_ledger_counts_what_others_take_during_a_count(tmp_path: Path) -> None:
    """Files written while all files are being counted, seen or not, never make the count too low.

    Mutation: `end_count` leaves out what was owed, or what was taken since.
    """
    one, two = ByteLedger(str(tmp_path), 10_000), ByteLedger(str(tmp_path), 10_000)
    one.end_count(one.begin_count(), 0)
    assert two.take(1000) == 0
    mark = one.begin_count()
    assert two.take(2000) == 0
    two.settle(1000, 1000)
    assert one.end_count(mark, 0) == 3000
    assert one.take(7001) == 1 and one.take(7000) == 0 and two.take(1) == 1
    one.settle(7000, 0)
    two.settle(2000, 0)
    assert one.used() == 1000
    one.close()
    two.close()


def test_a_file_that_goes_during_a_count_is_freed_once(tmp_path: Path) -> None:
    """While one process counts, another removes a file: whichever comes first, the bytes are given back once.

    Mutation: `remove` unlinks before it takes the lock.
    """
    one, two = ByteLedger(str(tmp_path), 10_000), ByteLedger(str(tmp_path), 10_000)
    one.end_count(one.begin_count(), 0)
    for name in "ab":
        assert two.take(charge(1)) == 0
        (tmp_path / name).write_bytes(b"x")
        two.settle(charge(1), charge(1))
    with one._locked():  # `two` may do nothing that counts before `one` is through
        thread = threading.Thread(target=two.remove, args=([str(tmp_path / "a")],))
        thread.start()
        time.sleep(0.05)
        assert (tmp_path / "a").exists()
    thread.join()
    assert one.used() == charge(1) and two.remove([str(tmp_path / "a")]) == (0, 0)
    assert two.remove([str(tmp_path / "b")]) == (1, charge(1)) and one.used() == 0
    one.close()
    two.close()


def test_a_start_with_many_files_waits_for_no_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hit of a new server does not wait for anybody to have looked at all files, however long that takes.

    Mutation: `FileBackend` scans before it returns.
    """
    folder = tmp_path / "store"
    print_ = kit.fingerprint(4096)
    with kit.Desk(uri(folder, "1GiB"), print_) as desk:
        desk.put(range(60), ["full"])
    may, scan = threading.Event(), FileBackend._first_scan

    def slowly(backend: FileBackend) -> None:
        may.wait(kit.PATIENCE)
        scan(backend)

    monkeypatch.setattr(FileBackend, "_first_scan", slowly)
    with kit.Desk(uri(folder, "1GiB"), print_) as desk:
        backend = desk.store._backend
        assert isinstance(backend, FileBackend)
        assert desk.get([1], ["full"]).run() == 1 and not backend._scanned.is_set()
        may.set()
        assert backend._scanned.wait(kit.PATIENCE) and desk.store.stats()["backend"]["known"] == 60


# ---- what does not belong there


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)
    os.chdir(here)


def a_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "letter").write_text("mine")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "link": lambda path: path.symlink_to(path.parent.parent / "sapwood-store"),
    "dangling link": lambda path: path.symlink_to("/nowhere"),
    "folder": Path.mkdir,
    "full folder": a_full_folder,
}
if os.geteuid() == 0:
    FOREIGN["device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: never ends


@pytest.mark.parametrize("kind", FOREIGN)
def test_t20_something_else_in_a_values_place(tmp_path: Path, kind: str) -> None:
    """One of four values was replaced by something that is no file: a miss, at once, that costs its own key alone and
    says nothing against the store. It is removed and the page can be kept again, unless it is a folder with something
    in it. What is counted is what the files take.

    Mutation: `_open` leaves out O_NONBLOCK, O_NOFOLLOW, or the look at what it opened; `exists` believes in whatever is
    there; `remove` frees what was never counted, or does not take a folder away.
    """
    folder = tmp_path / "store"
    stays = kind == "full folder"
    with kit.Desk(uri(folder), breaker=Breaker(failures=1)) as desk:
        desk.put(range(4), ["full"])
        place = places(folder, range(4))[1]
        place.unlink()
        FOREIGN[kind](place)
        backend = desk.store._backend
        assert isinstance(backend, FileBackend)
        backend._scan()
        assert desk.exists(range(4), ["full"]).ok["full"].tolist() == [True, False, True, True]
        got = desk.get(range(4), ["full"], timeout=600)
        assert (got.ok["full"].tolist(), got.failed) == ([True, False, True, True], "")
        assert os.path.lexists(place) == stays
        got = desk.get([1], ["full"], timeout=600)
        assert (got.run(), got.failed) == (0, "")
        if not stays:
            FOREIGN[kind](place)
        put = desk.put(range(6), ["full"], timeout=600)  # also where something else is
        assert (put.ok["full"].tolist(), put.failed) == ([True, not stays, True, True, True, True], "")
        put = desk.put([1], ["full"], timeout=600)
        assert (put.run(), put.failed) == (int(not stays), "")
        assert desk.get([1], ["full"]).run() == int(not stays)
        FOREIGN[kind](place.parent / ("0" * 64))  # nobody asks for it
        backend._scan()
        assert backend._ledger.used() == sum(
            charge(path.stat().st_size) for path in kit.values_in(folder) if not path.is_symlink()
        )
        assert desk.store.breaker.opened == desk.store.write_breaker.opened == 0
        if stays:
            assert (place / "letter").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_t20_a_value_that_cannot_be_opened(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file's open fails: its neighbours come. One that may not be read is in the way, and goes; any other error may
    be over soon.

    Mutation: `get` lets the error of one key end the part; `_FOREIGN` leaves out EACCES, or has EMFILE.
    """
    folder = tmp_path / "store"
    really = os.open
    with kit.Desk(uri(folder)) as desk:
        desk.put(range(4), ["full"])
        place = places(folder, range(4))[1]

        def refusing(path: str, *words: int) -> int:
            if path == str(place):
                raise OSError(code, os.strerror(code))
            return really(path, *words)

        monkeypatch.setattr(os, "open", refusing)
        got = desk.get(range(4), ["full"])
        assert (got.ok["full"].tolist(), got.failed) == ([True, False, True, True], "")
        assert desk.store.stats()["failed"] == int(code != errno.EACCES)
        assert place.exists() == (code != errno.EACCES)
        monkeypatch.undo()
        assert desk.put([1], ["full"]).run() == 1 and desk.get(range(4), ["full"]).run() == 4


def test_t20_files_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest file cannot be removed: that costs one page at most, others go in its stead, and the limit holds.

    Mutation: `remove` lets the error of one file end it all.
    """
    folder = tmp_path / "store"
    really = os.unlink
    with kit.Desk(uri(folder, "1MiB"), pages=40) as desk:
        desk.put(range(14), ["full"])
        place = places(folder, range(14))[0]

        def refusing(path: str) -> None:
            if path == str(place):
                raise PermissionError(errno.EPERM, "it is immutable")
            really(path)

        monkeypatch.setattr(os, "unlink", refusing)
        put = desk.put(range(20, 34), ["full"])
        assert put.ok["full"].sum() >= 13 and put.failed == ""
        assert place.exists() and kit.within(folder, MIB) > MIB // 2


DAMAGED = {
    "all ones": b"\xff" * 64,
    "ones, and short": b"\xff" * 20,
    "zeros": bytes(36),
    "a line": b"0\n",
    "nothing used": struct.pack("<QQ", 0, 0),
    "more than any disk": struct.pack("<QQ", 2**61, 2**61),
    "as much taken as can be": struct.pack("<QQ", 100, 2**64 - 1),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("when", ["in use", "closed"])
def test_t20_a_damaged_ledger_is_counted_again(tmp_path: Path, kind: str, when: str) -> None:
    """The record of what is used is overwritten with nonsense, while a store runs or is closed: the next put counts the
    files and is kept; nothing that was there is lost, and the limit holds.

    Mutation: `_read` believes a record whatever its checksum; `end_count` uses what was taken since another record.
    """
    folder = tmp_path / "store"

    def damage() -> None:
        with (folder / "usage").open("r+b") as file:
            file.write(DAMAGED[kind])
            if "short" in kind or "line" in kind:
                file.truncate()

    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(kit.Desk(uri(folder, "1MiB"), pages=40))
        desk.put(range(8), ["full"])
        if when == "closed":
            desk.store.close()
        damage()
        if when == "closed":
            desk = stack.enter_context(kit.Desk(uri(folder, "1MiB"), pages=40))
        assert desk.put([20], ["full"]).run() == 1
        assert desk.get(range(8), ["full"]).run() == 8
        used = desk.store.stats()["backend"]["used"]
        assert used == sum(charge(path.stat().st_size) for path in kit.values_in(folder))
        assert desk.put(range(30, 44), ["full"]).run() == 14
        kit.within(folder, MIB)


def test_t20_a_ledger_that_is_damaged_during_a_count(tmp_path: Path) -> None:
    """The record is lost while the files are being counted: that count is worth nothing, and the next one is.

    Mutation: `end_count` uses what was taken since another record.
    """
    ledger = ByteLedger(str(tmp_path), 10_000)
    ledger.end_count(ledger.begin_count(), 0)
    assert ledger.take(5000) == 0
    ledger.settle(5000, 5000)
    mark = ledger.begin_count()
    os.truncate(tmp_path / "usage", 0)
    assert ledger.end_count(mark, 5000) == UNCOUNTED == ledger.take(1)
    assert ledger.end_count(ledger.begin_count(), 5000) == 5000 and ledger.take(5001) == 1
    ledger.close()


FROZEN = """
import sys, time
from sapwood.store.folder import ByteLedger
ledger = ByteLedger(sys.argv[1], 2**20)
with ledger._locked():
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.server
def test_t20_a_frozen_process_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is stopped while it has the ledger. Who is open goes on reading; a put is not kept, and says so soon.
    Who wants to open the store is told why it cannot. When the process is gone all is as before.

    Mutation: `_lock` waits for the lock as long as it takes; or `get` needs the ledger.
    """
    monkeypatch.setattr("sapwood.store.folder._OPEN_LOCK_SECONDS", 0.5)
    folder = tmp_path / "store"
    with kit.Desk(uri(folder), breaker=Breaker(failures=1, seconds=0.1)) as desk:
        desk.put(range(4), ["full"])
        place = places(folder, range(4))[3]
        process = run_python(FROZEN, str(folder))
        killer = threading.Timer(kit.PATIENCE, process.kill)  # so that a store that waits for it fails this test
        try:
            ready(process)
            process.send_signal(signal.SIGSTOP)
            killer.start()
            with pytest.raises(StoreError, match=r"file store .*/store: another process has kept the lock .* 0\.5 s"):
                open_store(uri(folder), kit.fingerprint())
            assert desk.get(range(4), ["full"], timeout=600).run() == 4
            put = desk.put(["new"], ["full"], timeout=600)
            assert (put.run(), put.failed) == (0, "error") and process.poll() is None
            assert desk.store.write_breaker.opened == 1, "one that takes nothing is not asked all the time"
            os.truncate(place, 100)
            got = desk.get(range(4), ["full"], timeout=600)
            assert (got.run(), got.failed) == (3, ""), "what is bad goes when it can"
        finally:
            killer.cancel()
            process.kill()
            process.wait()
        kit.until(lambda: desk.store.write_breaker.state != "open", "the next probe")
        assert desk.put(["new"], ["full"]).run() == 1
        assert open_store(uri(folder), kit.fingerprint()).close()


def test_t20_what_is_settled_while_the_lock_is_kept(tmp_path: Path) -> None:
    """A process took room, and cannot get the lock back to say what became of it: that is written down with its next
    use of the ledger.

    Mutation: `settle` forgets what it could not write down.
    """
    one, two = ByteLedger(str(tmp_path), 10_000), ByteLedger(str(tmp_path), 10_000)
    one.end_count(one.begin_count(), 0)
    assert one.take(5000) == 0
    with two._locked():
        thread = threading.Thread(target=one.settle, args=(5000, 1000))
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and two.used() == 5000
    assert one.take(0) == 0 and two.used() == 1000
    assert two.begin_count().owed == 0
    one.close()
    two.close()


# ---- disks


def test_a_full_disk(tmp_path: Path) -> None:
    """A disk smaller than the store's size: what does not fit is dropped and counted, what is there is still served, no
    half-written file stays, and room that comes is used.

    Mutation: `_write` leaves its temporary file behind when the disk is full.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        folder = disk / "store"
        with kit.Desk(uri(folder), pages=80) as desk:
            done = desk.put(range(60), ["full"])
            stored = done.ok["full"].tolist()
            stats = desk.store.stats()
            assert 10 < sum(stored) < 32 and stats["full"] == 60 - sum(stored) and done.failed == ""
            assert [path.suffix for path in (folder / "tmp").iterdir()] == [".owner"]
            assert desk.get(range(60), ["full"]).ok["full"].tolist() == stored
            assert stats["backend"]["used"] >= kit.bytes_in(folder)
            for path in kit.values_in(folder)[:5]:
                path.unlink()
            assert desk.put(["a", "b"], ["full"]).run() == 2
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        # A disk with not a byte left may be refused, with a reason.
        with contextlib.suppress(StoreError), kit.Desk(uri(folder), pages=80) as desk:
            assert desk.get(["a", "b"], ["full"]).run() == 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The same where the system limits the size of a file.

    Mutation: `_FULL` does not know EFBIG.
    """
    with kit.Desk(uri(tmp_path / "store")) as desk:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            done = desk.put([1], ["full"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (done.run(), done.failed, desk.store.stats()["full"]) == (0, "", 1)
        assert desk.put([1], ["full"]).run() == 1


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    """Refused at the start, in words: not a folder, not writable, somebody else's, another version, no file at all, too
    small.

    Mutation: `claim` takes any folder.
    """
    print_ = kit.fingerprint()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file store .*/file/x: not a directory"):
        open_store(uri(tmp_path / "file" / "x"), print_)
    with pytest.raises(StoreError, match=r"file store .*/file: file exists"):
        open_store(uri(tmp_path / "file"), print_)
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("mine")
    with pytest.raises(StoreError, match="other things in it"):
        open_store(uri(home), print_)
    assert [path.name for path in home.iterdir()] == ["letter"]
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "sapwood-store").write_text("sapwood file store 2\n")
    with pytest.raises(StoreError, match=r"'sapwood file store 2', and this Sapwood reads 'sapwood file store 1'"):
        open_store(uri(newer), print_)
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "sapwood-store")
    with pytest.raises(StoreError, match=r"it is '', and this Sapwood reads"):
        open_store(uri(pipe), print_)
    store = open_store(uri(tmp_path / "small", "10KiB"), print_)
    with pytest.raises(StoreError, match=r"size of file store .* is 10240 bytes; one page of group 'full' needs 70144"):
        store.register("full", kit.arena(2, 64 * KIB))
    store.close()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.geteuid() == 0:
        code = f"""
import os, uuid
from tests.store import kit
os.setuid(65534)
try:
    kit.Desk({uri(locked / "store")!r})
except kit.StoreError as error:
    print(error)
"""
        for folder in (tmp_path, *tmp_path.parents):
            if str(folder).startswith("/tmp/"):
                folder.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "permission denied; the folder must be one this user can write to" in done.stdout, done.stderr[-500:]


def test_a_disk_that_goes_away(tmp_path: Path) -> None:
    """The folder is removed under a running store: misses and failed backups, no crash; it does not come back to life
    half-way.

    Mutation: `get` does not expect a missing file.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder)) as desk:
        desk.put([1])
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        got = desk.get([1])
        assert (got.run(), got.failed) == (0, "")
        assert desk.put([2]).run() == 0
        assert desk.exists([1, 2]).run() == 0


def out_of_cache(path: Path, start: int = 0) -> None:
    """Have the page cache forget a file, from some byte on."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, start, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_memory_that_is_not_aligned(tmp_path: Path) -> None:
    """Memory that the disk cannot write to directly is served all the same, and the other goes on being read directly.

    Mutation: `_read` asks for O_DIRECT whatever the memory.
    """
    folder = tmp_path / "store"
    store = open_store(uri(folder), kit.fingerprint())
    raw = np.zeros(5 * 64 * KIB, np.uint8)
    skew = (-raw.ctypes.data) % 4096 + 100
    memory = {"full": kit.arena(4, 64 * KIB), "window": raw[skew : skew + 4 * 64 * KIB].reshape(4, 64 * KIB)}
    for group, array in memory.items():
        store.register(group, array)
        array[1] = 7
    store.put(kit.hashes(1), {"full": [1], "window": [1]}, timeout=10)
    assert store.drain(10)
    for path in kit.values_in(folder):
        out_of_cache(path)
    backend = store._backend
    assert isinstance(backend, FileBackend)
    for group in ("full", "window"):
        store.poll()
        store.get(kit.hashes(1), {group: [2]}, timeout=10)
        assert store.drain(10) and (memory[group][2] == 7).all()
        if group == "full":
            direct = backend._direct
    assert backend._direct == direct
    store.close()


def test_a_cold_page_cache(tmp_path: Path) -> None:
    """Pages that are not, or only in part, in the page cache come with the same bytes.

    Mutation: `_read` returns what was cached of a page as if it were all.
    """
    folder = tmp_path / "store"
    with kit.Desk(uri(folder), kit.fingerprint(MIB), pages=10) as desk:
        desk.put(range(8))
        for i, path in enumerate(kit.values_in(folder)):
            out_of_cache(path, (0, 32 * KIB, 128 * KIB)[i % 3])
        assert desk.get(range(8)).run() == 8
        assert sum(desk.store.stats()["bad"].values()) == 0
