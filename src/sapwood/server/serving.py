"""What the APIs share: from a request's fields to prompts, parameters and a generation that runs.

names     the model by each of its names, and adapters
prompts   text, token ids, conversations through the chat template
params    SamplingParams, from the request, then from the model's generation config
begin     submitted, within the limits of the queue
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import bad_word_tokens

from .config import ServerConfig
from .content import message_texts
from .errors import ApiError, bad, shown, unsupported
from .generation import Generation, Model, Prompt
from .grammars import GrammarSpec
from .grammars import check as check_grammar
from .link import EngineLink
from .response_store import ResponseStore
from .schemas import MOST_NAMED, Sampling
from .spoken import told_of_tools
from .template import ChatTemplate, TemplateError
from .tokens import Tokens

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (  # fields that requests and SamplingParams have in common
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "priority", "n"),
    *("prompt_logprobs",),
)


_LONGEST = 2  # contexts that a prompt may have, if it is to be cut or only counted
_MOST_CHARACTERS = 64  # of a token, on average
_SHORT, _FEW = 256 << 10, 32  # bytes and messages whose prompt is made at once, without a thread
_MOST_BEGINS = 1 << 25  # characters of all beginnings of all stop strings, all samples together


class Caller(NamedTuple):
    """Who asks. `salt`: what the key makes of it, where tenants are kept apart by key."""

    id: str
    key: str | None
    admin: bool


class Serving:
    """A model, its tokenizer and its rules. One event loop calls all of it."""

    def __init__(self, config: ServerConfig, link: EngineLink) -> None:
        self.config = config
        self.link = link
        self.names: list[str] = list(config.served_model_name)
        self.adapters: dict[str, bytes] = {}
        self.paths: dict[str, str] = {}  # where adapters came from
        self.created = int(time.time())
        self.tokens: Tokens | None = None
        self.template: ChatTemplate | None = None
        self.tool_parser: str | None = None
        self.defaults: dict[str, Any] = {}
        self.responses = ResponseStore(config.max_responses, config.max_responses_bytes)
        self.draining = False

    # ---- names

    def model(self, name: str | None) -> Model:
        if name is None or name in self.names:
            return Model(self.names[0], None)
        if name in self.adapters:
            return Model(name, self.adapters[name])
        raise ApiError(
            404, f"there is no model {name!r:.200} here; there is {', '.join(self.names)}", "model_not_found", "model"
        )

    # ---- prompts

    @property
    def limit(self) -> int:
        assert self.link.ready is not None
        return self.link.ready.max_model_len

    def tokenizer(self) -> Tokens:
        if self.tokens is None:
            raise ApiError(400, "this server has no tokenizer: send token ids to /v1/completions", "no_tokenizer")
        return self.tokens

    async def prompt(self, given: str | list[int], add_special_tokens: bool = True) -> Prompt:
        """A prompt as completions have it."""
        if isinstance(given, str):
            ids = await self._encoded(given, add_special_tokens)
            return Prompt(ids, given)
        if len(given) > _LONGEST * self.limit:
            raise self.too_long(len(given))
        return Prompt(self.known_tokens("prompt", given))

    def known_tokens(self, field: str, given: Sequence[int]) -> npt.NDArray[np.int32]:
        """Token ids that this model has."""
        assert self.link.ready is not None
        most = self.link.ready.vocabulary - 1
        try:
            ids = np.array(given, np.int64)
        except OverflowError:
            ids = np.array([-1])
        if len(ids) and not 0 <= ids.min() <= ids.max() <= most:
            raise bad(field, f"{field} must be token ids from 0 to {most} for this model")
        return ids.astype(np.int32)

    async def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        more: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """A prompt as the model's chat template makes it of messages."""
        template, tokens = self.template, self.tokenizer()
        if template is None:
            raise ApiError(
                400,
                "this model has no chat template: give one with --chat-template, or use /v1/completions",
                "no_template",
            )
        goes_on = bool(continue_final_message)
        if goes_on and add_generation_prompt:
            raise bad("continue_final_message", "continue_final_message and add_generation_prompt cannot both be true")

        def render() -> str:
            made = message_texts(messages)
            if "developer" not in template.text:  # many templates drop what they do not know
                made = [{**each, "role": "system"} if each["role"] == "developer" else each for each in made]
            return template.render(
                told_of_tools(made, tools) if tools and "tools" not in template.text else made,
                tools=tools,
                add_generation_prompt=not goes_on if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=goes_on,
                more=more or {},
            )

        size = len(msgspec.json.encode((messages, tools, more)))
        if size > 4 * _MOST_CHARACTERS * self.limit:
            raise self.too_long(None)
        short = size <= _SHORT and len(messages) <= _FEW
        try:
            text = render() if short else await tokens.run(render)
        except TemplateError as error:
            raise bad("messages", str(error)) from None
        return Prompt(await self._encoded(text, add_special_tokens), text)

    async def _encoded(self, text: str, add_special_tokens: bool) -> Any:
        tokens = self.tokenizer()
        if len(text) > _MOST_CHARACTERS * self.limit:
            raise self.too_long(None)
        if len(text) > 4 * _LONGEST * self.limit and await tokens.surely_more(text, _LONGEST * self.limit):
            raise self.too_long(None)
        try:
            ids = await tokens.encode(text, add_special_tokens)
        except UnicodeEncodeError:
            raise bad("prompt", "the text holds half of a surrogate pair, which is no character") from None
        if not len(ids):
            raise bad("prompt", "the prompt is empty")
        return ids

    def too_long(self, tokens: int | None, new: int = 0) -> ApiError:
        has = "more" if tokens is None else f"{tokens} tokens"
        more = f" and {new} more are asked for" if new else ""
        return ApiError(
            400,
            f"this model's maximum context length is {self.limit} tokens with the answer: the prompt has {has}{more}",
            "context_length_exceeded",
            "max_tokens" if new else "prompt",
        )

    # ---- parameters

    def params(
        self, request: Sampling, caller: Caller, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        given = {name: getattr(request, name) for name in _PLAIN}
        for name in _DEFAULTS:
            if given[name] is None:
                given[name] = self.defaults.get(name)
        if request.logit_bias is not None and len(request.logit_bias) > self.config.max_logit_bias:
            raise bad(
                "logit_bias", f"logit_bias may have {self.config.max_logit_bias} entries, got {len(request.logit_bias)}"
            )
        salt = self.salt(request.cache_salt, caller)
        if max_tokens == 0:
            raise bad("max_tokens", "max_tokens must be 1 or more, got 0")
        named = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**named, max_tokens=max_tokens, logprobs=logprobs, cache_salt=salt)
        except (ValueError, TypeError, OverflowError) as error:
            raise bad(str(error).split(" ", 1)[0], str(error)) from None

    def salt(self, given: str | None, caller: Caller) -> str | None:
        """What keeps a request's cached prefixes from others."""
        if not self.config.salt_by_key:
            return given
        if given is not None:
            raise unsupported("cache_salt", "this server makes salts from API keys")
        return hashlib.sha256(f"sapwood.key:{caller.key}".encode()).hexdigest()

    def grammar(self, request: Sampling) -> GrammarSpec | None:
        """The form of the answer that a request demands, checked."""
        asked: list[GrammarSpec] = []
        form, outputs = request.response_format, request.structured_outputs
        if form is not None and form.type == "json_object":
            asked.append(GrammarSpec("json_object", ""))
        elif form is not None and form.type == "json_schema":
            schema = (form.json_schema or {}).get("schema")
            if not isinstance(schema, dict):
                raise bad("response_format", "response_format.json_schema.schema must be a JSON schema")
            asked.append(GrammarSpec("json_schema", _json(schema)))
        elif form is not None and form.type != "text":
            raise unsupported(
                "response_format", f"its type must be text, json_object or json_schema, got {form.type!r:.60}"
            )
        if outputs is not None:
            if outputs.json is not None and outputs.json is not False:
                asked.append(
                    GrammarSpec("json_object", "")
                    if outputs.json is True
                    else GrammarSpec(
                        "json_schema", outputs.json if isinstance(outputs.json, str) else _json(outputs.json)
                    )
                )
            if outputs.json_object:
                asked.append(GrammarSpec("json_object", ""))
        for kind, new, old in (
            ("regex", outputs and outputs.regex, request.guided_regex),
            ("grammar", outputs and outputs.grammar, request.guided_grammar),
            ("choice", outputs and outputs.choice, request.guided_choice),
            ("json_schema", None, request.guided_json),
        ):
            given = [value for value in (new, old) if value is not None]
            asked += [GrammarSpec(kind, value if isinstance(value, str) else _json(value)) for value in given]
        if len(asked) > 1:
            raise bad("structured_outputs", "an answer can have one form: several were asked for")
        return self.checked_grammar(asked[0]) if asked else None

    def checked_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        config = self.config
        try:
            check_grammar(
                spec,
                max_bytes=config.max_schema_bytes,
                max_depth=config.max_schema_depth,
                max_choices=config.max_choices,
            )
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_grammar", "response_format") from None
        return spec

    # ---- running

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request: Sampling,
        model: Model,
        grammar: GrammarSpec | None = None,
    ) -> Generation:
        """Submit the prompts of a request."""
        lanes = len(prompts) * params.n
        if lanes > self.config.max_n:
            raise bad("n", f"a request may have {self.config.max_n} samples in all, got {lanes}")
        for prompt in prompts:
            asked = params.max_tokens or 1
            if len(prompt.ids) + (asked if params.max_tokens else 1) > self.limit:
                raise self.too_long(len(prompt.ids), asked if len(prompt.ids) < self.limit else 0)
        self._bound(params, len(prompts))
        words = await self._bad_words(params) if params.bad_words else []
        self._admit(lanes)
        job = self.link.job(lanes)
        cached = request.cache_prompt is not False
        for at, prompt in enumerate(prompts):
            self.link.submit(
                job,
                at * params.n,
                prompt.ids.tobytes(),
                params,
                adapter=model.adapter,
                reads_cache=cached,
                writes_cache=cached,
                bad_words=words,
                grammar=grammar,
            )
        if self.config.queue_timeout:
            loop = asyncio.get_running_loop()
            loop.call_later(self.config.queue_timeout, self.link.expire, job, self.config.queue_timeout)
        return Generation(job, prompts, params, None if self.tokens is None else self.tokens.detokenizer, model)

    def _bound(self, params: SamplingParams, prompts: int) -> None:
        """What is made anew for every prompt or sample may not be much, where these are many."""
        named = len(params.allowed_token_ids or ()) + len(params.logit_bias or ())
        if prompts * named > MOST_NAMED:
            field = "allowed_token_ids" if params.allowed_token_ids else "logit_bias"
            raise bad(field, f"{field} may name {MOST_NAMED} tokens for all prompts, got {named} for each of {prompts}")
        begins = sum(len(stop) ** 2 for stop in params.stops)
        if prompts * params.n * begins > _MOST_BEGINS:
            raise bad("stop", f"stop must have fewer or shorter strings for {prompts * params.n} samples")

    async def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        tokens = self.tokenizer()
        try:
            return list(await tokens.run(lambda: bad_word_tokens(tokens.tokenizer, params)))
        except ValueError as error:
            raise bad("bad_words", str(error)) from None

    def _admit(self, lanes: int) -> None:
        if self.draining:
            raise ApiError(503, "the server is stopping", "stopping", headers={"Retry-After": "30"})
        waiting = self.link.waiting
        if waiting and waiting + lanes > self.config.max_queue:
            raise ApiError(
                429,
                f"{waiting} requests wait already, and {self.config.max_queue} may",
                "queue_full",
                headers={"Retry-After": "1"},
            )

    def truncated(self, request: Sampling, prompts: list[Prompt]) -> list[Prompt]:
        """`truncate_prompt_tokens`: the last so many tokens of each."""
        most = request.truncate_prompt_tokens
        if most is None:
            return prompts
        if most == -1:
            most = self.limit - 1
        if most < 1:
            raise bad("truncate_prompt_tokens", f"truncate_prompt_tokens must be 1 or more, got {shown(most)}")
        return [Prompt(prompt.ids[-most:], prompt.text) for prompt in prompts]

    # ---- what is told of the cache

    def report(self, generation: Generation) -> list[dict[str, Any]]:
        """What each prompt was served from where, and why no more of it, in words of the requester's own prompt."""
        return [self._report(prompt, begun) for prompt, begun in zip(generation.prompts, generation.begun, strict=True)]

    def _report(self, prompt: Prompt, begun: Any) -> dict[str, Any]:
        if begun is None:
            return {"prompt_tokens": len(prompt.ids), "cached_tokens": 0}
        device = begun.cached - begun.host - begun.store - begun.shared
        told: dict[str, Any] = {
            "prompt_tokens": len(prompt.ids),
            "cached_tokens": begun.cached,
            "device": max(0, device),
            "host": begun.host,
            "store": begun.store,
            "shared": begun.shared,
            "miss": None,
        }
        if begun.reason != "hit" and begun.cached <= begun.position:
            told["miss"] = {"reason": begun.reason, "position": begun.position, **self.around(prompt, begun.position)}
        return told

    def around(self, prompt: Prompt, position: int) -> dict[str, str]:
        """The text of a prompt before and behind a token."""
        if self.tokens is None:
            return {}
        ids = prompt.ids
        return {
            "before": self.tokens.decode(ids[max(0, position - 12) : position].tolist()),
            "after": self.tokens.decode(ids[position : position + 12].tolist()),
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
