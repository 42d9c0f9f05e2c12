"""Stories of KV events on the wire: frames, replays, what a router knows after them, and who never waits (cases E)."""

from __future__ import annotations

import json
import logging
import os
import random
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from sapwood.cache import AllBlocksCleared, BlockRemoved, BlockStored, Namespace
from sapwood.server.process.kv_events import END, KVEventPublisher, KVEventsConfig, lora_id_of, salt_key

from ..ages import LIMITS
from . import dynamo_check
from .kv_traffic import FIELDS, NAMES, PATIENCE, Publishing, Subscriber, blocks_of, events_in, publisher
from .venvs import python_with

BASE = Namespace()
PAGE = 4


@pytest.fixture
def closing():
    """Whatever is put in here is closed in the end, the last first."""
    things = []
    yield things
    for thing in reversed(things):
        thing.close()


def stored(number: int, pages: int = 1, ns: Namespace = BASE, medium: str = "GPU") -> BlockStored:
    """Blocks that no other number has."""
    digests = b"".join(struct.pack(">q", number * 1000 + at) + bytes(24) for at in range(pages))
    return BlockStored(digests, None, struct.pack(f"<{PAGE * pages}i", *range(PAGE * pages)), PAGE, medium, ns)


def hashes_in(payload: bytes) -> list[int]:
    return [block for event in events_in(payload) for block in event.get("block_hashes", ())]


def dealer_to(events: KVEventPublisher, closing: list, kind: int = zmq.DEALER, **options: int) -> zmq.Socket:
    context = zmq.Context()
    closing.append(_Context(context))
    socket = context.socket(kind)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    socket.connect(events.replay_endpoint)
    return socket


def subscribed(events: KVEventPublisher, closing: list, topic: bytes = b"", **options: int) -> zmq.Socket:
    """A subscriber that live batches reach."""
    context = zmq.Context()
    closing.append(_Context(context))
    socket = context.socket(zmq.SUB)
    for name, value in options.items():
        socket.set(getattr(zmq, name), value)
    socket.connect(events.endpoint)
    socket.subscribe(topic)
    while not socket.poll(5):
        events.publish([AllBlocksCleared()])
    return socket


class _Context:
    def __init__(self, context: zmq.Context) -> None:
        self.context = context

    def close(self) -> None:
        self.context.destroy(linger=0)


def receive(socket: zmq.Socket) -> list[bytes]:
    assert socket.poll(int(1000 * PATIENCE)), "no answer"
    return socket.recv_multipart()


def ask(socket: zmq.Socket, start: int) -> list[tuple[int, bytes]]:
    """A whole replay, as a DEALER gets it."""
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    answer = []
    while (frames := receive(socket))[-1]:
        answer.append((int.from_bytes(frames[-2], "big"), frames[-1]))
    return answer


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.001)


# ---- the configuration


def test_vllms_json_is_taken_as_it_is():
    """The example of vLLM's documentation; what is not said is as in vLLM; an object does as well as its text.

    Mutation: `KVEventsConfig.active` does not ask for `enable_kv_cache_events`; another default for `hwm`.
    """
    text = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}'
    config = KVEventsConfig.from_json(text)
    assert config == KVEventsConfig.of(json.loads(text)) and config.active and config.binds
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.replay_endpoint, config.topic, config.encoding) == (None, "kv-events", "map")
    assert not KVEventsConfig().active
    assert not KVEventsConfig(publisher="zmq").active
    assert not KVEventsConfig(enable_kv_cache_events=True, publisher="null").active


BAD = [
    ("enable_kv_cache_events", 1),
    ("enable_kv_cache_events", "true"),
    ("publisher", "kafka"),
    ("endpoint", "5557"),
    ("endpoint", "tcp://host"),
    ("endpoint", "tcp://host:70000"),
    ("endpoint", "tcp://host:0"),
    ("endpoint", "tcp://ho st:1"),
    ("endpoint", "inproc://here"),
    ("endpoint", "ipc://" + "x" * 200),
    ("endpoint", None),
    ("replay_endpoint", "http://host:1"),
    ("replay_endpoint", "tcp://*:5557"),
    ("buffer_steps", -1),
    ("buffer_steps", 1.5),
    ("buffer_steps", True),
    ("hwm", 0),
    ("hwm", float("nan")),
    ("max_queue_size", 0),
    ("max_queue_size", 10**12),
    ("topic", 7),
    ("topic", "x" * 1025),
    ("topic", "\ud800"),
    ("encoding", "json"),
    ("bind", "yes"),
    ("buffer_bytes", -1),
    ("first_sequence", -1),
    ("first_sequence", 2**63),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field} {value!r:.20}" for field, value in BAD])
def test_what_is_wrong_is_named(field, value):
    """Each wrong value is refused with its field and itself, cut short.

    Mutation: a check of `KVEventsConfig.__post_init__` is left out, or does not say its field.
    """
    with pytest.raises(ValueError, match=f"^{field} must be") as error:
        KVEventsConfig.of({field: value})
    assert repr(value)[:20] in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"endpont": "tcp://*:1"}', "no field 'endpont'; it has enable_kv_cache_events"),
        ("[1]", "must be an object"),
        ("{", "must be JSON"),
        ("[" * 60_000, "must be JSON"),
        (" " * 70_000, "at most 65536 characters"),
    ],
)
def test_what_is_no_configuration_is_refused(text, said):
    """Unknown fields by their name, and what is no object of JSON at all.

    Mutation: `KVEventsConfig.of` takes fields it does not know; `from_json` does not catch RecursionError.
    """
    with pytest.raises(ValueError, match=said):
        KVEventsConfig.from_json(text)


@pytest.mark.parametrize(
    ("given", "binds", "wide"),
    [
        ({"endpoint": "tcp://*:5557"}, True, 1),
        ({"endpoint": "tcp://[::]:5557"}, True, 1),
        ({"endpoint": "tcp://0.0.0.0:5557", "bind": True}, True, 1),
        ({"endpoint": "tcp://10.1.2.3:5557"}, False, 0),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, True, 0),
        ({"endpoint": "tcp://*:5557", "bind": False}, False, 0),
        ({"endpoint": "ipc:///tmp/events"}, True, 0),
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}, True, 2),
    ],
)
def test_what_is_bound_and_open_to_all(given, binds, wide):
    """vLLM's rule of what is bound and what is connected, unless `bind` says it; and what others can read.

    Mutation: `KVEventsConfig.binds` does not ask `bind`; `open_to_all` counts what is connected.
    """
    config = KVEventsConfig.of(given)
    assert (config.binds, len(config.open_to_all)) == (binds, wide)


def test_an_endpoint_open_to_all_is_warned_of(closing, caplog):
    """Whoever binds all interfaces reads in the log that prompts can be read there; loopback is not worth a word.

    Mutation: `KVEventPublisher` does not look at `open_to_all`.
    """
    with caplog.at_level(logging.WARNING):
        closing.append(publisher())
        assert caplog.text == ""
        closing.append(publisher(endpoint="tcp://*:*"))
    assert "open to every machine" in caplog.text and "tcp://*:*" in caplog.text


def test_a_port_in_use_is_said_so(closing):
    """Which of the two endpoints, and why; and no thread of the publisher that failed is left behind.

    Mutation: `_join` lets ZMQError through.
    """
    closing.append(publisher())
    taken = closing[0].endpoint
    threads = threading.active_count()
    for field in ("endpoint", "replay_endpoint"):
        with pytest.raises(ValueError, match=f"^{field}: '{taken}' cannot be bound: Address already in use"):
            publisher(bind=True, **{field: taken})
    assert threading.active_count() == threads


def test_nothing_is_published_by_the_null_publisher():
    """vLLM's "null": no socket, no thread, and every call does nothing.

    Mutation: `KVEventPublisher` asks `enable_kv_cache_events` only.
    """
    threads = threading.active_count()
    events = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    events.publish([stored(1)])
    events.give_snapshot([])
    assert threading.active_count() == threads and events._queue.empty()
    assert set(events.stats().values()) == {0}
    events.close()


# ---- E04: frames and payloads


class Batch(msgspec.Struct, array_like=True):
    """As vLLM's subscribers declare it."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


def test_E04_a_batch_is_one_of_vllm(closing):
    """Topic, eight bytes that count up, and a payload that vLLM's own declarations decode; first of all that everything
    is cleared.

    Mutation: `_Batch` without its rank; `_Stored` with another tag, or without `medium`; `publish` sends nothing at
    the start.
    """
    events = publisher(topic="kv@pod@model", first_sequence=0)
    closing.append(events)
    dealer = dealer_to(events, closing)
    before = time.time()
    two = b"".join(bytes.fromhex(head) + bytes(24) for head in ("77d735ce838418aa", "8000000000000000"))
    tokens = struct.pack("<32i", *range(1, 33))
    events.publish([BlockStored(two, b"\xff" * 32, tokens, 16, "CPU", BASE), BlockRemoved(two, "CPU", BASE)])
    until(lambda: events.stats()["batches"] == 2)
    dealer.send_multipart([b"", bytes(8)])
    frames = [receive(dealer) for _ in range(3)]
    assert [frame[:3] for frame in frames[:2]] == [[b"", b"kv@pod@model", struct.pack(">Q", n)] for n in (0, 1)]
    assert frames[2] == [b"", b"", b"\xff" * 8, b""]
    decoder = msgspec.msgpack.Decoder(Batch)
    first, second = [decoder.decode(frame[3]) for frame in frames[:2]]
    assert first.events == [Cleared()] and first.data_parallel_rank == second.data_parallel_rank == 0
    assert before - 60 < first.ts <= second.ts <= time.time()
    hashes = [8635429971592222890, -(2**63)]
    assert second.events == [Stored(hashes, -1, [*range(1, 33)], 16, None, "CPU", None), Removed(hashes, "CPU")]
    assert len(msgspec.msgpack.decode(frames[1][3])) == 3, "Dynamo wants three"

    topic, number, payload = receive(subscribed(events, closing, b"kv@"))
    assert (topic, len(number)) == (b"kv@pod@model", 8) and decoder.decode(payload).events == [Cleared()]


def test_E04_arrays_are_as_vllm_had_them(closing):
    """With "array", an event is its tag and its fields by position, in vLLM's order.

    Mutation: `_StoredArray` is not `array_like`; the fields of `_Stored` stand in another order.
    """
    events = publisher(encoding="array", first_sequence=0)
    closing.append(events)
    events.publish([stored(1, 2), stored(2, 2, Namespace(salt="s")), BlockRemoved(bytes(32), "CPU", BASE)])
    (_, clear), (_, payload) = ask(dealer_to(events, closing), 0)[:1] + _second(events, closing)
    assert msgspec.msgpack.decode(clear)[1] == [["AllBlocksCleared"]]
    _, (plain, salted, removed), _ = msgspec.msgpack.decode(payload)
    assert plain == ["BlockStored", [1000, 1001], None, [*range(8)], PAGE, None, "GPU", None, None]
    assert salted[8] == [[salt_key("s")], None] and len(salted) == 1 + len(FIELDS["BlockStored"])
    assert removed == ["BlockRemoved", [0], "CPU"]


def _second(events: KVEventPublisher, closing: list) -> list[tuple[int, bytes]]:
    until(lambda: events.stats()["batches"] == 2)
    return ask(dealer_to(events, closing), 1)


@pytest.mark.parametrize("limit", [*LIMITS, 2**62])
def test_S16_numbers_of_batches_pass_their_limits(limit, closing):
    """Batches count on past what 31, 32 and 53 bits hold, live and in replays that begin on either side of it.

    Mutation: a sequence number is packed as ">I", or kept as a float.
    """
    first = limit - 2
    events = publisher(first_sequence=first)
    closing.append(events)
    for number in range(5):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 6)
    dealer = dealer_to(events, closing)
    for start in (first, limit, limit + 2):
        answer = ask(dealer, start)
        assert [sequence for sequence, _ in answer] == [*range(start, first + 6)]
        assert [hashes_in(payload) for _, payload in answer][-1] == [4000]
    _, number, _ = receive(subscribed(events, closing))
    assert int.from_bytes(number, "big") >= first + 6


def test_E04_adapters_and_salts(closing):
    """An adapter has its name, and a number that follows from its content; one that nobody knows any more is not taken
    for the base model. A salt is told apart by a digest, and is on the wire nowhere.

    Mutation: `_Wire` leaves `lora_name` None for an adapter without a name; `salt_key` is the salt.
    """
    events = publisher(first_sequence=0)
    closing.append(events)
    known, unknown = Namespace(adapter=b"a" * 32), Namespace(adapter=b"\x01\x02" * 16)
    secret = Namespace(adapter=b"a" * 32, salt="tenant-secret")
    spaces = [BASE, known, unknown, secret, Namespace(salt="tenant-secret"), Namespace(salt="other"), known]
    events.publish([stored(n, ns=ns) for n, ns in enumerate(spaces)])
    ((_, payload),) = _second(events, closing)
    told = events_in(payload)
    assert [event["lora_name"] for event in told] == [None, "ada", "0102" * 8, "ada", None, None, "ada"]
    ids = [event["lora_id"] for event in told]
    assert ids[1] == ids[3] == ids[6] == lora_id_of(b"a" * 32) != ids[2] and ids[0] is ids[4] is None
    assert all(0 < number < 2**31 for number in ids if number is not None)
    key = salt_key("tenant-secret")
    assert [event.get("extra_keys") for event in told] == [None] * 3 + [[[key]], [[key]], [[salt_key("other")]], None]
    assert b"secret" not in payload and key != salt_key("other")
    assert key == "dynamo-cache-salt:" + Namespace(salt="tenant-secret").digest().hex()[:32]


# ---- E04: replays


def test_E04_the_subscriber_of_vllms_examples_recovers(closing):
    """It asks with a REQ socket for the number after the last it has, and takes a number and a payload.

    Mutation: `_frames` always has a topic; `_answer` begins one batch later.
    """
    events = publisher(first_sequence=0)
    closing.append(events)
    for number in range(1, 4):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 4)
    for missed in (1, 3):
        replay = dealer_to(events, closing, zmq.REQ)
        replay.send(missed.to_bytes(8, "big"))
        sequence, payload = receive(replay)
        assert int.from_bytes(sequence, "big") == missed and hashes_in(payload) == [missed * 1000]
    replay = dealer_to(events, closing, zmq.REQ)
    replay.send((4).to_bytes(8, "big"))
    assert receive(replay) == [END, b""], "nothing is missing"


def test_E04_a_dealer_gets_it_as_it_asks(closing):
    """With or without the empty frame that a REQ socket would send; every batch once, in order, then the end.

    Mutation: `_frames` leaves out the second frame of `client`, or always has one.
    """
    events = publisher(first_sequence=0)
    closing.append(events)
    for number in range(1, 400):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 400)
    dealer = dealer_to(events, closing)
    assert [sequence for sequence, _ in ask(dealer, 7)] == [*range(7, 400)]
    dealer.send((398).to_bytes(8, "big"))
    frames = [receive(dealer) for _ in range(3)]
    assert [frame[0] for frame in frames] == [(398).to_bytes(8, "big"), (399).to_bytes(8, "big"), END]
    assert [len(frame) for frame in frames] == [2, 2, 2]


def test_E04_what_is_no_request_is_passed_over(closing, caplog):
    """Frames of the wrong number or size: no answer, one line in the log and nothing of theirs in it, and the next
    request is answered.

    Mutation: `_take_requests` does not look at the length of `start`; `_warn_once` warns every time.
    """
    events = publisher(first_sequence=0)
    closing.append(events)
    until(lambda: events.stats()["batches"] == 1)
    dealer = dealer_to(events, closing)
    for wrong in ([b""], [b"", b"secret"], [b"", b"", bytes(8)], [b"x", bytes(8)], [b"", bytes(9)], [b""] * 9):
        dealer.send_multipart(wrong)
    assert [sequence for sequence, _ in ask(dealer, 0)] == [0]
    assert events.stats()["replays"] == 1 and caplog.text.count("a replay request that is no") == 1
    assert "secret" not in caplog.text


def test_E04_a_client_that_reads_slowly_misses_nothing(closing):
    """A replay larger than all buffers on the way, to one who begins to read late: the rest waits until there is room,
    and live batches go on meanwhile.

    Mutation: `_open` does not set ROUTER_MANDATORY: what has no room is dropped.
    """
    events = publisher(first_sequence=0)
    closing.append(events)
    for number in range(1, 3001):
        events.publish([stored(number, 250)])
    until(lambda: events.stats()["batches"] == 3001)
    slow = dealer_to(events, closing, RCVHWM=1, RCVBUF=65536)
    slow.send_multipart([b"", bytes(8)])
    until(lambda: events.stats()["replays"] == 1)
    events.publish([stored(9999)])
    until(lambda: events.stats()["batches"] == 3002)
    sequences = []
    while (frames := receive(slow))[-1]:
        sequences.append(int.from_bytes(frames[1], "big"))
    assert sequences == [*range(3001)]


def test_E04_a_client_that_goes_away_holds_up_nobody(closing, caplog):
    """One asks and leaves before it has its answer; another one is answered.

    Mutation: `_continue` does not catch ZMQError of a client that is gone.
    """
    events = publisher(first_sequence=0, buffer_steps=0)
    closing.append(events)
    until(lambda: events.stats()["batches"] == 1)
    files = len(os.listdir("/proc/self/fd"))
    gone = dealer_to(events, closing)
    gone.send_multipart([b"", bytes(8)])
    until(lambda: events.wants_snapshot)
    closing.pop().close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)  # the publisher's end is closed too
    events.give_snapshot([stored(5)])
    until(lambda: events.stats()["snapshots"] == 1)
    ((sequence, payload),) = ask(dealer_to(events, closing), 0)
    assert sequence == 0 and hashes_in(payload) == [5000] and "an error" not in caplog.text


# ---- E04: the tree answers


def test_E04_what_the_buffer_has_no_more_comes_from_the_tree(closing):
    """One batch that clears everything and tells all that is held, with the number of the last batch it includes; then
    those after it. Who is within the buffer gets batches only.

    Mutation: `give_snapshot` numbers it one higher or lower; `_from_snapshot` leaves out the batches after it.
    """
    events = publisher(first_sequence=0, buffer_steps=3)
    closing.append(events)
    for number in range(1, 10):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 10)
    dealer = dealer_to(events, closing)
    assert [sequence for sequence, _ in ask(dealer, 7)] == [7, 8, 9] and not events.wants_snapshot
    dealer.send_multipart([b"", (6).to_bytes(8, "big")])
    until(lambda: events.wants_snapshot)
    events.publish([stored(10)])  # a step more before the engine looks
    events.give_snapshot([stored(1), stored(10)])
    assert not events.wants_snapshot
    empty, number, payload = receive(dealer)
    assert (empty, int.from_bytes(number, "big")) == (b"", 10)
    assert [event["type"] for event in events_in(payload)] == ["AllBlocksCleared", "BlockStored", "BlockStored"]
    assert hashes_in(payload) == [1000, 10000] and receive(dealer) == [b"", END, b""]

    events.publish([stored(11)])
    until(lambda: events.stats()["batches"] == 12)
    assert [sequence for sequence, _ in ask(dealer, 0)] == [10, 11], "the same snapshot serves who comes later"
    assert events.stats()["snapshots"] == 1 and not events.wants_snapshot


def test_E04_a_snapshot_is_given_up_when_batches_after_it_are_lost(closing):
    """As soon as the buffer has lost a batch after it, it leads nowhere: the next one is asked for, not at once.

    Mutation: `_keep` does not forget `_snapshot`; `_turn` asks before `_again`.
    """
    events = publisher(first_sequence=0, buffer_steps=2)
    closing.append(events)
    dealer = dealer_to(events, closing)
    for number in range(1, 4):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 4)
    dealer.send_multipart([b"", bytes(8)])
    until(lambda: events.wants_snapshot)
    given = time.monotonic()
    events.give_snapshot([stored(1)])
    assert int.from_bytes(receive(dealer)[1], "big") == 3 and receive(dealer)[1] == END
    for number in range(4, 7):
        events.publish([stored(number)])
    until(lambda: events.stats()["batches"] == 7)
    dealer.send_multipart([b"", bytes(8)])
    until(lambda: events.wants_snapshot)
    assert time.monotonic() - given > 0.9, "one a second: each is a walk through the tree for the engine"
    events.give_snapshot([stored(2)])
    _, number, payload = receive(dealer)
    assert int.from_bytes(number, "big") == 6 and hashes_in(payload) == [2000]


def test_E04_an_engine_at_rest_is_woken_for_a_snapshot(closing):
    """Nobody publishes anything: whoever asks is answered all the same, since the loop is woken.

    Mutation: `_turn` does not call `_wake_engine`.
    """
    woken = threading.Event()
    events = publisher(wake=woken.set, buffer_steps=0)
    closing.append(events)
    dealer = dealer_to(events, closing)
    dealer.send_multipart([b"", bytes(8)])
    assert woken.wait(PATIENCE) and events.wants_snapshot
    events.give_snapshot([])
    assert len(events_in(receive(dealer)[2])) == 1


def test_E04_numbers_do_not_fall_back_when_a_server_starts_again(closing):
    """A router that heard the server before the restart sees a jump, asks, and is told that everything is gone.

    Mutation: `_next` begins at 0; `_answer` takes a number that was never sent for one that is still to come.
    """
    first = publisher()
    first.publish([stored(1)])
    until(lambda: first.stats()["batches"] == 2)
    last = first._next - 1
    first.close()
    second = publisher()
    closing.append(second)
    until(lambda: second.stats()["batches"] == 1)
    assert second._next - 1 > last
    dealer = dealer_to(second, closing)
    ((_, payload),) = ask(dealer, last + 1)
    assert [event["type"] for event in events_in(payload)] == ["AllBlocksCleared"]
    dealer.send_multipart([b"", (second._next + 10**9).to_bytes(8, "big")])  # its clock was ahead
    until(lambda: second.wants_snapshot)
    second.give_snapshot([stored(3)])
    assert hashes_in(receive(dealer)[2]) == [3000]


# ---- E04: what a router knows


@pytest.mark.attack
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("full", {}),
        ("full", {"encoding": "array", "topic": "kv@pod@model"}),
        ("full", {"buffer_steps": 4}),
        ("all", {"buffer_steps": 20}),
        ("window+state", {"buffer_bytes": 2000}),
        ("backwards", {"max_queue_size": 1, "buffer_steps": 6}),
    ],
    ids=["plain", "arrays and a topic", "small buffer", "all families", "few bytes", "queue of one"],
)
def test_E04_a_router_rebuilds_the_tree_from_the_wire(closing, layout, options):
    """Random traffic with evictions, adapters, salts and a host tier. A router that hears everything, one that misses
    batches and asks for them, and one that comes late all know in the end what the tree holds: every block, with its
    parent, tokens, adapter and tier.

    Mutation: `_from_snapshot` leaves out the batches after it; `_handle` sends a snapshot as a batch.
    """
    rng = random.Random(f"{layout} {options}")
    events = publisher(**options)
    closing.append(events)
    traffic = Publishing(layout, events, seed=3)
    topic = options.get("topic", "")
    steady, forgetful = (Subscriber(events, traffic.serve, topic) for _ in range(2))
    closing.extend((steady, forgetful))
    for router in (steady, forgetful):
        router.joins(lambda: traffic.run(rng, 1))
    for round in range(40):
        for steps in (3, 1, 1):  # a queue of one may drop some of the three; the next batch shows it, the last is live
            traffic.run(rng, steps)
            steady.catches_up(events)
        if round % 20 > 12:  # it loses what comes now
            while forgetful.sub.poll(0):
                forgetful.sub.recv_multipart()
        else:
            while forgetful.listen():
                pass
    traffic.serves(rng, 12)
    late = Subscriber(events, traffic.serve, topic)
    closing.append(late)
    late.replay(0)
    traffic.ends_with_an_event(rng)
    held = blocks_of(traffic.engine.cache)
    for router in (steady, forgetful, late):
        router.follows(events._next - 1)
        assert router.blocks == held
    assert {medium for medium, _ in held} == {"GPU", "CPU"} and len(held) > 5
    assert steady.live > 10 and forgetful.replayed and late.replayed
    if options.keys() & {"buffer_steps", "buffer_bytes"}:
        assert events.stats()["snapshots"]
    assert events.stats()["failed"] == 0


# ---- E05: nobody waits


def test_E05_a_publisher_that_is_stuck_never_holds_up_the_engine(closing):
    """Its thread hangs, the queue is full: batches are dropped and `publish` returns. Numbers show the gap, and the
    tree mends it, also where the last batches were those that were lost.

    Mutation: `publish` waits for room, or numbers batches when they are sent; `_keep_snapshot` does not set `_last`.
    """
    stuck, hanging = threading.Event(), threading.Event()

    def names(digest: bytes) -> str | None:
        hanging.set()
        assert stuck.wait(PATIENCE)
        return NAMES.get(digest)

    events = publisher(names, first_sequence=0, max_queue_size=5)
    closing.append(events)
    until(lambda: events.stats()["batches"] == 1)
    events.publish([stored(1, ns=Namespace(adapter=b"a" * 32))])
    assert hanging.wait(PATIENCE)
    for number in range(2, 1000):
        events.publish([stored(number)])
    assert events.stats() == {"batches": 1, "dropped": 993, "failed": 0, "replays": 0, "snapshots": 0}
    stuck.set()
    until(lambda: events.stats()["batches"] == 7)
    dealer = dealer_to(events, closing)
    dealer.send_multipart([b"", (5).to_bytes(8, "big")])
    until(lambda: events.wants_snapshot)
    events.give_snapshot([stored(number) for number in range(900, 1000)])
    _, number, payload = receive(dealer)
    assert int.from_bytes(number, "big") == 999 and len(hashes_in(payload)) == 100
    assert receive(dealer)[1] == END and ask(dealer, 1000) == [], "that is all"

    events.publish([stored(1000)])
    until(lambda: events.stats()["batches"] == 8)
    assert [sequence for sequence, _ in ask(dealer, 1000)] == [1000], "from here on there is a buffer again"
    assert [sequence for sequence, _ in ask(dealer, 3)] == [999, 1000] and events.stats()["snapshots"] == 1


def test_E05_a_subscriber_that_never_reads_holds_up_nobody(closing):
    """More than fits on the way to it: all is sent, and another one hears it all. When it reads at last, numbers are
    missing, and a replay has them.

    Mutation: `_open` makes it a socket that drops nothing (XPUB_NODROP), so that the thread cannot send any more.
    """
    events = publisher(hwm=1500, first_sequence=0)
    closing.append(events)
    lazy, eager = subscribed(events, closing, RCVHWM=1, RCVBUF=65536), subscribed(events, closing)
    batch = [stored(1, 600)]
    last = 0
    while last < 2400:
        for _ in range(1200):
            events.publish(batch)
        while last < events._next - 1:
            number = int.from_bytes(receive(eager)[1], "big")
            assert number == last + 1 or not last
            last = number
    heard = [int.from_bytes(receive(lazy)[1], "big") for _ in range(1000)]
    assert heard == sorted(set(heard))
    while lazy.poll(50):
        heard.append(int.from_bytes(receive(lazy)[1], "big"))
    missing = sorted({*range(heard[0], last + 1)} - {*heard})
    assert missing
    replayed = {number for number, _ in ask(dealer_to(events, closing), missing[0])}
    assert replayed >= {*missing}


def test_E05_without_a_subscriber_nothing_piles_up(closing):
    """Nobody listens and nobody can ask for a replay: what was sent is gone.

    Mutation: `_keep` fills the buffer where there is no `_router`.
    """
    events = publisher(replay_endpoint=None)
    closing.append(events)
    for number in range(500):
        events.publish([stored(number, 10)])
    until(lambda: events.stats()["batches"] == 501)
    assert events._queue.empty() and not events._buffer and events.replay_endpoint == ""


def test_E05_a_batch_that_cannot_be_packed_is_a_gap(closing, caplog):
    """Whoever names adapters fails once: the thread goes on, and a replay across the gap is answered from the tree.

    Mutation: `_handle` lets the error through, or counts the batch as kept; `_forget` keeps the buffer.
    """

    def names(digest: bytes) -> str | None:
        raise KeyError("names")

    events = publisher(names, first_sequence=0, buffer_steps=2)
    closing.append(events)
    events.publish([stored(1, ns=Namespace(adapter=b"a" * 32))])
    events.publish([stored(2)])
    events.publish([stored(3)])
    until(lambda: events.stats()["batches"] == 3)
    assert events.stats()["failed"] == 1 and "batch 1 could not be packed" in caplog.text
    dealer = dealer_to(events, closing)
    dealer.send_multipart([b"", (1).to_bytes(8, "big")])
    until(lambda: events.wants_snapshot)
    events.give_snapshot([stored(2), stored(3)])
    assert int.from_bytes(receive(dealer)[1], "big") == 3


def test_E05_a_gap_that_nothing_tells_of_yet(closing):
    """The last batch could not be packed, and nothing came after it: a replay knows of it all the same. A snapshot that
    cannot be packed either is given up, and the next one who asks gets another.

    Mutation: `_handle` does not set `_failed`, or leaves clients in `_waiting`, so that the engine is asked for ever.
    """
    known: list[str] = []
    adapted = Namespace(adapter=b"a" * 32)
    events = publisher(lambda digest: known[0], first_sequence=0)
    closing.append(events)
    events.publish([stored(1, ns=adapted)])
    until(lambda: events.stats()["failed"] == 1)
    dealer = dealer_to(events, closing)
    dealer.send_multipart([b"", (1).to_bytes(8, "big")])
    until(lambda: events.wants_snapshot)
    events.give_snapshot([stored(1, ns=adapted)])
    until(lambda: events.stats()["failed"] == 2)
    until(lambda: not events._waiting and not events.wants_snapshot)
    known.append("ada")
    dealer.send_multipart([b"", (1).to_bytes(8, "big")])
    until(lambda: events.wants_snapshot)
    events.give_snapshot([stored(1, ns=adapted)])
    _, number, payload = receive(dealer)
    assert int.from_bytes(number, "big") == 1 and hashes_in(payload) == [1000]


# ---- the end


def test_closing_sends_what_is_queued_and_leaves_nothing(closing):
    """A subscriber gets the last batch, though the thread was far behind; the thread, the sockets and the files are
    gone; more is not published.

    Mutation: `_run` breaks with batches in `_queue`, or does not destroy the context.
    """
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    behind = threading.Event()
    events = publisher(lambda digest: str(behind.wait(PATIENCE)))
    router = subscribed(events, closing)
    events.publish([stored(0, ns=Namespace(adapter=b"a"))])
    for number in range(1, 1000):
        events.publish([stored(number)])
    ends = threading.Thread(target=events.close)
    ends.start()
    until(lambda: events._closing)
    behind.set()
    ends.join()
    last = events._next - 1
    while int.from_bytes(receive(router)[1], "big") < last:
        pass
    events.publish([stored(1)])
    events.close()
    assert events._next - 1 == last and threading.active_count() == threads
    closing.pop().close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= files)


# ---- Dynamo


@pytest.fixture(scope="session")
def dynamo() -> Path:
    """A Python with Dynamo's indexer."""
    found = python_with(dynamo_check.PACKAGE)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.long  # installs a package in an environment of its own, and attacks the tree for a while
@pytest.mark.server
@pytest.mark.xdist_group("dynamo")
@pytest.mark.parametrize(("encoding", "topic"), [("map", ""), ("array", "kv@pod@model")])
def test_E04_dynamos_indexer_agrees_with_our_tree(dynamo, encoding, topic):
    """An unmodified indexer that comes late, follows random traffic with evictions, adapters, salts and a host tier,
    and misses batches: in the end, and on the way, it holds the blocks that our tree holds in every tier, and finds of
    every prompt what our tree would find.

    Mutation: `salt_key` without its mark; `_Wire` without `lora_name`; a snapshot that forgets a tier.
    """
    report = dynamo_check.check(dynamo, seed=11, encoding=encoding, topic=topic)
    assert report.compared >= 8 and report.prompts > 100 and report.blocks > 100
    assert report.replays >= 4 and report.snapshots >= 2
