"""What real clients send, byte for byte in kind, and every field that their types demand of the answer. The clients
themselves are in test_clients.py."""

from __future__ import annotations

import json
from types import NoneType
from typing import Any

import pytest

from .kit import Running

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("http")]

OPENAI = {
    "Accept": "application/json",
    "Authorization": "Bearer none",
    "User-Agent": "OpenAI/Python 3.49.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}
ANTHROPIC = {
    "Accept": "application/json",
    "X-Api-Key": "none",
    "anthropic-version": "2023-06-01",
    "User-Agent": "Anthropic/Python 2.8.0",
    "X-Stainless-Lang": "python",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
TREE = {  # as pydantic and openai's strict schemas write it
    "$defs": {
        "Place": {
            "properties": {"country": {"enum": ["France", "Norway"], "title": "Country", "type": "string"}},
            "required": ["country"],
            "title": "Place",
            "type": "object",
            "additionalProperties": False,
        }
    },
    "properties": {
        "kind": {"enum": ["oak", "ash", "elm"], "title": "Kind", "type": "string"},
        "age": {"maximum": 99, "minimum": 1, "title": "Age", "type": "integer"},
        "place": {"$ref": "#/$defs/Place"},
    },
    "required": ["kind", "age", "place"],
    "title": "Tree",
    "type": "object",
    "additionalProperties": False,
}
FUNCTION = {"name": "describe", "strict": True, "parameters": TREE}
NAMED = {"type": "function", "function": {"name": "describe"}}

ENDS = {"stop", "length", "tool_calls"}
USAGE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
}
SCORE = {"token": str, "logprob": float, "bytes": [int]}
SCORES = {"content": [{**SCORE, "top_logprobs": [SCORE]}], "refusal": NoneType}
CALL = {"id": str, "type": {"function"}, "function": {"name": str, "arguments": str}}
CHAT = {
    "id": str,
    "object": {"chat.completion"},
    "created": int,
    "model": str,
    "choices": [{"index": int, "finish_reason": ENDS, "message": {"role": {"assistant"}, "refusal": NoneType}}],
    "usage": USAGE,
}
CHUNK = {
    "id": str,
    "object": {"chat.completion.chunk"},
    "created": int,
    "model": str,
    "choices": [{"index": int, "delta": {}, "finish_reason": {None, *ENDS}}],
}
TEXT = {
    "id": str,
    "object": {"text_completion"},
    "created": int,
    "model": str,
    "choices": [{"index": int, "text": str, "finish_reason": {None, "stop", "length"}}],
}
LISTS = {
    "tokens": [str],
    "token_logprobs": [(float, NoneType)],
    "top_logprobs": [(dict, NoneType)],
    "text_offset": [int],
}
ERROR = {"error": {"message": str, "type": str, "param": (str, NoneType), "code": (str, NoneType)}}
PART = {"type": {"output_text"}, "text": str, "annotations": [], "logprobs": []}
MESSAGE_ITEM = {"id": str, "type": {"message"}, "role": {"assistant"}, "content": [PART]}
RESPONSE = {
    "id": str,
    "object": {"response"},
    "created_at": int,
    "model": str,
    "parallel_tool_calls": bool,
    "tool_choice": (str, dict),
    "tools": [dict],
    "output": [{"type": str, "id": str, "status": {"completed", "incomplete", "in_progress"}}],
    "status": {"completed", "incomplete", "in_progress"},
}
RESPONSE_USAGE = {
    "input_tokens": int,
    "input_tokens_details": {"cached_tokens": int},
    "output_tokens": int,
    "output_tokens_details": {"reasoning_tokens": int},
    "total_tokens": int,
}
PLACE = {"item_id": str, "output_index": int}
EVENTS = {  # of the Responses API, in the order in which text comes
    "response.created": {"response": RESPONSE},
    "response.in_progress": {"response": RESPONSE},
    "response.output_item.added": {"output_index": int, "item": {"id": str, "type": {"message"}, "content": []}},
    "response.content_part.added": {**PLACE, "content_index": int, "part": PART},
    "response.output_text.delta": {**PLACE, "content_index": int, "delta": str, "logprobs": []},
    "response.output_text.done": {**PLACE, "content_index": int, "text": str, "logprobs": []},
    "response.content_part.done": {**PLACE, "content_index": int, "part": PART},
    "response.output_item.done": {"output_index": int, "item": MESSAGE_ITEM},
    "response.incomplete": {"response": {**RESPONSE, "usage": RESPONSE_USAGE}},
}
MESSAGE_USAGE = {"cache_creation_input_tokens": int, "cache_read_input_tokens": int, "output_tokens": int}
MESSAGE = {
    "id": str,
    "type": {"message"},
    "role": {"assistant"},
    "model": str,
    "content": [{"type": {"text", "tool_use"}}],
    "stop_reason": {None, "end_turn", "max_tokens", "tool_use"},
    "stop_sequence": NoneType,
    "usage": {"input_tokens": int, **MESSAGE_USAGE},
}


def fits(value: Any, shape: Any, path: str = "$") -> None:
    """A dict: these fields, each of its shape; a list: items of its shape; a set: one of these; else: of this type."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), (path, value)
        for name, each in shape.items():
            assert name in value, f"{path}.{name} is not there: {value}"
            fits(value[name], each, f"{path}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), (path, value)
        for at, item in enumerate(value):
            fits(item, shape[0] if shape else object, f"{path}[{at}]")
    elif isinstance(shape, set):
        assert value in shape, (path, value)
    else:
        assert isinstance(value, shape) and (shape is not int or not isinstance(value, bool)), (path, value)


def chat(server: Running, **more: Any) -> Any:
    body = {"messages": HELLO, "model": "paced", "max_tokens": 600, "seed": 5, **more}
    told = server.post("/v1/chat/completions", body, headers=OPENAI)
    assert told.status == 200, told.body
    fits(told.json, CHAT)
    return told.json


def chunks(server: Running, **more: Any) -> list[Any]:
    body = {"messages": HELLO, "model": "paced", "max_tokens": 600, "seed": 5, **more}
    *events, last = server.stream("/v1/chat/completions", body, headers=OPENAI).events()
    assert last == "[DONE]"
    for each in events:
        fits(each, CHUNK)
    return events


def test_a_chat_as_openai_and_litellm_send_it(server: Running):
    """In one piece and streamed, with usage and log-probabilities, several samples.

    Mutation: `ChatChunk` has no `created`; `chat_logprobs` leaves `bytes` out; `usage_of` is not in the last chunk.
    """
    asked = {"max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = chat(server, **asked)
    for choice in whole["choices"]:
        fits(choice["logprobs"], SCORES)
        assert len(choice["logprobs"]["content"]) == 6 and isinstance(choice["message"]["content"], str)
    *said, last = chunks(server, **asked, stream_options={"include_usage": True})
    fits(last, {"choices": [], "usage": USAGE})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    for index in range(2):
        mine = [choice for each in said for choice in each["choices"] if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "length"
        assert (
            "".join(one["delta"].get("content") or "" for one in mine)
            == (whole["choices"][index]["message"]["content"])
        )
        scores = [one["logprobs"] for one in mine if one["logprobs"]]
        assert sum(len(each["content"]) for each in scores) == 6
        for each in scores:
            fits(each, SCORES)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_are_put_together_as_openai_does_it(server: Running, choice):
    """By `index`: the first piece of a call has its id, type and name, the others more of its arguments.

    Mutation: `_delta` tells no `index`; `whole_calls` leaves `type` out.
    """
    asked = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
    (whole,) = chat(server, **asked)["choices"]
    fits(whole["message"], {"content": NoneType, "tool_calls": [CALL]})
    calls: dict[int, dict[str, Any]] = {}
    for each in chunks(server, **asked):
        for piece in each["choices"][0]["delta"].get("tool_calls") or []:
            if piece["index"] not in calls:
                fits(piece, {"index": int, **CALL})
                calls[piece["index"]] = piece
            else:
                fits(piece, {"index": int, "function": {"arguments": str}})
                assert "id" not in piece and "name" not in piece["function"]
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    assert [calls[at]["function"] for at in sorted(calls)] == [
        each["function"] for each in whole["message"]["tool_calls"]
    ]
    for each in calls.values():
        assert json.loads(each["function"]["arguments"])["place"]["country"] in ("France", "Norway")
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


def test_answers_that_pydantic_reads(server: Running):
    """What `chat.completions.parse`, `responses.parse` and `output_config` send for a class: references and all.

    Mutation: `format_of` drops the schema; `$defs` are lost on the way to `GrammarSpec`.
    """
    form = {"type": "json_schema", "json_schema": {"name": "Tree", "strict": True, "schema": TREE}}
    said = [chat(server, response_format=form)["choices"][0]["message"]["content"]]
    flat = {"format": {"type": "json_schema", "strict": True, "name": "Tree", "schema": TREE}}
    body = {"input": HELLO, "model": "paced", "text": flat, "max_output_tokens": 600}
    told = server.post("/v1/responses", body, headers=OPENAI).json
    said.append(told["output"][0]["content"][0]["text"])
    assert told["text"]["format"] == {"description": None, **flat["format"]}
    config = {"format": {"type": "json_schema", "schema": TREE}}
    body = {"messages": HELLO, "model": "paced", "max_tokens": 600, "output_config": config}
    said.append(server.post("/v1/messages", body, headers=ANTHROPIC).json["content"][0]["text"])
    for text in said:
        tree = json.loads(text)
        assert set(tree) == {"kind", "age", "place"} and 1 <= tree["age"] <= 99


def test_completions_as_openai_and_lm_evaluation_harness_send_them(server: Running):
    """Streams with usage; token ids in batches with `echo`, where a score belongs to each token and one is new.

    Mutation: `CompletionLogprobs` forgets the prompt; `_body` writes no `object`.
    """
    body = {"model": "paced", "prompt": "Once upon a time", "max_tokens": 5, "stream_options": {"include_usage": True}}
    *said, last, done = server.stream("/v1/completions", body, headers=OPENAI).events()
    for each in (*said, last):
        fits(each, TEXT)
    fits(last["usage"], USAGE)
    assert last["choices"] == [] and done == "[DONE]"
    ids = [server.post("/tokenize", {"prompt": text}).json["tokens"] for text in ("a b c d", "one two")]
    body = {
        "model": "paced",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    told = server.post("/v1/completions", body, headers={"Authorization": "Bearer "}).json
    fits(told, {**TEXT, "usage": USAGE})
    for choice, prompt in zip(told["choices"], ids, strict=True):
        fits(choice["logprobs"], LISTS)
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == len(prompt) + 1 and scores[0] is None and None not in scores[1:]
        for score, top in zip(scores[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
            assert score <= max(top.values())
    body = {
        "prompt": ids,
        "model": "paced",
        "max_tokens": 12,
        "temperature": 0,
        "stop": ["\n", "<|im_end|>"],
        "seed": 1,
    }
    assert [choice["index"] for choice in server.post("/v1/completions", body).json["choices"]] == [0, 1]


def test_responses_event_by_event(server: Running):
    """Each event has the fields of its type, and they come in order and are numbered.

    Mutation: `_opened` writes no part; `_event` leaves `sequence_number` out; `_usage` has no details.
    """
    body = {"input": "Hello", "model": "paced", "max_output_tokens": 6, "seed": 5}
    stream = server.stream("/v1/responses", body, headers=OPENAI)
    events = list(stream.events())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event["type"] for event in events)) == list(EVENTS)
    for event in events:
        fits(event, EVENTS[event["type"]], event["type"])
    whole = server.post("/v1/responses", body, headers=OPENAI).json
    fits(whole, {**RESPONSE, "output": [MESSAGE_ITEM], "usage": RESPONSE_USAGE})
    assert whole["output"][0]["content"] == events[-1]["response"]["output"][0]["content"]
    named = {"type": "function", "name": "describe"}
    asked = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": named, "max_output_tokens": 600}
    called = server.post("/v1/responses", {**body, **asked}, headers=OPENAI).json
    fits(called["output"], [{"type": {"function_call"}, "call_id": str, "name": {"describe"}, "arguments": str}])
    back = {"type": "function_call_output", "call_id": called["output"][0]["call_id"], "output": "[]"}
    after = {**body, "input": [back], "previous_response_id": called["id"]}
    fits(server.post("/v1/responses", after, headers=OPENAI).json, {**RESPONSE, "output": [MESSAGE_ITEM]})


def test_messages_event_by_event(server: Running):
    """As anthropic's client sends them: text and tools, in one piece and streamed; counts.

    Mutation: `_begun` has no `input`; `_stopped` leaves `stop_sequence` out; `count_tokens` answers another name.
    """
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    body = {"max_tokens": 6, "messages": HELLO, "model": "paced", "system": system}
    whole = server.post("/v1/messages", body, headers=ANTHROPIC).json
    fits(whole, MESSAGE)
    fits(whole["content"], [{"type": {"text"}, "text": str}])
    first, *middle, delta, last = server.stream("/v1/messages", body, headers=ANTHROPIC).events()
    fits(first, {"type": {"message_start"}, "message": MESSAGE})
    fits(delta, {"type": {"message_delta"}, "delta": {"stop_reason": {"max_tokens"}}, "usage": MESSAGE_USAGE})
    assert "stop_sequence" in delta["delta"] and last == {"type": "message_stop"}
    shapes = {
        "ping": {},
        "content_block_start": {"index": int, "content_block": {"type": {"text"}, "text": str}},
        "content_block_delta": {"index": int, "delta": {"type": {"text_delta"}, "text": str}},
        "content_block_stop": {"index": int},
    }
    assert list(dict.fromkeys(event["type"] for event in middle)) == list(shapes)
    for event in middle:
        fits(event, shapes[event["type"]])
    counted = server.post(
        "/v1/messages/count_tokens", {"messages": HELLO, "model": "paced", "system": system}, headers=ANTHROPIC
    ).json
    usage = whole["usage"]
    told = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert counted == {"input_tokens": told}
    tool = {"name": "describe", "description": "Describe a tree.", "input_schema": TREE}
    asked = {**body, "max_tokens": 600, "tools": [tool], "tool_choice": {"type": "tool", "name": "describe"}}
    called = server.post("/v1/messages", asked, headers=ANTHROPIC).json
    fits(called, {**MESSAGE, "content": [{"type": {"tool_use"}, "id": str, "name": {"describe"}, "input": dict}]})
    assert called["stop_reason"] == "tool_use" and called["content"][0]["input"]["kind"] in ("oak", "ash", "elm")
    pieces = [event for event in server.stream("/v1/messages", asked, headers=ANTHROPIC).events() if "index" in event]
    fits(pieces[0]["content_block"], {"type": {"tool_use"}, "id": str, "name": str, "input": dict})
    text = "".join(piece["delta"]["partial_json"] for piece in pieces[1:-1])
    assert set(json.loads(text)) == {"kind", "age", "place"}


def test_errors_become_the_clients_exceptions(server: Running):
    """Status codes decide about the class of an exception, and the body has what it shows.

    Mutation: `model` answers 400 for a name it does not know; `anthropic_error` writes OpenAI's form.
    """
    good = {"messages": HELLO, "model": "paced", "max_tokens": 4}
    for wrong, status, code in [
        ({"model": "none-such"}, 404, "model_not_found"),
        ({"temperature": -1}, 400, None),
        ({"messages": [{"role": "user", "content": "word " * 50_000}]}, 400, "context_length_exceeded"),
        ({"stream": True, "top_p": 7}, 400, None),
    ]:
        told = server.post("/v1/chat/completions", {**good, **wrong}, headers=OPENAI)
        assert told.status == status and told.headers["content-type"] == "application/json", told.body
        fits(told.json, ERROR)
        assert code in (None, told.error["code"])
    for wrong, status, kind in [
        ({"model": "none-such"}, 404, "not_found_error"),
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"stream": True, "tool_choice": {"type": "tool", "name": "none"}}, 400, "invalid_request_error"),
    ]:
        told = server.post("/v1/messages", {**good, **wrong}, headers=ANTHROPIC)
        assert told.status == status, told.body
        fits(told.json, {"type": {"error"}, "error": {"type": {kind}, "message": str}})


def test_what_clients_and_routers_look_at_first(server: Running):
    """Lists of models, and what a router probes before it sends anything: with a body of its own in between.

    Mutation: `_shown` has no `owned_by`; `/version` or `/ping` is not there.
    """
    listed = server.get("/v1/models", headers=OPENAI).json
    model = {"id": str, "object": {"model"}, "created": int, "owned_by": str}
    fits(listed, {"object": {"list"}, "data": [model]})
    fits(server.get("/v1/models/paced", headers=OPENAI).json, model)
    fits(server.get("/version").json, {"version": str})
    assert server.get("/health").status == server.get("/ping").status == 200
    for path in ("/server_info", "/get_server_info", "/model_info", "/tokenizer_info"):
        missing = server.get(path)
        assert missing.status == 404
        fits(missing.json, ERROR)
