"""What can be asked of a response that is kept, and what a request would be: input items, tokens, cancelling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood.server.api.response_store import ResponseStore

from .scripted import TEMPLATE, THINKS_AND_CALLS, Scripted

PATH = "/v1/responses"
TOKENS = f"{PATH}/input_tokens"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}


def made(app: Scripted, key: str | None = None, **body: Any) -> dict[str, Any]:
    answer = app.post(PATH, {"input": "hi", **body}, key)
    assert answer.status == 200, answer.body
    return answer.json


def listed(app: Scripted, response: dict[str, Any], query: str = "order=asc", key: str | None = None) -> dict[str, Any]:
    answer = app.request("GET", f"{PATH}/{response['id']}/input_items?{query}", key=key)
    assert answer.status == 200, answer.body
    return answer.json


# ---- input items


def test_input_items_are_what_the_model_was_given():
    """Items as they were sent, with ids, and with what was said before; not the answer, not the instructions.

    Mutation: `input_items` tells all turns; `_keep` keeps what was sent as it came.
    """
    app = Scripted("one", THINKS_AND_CALLS, "three", reasoning_parser="think")
    first = made(app, input="a", instructions="Be kind.")
    told = listed(app, first)
    (item,) = told["data"]
    assert item["content"] == [{"type": "input_text", "text": "a"}] and item["role"] == "user"
    assert (item["type"], item["status"]) == ("message", "completed") and item["id"].startswith("msg_")
    assert told == {"object": "list", "data": [item], "first_id": item["id"], "last_id": item["id"], "has_more": False}
    second = made(app, previous_response_id=first["id"], input=[{"role": "developer", "content": "b"}], tools=[TOOL])
    third = made(app, previous_response_id=second["id"], input=[{"role": "user", "content": [], "id": "mine"}])
    items = listed(app, third)["data"]
    assert items[0] == item and items[-1]["id"] == "mine" and items[-1]["content"] == []
    assert [each["type"] for each in items] == [
        *("message", "message", "message", "reasoning", "message", "function_call", "function_call", "message"),
    ]
    assert items[1] == first["output"][0] and items[3:7] == second["output"]
    assert listed(app, third)["data"] == items, "the same ids every time"


def test_items_of_every_kind_have_an_id():
    """Also calls, their results and reasoning; one that a client gives is kept, one that is none is not.

    Mutation: `_whole` trusts whatever id comes.
    """
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "I look.", "id": 5},
        {**CALL, "id": "fc_mine", "status": "incomplete"},
        {**RESULT, "id": ""},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sunny."}], "id": "x" * 513},
    ]
    app = Scripted("Hello")
    told = listed(app, made(app, input=items, store=True))["data"]
    assert [item["id"].partition("_")[0] for item in told] == ["rs", "msg", "fc", "fco", "msg"]
    assert told[2] == items[2] and told[3]["output"] == "sunny" and told[0]["summary"] == []
    text = {"type": "output_text", "annotations": [], "logprobs": []}
    assert told[1]["content"] == [{**text, "text": "I look."}] and told[4]["content"] == [{**text, "text": "Sunny."}]


def test_pages_of_input_items():
    """As OpenAI's: the newest first unless `order` says otherwise, 20 unless `limit` does, from behind an item on. All
    pages together are the list, also where an item was sent twice.

    Mutation: `page` begins at the item that `after` names; `_unique` changes nothing; the default is asc.
    """
    app = Scripted("Hello")
    sent = [{"role": "user", "content": str(at), "id": f"item_{min(at, 40)}"} for at in range(45)]
    response = made(app, input=sent)
    whole = listed(app, response, "order=asc&limit=100")["data"]
    assert [item["content"][0]["text"] for item in whole] == [str(at) for at in range(45)]
    assert len({item["id"] for item in whole}) == 45
    newest = listed(app, response, "")
    assert newest["data"] == whole[:24:-1] and newest["has_more"] is True
    assert (newest["first_id"], newest["last_id"]) == (whole[44]["id"], whole[25]["id"])
    for order in ("asc", "desc"):
        found: list[Any] = []
        after = ""
        while True:
            told = listed(app, response, f"order={order}&limit=7{after}")
            assert len(told["data"]) <= 7
            found += told["data"]
            after = f"&after={told['last_id']}"
            if not told["has_more"]:
                break
        assert found == (whole if order == "asc" else whole[::-1])
    end = listed(app, response, f"order=asc&after={whole[-1]['id']}")
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert listed(app, response, "include[]=message.output_text.logprobs&include=reasoning.encrypted_content")["data"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *((f"limit={limit}", "limit") for limit in ("0", "-1", "101", "x", "", "1e1", "99999999999")),
        *((f"order={order}", "order") for order in ("up", "", "ASC")),
        ("after=nothing", "after"),
        ("before=item_1", "before"),
        ("include=file_search_call.results", "include"),
        ("&".join(["a=1"] * 17), "include"),
    ],
)
def test_S18_what_is_wrong_with_a_page_is_named(query, param):
    """With a 400.

    Mutation: `page` takes what it does not know for the default.
    """
    app = Scripted("Hello")
    answer = app.request("GET", f"{PATH}/{made(app)['id']}/input_items?{query}")
    assert answer.status == 400 and answer.error["param"] == param, answer.body


def test_input_items_belong_to_their_key_and_go_with_their_response():
    """Nobody else reads them, and nobody at all once the response is deleted, or was not kept.

    Mutation: `_kept` asks for a response of anybody.
    """
    app = Scripted("Hello", api_key=("one", "two"))
    response, unkept = made(app, key="one"), made(app, key="one", store=False)
    path = f"{PATH}/{response['id']}"
    assert listed(app, response, key="one")["data"]
    app.request("DELETE", f"{path}/input_items", key="one")
    for id, key in ((response["id"], "two"), (unkept["id"], "one"), ("resp_none", "one"), ("x" * 2000, "one")):
        for method, end in (("GET", "input_items"), ("POST", "cancel")):
            answer = app.request(method, f"{PATH}/{id}/{end}", key=key)
            assert answer.status == 404 and answer.error["code"] == "response_not_found"
    assert app.request("DELETE", path, key="one").status == 200
    assert app.request("GET", f"{path}/input_items", key="one").status == 404


def test_input_items_count_in_the_bounds_of_the_store():
    """What was sent is counted as it is kept: a response whose input is too large is not kept at all.

    Mutation: `StoredResponse.size` counts the body alone.
    """
    app = Scripted("Hello")
    store = app.serving.responses = ResponseStore(most=10, most_bytes=20_000)
    small = made(app, input="x" * 100)
    user, kept = {"role": "user", "content": "x " * 300}, store.bytes
    assert kept > len(json.dumps(listed(app, small)["data"]))
    large = made(app, input=[user] * 40 + [{"role": "user", "content": "x"}], truncation="auto")
    for response, status in ((large, 404), (small, 200)):
        assert app.request("GET", f"{PATH}/{response['id']}/input_items").status == status
    assert store.bytes == kept
    for _ in range(20):
        made(app, input="x " * 1000, max_output_tokens=2)
    assert store.bytes <= 20_000 and app.request("GET", f"{PATH}/{small['id']}/input_items").status == 404


# ---- cancelling


def test_S18_nothing_runs_in_the_background_to_be_cancelled():
    """A response that is there cannot be: a 400 that says why.

    Mutation: `cancel_response` answers with the response.
    """
    app = Scripted("Hello")
    response = made(app)
    answer = app.post(f"{PATH}/{response['id']}/cancel", {})
    assert answer.status == 400 and answer.error["param"] == "background"
    assert app.request("GET", f"{PATH}/{response['id']}/cancel").status == 405
    assert app.post(PATH, {"input": "hi", "background": True}).error["param"] == "background"


# ---- tokens


def test_tokens_are_those_that_a_response_would_have():
    """Input, instructions, tools, effort, and responses before; nothing is computed and nothing kept.

    Mutation: `input_tokens` leaves the tools out; it keeps a response.
    """
    app = Scripted("Hello")
    first = made(app, input="one two three")
    for body in (
        {"input": "hi"},
        {"input": [{"role": "user", "content": "hi"}, CALL, RESULT], "instructions": "Be kind.", "tools": [TOOL]},
        {"input": "hi", "tools": [TOOL], "tool_choice": "none"},
        {"input": "hi", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"input": "hi", "reasoning": {"effort": "high"}, "text": {"verbosity": "medium"}},
        {"input": "hi", "previous_response_id": first["id"], "max_output_tokens": 5, "model": "scripted"},
        {"input": "word " * 3000, "truncation": "auto"} | {"input": [{"role": "user", "content": "word " * 900}] * 3},
    ):
        count = len(app.link.submitted)
        answer = app.post(TOKENS, body)
        assert answer.status == 200, answer.body
        assert len(app.link.submitted) == count and len(app.serving.responses) == 1
        usage = made(app, **{**body, "store": False})["usage"]
        assert answer.json == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert app.post(TOKENS, {"instructions": "Be kind."}).json["input_tokens"] > 0
    assert app.post(TOKENS, {"previous_response_id": first["id"]}).json["input_tokens"] > 5


def test_tokens_of_more_than_the_context():
    """They are counted all the same, up to two contexts: that is what somebody asks for who wants to know.

    Mutation: `input_tokens` refuses what `begin` would.
    """
    app = Scripted("Hello")
    assert 2500 < app.post(TOKENS, {"input": "word " * 2500}).json["input_tokens"] < 3000
    assert app.post(TOKENS, {"input": "word " * 200_000}).error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "truncation": "middle"}, "truncation"),
        ({"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "hi", "previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
def test_S18_what_a_count_cannot_be_of_is_refused(body, param):
    """As a response would be.

    Mutation: `input_tokens` does not call `check`.
    """
    answer = Scripted("Hello").post(TOKENS, body)
    assert answer.status in (400, 404) and answer.error["param"] == param, answer.body


def test_a_response_of_the_name_input_tokens():
    """The path is for counting: a response of that name is none.

    Mutation: the path of one response comes first.
    """
    app = Scripted("Hello")
    for method in ("GET", "DELETE"):
        answer = app.request(method, TOKENS)
        assert answer.status == 405 and answer.headers["allow"] == "POST"


# ---- verbosity


def test_verbosity_goes_to_a_template_that_knows_it():
    """And is told again; elsewhere there is one, which is the model's own.

    Mutation: `_given` tells the template nothing of it.
    """
    app = Scripted("Hello", template=TEMPLATE + "{% if verbosity %}/{{ verbosity }}{% endif %}")
    told = made(app, text={"verbosity": "low"})
    assert app.prompt.endswith("/low") and told["text"]["verbosity"] == "low"
    made(app, text={"verbosity": "low"}, chat_template_kwargs={"verbosity": "high"})
    assert app.prompt.endswith("/high")
    assert made(app)["text"]["verbosity"] == "medium" and not app.prompt.endswith("/medium")
    plain = Scripted("Hello")
    assert made(plain, text={"verbosity": "medium"})["text"]["verbosity"] == "medium"
    answer = plain.post(PATH, {"input": "hi", "text": {"verbosity": "high"}})
    assert answer.status == 400 and answer.error["param"] == "text.verbosity"
