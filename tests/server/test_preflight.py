"""What cannot work is said before anything is loaded: one line, status 2, and no torch was imported for it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sapwood.server.command import server_flags
from sapwood.server.preflight import check_server

HEAVY = (
    "torch",
    "transformers",
    "sapwood.server.lifecycle",
    "sapwood.server.process.engine_process",
    "sapwood.engine.engine",
)
MODEL = {"model_type": "llama", "vocab_size": 97}
EVENTS = '{"enable_kv_cache_events": true, "bind": true, "endpoint": "%s"}'
# Arguments, with {} for the folder of the cases; and what is said of them.
CASES: dict[str, tuple[str, str]] = {
    "dtype": ("{}/model --dtype fp8", "dtype must be one of auto, float32"),
    "device": ("{}/model --device tpu", 'device must be "auto", "cpu" or "cuda"'),
    "store without a size": ("{}/model --store file:///x --host-cache 1GiB", "size of file:// must be given"),
    "store of a kind that is none": ("{}/model --store ftp://x", "the scheme of a store's URI must be one of file://"),
    "store with an option that is none": ("{}/model --store redis://x?size=1", "options of redis:// are ttl"),
    "no model": ("{}/nowhere", "nowhere is not there"),
    "no config": ("{}", "is not a model folder: it has no config.json"),
    "no weights": ("{}/empty", "has no weights: neither model.safetensors nor"),
    "pickles": ("{}/pickles", "weights as pickle are not loaded"),
    "quantised": ("{}/quantised", "quantised checkpoints are not served (quantization_config: awq)"),
    "an adapter as the model": ("{}/adapter", "holds an adapter (adapter_config.json)"),
    "a file": ("{}/model/config.json", "is neither a model folder nor a .gguf file"),
    "no GGUF": ("{}/bad.gguf", "bad.gguf is no GGUF file: it begins with b'what'"),
    "no tokenizer": ("{}/model --tokenizer {}/nowhere", "the tokenizer in"),
    "no template": ("{}/model --chat-template {}/nowhere", "nowhere is neither a file nor a template"),
    "a template that is none": (
        "{}/model --chat-template {}/bad.jinja",
        "the chat template is no template: ",
    ),
    "a template in bytes": ("{}/model --chat-template {}/bytes.jinja", "bytes.jinja cannot be read"),
    "the model's template": ("{}/badly-told", "the chat template is no template: "),
    "no defaults": ("{}/model --generation-config {}/nowhere", "generation_config must be auto, none or a folder"),
    "wrong defaults": ("{}/model --generation-config {}/wrong", "temperature must be a number from 0 to 100, got -3"),
    "the model's defaults": ("{}/wrong", "temperature must be a number from 0 to 100, got -3"),
    "no adapter": ("{}/model --enable-lora --lora-modules a={}/nowhere", "adapter a must be a folder with adapter_"),
    "half an adapter": ("{}/model --enable-lora --lora-modules a={}/half", "a folder with adapter_model.safetensors"),
    "an adapter's config": ("{}/model --enable-lora --lora-modules a={}/adapter", "not readable as JSON"),
    "no folder of adapters": ("{}/model --enable-lora --lora-root {}/nowhere", "lora_root must be a folder that is"),
    "no certificate": ("{}/model --ssl-certfile {}/nowhere", "ssl_certfile must be a file that is there"),
    "a certificate that is none": ("{}/model --ssl-certfile {}/bad.jinja", "must be a certificate and its key"),
    "no such address": (f"{{}}/model --kv-events-config {EVENTS % 'tcp://192.0.2.7:5557'}", "cannot be bound"),
    "an address in use": (f"{{}}/model --kv-events-config {EVENTS % 'tcp://127.0.0.1:[port]'}", "cannot be bound"),
    "a store below a file": ("{}/model --store file://{}/bad.jinja/store?size=1GiB", "bad.jinja is no folder"),
    "a store that is a file": ("{}/model --store file://{}/bad.jinja?size=1GiB", "bad.jinja is no folder"),
    "no folder for a trace": ("{}/model --record-trace {}/nowhere/trace", "record_trace must be a file in a folder"),
    "a trace that is a folder": ("{}/model --record-trace {}", "record_trace must be a file in a folder"),
}


def make(folder: Path, files: dict[str, Any]) -> None:
    folder.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Path:
    """A folder with models, adapters and files that cannot be served, each in its own way."""
    folder = tmp_path_factory.mktemp("cases")
    weights = {"config.json": MODEL, "model.safetensors": b""}
    bad = {"temperature": -3}
    make(folder / "model", weights)
    make(folder / "empty", {"config.json": MODEL})
    make(folder / "pickles", {"config.json": MODEL, "pytorch_model.bin": b""})
    make(folder / "quantised", {**weights, "config.json": {**MODEL, "quantization_config": {"quant_method": "awq"}}})
    make(folder / "adapter", {"adapter_config.json": b"{", "adapter_model.safetensors": b""})
    make(folder / "half", {"adapter_config.json": {}})
    make(folder / "wrong", {**weights, "generation_config.json": bad})
    make(folder / "badly-told", {**weights, "tokenizer_config.json": {"chat_template": "{% if x"}})
    (folder / "bad.gguf").write_bytes(b"what is this")
    (folder / "bad.jinja").write_text("{% for %}")
    (folder / "bytes.jinja").write_bytes(b"\xff\xfe")
    return folder


@pytest.fixture(scope="module")
def answers(cases: Path) -> dict[str, tuple[int, str]]:
    """Of all cases, in one interpreter: the status, and what was said. At the end: what was imported."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = {
            name: ["serve", "--port", "0"] + [word.replace("{}", str(cases)).replace("[port]", port) for word in words]
            for name, words in ((name, split(arguments)) for name, (arguments, _) in CASES.items())
        }
        code = f"""
import contextlib, io, json, sys
from sapwood.cli import main
found = {{}}
for name, arguments in {asked!r}.items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(arguments)
    found[name] = status, said.getvalue()
found["imported"] = 0, " ".join(sorted({set(HEAVY)!r} & set(sys.modules)))
print(json.dumps(found))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name: (status, said) for name, (status, said) in json.loads(done.stdout).items()}


def split(arguments: str) -> list[str]:
    """Words; JSON behind its flag is one."""
    before, flag, events = arguments.partition("--kv-events-config ")
    return [*before.split(), *([flag.strip(), events] if flag else [])]


@pytest.mark.server
@pytest.mark.parametrize("name", CASES)
def test_S18_what_cannot_work_is_said_at_once(name, answers):
    """One line that names what is wrong, and status 2.

    Mutation: `check_start` or `check_server` does not look at one of them; `main` lets an OSError out.
    """
    status, said = answers[name]
    assert status == 2 and said.startswith("sapwood serve: ") and said.count("\n") == 1, said
    assert CASES[name][1] in said


@pytest.mark.server
def test_S18_nothing_was_loaded_for_it(answers):
    """Neither torch nor the server itself: what it takes to say so is the flags, and small files.

    Mutation: command.py imports lifecycle.py at its top; weights.py of the engine imports torch at its top.
    """
    assert answers["imported"] == (0, "")


def test_S18_what_may_be_right_is_not_refused(cases, tmp_path):
    """A hub's id, a template given as text, a trace in the working folder: nothing of it is asked for twice.

    Mutation: `_check_endpoints` leaves its socket bound; `check_server` takes every template for a file.
    """
    arguments = ["some/model", "--chat-template", "{{ messages }}", "--record-trace", "trace.jsonl"]
    _, config = server_flags([*arguments, "--generation-config", "none"], {})
    check_server(config, None, True)
    _, config = server_flags(["--kv-events-config", EVENTS % f"ipc://{tmp_path}/events"], {})
    check_server(config, cases / "model", True)
    check_server(config, cases / "model", True)  # what was bound for a moment is free again


def test_S18_a_temporary_folder_that_is_too_deep(monkeypatch):
    """Sockets between the processes lie there, and their paths are short: better said than found by one of them.

    Mutation: `check_server` does not look at TMPDIR.
    """
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 100)
    with pytest.raises(ValueError, match="temporary directory is too long for sockets: set TMPDIR"):
        check_server(server_flags([], {})[1], None, True)


def test_S18_a_bench_says_it_too(cases, capsys):
    """`sapwood bench latency` of a model that is none: before it takes torch.

    Mutation: `_measure` does not call `check_start`.
    """
    from sapwood.cli import main

    assert main(["bench", "latency", "--model", str(cases / "empty")]) == 2
    assert "has no weights" in capsys.readouterr().err
