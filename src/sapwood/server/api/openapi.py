"""The API described as OpenAPI, from the structs that parse it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood import __version__

from .admin import MOST_NODES, TIERS
from .anthropic import CountRequest, MessagesRequest
from .response_input import MOST_LISTED, ORDERS
from .response_request import InputTokensRequest, ResponsesRequest
from .schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ExplainRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
)

_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapter,
    "/v1/unload_lora_adapter": UnloadAdapter,
    "/cache/explain": ExplainRequest,
}
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/cache/tree": {"limit": {"type": "integer", "minimum": 1, "maximum": MOST_NODES}},
    "/reset_prefix_cache": {"tiers": {"type": "string", "enum": list(TIERS)}},
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
        "order": {"type": "string", "enum": list(ORDERS)},
        "after": {"type": "string"},
    },
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_TEXTS = {"/metrics": "text/plain", "/": "text/html"}
_STATUSES = {
    400: "what is wrong with the request, and the field it is in",
    401: "an API key is wanted",
    403: "this is not for everybody: for the administrator, or by a name of this server alone",
    404: "there is no such thing here: a model, an adapter, a response, a path",
    405: "the path has other methods",
    408: "the request came too slowly",
    413: "the body is too large",
    429: "too many requests wait, or come from one address or with one key",
    431: "the headers are too large",
    503: "the model is not loaded yet, the server is stopping or has too much to hold, or its engine is gone",
}
_BEFORE = (408, 413, 431)  # before the path is looked at
_TEXT = {"type": "string"}
_ERRORS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
        },
    },
}


def description(endpoints: Sequence[tuple[str, str]], root: str = "") -> dict[str, Any]:
    """`endpoints`: paths and their methods; `root`: the path that a proxy shows them below."""
    kinds = list(_BODIES.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(_BODIES, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, method in endpoints:
        name = path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "operationId": method.lower() + name.translate({ord("/"): "_", ord("{"): None, ord("}"): None}),
            "responses": {"200": {"description": "the answer", "content": _answer(path)}, **_refusals(path)},
        }
        parameters = [_parameter("path", part[1:-1], _TEXT) for part in name.split("/") if part.startswith("{")]
        parameters += [_parameter("query", name, schema) for name, schema in _QUERIES.get(path, {}).items()]
        if parameters:
            operation["parameters"] = parameters
        if method == "POST" and path in bodies:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": bodies[path]}}}
        paths.setdefault(name, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sapwood", "version": __version__},
        **({"servers": [{"url": root}]} if root else {}),
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _answer(path: str) -> dict[str, Any]:
    if path in _TEXTS:
        return {_TEXTS[path]: {"schema": _TEXT}}
    whole = {"application/json": {"schema": {"type": "object"}}}
    return {**whole, "text/event-stream": {}} if path in _STREAMED else whole


def _refusals(path: str) -> dict[str, Any]:
    found = {}
    for status, told in _STATUSES.items():
        theirs = path.startswith("/v1/messages") and status not in _BEFORE
        schema = {"$ref": f"#/components/schemas/{'AnthropicError' if theirs else 'Error'}"}
        found[str(status)] = {"description": told, "content": {"application/json": {"schema": schema}}}
    return found


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
