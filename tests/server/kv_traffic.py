"""Random traffic whose KV events go through a publisher, and a router that knows nothing but what it hears there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from sapwood.cache import BlockStored, HybridPrefixCache, held_events
from sapwood.server.process.kv_events import END, KVEventPublisher, KVEventsConfig, salt_key

from ..cache.chaos import Chaos, act, random_prompt

NAMES = {b"a" * 32: "ada"}  # the adapter of chaos
PATIENCE = 240.0  # seconds for what takes milliseconds
FIELDS = {
    "BlockStored": [
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ],
    "BlockRemoved": ["block_hashes", "medium"],
    "AllBlocksCleared": [],
}


def publisher(names: Callable[[bytes], str | None] = NAMES.get, wake: Any = None, **options: Any) -> KVEventPublisher:
    """On free ports of this machine."""
    here = "tcp://127.0.0.1:*"
    given = {"enable_kv_cache_events": True, "endpoint": here, "replay_endpoint": here, **options}
    return KVEventPublisher(KVEventsConfig.of(given), names, wake)


class Publishing(Chaos):
    """Chaos that is published, with a snapshot whenever one is wanted: an engine's loop."""

    def __init__(self, layout: str, events: KVEventPublisher, **options: Any) -> None:
        super().__init__(layout, **options)
        self.publisher = events

    def after(self) -> None:
        told = list(self.engine.events)
        super().after()
        self.publisher.publish(told)
        self.serve()

    def serve(self) -> None:
        if self.publisher.wants_snapshot:
            self.publisher.give_snapshot(held_events(self.engine.cache))

    def run(self, rng: random.Random, actions: int) -> None:
        for _ in range(actions):
            act(rng, self)

    def serves(self, rng: random.Random, requests: int) -> None:
        """Requests that come and run, with nothing evicted but by them: afterwards there is something to compare."""
        for _ in range(requests):
            self.submit(random_prompt(rng, self), rng.randint(1, 9), rng.randrange(3), True)
            for _ in range(6):
                self.plan(64)
                self.done()
                self.land(0, True)

    def ends_with_an_event(self, rng: random.Random) -> None:
        """Until something has been told: a subscriber that missed what was before sees it by that."""
        before = self.publisher._next
        while self.publisher._next == before:
            act(rng, self)


class Blocks(dict[tuple[str, int], tuple[Any, ...]]):
    """What is held: (medium, hash) -> (parent, tokens, adapter, salt's key)."""


def blocks_of(cache: HybridPrefixCache) -> Blocks:
    """... according to the tree."""
    blocks = Blocks()
    for event in held_events(cache):
        assert isinstance(event, BlockStored)
        space, parent = event.namespace, event.parent_block_hash
        name = None if space.adapter is None else NAMES[space.adapter]
        key = None if space.salt is None else salt_key(space.salt)
        for at, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * event.block_size : (at + 1) * event.block_size])
            blocks[event.medium, block] = (parent, tokens, name, key)
            parent = block
    return blocks


class Subscriber:
    """A router: takes live batches, and asks for a replay where numbers are missing. Strict about what it hears."""

    def __init__(self, events: KVEventPublisher, serve: Callable[[], None], topic: str = "", hwm: int = 0) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.set(zmq.RCVHWM, hwm)
        self.sub.connect(events.endpoint)
        self.sub.subscribe(topic)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.set(zmq.RCVHWM, hwm)
        if events.replay_endpoint:
            self.dealer.connect(events.replay_endpoint)
        self.serve = serve  # what the engine does meanwhile
        self.topic = topic.encode()
        self.blocks = Blocks()
        self.last = -1
        self.live = 0  # batches that came without a replay
        self.replayed: list[int] = []  # sequence numbers

    def close(self) -> None:
        self.context.destroy(linger=0)

    # ---- frames

    def listen(self, wait: float = 0.0) -> bool:
        """Take one live batch, if there is one."""
        if not self.sub.poll(int(1000 * wait)):
            return False
        topic, number, payload = self.sub.recv_multipart()
        sequence = int.from_bytes(number, "big")
        assert topic == self.topic
        if sequence > self.last + 1:
            self.replay(self.last + 1)
        if sequence == self.last + 1:
            self.hear(sequence, payload)
            self.live += 1
        return True

    def joins(self, tell: Callable[[], None]) -> None:
        """Until live batches arrive, which something must be told for."""
        end = time.monotonic() + PATIENCE
        while not self.listen(0.01):
            assert time.monotonic() < end, "nothing arrives"
            tell()

    def catches_up(self, events: KVEventPublisher) -> None:
        """Until each batch that was published is sent or dropped, and the last one that was sent has arrived."""
        end = time.monotonic() + PATIENCE
        while True:
            counts = events.stats()
            if counts["batches"] + counts["dropped"] + counts["failed"] == events._next - events._first:
                break
            assert time.monotonic() < end, "not all that was published is sent or dropped"
            time.sleep(0.001)
        sent = events._buffer[-1].sequence if events._buffer else -1
        while self.last < sent:
            assert self.listen(PATIENCE), f"at {self.last}, and {sent} does not come"

    def follows(self, last: int) -> None:
        """Until all up to the batch `last` is known, by what arrives and by replays."""
        end = time.monotonic() + PATIENCE
        while self.last < last:
            assert time.monotonic() < end, f"at {self.last}, and {last} does not come"
            if not self.listen(0.05):
                self.replay(self.last + 1)

    def replay(self, start: int) -> None:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        first = True
        while True:
            sequence, payload = self.reply()
            if payload == b"":
                return
            self.replayed.append(sequence)
            assert first or sequence == self.last + 1, "a replay goes on without a gap"
            if first and sequence > start:
                assert events_in(payload)[0]["type"] == "AllBlocksCleared", "what was missed is told anew"
            self.hear(sequence, payload)
            first = False

    def reply(self) -> tuple[int, bytes]:
        end = time.monotonic() + PATIENCE
        while not self.dealer.poll(5):
            assert time.monotonic() < end, "no reply"
            self.serve()
        empty, *topic, number, payload = self.dealer.recv_multipart()
        assert empty == b"" and len(topic) == bool(self.topic)
        assert (number == END) == (payload == b"")
        assert not topic or topic[0] == (self.topic if payload else b"")
        return int.from_bytes(number, "big"), payload

    # ---- events

    def hear(self, sequence: int, payload: bytes) -> None:
        for event in events_in(payload):
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockStored":
                self.stored(event)
            else:
                for block in event["block_hashes"]:
                    del self.blocks[event["medium"], block]
        self.last = sequence

    def stored(self, event: dict[str, Any]) -> None:
        hashes, size, parent = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        tokens, keys = event["token_ids"], event.get("extra_keys")
        assert hashes and len(tokens) == size * len(hashes)
        assert (event["lora_id"] is None) == (event["lora_name"] is None)
        key = None
        if keys is not None:
            assert len(keys) == len(hashes) and not any(keys[1:])
            (key,) = keys[0]
        for at, block in enumerate(hashes):
            assert (event["medium"], block) not in self.blocks, "stored twice"
            page = tuple(tokens[at * size : (at + 1) * size])
            self.blocks[event["medium"], block] = (parent, page, event["lora_name"], key)
            parent = block


def events_in(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch by their fields' names, in either encoding."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and rank == 0
    return [
        event if isinstance(event, dict) else {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=False))}
        for event in events
    ]
