"""Recorded traces: what is in them, what is not, what a disk may do, and that a replay tells what a server had."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sapwood.cache import CacheGroup, Namespace
from sapwood.scheduler import RequestSpec, Scheduler, SchedulerConfig
from sapwood.server.observe import record
from sapwood.server.observe.record import BLOCK_TOKENS, TraceRecorder
from sapwood.sim.__main__ import main
from sapwood.sim.cost import SimulatedExecutor
from sapwood.sim.trace import read_trace, replay_trace

from .over import over, prompt

BIG = 1 << 30
TOKENS = np.random.default_rng(3).integers(0, 50_000, 4 * BLOCK_TOKENS).astype(np.int32)


@pytest.fixture
def recorder_of(tmp_path) -> Any:
    made: list[TraceRecorder] = []

    def make(name: str = "trace.jsonl", max_bytes: int = BIG, salt: bytes | None = b"salt") -> TraceRecorder:
        made.append(TraceRecorder(tmp_path / name, max_bytes, salt))
        return made[-1]

    yield make
    for each in made:
        each.close()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(recorder: TraceRecorder, *requests: Any) -> list[dict[str, Any]]:
    """All lines, after these."""
    for each in requests:
        recorder.finished(each)
    recorder.flush()
    return lines_of(recorder.path)


def test_a_prompt_is_a_line(recorder_of):
    """When it came, how long it and its answer were, and an id for each 512 tokens; a request of three prompts and two
    samples each is three lines with the length of one answer. What was never computed is not in it.

    Mutation: `finished` takes seconds for `ms`; `output` is that of all samples; `_line` stops before what is left.
    """
    recorder = recorder_of()
    came = recorder._start + 1.2345
    many = over(prompt(TOKENS[:1]), prompt(512), prompt(513), reasons=["stop"] * 6, generated=13, arrived=came)
    found = written(recorder, many, over(prompt(9, 0, ""), arrived=came))
    assert [list(each) for each in found] == [["timestamp", "input_length", "output_length", "hash_ids"]] * 3
    assert {each["timestamp"] for each in found} == {1234} and {each["output_length"] for each in found} == {3}
    assert [(each["input_length"], len(each["hash_ids"])) for each in found] == [(1, 1), (512, 1), (513, 2)]
    assert found[1]["hash_ids"] == found[2]["hash_ids"][:1]
    assert recorder.written == 3 and recorder.dropped == 0


def test_equal_ids_are_equal_prefixes(recorder_of):
    """Prompts share ids as far as they are equal, block by block; the same block behind another is another; and so is
    everything in another namespace.

    Mutation: `_line` does not chain `digest` to its `parent`; or does not begin with the namespace.
    """
    other = TOKENS.copy()
    other[BLOCK_TOKENS + 7] += 1
    swapped = np.concatenate([TOKENS[BLOCK_TOKENS : 2 * BLOCK_TOKENS], TOKENS[:BLOCK_TOKENS]])
    asked = [TOKENS, TOKENS[: 2 * BLOCK_TOKENS + 5], other, swapped]
    requests = [over(prompt(each)) for each in asked] + [over(prompt(TOKENS), namespace=b"another")]
    whole, short, parted, turned, elsewhere = (line["hash_ids"] for line in written(recorder_of(), *requests))
    assert len(set(whole)) == 4 and short[:2] == whole[:2] and short[2] not in whole
    assert parted[0] == whole[0] and not set(parted[1:]) & set(whole)
    assert not set(turned) & set(whole) and not set(elsewhere) & set(whole)


def test_ids_tell_nothing_without_the_salt(recorder_of):
    """The same prompt has other ids in another recorder, unless both have one salt. Ids are whole numbers for every
    reader of JSON, and the file is for its owner alone.

    Mutation: `_line` has no key; a salt of None is the same every time; `_BITS` is 64.
    """
    request = over(prompt(TOKENS))
    salts = {"a": None, "b": None, "c": b"one", "d": b"one", "e": b"two"}
    ids = {name: tuple(written(recorder_of(name, salt=salt), request)[0]["hash_ids"]) for name, salt in salts.items()}
    assert ids["c"] == ids["d"] and len(set(ids.values())) == 4
    assert all(0 <= each < 2**53 for some in ids.values() for each in some)
    path = recorder_of("f").path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="salt must have 1 to 64 bytes, got 65"):
        recorder_of("g", salt=b"x" * 65)


def test_neither_text_nor_tokens_are_in_it(recorder_of):
    """Mutation: `_line` has the ids of tokens in it."""
    recorder = recorder_of()
    request = over(prompt(TOKENS[:40]), text="a secret of somebody", id="somebody", adapter="theirs", error="oh dear")
    (line,) = written(recorder, request)
    said = recorder.path.read_text()
    assert not any(word in said for word in ("secret", "somebody", "theirs", "dear"))
    assert not set(line["hash_ids"]) & set(TOKENS[:40].tolist())


def test_lines_are_written_without_being_asked_for(recorder_of, monkeypatch):
    """By a thread, so that who tells of a request waits neither for hashes nor for the disk.

    Mutation: `_run` does not call `flush`; `finished` calls it.
    """
    monkeypatch.setattr(record, "_FLUSH_SECONDS", 0.01)
    recorder = recorder_of()
    threads: list[threading.Thread] = []
    done = threading.Event()
    line = recorder._line

    def seen(each: Any) -> bytes:
        threads.append(threading.current_thread())
        done.set()
        return line(each)

    recorder._line = seen
    recorder.finished(over(prompt(5)))
    assert done.wait(10)
    assert threads[0] is not threading.current_thread()


def test_close_writes_what_is_left(recorder_of):
    """And nothing that comes after it; closing twice is no error.

    Mutation: `close` does not `flush`; `finished` does not look whether it is `_closing`.
    """
    recorder = recorder_of()
    recorder.finished(over(prompt(5)))
    recorder.close()
    assert recorder.written == len(lines_of(recorder.path)) == 1
    recorder.finished(over(prompt(5)))
    recorder.close()
    assert recorder.written == 1 and not recorder._waiting


def test_a_file_that_is_full_is_put_aside(recorder_of, tmp_path):
    """No file is longer than it may be, lines are whole, and the last five files are kept.

    Mutation: `_rotate` renames in the other order; `_write` looks at the size after writing.
    """
    recorder = recorder_of(max_bytes=600)
    for at in range(40):
        recorder.finished(over(prompt(BLOCK_TOKENS + at), arrived=recorder._start + at))
    recorder.flush()
    assert recorder.written == 40
    files = [
        tmp_path / name for name in ("trace.jsonl.4", "trace.jsonl.3", "trace.jsonl.2", "trace.jsonl.1", "trace.jsonl")
    ]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(0 < file.stat().st_size <= 600 for file in files)
    lengths = [line["input_length"] for file in files for line in lines_of(file)]
    assert lengths == list(range(BLOCK_TOKENS + 40 - len(lengths), BLOCK_TOKENS + 40)) and len(lengths) >= 12


def test_a_trace_of_another_start_is_put_aside(recorder_of, tmp_path):
    """Times in a file are of one start. An empty file is taken as it is.

    Mutation: `TraceRecorder` goes on in a file that is there.
    """
    (tmp_path / "trace.jsonl").write_text("of another start\n")
    (tmp_path / "empty").touch()
    assert len(written(recorder_of(), over(prompt(5)))) == 1
    assert (tmp_path / "trace.jsonl.1").read_text() == "of another start\n"
    recorder_of("empty")
    assert not (tmp_path / "empty.1").exists()


def test_a_file_that_cannot_be_written_is_said_at_the_start(recorder_of):
    """Mutation: `TraceRecorder` opens its file when it has something to write."""
    with pytest.raises(ValueError, match=r"record_trace must be a file that can be written: .*No such file"):
        recorder_of("no folder/trace.jsonl")


@pytest.fixture
def full_disk(monkeypatch) -> Callable[[bool], None]:
    """A disk that takes half of what it is given, and then no more, while it is full."""
    real = os.write
    state = {"full": False, "left": 0}

    def write(file: int, data: Any) -> int:
        if state["full"]:
            if not state["left"]:
                raise OSError(28, "No space left on device")
            state["left"] = 0
            return real(file, bytes(data)[: len(data) // 2])
        return real(file, data)

    def fill(full: bool) -> None:
        state.update(full=full, left=1)

    monkeypatch.setattr(record.os, "write", write)
    return fill


def test_a_full_disk_costs_lines_and_no_more(recorder_of, full_disk, caplog):
    """What it did not take is counted and said once, half a line is taken back, and when there is room again the trace
    goes on and can be read.

    Mutation: `_write` lets the error through; `_truncate` does not truncate; `_failing` is not remembered.
    """
    recorder = recorder_of()
    written(recorder, over(prompt(600)))
    full_disk(True)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            written(recorder, over(prompt(700)), over(prompt(800)))
    assert [each.message for each in caplog.records] == [
        "the trace cannot be written, and lacks requests from now on: [Errno 28] No space left on device"
    ]
    assert (recorder.written, recorder.dropped) == (1, 6)
    full_disk(False)
    with caplog.at_level(logging.WARNING):
        lengths = [line["input_length"] for line in written(recorder, over(prompt(900)))]
    assert lengths == [600, 900] and caplog.records[-1].message == "the trace is written again; it lacks 6 requests"
    assert len(read_trace(recorder.path)) == 2


def test_prompts_that_wait_are_bounded(recorder_of, monkeypatch):
    """A disk that hangs does not fill the memory with prompts.

    Mutation: `finished` does not look at `_MAX_WAITING_TOKENS`; `flush` does not count `_hashed`.
    """
    monkeypatch.setattr(record, "_MAX_WAITING_TOKENS", 1000)
    monkeypatch.setattr(record, "_FLUSH_SECONDS", 1e6)
    recorder = recorder_of()
    with recorder._lock:
        for _ in range(10):
            recorder.finished(over(prompt(400)))
    assert len(recorder._waiting) == 3 and recorder.dropped == 7
    assert len(written(recorder)) == 3
    recorder.finished(over(prompt(400)))
    assert recorder.dropped == 7


def test_prompts_that_part_inside_a_block_say_so(recorder_of):
    """A block that is seen for the first time says which one behind the same prefix it begins like, and for how long: a
    prompt that goes on where another ended, and one that parts from it. Others need not say anything.

    Mutation: `nearest` looks at one neighbour only; `_common` counts bytes; `_seen` is not asked.
    """
    parts, far = TOKENS[: 2 * BLOCK_TOKENS].copy(), TOKENS[: 2 * BLOCK_TOKENS].copy()
    parts[BLOCK_TOKENS + 150] += 1
    far[BLOCK_TOKENS + 20] += 1
    asked = [TOKENS[: BLOCK_TOKENS + 200], TOKENS, far, parts, parts, TOKENS[:10], TOKENS[::-1]]
    found = written(recorder_of(), *(over(prompt(each)) for each in asked))
    near = [line.get("near") for line in found]
    first, whole = found[0]["hash_ids"][1], found[1]["hash_ids"][1]
    assert near[0] is near[4] is near[6] is None
    assert near[1] == [1, first, 200] and near[5] == [0, found[0]["hash_ids"][0], 10]
    assert near[2] in ([1, first, 20], [1, whole, 20]) and near[3] in ([1, first, 150], [1, whole, 150])


def test_what_is_remembered_of_blocks_is_bounded(recorder_of, monkeypatch):
    """So many, those seen last.

    Mutation: `nearest` never calls `_forget`; or does not move what it has `_seen`.
    """
    monkeypatch.setattr(record, "_REMEMBERED_BLOCKS", 20)
    recorder = recorder_of()
    siblings = recorder._siblings
    for at in [*range(20), 0, *range(20, 30)]:
        written(recorder, over(prompt([at, 7]), namespace=str(at % 25).encode()))
    assert len(siblings._seen) == sum(map(len, siblings._behind.values())) == 20
    found = written(recorder, over(prompt([0]), namespace=b"0"), over(prompt([6]), namespace=b"6"))
    assert found[-2]["near"] == [0, found[0]["hash_ids"][0], 1] and "near" not in found[-1]


# ---- what a replay makes of it


class Served:
    """A scheduler that is asked one request after the other, a minute apart, and its recorder."""

    def __init__(self, recorder: TraceRecorder, pages: int) -> None:
        self.recorder = recorder
        self.scheduler = Scheduler(SchedulerConfig(16, [CacheGroup("attention", "full", pages)], 8192, 256))
        self.executor = SimulatedExecutor()
        self.asked = self.cached = 0

    def serve(self, tokens: Any, output: int, salt: str | None) -> Any:
        """The request, when it is over."""
        id, ended = str(self.asked), []
        arrived = self.recorder._start + 60 * self.asked
        self.asked += 1
        self.scheduler.submit([RequestSpec(id, tokens, output, Namespace(salt=salt))])
        while not ended:
            ended = self.scheduler.advance(self.executor.execute(self.scheduler.next_plan()))
        self.cached += ended[0].cached
        done = prompt(tokens, ended[0].cached, "diverged")
        return over(done, generated=ended[0].generated, namespace=str(salt).encode(), arrived=arrived)


def test_a_replay_predicts_what_the_server_had(recorder_of, capsys):
    """Conversations of three tenants, whose prompts share system prompts and part anywhere, in a cache too small for
    all of them: the trace, whose lines stand in another order, replayed with as many pages gives the very hit rate.

    Mutation: `_line` does not begin with the namespace; `read_trace` does not sort, or does not look at `near`.
    """
    random = np.random.default_rng(5)
    served = Served(recorder_of(), pages=1200)
    systems = [random.integers(0, 30_000, 2 * BLOCK_TOKENS + 200) for _ in range(4)]
    chats = [np.concatenate([systems[at % 4], random.integers(0, 30_000, BLOCK_TOKENS)]) for at in range(24)]
    over_now, tokens = [], 0
    for _ in range(60):
        at = int(random.integers(len(chats)))
        chats[at] = np.concatenate([chats[at], random.integers(0, 30_000, BLOCK_TOKENS)])[: 7 * BLOCK_TOKENS]
        ask = chats[at][: len(chats[at]) - int(random.integers(0, 2)) * int(random.integers(1, BLOCK_TOKENS))]
        tokens += len(ask)
        over_now.append(served.serve(ask, int(random.integers(1, 20)), ("one", "two", None)[at % 3]))
    path = served.recorder.path
    written(served.recorder, *(over_now[at] for at in random.permutation(len(over_now))))
    replayed = replay_trace(read_trace(path), device_pages=1200)
    rate = served.cached / tokens
    assert 0.2 < rate < 0.8 and served.scheduler.stats()["cache"]["evicted"]["attention"]["device"] > 500
    assert replayed.prompt_tokens == tokens and replayed.refused == 0
    assert replayed.cached_tokens == served.cached
    assert main(["replay", str(path), "--device-pages", "1200"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("60 requests of ") and f"{rate:.3f}" in said[2].split()


def test_reading_gives_blocks_numbers_again(recorder_of):
    """Ids of a recorded trace are hashes, beyond what tokens can be made of: equal ones get equal numbers.

    Mutation: `read_trace` keeps ids as they are.
    """
    requests = [over(prompt(each)) for each in (TOKENS, TOKENS[: 3 * BLOCK_TOKENS], TOKENS[::-1])]
    recorder = recorder_of()
    written(recorder, *requests)
    asked = read_trace(recorder.path)
    assert [one.blocks for one in asked] == [(0, 1, 2, 3), (0, 1, 2), (4, 5, 6, 7)]
    assert (asked[0].tokens()[: 3 * BLOCK_TOKENS] == asked[1].tokens()).all()


def test_tokens_of_a_replay_are_equal_where_they_were(recorder_of):
    """Prompts that part at random places, from each other and from those that parted before: any two have as many
    tokens in common in the end as they had.

    Mutation: `_begins_like` leaves out the parts of the other block; `TraceRequest.tokens` looks at the first of
    `parts` only.
    """
    random = np.random.default_rng(11)
    prompts = [TOKENS]
    for _ in range(40):
        old = prompts[int(random.integers(len(prompts)))]
        at = int(random.integers(1, len(old)))
        prompts.append(np.concatenate([old[:at], random.integers(50_000, 90_000, int(random.integers(1, 900)))]))
    recorder = recorder_of()
    written(recorder, *(over(prompt(each), arrived=recorder._start + at) for at, each in enumerate(prompts)))
    again = [one.tokens() for one in read_trace(recorder.path)]
    assert [len(each) for each in again] == [len(each) for each in prompts]
    for one in range(len(prompts)):
        for other in range(one):
            assert common(again[one], again[other]) == common(prompts[one], prompts[other])


def common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


@pytest.mark.parametrize("near", [[1, 5, 7], [0, -1, 7], [0, 5, 0], [0, 5, 513], [0, 5], "abc", [0, 2**64, 1]])
def test_a_trace_that_says_nonsense_of_its_blocks_is_refused(tmp_path, near):
    """Mutation: `_read_line` takes any `near`."""
    line = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [4], "near": near}
    (tmp_path / "t").write_text(json.dumps(line))
    with pytest.raises(ValueError, match=r"line 1: (near must be|not a request)"):
        read_trace(tmp_path / "t")
