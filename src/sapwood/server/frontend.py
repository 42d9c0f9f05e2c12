"""The model that is served, and the way of a request into the engine.

`ServedModels`  names of the model and of its adapters
`Serving`       what all requests share, and whether the next one is answered; `submit` puts a request into the engine,
                within the limits of the queue
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import bad_word_tokens

from .api.response_store import ResponseStore
from .api.schemas import Sampling
from .config import ServerConfig
from .errors import ApiError, bad, engine_down
from .generation import Generation, Model, Prompt
from .limits import MAX_NAMED_TOKENS, MAX_STOP_PREFIX_CHARACTERS
from .parameters import Parameters
from .process.engine_client import EngineClient
from .process.grammars import GrammarSpec
from .prompts import PromptBuilder
from .request_head import Caller


class Source(NamedTuple):
    """Where an adapter was loaded from; an engine that is started again loads it from there. `root`: the folder that
    the path must be in."""

    path: str
    root: str | None = None

    def shown(self, admin: bool) -> str:
        """The whole path is for the administrator; others see its last part."""
        return os.path.join(self.root or "", self.path) if admin else PurePath(self.path).name or self.path


class ServedModels:
    """The names that requests may use: `names` of the model itself, the first of which answers show, and adapters."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names: list[str] = list(names)
        self.given_name: str | None = None  # of the model on the command line; answers do not show a path
        self.adapters: dict[str, bytes] = {}
        self.sources: dict[str, Source] = {}
        self.parents: dict[str, str] = {}  # base models of adapters, where they were given
        self.created = int(time.time())

    def find(self, name: str | None) -> Model:
        if name is None or name in self.names or name == self.given_name:
            return Model(self.names[0], None)
        if name in self.adapters:
            return Model(name, self.adapters[name])
        raise ApiError(
            404, f"there is no model {name!r:.200} here; there is {', '.join(self.names)}", "model_not_found", "model"
        )

    def forget(self, adapter: str) -> None:
        for known in (self.adapters, self.sources, self.parents):
            known.pop(adapter, None)


class Serving:
    """One event loop calls all of it. `secret`: the key of salts."""

    def __init__(self, config: ServerConfig, link: EngineClient, secret: bytes | None = None) -> None:
        self.config = config
        self.link = link
        self.models = ServedModels(config.served_model_name)
        self.prompts = PromptBuilder(link)
        self.parameters = Parameters(config, link, secret)
        self.responses = ResponseStore(config.max_responses, config.max_responses_bytes)
        self.tool_parser: str | None = None  # the format of the model's calls
        self.ready = False  # engine, names, tokenizer, adapters and metrics are there
        self.draining = False

    @property
    def unready(self) -> ApiError | None:
        """Why the next request would not be answered; None: it will be."""
        if self.link.down is not None:
            return engine_down(self.link.down)
        if not self.ready:
            message = f"the model is not loaded yet ({self.link.doing})"
            return ApiError(503, message, "not_ready", headers={"Retry-After": "2"})
        return None

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request: Sampling,
        model: Model,
        caller: Caller,
        grammar: GrammarSpec | None = None,
    ) -> Generation:
        """Put the prompts of a request into the engine. `params.n` samples for each."""
        samples = len(prompts) * params.n
        if samples > self.config.max_n:
            raise bad("n", f"a request may have {self.config.max_n} samples in all, got {samples}")
        for prompt in prompts:
            new = params.max_tokens or 1
            if len(prompt.ids) + new > self.prompts.limit:
                raise self.prompts.too_long(len(prompt.ids), new if len(prompt.ids) < self.prompts.limit else 0)
        _check_repeated_work(params, len(prompts))
        words = await self._bad_words(params) if params.bad_words else []
        self._check_queue(samples, caller)
        job = self.link.job(samples, caller.tenant)
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
        tokens = self.prompts.tokens
        generation = Generation(job, prompts, params, None if tokens is None else tokens.detokenizer, model)
        generation.held = grammar is not None and grammar.kind != "structural_tag"
        return generation

    async def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        tokens = self.prompts.tokenizer()
        try:
            return list(await tokens.run(lambda: bad_word_tokens(tokens.tokenizer, params)))
        except ValueError as error:
            raise bad("bad_words", str(error)) from None

    def _check_queue(self, samples: int, caller: Caller) -> None:
        """Whether so many samples may wait or run, besides those of others and those of the same key."""
        if self.unready is not None:
            raise self.unready
        if self.draining:
            raise ApiError(503, "the server is stopping", "stopping", headers={"Retry-After": "30"})
        waiting = self.link.waiting
        if waiting and waiting + samples > self.config.max_queue:
            raise ApiError(
                429,
                f"{waiting} requests wait already, and {self.config.max_queue} may",
                "queue_full",
                headers={"Retry-After": "1"},
            )
        most = self.config.max_requests_per_key
        if most and not caller.admin:
            if samples > most:
                raise bad("n", f"a key may have {most} samples here at once, got {samples} in one request")
            live = self.link.live(caller.tenant)
            if live + samples > most:
                raise ApiError(
                    429,
                    f"this key has {live} samples here that wait or run, and {most} may: {samples} more are asked for",
                    "key_full",
                    headers={"Retry-After": "1"},
                )


def _check_repeated_work(params: SamplingParams, prompts: int) -> None:
    """The engine makes masks for every prompt, and prefixes of stop strings for every sample: many of them may not be
    large."""
    named = len(params.allowed_token_ids or ()) + len(params.logit_bias or ())
    if prompts * named > MAX_NAMED_TOKENS:
        field = "allowed_token_ids" if params.allowed_token_ids else "logit_bias"
        raise bad(
            field, f"{field} may name {MAX_NAMED_TOKENS} tokens for all prompts, got {named} for each of {prompts}"
        )
    prefixes = sum(len(stop) ** 2 for stop in params.stops)
    if prompts * params.n * prefixes > MAX_STOP_PREFIX_CHARACTERS:
        raise bad("stop", f"stop must have fewer or shorter strings for {prompts * params.n} samples")
