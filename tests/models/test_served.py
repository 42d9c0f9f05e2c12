"""A real model behind HTTP: adapters by name, token by token what the model says, the store across a restart."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sapwood.engine.lora.process import AT_ONCE
from tests.server.kit import Running, alive, until

from .hung_adapters import Hung
from .zoo import answer, build, prompt

peft = pytest.importorskip("peft", reason="peft is not installed: it makes the adapters of these tests")
pytestmark = [pytest.mark.server]

TOKENS = prompt(1, 40)
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float64",
    "--device-cache",
    "8MiB",
    "--host-cache",
    "8MiB",
    "--max-num-seqs",
    "8",
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model, two adapters, and what each of the three says."""
    folder, roots = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    build("llama").save_pretrained(folder)
    right = {"base": answer("llama", TOKENS, 8)}
    for n in range(2):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(build("llama"), config)
        torch.manual_seed(n)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        given = torch.tensor([TOKENS])
        asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        whole = wrapped.generate(input_ids=given, attention_mask=torch.ones_like(given), **asked)
        right[f"a{n}"] = whole[0, len(TOKENS) :].tolist()
        wrapped.save_pretrained(roots / f"a{n}")
    assert len({tuple(each) for each in right.values()}) == 3
    return folder, roots, right


def said(server: Running, model: str | None = None, **more):
    body = {"prompt": TOKENS, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    return server.post("/v1/completions", body if model is None else {**body, "model": model})


def ids(told) -> list[int]:
    found: list[int] = told.json["choices"][0]["token_ids"]
    return found


def test_L15_L16_L17_L19_adapters_of_a_real_model(places):
    """Loaded at the start and over HTTP: each says its own, mixed in one batch too; unloaded, it is a 404 and never the
    base model; --max-loras is what the engine has.

    Mutation: `model` gives no adapter; `_enter` leaves `message.adapter` out; `_unload_adapter` forgets the cache only.
    """
    folder, roots, right = places
    server = Running(
        *(str(folder), *FLAGS, "--store", "none", "--served-model-name", "base", "--enable-lora", "--max-loras", "2"),
        *("--max-lora-rank", "8", "--lora-root", str(roots), "--lora-modules", f"a0={roots / 'a0'}"),
    )
    try:
        server.ready()
        assert ids(said(server)) == right["base"] and ids(said(server, "a0")) == right["a0"]
        assert said(server, "a1").status == 404
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "a1", "lora_path": "a1"})
        assert loaded.status == 200, loaded.body
        later = {name: [server.stream_later("/v1/completions", _body(name)) for _ in range(3)] for name in right}
        for name, each in later.items():
            assert all(ids(one.answer()) == right[name] for one in each), name
        metrics = server.get("/metrics").body.decode()
        assert 'max_lora="2"' in metrics
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "a1"}).status == 200
        assert said(server, "a1").status == 404 and ids(said(server, "base")) == right["base"]
        broken = roots / "broken"
        broken.mkdir()
        (broken / "adapter_config.json").write_text(json.dumps({"r": 4}))
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "broken"})
        assert refused.status == 400 and refused.error["message"]
    finally:
        server.kill()


def _body(model: str) -> dict:
    return {
        "model": model,
        "prompt": TOKENS,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def children(pid: int) -> list[int]:
    """Processes that a process has started and that are there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_S19_adapters_that_hang_hold_up_nobody(places, tmp_path):
    """As many adapters hang as may be read at a time. Streams begin and end meanwhile, an adapter that was there is
    used, health is well, and one more is told to come again. One whose files come after all is loaded; and a stop
    leaves none of the processes.

    Mutation: `EngineQueries` has one thread; `Engine.close` does not close adapters.
    """
    folder, roots, right = places
    root = tmp_path / "root"
    shutil.copytree(roots, root)
    hung = [Hung(shutil.copytree(roots / "a0", root / f"hung{n}")) for n in range(AT_ONCE)]
    flags = {"model": str(folder), "device": "cpu", "dtype": "float64", "device_cache": "8MiB", "max_num_seqs": 8}
    flags |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_seconds": 500, "progress": False}
    factory = ("--factory", "tests.models.hung_model:patient", "--factory-flags", json.dumps(flags))
    server = Running(*factory, "--served-model-name", "base", "--lora-root", str(root), "--drain-seconds", "0.1")
    try:
        server.ready()
        assert load(server, "a0").status == 200
        body = {"prompt": TOKENS, "max_tokens": 40, "ignore_eos": True}
        loads = []
        for at, each in enumerate(hung):
            loads.append(server.stream_later(LOAD, {"lora_name": f"hung{at}", "lora_path": each.folder.name}))
            each.end = each.reached()
            events = [*server.stream("/v1/completions", body).events()]
            assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
            assert ids(said(server, "a0")) == right["a0"] and server.get("/health").status == 200
        busy = load(server, "a1")
        assert busy.status == 503 and busy.headers["retry-after"] and "are being" in busy.error["message"]
        assert busy.error["code"] == "adapters_busy"
        assert ids(said(server)) == right["base"]
        os.close(hung[0].end)
        assert loads[0].answer().status == 200 and ids(said(server, "hung0")) == right["a0"]
        assert load(server, "a1").status == 200 and ids(said(server, "a1")) == right["a1"]
        readers = children(server.engine())
        assert len(readers) == AT_ONCE - 1
        assert server.stop() == 0
        assert not any(alive(pid) for pid in readers)
    finally:
        server.kill()


LOAD = "/v1/load_lora_adapter"


def load(server: Running, name: str):
    return server.post(LOAD, {"lora_name": name, "lora_path": name})


def test_S19_an_adapter_that_is_not_read_in_time(places, tmp_path):
    """It is a 504, and a good one is loaded after it. A pattern that would take for ever is a 400.

    Mutation: `_refusal` names no problem; `EngineClient.load_adapter` waits for less than the engine.
    """
    folder, roots, right = places
    root = tmp_path / "root"
    shutil.copytree(roots, root)
    Hung(shutil.copytree(roots / "a0", root / "hung"))
    bomb = shutil.copytree(roots / "a0", root / "bomb") / "adapter_config.json"
    bomb.write_text(json.dumps(json.loads(bomb.read_text()) | {"rank_pattern": {"(.*a)*(.*b)*$": 4}}))
    flags = {"model": str(folder), "device": "cpu", "dtype": "float64", "device_cache": "8MiB", "max_num_seqs": 8}
    flags |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_seconds": 500, "progress": False}
    factory = ("--factory", "tests.models.hung_model:impatient", "--factory-flags", json.dumps(flags))
    server = Running(*factory, "--served-model-name", "base", "--lora-root", str(root))
    try:
        server.ready()
        late = load(server, "hung")
        assert late.status == 504 and "it was not read within 0.5 seconds (lora_seconds)" in late.error["message"]
        assert (late.error["code"], late.error["param"]) == ("adapter_timeout", "lora_path")
        refused = load(server, "bomb")
        assert refused.status == 400 and "rank_pattern=" in refused.error["message"]
        assert load(server, "a1").status == 200 and ids(said(server, "a1")) == right["a1"]
        assert not children(server.engine())
    finally:
        server.kill()


def test_L19_without_enable_lora(places):
    """It starts and serves, and adapters are refused.

    Mutation: `load_adapter` asks the engine all the same.
    """
    folder, roots, right = places
    server = Running(str(folder), *FLAGS, "--store", "none", "--lora-root", str(roots))
    try:
        server.ready()
        assert ids(said(server)) == right["base"]
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "a0", "lora_path": "a0"}),
            ("/v1/unload_lora_adapter", {"lora_name": "a0"}),
        ):
            refused = server.post(path, body)
            assert refused.status == 400 and "--enable-lora" in refused.error["message"]
        no_text = server.post("/v1/completions", {"prompt": "text"})
        assert no_text.status == 400 and "no tokenizer" in no_text.error["message"]
    finally:
        server.kill()


@contextlib.contextmanager
def servers_told(servers: list[Running]) -> Iterator[None]:
    """If what follows fails: the log of each of these servers, and the figures of those that still run. They end."""
    try:
        yield
    except BaseException:
        for number, server in enumerate(servers, 1):
            print(f"---- server {number}\n" + "\n".join(server.lines))  # noqa: T201
            with contextlib.suppress(Exception):
                print(server.get("/cache/stats").body.decode())  # noqa: T201
        raise
    finally:
        for server in servers:
            server.kill()


def figures(server: Running) -> dict:
    return server.get("/cache/stats").json


def all_is_backed_up(server: Running) -> bool:
    stats = figures(server)
    return (
        stats["tiers"]["pages_backed_up"] >= 10
        and not stats["transfers"]
        and not (stats["store"]["backing"] or stats["store"]["owed"] or stats["tiers"]["under_way"])
    )


def test_M05_what_the_next_server_finds(places, tmp_path):
    """Computed by one server, found by the next in the store: usage says how much, and the tokens are the same. However
    slow the machine is: requests here wait for the store, and the first server has written all before it ends.

    Mutation: `StepInputs` counts what was fetched as on the device; `_join` forgets `store_patience`.
    """
    folder, _, right = places
    store = f"file://{tmp_path}/store?size=64MiB"
    flags = (str(folder), *FLAGS, "--store", store, "--store-patience", "600", "--page-size", "4")
    cached, servers = [], []
    with servers_told(servers):
        for number in range(2):
            servers.append(server := Running(*flags))
            server.ready()
            told = said(server, cache_report=True)
            assert ids(told) == right["base"]
            cached.append(told.json["cache"])
            usage = told.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == told.json["cache"]["cached_tokens"]
            stream = server.stream("/v1/completions", {**_body("base"), "stream_options": {"include_usage": True}})
            assert stream.status == 404, "the model has another name here"
            again = said(server, cache_report=True).json["cache"]
            assert again["device"] == again["cached_tokens"] == 39
            if number == 0:
                until(lambda: all_is_backed_up(server))
                server.lines.append(json.dumps(figures(server)))  # it cannot be asked when it has ended
            else:
                assert figures(server)["store"]["hits"] == 1
                assert cached[1]["store"] == cached[1]["cached_tokens"] >= 36 and cached[1]["miss"] is None
            assert server.stop() == 0
        assert cached[0]["cached_tokens"] == 0 and cached[0]["miss"]["reason"] == "empty"


def test_M05_a_store_that_is_late_is_asked_again(places, tmp_path):
    """Its process stands still, as on a machine that is too busy: the prompt is computed, and that is counted. When it
    goes on, the next request finds there what the first has left.

    Mutation: `_look_up` waits without `patience`; a lookup that was late is never asked again.
    """
    folder, _, right = places
    store = f"file://{tmp_path}/store?size=64MiB"
    servers = [server := Running(str(folder), *FLAGS, "--store", store, "--page-size", "4")]
    with servers_told(servers):
        server.ready()
        said(server)
        until(lambda: all_is_backed_up(server))

        def asked_anew() -> dict:
            assert server.post("/reset_prefix_cache", {}).status == 200
            told = said(server, cache_report=True)
            assert ids(told) == right["base"]
            return told.json["cache"]

        before = figures(server)["tiers"]["store"]["timeout"]
        process = server.store()
        os.kill(process, signal.SIGSTOP)
        try:
            assert asked_anew()["cached_tokens"] == 0
            assert figures(server)["tiers"]["store"]["timeout"] > before
        finally:
            os.kill(process, signal.SIGCONT)
        until(lambda: asked_anew()["store"] == 39)
