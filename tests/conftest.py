"""Which test runs when, and the places a store can be in, each with a real server behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from . import (
    leftovers,
    surroundings,  # noqa: F401  (first)
)
from .store import kit

PLACES = ("file", "file process", "memory", "faulty", "redis", "cluster", "mooncake", "mooncake process")
_SERVERS = {"redis_port": "redis", "cluster_ports": "cluster", "alone": "mooncake", "mooncake": "mooncake"}

# The same examples for everybody; what is marked `long` draws its own.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server or a process. One worker runs all that share a server, and starts it; and with a server,
    engines of one layout are enough in `make test`: their stores see pages, not layouts."""
    for item in items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        place = given.get("place", "")
        needs = [server for name, server in _SERVERS.items() if name in getattr(item, "fixturenames", ())]
        needs += [server for server in {*_SERVERS.values()} if place.startswith(server)]
        if needs or "process" in place:
            item.add_marker(pytest.mark.server)
        if needs:
            item.add_marker(pytest.mark.xdist_group(needs[0]))
            if given.get("layout", "full+2windows+state") != "full+2windows+state":
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Halves of characters in captured output are escaped: xdist cannot send them, and would end the whole run."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that changes what later tests of its process see is told so itself, whatever comes after it here."""
    before = leftovers.now()
    yield
    left = leftovers.since(before)
    assert not left, "the test leaves this behind: " + "; ".join(left)


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if kit.NO_REDIS:
        pytest.skip(kit.NO_REDIS)
    server, port = kit.redis_server(tmp_path_factory.mktemp("redis"))
    yield port
    server.kill()


@pytest.fixture(scope="session")
def cluster_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    if kit.NO_REDIS:
        pytest.skip(kit.NO_REDIS)
    with kit.redis_cluster(tmp_path_factory.mktemp("cluster")) as (_, ports):
        yield ports


@pytest.fixture(scope="session")
def alone() -> Iterator[kit.Alone]:
    if kit.no_mooncake():
        pytest.skip(kit.no_mooncake())
    namespace = kit.Alone()
    yield namespace
    namespace.close()


@pytest.fixture(scope="session")
def mooncake(alone: kit.Alone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Mooncake]:
    # For all tests of a session, on a machine that may be busy with them: nobody is to be taken for dead.
    servers = kit.Mooncake(alone, tmp_path_factory.mktemp("mooncake"), patience=300)
    yield servers
    servers.close()


class Place(NamedTuple):
    kind: str
    uri: str
    process: bool  # whether desks there have their store in a process of its own

    def desk(self, print_: Any = None, **options: Any) -> kit.Desk:
        return kit.Desk(self.uri, print_, **{"process": self.process, **options})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        metafunc.parametrize("place", getattr(metafunc.module, "PLACES", PLACES), indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """One of each kind. A place is shared by all tests of a session where it is a server: weights tell them apart."""
    kind, _, process = request.param.partition(" ")
    with contextlib.ExitStack() as stack:
        if kind == "file":
            uri = f"file://{tmp_path}/store?size=100MiB"
        elif kind == "memory":
            uri = f"memory://{tmp_path}"
        elif kind == "faulty":
            uri = f"faulty+file://{tmp_path}/store?size=100MiB&seed=1"
        elif kind == "redis":
            uri = f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0?ttl=600&timeout=240"
        elif kind == "cluster":
            uri = f"redis+cluster://127.0.0.1:{request.getfixturevalue('cluster_ports')[0]}?timeout=240"
        else:
            servers: kit.Mooncake = request.getfixturevalue("mooncake")
            stack.enter_context(servers.alone.inside())
            uri = servers.uri
        yield Place(kind, uri, bool(process))
