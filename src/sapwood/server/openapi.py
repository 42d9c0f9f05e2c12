"""The API described as OpenAPI, from the structs that parse it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sapwood import __version__

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
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapter,
    "/v1/unload_lora_adapter": UnloadAdapter,
    "/cache/explain": ExplainRequest,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def description(endpoints: Sequence[tuple[str, str]]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_BODIES.values()))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, method in endpoints:
        name = path.replace("{name:path}", "{name}")
        operation: dict[str, Any] = {
            "operationId": f"{method.lower()}{name.replace('/', '_').replace('{', '').replace('}', '')}",
            "responses": {
                "200": {"description": "the answer"},
                "default": {
                    "description": "what is wrong",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        parameters = [part[1:-1] for part in name.split("/") if part.startswith("{")]
        if parameters:
            operation["parameters"] = [
                {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in parameters
            ]
        if method == "POST" and path in _BODIES:
            content = {"application/json": {"schema": bodies[_BODIES[path]]}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(name, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sapwood", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
