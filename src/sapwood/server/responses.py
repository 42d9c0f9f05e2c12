"""OpenAI's Responses API: POST /v1/responses, and GET and DELETE of one that is kept."""

from __future__ import annotations

from functools import partial
from urllib.parse import parse_qs

import msgspec

from .conversation import begin, in_words_of, prompt_of
from .errors import ApiError, bad, unsupported
from .generation import Generation
from .http import Call
from .response_items import chat_choice, chat_tools, item_messages
from .response_request import ResponsesRequest, check, format_of, logprobs_of
from .response_store import ResponseStore, Stored
from .response_writer import ResponsesWriter
from .schemas import parse
from .serving import Serving
from .spoken import read_tools

_WORDS = {
    r"\bmax_tokens\b": "max_output_tokens",
    r"\bresponse_format\b": "text.format",
    r"\.function\b": "",
    r"^(prompt|messages)\b": "input",
}


async def responses(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), ResponsesRequest)
    check(request)
    model = serving.model(request.model)
    before = _before(serving, call, request)
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    items = [item for turn in before for item in msgspec.json.decode(turn)]
    messages = item_messages(items, given)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    if not messages:
        raise bad("input", "input is empty")
    template = dict(request.chat_template_kwargs or {})
    if request.reasoning is not None and request.reasoning.effort is not None:
        template.setdefault("reasoning_effort", request.reasoning.effort)
    top = logprobs_of(request)
    with in_words_of(_WORDS):
        tools = read_tools(chat_tools(request.tools), chat_choice(request.tool_choice), serving.tool_parser)
        request.response_format = format_of(request)
        prompt = await prompt_of(serving, request, messages, tools, template)
        generation = await begin(
            serving, call, request, model, prompt, tools, max_tokens=request.max_output_tokens, logprobs=top
        )
    keep = None
    if request.store is not False:
        keep = partial(_keep, serving.responses, call.caller.key, (*before, msgspec.json.encode(given)))
    writer = ResponsesWriter(serving, request, generation, tools, top, keep)
    if request.stream:
        await call.stream(generation, writer, serving.config.keepalive_seconds)
    else:
        await call.whole(generation, writer)
    return generation


# ---- responses that are kept


def _before(serving: Serving, call: Call, request: ResponsesRequest) -> tuple[bytes, ...]:
    id = request.previous_response_id
    if id is None:
        return ()
    stored = serving.responses.get(id, call.caller.key)
    if stored is None:
        raise _unknown(id, "previous_response_not_found", "previous_response_id")
    return stored.turns


def _keep(store: ResponseStore, owner: str | None, turns: tuple[bytes, ...], id: str, body: bytes, said: bytes) -> None:
    store.put(id, Stored(owner, body, (*turns, said)))


def _unknown(id: str, code: str, param: str) -> ApiError:
    return ApiError(404, f"there is no response {id!r:.200} here: it is unknown, or was not kept", code, param)


async def get_response(serving: Serving, call: Call) -> None:
    id = call.scope["path_params"]["id"]
    if parse_qs(call.scope.get("query_string", b"")).get(b"stream", [b""])[-1] not in (b"", b"false"):
        raise unsupported("stream", "a response that is over is told in one piece")
    stored = serving.responses.get(id, call.caller.key)
    if stored is None:
        raise _unknown(id, "response_not_found", "id")
    await call.answer(200, stored.body)


async def delete_response(serving: Serving, call: Call) -> None:
    id = call.scope["path_params"]["id"]
    if not serving.responses.delete(id, call.caller.key):
        raise _unknown(id, "response_not_found", "id")
    await call.json({"id": id, "object": "response", "deleted": True})
