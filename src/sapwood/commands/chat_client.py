"""A server as `sapwood chat` needs it: its first model, and one streamed answer at a time."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from sapwood import __version__

_MOST_ANSWER = 64 << 20  # bytes of an answer that is not streamed, and of a line of one that is


class Trouble(Exception):
    """Something to tell the user."""


class RequestRefused(Trouble):
    """An answer that is none."""

    def __init__(self, status: int, message: str) -> None:
        hint = ": --api-key or OPENAI_API_KEY must have a key of this server" if status in (401, 403) else ""
        super().__init__(f"the server refuses with status {status}: {message}{hint}")
        self.status = status
        self.message = message


class Server:
    """A server that speaks OpenAI's HTTP. One request at a time, each on a connection of its own: closing that is what
    stops an answer."""

    def __init__(self, url: str, key: str | None, timeout: float, insecure: bool = False) -> None:
        """ValueError if `url` is no address of a server, or the key cannot be sent."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"--url must be like http://127.0.0.1:8000, got {url!r:.60}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("the API key must be printable ASCII")
        self.url = url
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        if self._tls is not None and insecure:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"Content-Type": "application/json", "User-Agent": f"sapwood/{__version__}"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        with self._opened("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read(_MOST_ANSWER))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise Trouble(f"{self.url} lists no model: --model must name one") from None

    def stream(self, asked: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of an answer. Closing this stops the answer."""
        with self._opened("POST", "/v1/chat/completions", json.dumps(asked).encode()) as response:
            while line := response.readline(_MOST_ANSWER):
                if not line.startswith(b"data:"):
                    continue  # a comment that keeps the connection alive, or the empty line behind an event
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = json.loads(data)
                except (ValueError, RecursionError):
                    event = None
                if not isinstance(event, dict):
                    raise Trouble(f"the server says what is no event: {data!r:.60}")
                if event.get("error") is not None:
                    raise Trouble(f"the server says: {_message_of(event)}")
                yield event
            raise Trouble("the server broke off in the middle of the answer")

    @contextmanager
    def _opened(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)
        response = None
        try:
            try:
                connection.connect()
            except OSError as error:
                message = f"no server answers at {self.url} ({error}): start one with `sapwood serve`"
                raise Trouble(message) from None
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestRefused(response.status, _message_of(response.read(_MOST_ANSWER)))
            yield response
        except TimeoutError:
            raise Trouble(f"the server says nothing for {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Trouble(f"the server broke off ({error or type(error).__name__})") from None
        finally:
            if response is not None:
                response.close()
            connection.close()


def _message_of(error: Any) -> str:
    """What an error of OpenAI's form says, in a line."""
    if isinstance(error, bytes):
        try:
            error = json.loads(error)
        except (ValueError, RecursionError):
            error = error.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return " ".join(str(error).split())[:500]
