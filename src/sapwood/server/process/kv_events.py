"""KV events on ZMQ, as vLLM publishes them: a router learns which blocks this engine holds, and in which tier.

    the step's thread                          the publisher's thread
    publish(events) ---------> queue ---+---> pack ---> PUB      [topic, sequence number, payload]
    give_snapshot(events) ---> queue ---+        \\---> buffer
           ^                                             |
           +------- wants_snapshot, wake() <--- ROUTER <-+       a replay from a sequence number on

`publish` never waits. A batch that it cannot queue is lost, which the sequence numbers show. A replay of batches that
are not in the buffer any more is answered from the tree: one batch that clears everything and stores all that the tree
held after the batch with the same number; then the batches after that one.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
import zmq

from sapwood.cache import AllBlocksCleared, BlockStored, KVEvent, Namespace

from .kv_events_config import KVEventsConfig

__all__ = ["KVEventPublisher", "KVEventsConfig", "lora_id_of", "salt_key"]

log = logging.getLogger(__name__)
END = (-1).to_bytes(8, "big", signed=True)  # the sequence number of a replay's last message
_BATCHES_PER_TURN = 256  # batches or replayed messages before the thread goes on with other work
_MAX_REPLAYS = 64  # replays at a time
_REPLAY_STALL_SECONDS = 30.0  # seconds after which a client that takes nothing more of its replay is given up
_REPLAY_POLL_SECONDS = 0.02  # seconds until the thread looks for replays, while nothing is published
_SNAPSHOT_INTERVAL_SECONDS = 1.0  # seconds between two snapshots: each costs the step's thread a walk through the tree
_EVENTS_PER_YIELD = 64  # events of a snapshot after which the thread yields the interpreter
_CLOSE_SECONDS = 1.0  # seconds in which queued batches are sent at the end


# ---- the wire


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, omit_defaults=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int


def lora_id_of(adapter: bytes) -> int:
    """A number for an adapter that follows from its content: 31 bits, never 0."""
    return int.from_bytes(hashlib.sha256(adapter).digest()[:4], "big") >> 1 or 1


def salt_key(salt: str) -> str:
    """The stand-in for a salt in `extra_keys`: a digest, with the prefix by which Dynamo recognises it."""
    return "dynamo-cache-salt:" + Namespace(salt=salt).digest().hex()[:32]


class _Wire:
    """Events as bytes. `names`: the name of an adapter by its digest, None if it has no name (any more)."""

    def __init__(self, encoding: str, names: Callable[[bytes], str | None]) -> None:
        array = encoding == "array"
        self._stored = _StoredArray if array else _Stored
        self._removed = _RemovedArray if array else _Removed
        self._cleared = _ClearedArray() if array else _Cleared()
        self._names = names
        self._encode = msgspec.msgpack.Encoder().encode

    def pack(self, ts: float, events: Sequence[KVEvent]) -> bytes:
        """The payload of a batch, event by event: while one is encoded, no other thread runs."""
        packed = []
        for n, event in enumerate(events, 1):
            packed.append(msgspec.Raw(self._encode(self._event(event))))
            if n % _EVENTS_PER_YIELD == 0:
                time.sleep(0.0002)  # with 0 this thread would have the interpreter again before another has woken up
        return self._encode(_Batch(ts, packed, 0))

    def _event(self, event: KVEvent) -> msgspec.Struct:
        if isinstance(event, BlockStored):
            adapter, salt, hashes = event.namespace.adapter, event.namespace.salt, event.block_hashes
            return self._stored(
                hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                None if adapter is None else lora_id_of(adapter),
                event.medium,
                None if adapter is None else self._names(adapter) or adapter.hex()[:32],  # no name is the base model
                None if salt is None else [[salt_key(salt)], *[None] * (len(hashes) - 1)],
            )
        if isinstance(event, AllBlocksCleared):
            return self._cleared
        return self._removed(event.block_hashes, event.medium)


# ---- the publisher


class _Queued(NamedTuple):
    sequence: int
    ts: float
    events: Sequence[KVEvent]
    snapshot: bool  # for replays: all that the tree held after `sequence`, instead of what happened in it


class _Sent(NamedTuple):
    sequence: int
    payload: bytes


class _Replay:
    """An answer under way: its batches that are left, and since when the client has taken none."""

    __slots__ = ("client", "left", "since")

    def __init__(self, client: tuple[bytes, ...], left: deque[_Sent]) -> None:
        self.client = client  # its identity, and the empty frame if it sent one
        self.left = left
        self.since = time.monotonic()


class KVEventPublisher:
    """Publishes the events that the engine drains from its cache.

    The step's thread calls `publish` with the drained events and then, if `wants_snapshot`, `give_snapshot` with
    `held_events(cache)`: so both are of the same moment. The publisher's thread calls `wake` when it wants a snapshot,
    so that a loop that rests goes round once. `endpoint` and `replay_endpoint` are the addresses really bound.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        names: Callable[[bytes], str | None] | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.wants_snapshot = False
        self.endpoint = self.replay_endpoint = ""
        self._next = config.first_sequence if config.first_sequence is not None else time.time_ns() // 1000
        self._dropped = -1  # the last batch for which the queue had no room
        # This kind of queue wakes the thread without releasing the interpreter: the step goes on.
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._most = config.max_queue_size
        self._counts = dict.fromkeys(("batches", "dropped", "failed", "replays", "snapshots"), 0)
        self._closing = not config.active
        self._thread: threading.Thread | None = None
        if not config.active:
            return
        self._wake_engine = wake if wake is not None else _nothing
        self._wire = _Wire(config.encoding, names if names is not None else _no_name)
        self._topic = config.topic.encode()
        self._first = self._floor = self._next  # from `_floor` on the buffer has every batch up to `_last`
        self._last = self._next - 1
        self._failed = -1  # the last batch that could not be packed
        self._buffer: deque[_Sent] = deque()
        self._buffered = 0  # bytes
        self._snapshot: _Sent | None = None
        self._asked = False  # for a snapshot that has not arrived
        self._again = 0.0  # when the next one may be asked for
        self._waiting: list[tuple[bytes, ...]] = []  # clients that are answered with a snapshot
        self._replays: list[_Replay] = []
        self._stalled = False  # no replay under way can go on just now
        self._warned: set[str] = set()  # what was logged once
        self._open()
        self.publish([AllBlocksCleared()])
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # ---- the step's thread

    def publish(self, events: Sequence[KVEvent]) -> None:
        """One batch. It is kept as it is: the caller leaves it alone from now on."""
        if not events or self._closing:
            return
        sequence = self._next
        self._next = sequence + 1
        if self._queue.qsize() >= self._most:
            self._counts["dropped"] += 1
            self._dropped = sequence
        else:
            self._queue.put(_Queued(sequence, time.time(), events, False))

    def give_snapshot(self, events: Sequence[KVEvent]) -> None:
        """All that is held after the last batch given to `publish`."""
        if self._closing:
            return
        self.wants_snapshot = False
        self._queue.put(_Queued(self._next - 1, time.time(), [AllBlocksCleared(), *events], True))

    def close(self) -> None:
        """Send what is queued, for a moment, and end. Nothing is published any more."""
        self._closing = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(2 * _CLOSE_SECONDS)
            self._thread = None

    def stats(self) -> dict[str, int]:
        """Batches that were sent, dropped because the queue was full, or failed; replays, and snapshots for them."""
        return dict(self._counts)

    # ---- the publisher's thread

    def _open(self) -> None:
        config = self.config
        for endpoint in config.open_to_all:
            log.warning(
                "KV events: %s is open to every machine that reaches this one, and events tell the tokens of prompts; "
                'for this machine alone: "endpoint": "tcp://127.0.0.1:5557", "bind": true',
                endpoint,
            )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, config.endpoint)
            self._pub.set(zmq.SNDHWM, config.hwm)
            self.endpoint = _join("endpoint", self._pub, config.endpoint, config.binds)
            if config.replay_endpoint is not None:
                self._router = self._socket(zmq.ROUTER, config.replay_endpoint)
                self._router.set(zmq.ROUTER_MANDATORY, 1)  # or a client that reads slowly would miss some, unseen
                self._router.set(zmq.MAXMSGSIZE, 1024)
                self.replay_endpoint = _join("replay_endpoint", self._router, config.replay_endpoint, True)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set(zmq.IPV6, int("[" in endpoint))
        socket.set(zmq.TCP_KEEPALIVE, 1)
        return socket

    def _run(self) -> None:
        end = None
        while True:
            try:
                if self._closing:
                    end = end or time.monotonic() + _CLOSE_SECONDS
                    if self._queue.empty() or time.monotonic() > end:
                        break
                self._turn()
            except Exception:
                log.exception("KV events: an error in the publisher's thread; it goes on")
                time.sleep(0.1)
        self._context.destroy(linger=int(500 * _CLOSE_SECONDS))

    def _turn(self) -> None:
        """Wait for batches and send them; then continue replays."""
        wait = 0.0 if self._replays and not self._stalled else None if self._router is None else _REPLAY_POLL_SECONDS
        for _ in range(_BATCHES_PER_TURN):
            try:
                batch = self._queue.get(wait != 0, wait)
            except Empty:
                break
            if batch is not None:
                self._handle(batch)
            wait = 0.0
        if self._router is not None:
            self._take_requests(self._router)
            self._stalled = not self._continue(self._router)
        if self._waiting and not self._asked and time.monotonic() >= self._again:
            self._asked = self.wants_snapshot = True
            self._wake_engine()

    def _handle(self, batch: _Queued) -> None:
        if batch.snapshot:
            self._asked = False
            self._again = time.monotonic() + _SNAPSHOT_INTERVAL_SECONDS
        try:
            sent = _Sent(batch.sequence, self._wire.pack(batch.ts, batch.events))
        except Exception:  # a gap, as if it had been dropped
            self._counts["failed"] += 1
            log.exception("KV events: batch %d could not be packed", batch.sequence)
            if batch.snapshot:
                self._waiting.clear()  # clients ask again; another snapshot would fail like this one
            else:
                self._failed = batch.sequence
            return
        if batch.snapshot:
            self._counts["snapshots"] += 1
            self._keep_snapshot(sent)
        else:
            self._pub.send_multipart((self._topic, sent.sequence.to_bytes(8, "big"), sent.payload), zmq.NOBLOCK)
            self._keep(sent)
            self._counts["batches"] += 1

    def _keep(self, sent: _Sent) -> None:
        if self._router is None:
            return
        if sent.sequence != self._last + 1:
            self._forget(sent.sequence)
        self._last = sent.sequence
        self._buffer.append(sent)
        self._buffered += len(sent.payload)
        while len(self._buffer) > self.config.buffer_steps or self._buffered > self.config.buffer_bytes:
            oldest = self._buffer.popleft()
            self._buffered -= len(oldest.payload)
            self._floor = oldest.sequence + 1
        if self._snapshot is not None and self._floor > self._snapshot.sequence + 1:
            self._snapshot = None

    def _keep_snapshot(self, sent: _Sent) -> None:
        """It replaces every batch up to its number, and serves all clients that wait and those that come later, until
        the buffer has lost a batch after it."""
        if self._last != sent.sequence:  # batches before it were lost
            self._forget(sent.sequence + 1)
            self._last = sent.sequence
        self._snapshot = sent
        for client in self._waiting:
            self._replays.append(_Replay(client, self._from_snapshot(sent)))
        self._waiting.clear()

    def _forget(self, floor: int) -> None:
        """Batches before `floor` were lost: those buffered from before the gap are of no use."""
        self._buffer.clear()
        self._buffered = 0
        self._floor = floor

    # ---- replays

    def _take_requests(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_REPLAYS):
            try:
                *client, start = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(start) != 8 or not (len(client) == 1 or (len(client) == 2 and not client[1])):
                self._warn_once("a replay request that is no sequence number in 8 bytes is passed over")
            elif len(self._replays) + len(self._waiting) >= _MAX_REPLAYS:
                self._warn_once(f"more than {_MAX_REPLAYS} replays at a time: some are not answered")
            else:
                self._answer(tuple(client), int.from_bytes(start, "big"))

    def _answer(self, client: tuple[bytes, ...], start: int) -> None:
        self._counts["replays"] += 1
        if max(self._dropped, self._failed) > self._last:  # a batch was lost, and no later one shows the gap yet
            self._waiting.append(client)
        elif start <= self._last + 1 and (start >= self._floor or self._floor == self._first):
            self._replays.append(_Replay(client, deque(each for each in self._buffer if each.sequence >= start)))
        elif self._snapshot is not None:
            self._replays.append(_Replay(client, self._from_snapshot(self._snapshot)))
        else:
            self._waiting.append(client)

    def _from_snapshot(self, snapshot: _Sent) -> deque[_Sent]:
        return deque([snapshot, *(each for each in self._buffer if each.sequence > snapshot.sequence)])

    def _continue(self, router: zmq.Socket[bytes]) -> bool:
        """Send some batches of every replay under way. Returns whether any replay could go on."""
        moved = False
        for replay in list(self._replays):
            try:
                for _ in range(_BATCHES_PER_TURN):
                    if not replay.left:
                        router.send_multipart(self._frames(replay.client, b"", END, b""), zmq.NOBLOCK)
                        self._replays.remove(replay)
                        break
                    sequence, payload = replay.left[0]
                    router.send_multipart(
                        self._frames(replay.client, self._topic, sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK
                    )
                    replay.left.popleft()
                    replay.since = time.monotonic()
                moved = True
            except zmq.Again:
                if time.monotonic() - replay.since > _REPLAY_STALL_SECONDS:
                    self._replays.remove(replay)
                    self._warn_once("a client takes no more of its replay: it is given up")
            except zmq.ZMQError:  # it has gone
                self._replays.remove(replay)
        return moved

    def _warn_once(self, warning: str) -> None:
        """Clients could fill the log otherwise."""
        if warning not in self._warned:
            self._warned.add(warning)
            log.warning("KV events: %s", warning)

    def _frames(self, client: tuple[bytes, ...], topic: bytes, sequence: bytes, payload: bytes) -> Sequence[bytes]:
        """A message of a replay: with a topic as in newer versions of vLLM, and without one as in all others."""
        return (*client, topic, sequence, payload) if self._topic else (*client, sequence, payload)


def _join(name: str, socket: zmq.Socket[bytes], endpoint: str, bind: bool) -> str:
    try:
        if bind:
            socket.bind(endpoint)
            bound = socket.get(zmq.LAST_ENDPOINT)
            return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else endpoint
        socket.connect(endpoint)
        return endpoint
    except zmq.ZMQError as error:
        done = "bound" if bind else "connected to"
        raise ValueError(f"{name}: {endpoint!r:.60} cannot be {done}: {error.strerror}") from None


def _nothing() -> None:
    pass


def _no_name(_: bytes) -> None:
    return None
