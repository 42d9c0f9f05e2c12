"""Answers of a demanded form, and tool calls, over HTTP."""

from __future__ import annotations

import json
import re

import pytest

from .kit import Running

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("http")]

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["oak", "ash"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "plant",
        "description": "Plant a tree.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["oak", "ash"]}, "count": {"enum": [1, 2]}},
            "required": ["kind", "count"],
            "additionalProperties": False,
        },
    },
}


def ask(server: Running, **more):
    return server.post(CHAT, {"messages": [{"role": "user", "content": "a tree"}], "max_tokens": 3000, **more})


@pytest.mark.parametrize(
    "more, right",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "tree", "schema": SCHEMA}}},
            lambda text: json.loads(text)["name"] in ("oak", "ash") and 1 <= json.loads(text)["age"] <= 99,
        ),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"guided_choice": ["left", "right"]}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"grammar": 'start: "x" ("y")? "z"'}}, lambda text: text in ("xz", "xyz")),
    ],
)
def test_the_answer_has_the_form(server: Running, more, right):
    """Whatever the model would like to say, in one piece and as a stream, for each of several samples.

    Mutation: `begin` is not given the grammar; `masks` fills the wrong rows.
    """
    for seed in range(3):
        told = ask(server, seed=seed, n=2, **more)
        assert told.status == 200, told.body
        for choice in told.json["choices"]:
            assert right(choice["message"]["content"]), choice
            assert choice["finish_reason"] == "stop"
    stream = server.stream(CHAT, {"messages": [{"role": "user", "content": "a tree"}], "max_tokens": 3000, **more})
    assert right(stream.text())


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": "(a"}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a"], "regex": "b"}},
        {"structured_outputs": {"regex": "a" * 70000}},
    ],
)
def test_a_form_that_is_none(server: Running, more):
    """A 400 that says why, also where only the engine can know; and the next request is served.

    Mutation: `_compiled` drops errors; a refusal of the engine is a 500.
    """
    refused = ask(server, **more)
    assert refused.status == 400 and refused.error["message"], refused.body
    assert ask(server, max_tokens=2).status == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plant"}}])
def test_calls_that_are_demanded(server: Running, choice):
    """`required` and a named function: the call is there, with arguments of its schema; streamed, the pieces make the
    same.

    Mutation: `read_tools` makes no grammar; `_delta` loses pieces of arguments.
    """
    told = ask(server, tools=[TOOL], tool_choice=choice, seed=5)
    assert told.status == 200, told.body
    (choice_,) = told.json["choices"]
    for call in choice_["message"]["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] == "plant" and call["id"].startswith("call_")
        assert set(json.loads(call["function"]["arguments"])) == {"kind", "count"}
    assert choice_["message"]["content"] is None
    assert choice_["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    stream = server.stream(
        CHAT,
        {
            "messages": [{"role": "user", "content": "a tree"}],
            "tools": [TOOL],
            "tool_choice": choice,
            "seed": 5,
            "max_tokens": 3000,
        },
    )
    names, arguments = {}, {}
    for event in stream.events():
        for delta in event["choices"][0]["delta"].get("tool_calls", []) if event != "[DONE]" else []:
            if "id" in delta:
                names[delta["index"]] = delta["function"]["name"]
            arguments[delta["index"]] = arguments.get(delta["index"], "") + delta["function"]["arguments"]
    assert names and set(names.values()) == {"plant"}
    assert all(json.loads(text)["kind"] in ("oak", "ash") for text in arguments.values())


def test_tools_that_may_be_called(server: Running):
    """With `auto`, an answer without a call is an answer; the model is told of the tools.

    Mutation: `with_tools_in_system_prompt` is not called.
    """
    plain = ask(server, max_tokens=3).json["usage"]["prompt_tokens"]
    told = ask(server, max_tokens=3, tools=[TOOL])
    assert told.json["choices"][0]["message"]["content"] and told.json["usage"]["prompt_tokens"] > plain + 50
    none = ask(server, max_tokens=3, tools=[TOOL], tool_choice="none")
    assert none.json["usage"]["prompt_tokens"] == plain
    assert ask(server, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "cut"}}).status == 400
