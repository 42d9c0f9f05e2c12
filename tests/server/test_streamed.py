"""What stands in which chunk of a stream, and what is told without being asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from sapwood.engine.params import SamplingParams
from sapwood.server.generation import Generation, Model, Prompt, TextPiece
from sapwood.server.process.messages import End

from .kit import Running
from .scripted import Script, Scripted, ScriptedLink, tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 100},
}
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def ids(text: str) -> list[int]:
    return tokens().tokenizer.encode(text, add_special_tokens=False).ids


def said(path: str, chunks: list[Any]) -> list[tuple[str, str | None]]:
    """Text and finish reason of each chunk, but the one that only opens a chat."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[0]["finish_reason"] is None
        return [(choice["delta"].get("content") or "", choice["finish_reason"]) for choice in choices[1:]]
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


# ---- the end


@both
def test_the_end_goes_with_the_last_text(path):
    """Cut off by length or by a stop string: no chunk has an end and no text. A token that ends the text and shows none
    comes a step later, and waits for nobody: then there is one.

    Mutation: `Generation._take` does not join the end with the piece before it.
    """
    app = Scripted("one two three four")
    cut = said(path, app.chunks(path, {**BODIES[path], "max_tokens": 3}))
    assert cut == [("one", None), (" two", None), (" three", "length")]
    cut = said(path, app.chunks(path, {**BODIES[path], "stop": " three"}))
    assert cut[-1][1] == "stop" and [text for text, _ in cut if text] == ["one", " two"]
    cut = said(path, app.chunks(path, BODIES[path]))
    assert cut == [("one", None), (" two", None), (" three", None), (" four", None), ("", "stop")]


def taken(new: list[int], end: End | None, **params: Any) -> list[TextPiece]:
    """What a generation makes of tokens that have come together."""

    async def take() -> list[TextPiece]:
        link = ScriptedLink(lambda prompt: Script(""))
        job = link.job(1, "")
        (lane,) = job.lanes
        lane.tokens, lane.end = new, end
        prompt = Prompt(np.array(ids("hi"), np.int32))
        sampling = SamplingParams(max_tokens=50, **params)
        return Generation(job, [prompt], sampling, tokens().detokenizer, Model("m", None)).take()

    return asyncio.run(take())


def test_tokens_that_come_together_and_the_end():
    """What has come is told at once, each token for itself, and the last of them has the end.

    Mutation: `_take` joins all that has come; it joins nothing.
    """
    one, two, three = ids("one two three")
    pieces = taken([one, two, three], End(1, "length", None, 0, ""))
    assert [(piece.text, piece.tokens, piece.finish) for piece in pieces] == [
        ("one", [one], None),
        (" two", [two], None),
        (" three", [three], "length"),
    ]
    pieces = taken([one, two, 2], End(1, "stop", None, 0, ""))
    assert [(piece.text, piece.tokens, piece.finish) for piece in pieces] == [
        ("one", [one], None),
        (" two", [two, 2], "stop"),
    ]
    pieces = taken([one, two], End(1, "length", None, 0, ""), stop="two, or not two")
    assert [(piece.text, piece.finish) for piece in pieces] == [("one", None), (" two", "length")]
    assert [piece.finish for piece in taken([one, two], None)] == [None, None]
    assert [piece.text for piece in taken([2], End(1, "stop", None, 0, ""))] == [""]


# ---- figures


@both
def test_usage_is_told_where_it_is_asked_for(path):
    """At the end, or in every chunk; not where a client says that it wants none. Without a stream there is nothing to
    say about it.

    Mutation: `ChunkWriter` does not look at `usage` for `each`.
    """
    app = Scripted("one two three")
    for options, last, each in [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": None, "continuous_usage_stats": True}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ]:
        chunks = app.chunks(path, {**BODIES[path], "stream_options": options})
        assert (chunks[-1]["choices"] == []) == last
        if last:
            assert chunks.pop()["usage"]["completion_tokens"] == 4
        assert all(("usage" in chunk) == each for chunk in chunks)
        if options is not None:
            refused = app.post(path, {**BODIES[path], "stream_options": options})
            assert (refused.status, refused.error["param"]) == (400, "stream_options")
    assert app.post(path, {**BODIES[path], "stream_options": None}).status == 200


# ---- tokens


@both
@pytest.mark.parametrize("text", ["plain words", "a 👩‍👩‍👧‍👦 family", "<think>hidden</think>shown"])
def test_the_ids_of_all_tokens_are_told(path, text):
    """Those of the prompt with the first chunk alone; those of the answer with the piece they belong to, also where
    that shows no text yet, or none at all: together they are what the answer in one piece has.

    Mutation: `ChatWriter.opening` tells none; `piece` of either writer is silent where there is no text.
    """
    app = Scripted(text, reasoning_parser="think")
    body = {**BODIES[path], "return_token_ids": True, "include_reasoning": False, "n": 1}
    whole = app.post(path, body).json
    prompt = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    assert prompt == np.frombuffer(app.link.submitted[-1].tokens, np.int32).tolist()
    assert whole["choices"][0]["token_ids"] == [*ids(text), 2]
    first, *others = app.chunks(path, body)
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in {**chunk, **chunk["choices"][0]} for chunk in others)
    told = [id for chunk in (first, *others) for id in chunk["choices"][0].get("token_ids", [])]
    assert told == [*ids(text), 2]
    plain = app.chunks(path, BODIES[path])
    assert not any("prompt_token_ids" in {**chunk, **chunk["choices"][0]} for chunk in plain)


def test_a_first_chunk_with_ids_and_usage():
    """Both stand where a client looks for them.

    Mutation: `opening` puts the ids into the choice.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BODIES[CHAT], "return_token_ids": True, "stream_options": options}
    first, *_ = Scripted("one").chunks(CHAT, body)
    assert first["usage"]["completion_tokens"] == 0 and first["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"


# ---- how much is said


def test_a_completion_has_sixteen_tokens_where_nobody_says_more():
    """As OpenAI's and vLLM's; fewer where the context ends sooner. A chat goes on to its end.

    Mutation: `completions` passes `max_tokens` on as it is; it does not look at what is left.
    """
    app = Scripted("word " * 60)
    told = app.post(COMPLETIONS, {"prompt": "hi"}).json
    assert told["usage"]["completion_tokens"] == 16 and told["choices"][0]["finish_reason"] == "length"
    assert app.post(COMPLETIONS, {"prompt": "hi", "max_tokens": None}).json["usage"]["completion_tokens"] == 16
    assert app.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 17}).json["usage"]["completion_tokens"] == 17
    assert app.post(CHAT, BODIES[CHAT]).json["usage"]["completion_tokens"] > 60
    long = [[5] * 1990, [5] * 10]
    told = app.post(COMPLETIONS, {"prompt": long})
    assert told.status == 200 and told.json["usage"]["completion_tokens"] == 2 * 10
    assert app.post(COMPLETIONS, {"prompt": [5] * 2000}).error["code"] == "context_length_exceeded"
    assert app.post(COMPLETIONS, {"prompt": long, "max_tokens": 16}).error["code"] == "context_length_exceeded"


@pytest.mark.server
@pytest.mark.xdist_group("http")
@both
def test_a_stream_of_an_engine_ends_with_its_last_token(server: Running, path):
    """As many chunks as tokens, and one that opens a chat.

    Mutation: `Generation._take` does not join the end with the piece before it.
    """
    asked = {**BODIES[path], "max_tokens": 12, "seed": 3, "ignore_eos": True}
    *chunks, last = server.stream(path, asked).events()
    assert last == "[DONE]"
    texts = said(path, chunks)
    assert texts[-1][1] == "length" and texts[-1][0] and all(finish is None for _, finish in texts[:-1])
