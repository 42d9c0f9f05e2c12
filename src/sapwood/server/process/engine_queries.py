"""Questions of the API process about the cache, and changes of adapters, answered between two steps. Adapters are read
by processes of their own; threads wait for those."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from sapwood.cache import Namespace
from sapwood.engine.lora.process import AT_ONCE, ReaderBusy, ReadTimeout
from sapwood.engine.lora.reader import NoFolder
from sapwood.engine.request_table import RequestTable

from .messages import EngineQuery, QueryAnswer

_PROBLEMS = {NoFolder: "no_adapter", ReaderBusy: "adapters_busy", ReadTimeout: "adapter_timeout"}


class EngineQueries:
    """One thread calls `take` and `poll`: that of the steps."""

    def __init__(self, requests: RequestTable, send: Callable[[QueryAnswer], None]) -> None:
        self.requests = requests
        self._send = send
        self._files = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="adapters")  # no read waits for another
        self._waiting: list[tuple[int, Future[Any], Callable[[Any], Any]]] = []
        self._answers: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "explain": self._explain,
            "tree": self._tree,
            "reset": self._reset,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def take(self, query: EngineQuery) -> None:
        try:
            found = self._answers[query.name](**query.arguments)
        except (ValueError, KeyError, TypeError, ReaderBusy) as error:
            self._send(_refusal(query.number, error))
            return
        if isinstance(found, _Later):
            future = self._files.submit(found.read)
            future.add_done_callback(lambda _: self.requests.wake())
            self._waiting.append((query.number, future, found.then))
        else:
            self._send(QueryAnswer(query.number, found, ""))

    def poll(self) -> None:
        for waiting in [each for each in self._waiting if each[1].done()]:
            self._waiting.remove(waiting)
            number, future, then = waiting
            try:
                self._send(QueryAnswer(number, then(future.result()), ""))
            except Exception as error:  # a file can be wrong in any way
                self._send(_refusal(number, error))

    # ---- the cache

    def _stats(self) -> dict[str, Any]:
        requests = self.requests
        stats = {**requests.scheduler.stats(), "tiers": requests.loop.tiers.stats()}
        cache = dict(stats["cache"])
        cache["namespaces"] = [{**each, "namespace": _shown(each["namespace"])} for each in cache["namespaces"]]
        live = requests.scheduler.adapters()
        by_state = {state: {digest.hex(): count for digest, count in some.items()} for state, some in live.items()}
        steps = {"sizes": list(requests.loop.step_sizes), "sum": requests.loop.step_tokens}
        return {**stats, "cache": cache, "adapters": self._adapters(), "live_adapters": by_state, "step_tokens": steps}

    def _explain(self, tokens: bytes, adapter: bytes | None, salt: str | None, admin: bool) -> dict[str, Any]:
        space = Namespace(adapter, salt, self.requests.version)
        return self.requests.scheduler.cache.explain(space, np.frombuffer(tokens, np.int32), admin)._asdict()

    def _tree(self, most: int) -> dict[str, Any]:
        return self.requests.scheduler.cache.outline(most)

    def _reset(self, store: bool) -> dict[str, Any]:
        """Forget what is cached on device and host. With `store` this server does not find its pages in the store any
        more either; they stay there until the store needs their room."""
        pages = self.requests.scheduler.cache.stats()["pages"]
        held = {tier: sum(group[tier]["tree"] for group in pages.values()) for tier in ("device", "host")}
        self.requests.scheduler.flush()
        if store:
            self.requests.version = self.requests.seeds.getrandbits(62)
        running = len(self.requests.samples)
        return {"forgotten_pages": held, "store": store, "running_requests": running}

    # ---- adapters

    def _adapters(self) -> dict[str, bytes]:
        adapters = self.requests.adapters
        return {} if adapters is None else adapters.names()

    def _load_adapter(self, name: str, path: str, root: str | None) -> Any:
        adapters: Any = self.requests.adapters
        if adapters is None:
            raise ValueError("this server was started without --enable-lora")
        if len(self._waiting) >= AT_ONCE:
            raise ReaderBusy(f"{AT_ONCE} adapters are being loaded already: try again when one of them is done")
        return _Later(lambda: adapters.read(path, root), lambda adapter: adapters.add(name, adapter))

    def _unload_adapter(self, name: str) -> bytes:
        adapters: Any = self.requests.adapters
        if adapters is None:
            raise ValueError("this server was started without --enable-lora")
        digest: bytes = adapters.unload(name)
        if digest not in adapters.names().values():
            for each in self.requests.scheduler.cache.stats()["namespaces"]:
                if each["namespace"].adapter == digest:
                    self.requests.scheduler.evict_namespace(each["namespace"])
        return digest


class _Later:
    """`read` on a thread, then `then` between two steps."""

    def __init__(self, read: Callable[[], Any], then: Callable[[Any], Any]) -> None:
        self.read = read
        self.then = then


def _refusal(number: int, error: Exception) -> QueryAnswer:
    return QueryAnswer(number, None, str(error) or type(error).__name__, _PROBLEMS.get(type(error), ""))


def _shown(space: Namespace) -> dict[str, Any]:
    """A namespace without its salt, which is the tenant's secret."""
    digest = None if space.adapter is None else space.adapter.hex()
    return {"adapter": digest, "salted": space.salt is not None, "version": space.version}
