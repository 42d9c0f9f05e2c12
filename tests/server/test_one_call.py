"""How many calls an answer has, and of which tools: parallel_tool_calls, calls demanded, and choices among some."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood.server.text.answer_parts import AnswerParser, read_tools

from .kit import Running
from .scripted import Scripted, tokens

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TWO = """\
I call
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
and now the other one:
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
That is all."""


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def flat(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA}


def used(name: str) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


def chat(app: Scripted, **more: Any) -> Any:
    answer = app.post(CHAT, {"messages": HI, "tools": [tool("weather"), tool("time")], **more})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]


def streamed(app: Scripted, **more: Any) -> tuple[str, dict[int, list[str]], str | None]:
    """The content of a chat's stream, name and arguments of each call, and the last finish reason."""
    content, found, finish = "", dict[int, list[str]](), None
    for chunk in app.chunks(CHAT, {"messages": HI, "tools": [tool("weather")], **more}):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            found.setdefault(call["index"], []).append(call["function"].get("name", "") + call["function"]["arguments"])
        assert finish is None, "nothing comes after the end"
        finish = choice["finish_reason"]
    return content, found, finish


# ---- at most one


def test_S18_at_most_one_call_of_a_chat():
    """The first call and what is said before the second; from there on nothing is told, and nothing is generated:
    the engine hears that all which was wanted has come. Without the field both calls are there.

    Mutation: `read_tools` is not told how many; `ChatWriter.piece` does not cut; `Generation.cut` does not tell the
    engine.
    """
    app = Scripted(TWO)
    both = chat(app)
    assert len(calls(both["message"])) == 2 and both["message"]["content"].endswith("That is all.")
    assert not app.link.dropped
    answer = app.post(CHAT, {"messages": HI, "tools": [tool("weather")], "parallel_tool_calls": False}).json
    (one,) = answer["choices"]
    assert calls(one["message"]) == [("weather", '{"city": "Rome"}')]
    assert one["message"]["content"].endswith("I calland now the other one:")
    assert one["finish_reason"] == "tool_calls" and one["stop_reason"] is None
    (dropped,) = app.link.dropped
    assert dropped.finished and dropped.numbers == [app.link.submitted[-1].number]
    all_of_it = len(tokens().tokenizer.encode(TWO, add_special_tokens=False).ids)
    assert answer["usage"]["completion_tokens"] < all_of_it - 4
    content, found, finish = streamed(app, parallel_tool_calls=False)
    assert content == one["message"]["content"] and finish == "tool_calls"
    assert {index: "".join(parts) for index, parts in found.items()} == {0: 'weather{"city": "Rome"}'}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_S18_at_most_one_call_of_the_other_apis(path):
    """`parallel_tool_calls` of a response, `disable_parallel_tool_use` of a message: one item or block, closed as it
    should be, in one piece and as events.

    Mutation: `ResponsesWriter.piece` or `MessagesWriter.piece` does not look at `Blocks.full`; `most_calls` says
    `MAX_CALLS`.
    """
    app = Scripted(TWO)
    if path == RESPONSES:
        asked = {"input": "hi", "tools": [flat("weather")], "parallel_tool_calls": False}
        of_one = ("function_call", "output")
    else:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        asked = {"messages": HI, "max_tokens": 500, "tools": [used("weather")], "tool_choice": choice}
        of_one = ("tool_use", "content")
    whole = app.post(path, asked).json
    kinds = [each["type"] for each in whole[of_one[1]]]
    assert kinds.count(of_one[0]) == 1 and kinds[-1] in ("message", "text"), "what is said before the second call"
    assert app.link.dropped[-1].finished
    events = app.events(path, asked)
    if path == RESPONSES:
        assert whole["status"] == "completed" and events[-1][0] == "response.completed"
        told = events[-1][1]["response"]["output"]
    else:
        assert whole["stop_reason"] == "tool_use"
        assert [name for name, _ in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
        assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
        told = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [each["type"] for each in told] == kinds
    many = {**asked, "parallel_tool_calls": True, "tool_choice": {"type": "auto"} if path == MESSAGES else "auto"}
    assert [each["type"] for each in app.post(path, many).json[of_one[1]]].count(of_one[0]) == 2


def test_what_comes_behind_the_first_call_in_one_piece_is_not_told():
    """A client that is behind gets many tokens as one: it is cut where the second call begins, also if the text ends in
    the same piece.

    Mutation: `_counted` keeps the parts behind the one that is too many; `finish` of `AnswerParser` forgets `full`.
    """
    tools = read_tools([tool("weather")], None, "hermes", 1)
    for sizes in (1, 7, 10_000):
        spoken = AnswerParser(tools, None)
        parts = [part for at in range(0, len(TWO), sizes) for part in spoken.push(TWO[at : at + sizes])]
        parts += spoken.finish()
        assert spoken.full and spoken.calls == 1
        assert "".join(getattr(part, "text", "") for part in parts).endswith('{"city": "Rome"}and now the other one:')


def test_one_demanded_call_is_held_to_by_the_grammar():
    """`required` with parallel calls off: the array has one, in each API's words; by default it may have many.

    Mutation: `forced_schema` does not look at `most`.
    """
    app = Scripted('[{"name": "weather", "parameters": {"city": "Rome"}}]')
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HI, "tools": [tool("weather")], "tool_choice": "required", "parallel_tool_calls": False}),
        (
            *(RESPONSES,),
            {"input": "hi", "tools": [flat("weather")], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            *(MESSAGES,),
            {
                "messages": HI,
                "max_tokens": 50,
                "tools": [used("weather")],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ),
    ]
    for path, body in asked:
        assert app.post(path, body).status == 200
        schema = json.loads(app.link.submitted[-1].grammar.text)
        assert (schema["minItems"], schema["maxItems"]) == (1, 1), path
    assert app.post(CHAT, {**asked[0][1], "parallel_tool_calls": True}).status == 200
    assert json.loads(app.link.submitted[-1].grammar.text)["maxItems"] > 100


@pytest.mark.server
@pytest.mark.xdist_group("http")
def test_one_demanded_call_from_an_engine(server: Running):
    """An engine that says anything it may: with `required`, many answers have several calls, and none where only one is
    wanted.

    Mutation: `read_tools` passes no `most` to `forced_schema`.
    """
    place = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": place}}]
    body = {"messages": HI, "tools": tools, "tool_choice": "required", "max_tokens": 400, "n": 12, "seed": 3}
    counts = {}
    for parallel in (True, False):
        told = server.post(CHAT, {**body, "parallel_tool_calls": parallel})
        assert told.status == 200, told.body
        found = [choice["message"].get("tool_calls", []) for choice in told.json["choices"]]
        counts[parallel] = max(map(len, found))
    assert counts[True] > 1 and counts[False] == 1


# ---- demanded beside a form


def test_a_demanded_call_comes_beside_a_form_of_the_answer():
    """The form is one of content: the call's own schema holds. A form that is none is wrong all the same.

    Mutation: `Parameters.grammar` returns the form; it does not check it.
    """
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "of content"}}}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        text = '{"city": "Rome"}' if choice != "required" else '[{"name": "weather", "parameters": {"city": "Rome"}}]'
        app = Scripted(text)
        told = chat(app, tool_choice=choice, response_format=form)
        assert calls(told["message"]) == [("weather", '{"city": "Rome"}')] and told["message"]["content"] is None
        assert "of content" not in app.link.submitted[-1].grammar.text
        body = {"messages": HI, "tools": [tool("weather")], "tool_choice": choice, "regex": "a" * 100_000}
        refused = app.post(CHAT, body)
        assert refused.status == 400 and refused.error["param"] == "regex"
    app = Scripted("{}")
    chat(app, response_format=form)
    assert "of content" in app.link.submitted[-1].grammar.text, "calls that may be made are no reason to drop it"
    messages = {
        "messages": HI,
        "max_tokens": 50,
        "tools": [used("weather")],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": {"title": "of content"}}},
    }
    assert app.post(MESSAGES, messages).status == 200
    assert "of content" not in app.link.submitted[-1].grammar.text


# ---- some of the tools


NESTED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("time")]}}
FLAT = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}


@pytest.mark.parametrize("choice", [NESTED, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_S18_some_tools_are_allowed(path, choice):
    """The model is told of these alone, and a call of another, which it may remember, is none. Both ways to say it are
    read alike.

    Mutation: `read_tools` shows all tools; it makes a parser without names; `_allowed` reads one form.
    """
    app = Scripted('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    given = {"input": "hi", "tools": [flat("weather"), flat("time")]}
    if path == CHAT:
        given = {"messages": HI, "tools": [tool("weather"), tool("time")]}
    told = app.post(path, {**given, "tool_choice": choice})
    assert told.status == 200, told.body
    assert '"time"' in app.prompt and '"weather"' not in app.prompt
    assert app.link.submitted[-1].grammar is None
    assert not any(f'"{word}"' in json.dumps(told.json) for word in ("tool_calls", "function_call"))
    app = Scripted('<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>')
    told = app.post(path, {**given, "tool_choice": choice}).json
    if path == CHAT:
        assert calls(told["choices"][0]["message"]) == [("time", '{"city": "Rome"}')]
    else:
        assert [item["type"] for item in told["output"]] == ["function_call"]


def test_one_of_some_tools_is_demanded():
    """Its grammar knows the others not.

    Mutation: `forced_schema` is given all tools.
    """
    app = Scripted('[{"name": "time", "parameters": {"city": "Rome"}}]')
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("time")]}}
    told = chat(app, tool_choice=choice)
    assert calls(told["message"]) == [("time", '{"city": "Rome"}')] and told["finish_reason"] == "tool_calls"
    grammar = app.link.submitted[-1].grammar.text
    assert '"time"' in grammar and '"weather"' not in grammar
