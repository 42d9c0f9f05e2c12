"""From the fields of a request to what the engine gets: sampling parameters, a salt, and a grammar.

A sampling field that the request leaves out has the default of the model's generation_config.json, and then that of
SamplingParams. The fields for structured output of OpenAI, vLLM, SGLang and llama.cpp all become one grammar.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sapwood.engine.loading.model_files import read_json
from sapwood.engine.params import SamplingParams

from .api.schemas import ResponseFormat, Sampling, StructuredOutputs
from .config import ServerConfig
from .errors import ApiError, bad, shown, unsupported
from .limits import DEFAULT_MAX_LOGPROBS, MAX_PRIORITY
from .process.engine_client import EngineClient
from .process.grammars import GrammarSpec
from .process.grammars import check as check_grammar
from .request_head import Caller
from .salt_key import salt_of
from .text.answer_parts import Tools

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (  # fields that requests and SamplingParams have in common
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "priority", "n"),
    *("prompt_logprobs",),
)

log = logging.getLogger(__name__)


class Parameters:
    """The rules of one server. `defaults`: of sampling, by the model. `secret`: the key of salts; None: a key of its
    own, which no other server shares."""

    def __init__(self, config: ServerConfig, link: EngineClient, secret: bytes | None = None) -> None:
        self.defaults: dict[str, Any] = {}
        self._config = config
        self._link = link
        self._secret = secret or secrets.token_bytes(32)
        self._logged_priority = False

    @property
    def max_logprobs(self) -> int:
        """How many of the likeliest tokens a request may ask for with each token."""
        assert self._link.ready is not None
        return int(self._link.ready.facts.get("max_logprobs", DEFAULT_MAX_LOGPROBS))

    def sampling(
        self, request: Sampling, caller: Caller, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        given = {name: getattr(request, name) for name in _PLAIN}
        for name in _DEFAULTS:
            if given[name] is None:
                given[name] = self.defaults.get(name)
        if request.logit_bias is not None and len(request.logit_bias) > self._config.max_logit_bias:
            most, count = self._config.max_logit_bias, len(request.logit_bias)
            raise bad("logit_bias", f"logit_bias may have {most} entries, got {count}")
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

    def _priority(self, priority: int) -> int:
        """The priority of a request without the admin key. A number outside of the engine's range is left as it is, so
        that SamplingParams refuses it."""
        most = self._config.max_priority
        if priority >= most or priority < -MAX_PRIORITY:
            return priority
        if not self._logged_priority:
            log.info("a request asked for priority %d and gets %d, as others may have (--max-priority)", priority, most)
            self._logged_priority = True
        return most

    def salt(self, salt: str | None, caller: Caller) -> str | None:
        """The salt that keeps a request's cached prefixes apart: its own, or with --salt-by-key one of its API key."""
        if not self._config.salt_by_key:
            return salt
        if salt is not None:
            raise unsupported("cache_salt", "this server makes salts from API keys")
        return salt_of(self._secret, caller.key or "")

    def grammar(self, request: Sampling, tools: Tools | None = None) -> GrammarSpec | None:
        """The grammar that holds the whole answer. Calls that are demanded go before the form of the content, which is
        checked all the same."""
        form = form_of(request)
        if form is not None:
            self._check_form(form)
        if tools is not None and tools.grammar is not None:
            form = Form("tools", tools.grammar)
            self._check_form(form)
        return None if form is None else form.grammar

    def _check_form(self, form: Form) -> None:
        config = self._config
        try:
            check_grammar(
                form.grammar,
                max_bytes=config.max_schema_bytes,
                max_depth=config.max_schema_depth,
                max_choices=config.max_choices,
            )
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_grammar", form.field) from None


def generation_defaults(folder: str, source: str) -> dict[str, Any]:
    """The model's own defaults of sampling. `source`: "auto" for its generation_config.json, "none" (or "vllm"), or
    another folder that has one."""
    if source in ("none", "vllm"):
        return {}
    path = Path(folder if source == "auto" else source) / "generation_config.json"
    if not path.is_file():
        return {}
    read = read_json(path)
    found = {name: read[name] for name in _DEFAULTS if isinstance(read.get(name), int | float)}
    if read.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    SamplingParams(**found)  # a ValueError names what is wrong
    return found


# ---- structured output


class Form(NamedTuple):
    """The form that a request demands of its answer. `field`: the field that demands it."""

    field: str
    grammar: GrammarSpec


def form_of(request: Sampling) -> Form | None:
    """Checked only as far as JSON goes."""
    forms = [*_formats(request.response_format), *_structured(request.structured_outputs), *_fields(request)]
    if len(forms) > 1:
        fields = " and ".join(dict.fromkeys(form.field for form in forms))
        raise bad(forms[-1].field, f"an answer can have one form: several were asked for, by {fields}")
    return forms[0] if forms else None


def _formats(form: ResponseFormat | None) -> Iterator[Form]:
    if form is None or form.type == "text":
        return
    field = "response_format"
    named = form.json_schema if form.json_schema is not None else {}
    if form.type == "json_object" and form.schema is None:
        yield Form(field, GrammarSpec("json_object"))
    elif form.type in ("json_object", "json_schema"):
        schema = named.get("schema", form.schema)
        if not isinstance(schema, dict):
            raise bad(field, f"{field}.json_schema.schema must be a JSON schema")
        yield Form(field, GrammarSpec("json_schema", _json(schema)))
    elif form.type == "structural_tag":
        tags = {"structures": form.structures, "triggers": form.triggers}
        yield Form(field, GrammarSpec("structural_tag", _json(tags)))
    else:
        kinds = "text, json_object, json_schema or structural_tag"
        raise unsupported(field, f"its type must be {kinds}, got {form.type!r:.60}")


def _structured(outputs: StructuredOutputs | None) -> Iterator[Form]:
    if outputs is None:
        return
    field = "structured_outputs"
    if outputs.json_object or outputs.json is True:
        yield Form(field, GrammarSpec("json_object"))
    if outputs.json is not None and not isinstance(outputs.json, bool):
        yield Form(field, GrammarSpec("json_schema", _json(outputs.json)))
    for kind in ("regex", "grammar", "choice", "structural_tag"):
        value = getattr(outputs, kind)
        if value is not None:
            yield Form(field, GrammarSpec(kind, _json(value)))


_FORM_FIELDS = {  # fields of the request itself -> kinds of grammars
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_json": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json_schema",
}


def _fields(request: Sampling) -> Iterator[Form]:
    for field, kind in _FORM_FIELDS.items():
        value = getattr(request, field)
        if value is not None:
            yield Form(field, GrammarSpec(kind, _json(value)))


def _json(value: Any) -> str:
    """A text is JSON already, or meant to be."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
