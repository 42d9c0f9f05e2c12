"""Errors as clients get them: OpenAI's error body, and the type that belongs to each status."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from itertools import islice
from typing import Any

import msgspec

# Status -> type. Any other status below 500 is an invalid_request_error, any other from there on a server_error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "client_disconnected",
    501: "invalid_request_error",  # a method or a version of HTTP that only another client would send
    503: "service_unavailable_error",
    504: "timeout_error",
    505: "invalid_request_error",
}
_PATH = re.compile(r"""(?<![\w/.:~])~?/(?:[^\s/'"`,:;()<>]+/)+([^\s/'"`,:;()<>]*)""")


def error_body(status: int, message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Disconnected(Exception):
    """The client has left."""


class ApiError(Exception):
    """An error of a request that reached its endpoint, or the router. `param`: the path of the field that is wrong;
    `code`: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.code, self.param)

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)


class HttpRefusal(Exception):
    """A request that a connection refuses before any application sees it. The answer ends the connection."""

    def __init__(self, status: int, code: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers

    def reply(self, default_headers: list[tuple[bytes, bytes]], method: str) -> bytes:
        """The whole answer."""
        body = json.dumps(error_body(self.status, self.message, self.code)).encode()
        headers = [
            *default_headers,
            *self.headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [b"HTTP/1.1 %d %s" % (self.status, HTTPStatus(self.status).phrase.encode())]
        lines += [name + b": " + value for name, value in headers]
        return b"\r\n".join([*lines, b"", b"" if method == "HEAD" else body])


def bad(param: str | None, message: str) -> ApiError:
    """A field has a wrong value."""
    return ApiError(400, message, "invalid_value", param)


def unsupported(param: str, why: str) -> ApiError:
    """A field asks for something that would change the answer, and that this server does not have."""
    return ApiError(400, f"{param} is not supported here: {why}", "unsupported_parameter", param)


def engine_down(why: str) -> ApiError:
    return ApiError(503, why, "engine_down", headers={"Retry-After": "5"})


class _Short(reprlib.Repr):
    """The beginning of a value. What the text leaves out is never looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxstring, self.maxother = 4, 8, 60, 60

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:  # reprlib's own sorts all of it
        if level <= 0:
            return "{...}"
        some = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxlist)]
        return f"{{{', '.join(some + ['...'] * (len(x) > self.maxlist))}}}"


_short = _Short()


def shown(value: object) -> str:
    """A client's value for an error, in at most 60 characters."""
    return _short.repr(value)[:60]


def without_paths(text: str) -> str:
    """An error of the engine for a client: of each path on this machine only the last part is left. The log has the
    whole text."""
    return _PATH.sub(r".../\1", text)
