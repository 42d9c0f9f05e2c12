"""OpenAI's Responses API: events, items, responses that follow others, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from sapwood.server.api.response_store import ResponseStore, StoredResponse

from .scripted import THINKS_AND_CALLS, Script, Scripted, for_clients
from .venvs import python_with, run

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}


def made(app: Scripted, key: str | None = None, **body: Any) -> dict[str, Any]:
    answer = app.post(PATH, {"input": "hi", **body}, key)
    assert answer.status == 200, answer.body
    return answer.json


def kinds(events: list[tuple[str, Any]]) -> list[str]:
    """Their types, repeated ones once."""
    assert all(name == data["type"] for name, data in events)
    return [name.removeprefix("response.") for name, _ in itertools.groupby(name for name, _ in events)]


def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is new every time."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


# ---- the answer


def test_a_text_is_told_event_by_event():
    """A client that adds up the deltas has the text that each later event tells whole, and no number is left out.

    Mutation: `_event` does not count; `BlockOpened` carries the block with its first text.
    """
    events = Scripted("Hello you, it is a fine day").events(PATH, {"input": "hi"})
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds(events) == [*begins, "output_text.delta", *ends]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    deltas = [data["delta"] for name, data in events if name == "response.output_text.delta"]
    assert len(deltas) == 8 and "".join(deltas) == "Hello you, it is a fine day"
    created, _, added, part, *_, text_done, part_done, item_done, completed = [data for _, data in events]
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert added["item"]["content"] == [] and part["part"]["text"] == ""
    assert text_done["text"] == part_done["part"]["text"] == "Hello you, it is a fine day"
    assert completed["response"]["output"] == [item_done["item"]]
    assert completed["response"]["id"] == created["response"]["id"]
    assert item_done["item"]["id"] == added["item"]["id"] == text_done["item_id"]


def test_reasoning_and_calls_are_items_of_their_own():
    """One text of the model becomes four items, each opened and closed before the next, and together they are what the
    answer in one piece has.

    Mutation: `Blocks.take` does not close the block before it opens another.
    """
    app = Scripted(THINKS_AND_CALLS, reasoning_parser="think")
    events = app.events(PATH, {"input": "hi", "tools": [TOOL]})
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    thought, text = (
        [*item[0], f"{kind}.delta", f"{kind}.done", *item[1]] for kind in ("reasoning_text", "output_text")
    )
    assert kinds(events) == ["created", "in_progress", *thought, *text, *call, *call, "completed"]
    response = events[-1][1]["response"]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert response["output"] == done
    places = [data["output_index"] for _, data in events if "output_index" in data]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert [json.loads(item["arguments"])["city"] for item in done[2:]] == ["Rome", "Oslo"]
    assert len({item["call_id"] for item in done[2:]}) == len({item["id"] for item in done}) // 2 == 2
    whole = made(app, tools=[TOOL])
    assert plain(whole["output"]) == plain(done) and whole["usage"] == response["usage"]
    assert 3 <= whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"] // 2


def test_a_mistral_model_gets_ids_that_its_template_takes_back():
    """Nine letters and digits.

    Mutation: `Blocks` calls `call_id` without the parser.
    """
    app = Scripted('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', parser="mistral")
    (call,) = made(app, tools=[TOOL])["output"]
    assert len(call["call_id"]) == 9 and call["call_id"].isalnum()


def test_an_answer_that_is_cut_off_says_so():
    """The response, its last item and the last event are incomplete, and the items before are not.

    Mutation: `_status_of` calls every item of an incomplete response incomplete.
    """
    app = Scripted(THINKS_AND_CALLS, reasoning_parser="think")
    asked = {"input": "hi", "tools": [TOOL], "max_output_tokens": 30}
    name, last = app.events(PATH, asked)[-1]
    response = last["response"]
    assert name == "response.incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["usage"]["output_tokens"] == 30


def test_a_call_that_was_cut_off_is_no_part_of_what_follows():
    """Its arguments are no JSON, and nobody can answer it: the next response goes on without it.

    Mutation: `_over` keeps every item.
    """
    app = Scripted(THINKS_AND_CALLS, "Hello", reasoning_parser="think")
    first = made(app, tools=[TOOL], max_output_tokens=30)
    assert first["output"][-1]["type"] == "function_call"
    made(app, previous_response_id=first["id"], input="go on")
    assert "(let me see)I call<|im_end|>" in app.prompt and "weather" not in app.prompt


def test_an_answer_without_a_word_is_an_empty_message():
    """So that whoever reads the output finds one, and the next turn has two sides.

    Mutation: `ResponsesWriter.piece` adds no text where no block is.
    """
    app = Scripted("", "Hello")
    first = made(app)
    assert [item["content"][0]["text"] for item in first["output"]] == [""]
    made(app, previous_response_id=first["id"], input="well?")
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nwell?" in app.prompt


def test_a_stream_that_breaks_ends_with_an_event_that_says_why():
    """What was said stays said; nothing is kept of it.

    Mutation: `failed` calls `_over`.
    """
    app = Scripted(Script("Hello you", fails=True))
    events = app.events(PATH, {"input": "hi"})
    name, last = events[-1]
    assert name == "response.failed" and last["sequence_number"] == len(events) - 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "a step broke"}
    assert app.request("GET", f"{PATH}/{last['response']['id']}").status == 404
    assert app.post(PATH, {"input": "hi"}).status == 500


def test_log_probabilities_go_with_the_text():
    """Each token of the message has its own, in the deltas and at the end; reasoning and the marks of calls have none.

    Mutation: `_score` does not forget what waited when a block is closed.
    """
    app = Scripted(THINKS_AND_CALLS, reasoning_parser="think")
    events = app.events(PATH, {"input": "hi", "tools": [TOOL], "top_logprobs": 2})
    deltas = [data for name, data in events if name == "response.output_text.delta"]
    told = [each for delta in deltas for each in delta["logprobs"]]
    assert [each["token"] for each in told] == ["I", " call"] == [delta["delta"] for delta in deltas]
    assert [len(each["top_logprobs"]) for each in told] == [2, 2]
    assert events[-1][1]["response"]["output"][1]["content"][0]["logprobs"] == told
    assert made(app)["output"][1]["content"][0]["logprobs"] == []
    assert len(made(app, include=["message.output_text.logprobs"])["output"][1]["content"][0]["logprobs"]) > 2


# ---- what the model is shown


def test_items_become_the_turns_of_a_chat():
    """Reasoning, words and calls of one turn are one message of the model, with what the tool returned after it.

    Mutation: `_turn` begins a message for every item.
    """
    app = Scripted("Hello")
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "call_2", "arguments": ""},
        RESULT,
        {**RESULT, "call_id": "call_2", "output": [{"type": "input_text", "text": "rainy"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "secret"},
        {"role": "user", "content": "thanks"},
    ]
    made(app, input=items, instructions="Be kind.", reasoning={"effort": "low", "summary": "auto"})
    assert app.prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nweather?<|im_end|>\n"
        '<|im_start|>assistant\n(hm)I look.[weather {"city": "Rome"}][weather {}]<|im_end|>\n'
        "<|im_start|>tool weather\nsunny<|im_end|>\n"
        "<|im_start|>tool weather\nrainy<|im_end|>\n"
        "<|im_start|>user\nthanks<|im_end|>\n"
        "<|im_start|>assistant\n/effort low"
    )


def test_a_template_that_knows_developers_is_told_of_them():
    """Elsewhere they are the system: most templates pass over a role that they do not know.

    Mutation: `prompt_of` makes every developer a system.
    """
    app = Scripted("Hello", template="{% for m in messages %}{{ m.role }};{% endfor %}{# developer #}")
    made(app, input=[{"role": "developer", "content": "Be brief."}])
    assert app.prompt == "developer;"


def test_tools_are_shown_as_a_chat_shows_them():
    """The same tools in a chat and here make the same prompt, which the cache then has.

    Mutation: `chat_tools` passes tools on as they are.
    """
    app = Scripted("Hello")
    made(app, tools=[{**TOOL, "strict": None}])
    here = app.prompt
    function = {name: TOOL[name] for name in ("name", "parameters")}
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
    assert app.post("/v1/chat/completions", chat).status == 200
    assert app.prompt == here and "weather" in here


def test_parameters_reach_the_engine():
    """Sampling, the salt, the priority, the form of the text; and what the cache served is told.

    Mutation: `responses` passes `max_tokens` instead of `max_output_tokens`.
    """
    app = Scripted(Script("Hello", cached=16))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " * 3
    told = made(
        app,
        input=words,
        max_output_tokens=7,
        temperature=0.25,
        top_p=0.5,
        seed=3,
        cache_salt="tenant",
        priority=2,
        text={"format": form},
        cache_report=True,
        metadata={"a": "b"},
    )
    params, submit = app.params, app.link.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (7, 0.25, 0.5, 3)
    assert (params.cache_salt, params.priority) == ("tenant", 2)
    assert submit.grammar is not None and json.loads(submit.grammar.text) == schema
    assert told["text"]["format"] == {"description": None, **form}
    assert told["metadata"] == {"a": "b"} and told["temperature"] == 0.25
    usage = told["usage"]["input_tokens_details"]
    assert usage["cached_tokens"] == told["cache"]["cached_tokens"] == 16
    assert usage["cache_write_tokens"] == told["usage"]["input_tokens"] // 16 * 16 - 16 > 0
    assert made(app, input=words, cache_prompt=False)["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


def test_a_demanded_call_is_held_to_its_schema():
    """By name, and any; beside a form of the text too, which is one of content.

    Mutation: `chat_choice` passes the choice on as it is; `Parameters.grammar` returns the form.
    """
    app = Scripted('{"city": "Rome"}')
    (call,) = made(app, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})["output"]
    assert call["name"] == "weather" and call["arguments"] == '{"city": "Rome"}'
    grammar = app.link.submitted[-1].grammar
    assert grammar is not None and json.loads(grammar.text) == TOOL["parameters"]
    body = {"input": "hi", "tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    assert app.post(PATH, body).status == 200
    assert json.loads(app.link.submitted[-1].grammar.text)["type"] == "array"


# ---- responses that follow others


def test_a_response_follows_another():
    """Its prompt has all that was said, in order, and the instructions of its own request alone.

    Mutation: `_keep` keeps the turns without what was said.
    """
    app = Scripted("one", "two", "three")
    first = made(app, input="a", instructions="Be kind.")
    second = made(app, input="b", previous_response_id=first["id"])
    third = made(app, input="c", previous_response_id=second["id"], instructions="Be brief.")
    assert third["previous_response_id"] == second["id"]
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"), ("user", "c")]
    said = [("system", "Be brief."), *turns]
    assert app.prompt == "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + (
        "<|im_start|>assistant\n"
    )
    made(app, input="d", previous_response_id=first["id"])
    assert "two" not in app.prompt and "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nd" in app.prompt


def test_calls_are_answered_in_a_response_that_follows():
    """The function's answer alone is sent; the call is remembered.

    Mutation: `item_messages` is given what is new alone.
    """
    app = Scripted(THINKS_AND_CALLS, "It is sunny.", reasoning_parser="think")
    first = made(app, tools=[TOOL])
    outputs = [{**RESULT, "call_id": item["call_id"]} for item in first["output"][2:]]
    made(app, input=outputs, previous_response_id=first["id"], tools=[TOOL])
    assert '(let me see)I call[weather {"city": "Rome"}][weather {"city": "Oslo"}]<|im_end|>' in app.prompt
    assert app.prompt.count("<|im_start|>tool weather\nsunny<|im_end|>") == 2


def test_a_kept_response_is_read_and_deleted():
    """As it was answered; after that it is unknown, and what follows it is whole.

    Mutation: `ResponseStore.delete` does not take it out.
    """
    app = Scripted("one", "two")
    first = made(app)
    second = made(app, previous_response_id=first["id"])
    path = f"{PATH}/{first['id']}"
    assert app.request("GET", path).json == first
    assert app.request("GET", f"{path}?stream=true").error["param"] == "stream"
    assert app.request("DELETE", path).json == {"id": first["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        answer = app.request(method, path)
        assert answer.status == 404 and answer.error["code"] == "response_not_found"
    made(app, previous_response_id=second["id"])
    assert app.prompt.count("one") == 1


def test_what_is_not_kept_is_unknown():
    """An id that never was, and one of a response that was not to be kept.

    Mutation: `store` is not looked at.
    """
    app = Scripted("Hello")
    first = made(app, store=False)
    assert first["store"] is False
    for id in (first["id"], "resp_none"):
        answer = app.post(PATH, {"input": "hi", "previous_response_id": id})
        assert answer.status == 404 and answer.error["param"] == "previous_response_id"


def test_a_response_belongs_to_the_key_that_made_it():
    """For another key it is not there, neither to be read nor deleted nor followed.

    Mutation: `ResponseStore.get` does not look at the owner.
    """
    app = Scripted("Hello", api_key=("one", "two"))
    first = made(app, key="one")
    path = f"{PATH}/{first['id']}"
    assert app.request("GET", path, key="two").status == 404
    assert app.request("DELETE", path, key="two").status == 404
    assert app.post(PATH, {"input": "hi", "previous_response_id": first["id"]}, "two").status == 404
    assert app.request("GET", path, key="one").status == 200


def test_the_store_is_bounded():
    """By number and by bytes; what was used last stays longest, and what is too large for all of it is not kept.

    Mutation: `ResponseStore.get` does not move what it finds to the end.
    """
    store = ResponseStore(most=3, most_bytes=1000)
    for name in "abc":
        store.put(name, StoredResponse(None, b"x" * 100, (b"y" * 50,)))
    assert store.get("a", None) is not None and store.bytes == 450
    store.put("d", StoredResponse(None, b"", ()))
    assert [name for name in "abcd" if store.get(name, None)] == ["a", "c", "d"]
    store.put("e", StoredResponse(None, b"x" * 900, ()))
    assert [name for name in "acde" if store.get(name, None)] == ["d", "e"] and store.bytes == 900
    store.put("f", StoredResponse(None, b"x" * 1001, ()))
    assert store.get("f", None) is None and len(store) == 2
    assert store.delete("e", None) and store.bytes == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_tool_calls": -1}, "max_tool_calls"),
        ({"safety_identifier": 5}, "safety_identifier"),
        ({"user": "u" * 513}, "user"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": "x " * 3000}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [CALL, {**RESULT, "output": 5}]}, "input[1].output"),
        ({"input": [{**CALL, "arguments": '{"a": '}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_answer_is_refused_by_name(body, param):
    """With a 400 that names the field as the request has it, and nothing is computed.

    Mutation: `in_words_of` changes nothing; a line of `RESPONSES` is missing.
    """
    app = Scripted("Hello")
    answer = app.post(PATH, {"input": "hi", **body})
    assert answer.status == 400 and answer.error["param"] == param, answer.body
    assert not app.link.submitted


def test_what_changes_nothing_is_taken():
    """Fields that clients send by habit, and those that nobody knows.

    Mutation: `INCLUDED` without reasoning.encrypted_content.
    """
    told = made(
        Scripted("Hello"),
        user="me",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=False,
        truncation="disabled",
        background=False,
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        max_tool_calls=3,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        whatever={"a": [1]},
    )
    assert told["status"] == "completed" and told["parallel_tool_calls"] is False


# ---- over HTTP, with a scheduler and a cache


@pytest.mark.server
@pytest.mark.xdist_group("http")
def test_a_response_that_follows_is_served_from_the_cache(server):
    """The conversation before it was computed once: its pages are read, and the end of the stream says so.

    Mutation: `responses` puts what is new before what was said.
    """
    words = "one two three four five six seven eight nine ten " * 20
    first = server.post(PATH, {"input": words, "max_output_tokens": 40}).json
    before = first["usage"]["input_tokens"]
    assert first["status"] == "incomplete" and first["usage"]["output_tokens"] == 40 and before > 200
    stream = server.stream(PATH, {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 4})
    *_, last = stream.events()
    assert last["type"] == "response.incomplete"
    usage = last["response"]["usage"]
    assert usage["input_tokens"] > before and usage["output_tokens"] == 4
    assert usage["input_tokens_details"]["cached_tokens"] >= before // 16 * 16


# ---- the official client


@pytest.mark.long  # installs the client in an environment of its own
@pytest.mark.server
def test_the_official_client_works_unmodified():
    """Answers in one piece and as streams, calls, responses that follow others, errors: as openai's types say.

    Mutation: any event of `ResponsesWriter` without a field that its type has.
    """
    python = python_with("openai==3.49.0")
    if isinstance(python, str):
        pytest.skip(python)
    with Scripted(for_clients, reasoning_parser="think").listening() as url:
        assert run(python, "responses_check.py", url) == "all is well\n"
