"""What of a request's head is refused before any application sees it, and the answer that says so."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .http_limits import HttpLimits

_CHECKED = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade"})


class HttpRefusal(Exception):
    """A request that gets this answer and ends its connection."""

    def __init__(self, status: int, code: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers

    def reply(self, default_headers: list[tuple[bytes, bytes]], method: str) -> bytes:
        """The whole answer, with OpenAI's error body."""
        kind = {429: "rate_limit_error", 503: "service_unavailable_error"}.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        body = json.dumps({"error": error}).encode()
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


def headers_too_large(most: int) -> HttpRefusal:
    return HttpRefusal(431, "headers_too_large", f"The request line and headers must be at most {most} bytes.")


def body_too_large(most: int) -> HttpRefusal:
    return HttpRefusal(413, "body_too_large", f"The body must be at most {most} bytes.")


def too_many(message: str) -> HttpRefusal:
    return HttpRefusal(429, "too_many_requests", message, (b"retry-after", b"1"))


def too_much_at_once() -> HttpRefusal:
    return HttpRefusal(
        503,
        "inflight_full",
        "Requests and answers fill the memory that this server has for them: try again later.",
        (b"retry-after", b"1"),
    )


def check_head(
    limits: HttpLimits, version: str, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """The header that frames the body. Raises HttpRefusal for what is too large, is not spoken here, or might be read
    differently by a proxy. Whatever else is wrong with lengths and characters the parser has refused already."""
    size, length, hosts = len(method) + len(target) + len(b"  HTTP/1.1\r\n"), 0, 0
    codings: list[bytes] = []
    upgrade = b""
    for name, value in headers:
        size += len(name) + len(value) + len(b": \r\n")
        if name in _CHECKED:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = int(value)  # there is one, of digits
            elif name == b"transfer-encoding":
                codings.append(value.lower())
            else:
                upgrade = value.lower()
    if size > limits.header_bytes:
        raise headers_too_large(limits.header_bytes)
    if length > limits.body_bytes:
        raise body_too_large(limits.body_bytes)
    if version not in ("1.0", "1.1"):
        raise HttpRefusal(505, "http_version_not_supported", "This server speaks HTTP/1.1.")
    if method == b"CONNECT":
        raise HttpRefusal(501, "not_implemented", "This server is no proxy.")
    if hosts > 1:
        raise HttpRefusal(400, "bad_request", "A request has one Host header.")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise HttpRefusal(400, "bad_request", "Transfer-Encoding must be chunked, and needs HTTP/1.1.")
    if upgrade == b"websocket":
        raise HttpRefusal(400, "upgrade_not_supported", "This server does not speak WebSocket: use plain HTTP.")
    return b"transfer-encoding: chunked" if codings else b"content-length: %d" % length
