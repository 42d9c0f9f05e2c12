"""How likely the tokens of a prompt are: `prompt_logprobs`, as vLLM writes it down, and `echo`."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood.engine.params import SamplingParams
from sapwood.server.api.answer_fields import check_scores, prompt_logprobs
from sapwood.server.errors import ApiError
from sapwood.server.generation import Prompt

from .kit import Running
from .scripted import Scripted, tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LONG = "Heartwood is the older wood in the middle of a tree, and carries no water any more. " * 8


def ids(text: str) -> list[int]:
    return tokens().tokenizer.encode(text).ids


def right(prompt: list[int], top: int) -> list[Any]:
    """What the scripted engine finds of a prompt."""
    others = range(max(1, top))
    return [None] + [
        {
            str(id + at): {
                "logprob": -0.25 - at,
                "rank": at + 1,
                "decoded_token": tokens().token_text(id + at),
            }
            for at in others
        }
        for id in prompt[1:]
    ]


def test_M08_scores_of_a_prompt_as_vllm_writes_them():
    """A list beside each choice of a completion, at the top of a chat: nothing of the first token, then each token by
    its id with the likeliest others. Nothing where nobody asked.

    Mutation: `whole` of either writer leaves it out; the field is not one of `_PLAIN`.
    """
    app = Scripted(" you")
    one, two = "one two three", ids("four five")
    for top in (0, 1, 2):
        told = app.post(COMPLETIONS, {"prompt": [one, "four five"], "n": 1, "prompt_logprobs": top}).json
        assert [each["prompt_logprobs"] for each in told["choices"]] == [right(ids(one), top), right(two, top)]
        assert "prompt_logprobs" not in told and told["choices"][0]["logprobs"] is None
        told = app.post(CHAT, {"messages": HI, "prompt_logprobs": top, "return_token_ids": True}).json
        assert told["prompt_logprobs"] == right(told["prompt_token_ids"], top) and len(told["prompt_logprobs"]) > 5
        assert "prompt_logprobs" not in told["choices"][0]
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
        assert b"prompt_logprobs" not in app.post(path, body).body
        assert app.params.prompt_logprobs is None


def test_scores_of_a_prompt_beside_an_echo():
    """The engine is asked for the most that either wants, and each gets its own.

    Mutation: `completions` asks for the echo's alone; `prompt_logprobs` does not look at ranks.
    """
    app = Scripted(" you")
    for echoed, asked in ((1, 3), (3, 1), (0, 2)):
        body = {"prompt": "one two", "echo": True, "logprobs": echoed, "prompt_logprobs": asked}
        (choice,) = app.post(COMPLETIONS, body).json["choices"]
        assert app.params.prompt_logprobs == max(echoed, asked)
        assert choice["prompt_logprobs"] == right(ids("one two"), asked)
        assert len(choice["logprobs"]["top_logprobs"][1]) == max(1, echoed)


def test_what_no_json_has_is_written_as_vllm_does():
    """A token that cannot come has a number all the same.

    Mutation: `_finite` is not called.
    """
    told = prompt_logprobs([5, 6], [None, {6: (float("-inf"), 49152)}], 0, None)
    assert bytes(told) == b'[null,{"6":{"logprob":-9999.0,"rank":49152,"decoded_token":"token_id:6"}}]'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_scores_have_the_bound_of_log_probabilities(path):
    """What the engine tells of each token of an answer, it tells of a prompt's.

    Mutation: `Parameters.sampling` leaves `prompt_logprobs` to the engine.
    """
    app = Scripted("Hello")
    body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    for most in (20, 5):
        app.link.ready.facts["max_logprobs"] = most
        assert app.post(path, {**body, "prompt_logprobs": most}).status == 200
        for wrong in (most + 1, -1):
            refused = app.post(path, {**body, "prompt_logprobs": wrong})
            assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")
            assert f"from 0 to {most}" in refused.error["message"]


def test_scores_of_prompts_have_a_bound():
    """As many as are written down while others wait; of one prompt, and of all.

    Mutation: `check_scores` looks at the longest alone, or at the sum alone.
    """

    def prompts(*lengths: int) -> list[Prompt]:
        return [Prompt([0] * length) for length in lengths]  # type: ignore[arg-type]

    for lengths, top, fits in [
        ((65536,), 0, True),
        ((65537,), 0, False),
        ((3120,), 20, True),
        ((3121,), 20, False),
        ((60000,) * 4, 0, True),
        ((60000,) * 5, 0, False),
        ((99999,), None, True),
    ]:
        params = SamplingParams(prompt_logprobs=top)
        if fits:
            check_scores("prompt_logprobs", prompts(*lengths), params)
        else:
            with pytest.raises(ApiError, match="too many to score"):
                check_scores("prompt_logprobs", prompts(*lengths), params)


# ---- over HTTP, with a scheduler and a cache


@pytest.mark.server
@pytest.mark.xdist_group("http")
def test_M08_scores_are_of_the_whole_prompt_though_it_is_cached(server: Running):
    """A prompt that was computed before: with scores it is computed once more, and all of it is scored; with several
    samples too. What it leaves behind is read by the next.

    Mutation: `RequestTable.submit` lets it read the cache.
    """
    prompt = server.post("/tokenize", {"prompt": LONG + "scored"}).json["tokens"]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    for n in (1, 3):
        server.post(COMPLETIONS, body)
        assert server.post(COMPLETIONS, body).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        told = server.post(COMPLETIONS, {**body, "n": n, "prompt_logprobs": 2, "cache_report": True}).json
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in told["choices"]:
            first, *others = choice["prompt_logprobs"]
            assert first is None and len(others) == len(prompt) - 1
            for token, scores in zip(prompt[1:], others, strict=True):
                assert list(scores) == [str(token), str(token + 1)]
                assert scores[str(token)]["rank"] == 1 and scores[str(token)]["logprob"] < 0
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "prompt_logprobs": 0}
    told = server.post(CHAT, chat).json
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]
    text = "".join(next(iter(each.values()))["decoded_token"] for each in told["prompt_logprobs"][1:])
    assert LONG.strip() in text


@pytest.mark.server
@pytest.mark.xdist_group("http")
@pytest.mark.parametrize("most", [0, 1])
def test_M08_an_echo_of_one_token(server: Running, most):
    """It has a place in the lists, though nothing is known of it.

    Mutation: `RequestTable.submit` leaves `prompt_logprobs` of a sample empty.
    """
    body = {"prompt": [504], "max_tokens": most, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    (choice,) = server.post(COMPLETIONS, body).json["choices"]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == 1 + most
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None and scores["text_offset"][0] == 0
    assert choice["text"].startswith(scores["tokens"][0]) and choice["prompt_logprobs"] == [None]
