"""What the Responses API and Anthropic's share on the way in: messages, parameters and tools, found in a request of
theirs, become a generation as those of a chat completion do, and what is wrong with them is told in their words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ApiError, bad
from ..frontend import Serving
from ..generation import Generation, Model, Prompt
from ..http import Call
from ..text.answer_parts import Tools
from .schemas import Sampling

MOST_MESSAGES = 4096


async def prompt_of(
    serving: Serving,
    request: Sampling,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    template: Mapping[str, Any],
    continue_final_message: bool = False,
) -> Prompt:
    """The prompt that the chat template makes of messages. `template`: what else it is told."""
    if len(messages) > MOST_MESSAGES:
        raise bad("messages", f"a conversation may have {MOST_MESSAGES} messages, got {len(messages)}")
    prompt = await serving.conversation(
        messages, tools=tools.shown, continue_final_message=continue_final_message, more=template
    )
    return serving.truncated(request, [prompt])[0]


async def begin(
    serving: Serving,
    call: Call,
    request: Sampling,
    model: Model,
    prompt: Prompt,
    tools: Tools,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> Generation:
    tools.show_marks(request)
    params = serving.params(request, call.caller, max_tokens=max_tokens, logprobs=logprobs)
    return await serving.begin([prompt], params, request, model, call.caller, serving.grammar(request, tools))


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name fields as the request has them. `names`: patterns of our names -> theirs."""
    try:
        yield
    except ApiError as error:
        message, param = error.message, error.param
        for ours, theirs in names.items():
            message = re.sub(ours, theirs, message)
            param = None if param is None else re.sub(ours, theirs, param)
        raise ApiError(error.status, message, error.code, param, error.headers) from None


def written_to_cache(serving: Serving, request: Sampling, generation: Generation) -> int:
    """Tokens of the prompt that were computed and are whole pages, which the cache keeps for the next request."""
    if request.cache_prompt is False or serving.link.ready is None:
        return 0
    prompt, _, cached = generation.usage
    page = serving.link.ready.page_size
    return max(0, prompt // page * page - cached)
