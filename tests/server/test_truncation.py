"""`truncation: "auto"`: what is left out of a conversation that is longer than the context (2000 tokens here)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood.server.api.response_request import _ANSWER_SHARE

from .scripted import Scripted

PATH = "/v1/responses"
LIMIT = 2000
TURN = 300  # tokens, about, of one message


def user(name: str, words: int = TURN) -> dict[str, Any]:
    return {"role": "user", "content": f"<{name}>" + " word" * words}


def model(name: str, words: int = TURN) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<{name}>" + " word" * words}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": json.dumps({"of": f"<{name}>"})}


def result(name: str, words: int = TURN) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": f"<{name}'>" + " word" * words}


def thought(name: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"<{name}>"}]}


def seen(items: list[dict[str, Any]], **more: Any) -> str:
    """The names of what the model was shown, in order."""
    app = Scripted("Hello")
    answer = app.post(PATH, {"input": items, "truncation": "auto", **more})
    assert answer.status == 200, answer.body
    assert answer.json["truncation"] == "auto" and answer.json["usage"]["input_tokens"] <= LIMIT
    parts = app.prompt.split("<")
    return " ".join(part.partition(">")[0] for part in parts if ">" in part and not part.startswith(("|", "/")))


def test_the_oldest_turns_go():
    """A message of the user with the answer to it, as many as must; the rest stays in order. Nothing goes where all
    fits, and without the field nothing goes at all.

    Mutation: `fitting` drops one turn more; `_groups` begins a group with every item.
    """
    items = [each for name in "abcd" for each in (user(name), model(name.upper()))] + [user("e")]
    assert seen(items) == "c C d D e"
    assert seen(items[-5:]) == "c C d D e" and seen(items[-3:]) == "d D e"
    answer = Scripted("Hello").post(PATH, {"input": items})
    assert answer.status == 400 and answer.error["param"] == "input"
    answer = Scripted("Hello").post(PATH, {"input": items, "truncation": "disabled"})
    assert answer.error["code"] == "context_length_exceeded"


def test_what_says_how_to_answer_stays():
    """Instructions, and messages of the system and of developers, wherever they stand.

    Mutation: `_groups` takes a developer's message for one that may go; `_given` leaves the instructions to `made`.
    """
    rules = {"role": "system", "content": "<rules>"}, {"role": "developer", "content": "<more>"}
    items = [rules[0], user("a", 900), rules[1], model("A", 900), user("b", 900)]
    assert seen(items, instructions="<kind>") == "kind rules more b"


def test_there_is_room_for_the_answer():
    """As much as `max_output_tokens` asks for; without it a part of the context, where something must go anyway.

    Mutation: `fitting` leaves room for one token.
    """
    items = [user("a", 800), model("A", 800), user("b", 100)]
    assert seen(items) == "a A b"
    assert seen(items, max_output_tokens=400) == "b"
    items = [user("a", 100), user("b", 500), user("c", 500), user("d", 700)]
    assert (seen(items, max_output_tokens=250), seen(items, max_output_tokens=400)) == ("b c d", "c d")
    app = Scripted("Hello")
    many = [user(str(at), 15) for at in range(150)]
    left = app.post(PATH, {"input": many, "truncation": "auto"}).json["usage"]["input_tokens"]
    assert LIMIT - LIMIT // _ANSWER_SHARE - 40 < left <= LIMIT - LIMIT // _ANSWER_SHARE


def test_the_steps_of_a_model_go_where_there_is_but_one_question():
    """Calls with their results, the oldest first; the question stays, and so does the result that is to be answered,
    with its call. What was thought of a call goes with it.

    Mutation: `_end` keeps the last item alone; `_without` keeps results whose calls are gone.
    """
    items = [user("q", 50)]
    for name in "abcdef":
        items += [thought(f"think-{name}"), call(name), result(name)]
    rest = "think-c c c' think-d d d' think-e e e' think-f f f'"
    assert seen(items) == f"q think-b b b' {rest}"
    items[4:4] = [model("B", 100)]
    assert seen([user("old", 10), model("OLD", 10), *items]) == f"q B think-b b b' {rest}"
    items[4] = model("B", 300)
    assert seen(items) == f"q {rest}"


def test_results_that_came_together_stay_together():
    """Two calls of one step, and both results at the end, though they leave less room than there should be.

    Mutation: `_end` looks at one result; `fitting` gives up where there is less room than it wants.
    """
    items = [user("q", 10), call("a"), result("a", 1000), call("b"), call("c"), result("b", 930), result("c", 930)]
    assert seen(items) == "q b c b' c'"


def test_a_call_of_an_older_turn_takes_its_result_along():
    """Wherever that came.

    Mutation: `_without` is a list of what no group has.
    """
    items = [user("a", 900), call("x"), user("b", 10), result("x", 900), user("c", 500)]
    assert seen(items) == "b c"


def test_turns_of_responses_before():
    """They go first. What is kept is all that was said: a response that follows may have room for it again.

    Mutation: `_keep` keeps what was left of the conversation.
    """
    app = Scripted("<A>" + " word" * TURN, "<B>", "<C>")
    first = app.post(PATH, {"input": [user("a", 900)]}).json
    more = {"truncation": "auto", "previous_response_id": first["id"]}
    second = app.post(PATH, {"input": [user("b", 900)], **more}).json
    assert "<b>" in app.prompt and "<a>" not in app.prompt and "<A>" not in app.prompt
    listed = app.request("GET", f"{PATH}/{second['id']}/input_items?order=asc").json["data"]
    assert [item["content"][0]["text"][:3] for item in listed] == ["<a>", "<A>", "<b>"]


@pytest.mark.parametrize(
    ("items", "more"),
    [
        ([user("a", 2100)], {}),
        ([user("a", 100), user("b", 1900)], {"max_output_tokens": 200}),
        ([user("a", 100), call("x"), result("x", 2000)], {}),
        ([{"role": "system", "content": "word " * 2100}, user("a", 100)], {}),
        ([user("a", 100)], {"instructions": "word " * 2100}),
        ([user("a", 100)], {"max_output_tokens": 5000}),
        ([user("a", 100_000), user("b", 100_000)], {}),
    ],
)
def test_what_stays_may_be_too_long(items, more):
    """Then it is refused, as it is without the field.

    Mutation: `fitting` gives back the prompt that is nearest.
    """
    answer = Scripted("Hello").post(PATH, {"input": items, "truncation": "auto", **more})
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"


def test_a_very_long_conversation():
    """Far more than what is looked at for a prompt at all, cut to what fits.

    Mutation: `_made` passes every error on.
    """
    items = [user(str(at), 500) for at in range(400)]
    assert seen(items) == "397 398 399"


def test_wrong_items_are_wrong_however_old():
    """They are looked at before any is left out, and named by their place in the request.

    Mutation: `_given` makes messages of what is left alone.
    """
    app = Scripted("Hello")
    first = app.post(PATH, {"input": [user("a", 100)]}).json
    items = [user("b", 1000), {"role": "robot", "content": "hi"}, user("c", 1000)]
    answer = app.post(PATH, {"input": items, "truncation": "auto", "previous_response_id": first["id"]})
    assert answer.status == 400 and answer.error["param"] == "input[1].role"
