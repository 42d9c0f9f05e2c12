"""What clients send and get: chat completions, completions, models, tokens and the cache, over HTTP."""

from __future__ import annotations

import json

import pytest

from .kit import Running, until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("http")]

CHAT = "/v1/chat/completions"
LONG = "The sapwood of a tree stores and carries water from its roots to its leaves. " * 8


def user(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def test_a_chat_and_the_same_chat_again(server: Running):
    """The second answer is the first one's, and its prompt was cached.

    Mutation: `SampleBegun` is sent without `cached`; `usage_of` leaves the details out.
    """
    asked = user(LONG + "again", temperature=0, seed=1, cache_report=True)
    first, second = server.post(CHAT, asked).json, server.post(CHAT, asked).json
    assert first["object"] == "chat.completion" and first["choices"][0]["finish_reason"] == "length"
    assert first["choices"][0]["message"]["role"] == "assistant"
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    assert first["usage"]["completion_tokens"] == 8
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] + 8
    assert first["cache"]["miss"]["reason"] in ("diverged", "empty")
    assert second["cache"]["device"] + second["cache"]["host"] == second["cache"]["cached_tokens"] > 100


def test_where_a_prompt_parts_from_what_is_cached(server: Running):
    """The requester learns the position, and sees its own text around it.

    Mutation: `around` shows the tokens of another position; the report has no miss.
    """
    server.post(CHAT, user(LONG + "Then the first ending came, and it was long enough to fill its page.", seed=1))
    told = server.post(
        CHAT, user(LONG + "Or was there another one? Nobody who was there knows.", cache_report=True, seed=1)
    )
    miss = told.json["cache"]["miss"]
    assert miss["reason"] == "diverged" and miss["position"] > 100
    assert (miss["before"] + miss["after"]) in LONG + "Or was there another one? Nobody who was there knows."


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_stream_says_what_one_piece_says(server: Running, path):
    """Piece by piece: the same text, the usage at the end where it was asked for, and a mark that it is over.

    Mutation: `Generation._take` loses the last token; `closing` writes no usage.
    """
    asked = {"max_tokens": 20, "seed": 3, "temperature": 0.7}
    asked |= {"prompt": LONG} if path != CHAT else {"messages": [{"role": "user", "content": LONG}]}
    whole = server.post(path, asked).json["choices"][0]
    stream = server.stream(path, {**asked, "stream_options": {"include_usage": True}})
    events = list(stream.events())
    assert stream.response.getheader("content-type").startswith("text/event-stream")
    said = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in said)
    assert text == (whole["text"] if path != CHAT else whole["message"]["content"])
    assert said[-1]["finish_reason"] == "length" and events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 20 and events[-2]["choices"] == []
    assert len({event["id"] for event in events[:-1]}) == 1


def test_several_prompts_and_samples(server: Running):
    """A list of prompts, text and ids, n samples each: choices in order, all tokens counted.

    Mutation: `begin` submits every prompt from lane 0; `usage` counts one prompt.
    """
    ids = server.post("/tokenize", {"prompt": "one two three"}).json["tokens"]
    told = server.post(
        "/v1/completions", {"prompt": ["one two three", ids, "four"], "n": 2, "max_tokens": 5, "seed": 7}
    ).json
    assert [choice["index"] for choice in told["choices"]] == list(range(6))
    texts = [choice["text"] for choice in told["choices"]]
    assert texts[0] == texts[2] and texts[1] == texts[3] and texts[0] != texts[1] and texts[0] != texts[4]
    assert told["usage"]["completion_tokens"] == 30
    assert told["usage"]["prompt_tokens"] == 2 * len(ids) + 1


def test_stop_strings_and_tokens(server: Running):
    """The text ends before a stop string, or with the model's own stop token, wherever that falls.

    Mutation: `job.over` is not called; `_last` shows the text of the stop token.
    """
    asked = {"prompt": "stop me", "max_tokens": 30, "seed": 11}
    text = server.post("/v1/completions", asked).json["choices"][0]["text"]
    word = text[12:17]
    cut = server.post("/v1/completions", {**asked, "stop": ["never this", word]}).json["choices"][0]
    assert cut["text"] == text[: text.index(word)]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == word
    kept = server.post("/v1/completions", {**asked, "stop": word, "include_stop_str_in_output": True}).json
    assert kept["choices"][0]["text"].endswith(word)
    ids = server.post("/v1/completions", {**asked, "return_token_ids": True}).json["choices"][0]["token_ids"]
    by_token = server.post("/v1/completions", {**asked, "stop_token_ids": [ids[4]]}).json["choices"][0]
    assert by_token["finish_reason"] == "stop" and by_token["stop_reason"] == ids[4]
    assert text.startswith(by_token["text"]) and server.get("/cache/stats").json["decoding"] == 0


def test_M08_logprobs_of_answers_and_prompts(server: Running):
    """Chat's form and that of completions; with `echo`, the prompt's own, as lm-evaluation-harness asks for them.

    Mutation: `CompletionLogprobs` forgets the prompt; `chat_logprobs` leaves `bytes` out.
    """
    chat = server.post(CHAT, user("hello", logprobs=True, top_logprobs=3)).json["choices"][0]["logprobs"]["content"]
    assert len(chat) == 8 and all(len(each["top_logprobs"]) == 3 for each in chat)
    assert all(bytes(each["bytes"]).decode(errors="replace") == each["token"] for each in chat)
    ids = server.post("/tokenize", {"prompt": "the capital of France is Paris"}).json["tokens"]
    told = server.post(
        "/v1/completions", {"prompt": [ids, ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    ).json
    for choice in told["choices"]:
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(ids) + 1
        assert scores["token_logprobs"][0] is None and all(score <= 0 for score in scores["token_logprobs"][1:])
        assert choice["text"].startswith("the capital of France is Paris")
        assert "".join(scores["tokens"]).startswith("the capital") and scores["text_offset"][1] == len(
            scores["tokens"][0]
        )
    only = server.post("/v1/completions", {"prompt": "just this", "max_tokens": 0, "echo": True, "logprobs": 0}).json
    assert only["choices"][0]["text"] == "just this"


def test_models_tokens_and_text(server: Running):
    """What is served, and how it reads text.

    Mutation: `one_model` knows the first name alone; `tokenize` adds no template.
    """
    (model,) = server.get("/v1/models").json["data"]
    assert model["id"] == "paced" and model["max_model_len"] == 20000 and model["parent"] is None
    assert server.get("/v1/models/paced").json["id"] == "paced"
    assert server.get("/v1/models/other").status == 404
    told = server.post("/tokenize", {"prompt": "Hello world"}).json
    assert told["count"] == len(told["tokens"]) == 2
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": "Hello world"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hello world"}]}).json
    assert (
        "<|im_start|>user\nHello world<|im_end|>"
        in server.post("/detokenize", {"tokens": chat["tokens"]}).json["prompt"]
    )


def test_the_next_turn_is_encoded_in_segments(server: Running):
    """A conversation gives the same tokens whether its segments were seen before or not.

    Mutation: `_in_segments` joins segments in another order.
    """
    turns = [{"role": "user", "content": f"turn {i} é日本語 {LONG}"} for i in range(3)]
    cold = [server.post("/tokenize", {"messages": turns[: i + 1]}).json["tokens"] for i in range(3)]
    warm = [server.post("/tokenize", {"messages": turns[: i + 1]}).json["tokens"] for i in range(3)]
    assert cold == warm
    text = server.post("/detokenize", {"tokens": cold[2]}).json["prompt"]
    assert server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"] == cold[2]


def test_explain_and_reset(server: Running):
    """Before a prompt, after it, and after the cache was reset.

    Mutation: `_reset` tells nothing; `cache_explain` asks for another salt.
    """
    prompt = "explain " + LONG
    assert server.post("/cache/explain", {"prompt": prompt}).json["cached"] < 16
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    told = server.post("/cache/explain", {"prompt": prompt}).json
    assert told["reason"] == "hit" and told["cached"] > 100
    assert server.post("/cache/explain", {"prompt": prompt, "cache_salt": "x"}).json["cached"] == 0
    reset = server.post("/reset_prefix_cache", {}).json
    assert reset["forgotten_pages"]["device"] > 0 and reset["store"] is False
    assert server.post("/cache/explain", {"prompt": prompt}).json["cached"] == 0


def test_salts_and_requests_that_keep_out_of_the_cache(server: Running):
    """What another tenant has computed is not found; `cache_prompt: false` neither reads nor writes.

    Mutation: the salt is not passed on; `cache_prompt` is ignored.
    """

    def cached(**more):
        asked = {"prompt": "salted " + LONG, "max_tokens": 1, **more}
        return server.post("/v1/completions", asked).json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 100
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="c", cache_prompt=False) == 0 and cached(cache_salt="c") == 0
    assert cached(cache_salt="c", cache_prompt=False) == 0 and cached(cache_salt="c", prompt_cache_key="k") > 100


def test_S10_a_client_that_leaves(server: Running):
    """While its prompt waits, and in the middle of its stream: nothing runs on for it, and its pages come back.

    Mutation: `_Reading` does not look for the client; `EngineJob.close` drops nothing.
    """
    stream = server.stream(CHAT, user("leave", max_tokens=10000))
    events = stream.events()
    for _ in range(5):
        next(events)
    assert server.get("/cache/stats").json["decoding"] == 1
    stream.connection.sock.close()
    stream.response.close()
    until(lambda: server.get("/cache/stats").json["decoding"] == 0)
    pages = server.get("/cache/stats").json["cache"]["pages"]["full"]["device"]
    assert pages["leases"] == 0


def test_L15_adapters_by_name(server: Running, tmp_path):
    """`model` names an adapter; an unknown one is a 404. Without --lora-root none can be loaded over HTTP.

    Mutation: `model` takes any name for the base model.
    """
    assert server.post(CHAT, user("x", model="no-such-adapter")).status == 404
    refused = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path)})
    assert refused.status == 403 and "lora-root" in refused.error["message"]


def test_what_would_change_the_answer_is_refused(server: Running):
    """Fields that change nothing are accepted, those that would and are not there are refused by name.

    Mutation: `refuse_unserved` looks at nothing.
    """
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True}
    assert server.post(CHAT, user("x", **ignored, whatever=[1, {"a": None}])).status == 200
    for field, value in [
        ("logits_processors", ["x"]),
        ("use_beam_search", True),
        ("functions", [{}]),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("chat_template", "{{ messages }}"),
        ("best_of", 3),
        ("response_format", {"type": "xml"}),
    ]:
        refused = server.post(CHAT, user("x", **{field: value}))
        assert (refused.status, refused.error["param"]) == (400, field), (field, refused.body)


def test_request_ids_and_unknown_paths(server: Running):
    """A client's id comes back, a strange one does not; other paths and methods are told in JSON.

    Mutation: `_ID` takes everything.
    """
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req-")
    assert server.get("/nowhere").error["code"] == "not_found"
    wrong = server.get(CHAT)
    assert wrong.status == 405 and wrong.headers["allow"] == "POST"
    assert json.loads(server.get("/openapi.json").body)["paths"][CHAT]["post"]["requestBody"]
    assert server.get("/version").json["version"]


def test_metrics_count_tokens_while_they_come(server):
    """A stream that has not ended is in `generation_tokens` already, and each of its tokens is there once in the end.

    Mutation: `_render_metrics` asks only those that are over; `Generation.uncounted` forgets what it has told.
    """

    def generated() -> float:
        return sum(
            float(line.split()[-1])
            for line in server.get("/metrics").body.decode().splitlines()
            if line.startswith("vllm:generation_tokens_total")
        )

    before = generated()
    stream = server.stream("/v1/completions", {"prompt": "go on", "max_tokens": 600, "ignore_eos": True})
    events = stream.events()
    for _ in range(20):
        next(events)
    early = generated() - before
    assert 15 <= early < 600
    assert list(events)[-1] == "[DONE]"
    assert until(lambda: generated() - before == 600)
