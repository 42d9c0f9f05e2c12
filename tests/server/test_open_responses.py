"""The cases of the Open Responses compliance suite: what is answered is as the specification says, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from .open_responses import check, check_items, check_response
from .scripted import THINKS_AND_CALLS, Script, Scripted

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


ASK = [said("user", "What is the weather in Rome?")]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("Hello you", {"input": ASK}),
    "a string": ("Hello you", {"input": "hi"}),
    "a system prompt": ("Ahoy", {"input": [said("system", "You are a pirate."), *ASK]}),
    "a conversation": ("Alice", {"input": [said("user", "I am Alice."), said("assistant", "Hello!"), *ASK]}),
    "a tool": (CALLS, {"input": ASK, "tools": [WEATHER]}),
    "a tool that says little": ("Hello", {"input": ASK, "tools": [{"type": "function", "name": "f"}]}),
    "a call demanded": (
        '{"city": "Rome"}',
        {"input": ASK, "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    ),
    "tools allowed": (
        "Hello",
        {
            "input": ASK,
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
        },
    ),
    "no tools": ("Hello", {"input": ASK, "tools": [WEATHER], "tool_choice": "none"}),
    "reasoning": (THINKS_AND_CALLS, {"input": ASK, "tools": [WEATHER], "reasoning": {"effort": "low"}}),
    "log-probabilities": ("Hello you", {"input": ASK, "top_logprobs": 2}),
    "a form": ('{"a": 1}', {"input": ASK, "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    "cut off": ("Hello you, it is a fine day", {"input": ASK, "max_output_tokens": 3}),
    "nothing": ("", {"input": ASK}),
    "all that is said again": (
        "Hello",
        {
            "input": ASK,
            "instructions": "Be kind.",
            "temperature": 0.5,
            "top_p": 0.5,
            "presence_penalty": 1,
            "frequency_penalty": -1.5,
            "metadata": {"a": "b"},
            "safety_identifier": "s",
            "user": "me",
            "prompt_cache_key": "k",
            "max_tool_calls": 3,
            "truncation": "auto",
            "store": False,
            "parallel_tool_calls": False,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_as_the_specification_says(name):
    """In one piece and as a stream: every field is there, of its type, and what was asked is said again.

    Mutation: `_response` leaves any field out; `_tool` gives a tool back as it came; `_item` tells encrypted_content.
    """
    text, body = CASES[name]
    app = Scripted(text, reasoning_parser="think")
    answer = app.post(PATH, body)
    assert answer.status == 200, answer.body
    whole = check_response(answer.json)
    streamed = check(app.events(PATH, body))
    assert whole.status == streamed.status == ("incomplete" if name == "cut off" else "completed")
    assert [type(item) for item in whole.output] == [type(item) for item in streamed.output] and whole.output
    if name == "all that is said again":
        told = answer.json
        assert {field: told[field] for field in body if field != "input"} == {
            field: value for field, value in body.items() if field != "input"
        }


def test_turns_that_follow_each_other():
    """By `previous_response_id`, a call and what it returned; the items are told as the specification has them too.

    Mutation: `with_ids` leaves the status out.
    """
    app = Scripted(CALLS, "64 degrees", THINKS_AND_CALLS, reasoning_parser="think")
    first = app.post(PATH, {"input": "Use the tool.", "tools": [WEATHER]}).json
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees and clear"}
    second = app.post(PATH, {"input": [result], "previous_response_id": first["id"]})
    assert check_response(second.json).previous_response_id == first["id"]
    go_on = {"input": [said("developer", "Go on.")], "previous_response_id": second.json["id"], "tools": [WEATHER]}
    third = app.post(PATH, go_on).json
    fourth = app.post(PATH, {"input": "and?", "previous_response_id": third["id"]}).json
    listed = app.request("GET", f"{PATH}/{fourth['id']}/input_items?order=asc&limit=100").json
    kinds = [type(item).__name__ for item in check_items(listed["data"])]
    before = ["Message", "FunctionCall", "FunctionCallOutput", "Message"]
    assert kinds == [*before, "Message", "Reasoning", "Message", "FunctionCall", "FunctionCall", "Message"]


def test_S18_images_and_files_are_refused_by_name():
    """There are no models for them here: a 400 that says which part of which item.

    Mutation: `_text` passes over parts that it does not know.
    """
    text = {"type": "input_text", "text": "What is it?"}
    app = Scripted("Hello")
    for part in (
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
    ):
        for stream in (False, True):
            answer = app.post(PATH, {"input": [said("user", [text, part])], "stream": stream})
            assert answer.status == 400 and answer.error["param"] == "input[0].content[1].type"
            assert answer.error["code"] == "unsupported_parameter" and part["type"] in answer.error["message"]
    assert not app.link.submitted


def test_a_stream_that_fails():
    """Its last event has a whole response too.

    Mutation: `failed` tells the error alone.
    """
    response = check(Scripted(Script("Hello you", fails=True)).events(PATH, {"input": "hi"}))
    assert response.status == "failed" and response.error is not None


def test_the_check_sees_what_is_missing():
    """A check that lets all pass would be none.

    Mutation: a field of `Response` has a default.
    """
    response = Scripted("Hello").post(PATH, {"input": "hi", "tools": [WEATHER]}).json
    for name in response:
        if name == "cache":
            continue
        with pytest.raises(msgspec.ValidationError, match=name):
            check_response({**{key: value for key, value in response.items() if key != name}, **_text(name)})
    for name in ("description", "parameters", "strict"):
        tool = {key: value for key, value in response["tools"][0].items() if key != name}
        with pytest.raises(msgspec.ValidationError, match=name):
            check_response({**response, "tools": [tool]})


def _text(name: str) -> dict[str, Any]:
    """`check_response` looks into the text before anything else."""
    return {"text": {"format": {"type": "text"}, "verbosity": "text"}} if name == "text" else {}
