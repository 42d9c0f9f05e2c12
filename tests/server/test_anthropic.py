"""Anthropic's Messages API: events, blocks, what the cache served, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from sapwood.server.api.anthropic import anthropic_error
from sapwood.server.errors import ApiError

from .scripted import THINKS_AND_CALLS, Script, Scripted, for_clients
from .venvs import python_with, run

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
FORM = {"type": "json_schema", "schema": SCHEMA}
HI = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 200, **more}


def made(app: Scripted, **more: Any) -> dict[str, Any]:
    answer = app.post(PATH, body(**more))
    assert answer.status == 200, answer.body
    return answer.json


def plain(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks without what is new every time."""
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


# ---- the answer


def test_a_text_is_told_event_by_event():
    """One block, opened empty, filled by deltas and closed; the end says why and how much.

    Mutation: `BlockOpened` carries the block with its first text; `MessagesWriter.piece` does not close the last block.
    """
    events = Scripted("Hello you, it is a fine day").events(PATH, body())
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in itertools.groupby(name for name, _ in events)] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    start, _, opened, *deltas, closed, ended, _ = [data for _, data in events]
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["role"] == "assistant" and start["message"]["usage"]["output_tokens"] <= 1
    assert opened["content_block"] == {"type": "text", "text": ""} and opened["index"] == closed["index"] == 0
    assert "".join(each["delta"]["text"] for each in deltas) == "Hello you, it is a fine day" and len(deltas) == 8
    assert ended["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 9


def test_thinking_and_tools_are_blocks_of_their_own():
    """A stream adds up to what the answer in one piece has.

    Mutation: `Blocks.take` does not close the block before it opens another; `_input` gives the text.
    """
    app = Scripted(THINKS_AND_CALLS)
    asked = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    events = app.events(PATH, body(**asked))
    blocks: list[dict[str, Any]] = []
    is_open = False
    for name, data in events:
        if name == "content_block_start":
            assert not is_open and data["index"] == len(blocks)
            blocks.append({**data["content_block"], "said": ""})
        elif name == "content_block_delta":
            kind = data["delta"].pop("type")
            expected = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
            assert kind == expected[blocks[data["index"]]["type"]] and data["index"] == len(blocks) - 1
            (said,) = data["delta"].values()
            blocks[-1]["said"] += said
        is_open = {"content_block_start": True, "content_block_stop": False}.get(name, is_open)
    assert not is_open and [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["said"] for block in blocks[:2]] == ["let me see", "I call"]
    assert [json.loads(block["said"])["city"] for block in blocks[2:]] == ["Rome", "Oslo"]
    whole = made(app, **asked)
    assert plain(whole["content"]) == [
        {"type": "thinking", "thinking": "let me see", "signature": ""},
        {"type": "text", "text": "I call"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert whole["stop_reason"] == "tool_use" and whole["usage"] == events[-2][1]["usage"]


def test_thinking_is_told_apart_where_it_is_asked_for():
    """By the request, or by the server's flag; elsewhere it is text as the model wrote it.

    Mutation: `MessagesWriter` looks at the flag alone.
    """
    text = "<think>let me see</think>It is."

    def types(app: Scripted, **more: Any) -> list[str]:
        return [block["type"] for block in made(app, **more)["content"]]

    assert types(Scripted(text)) == ["text"]
    assert types(Scripted(text), thinking={"type": "disabled"}) == ["text"]
    assert types(Scripted(text), thinking={"type": "enabled", "budget_tokens": 1024}) == ["thinking", "text"]
    assert types(Scripted(text, reasoning_parser="think")) == ["thinking", "text"]


@pytest.mark.parametrize(
    ("script", "more", "reason", "sequence"),
    [
        ("Hello you", {}, "end_turn", None),
        ("Hello you", {"max_tokens": 1}, "max_tokens", None),
        ("Hello you, it is", {"stop_sequences": ["xx", " it"]}, "stop_sequence", " it"),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', {"tools": [TOOL]}, "tool_use", None),
        ('{"city": "Rome"}', {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_use", None),
        ("a " * 3000, {"max_tokens": 32000}, "model_context_window_exceeded", None),
    ],
)
def test_the_reason_for_the_end(script, more, reason, sequence):
    """Each in Anthropic's words. A max_tokens that the context cannot hold is no error: clients send their largest.

    Mutation: `_stopped` calls a stop string an end of the turn; `messages` passes on a max_tokens that does not fit.
    """
    told = made(Scripted(script), **more)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


def test_a_call_that_was_cut_off_does_not_look_whole():
    """Its input says that it is no JSON, and cannot be mistaken for a call without arguments.

    Mutation: `_input` gives an empty object for what it cannot read.
    """
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome and everything around it"}}</tool_call>'
    told = made(Scripted(call), tools=[TOOL], max_tokens=18)
    assert told["stop_reason"] == "max_tokens"
    (block,) = told["content"]
    assert block["type"] == "tool_use" and block["input"].keys() == {"INVALID_JSON"}


def test_the_three_numbers_of_a_prompt_do_not_overlap():
    """Read from the cache, written to it, and the rest: together they are the prompt, as count_tokens counts it.

    Mutation: `_usage` counts what is written as input too; `written_to_cache` counts pages that are not full.
    """
    words = "one two three four five six seven eight nine ten " * 9
    asked = {"messages": [{"role": "user", "content": words}]}
    app = Scripted(Script("Hello", cached=32))
    counted = app.post(f"{PATH}/count_tokens", asked).json
    prompt = counted["input_tokens"]
    assert prompt % 16 and prompt > 64 and counted.keys() == {"input_tokens"}
    told = made(app, **asked, cache_report=True)
    assert told["usage"] == {
        "input_tokens": prompt % 16,
        "cache_creation_input_tokens": prompt - prompt % 16 - 32,
        "cache_read_input_tokens": 32,
        "output_tokens": 2,
    }
    assert told["cache"]["cached_tokens"] == 32
    aside = made(app, **asked, cache_prompt=False)["usage"]
    assert aside["input_tokens"] == prompt - 32 and aside["cache_creation_input_tokens"] == 0
    *_, (_, ended), _ = app.events(PATH, body(**asked, cache_report=True))
    assert ended["usage"] == told["usage"] and ended["cache"] == told["cache"]


# ---- what the model is shown


def test_blocks_become_the_turns_of_a_chat():
    """A turn of the model is one message; what tools returned is one each, before the user's words. Marks for the
    cache change nothing.

    Mutation: `_asked` puts the user's text first; `_result` does not say that a tool failed.
    """
    app = Scripted("Hello")
    marked = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", **marked}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                USE,
                {**USE, "id": "toolu_2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, **marked},
                {**RESULT, "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "gone"}], "is_error": True},
                {"type": "text", "text": "well?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be kind.", **marked}, {"type": "text", "text": "Be brief."}]
    made(app, messages=turns, system=system, output_config={"effort": "low"})
    assert app.prompt == (
        "<|im_start|>system\nBe kind.\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nweather?<|im_end|>\n"
        '<|im_start|>assistant\n(hm)I look.[weather {"city": "Rome"}][weather {}]<|im_end|>\n'
        "<|im_start|>tool weather\nsunny<|im_end|>\n"
        "<|im_start|>tool weather\nError: gone<|im_end|>\n"
        "<|im_start|>user\nwell?<|im_end|>\n"
        "<|im_start|>assistant\n/effort low"
    )


def test_the_answer_goes_on_from_the_models_own_words():
    """A last message of the assistant is not closed, and no other is begun.

    Mutation: `_prompt` never continues.
    """
    app = Scripted("day")
    made(app, messages=[*HI, {"role": "assistant", "content": "It is a fine"}])
    assert app.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is a fine"


def test_thinking_reaches_the_template():
    """Where it has a switch for that; without a word about thinking, it is told nothing.

    Mutation: `_template` says nothing of thinking.
    """
    app = Scripted("Hello")
    for thinking, end in (
        ({"type": "enabled", "budget_tokens": 2000}, "<think>"),
        ({"type": "disabled"}, "/no_think"),
        ({"type": "adaptive"}, "\n"),
        (None, "\n"),
    ):
        made(app, thinking=thinking)
        assert app.prompt.endswith(f"assistant\n{end}" if end != "\n" else "assistant\n")


def test_a_prompt_that_begins_the_thinking():
    """The template has opened it: what the model says first is thinking, without a tag of its own.

    Mutation: `MessagesWriter` gives `AnswerParser` no prompt.
    """
    told = made(Scripted("let me see</think>It is."), thinking={"type": "enabled", "budget_tokens": 2000})
    assert [block.get("thinking") or block.get("text") for block in told["content"]] == ["let me see", "It is."]


def test_tools_are_shown_as_a_chat_shows_them():
    """The same tools in a chat and here make the same prompt, which the cache then has.

    Mutation: `chat_tools` leaves the description out.
    """
    app = Scripted("Hello")
    made(app, tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}])
    here = app.prompt
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    assert app.post("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function", "function": function}]})
    assert app.prompt == here and "weather" in here
    made(app, tools=[TOOL], tool_choice={"type": "none"})
    assert "weather" not in app.prompt


def test_parameters_reach_the_engine():
    """Sampling, stops, the salt, the priority, and the form of the text.

    Mutation: `messages` does not pass `stop_sequences` on.
    """
    app = Scripted("Hello")
    more = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "cache_salt": "tenant", "priority": 3}
    made(app, **more, output_config={"format": FORM}, metadata={"user_id": "u"}, service_tier="auto")
    params = app.params
    assert {name: getattr(params, name) for name in more} == more and params.max_tokens == 200
    grammar = app.link.submitted[-1].grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA
    app = Scripted("Hello")
    made(app, output_format=FORM)  # as it was called before
    assert app.link.submitted[-1].grammar == grammar
    app = Scripted('[{"name": "weather", "parameters": {"city": "Rome"}}]')
    (call,) = made(app, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})["content"]
    assert call["input"] == {"city": "Rome"} and app.link.submitted[-1].grammar is not None


# ---- errors


def test_errors_are_anthropics():
    """In the body, whatever the status, and as the last event of a stream that breaks.

    Mutation: `_error` gives OpenAI's names.
    """
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
    }
    kinds |= {
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
    }
    for status, kind in kinds.items():
        told = json.loads(anthropic_error(ApiError(status, "why", "code", "field")))
        assert told == {"type": "error", "error": {"type": kind, "message": "why"}}
    app = Scripted(Script("Hello you", fails=True), api_key=("one",))
    assert app.post(PATH, body()).json["error"]["type"] == "authentication_error"
    assert app.post(PATH, b"{", "one").json["type"] == "error"
    assert app.post(PATH, body(model="none"), "one").json["error"]["type"] == "not_found_error"
    name, last = app.events(PATH, body(), "one")[-1]
    assert (name, last) == ("error", {"type": "error", "error": {"type": "api_error", "message": "a step broke"}})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1].content"),
        ({"messages": [*HI, {"role": "assistant", "content": " "}]}, "messages[1].content"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{**USE, "input": "{}"}]}]},
            "messages[1].content[0].input",
        ),
        (
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [USE]},
                    {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]},
                ]
            },
            "messages[2].content[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": SCHEMA}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "box"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop": ["x"]}, "stop is not supported here: use stop_sequences"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here: use output_config"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "give either output_config.format or"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_answer_is_refused_by_name(more, named):
    """With a 400 whose message names the field as the request has it, and nothing is computed.

    Mutation: `in_words_of` changes nothing; a line of `MESSAGES` is missing.
    """
    app = Scripted("Hello")
    answer = app.post(PATH, body(**more))
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error", answer.body
    assert answer.error["message"].startswith(named), answer.error
    assert not app.link.submitted


def test_max_tokens_is_demanded():
    """As Anthropic does; not where tokens are only counted.

    Mutation: `MessagesRequest` has a default for max_tokens.
    """
    app = Scripted("Hello")
    answer = app.post(PATH, {"messages": HI})
    assert answer.status == 400 and "max_tokens" in answer.error["message"]
    assert app.post(f"{PATH}/count_tokens", {"messages": HI}).status == 200


# ---- over HTTP, with a scheduler and a cache


@pytest.mark.server
@pytest.mark.xdist_group("http")
def test_what_was_written_is_read_by_the_next_message(server):
    """What the first message wrote to the cache, the second reads, marks or none; a stream tells the same.

    Mutation: `_usage` tells what is read as written.
    """
    words = "ten nine eight seven six five four three two one " * 20
    asked = {"messages": [{"role": "user", "content": words}], "max_tokens": 5}
    first = server.post(PATH, asked).json["usage"]
    *_, ended, _ = server.stream(PATH, asked).events()
    second = ended["usage"]
    prompt = server.post(f"{PATH}/count_tokens", asked).json["input_tokens"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(first[name] for name in names) == sum(second[name] for name in names) == prompt
    assert first["cache_creation_input_tokens"] > 180
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert second["cache_creation_input_tokens"] == 0


# ---- the official client


@pytest.mark.long  # installs the client in an environment of its own
@pytest.mark.server
def test_the_official_client_works_unmodified():
    """Answers in one piece and as streams, thinking, tools, counts, errors: as anthropic's types say.

    Mutation: any event of `MessagesWriter` without a field that its type has.
    """
    python = python_with("anthropic==2.8.0")
    if isinstance(python, str):
        pytest.skip(python)
    with Scripted(for_clients).listening() as url:
        assert run(python, "messages_check.py", url) == "all is well\n"
