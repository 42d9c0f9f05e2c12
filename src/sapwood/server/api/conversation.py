"""The way of a request that all four APIs share: its prompt from messages, its generation, and its answer.

Field names in errors are those of chat completions and completions; `in_words_of` translates them for other APIs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ApiError, bad
from ..frontend import Serving
from ..generation import Generation, Model, Prompt
from ..http import Call, Writer
from ..limits import MAX_MESSAGES
from ..text.answer_parts import AnswerParser, Tools
from ..text.reasoning import splitter_for
from .answer_fields import check_scores
from .schemas import Sampling


async def prompt_of(
    serving: Serving,
    request: Sampling,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    add_special_tokens: bool = False,
) -> Prompt:
    """The prompt that the chat template makes of messages. `variables`: further ones for the template."""
    if len(messages) > MAX_MESSAGES:
        raise bad("messages", f"a conversation may have {MAX_MESSAGES} messages, got {len(messages)}")
    prompt = await serving.prompts.conversation(
        messages,
        tools=tools.shown,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        add_special_tokens=add_special_tokens,
    )
    return serving.prompts.truncated([prompt], request.truncate_prompt_tokens, request.truncation_side)[0]


async def begin(
    serving: Serving,
    call: Call,
    request: Sampling,
    model: Model,
    prompts: Sequence[Prompt],
    tools: Tools | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    scores_field: str = "prompt_logprobs",
) -> Generation:
    """Start the generation of a request. `scores_field`: the field that asks for log-probabilities of the prompts."""
    if tools is not None:
        tools.show_marks(request)
    params = serving.parameters.sampling(request, call.caller, max_tokens=max_tokens, logprobs=logprobs)
    grammar = serving.parameters.grammar(request, tools)
    check_scores(scores_field, prompts, params)
    return await serving.submit(prompts, params, request, model, call.caller, grammar)


async def respond(
    serving: Serving, call: Call, request: Sampling, generation: Generation, writer: Writer
) -> Generation:
    """Answer as the request wants it: as a stream of events, or in one piece."""
    if request.stream:
        await call.stream(generation, writer, serving.config.keepalive_seconds)
    else:
        await call.whole(generation, writer)
    return generation


def answer_parser(
    serving: Serving,
    generation: Generation,
    tools: Tools,
    variables: Mapping[str, Any] | None,
    separate: bool | None = None,
) -> AnswerParser:
    """The parser of one sample's text. `variables`: those of the chat template, which may turn thinking off;
    `separate`: whether the request itself wants reasoning apart from the content."""
    parser = serving.config.reasoning_parser
    if separate is False or (separate is None and parser == "none"):
        return AnswerParser(tools, None)
    splitter = splitter_for(
        "think" if parser == "none" else parser,
        generation.prompts[0].text or "",
        thinks=(variables or {}).get("enable_thinking") is not False,
        calls=tools.parser is not None,
        held=generation.held,
    )
    return AnswerParser(tools, splitter)


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Translate the names of fields in errors. `names`: patterns of our names -> the names that the API has."""
    try:
        yield
    except ApiError as error:
        message, param = error.message, error.param
        for ours, theirs in names.items():
            message = re.sub(ours, theirs, message)
            param = None if param is None else re.sub(ours, theirs, param)
        raise ApiError(error.status, message, error.code, param, error.headers) from None
