"""What a client is told when something is wrong: OpenAI's error body, and the status that belongs to it."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_disconnected",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_PATH = re.compile(r"""(?<![\w/.:~])~?/(?:[^\s/'"`,:;()<>]+/)+([^\s/'"`,:;()<>]*)""")


class Disconnected(Exception):
    """The client has left."""


class ApiError(Exception):
    """`param`: the field that is wrong, as a path; `code`: a word that programs look at."""

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
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)


class _Short(reprlib.Repr):
    """The beginning of a value: what is left out is not looked at."""

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
    """An error of the engine as a client may see it: of paths on this machine the last part. The log has all of it."""
    return _PATH.sub(r".../\1", text)


def bad(param: str | None, message: str) -> ApiError:
    """A field is wrong."""
    return ApiError(400, message, "invalid_value", param)


def unsupported(param: str, why: str) -> ApiError:
    """A field that would change the answer, and that this server does not have."""
    return ApiError(400, f"{param} is not supported here: {why}", "unsupported_parameter", param)


def engine_down(why: str) -> ApiError:
    return ApiError(503, why, "engine_down", headers={"Retry-After": "5"})
