"""OpenAI's Responses API: POST /v1/responses and /v1/responses/input_tokens, and the stored responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ..errors import ApiError, bad, unsupported
from ..frontend import Serving
from ..generation import Generation, Prompt
from ..http import Call, query_text
from ..text.answer_parts import Tools, most_calls, read_tools
from .conversation import begin, in_words_of, prompt_of, respond
from .response_request import (
    InputTokensRequest,
    Item,
    ResponsesRequest,
    chat_choice,
    chat_tools,
    check,
    fitting,
    format_of,
    item_messages,
    logprobs_of,
)
from .response_store import ResponseStore, StoredResponse, page, with_ids
from .response_writer import ResponsesWriter
from .schemas import parse

_WORDS = {
    r"\bmax_tokens\b": "max_output_tokens",
    r"\bresponse_format\b": "text.format",
    r"\.function\b": "",
    r"^(prompt|messages)\b": "input",
}


async def responses(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), ResponsesRequest)
    check(request)
    model = serving.models.find(request.model)
    top = logprobs_of(request, serving.parameters.max_logprobs)
    with in_words_of(_WORDS):
        given = await _given(serving, call, request)
        tokens = request.max_output_tokens
        generation = await begin(
            serving, call, request, model, [given.prompt], given.tools, max_tokens=tokens, logprobs=top
        )
    keep = None
    if request.store is not False:
        turns = (*given.before, msgspec.json.encode(with_ids(given.items)))
        keep = partial(_keep, serving.responses, call.caller.key, turns)
    writer = ResponsesWriter(serving, request, generation, given.tools, top, keep)
    return await respond(serving, call, request, generation, writer)


async def input_tokens(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), InputTokensRequest)
    check(request)
    serving.models.find(request.model)
    with in_words_of(_WORDS):
        given = await _given(serving, call, request)
    await call.json({"object": "response.input_tokens", "input_tokens": len(given.prompt.ids)})


class _Given(NamedTuple):
    """What a request makes. `before`: the turns of the responses that it follows, as JSON; `items`: its own."""

    before: tuple[bytes, ...]
    items: list[dict[str, Any]]
    tools: Tools
    prompt: Prompt


async def _given(serving: Serving, call: Call, request: InputTokensRequest) -> _Given:
    before = _before(serving, call, request)
    request.response_format = format_of(request)
    given = request.input or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    earlier = [item for turn in before for item in msgspec.json.decode(turn)]
    messages = item_messages(earlier, items)
    instructions = []
    if request.instructions is not None:
        instructions.append({"role": "system", "content": request.instructions})
    if not instructions and not messages:
        raise bad("input", "input is empty")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning.effort)
    verbosity = None if request.text is None else request.text.verbosity
    variables = serving.prompts.with_verbosity(variables, "text.verbosity", verbosity)
    choice, most = chat_choice(request.tool_choice), most_calls(request.parallel_tool_calls)
    tools = read_tools(chat_tools(request.tools), choice, serving.tool_parser, most)

    async def made(some: Sequence[Item]) -> Prompt:
        return await prompt_of(serving, request, [*instructions, *item_messages((), some)], tools, variables)

    if request.truncation == "auto":
        prompt = await fitting([*earlier, *items], made, serving.prompts.limit, request.max_output_tokens)
    else:
        prompt = await prompt_of(serving, request, [*instructions, *messages], tools, variables)
    return _Given(before, items, tools, prompt)


# ---- stored responses


def _before(serving: Serving, call: Call, request: InputTokensRequest) -> tuple[bytes, ...]:
    id = request.previous_response_id
    if id is None:
        return ()
    stored = serving.responses.get(id, call.caller.key)
    if stored is None:
        raise _unknown(id, "previous_response_not_found", "previous_response_id")
    return stored.turns


def _keep(
    store: ResponseStore, owner: str | None, turns: tuple[bytes, ...], id: str, body: bytes, output: bytes
) -> None:
    store.put(id, StoredResponse(owner, body, (*turns, output)))


def _unknown(id: str, code: str, param: str) -> ApiError:
    return ApiError(404, f"there is no response {id!r:.200} here: it is unknown, or was not kept", code, param)


async def get_response(serving: Serving, call: Call) -> None:
    if query_text(call, "stream", "") not in ("", "false"):
        raise unsupported("stream", "a response that is over is told in one piece")
    await call.answer(200, _stored(serving, call).body)


async def delete_response(serving: Serving, call: Call) -> None:
    id = call.scope["path_params"]["id"]
    if not serving.responses.delete(id, call.caller.key):
        raise _unknown(id, "response_not_found", "id")
    await call.json({"id": id, "object": "response", "deleted": True})


async def input_items(serving: Serving, call: Call) -> None:
    """The items that the model was given for a response, also those of the responses that it follows; not its
    instructions."""
    await call.answer(200, page(_stored(serving, call).turns[:-1], call))


async def cancel_response(serving: Serving, call: Call) -> None:
    _stored(serving, call)
    raise unsupported("background", "a response is made while its client waits: close the connection to cancel it")


def _stored(serving: Serving, call: Call) -> StoredResponse:
    id = call.scope["path_params"]["id"]
    stored = serving.responses.get(id, call.caller.key)
    if stored is None:
        raise _unknown(id, "response_not_found", "id")
    return stored
