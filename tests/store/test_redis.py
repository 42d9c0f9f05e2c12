"""Redis: expiry, a full server, one that hangs or dies; a cluster that loses a node. Real servers all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.store import Breaker, StoreError

from . import kit

redis = pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(bool(kit.NO_REDIS), reason=kit.NO_REDIS)


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
    with kit.Desk(f"{uri}?ttl=2") as desk:
        desk.put([1, 2], ["full"])
        time.sleep(1.2)
        assert desk.get([1], ["full"]).run() == 1
        time.sleep(1.2)
        assert desk.get([1, 2], ["full"]).ok["full"].tolist() == [True, False]
    with kit.Desk(uri) as desk:
        desk.put([3], ["full"])
        client = redis.Redis(port=port_of(uri))
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
    with kit.Desk(f"{uri}?timeout=1", breaker=Breaker(failures=2, seconds=0.5)) as desk:
        desk.put([1], ["full"])
        server.stop()
        begin = time.monotonic()
        jobs = [desk.store.get(kit.hashes(1), {"full": [i]}, timeout=0.2) for i in (1, 2)]
        done = [desk.wait(job) for job in jobs]
        assert time.monotonic() - begin < 0.9
        assert all((one.failed, one.held) == ("timeout", True) for one in done)
        assert desk.store.put(kit.hashes(1), {"full": [3]}, timeout=1) is None
        assert all(desk.released(one.job, 2) for one in done), "after one second the connection is given up"
        server.go_on()
        time.sleep(0.6)
        assert desk.get([1], ["full"]).run() == 1


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
        kit.until(lambda: kit.can_connect(port_of(uri)), 10, "redis-server")
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
        kit.until(lambda: desk.put([f"late {i}" for i in range(30)], ["full"]).run() == 30, 20, "the node's return")


def test_a_cluster_whose_slots_move(tmp_path: Path) -> None:
    """A slot is given to another node: at first its keys fail, then the store has looked again and finds the new node.

    Mutation: `_look_again` does nothing.
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
        kit.until(lambda: desk.put([1], ["full"]).run() == 1, 10, "the store to find the new node")
        assert clients[heir].dbsize() == 1 and desk.get([1], ["full"]).run() == 1
        assert desk.store.stats()["backend"]["moved"] > 0
        for client in clients:
            client.close()
