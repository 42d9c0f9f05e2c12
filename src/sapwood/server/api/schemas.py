"""The fields of requests. Fields that are not named here are accepted and ignored; fields that would change the answer
and are not served are refused by name (unserved.py). Docstrings of structs are shown to users, by /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from sapwood.engine.params import MOST_BAD_WORDS, MOST_STOP_LENGTH, MOST_STOPS

from .. import limits
from ..errors import ApiError, bad, unsupported
from .unserved import CHAT, COMPLETIONS, EVERY, PROMPT, STRUCTURED, also_unserved, refuse_unserved

Text = Annotated[str, Meta(max_length=limits.MAX_TEXT_CHARACTERS)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARACTERS)]
Keyword = Annotated[str, Meta(max_length=limits.MAX_KEYWORD_CHARACTERS)]
Salt = Annotated[str, Meta(max_length=limits.MAX_SALT_CHARACTERS)]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
Strings = list[Annotated[str, Meta(max_length=limits.MAX_STRING_CHARACTERS)]]
Word = Annotated[str, Meta(max_length=MOST_STOP_LENGTH)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=limits.MAX_MESSAGES)]
Tokens = Annotated[list[int], Meta(max_length=limits.MAX_DETOKENIZED_TOKENS)]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """`schema`: beside the type, as llama.cpp and SGLang have it. `structures`, `triggers`: of a structural_tag."""

    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None


@also_unserved(STRUCTURED)
class StructuredOutputs(Struct, kw_only=True):
    """vLLM's. One of them."""

    json: dict[str, Any] | Text | bool | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Strings | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None


@also_unserved(EVERY)
class Sampling(Struct, kw_only=True):
    """The fields that all requests to generate share."""

    model: Name | None = None
    max_tokens: Count | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MOST_STOPS)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MOST_BAD_WORDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=limits.MAX_NAMED_TOKENS)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Strings | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None  # SGLang's
    ebnf: Text | None = None  # SGLang's
    grammar: Text | None = None  # llama.cpp's
    json_schema: dict[str, Any] | Text | None = None  # of both
    return_token_ids: bool | None = None
    request_id: Annotated[str, Meta(max_length=limits.MAX_REQUEST_ID_CHARACTERS)] | None = None
    # the cache
    cache_salt: Salt | None = None
    cache_prompt: bool | None = None
    cache_report: bool | None = None
    prompt_cache_key: Salt | None = None
    best_of: int | None = None  # refused unless it means the same as n


@also_unserved(CHAT)
class ChatRequest(Sampling, kw_only=True):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_effort: Keyword | None = None
    verbosity: Keyword | None = None
    documents: list[dict[str, Any]] | None = None


@also_unserved(COMPLETIONS)
class CompletionRequest(Sampling, kw_only=True):
    prompt: Text | list[int | Text | list[int]]  # a text, its token ids, or several of either
    echo: bool | None = None
    logprobs: int | bool | None = None
    add_special_tokens: bool | None = None


@also_unserved(PROMPT)
class TokenizeRequest(Struct, kw_only=True):
    """A text, or a conversation."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    tokens: Tokens


class LoadAdapter(Struct, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=limits.MAX_PATH_CHARACTERS)]


class UnloadAdapter(Struct, kw_only=True):
    lora_name: Name


@also_unserved(PROMPT)
class ExplainRequest(Struct, kw_only=True):
    """A prompt, token ids or a conversation, as a request would send it."""

    model: Name | None = None
    prompt: Text | list[int] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None


T = TypeVar("T")
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def parse(body: bytes, kind: type[T]) -> T:
    """A request, or the 400 that says what is wrong with it. A body is JSON, whatever its content type says; of a name
    that comes twice the last one counts. The work is bounded before it begins: other requests wait meanwhile."""
    lists, strings, values = limits.MAX_JSON_LISTS, limits.MAX_JSON_STRINGS, limits.MAX_JSON_VALUES
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > lists or body.count(b'"') > 2 * strings or body.count(b",") > values:
        most = f"{lists} lists and objects, {strings} strings and {values} values"
        raise ApiError(400, f"the body may have {most}; brackets, quotes and commas are counted", "too_many_values")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        request: T = decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ApiError(
            400,
            f"{path.rstrip('`').lstrip('.') or 'the body'}: {message}",
            "invalid_type",
            path.rstrip("`").lstrip(".") or None,
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if brackets > limits.MAX_JSON_DEPTH:
        _check_depth(request)  # type: ignore[arg-type]
    _check_supported(request)
    return request


def _too_deep() -> ApiError:
    most = limits.MAX_JSON_DEPTH
    return ApiError(400, f"the body is nested too deeply: {most} lists and objects may", "invalid_json")


def _check_depth(request: Struct) -> None:
    """Layer by layer, without recursion. Code that gets the request later may then use recursion."""
    layer: list[Any] = [request]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        layer = [below for value in layer for below in _inside(value) if isinstance(below, (dict, list, Struct))]
        if not layer:
            return
    raise _too_deep()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Struct):
        flat = ("prompt", "tokens")  # long lists of plain values
        return [getattr(value, name) for name in value.__struct_fields__ if name not in flat]
    return value.values() if isinstance(value, dict) else value


def _check_supported(request: Any) -> None:
    refuse_unserved(request)
    if not isinstance(request, Sampling):
        return
    if request.structured_outputs is not None:
        refuse_unserved(request.structured_outputs, "structured_outputs.")
    if request.best_of not in (None, 1, request.n or 1):
        raise unsupported("best_of", "every sample is returned: use n")
    if not isinstance(request, ChatRequest | CompletionRequest):
        return
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options", "stream_options are for a stream: stream must be true")
    if request.prompt_logprobs is not None and request.stream:
        raise bad("prompt_logprobs", "prompt_logprobs are told in one piece: stream must be false")
