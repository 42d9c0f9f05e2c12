"""What a server depends on breaks while many stream: nobody who asks sees anything of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.store import kit as stores

from .kit import Running, until
from .soak import soak

pytestmark = [pytest.mark.server, pytest.mark.attack, pytest.mark.xdist_group("soak")]


class Fault(NamedTuple):
    store: str  # as `--store` has it
    strikes: Callable[[Running], None]
    seen: Callable[[dict[str, Any]], bool]  # that it struck, in the figures of the store


def store_of(server: Running) -> dict[str, Any]:
    return dict(server.get("/cache/stats").json["tiers"]["store"])


@contextlib.contextmanager
def process_killed(folder: Path) -> Iterator[Fault]:
    """The store's process is killed; another takes its place."""

    def strikes(server: Running) -> None:
        before = server.store()
        os.kill(before, signal.SIGKILL)
        until(lambda: server.store() not in (0, before))

    yield Fault(f"file://{folder}?size=64MiB", strikes, lambda store: store["process"]["restarts"] == 1)


@contextlib.contextmanager
def disk_full(folder: Path) -> Iterator[Fault]:
    """Somebody else fills the disk of the store."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]).returncode:
        pytest.skip("a small disk needs the right to mount one")

    def strikes(server: Running) -> None:
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        yield Fault(f"file://{folder}/store?size=64MiB", strikes, lambda store: store["full"] > 0)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def redis_dead(folder: Path) -> Iterator[Fault]:
    """Redis is killed, and does not come back."""
    if stores.NO_REDIS:
        pytest.skip(stores.NO_REDIS)
    redis, port = stores.redis_server(folder)

    def seen(store: dict[str, Any]) -> bool:
        return bool(store["breaker"]["opened"] or store["write_breaker"]["opened"])

    try:
        yield Fault(f"redis://127.0.0.1:{port}", lambda server: redis.kill(), seen)
    finally:
        redis.kill()


@contextlib.contextmanager
def redis_hangs(folder: Path) -> Iterator[Fault]:
    """Redis takes connections and answers nothing."""
    if stores.NO_REDIS:
        pytest.skip(stores.NO_REDIS)
    redis, port = stores.redis_server(folder)
    try:
        yield Fault(f"redis://127.0.0.1:{port}", lambda server: redis.stop(), lambda store: store["timeout"] > 0)
    finally:
        redis.go_on()
        redis.kill()


FAULTS = [process_killed, disk_full, redis_dead, redis_hangs]


def struck(fault: Any, folder: Path, seconds: float, streams: int) -> None:
    """Clients come until the fault is seen: how soon that is depends on who else is busy on this machine."""
    folder.mkdir()
    with fault(folder) as given:

        def strikes(server: Running) -> None:
            given.strikes(server)
            until(lambda: given.seen(store_of(server)))

        # So few pages on device and host that the store is read too.
        told = soak(seconds, streams, 3, strikes, store=given.store, device_pages=3000, host_pages=1500, fails=0)
    assert sum(told["requests"].values()) > 10 * seconds
    assert given.seen(told["store"]["store"]), told["store"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_during_load(fault, tmp_path):
    """32 clients for a few seconds.

    Mutation: `ProcessStore._bury` starts no other child; `Breaker` never opens; `InterpreterYield` waits for a store
    without end.
    """
    struck(fault, tmp_path / "store", 6.0, 32)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_during_much_load(fault, tmp_path):
    """256 clients for half a minute.

    Mutation: as above.
    """
    struck(fault, tmp_path / "store", 30.0, 256)
