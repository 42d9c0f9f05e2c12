"""Redis: expiry, a full server, one that hangs or dies; a cluster that loses a node. Real servers all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.store import Breaker, StoreError

from . import kit

redis = pytest.importorskip("redis")
pytestmark = [pytest.mark.server, pytest.mark.skipif(bool(kit.NO_REDIS), reason=kit.NO_REDIS)]


def port_of(uri: str) -> int:
    return int(uri.rsplit(":", 1)[1].split("/")[0])


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[kit.Server, str]]:
    """A server that this test may kill."""
    server, port = kit.redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    yield server, f"redis://127.0.0.1:{port}/0"
    server.kill()


def test_values_expire_after_their_last_use(own: tuple[kit.Server, str]) -> None:
    """With a ttl, what is read lives on, what is not goes; without one, nothing goes.

    Mutation: `get` does not renew the ttl, or `put` sets none.
    """
    _, uri = own
    client = redis.Redis(port=port_of(uri))
    with kit.Desk(f"{uri}?ttl=10000") as desk:
        desk.put([1, 2], ["full"])
        keys = list(client.scan_iter("sapwood:1:*"))
        for key in keys:
            client.expire(key, 5000)  # half of it is over
        assert desk.get([1], ["full"]).run() == 1
        idle, used = sorted(keys, key=client.ttl)
        assert 0 < client.ttl(idle) <= 5000 < client.ttl(used)
        client.pexpire(idle, 1)
        kit.until(lambda: not client.exists(idle), "its end")
        assert desk.get([1, 2], ["full"]).ok["full"].tolist() == [True, False]
    with kit.Desk(uri) as desk:
        desk.put([3], ["full"])
        keys = list(client.scan_iter("sapwood:1:*"))
        assert sorted(client.ttl(key) > 0 for key in keys) == [False, True], "the last one has none"
        client.close()


def test_t08_a_full_server(own: tuple[kit.Server, str]) -> None:
    """A server at its memory limit refuses: counted as full, no failure; what is there is served.

    Mutation: out of memory counts as an error.
    """
    _, uri = own
    with kit.Desk(uri, pages=101) as desk:
        done = desk.put(range(100), ["full"])
        stored = done.ok["full"]
        assert 5 < stored.sum() < 64 and done.failed == ""
        assert desk.store.stats()["full"] == 100 - stored.sum()
        assert desk.get(range(100), ["full"]).ok["full"].tolist() == stored.tolist()


def test_t08_a_server_that_hangs(own: tuple[kit.Server, str]) -> None:
    """SIGSTOP: the job ends by its deadline, its pages are held until the connection is given up; then the breaker
    keeps quiet, and when the server goes on, so does the store.

    Mutation: the client is made without a timeout.
    """
    server, uri = own
    now = [0.0]
    with kit.Desk(f"{uri}?timeout=3", breaker=Breaker(failures=2, seconds=10, clock=lambda: now[0])) as desk:
        kit.until(lambda: desk.put([1], ["full"]).run() == 1, "a page to be kept")
        server.stop()
        done = [desk.held(lambda: desk.store.get(kit.hashes(1), {"full": [1]}, timeout=0.2))]
        while desk.store.breaker.state != "open":
            done.append(desk.held(lambda: desk.store.get(kit.hashes(1), {"full": [2]}, timeout=0.2)))
        assert desk.store.put(kit.hashes(1), {"full": [3]}, timeout=1) is None
        assert all(desk.released(one.job) for one in done), "the connection is given up, and perhaps a second one"
        server.go_on()
        now[0] += 11
        kit.until(lambda: desk.get([1], ["full"]).run() == 1, "the store to be read again")


def test_t08_a_server_that_dies_and_comes_back(own: tuple[kit.Server, str]) -> None:
    """Killed: errors at once, and backups too. Restarted, it is empty, and the store goes on by itself.

    Mutation: `_execute` takes errors for answers.
    """
    server, uri = own
    with kit.Desk(uri) as desk:
        desk.put([1])
        server.kill()
        assert desk.get([1]).failed == "error"
        assert desk.put([2]).failed == "error"
        assert desk.exists([1]).failed == "error"
        server.start()
        kit.until(lambda: kit.can_connect(port_of(uri)), "redis-server")
        assert desk.get([1]).run() == 0
        assert desk.put([1]).run() == 1 and desk.get([1]).run() == 1


def test_a_server_is_no_cluster(own: tuple[kit.Server, str]) -> None:
    """Mutation: RedisCluster's error is not caught."""
    with pytest.raises(StoreError, match=r"redis\+cluster://127.0.0.1"):
        kit.Desk(own[1].replace("redis://", "redis+cluster://"))


def test_t08_a_cluster_that_loses_a_node(tmp_path: Path) -> None:
    """One of three nodes dies: a third of the keys is lost, the others are found, and a hit is only the unbroken run.
    Backups to the living nodes go on.

    Mutation: one pipeline for all nodes, or a dead node fails the whole job.
    """
    with (
        kit.redis_cluster(tmp_path) as (servers, ports),
        kit.Desk(f"redis://127.0.0.1:{ports[0]}/0?cluster=1&timeout=1") as desk,
    ):
        names = list(range(60))
        assert desk.put(names, ["full"]).run() == 60
        servers[1].kill()
        got = desk.get(names, ["full"])
        found = got.ok["full"]
        assert 25 <= found.sum() <= 55 and got.failed == ""
        assert got.run() == found.tolist().index(False)
        again = desk.put([f"new {i}" for i in range(30)], ["full"])
        assert 10 <= again.ok["full"].sum() < 30
        assert desk.store.stats()["failed"] > 0
        servers[1].start()
        kit.until(lambda: desk.put([f"late {i}" for i in range(30)], ["full"]).run() == 30, "the node's return")


def test_a_cluster_whose_slots_move(tmp_path: Path) -> None:
    """A slot is given to another node: at first its keys fail, then the store has looked again and finds the new node.

    Mutation: `_refresh_topology` does nothing.
    """
    with kit.redis_cluster(tmp_path) as (_, ports), kit.Desk(f"redis+cluster://127.0.0.1:{ports[0]}") as desk:
        assert desk.put([1], ["full"]).run() == 1
        clients = [redis.Redis(port=port) for port in ports]
        key = next(key for client in clients for key in client.scan_iter("sapwood:1:*"))
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", key)
        ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
        owner = next(i for i, client in enumerate(clients) if client.dbsize())
        heir = (owner + 1) % 3
        clients[owner].flushall()
        for client in (clients[heir], clients[owner], clients[3 - owner - heir]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[heir].decode())
        kit.until(lambda: desk.put([1], ["full"]).run() == 1, "the store to find the new node")
        assert clients[heir].dbsize() == 1 and desk.get([1], ["full"]).run() == 1
        assert desk.store.stats()["backend"]["moved"] > 0
        for client in clients:
            client.close()


# ---- TLS and users


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := kit.no_tls():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("keys")
    kit.certificates(folder)
    return folder


@pytest.fixture(scope="module")
def secure(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a server that speaks TLS only, and knows a user `me` whose password is `let:me/in`."""
    folder = tmp_path_factory.mktemp("secure")
    users = ["--user", "me", "on", ">let:me/in", "~sapwood:*", "+@all", "--user", "default", "off"]
    server, port = kit.redis_server(folder, *kit.tls(keys), *users, tls=True)
    yield f"127.0.0.1:{port}"
    server.kill()


ME = "me:let%3Ame%2Fin@"


def test_pages_through_tls(secure: str, keys: Path) -> None:
    """A certificate signed by whom we trust, a user, a database: pages go and come. Databases do not share.

    Mutation: `Tls.options` or the database is not given to the client.
    """
    with kit.Desk(f"rediss://{ME}{secure}/3?ca={keys}/ca.pem") as desk:
        assert desk.put([1, 2]).run() == 2 and desk.get([1, 2]).run() == 2
        assert desk.store.stats()["uri"] == f"rediss://***@{secure}/3"
    with kit.Desk(f"rediss://{ME}{secure}/4?ca={keys}/ca.pem") as desk:
        assert desk.get([1, 2]).run() == 0


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("rediss://ME@HOST/0", "certificate is refused .*; ca=/path in the URI says whom to trust"),
        ("rediss://ME@HOST/0?ca=KEYS/stranger.pem", "certificate is refused"),
        ("rediss://ME@localhost:PORT/0?ca=KEYS/ca.pem", "certificate is refused .*localhost"),
        ("rediss://ME@HOST/0?ca=KEYS/nothing.pem", "ca cannot be used: .*nothing.pem: no such file"),
        ("rediss://ME@HOST/0?ca=KEYS/san", "ca cannot be used: .*san: no certificate in PEM"),
        ("rediss://ME@HOST/0?ca=KEYS/ca.pem&cert=KEYS/client.pem&key=KEYS/server.key", "cert and key cannot be used"),
        ("rediss://me:wrong@HOST/0?ca=KEYS/ca.pem", "does not accept this user and password"),
        ("rediss://you:let%3Ame%2Fin@HOST/0?ca=KEYS/ca.pem", "does not accept this user and password"),
        ("rediss://HOST/0?ca=KEYS/ca.pem", "does not accept this user and password"),
        ("rediss://ME@HOST/99?ca=KEYS/ca.pem", "the server refuses: DB index is out of range"),
        ("redis://ME@HOST/0", "no Redis server answers there .*without TLS; a server with it is rediss://"),
        ("rediss+cluster://ME@HOST?ca=KEYS/stranger.pem", "certificate is refused"),
        ("rediss+cluster://me:wrong@HOST?ca=KEYS/ca.pem", "does not accept this user and password"),
    ],
)
def test_what_is_wrong_with_a_secure_server_is_said_at_the_start(
    secure: str, keys: Path, uri: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In words that say what to do, and without the password.

    Mutation: `RedisBackend._why` does not look behind the client's own error; or a certificate is not checked.
    """
    caplog.set_level("DEBUG")
    uri = uri.replace("ME@", ME).replace("HOST", secure).replace("KEYS", str(keys)).replace("PORT", secure[10:])
    with pytest.raises(StoreError, match=word) as caught:
        kit.Desk(uri)
    told = f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"
    assert "let:me" not in told and "let%3A" not in told and "wrong" not in told


def test_insecure_must_be_asked_for(secure: str, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With insecure=1 a certificate of anybody will do, and the log says so.

    Mutation: `insecure` is the default; or says nothing.
    """
    with kit.Desk(f"rediss://{ME}{secure}/0?insecure=1") as desk:
        assert desk.put([7]).run() == 1
    assert "whoever answers there is trusted" in caplog.text and "let:me" not in caplog.text


def test_a_server_that_wants_to_know_who_we_are(keys: Path, tmp_path: Path) -> None:
    """A server that asks for the client's certificate: with it we come in, without it we do not.

    Mutation: cert and key are not given to the client.
    """
    server, port = kit.redis_server(tmp_path, *kit.tls(keys, clients="yes"), tls=True)
    uri = f"rediss://127.0.0.1:{port}/0?ca={keys}/ca.pem"
    try:
        with pytest.raises(StoreError, match="no Redis server answers there"):
            kit.Desk(uri)
        with kit.Desk(f"{uri}&cert={keys}/client.pem&key={keys}/client.key") as desk:
            assert desk.put([1]).run() == 1 and desk.get([1]).run() == 1
    finally:
        server.kill()


def test_a_server_without_tls(own: tuple[kit.Server, str]) -> None:
    """It waits for more of what it does not understand; the message says what may be wrong.

    Mutation: `RedisBackend._why` does not tell that it spoke TLS.
    """
    with pytest.raises(StoreError, match=r"no Redis server answers there .*with TLS; a server without it is redis://"):
        kit.Desk(own[1].replace("redis://", "rediss://") + "?timeout=0.3")
