"""Opening a store: URIs that are wrong, places that do not answer, and credentials that must not show."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from typing import Any

import pytest

from sapwood.store import Breaker, StoreError, open_store
from sapwood.store.uri import nbytes, parse

from . import kit

WRONG = {
    "": "such as file:///",
    "/var/cache": "such as file:///",
    "http://host/": "must be one of file://, redis://",
    "file:///x": "size of file:// must be given",
    "file:///x?size=0": "size of file:// must be given",
    "file:///x?size=lots": "size of file:// must be bytes with a unit such as 20GiB or 500MB, got 'lots'",
    "file:///x?size=1Gib": "size of file:// must be bytes",
    "file:///x?size=-1GiB": "size of file:// must be bytes",
    "file:///x?size=1GiB&fast=1": "options of file:// are size, trusted; got 'fast'",
    "file:///x?size=1GiB&size=2GiB": "must be given once",
    "file:///x?size": "must be written as",
    "file://x?size=1GiB": "path of file:// must be absolute",
    "file://host/x?size=1GiB": "path of file:// must be absolute and on this machine",
    "file:///?size=1GiB": "must name a folder",
    "redis://": "host of redis:// must be given",
    "redis://h:port/0": "host and port of redis:// must be host:port",
    "redis://h:99999/0": "host and port of redis:// must be host:port",
    "redis://h/zero": "database of redis:// must be a number",
    "redis://h/0?ttl=soon": "ttl of redis:// must be a whole number, got 'soon'",
    "redis://h/0?timeout=0": "timeout of redis:// must be a number of seconds above 0",
    "redis://h/0?cluster=maybe": "cluster of redis:// must be 1 (yes) or 0 (no), got 'maybe'",
    "redis://h/0?ca=/x": "options of rediss://, and redis:// is without TLS",
    "redis://h/0?insecure=1": "options of rediss://, and redis:// is without TLS",
    "rediss://h/0?ca=x": "ca of rediss:// must be the absolute path of a file, got 'x'",
    "rediss://h/0?cert=/x": "cert and key of rediss:// must be given together",
    "rediss://h/0?ca=/x&insecure=1": "of ca and insecure, rediss:// takes one",
    "rediss://h/0?verify=no": "options of rediss:// are ttl, timeout, cluster, ca, cert, key, insecure; got 'verify'",
    "rediss://": "host of rediss:// must be given",
    "rediss+cluster://h/3": "database of a Redis cluster must be 0",
    "redis+cluster://h/3": "database of a Redis cluster must be 0",
    "mooncake://h": "master of mooncake:// must be given with its port",
    "mooncake://h:1/x": "neither a path nor a user",
    "mooncake://h:1?segment=all": "segment of mooncake:// must be bytes",
    "faulty+file:///x?size=1GiB&lie=2": "lie of faulty+file:// must be a number from 0 to 1",
    "faulty+http://x": "must be one of",
}


@pytest.mark.parametrize("uri", WRONG)
def test_wrong_uris_are_refused_by_name(uri: str) -> None:
    """Mutation: `open_store` or `parse` leaves out that look."""
    with pytest.raises(ValueError) as caught:
        open_store(uri, kit.fingerprint())
    assert WRONG[uri] in str(caught.value)


def test_a_store_needs_a_fingerprint() -> None:
    """Mutation: `open_store` takes anything."""
    with pytest.raises(ValueError, match="fingerprint must be"):
        open_store("memory://", "llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="queue_pages must be"):
        open_store("memory://", kit.fingerprint(), queue_pages=0)


def test_sizes() -> None:
    """Mutation: a GB is a GiB."""
    assert [nbytes("size", text) for text in ("4096", "1GB", "1GiB", "1.5KiB", "2 MB")] == [
        4096, 10**9, 2**30, 1536, 2_000_000,
    ]  # fmt: skip


SECRET = "hunter2"
WITH_SECRETS = [
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"redis://{SECRET}:{SECRET}@127.0.0.1:1/0",
    f"redis+cluster://me:{SECRET}@127.0.0.1:1",
    f"rediss://me:{SECRET}@127.0.0.1:1/0",
    f"rediss://me:{SECRET}@127.0.0.1:1/0?ca=/nothing.pem",
    f"rediss+cluster://me:{SECRET}@127.0.0.1:1",
    f"redis://me:{SECRET}@127.0.0.1:port/0",
    f"redis://me:{SECRET}@127.0.0.1:1/zero",
    f"redis://me:{SECRET}@127.0.0.1:1/0?fast=1",
    f"redis://127.0.0.1:1/0?password={SECRET}",
    f"redis://127.0.0.1:1/0?{SECRET}",
    f"redis://me:pa/{SECRET}@127.0.0.1:1/0",
    f"redis://me:1/{SECRET}@127.0.0.1:1/0",
    f"redis://me:1?{SECRET}@127.0.0.1:1/0",
    f"redis://me:1#{SECRET}@127.0.0.1:1/0",
    f"redis://me:[{SECRET}@127.0.0.1:1/0",
    f"mooncake://me:{SECRET}@127.0.0.1:1",
    f"file://me:{SECRET}@host/x?size=1GiB",
    f"http://me:{SECRET}@127.0.0.1:1",
]


@pytest.mark.parametrize("uri", WITH_SECRETS, ids=range(len(WITH_SECRETS)))
def test_credentials_never_show(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not in an error, whatever is wrong with the URI, not in what caused it, not in a log.

    Mutation: `parse` or a backend quotes the URI in an error.
    """
    caplog.set_level(logging.DEBUG)
    with pytest.raises((StoreError, ValueError)) as caught:
        open_store(uri, kit.fingerprint())
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error) and SECRET not in repr(error)
        error = error.__cause__
    assert SECRET not in caplog.text


def test_credentials_never_show_in_a_running_store(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server with a password: the store works; stats, repr and the log of its breaker show where, not with what.

    Mutation: `Where.shown` keeps the user and password.
    """
    if kit.NO_REDIS:
        pytest.skip(kit.NO_REDIS)
    caplog.set_level(logging.DEBUG)
    server, port = kit.redis_server(tmp_path, "--requirepass", SECRET)
    try:
        for wrong, word in ((f":{SECRET}x@", "does not accept"), ("", "refuses|does not accept")):
            with pytest.raises(StoreError, match=word) as caught:
                open_store(f"redis://{wrong}127.0.0.1:{port}/0", kit.fingerprint())
            assert SECRET not in str(caught.value)
        with kit.Desk(f"redis://:{SECRET}@127.0.0.1:{port}/0", breaker=Breaker(failures=1)) as desk:
            assert desk.put([1]).run() == 1 and desk.get([1]).run() == 1
            server.kill()
            assert desk.get([1]).failed == "error"
            assert "not asked any more" in caplog.text
            told = f"{desk.store.stats()} {desk.store!r} {caplog.text}"
            assert SECRET not in told and f"redis://***@127.0.0.1:{port}/0" in told
    finally:
        server.kill()
    assert SECRET not in repr(parse(f"redis://me:{SECRET}@h/0?password={SECRET}"))


def closed_port() -> int:
    return kit.free_port()


def test_places_that_do_not_answer() -> None:
    """Nobody listens there, or somebody who says nothing or speaks another language: a clear word within seconds.

    Mutation: RedisBackend does not try itself out at the start.
    """
    print_ = kit.fingerprint()
    with pytest.raises(StoreError, match=r"redis://127.0.0.1:\d+/0: no Redis server answers there"):
        open_store(f"redis://127.0.0.1:{closed_port()}/0", print_)
    with pytest.raises(StoreError, match="no Redis cluster answers there"):
        open_store(f"redis+cluster://127.0.0.1:{closed_port()}", print_)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StoreError, match="no Redis server answers there"):
            open_store(f"redis://127.0.0.1:{silent.getsockname()[1]}/0?timeout=0.3", print_)
    if not kit.no_mooncake():
        with pytest.raises(StoreError, match=r"mooncake://127.0.0.1:\d+: no master answers there"):
            open_store(f"mooncake://127.0.0.1:{closed_port()}", print_)


def test_packages_that_are_not_there() -> None:
    """Without the client's package, the message says what to install; the store itself needs none of them, nor torch.

    Mutation: redis is imported at the top of a module.
    """
    code = """
import sys
sys.modules["redis"] = sys.modules["mooncake"] = sys.modules["torch"] = None
from tests.store import kit
for uri in ("redis://h:1/0", "mooncake://h:1"):
    try:
        kit.open_store(uri, kit.fingerprint())
    except kit.StoreError as error:
        print(error)
with kit.Desk("memory://") as desk:
    print(desk.put([1]).run())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "pip install 'sapwood[redis]'" in lines[0]
    assert "pip install 'sapwood[mooncake]'" in lines[1] and "libibverbs1" in lines[1]
    assert lines[2] == "1"


def test_without_xxhash_the_engine_is_there_and_a_store_says_what_is_missing(tmp_path):
    """The packages import without xxhash; only opening a store needs it, and says so.

    Mutation: values.py imports xxhash without asking; or `open_store` does not try it.
    """
    code = f"""
import sys
sys.modules["xxhash"] = None
import sapwood.engine
from sapwood.store import Fingerprint, GroupLayout, StoreError, open_store
try:
    open_store("file://{tmp_path}?size=1MiB", Fingerprint(bytes(32), "x", 4, (GroupLayout("full", "full", 64),), 0, 1))
except StoreError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "a store needs the package xxhash: pip install xxhash", ran.stderr
