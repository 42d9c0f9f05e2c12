"""What the APIs share: from a request's fields to prompts, parameters and a generation that runs.

names     the model by each of its names, and adapters
prompts   text, token ids, conversations through the chat template
params    SamplingParams, from the request, then from the model's generation config
begin     submitted, within the limits of the queue
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.engine.cache_report import TIERS
from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import bad_word_tokens

from .api.content import message_texts
from .api.forms import Form, form_of
from .api.response_store import ResponseStore
from .api.schemas import MOST_NAMED, Sampling
from .config import ServerConfig
from .defaults import MODEL_DEFAULTS
from .errors import ApiError, bad, engine_down, shown, unsupported
from .generation import Generation, Model, Prompt
from .process.engine_client import EngineClient
from .process.grammars import GrammarSpec
from .process.grammars import check as check_grammar
from .process.messages import SampleBegun
from .salt_key import salt_of
from .text.answer_parts import Tools, with_tools_in_system_prompt
from .text.reasoning import ReasoningSplitter, splitter_for
from .text.template import ChatTemplate, TemplateError
from .text.tokens import AsyncTokenizer

# Fields of SamplingParams that are no field of every request: APIs have other names for them, or none.
_APART = {"max_tokens", "logprobs", "cache_salt", "detokenize"}
_PLAIN = tuple(field.name for field in fields(SamplingParams) if field.name not in _APART)

log = logging.getLogger(__name__)
_MOST_PRIORITY = 2**31 - 1
_MAX_PROMPT_CONTEXTS = 2  # contexts that a prompt may have, if it is to be cut or only counted
_MOST_CHARACTERS = 64  # of a token, on average
_INLINE_BYTES, _INLINE_MESSAGES = 256 << 10, 32  # bytes and messages whose prompt is made at once, without a thread
_MOST_BEGINS = 1 << 25  # characters of all beginnings of all stop strings, all samples together


class Caller(NamedTuple):
    """Who asks. `tenant`: with whom he shares what is shared equally: a key's number; without keys, his address."""

    id: str
    key: str | None
    admin: bool
    tenant: str = ""


class Source(NamedTuple):
    """Where an adapter was loaded from, and is again for an engine that is started again. `root`: the folder that it
    must lie in."""

    path: str
    root: str | None = None

    def shown(self, admin: bool) -> str:
        """Where it lies is the administrator's business; others see the last part of it."""
        return os.path.join(self.root or "", self.path) if admin else PurePath(self.path).name or self.path


class Serving:
    """A model, its tokenizer and its rules. One event loop calls all of it."""

    def __init__(self, config: ServerConfig, link: EngineClient, secret: bytes | None = None) -> None:
        """`secret`: what salts are made with; None: one of its own, which no other server shares."""
        self.config = config
        self._secret = secret or secrets.token_bytes(32)
        self.link = link
        self.names: list[str] = list(config.served_model_name)
        self.given_name: str | None = None  # of the model, on the command line; a path is not shown
        self.adapters: dict[str, bytes] = {}
        self.sources: dict[str, Source] = {}
        self.parents: dict[str, str] = {}  # base models that adapters were given with, if they were
        self.created = int(time.time())
        self.tokens: AsyncTokenizer | None = None
        self.template: ChatTemplate | None = None
        self.tool_parser: str | None = None
        self.defaults: dict[str, Any] = {}
        self.responses = ResponseStore(config.max_responses, config.max_responses_bytes)
        self.ready = False  # engine, names, tokenizer, adapters and metrics are there
        self.draining = False
        self._told_priority = False

    @property
    def unready(self) -> ApiError | None:
        """Why the next request could not be answered; None: it will be."""
        if self.link.down is not None:
            return engine_down(self.link.down)
        if not self.ready:
            doing = f"the model is not loaded yet ({self.link.doing})"
            return ApiError(503, doing, "not_ready", headers={"Retry-After": "2"})
        return None

    # ---- names

    def model(self, name: str | None) -> Model:
        if name is None or name in self.names or name == self.given_name:
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

    @property
    def max_logprobs(self) -> int:
        """What a request may ask for of each token."""
        assert self.link.ready is not None
        return int(self.link.ready.facts.get("max_logprobs", 20))

    def tokenizer(self) -> AsyncTokenizer:
        if self.tokens is None:
            raise ApiError(400, "this server has no tokenizer: send token ids to /v1/completions", "no_tokenizer")
        return self.tokens

    async def prompt(self, given: str | list[int], add_special_tokens: bool = True) -> Prompt:
        """A prompt as completions have it."""
        if isinstance(given, str):
            ids = await self._encoded(given, add_special_tokens)
            return Prompt(ids, given)
        if len(given) > _MAX_PROMPT_CONTEXTS * self.limit:
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
                with_tools_in_system_prompt(made, tools) if tools and "tools" not in template.text else made,
                tools=tools,
                add_generation_prompt=not goes_on if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=goes_on,
                more=more or {},
            )

        size = len(msgspec.json.encode((messages, tools, more)))
        if size > 4 * _MOST_CHARACTERS * self.limit:
            raise self.too_long(None)
        short = size <= _INLINE_BYTES and len(messages) <= _INLINE_MESSAGES
        try:
            text = render() if short else await tokens.run(render)
        except TemplateError as error:
            raise bad("messages", str(error)) from None
        return Prompt(await self._encoded(text, add_special_tokens), text)

    def template_knows(self, name: str) -> bool:
        """Whether the chat template asks for this variable."""
        return self.template is not None and name in self.template.variables

    def with_verbosity(self, template: dict[str, Any], field: str, asked: str | None) -> dict[str, Any]:
        """What the chat template is told, and how wordy an answer is to be."""
        if asked is not None and self.template_knows("verbosity"):
            template.setdefault("verbosity", asked)
        elif asked not in (None, "medium"):
            raise unsupported(field, f'the model\'s chat template knows nothing of it but "medium", got {shown(asked)}')
        return template

    async def _encoded(self, text: str, add_special_tokens: bool) -> Any:
        tokens = self.tokenizer()
        if len(text) > _MOST_CHARACTERS * self.limit:
            raise self.too_long(None)
        if len(text) > 4 * _MAX_PROMPT_CONTEXTS * self.limit and await tokens.surely_more(
            text, _MAX_PROMPT_CONTEXTS * self.limit
        ):
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
        for name in MODEL_DEFAULTS:
            if given[name] is None:
                given[name] = self.defaults.get(name)
        if request.logit_bias is not None and len(request.logit_bias) > self.config.max_logit_bias:
            raise bad(
                "logit_bias", f"logit_bias may have {self.config.max_logit_bias} entries, got {len(request.logit_bias)}"
            )
        if not caller.admin:
            given["priority"] = self._priority(given["priority"] or 0)
        scores = request.prompt_logprobs
        if scores is not None and not 0 <= scores <= self.max_logprobs:
            raise bad("prompt_logprobs", f"prompt_logprobs must be from 0 to {self.max_logprobs}, got {shown(scores)}")
        salt = self.salt(request.cache_salt, caller)
        if max_tokens == 0:
            raise bad("max_tokens", "max_tokens must be 1 or more, got 0")
        named = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**named, max_tokens=max_tokens, logprobs=logprobs, cache_salt=salt)
        except (ValueError, TypeError, OverflowError) as error:
            raise bad(str(error).split(" ", 1)[0], str(error)) from None

    def _priority(self, asked: int) -> int:
        """What a caller without the admin key gets. A number that is none of the engine's stays wrong."""
        most = self.config.max_priority
        if asked >= most or asked < -_MOST_PRIORITY:
            return asked
        if not self._told_priority:
            log.info("a request asked for priority %d and gets %d, as others may have (--max-priority)", asked, most)
            self._told_priority = True
        return most

    def salt(self, given: str | None, caller: Caller) -> str | None:
        """What keeps a request's cached prefixes from others."""
        if not self.config.salt_by_key:
            return given
        if given is not None:
            raise unsupported("cache_salt", "this server makes salts from API keys")
        return salt_of(self._secret, caller.key or "")

    def grammar(self, request: Sampling, tools: Tools | None = None) -> GrammarSpec | None:
        """What holds the answer to the form that a request demands. A call that is demanded comes before that: the
        form is one of content, and is checked all the same."""
        form = form_of(request)
        if form is not None:
            self._check_form(form)
        if tools is not None and tools.grammar is not None:
            form = Form("tools", tools.grammar)
            self._check_form(form)
        return None if form is None else form.grammar

    def _check_form(self, form: Form) -> None:
        config = self.config
        try:
            check_grammar(
                form.grammar,
                max_bytes=config.max_schema_bytes,
                max_depth=config.max_schema_depth,
                max_choices=config.max_choices,
            )
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_grammar", form.field) from None

    # ---- running

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request: Sampling,
        model: Model,
        caller: Caller,
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
        self._admit(lanes, caller)
        job = self.link.job(lanes, caller.tenant)
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
        detokenizer = None if self.tokens is None else self.tokens.detokenizer
        generation = Generation(job, prompts, params, detokenizer, model)
        generation.held = grammar is not None and grammar.kind != "structural_tag"
        return generation

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

    def _admit(self, lanes: int, caller: Caller) -> None:
        if self.unready is not None:
            raise self.unready
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
        most = self.config.max_requests_per_key
        if most and not caller.admin:
            if lanes > most:
                raise bad("n", f"a key may have {most} samples here at once, got {lanes} in one request")
            live = self.link.live(caller.tenant)
            if live + lanes > most:
                raise ApiError(
                    429,
                    f"this key has {live} samples here that wait or run, and {most} may: {lanes} more are asked for",
                    "key_full",
                    headers={"Retry-After": "1"},
                )

    def truncated(self, request: Sampling, prompts: list[Prompt]) -> list[Prompt]:
        """`truncate_prompt_tokens`: the last so many tokens of each, or the first, by `truncation_side`."""
        most = request.truncate_prompt_tokens
        if most is None:
            return prompts
        if most == -1:
            most = self.limit - 1
        if most < 1:
            raise bad("truncate_prompt_tokens", f"truncate_prompt_tokens must be 1 or more, got {shown(most)}")
        if request.truncation_side == "right":
            return [prompt if len(prompt.ids) <= most else Prompt(prompt.ids[:most]) for prompt in prompts]
        return [
            prompt if len(prompt.ids) <= most else Prompt(prompt.ids[-most:], prompt.text, cut=True)
            for prompt in prompts
        ]

    # ---- what is told of the answer

    def splitter(
        self,
        generation: Generation,
        tools: Tools,
        template: Mapping[str, Any] | None,
        asked: bool | None = None,
    ) -> ReasoningSplitter | None:
        """What tells the reasoning of one sample apart. `template`: what the chat template was told beside messages;
        `asked`: what the request says of reasoning."""
        parser = self.config.reasoning_parser
        if asked is False or (asked is None and parser == "none"):
            return None
        return splitter_for(
            "think" if parser == "none" else parser,
            generation.prompts[0].text or "",
            thinks=(template or {}).get("enable_thinking") is not False,
            calls=tools.parser is not None,
            held=generation.held,
        )

    # ---- what is told of the cache

    def report(self, generation: Generation) -> list[dict[str, Any]]:
        """What each prompt was served from where, and why no more of it, in words of the requester's own prompt."""
        return [self._report(prompt, begun) for prompt, begun in zip(generation.prompts, generation.begun, strict=True)]

    def _report(self, prompt: Prompt, begun: SampleBegun | None) -> dict[str, Any]:
        if begun is None:
            return {"prompt_tokens": len(prompt.ids), "cached_tokens": 0}
        cache = begun.cache
        report = {"prompt_tokens": len(prompt.ids), "cached_tokens": cache.cached}
        report |= zip(TIERS, cache.by_tier, strict=True)
        miss = {"reason": cache.reason, "position": cache.position, **self.around(prompt, cache.position)}
        return {**report, "miss": miss if cache.missed else None}

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
