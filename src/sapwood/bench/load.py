"""Sessions put to a server, each at its time, and what came of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec

from .client import Client, Failure, Heard, ask
from .workloads import Session, Turn, as_words


class LoadResult(NamedTuple):
    """What came of a workload."""

    heard: list[Heard]
    failed: Counter[str]  # by kind
    details: dict[str, str]  # by kind: the detail of the first one
    seconds: float
    busy: float  # of a core, by this process
    late: float  # seconds after its time that a request was sent, at most; 0 if all were to be sent at once


class Sender:
    """Puts prompts to one endpoint: as messages if its path is that of chats, else as token ids."""

    def __init__(self, client: Client, path: str, fields: Mapping[str, Any], limit: int | None) -> None:
        """`fields` are those of every request, `limit` is how many there are at a time."""
        self._client = client
        self._path = path
        self._fields = fields
        self._chat = path.endswith("/chat/completions")
        self._limit = limit

    async def drive(self, sessions: Iterable[Session], bar: Any) -> LoadResult:
        """`bar` counts every request that ends."""
        places = nullcontext() if self._limit is None else asyncio.Semaphore(self._limit)
        drive = _Drive(self, places, bar)
        with _without_gc():
            begin, cpu = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as users:
                for session in sessions:
                    due = begin + session.due
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    users.create_task(drive.talk(session, due))
            seconds, used = time.perf_counter() - begin, time.process_time() - cpu
        return LoadResult(drive.heard, drive.failed, drive.details, seconds, used / seconds, drive.late)

    async def send(self, asked: Mapping[str, Any], output: int) -> Heard:
        """Raises Failure."""
        body = msgspec.json.encode({**self._fields, **asked, "max_tokens": output})
        return await ask(self._client, self._path, body)

    def first(self, session: Session) -> dict[str, Any]:
        """What a session begins with."""
        if not self._chat:
            return {"prompt": session.system.tolist()}
        system = [{"role": "system", "content": as_words(session.system)}] if len(session.system) else []
        return {"messages": system}

    def next(self, before: dict[str, Any], turn: Turn) -> dict[str, Any]:
        """With one more turn behind it."""
        if not self._chat:
            return {"prompt": before["prompt"] + turn.text.tolist()}
        return {"messages": [*before["messages"], {"role": "user", "content": as_words(turn.text)}]}


class _Drive:
    """One workload on its way."""

    def __init__(self, sender: Sender, places: AbstractAsyncContextManager[Any], bar: Any) -> None:
        self._sender = sender
        self._places = places
        self._bar = bar
        self.heard: list[Heard] = []
        self.failed: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.late = 0.0

    async def talk(self, session: Session, due: float) -> None:
        """A turn that fails is the last one: what would come behind it has no meaning without its answer."""
        body = self._sender.first(session)
        for at, turn in enumerate(session.turns):
            if turn.think:
                await asyncio.sleep(turn.think)
            async with self._places:
                if not at and session.due:
                    self.late = max(self.late, time.perf_counter() - due)
                body = self._sender.next(body, turn)
                try:
                    heard = await self._sender.send(body, turn.output)
                except Failure as failure:
                    self._fail(failure, len(session.turns) - at - 1)
                    return
            self.heard.append(heard._replace(text=""))
            self._bar.update(1)
            if at + 1 < len(session.turns):
                body["messages"].append({"role": "assistant", "content": heard.text})

    def _fail(self, failure: Failure, left: int) -> None:
        self.failed[failure.kind] += 1
        self.details.setdefault(failure.kind, failure.detail)
        if left:
            self.failed["not asked"] += left
            self.details.setdefault("not asked", "a turn before it failed")
        self._bar.set_postfix_str(f"{self.failed.total()} failed", refresh=False)
        self._bar.update(1 + left)


@contextmanager
def _without_gc() -> Iterator[None]:
    """A collection would stop the clock's readers for as long as it takes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
