"""`redis://[user:password@]host:port/db?ttl=3600`: Redis or Valkey, alone or (`redis+cluster://`) as a cluster;
`rediss://` and `rediss+cluster://` with TLS.

One string a value, header and page. Pipelines of single commands: joining large values for MSET is slower, and across
slots it is refused. In a cluster every node has a pipeline of its own, so a dead node costs its own keys only.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .protocol import FAILED, MISSING, Backend, Got, PutResult, StoreError
from .values import HEAD_BYTES, Item

if TYPE_CHECKING:
    from .uri import Where

log = logging.getLogger("sapwood.store")

_TOPOLOGY_REFRESH_SECONDS = 1.0  # seconds between two looks at which node has which slots


class Tls(NamedTuple):
    """Files: the authorities to trust (`ca` None: the system's), the client's certificate and its key. `insecure`: any
    server is trusted."""

    ca: str | None
    cert: str | None
    key: str | None
    insecure: bool

    def options(self, where: Where) -> dict[str, Any]:
        """Options of the client. The files are read once, now: an error should name the wrong one."""
        for name, file in (("ca", self.ca), ("cert", self.cert)):
            try:
                if file is not None and name == "ca":
                    ssl.create_default_context(cafile=file)
                elif file is not None:
                    ssl.create_default_context().load_cert_chain(file, self.key)
            except OSError as error:  # an ssl.SSLError is one
                what = "cert and key" if name == "cert" else name
                reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else str(error.strerror).lower()
                raise StoreError(f"{where.shown}: {what} cannot be used: {file}: {reason}") from None
        return {
            "ssl": True,
            "ssl_ca_certs": self.ca,
            "ssl_certfile": self.cert,
            "ssl_keyfile": self.key,
            "ssl_cert_reqs": "none" if self.insecure else "required",
            "ssl_check_hostname": not self.insecure,
        }


class RedisBackend(Backend):
    """`ttl`: seconds after the last use at which the server forgets a value; None leaves that to its own policy.
    `timeout`: seconds after which a silent connection is given up."""

    workers = 2
    part_bytes = 4 << 20  # a pipeline holds a copy of what it sends

    def __init__(self, where: Where, ttl: int | None, timeout: float, cluster: bool, tls: Tls | None = None) -> None:
        try:
            import redis
        except ImportError:
            raise StoreError("redis:// needs the package redis: pip install 'sapwood[redis]'") from None
        self._redis = redis
        self._errors = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
        self._ttl = ttl
        self._cluster = cluster
        self._refreshed = 0.0
        self._lock = threading.Lock()
        self._topology = {"moved": 0, "nodes": 0}
        retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        options: dict[str, Any] = {
            "host": where.host or "127.0.0.1",
            "port": where.port or 6379,
            "username": where.user or None,
            "password": where.password or None,
            "socket_timeout": timeout,
            "socket_connect_timeout": min(timeout, 1.0),
            "decode_responses": False,
            **(tls.options(where) if tls is not None else {}),
        }
        self._client: Any
        try:
            if cluster:
                self._client = redis.RedisCluster(**options, require_full_coverage=False, retry=retry)
            else:
                self._client = redis.Redis(
                    **options, db=_database(where.path), retry=retry, retry_on_error=[], max_connections=self.workers
                )
            self._try_commands()
        except (*self._errors, IndexError) as error:
            raise StoreError(f"{where.shown}: {self._clean(self._why(error, tls is not None), where)}") from None
        if tls is not None and tls.insecure:
            log.warning("store %s: insecure=1: whoever answers there is trusted", where.shown)

    def _why(self, error: BaseException, tls: bool) -> str:
        """Why the first contact failed, and what to do. The client hides causes behind causes."""
        wrong = self._redis.exceptions
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"its certificate is refused ({cause.verify_message}); ca=/path in the URI says whom to trust"
            if isinstance(cause, wrong.AuthenticationError):
                return "the server does not accept this user and password"
            if isinstance(cause, wrong.ResponseError):
                return f"the server refuses: {cause}"
            cause = cause.__cause__ or cause.__context__
        kind = "cluster" if self._cluster else "server"
        tried = "with TLS; a server without it is redis://" if tls else "without TLS; a server with it is rediss://"
        return f"no Redis {kind} answers there ({tried}): {error}"

    def _try_commands(self) -> None:
        """Send each command that will be used once."""
        self._client.exists("sapwood:try")
        if self._ttl is not None:
            self._client.getex("sapwood:try", ex=self._ttl)

    @staticmethod
    def _clean(text: str, where: Where) -> str:
        for secret in (where.password, where.user):
            if secret:
                text = text.replace(secret, "***")
        return text[:200]

    def exists(self, names: Sequence[str]) -> list[bool]:
        there = [False] * len(names)
        for places, pipe in self._pipes(names):
            for place in places:
                pipe.exists(names[place])
            for place, yes in zip(places, self._execute(pipe), strict=True):
                if isinstance(yes, Exception):
                    raise yes
                there[place] = yes == 1
        return there

    def get(self, items: Sequence[Item]) -> Iterator[Got]:
        for places, pipe in self._pipes([item.name for item in items]):
            for place in places:
                if self._ttl is None:
                    pipe.get(items[place].name)
                else:
                    pipe.getex(items[place].name, ex=self._ttl)
            for place, value in zip(places, self._execute_or_fail(pipe, len(places)), strict=True):
                if value is None:
                    yield Got(place, b"", MISSING)
                elif not isinstance(value, bytes):
                    yield Got(place, b"", FAILED)
                else:
                    page = items[place].page
                    size = len(value) - HEAD_BYTES
                    if size == len(page):
                        page[:] = memoryview(value)[HEAD_BYTES:]
                    yield Got(place, value[:HEAD_BYTES], max(0, size))

    def put(self, items: Sequence[Item]) -> Iterator[PutResult]:
        for places, pipe in self._pipes([item.name for item in items]):
            for place in places:
                if self._ttl is None:
                    pipe.exists(items[place].name)
                else:
                    pipe.expire(items[place].name, self._ttl)
            new = []
            for place, there in zip(places, self._execute_or_fail(pipe, len(places)), strict=True):
                if isinstance(there, Exception):
                    yield PutResult(place, "error")
                elif there:
                    yield PutResult(place, "")
                else:
                    new.append(place)
            for place in new:
                pipe.set(items[place].name, b"".join((items[place].head(), items[place].page)), ex=self._ttl)
            for place, done in zip(new, self._execute_or_fail(pipe, len(new)), strict=True):
                full = isinstance(done, Exception) and "OOM" in f"{type(done).__name__} {done}".upper()
                full = full or isinstance(done, self._redis.exceptions.OutOfMemoryError)
                yield PutResult(place, "full" if full else "" if done is True else "error")

    def delete(self, names: Sequence[str]) -> None:
        for places, pipe in self._pipes(names):
            for place in places:
                pipe.unlink(names[place])
            self._execute_or_fail(pipe, len(places))

    def stats(self) -> dict[str, Any]:
        return {"cluster": self._cluster, "ttl": self._ttl, **(self._topology if self._cluster else {})}

    def close(self) -> None:
        self._client.close()

    # ---- pipelines

    def _pipes(self, names: Sequence[str]) -> Iterator[tuple[list[int], Any]]:
        """A pipeline for each server that has some of these keys, and which ones."""
        if not self._cluster:
            yield list(range(len(names))), self._client.pipeline(transaction=False)
            return
        nodes: dict[str, list[int]] = {}
        found: dict[str, Any] = {}
        for place, name in enumerate(names):
            try:
                node = self._client.get_node_from_key(name)
            except self._errors:
                node = None
            label = node.name if node is not None else ""
            nodes.setdefault(label, []).append(place)
            found[label] = node
        self._topology["nodes"] = len(self._client.get_nodes())
        if "" in found:
            self._refresh_topology()
        for label, places in nodes.items():
            if found[label] is None:
                yield places, None
            else:
                yield places, self._client.get_redis_connection(found[label]).pipeline(transaction=False)

    def _execute(self, pipe: Any) -> list[Any]:
        if pipe is None:
            raise StoreError("no node of the cluster has these keys")
        answers: list[Any] = pipe.execute(raise_on_error=False)
        if self._cluster:
            moved = sum(isinstance(answer, self._redis.exceptions.MovedError) for answer in answers)
            if moved:
                self._topology["moved"] += moved
                self._refresh_topology()
        return answers

    def _execute_or_fail(self, pipe: Any, n: int) -> list[Any]:
        """The answers; in a cluster, a node that does not answer fails its own keys only."""
        if not n:
            return []
        try:
            return self._execute(pipe)
        except (*self._errors, StoreError) as error:
            if not self._cluster:
                raise
            self._refresh_topology()
            return [error] * n

    def _refresh_topology(self) -> None:
        """Ask the cluster which node has which slots now; not too often."""
        with self._lock:
            now = time.monotonic()
            if now < self._refreshed + _TOPOLOGY_REFRESH_SECONDS:
                return
            self._refreshed = now
        with contextlib.suppress(*self._errors):
            self._client.nodes_manager.initialize()


def _database(path: str) -> int:
    return int(path.strip("/") or 0)
