"""Routes and keys, and the one place where every request ends, whatever goes wrong in it.

Routes are Starlette's, each a raw ASGI endpoint. A request gets an id, is let in or not, and ends with an answer, an
error in OpenAI's form, or a client that has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.routing import Route, Router

from sapwood import __version__
from sapwood.engine.cache_report import NOT_COMPUTED

from .api.admin import (
    cache_explain,
    cache_stats,
    cache_tree,
    detokenize,
    load_adapter,
    models,
    one_model,
    reset_prefix_cache,
    tokenize,
    unload_adapter,
)
from .api.anthropic import anthropic_error, count_tokens, messages
from .api.chat import chat_completions
from .api.completions import completions
from .api.openapi import PAGE_HEADERS, description, page
from .api.responses import cancel_response, delete_response, get_response, input_items, input_tokens, responses
from .errors import ApiError, Disconnected
from .frontend import Serving
from .generation import Generation
from .http import Call, Headers, new_id
from .observe.figures import Finished, FinishedPrompt
from .request_head import Caller, Hosts, client_of

log = logging.getLogger(__name__)
_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Answering = Callable[[Serving, Call], Awaitable[Generation | None]]


class Endpoint(NamedTuple):
    """`open`: without a key. `early`: before the server is ready. `admin`: with the administrator's key only."""

    path: str
    method: str
    answer: Answering
    open: bool = False
    early: bool = False
    admin: bool = False


class App:
    """`metrics` makes the text of /metrics; `watchers` are called with every generation that is over."""

    def __init__(self, serving: Serving, metrics: Callable[[], Awaitable[bytes]]) -> None:
        self.serving = serving
        self.watchers: list[Callable[[Finished], None]] = []
        self.calls: set[Call] = set()  # in flight
        self._metrics = metrics
        self._keys = [key.encode() for key in sorted(serving.config.keys)]
        admin = serving.config.admin_key
        self._admin = None if admin is None else admin.encode()
        config = serving.config
        self._root = config.root_path.rstrip("/")
        self._origins = {origin.encode() for origin in config.allowed_origins}
        self._hosts: Hosts | None = None  # where no key decides which clients may use the server
        if config.uds is None and (config.allowed_hosts or not self._keys):
            self._hosts = Hosts(config.allowed_hosts, config.allowed_origins, config.host)
        by_path: dict[str, list[Endpoint]] = {}
        for endpoint in self._endpoints():
            by_path.setdefault(endpoint.path, []).append(endpoint)
        self._router = Router(
            [Route(path, _Place(self, path, there)) for path, there in by_path.items()],
            redirect_slashes=False,
            default=_Place(self, "", []),
        )

    def _endpoints(self) -> list[Endpoint]:
        figures = self.serving.config.metrics_key
        changes = self._admin is not None  # changes for all clients are for the administrator, where there is one
        others = len(self._keys) > 1 or self.serving.config.salt_by_key  # so is the traffic of other tenants
        return [
            Endpoint("/", "GET", self._links, open=True, early=True),
            Endpoint("/v1/chat/completions", "POST", chat_completions),
            Endpoint("/v1/completions", "POST", completions),
            Endpoint("/v1/responses", "POST", responses),
            Endpoint("/v1/responses/input_tokens", "POST", input_tokens),  # before the names of responses
            Endpoint("/v1/responses/{id}", "GET", get_response),
            Endpoint("/v1/responses/{id}", "DELETE", delete_response),
            Endpoint("/v1/responses/{id}/input_items", "GET", input_items),
            Endpoint("/v1/responses/{id}/cancel", "POST", cancel_response),
            Endpoint("/v1/messages", "POST", messages),
            Endpoint("/v1/messages/count_tokens", "POST", count_tokens),
            Endpoint("/v1/models", "GET", models),
            Endpoint("/v1/models/{name:path}", "GET", one_model),
            Endpoint("/v1/load_lora_adapter", "POST", load_adapter, admin=changes),
            Endpoint("/v1/unload_lora_adapter", "POST", unload_adapter, admin=changes),
            Endpoint("/tokenize", "POST", tokenize),
            Endpoint("/detokenize", "POST", detokenize),
            Endpoint("/reset_prefix_cache", "POST", reset_prefix_cache, admin=changes),
            Endpoint("/cache/stats", "GET", cache_stats, admin=others),
            Endpoint("/cache/explain", "POST", cache_explain),
            Endpoint("/cache/tree", "GET", cache_tree, admin=True),
            Endpoint("/health", "GET", self._health, open=True, early=True),
            Endpoint("/ping", "GET", self._health, open=True, early=True),
            Endpoint("/ping", "POST", self._health, open=True, early=True),
            Endpoint("/version", "GET", self._version, early=True),
            Endpoint("/metrics", "GET", self._show_metrics, figures == "none", early=True, admin=figures == "admin"),
            Endpoint("/openapi.json", "GET", self._openapi, early=True),
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            root, path = self._root, scope["path"]
            if root and (path == root or path.startswith(f"{root}/")):
                scope = {**scope, "path": path[len(root) :] or "/"}
            await self._router(scope, receive, send)

    # ---- one request

    async def serve(self, scope: Any, receive: Any, send: Any, path: str, there: list[Endpoint]) -> None:
        given = dict(scope["headers"])
        id = given.get(b"x-request-id", b"")
        id = id if _ID.fullmatch(id) else new_id("req").encode()
        headers: Headers = [(b"x-request-id", id), *self._cors(given.get(b"origin"))]
        call = Call(scope, receive, send, Caller(id.decode(), None, False), headers)
        began = time.monotonic()
        generation: Generation | None = None
        problem = ""
        self.calls.add(call)
        try:
            try:
                generation = await self._answer(call, given, there)
            except ApiError as error:
                problem = error.message
                if call.status:
                    raise
                await self._refuse(call, path, error)
        except Disconnected:
            problem = "the client has left"
        except asyncio.CancelledError:
            problem = "cut off"
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            log.exception("request %s failed", id.decode())
            if not call.status:
                await self._refuse(call, path, ApiError(500, "something went wrong here; the log has it", "internal"))
        finally:
            self.calls.discard(call)
            generation = generation or call.generation
            if generation is not None:
                self._report(call, generation, path, began, problem)

    async def _answer(self, call: Call, given: dict[bytes, bytes], there: list[Endpoint]) -> Generation | None:
        method = call.scope["method"]
        if method == "OPTIONS" and there and self._origins:
            await call.answer(204, b"", more={"Allow": ", ".join(sorted({each.method for each in there}))})
            return None
        endpoint = next((each for each in there if each.method == ("GET" if method == "HEAD" else method)), None)
        if self._hosts is not None and (endpoint is None or not endpoint.open):
            self._hosts.check(given.get(b"host"), given.get(b"origin"))
        if endpoint is None and not there:
            self._let_in(call, False)
            raise ApiError(404, f"there is nothing at {call.scope['path']!r:.200}", "not_found")
        if endpoint is None:
            allowed = ", ".join(sorted({each.method for each in there}))
            raise ApiError(405, f"{method} is not for this path, {allowed} is", "method", headers={"Allow": allowed})
        if not endpoint.open:
            call.caller = self._let_in(call, endpoint.admin)
        if not endpoint.early and (unready := self.serving.unready) is not None:
            raise unready
        return await endpoint.answer(self.serving, call)

    async def _refuse(self, call: Call, path: str, error: ApiError) -> None:
        if path.startswith("/v1/messages"):
            await call.answer(error.status, anthropic_error(error), more=error.headers)
        else:
            await call.error(error)

    def _let_in(self, call: Call, admin: bool) -> Caller:
        """The caller, by the key that the request brings. ApiError if the request may not use the endpoint."""
        key = self._key_of(call.scope["headers"])
        is_admin = self._admin is not None and hmac.compare_digest(key, self._admin)
        known = [hmac.compare_digest(key, each) for each in self._keys]  # all keys, so that the time shows nothing
        if self._keys and not any(known) and not is_admin:
            raise ApiError(
                401,
                "an API key is wanted: Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if admin and not is_admin:
            raise ApiError(
                403, "this is for the administrator: start the server with --admin-key, and bring it", "admin"
            )
        if not self._keys:
            return Caller(call.caller.id, None, is_admin, client_of(call.scope.get("client")))
        tenant = "admin" if is_admin else str(known.index(True))
        return Caller(call.caller.id, key.decode("latin-1"), is_admin, tenant)

    def _key_of(self, headers: Headers) -> bytes:
        """The one key of a request. Two different ones are refused: a proxy may have looked at the other one."""
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"authorization", b"x-api-key"):
                if name in found:
                    raise ApiError(400, f"a request has one {name.decode()} header, got two", "two_keys")
                found[name] = value
        bearer, plain = found.get(b"authorization"), found.get(b"x-api-key")
        if bearer is None:
            return plain or b""
        key = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else b""
        if plain not in (None, key) and (self._keys or self._admin is not None):
            raise ApiError(400, "authorization and x-api-key must bring the same key: send one of them", "two_keys")
        return key

    def _cors(self, origin: bytes | None) -> Headers:
        if origin is None or not self._origins or not ({origin, b"*"} & self._origins):
            return []
        return [
            (b"access-control-allow-origin", b"*" if b"*" in self._origins else origin),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (
                b"access-control-allow-headers",
                b"authorization, content-type, x-api-key, x-request-id, anthropic-version",
            ),
            (b"access-control-expose-headers", b"x-request-id"),
            (b"vary", b"origin"),
        ]

    def _report(self, call: Call, generation: Generation, path: str, began: float, problem: str) -> None:
        prompts = [
            FinishedPrompt(prompt.ids, NOT_COMPUTED, 0.0)
            if begun is None
            else FinishedPrompt(prompt.ids, begun.cache, begun.queued)
            for prompt, begun in zip(generation.prompts, generation.begun, strict=True)
        ]
        params, model = generation.params, generation.model
        space = hashlib.sha256(repr((model.adapter, params.cache_salt)).encode()).digest()
        finished = Finished(
            call.caller.id,
            path,
            call.status if not problem or call.status else 499,
            self.serving.models.names[0],
            None if model.adapter is None else model.name,
            space,
            prompts,
            generation.usage.completion,
            generation.uncounted(),
            generation.reasons or ["abort"],
            began,
            generation.first,
            time.monotonic(),
            generation.gaps,
            problem,
            generation.prompts[0].text if self.serving.config.log_prompts else None,
            params.n,
            params.max_tokens or max(1, self.serving.prompts.limit - len(generation.prompts[0].ids)),
        )
        for watcher in self.watchers:
            watcher(finished)

    # ---- the server itself

    async def _health(self, serving: Serving, call: Call) -> None:
        link, limit = serving.link, serving.config.step_timeout
        if serving.unready is not None:
            raise serving.unready
        if serving.draining:
            raise ApiError(503, "the server is stopping", "stopping")
        if limit and link.hangs > limit:
            raise ApiError(503, f"the engine was not heard for {link.hangs:.0f} seconds: a step hangs", "step_timeout")
        await call.json({"status": "ok"})

    async def _links(self, serving: Serving, call: Call) -> None:
        await call.answer(200, page(self._root), b"text/html; charset=utf-8", PAGE_HEADERS)

    async def _version(self, serving: Serving, call: Call) -> None:
        await call.json({"version": __version__})

    async def _show_metrics(self, serving: Serving, call: Call) -> None:
        await call.answer(200, await self._metrics(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, serving: Serving, call: Call) -> None:
        await call.json(description([(each.path, each.method) for each in self._endpoints()], self._root))


class _Place:
    """The endpoints of a path, as an ASGI application that Starlette calls."""

    def __init__(self, app: App, path: str, there: list[Endpoint]) -> None:
        self._app = app
        self._path = path
        self._there = there

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app.serve(scope, receive, send, self._path, self._there)
