"""What the store tests are told with: a server with a store (`Admission`), and real Redis and Mooncake servers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.store import (
    Breaker,
    Fingerprint,
    GroupLayout,
    JobDone,
    Missing,
    Released,
    Store,
    StoreError,
    open_store,
    shared,
)

__all__ = ["Fingerprint", "GroupLayout", "StoreError"]

KIB, MIB = 1 << 10, 1 << 20
WEIGHTS = hashlib.sha256(b"weights").digest()
PAGES = 64
PATIENCE = 240.0  # seconds after which something hangs: in a test that passes, no machine is as slow as that


def layout(page_bytes: int = 64 * KIB) -> tuple[GroupLayout, ...]:
    """A hybrid model: full attention, a window, a state of another size."""
    return (
        GroupLayout("full", "full", page_bytes),
        GroupLayout("window", "window", page_bytes, window=128),
        GroupLayout("state", "state", page_bytes // 2 + 100),
    )


def fingerprint(page_bytes: int = 64 * KIB, **changes: Any) -> Fingerprint:
    fields = {
        "weights": WEIGHTS, "dtype": "bfloat16", "page_size": 16, "groups": layout(page_bytes), "rank": 0, "ranks": 1,
    }  # fmt: skip
    return Fingerprint(**{**fields, **changes})


def hash_of(name: object) -> bytes:
    return hashlib.sha256(f"page {name}".encode()).digest()


def hashes(*names: object) -> list[bytes]:
    return [hash_of(name) for name in names]


def arena(pages: int, page_bytes: int) -> np.ndarray:
    """Page-aligned memory, as an engine's host tier is."""
    return shared((pages, page_bytes))


def content(group: str, name: object, size: int) -> np.ndarray:
    """The right bytes of a page: everybody can compute them."""
    seed = int.from_bytes(hashlib.sha256(f"{group} {name}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Desk:
    """One server with a store: its host memory, and jobs one at a time."""

    def __init__(self, uri: str, print_: Fingerprint | None = None, *, pages: int = PAGES, **options: Any) -> None:
        self.fingerprint = print_ or fingerprint()
        options.setdefault("missing", Missing(seconds=0))
        options.setdefault("breaker", Breaker(failures=1000))
        self.store: Store = open_store(uri, self.fingerprint, **options)
        self.memory = {group.name: arena(pages, group.page_bytes) for group in self.fingerprint.groups}
        for name, memory in self.memory.items():
            self.store.register(name, memory)
        self.reports: list[JobDone | Released] = []

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close(20)

    @property
    def groups(self) -> list[str]:
        return [group.name for group in self.fingerprint.groups]

    def write(self, names: Sequence[object], groups: Sequence[str] | None = None) -> dict[str, list[int]]:
        """Put the right bytes of these pages into memory, at pages 1, 2, ..."""
        for group in groups or self.groups:
            for i, name in enumerate(names, 1):
                self.memory[group][i] = content(group, name, self.memory[group].shape[1])
        return {group: list(range(1, len(names) + 1)) for group in groups or self.groups}

    def wipe(self) -> None:
        for memory in self.memory.values():
            memory[:] = 0xEE

    def wait(self, job: int | None, timeout: float = PATIENCE) -> JobDone:
        """The report of a job."""
        assert job is not None, f"the store did not take the job: {self.store.stats()}"
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            self.reports += self.store.poll()
            for report in self.reports:
                if isinstance(report, JobDone) and report.job == job:
                    return report
            self.store.wait(0.5)
        raise AssertionError(f"job {job} never ended: {self.store.stats()}")

    def held(self, ask: Callable[[], int | None]) -> JobDone:
        """The report of a job that the backend still has when its time is up. On a busy machine that may not be the
        first of its kind: nobody had begun it."""
        for _ in range(1000):
            done = self.wait(ask())
            assert done.failed == "timeout", done
            if done.held:
                return done
        raise AssertionError(f"no job is held: {self.store.stats()}")

    def taken(self, keys: int) -> None:
        """Wait until no more than so many keys wait for a thread."""
        until(lambda: self.store.stats()["waiting"] <= keys, "somebody to begin")

    def released(self, job: int, timeout: float = PATIENCE) -> bool:
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if Released(job) in self.reports:
                return True
            self.store.wait(0.1)
            self.reports += self.store.poll()
        return False

    def put(self, names: Sequence[object], groups: Sequence[str] | None = None, timeout: float = PATIENCE) -> JobDone:
        sources = self.write(names, groups)
        return self.wait(self.store.put(hashes(*names), sources, timeout=timeout), timeout + 10)

    def get(self, names: Sequence[object], groups: Sequence[str] | None = None, timeout: float = PATIENCE) -> JobDone:
        """Fetch into wiped memory; whatever is said to be ok must have the right bytes."""
        self.wipe()
        targets = {group: list(range(1, len(names) + 1)) for group in groups or self.groups}
        done = self.wait(self.store.get(hashes(*names), targets, timeout=timeout), timeout + 10)
        self.right(done, names)
        return done

    def right(self, done: JobDone, names: Sequence[object]) -> None:
        for group, ok in done.ok.items():
            for i, name in enumerate(names):
                if ok[i]:
                    want = content(group, name, self.memory[group].shape[1])
                    assert np.array_equal(self.memory[group][i + 1], want), f"wrong bytes in page {name} of {group}"

    def exists(
        self, names: Sequence[object], groups: Sequence[str] | None = None, timeout: float = PATIENCE
    ) -> JobDone:
        asked = {group: [1] * len(names) for group in groups or self.groups}
        return self.wait(self.store.exists(hashes(*names), asked, timeout=timeout), timeout + 10)


# ---- files


def values_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and len(path.parent.name) == 2]


def bytes_in(folder: Path) -> int:
    """What the files of a store take on disk, those being written included."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.name not in ("usage", "sapwood-store") and path.suffix != ".owner":
                total += -(-path.stat().st_size // 4096) * 4096
    return total


def within(folder: Path, limit: int) -> int:
    """What a store's files take, while others write there. Looking takes time, in which a file may move or go and
    another come, so that both are counted: too much counts if it is there whenever one looks."""
    used = bytes_in(folder)
    for _ in range(10):
        if used <= limit:
            break
        time.sleep(0.01)
        used = min(used, bytes_in(folder))
    assert used <= limit, f"the files of the store take {used} bytes of {limit}"
    return used


# ---- servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Any, what: str, timeout: float = PATIENCE) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"waited {timeout} s for {what}"
        time.sleep(0.02)


class Server:
    """A server process of a test's own, ended by its own process id."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.env
            )

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)

    def stop(self) -> None:
        """Hang it."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
        return True
    except OSError:
        return False


NO_REDIS = "" if shutil.which("redis-server") else "there is no redis-server here, and `make` could not install it"


def redis_server(folder: Path, *more: str, port: int | None = None, tls: bool = False) -> tuple[Server, int]:
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    ports = ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]
    command = ["redis-server", *ports, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
               "--appendonly", "no", "--daemonize", "no", *more]  # fmt: skip
    server = Server(command, folder / "log")
    until(lambda: can_connect(port) or server.process.poll() is not None, "redis-server")
    assert server.process.poll() is None, (folder / "log").read_text()[-500:]
    return server, port


def no_tls() -> str:
    """Why TLS cannot be tested here; empty if it can."""
    if NO_REDIS or not shutil.which("openssl"):
        return NO_REDIS or "there is no openssl here to make certificates with"
    command = ["redis-server", "--port", "0", "--tls-port", "1", "--tls-cert-file", "/nowhere"]
    tried = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE
    )  # it ends because of the certificate
    built = "tls" in tried.stdout.lower() and "unsupported" not in tried.stdout.lower()
    return "" if built else "this redis-server was built without TLS"


def certificates(folder: Path) -> None:
    """An authority (ca.pem) and what it has signed (server.pem and client.pem, with .key); stranger.pem: another."""
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    sign = ["openssl", "x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san"]
    (folder / "san").write_text(
        "subjectAltName=IP:127.0.0.1\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        "basicConstraints=CA:FALSE\nkeyUsage=critical,digitalSignature\n"
    )
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    for name in ("ca", "stranger"):
        subject = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run([*new, "-x509", *usage, *subject], cwd=folder, check=True, capture_output=True)
    for name in ("server", "client"):
        subject = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"]
        subprocess.run([*new, *subject], cwd=folder, check=True, capture_output=True)
        signed = [*sign, "-in", f"{name}.csr", "-out", f"{name}.pem"]
        subprocess.run(signed, cwd=folder, check=True, capture_output=True)


def tls(keys: Path, clients: str = "no") -> list[str]:
    """What a server needs for TLS."""
    files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
    options = [word for what, name in files.items() for word in (f"--tls-{what}-file", str(keys / name))]
    return [*options, "--tls-auth-clients", clients]


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[tuple[list[Server], list[int]]]:
    """Three masters that share the slots."""
    import redis

    servers, ports = [], []
    try:
        for i in range(3):
            port, bus = free_port(), free_port()
            more = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000",
                    "--cluster-require-full-coverage", "no", "--cluster-config-file", f"nodes-{port}.conf")  # fmt: skip
            server, port = redis_server(folder / str(i), *more, port=port)
            servers.append(server)
            ports.append((port, bus))
        clients = [redis.Redis(port=port) for port, _ in ports]
        for i, client in enumerate(clients):
            low, high = 16384 * i // 3, 16384 * (i + 1) // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
        for port, bus in ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        for client in clients:

            def joined(client: Any = client) -> bool:
                told = client.cluster("info")
                return told["cluster_state"] == "ok" and told["cluster_known_nodes"] == "3"

            until(joined, "the cluster")
            client.close()
        yield servers, [port for port, _ in ports]
    finally:
        for server in servers:
            server.kill()


# ---- Mooncake: it listens on all interfaces whatever one tells it, so it lives in a network namespace of its own

PROVIDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("code", code, flush=True)
time.sleep(1 << 20)  # until it is killed
"""
QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
_NEWNET = 0x40000000


@functools.cache
def no_mooncake() -> str:
    """Why Mooncake cannot be tested here; empty if it can."""
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    if tried.returncode:
        return f"Mooncake's client cannot be had here: {tried.stderr.strip().splitlines()[-1][:150]}"
    name = f"sapwood-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) if shutil.which("ip") else None
    if tried is None or tried.returncode:
        return "Mooncake listens on all interfaces, and no network namespace can be made here (needs root and iproute2)"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Alone:
    """A network namespace with nothing but loopback, one a process: Mooncake's threads stay where they
    began. `inside()` puts this thread, and what it starts, into it."""

    def __init__(self) -> None:
        self.name = f"sapwood-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(["ip", "-n", self.name, "link", "set", "lo", "up"], check=True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.name}") as there:
            assert libc.setns(there.fileno(), _NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(here.fileno(), _NEWNET) == 0

    def close(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=False)


class Mooncake:
    """A master and a provider of memory."""

    def __init__(self, alone: Alone, folder: Path, segment: int = 128 * MIB, patience: int = 10) -> None:
        """`patience`: seconds without a word from a provider after which the master takes it for dead."""
        os.environ.update(QUIET)
        self.alone = alone
        self.folder = folder
        self.segment = segment
        with self.alone.inside():
            self.port = free_port()
            metrics = free_port()
            package = importlib.util.find_spec("mooncake")
            assert package is not None and package.submodule_search_locations
            master = Path(next(iter(package.submodule_search_locations))) / "mooncake_master"
            command = [str(master), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", f"--metrics_port={metrics}"]
            command.append(f"--client_ttl={patience}")
            self.master = Server(command, folder / "master.log")
            until(lambda: can_connect(self.port), "the master of Mooncake")
            self.provider = self.provide()

    def provide(self) -> Server:
        log = self.folder / f"provider-{time.monotonic_ns()}.log"
        command = [sys.executable, "-c", PROVIDER, f"127.0.0.1:{self.port}", str(self.segment)]
        server = Server(command, log)
        until(lambda: "code 0" in log.read_text(), "a provider of Mooncake")
        return server

    @property
    def uri(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?host=127.0.0.1&buffer=16MiB"

    def close(self) -> None:
        self.provider.kill()
        self.master.kill()
