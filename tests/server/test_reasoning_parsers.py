"""Where reasoning begins and ends, by the parser that the server was started with, and what an answer tells of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sapwood.server.config import ServerConfig
from sapwood.server.text.reasoning import PARSERS, splitter_for

from .scripted import TEMPLATE, Scripted

OPEN, SHUT, BARE = "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT = "/v1/chat/completions"


def split(
    parser: str, text: str, prompt: str = BARE, *, thinks: bool = True, calls: bool = False, held: bool = False
) -> tuple[str, str]:
    """Reasoning and content of a text, the same in one piece and character by character."""
    found = set()
    for pieces in ([text], text):
        splitter = splitter_for(parser, prompt, thinks=thinks, calls=calls, held=held)
        told = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
        found.add(("".join(thought for thought, _ in told), "".join(said for _, said in told)))
    (one,) = found
    return one


BOTH = ("a", "b")
NO_TAG, OWN_TAG, LAST_TAG = "a, b", "<think>a</think>b", "a</think>b"


@pytest.mark.parametrize("parser", ["qwen3", "mimo", "deepseek_r1"])
def test_text_without_an_opening_tag_is_reasoning(parser):
    """Models whose template has the tag in the prompt, and those that write it themselves: up to the closing tag or to
    the end, where it was cut off. Where the template has ended it, all is content.

    Mutation: `splitter_for` asks `opens_reasoning` alone; it does not look for `CLOSING`.
    """
    for prompt in (BARE, OPEN):
        assert split(parser, LAST_TAG, prompt) == split(parser, OWN_TAG, prompt) == BOTH
        assert split(parser, NO_TAG, prompt) == (NO_TAG, "")
        assert split(parser, "\n<think>\na", prompt) == ("\na", "")
    assert split(parser, NO_TAG, SHUT) == ("", NO_TAG)


@pytest.mark.parametrize("parser", ["think", "glm45", "glm47"])
def test_text_without_an_opening_tag_is_an_answer(parser):
    """Unless the prompt has the tag.

    Mutation: `splitter_for` begins inside whatever the parser.
    """
    assert split(parser, OWN_TAG) == split(parser, LAST_TAG, OPEN) == BOTH
    assert split(parser, NO_TAG) == ("", NO_TAG) and split(parser, LAST_TAG) == ("", LAST_TAG)


def test_a_request_that_turns_thinking_off():
    """What qwen3 then writes without a tag is an answer; deepseek_r1 cannot be turned off.

    Mutation: `splitter_for` does not look at `thinks`.
    """
    assert split("qwen3", NO_TAG, thinks=False) == ("", NO_TAG)
    assert split("qwen3", OWN_TAG, thinks=False) == split("qwen3", LAST_TAG, OPEN, thinks=False) == BOTH
    assert split("deepseek_r1", NO_TAG, thinks=False) == (NO_TAG, "")


@pytest.mark.parametrize("parser", ["think", "qwen3", "deepseek_r1"])
def test_a_text_that_a_grammar_holds(parser):
    """Nobody closes what only the prompt has opened; where the grammar has tags of its own, they count.

    Mutation: `splitter_for` does not look at `held`.
    """
    for prompt in (BARE, OPEN):
        assert split(parser, NO_TAG, prompt, held=True) == ("", NO_TAG)
        assert split(parser, OWN_TAG, prompt, held=True) == BOTH


def test_a_call_ends_the_reasoning_of_qwen3():
    """Newer models call without closing it. Without tools it is a word like any other, and so it is for the others.

    Mutation: `_inside` does not look for `_cut_by`; it looks for it behind the closing tag.
    """
    assert split("qwen3", f"hm{CALL}", calls=True) == ("hm", CALL)
    assert split("qwen3", f"hm</think>{CALL} </think>", calls=True) == ("hm", f"{CALL} </think>")
    assert split("qwen3", "hm <tool_cal", calls=True) == ("hm <tool_cal", "")
    assert split("qwen3", f"hm{CALL}") == split("deepseek_r1", f"hm{CALL}", calls=True) == (f"hm{CALL}", "")


def ask(app: Scripted, **more: Any) -> dict[str, Any]:
    answer = app.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], **more})
    assert answer.status == 200, answer.body
    message: dict[str, Any] = answer.json["choices"][0]["message"]
    return message


def test_an_answer_of_each_api():
    """Reasoning and text apart, in one piece and as a stream.

    Mutation: `answer_parser` knows "think" alone.
    """
    app = Scripted("let me see</think>It is.", reasoning_parser="deepseek_r1")
    message = ask(app)
    assert (message["reasoning_content"], message["content"]) == ("let me see", "It is.")
    assert "reasoning_content" not in ask(app, separate_reasoning=False)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    chunks = [json.loads(line[6:]) for line in app.post(CHAT, body).body.decode().split("\n\n") if "data: {" in line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "let me see"
    assert "".join(delta.get("content", "") for delta in deltas) == "It is."
    output = app.post("/v1/responses", {"input": "hi"}).json["output"]
    assert [item["content"][0]["text"] for item in output] == ["let me see", "It is."]
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    assert [block["type"] for block in app.post("/v1/messages", asked).json["content"]] == ["thinking", "text"]


def test_thinking_turned_off_by_a_field():
    """`chat_template_kwargs` of chats and of responses, `thinking` of Anthropic's messages, for a template that says
    nothing of it in the prompt.

    Mutation: a writer does not tell `splitter` what the template was told.
    """
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    app = Scripted("It is.", reasoning_parser="qwen3", template=template)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(app)["reasoning_content"] == "It is."
    assert ask(app, **off)["content"] == "It is."
    output = app.post("/v1/responses", {"input": "hi", **off}).json["output"]
    assert [item["type"] for item in output] == ["message"]
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "thinking": {"type": "disabled"}}
    assert [block["type"] for block in app.post("/v1/messages", asked).json["content"]] == ["text"]


def test_calls_out_of_reasoning():
    """A call that comes before the closing tag is a call, and what was thought before it stays reasoning.

    Mutation: `splitter` does not say that there are tools.
    """
    message = ask(Scripted(f"I look.\n{CALL}", reasoning_parser="qwen3"), tools=TOOLS)
    assert message["reasoning_content"] == "I look.\n" and message["tool_calls"][0]["function"]["name"] == "f"


def test_an_answer_that_a_grammar_holds_is_no_reasoning():
    """It is of the demanded form from its first token on: that is the answer, though no tag has closed anything. A
    structural tag holds nothing before its trigger.

    Mutation: `Serving.submit` says of none that it is held, or of all.
    """
    for parser in ("qwen3", "deepseek_r1", "think"):
        app = Scripted('{"a": 1}', reasoning_parser=parser, template=TEMPLATE + "<think>")
        for more in (
            {"response_format": {"type": "json_object"}},
            {"guided_regex": ".*"},
            {"response_format": {"type": "json_object"}, "separate_reasoning": True},
        ):
            message = ask(app, **more)
            assert message["content"] == '{"a": 1}' and "reasoning_content" not in message
        named = {"type": "function", "function": {"name": "f"}}
        assert ask(app, tools=TOOLS, tool_choice=named)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        text = {"format": {"type": "json_object"}}
        (item,) = app.post("/v1/responses", {"input": "hi", "text": text}).json["output"]
        assert item["type"] == "message" and item["content"][0]["text"] == '{"a": 1}'
        tag = {"triggers": ["<a"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}
        free = ask(app, response_format={"type": "structural_tag", **tag})
        assert free["reasoning_content"] == '{"a": 1}'


def test_S18_names_of_parsers():
    """Those that vLLM has for what is here are taken, all others refused with the list.

    Mutation: `_one_of` is left out.
    """
    for name in ("none", *PARSERS):
        assert ServerConfig(reasoning_parser=name).reasoning_parser == name
    for name in ("granite", "deepseek_v3", "openai_gptoss", "qwen", ""):
        with pytest.raises(ValueError, match=f"reasoning_parser must be one of none, think, qwen3, .*, got '{name}'"):
            ServerConfig(reasoning_parser=name)
