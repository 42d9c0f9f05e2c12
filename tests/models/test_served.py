"""A real model behind HTTP: adapters by name, token by token what the model says, the store across a restart."""

from __future__ import annotations

import json

import pytest
import torch

from tests.server.kit import Running

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


def test_M05_what_the_next_server_finds(places, tmp_path):
    """Computed by one server, found by the next in the store: usage says how much, and the tokens are the same.

    Mutation: `Begun` counts what was fetched as on the device; the engine ends before it has written to the store.
    """
    folder, _, right = places
    store = f"file://{tmp_path}/store?size=64MiB"
    cached = []
    for _ in range(2):
        server = Running(str(folder), *FLAGS, "--store", store, "--page-size", "4")
        try:
            server.ready()
            told = said(server, cache_report=True)
            for _ in range(4):
                if not server.get("/cache/stats").json["store"]["late"]:
                    break
                server.kill()  # a slow machine, which computes instead: once more
                server = Running(str(folder), *FLAGS, "--store", store, "--page-size", "4").ready()
                told = said(server, cache_report=True)
            assert ids(told) == right["base"]
            cached.append(told.json["cache"])
            usage = told.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == told.json["cache"]["cached_tokens"]
            stream = server.stream("/v1/completions", {**_body("base"), "stream_options": {"include_usage": True}})
            assert stream.status == 404, "the model has another name here"
            again = said(server, cache_report=True).json["cache"]
            assert again["device"] == again["cached_tokens"] == 39
            assert server.stop() == 0
        finally:
            server.kill()
    assert cached[0]["cached_tokens"] == 0 and cached[0]["miss"]["reason"] == "empty"
    assert cached[1]["store"] == cached[1]["cached_tokens"] >= 36 and cached[1]["miss"] is None
