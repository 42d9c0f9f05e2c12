"""The API described: as OpenAPI, from the structs that parse requests, and as the page of links at `/`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from sapwood import __version__

from ..limits import MAX_LISTED_ITEMS, MAX_TREE_NODES
from .admin import TIERS
from .anthropic_request import CountRequest, MessagesRequest
from .response_request import InputTokensRequest, ResponsesRequest
from .response_store import ORDERS
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
    "/cache/tree": {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_TREE_NODES}},
    "/reset_prefix_cache": {"tiers": {"type": "string", "enum": list(TIERS)}},
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED_ITEMS},
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
_BEFORE = (408, 413, 431)  # answers of the connection, which does not know the path
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
    """`endpoints`: paths and their methods; `root`: the path below which a proxy shows them."""
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
    for status, meaning in _STATUSES.items():
        anthropic = path.startswith("/v1/messages") and status not in _BEFORE
        schema = {"$ref": f"#/components/schemas/{'AnthropicError' if anthropic else 'Error'}"}
        found[str(status)] = {"description": meaning, "content": {"application/json": {"schema": schema}}}
    return found


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


# ---- the page at `/`

_LINKS = {
    "health": "whether the next request is answered",
    "v1/models": "the model and its adapters",
    "metrics": "figures for Prometheus",
    "cache/stats": "what the cache holds and has done",
    "openapi.json": "everything else, described",
    "version": "of the server",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page(root: str) -> bytes:
    """The page at `/`, which needs no key, holds no data and loads nothing. `root`: the path below which a proxy shows
    the server; "" if there is none."""
    below = f"{escape(root)}/" if root else ""  # else relative: a proxy may show it below a path that is not known here
    rows = "".join(
        f'<li><a href="{below}{path}">/{path}</a> {escape(purpose)}</li>\n' for path, purpose in _LINKS.items()
    )
    text = f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Sapwood</title></head><body>
<h1>Sapwood</h1>
<p>This is a server for programs: it speaks OpenAI's API below <code>{escape(root)}/v1</code>.</p>
<ul>
{rows}</ul>
</body></html>
"""
    return text.encode()
