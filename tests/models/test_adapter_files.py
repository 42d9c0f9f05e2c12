"""Adapters as strangers send them (case S19): patterns that take for ever, files that are none or have no end, headers
that lie, folders that hang. Each is refused by name, and a good adapter is loaded right after."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sapwood.engine.llm import LoRARequest
from sapwood.engine.lora import files as lora_files
from sapwood.engine.lora import process as lora_process
from sapwood.engine.lora.adapters import Adapters
from sapwood.engine.lora.files import AdapterError
from sapwood.engine.lora.process import Reader, ReaderBusy, ReadTimeout
from sapwood.engine.lora.reader import NoFolder
from sapwood.server.process.engine_queries import EngineQueries
from sapwood.server.process.messages import EngineQuery, QueryAnswer

from .hung_adapters import PATIENCE, Hung, hanging_reader
from .test_llm import GREEDY, ids, open_llm, said
from .zoo import answer, model_of, prompt

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


def model() -> torch.nn.Module:
    layers = torch.nn.ModuleList(
        torch.nn.ModuleDict(
            {
                "self_attn": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 5)}),
                "mlp": torch.nn.ModuleDict({"up_proj": torch.nn.Linear(6, 5)}),
            }
        )
        for _ in range(2)
    )
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers}), "norm": torch.nn.LayerNorm(6)})


@pytest.fixture(scope="module")
def adapters() -> Iterator[Adapters]:
    found = Adapters(model(), 1, 4, reader=Reader(PATIENCE))
    yield found
    found.close()


def good(folder: Path, **config: Any) -> Path:
    """An adapter of rank 2 for two modules."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": torch.randn(shape, generator=generator)
        for module in MODULES
        for half, shape in (("A", (2, 6)), ("B", (5, 2)))
    }
    save_file(tensors, folder / TENSORS)
    return folder


def refused(adapters: Adapters, folder: Path, message: str, root: Path | None = None) -> AdapterError:
    """Refused with the reason; and then a good one is read."""
    with pytest.raises(AdapterError, match=message) as error:
        adapters.read(folder, None if root is None else str(root))
    assert len(str(error.value)) < 1500
    assert len(adapters.read(good(folder.parent / "good")).pairs) == 2
    return error.value


# ---- what a config says


BOMB = "(a+)+$|" + "(.*.*)*" * 10 + "x"
BOMBS: list[dict[str, Any]] = [
    {"rank_pattern": {BOMB: 2}},
    {"alpha_pattern": {"up_proj": 3, "(.*a){25}": 2}},
    {"target_modules": r"(\w+\.?)+!"},
    {"exclude_modules": r"((a|aa)+)+"},
    {"layers_pattern": "(a*)*", "layers_to_transform": [1]},
    {"layers_pattern": ["layers", "(l|la)+"], "layers_to_transform": [1]},
]


@pytest.mark.parametrize("config", BOMBS, ids=[next(iter(bomb)) for bomb in BOMBS])
def test_S19_a_pattern_that_takes_for_ever_is_refused_by_name(adapters, tmp_path, config):
    """Every field of a config that may hold patterns.

    Mutation: `Pattern` compiles them with `re`.
    """
    field = next(iter(config))
    error = refused(adapters, good(tmp_path / "bomb", **config), f"{field}=.*: must be ")
    assert "repeat" in str(error) or "name of a list" in str(error)


def test_S19_patterns_that_are_served_match_as_peft_does(adapters, tmp_path):
    """As trainers write them: with looks ahead, lazy repeats, words; and one for each module.

    Mutation: `LoraConfig.rank` takes the first pattern, whether it matches or not; `matches` takes ends of names too.
    """
    served: list[dict[str, Any]] = [
        {"target_modules": r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*(0.*q|1.*up)_proj"},
        {"target_modules": r"(?:.*?(?:layers).*?(?:0.self_attn|1.mlp).*?\.(?:q_proj|up_proj))|(?:\bno\.[\d]{1,}.*)"},
        {"target_modules": r".*\.(0.self_attn.q_proj|1\.mlp\.up_proj)$"},
        {"r": 3, "rank_pattern": dict.fromkeys(MODULES, 2)},
        {"r": 7, "rank_pattern": {rf"^model\.layers.{n}": 5 for n in range(300)} | {"^model.*_proj": 2}},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*(1.*q_proj|0\.mlp.*)"},
    ]
    digests = {adapters.read(good(tmp_path / "a", **{"lora_alpha": 2, **config})).digest for config in served}
    assert len(digests) == 1, "the same in other words"
    refused(adapters, good(tmp_path / "b", target_modules=r"(0.*q|1.*up)_proj"), "has tensors, but is no target")


LYING = [
    ({"lora_alpha": 10**400}, "lora_alpha=.*: must be a number"),
    ({"r": 10**400}, "r=.*: must be a whole number|lora_A"),
    ({"rank_pattern": [1]}, "rank_pattern=.*: must be ranks"),
    ({"rank_pattern": {"a" * 70_000: 2}}, "65536 characters"),
    ({"target_modules": {"a": 1}}, "target_modules=.*: must be a regular"),
    ({"layers_to_transform": [True]}, "layers_to_transform=.*: must be a layer"),
    ({"x" * 300: {"a": 1}}, "this field is not known here"),
]


@pytest.mark.parametrize(("config", "message"), LYING, ids=[message[:20] for _, message in LYING])
def test_S19_a_config_that_lies(adapters, tmp_path, config, message):
    """Numbers without end, values of other types, names as long as a book.

    Mutation: `config_of` does not catch OverflowError or AttributeError.
    """
    refused(adapters, good(tmp_path / "a", **config), message)


def test_S19_a_config_that_is_no_json(adapters, tmp_path):
    """Nested without end, or of bytes that are no text.

    Mutation: `config_of` does not catch RecursionError.
    """
    where = good(tmp_path / "a")
    for data in (b"[" * 200_000, b"\xff\xfe{", b'{"r": ' + b"9" * 5000 + b"}"):
        (where / CONFIG).write_bytes(data)
        refused(adapters, where, f"{CONFIG} is not JSON")


# ---- what a file is


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # their names may not be long
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


KINDS: list[tuple[Callable[[Path], Any], str]] = [
    (as_fifo, "must be a regular file, and is a FIFO"),
    (as_socket, "must be a regular file, and is a socket"),
    (lambda path: path.symlink_to("/dev/zero"), "must be a regular file, and is a device"),
    (lambda path: path.symlink_to("/dev/tty"), "must be a regular file, and is a device|cannot be read"),
    (lambda path: path.mkdir(), "must be a regular file, and is a folder"),
    (lambda path: path.symlink_to(path), "cannot be read"),
    (lambda path: path.symlink_to("/nowhere"), "is missing"),
    (lambda path: path.symlink_to("/proc/self/mem"), f"{CONFIG} is not JSON|broken"),
]


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize(("become", "message"), KINDS, ids=[message[-20:] for _, message in KINDS])
def test_S19_only_regular_files_are_read(adapters, tmp_path, name, become, message):
    """What waits for ever or never ends is not opened, and said to be what it is.

    Mutation: `Folder.open` does not look at the kind of file.
    """
    where = good(tmp_path / "a")
    (where / name).unlink()
    become(where / name)
    refused(adapters, where, message)


def test_S19_links_lead_to_regular_files_below_the_root(adapters, tmp_path):
    """As in a hub's cache, where files are links to blobs beside their folder. Out of the root leads nothing: neither
    the folder, nor a file in it, nor a link to a link.

    Mutation: `_inside` is always true; `Folder.open` looks at the name instead of what is open.
    """
    root, outside = tmp_path / "root", good(tmp_path / "outside")
    root.mkdir()
    blobs, snapshot = good(root / "blobs"), root / "snapshot"
    snapshot.mkdir()
    for name in (CONFIG, TENSORS):
        (snapshot / name).symlink_to(f"../blobs/{name}")
    digest = adapters.read(outside).digest
    (root / "also").symlink_to(snapshot)
    for inside in ("snapshot", "also", "blobs", str(blobs), "./snapshot/../snapshot", "snapshot/"):
        assert adapters.read(inside, str(root)).digest == digest
    (root / "hole").symlink_to(outside)
    out = ("../outside", "hole", str(outside), "snapshot/../../outside", "/", "\0", "no-such", "x" * 300, "\ud800")
    for path in out:
        with pytest.raises(NoFolder):
            adapters.read(path, str(root))
    for name in (CONFIG, TENSORS):
        mixed = good(root / f"with {name}")
        (mixed / name).unlink()
        (root / f"step {name}").symlink_to(outside / name)
        (mixed / name).symlink_to(root / f"step {name}")
        refused(adapters, mixed, f"{name} cannot be read: it is a link that leads out", root)


def test_S19_sizes_are_bounded_before_anything_is_read(adapters, tmp_path, monkeypatch):
    """A config, a header, a number of tensors, a rank and a file beyond their bounds are refused with the bound; files
    of a terabyte with nothing in them cost nothing.

    Mutation: `Folder.read` does not look at `most`; `_header` does not look at the size that is said; `_tensors` does
    not compare with the size of the file.
    """
    where = good(tmp_path / "a")
    os.truncate(where / CONFIG, 1 << 40)
    refused(adapters, where, f"{CONFIG} has {1 << 40} bytes, and {lora_files.MOST_CONFIG} are read at most")
    where = good(tmp_path / "a")
    os.truncate(where / TENSORS, 1 << 40)
    refused(adapters, where, "is broken: its tensors have 176 bytes, and 1099511")
    for size in (1 << 24, 1 << 63):
        with (good(tmp_path / "a") / TENSORS).open("r+b") as file:
            file.write(struct.pack("<Q", size + 1))
            file.truncate(1 << 40)
        refused(adapters, where, f"has a header of {size + 1} bytes, and {lora_files.MOST_HEADER} are read at most")
    many = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(lora_files.MOST_TENSORS + 1)}
    write(where, many, b"")
    refused(adapters, where, f"has {len(many)} tensors, and at most {lora_files.MOST_TENSORS} are served")
    write(where, pair(10**6), b"", 4 * 11 * 10**6)
    (where / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 10**6}))
    refused(adapters, where, "q_proj has rank 1000000, above max_lora_rank 4")


def test_S19_adapters_have_a_bound_on_host_together(tmp_path):
    """What all of them may take is said before one more is read, and holds when two were read at the same time; what is
    unloaded makes room. The same content is there once.

    Mutation: `add` does not count; `_has_room` looks at nothing; `_drop` gives nothing back.
    """
    need = 2 * 4 * 2 * (6 + 5)
    adapters = Adapters(model(), 1, 4, memory=2 * need, reader=Reader(PATIENCE))
    folders = [good(tmp_path / str(n), lora_alpha=n) for n in range(1, 4)]
    one, two, three = [adapters.read(folder) for folder in folders]
    assert one.nbytes == need
    adapters.add("one", one)
    adapters.add("two", two)
    adapters.add("again", one)
    with pytest.raises(AdapterError, match="need more than lora_memory"):
        adapters.add("three", three)
    with pytest.raises(AdapterError, match=f"it needs {need} bytes of host memory, and lora_memory has 0 left"):
        adapters.load("three", folders[2])
    adapters.unload("one")
    with pytest.raises(AdapterError, match="lora_memory"):
        adapters.load("three", folders[2])
    adapters.unload("again")
    adapters.load("three", folders[2])
    assert sorted(adapters.names()) == ["three", "two"]
    adapters.close()


# ---- what a header says


def write(folder: Path, header: Any, data: bytes, size: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / TENSORS
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    if size is not None:
        os.truncate(path, 8 + len(raw) + size)


def pair(rank: int = 2, module: str = MODULES[0], **more: Any) -> dict[str, Any]:
    half = 4 * rank * 6
    a = {"dtype": "F32", "shape": [rank, 6], "data_offsets": [0, half]}
    b = {"dtype": "F32", "shape": [5, rank], "data_offsets": [half, half + 4 * 5 * rank]}
    return {f"base_model.model.{module}.lora_A.weight": a | more, f"base_model.model.{module}.lora_B.weight": b}


A = f"base_model.model.{MODULES[0]}.lora_A.weight"
HEADERS: list[tuple[Any, str]] = [
    (b"[" * 100_000, "its header is not JSON: maximum recursion"),
    (b"[]", "its header must be an object"),
    (b"\xff", "its header is not JSON"),
    ({"__metadata__": {"a": "b"}}, "has no tensors|tensors have 0 bytes"),
    ({A: 5}, "lora_A.weight cannot be 5"),
    ({A: {"dtype": "F32"}}, "lora_A.weight cannot be"),
    (pair(dtype="X9"), "lora_A.weight cannot be"),
    (pair(dtype=["F32"]), "lora_A.weight cannot be"),
    (pair(shape=[10**4000, 6]), "lora_A.weight cannot be"),
    (pair(shape=[2**40] * 100_000), "lora_A.weight cannot be"),
    (pair(shape=[-2, -6]), "lora_A.weight cannot be"),
    (pair(shape=[2.0, 6]), "lora_A.weight cannot be"),
    (pair(shape="26"), "lora_A.weight cannot be"),
    (pair(data_offsets=[0, 47]), "lora_A.weight cannot be"),
    (pair(data_offsets=[48, 0]), "lora_A.weight cannot be"),
    (pair(data_offsets=[8, 56]), "bytes of no tensor, or of two"),
    (pair(data_offsets=[40, 88]), "bytes of no tensor, or of two"),
    (pair(data_offsets=[2**50, 2**50 + 48]), "lora_A.weight cannot be"),
    (pair(dtype="I32"), "must be a matrix of floats, got int32"),
    (pair(shape=[2, 3, 2]), r"must be a matrix of floats, got float32 \[2, 3, 2\]"),
    (pair(module="model.layers.9.self_attn.q_proj"), "is not in this model"),
    (pair(module="norm"), "is a LayerNorm: adapters on what is not nn.Linear are not supported"),
    (pair(module="x" * 10_000), "is not in this model"),
    (pair(module="\ud800"), "is not in this model"),
    (pair(module="a\nb"), "only lora_A and lora_B"),
]


@pytest.mark.parametrize(("header", "message"), HEADERS, ids=[str(n) for n in range(len(HEADERS))])
def test_S19_a_header_that_lies(adapters, tmp_path, header, message):
    """Places outside the file, twice or never; shapes that do not fit; types, names and numbers without end.

    Mutation: `_tensors` leaves out a check.
    """
    where = good(tmp_path / "a")
    write(where, header, bytes(88))
    error = refused(adapters, where, message)
    str(error).encode()


def test_S19_values_that_are_no_numbers(adapters, tmp_path):
    """NaN and infinity in A or B, in every type; and all types of floats are served.

    Mutation: `_host_copy` does not look at the values; `FLOATS` lacks one.
    """
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        for half, bad in (("", 0.0), ("A", math.nan), ("B", math.inf)):
            if half == "B" and dtype is torch.float8_e4m3fn:
                continue  # has none
            where = good(tmp_path / "a")
            tensors = {
                f"base_model.model.{MODULES[0]}.lora_{name}.weight": torch.ones(shape)
                for name, shape in (("A", (2, 6)), ("B", (5, 2)))
            }
            for name, tensor in tensors.items():
                if f"lora_{half}" in name and half:
                    tensor[1, 1] = bad
            save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, where / TENSORS)
            if half:
                refused(adapters, where, f"{MODULES[0]} has values that are not finite")
            else:
                assert torch.equal(adapters.read(where).pairs[MODULES[0]].a, torch.ones(2, 6))


# ---- what hangs


def later(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_S19_a_load_that_hangs_blocks_no_other(tmp_path):
    """As many as may be read at a time hang: one more is told to come again, and nobody waits. When one of them gets
    its file, it is loaded; when the engine ends, the others end with an error, and their processes are gone.

    Mutation: `Reader` has one process; `_begin` counts nobody; `close` kills nobody.
    """
    reader = hanging_reader()
    adapters = Adapters(model(), 1, 4, reader=reader)
    hung = [Hung(good(tmp_path / str(n))) for n in range(lora_process.AT_ONCE)]
    loads = [later(lambda each=each: adapters.read(each.folder)) for each in hung[:-1]]
    ends = [each.reached() for each in hung[:-1]]
    for _ in range(3):
        assert len(adapters.read(good(tmp_path / "good")).pairs) == 2
    loads.append(later(lambda: adapters.read(hung[-1].folder)))
    ends.append(hung[-1].reached())
    with pytest.raises(ReaderBusy, match=f"{lora_process.AT_ONCE} adapters are being read already"):
        adapters.read(tmp_path / "good")
    os.close(ends[0])
    loads[0][0].join(PATIENCE)
    assert len(loads[0][1][0].pairs) == 2
    assert len(adapters.read(tmp_path / "good").pairs) == 2
    pids = [child.pid for child in reader._children]
    assert len(pids) == len(hung) - 1
    adapters.close()
    for thread, found in loads[1:]:
        thread.join(PATIENCE)
        assert isinstance(found[0], AdapterError) and "has ended" in str(found[0])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids) and not reader._children
    with pytest.raises(AdapterError, match="closed"):
        adapters.read(tmp_path / "good")
    for end in ends[1:]:
        os.close(end)


def test_S19_a_load_that_hangs_is_given_up(tmp_path):
    """After its time an error says so, its process is gone, and its place is free.

    Mutation: `_wait` waits without a bound; `_end` kills nobody.
    """
    reader = hanging_reader(seconds=0.3)
    adapters = Adapters(model(), 1, 4, reader=reader)
    where = Hung(good(tmp_path / "a")).folder
    for _ in range(lora_process.AT_ONCE + 1):
        with pytest.raises(ReadTimeout, match=r"adapter .*: it was not read within 0.3 seconds \(lora_seconds\)"):
            adapters.read(where)
    assert not reader._children


def test_S19_what_cannot_be_ended_is_counted(tmp_path, monkeypatch, caplog):
    """Where the system itself waits for a file, not even a kill helps: such a process takes the place of one that could
    read until it is gone, and the log tells of it.

    Mutation: `_end` forgets it; `_begin` never looks again.
    """
    reader = hanging_reader(seconds=0.3)
    adapters = Adapters(model(), 1, 4, reader=reader)
    hung = Hung(good(tmp_path / "a"))
    with monkeypatch.context() as patched:
        patched.setattr(lora_process, "_ENDING", 0.0)
        patched.setattr(lora_process._Child, "gone", lambda self: False)
        for left in range(1, lora_process.AT_ONCE + 1):
            with pytest.raises(ReadTimeout):
                adapters.read(hung.folder)
            assert len(reader._children) == left
        with pytest.raises(ReaderBusy):
            adapters.read(good(tmp_path / "good"))
    assert caplog.text.count("cannot be ended: its file system hangs") == lora_process.AT_ONCE
    reader.seconds = PATIENCE
    end = time.monotonic() + PATIENCE
    while not all(child.gone() for child in reader._children):
        assert time.monotonic() < end
    assert len(adapters.read(tmp_path / "good").pairs) == 2 and not reader._children


def test_S19_a_process_that_dies_is_an_error(tmp_path):
    """Killed, or out of memory: whoever waits is told, and the next one is read.

    Mutation: `answer_of` does not look whether it is all there.
    """
    reader = hanging_reader()
    adapters = Adapters(model(), 1, 4, reader=reader)
    hung = Hung(good(tmp_path / "a"))
    thread, found = later(lambda: adapters.read(hung.folder))
    end = hung.reached()
    (child,) = reader._children
    os.kill(child.pid, 9)
    thread.join(PATIENCE)
    assert isinstance(found[0], AdapterError) and "the process that reads it has ended" in str(found[0])
    os.close(end)
    assert len(adapters.read(good(tmp_path / "good")).pairs) == 2
    for code in ("", "import os; os.write(3, b'[')", "1 / 0"):
        with pytest.raises(AdapterError, match="the process that reads it has ended"):
            Adapters(model(), 1, 4, reader=Reader(PATIENCE, code=code)).read(tmp_path / "good")


def test_S19_streams_go_on_while_an_adapter_hangs(tmp_path):
    """In a real engine one loads an adapter whose folder hangs. A request is computed from its prompt to its last token
    meanwhile, another adapter is loaded and used, and then the first one is there.

    Mutation: `EngineQueries` has one thread; `EngineQueries.take` reads on the thread of the steps.
    """
    model_of("llama").save_pretrained(tmp_path / "model")
    with open_llm(tmp_path / "model", enable_lora=True, max_lora_rank=8) as llm:
        engine = llm.engine
        assert engine.adapters is not None
        engine.adapters._reader = hanging_reader()
        told: dict[int, QueryAnswer] = {}
        answers = EngineQueries(engine.requests, lambda answer: told.update({answer.number: answer}))
        hung = Hung(tuned(engine, tmp_path / "hung", 1))
        happened = []
        answers.take(EngineQuery(1, "load_adapter", {"name": "hung", "path": str(hung.folder), "root": None}))
        end = hung.reached()
        happened.append("hangs")

        def steps(over: Callable[[], object]) -> None:
            until = time.monotonic() + PATIENCE
            while not over():
                assert time.monotonic() < until, happened
                engine.requests.rest(1.0)
                engine.requests.step()
                answers.poll()

        (sample,) = engine.requests.submit("a", prompt(1, 30), GREEDY)
        steps(lambda: sample.finish_reason)
        happened.append("stream" if 1 not in told else "too late")
        assert sample.token_ids == answer("llama", prompt(1, 30), 8)
        ask = {"name": "good", "path": str(tuned(engine, tmp_path / "good", 2)), "root": None}
        answers.take(EngineQuery(2, "load_adapter", ask))
        steps(lambda: 2 in told)
        happened.append("other load" if 1 not in told else "too late")
        assert not told[2].error
        (adapted,) = engine.requests.submit("b", prompt(1, 30), GREEDY, told[2].value)
        steps(lambda: adapted.finish_reason)
        assert adapted.token_ids != sample.token_ids
        os.close(end)
        steps(lambda: 1 in told)
        assert happened == ["hangs", "stream", "other load"] and not told[1].error
        assert engine.adapters.names() == {"hung": told[1].value, "good": told[2].value}


def test_S19_a_script_is_told_of_an_adapter_that_hangs(tmp_path):
    """`generate` with one ends with an error after its time, and the prompts beside it are aborted; what comes next is
    answered.

    Mutation: `LLM._adapter` reads by itself.
    """
    model_of("llama").save_pretrained(tmp_path / "model")
    with open_llm(tmp_path / "model", enable_lora=True, max_lora_rank=8, lora_seconds=0.5) as llm:
        assert llm.engine.adapters is not None and llm.engine.adapters._reader.seconds == 0.5
        llm.engine.adapters._reader = hanging_reader(0.5)
        prompts = [ids(prompt(n, 30)) for n in range(3)]
        hung = LoRARequest("hung", 1, str(Hung(tuned(llm.engine, tmp_path / "hung", 1)).folder))
        with pytest.raises(ReadTimeout, match=r"not read within 0\.5 seconds"):
            llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[None, hung, None])
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert said(outputs) == [answer("llama", prompt(n, 30), 8) for n in range(3)]


def tuned(engine: Any, folder: Path, seed: int) -> Path:
    """An adapter that changes what a model says."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 64}))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, wrapped in engine.adapters._wrapped.items():
        n_out, n_in = wrapped.shape
        for half, shape in (("A", (4, n_in)), ("B", (n_out, 4))):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / TENSORS)
    return folder
