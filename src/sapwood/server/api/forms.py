"""The form that a request demands of its answer: the words of OpenAI, vLLM, SGLang and llama.cpp for it become one
grammar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ..errors import bad, unsupported
from ..process.grammars import GrammarSpec
from .schemas import ResponseFormat, Sampling, StructuredOutputs


class Form(NamedTuple):
    """`field`: of the request, which has asked for it."""

    field: str
    grammar: GrammarSpec


def form_of(request: Sampling) -> Form | None:
    """Not checked beyond what JSON says of it."""
    asked = [*_formats(request.response_format), *_structured(request.structured_outputs), *_plain(request)]
    if len(asked) > 1:
        fields = " and ".join(dict.fromkeys(form.field for form in asked))
        raise bad(asked[-1].field, f"an answer can have one form: several were asked for, by {fields}")
    return asked[0] if asked else None


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


_PLAIN = {  # fields of the request itself -> kinds of grammars
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_json": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json_schema",
}


def _plain(request: Sampling) -> Iterator[Form]:
    for field, kind in _PLAIN.items():
        value = getattr(request, field)
        if value is not None:
            yield Form(field, GrammarSpec(kind, _json(value)))


def _json(value: Any) -> str:
    """Text is JSON already, or what it should be."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
