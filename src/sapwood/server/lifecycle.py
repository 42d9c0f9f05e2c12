"""The life of a server: it listens at once, serves when the engine is ready, and ends cleanly, whatever ends it.

start     listening, /health 503 --> engine loaded --> ready; a model or flag that is refused: exit 2
SIGTERM   no new requests; running ones may end within --drain-seconds; the rest is cut with an error; exit 0
again     the server ends at once
engine    dead: every stream ends with an error, exit 1; or, with --restart, the engine is started again
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket as sockets
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from .app import App
from .config import ServerConfig
from .connection import limited_protocol
from .errors import ApiError, engine_down
from .frontend import Serving, Source
from .observe.logs import Recent, RequestLog, set_up, status_line
from .observe.metrics import Metrics
from .observe.record import TraceRecorder
from .parameters import generation_defaults
from .process.engine_client import EngineClient, EngineRefused
from .process.messages import Ready, Settings
from .text.template import ChatTemplate, find_template
from .text.tokens import AsyncTokenizer
from .text.tools import guess_parser

log = logging.getLogger("sapwood")
_CUT_SECONDS = 2.0  # for streams that are cut to write their error
_GARBAGE_OBJECTS = 20_000  # between two collections: a step of many streams makes thousands, and no cycles
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)  # before an engine that died is started again


async def run(
    config: ServerConfig, flags: dict[str, Any], factory: str, socket: sockets.socket, secret: bytes | None
) -> int:
    """Run a server until it ends. Returns the exit status."""
    set_up(config.log_format, config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return await _Server(config, flags, factory, socket, secret).run()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `_Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self, config: ServerConfig, flags: dict[str, Any], factory: str, socket: sockets.socket, secret: bytes | None
    ) -> None:
        self.config = config
        self.flags = flags
        self.factory = factory
        self.socket = socket
        self.began = time.monotonic()
        self.link = EngineClient(self._settings, self._engine_died)
        self.serving = Serving(config, self.link, secret)
        self.app = App(self.serving, self._render_metrics)
        self.metrics: Metrics | None = None
        self.recorder: TraceRecorder | None = None
        self.protocol = limited_protocol(config.http_limits)
        self._stopping = asyncio.Event()
        self._signals = 0
        self._status = 0
        self._death = asyncio.Event()  # the engine has died
        self._restarts = 0
        self.recent = Recent()

    def _settings(self) -> Settings:
        events = self.config.kv_events_config
        return Settings(
            self.factory,
            self.flags,
            os.getpid(),
            self.config.log_format,
            self.config.log_level,
            None if events is None else msgspec.json.decode(events),
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._signal, each)
        server = _Uvicorn(self._uvicorn())
        serving = asyncio.create_task(server.serve(sockets=[self.socket]))
        self._log_address()
        starting = asyncio.create_task(self._keep_engine())
        status = asyncio.create_task(self._log_status())
        await asyncio.wait([asyncio.create_task(self._stopping.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
        for task in (starting, status):
            task.cancel()
        await self._drain()
        server.should_exit = True
        server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await self.link.close()
        if self.recorder is not None:
            self.recorder.close()
        return self._status

    def _uvicorn(self) -> uvicorn.Config:
        config = self.config
        return uvicorn.Config(
            self.app,
            http=self.protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_keyfile_password=config.ssl_keyfile_password,
            ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
        )

    # ---- the start

    async def _keep_engine(self) -> None:
        """One engine after the other. The first one must come up; each that follows is started until it does."""
        status = await self._started()
        if status:
            self._end(status)
            return
        while True:
            await self._death.wait()
            if not self.config.restart:
                self._end(1)
                return
            up = False
            while not up:
                wait = _BACKOFF_SECONDS[min(self._restarts, len(_BACKOFF_SECONDS) - 1)]
                self._restarts += 1
                log.info("starting the engine again in %.0f s", wait)
                await asyncio.sleep(wait)
                up = await self._started_again()

    async def _started(self) -> int:
        """Start the first engine. Returns 0, or the exit status."""
        try:
            await self._bring_up()
        except EngineRefused as problem:
            log.error("sapwood serve: %s", problem)
            return 2
        except (ValueError, ApiError) as problem:
            log.error("sapwood serve: %s", problem)
            return 1
        except Exception:
            log.exception("the server cannot start")
            return 1
        return 0

    async def _started_again(self) -> bool:
        """Start another engine. One that came up without all that requests need is ended."""
        try:
            await self._bring_up()
        except Exception as problem:
            known = isinstance(problem, (ValueError, ApiError, OSError))
            log.error("%s", problem, exc_info=not known)
            self.link.discard(str(problem))
            return False
        return True

    async def _bring_up(self) -> None:
        """Start an engine, and make all else that the next request needs. Only then is the server ready."""
        began, serving, config = time.monotonic(), self.serving, self.config
        serving.ready = False
        self._death.clear()
        ready = await self.link.start()
        self.link.does("reading the tokenizer")
        loop = asyncio.get_running_loop()
        tokens, template, defaults = await loop.run_in_executor(None, _read_files, ready, config)
        serving.prompts.tokens, serving.prompts.template, serving.parameters.defaults = tokens, template, defaults
        if not serving.models.names:
            serving.models.names.append(self._name(ready))
        parser = config.tool_call_parser
        guessed = guess_parser(template.text) if template is not None else None
        serving.tool_parser = (guessed or "hermes") if parser == "auto" else None if parser == "none" else parser
        await self._load_adapters(ready)
        self.metrics = self.metrics or Metrics(
            serving.models.names[0], {**ready.facts, "max_model_len": ready.max_model_len}
        )
        self.app.watchers = [self.metrics.finished, RequestLog().finished]
        if config.record_trace is not None:
            self.recorder = self.recorder or TraceRecorder(config.record_trace, config.record_trace_bytes, None)
            self.app.watchers.append(self.recorder.finished)
        gc.collect()
        gc.freeze()  # what was loaded stays: collections go over objects of requests alone
        gc.set_threshold(_GARBAGE_OBJECTS, 10, 10)
        if self.link.down is not None:
            raise engine_down(self.link.down)
        self.link.does("serving")
        serving.ready = True
        self._log_ready(ready, began)

    async def _load_adapters(self, ready: Ready) -> None:
        """For the first engine the adapters of --lora-modules, which must all be good. For a later one all that its
        predecessor had; an adapter that cannot be read any more is left out."""
        models, first = self.serving.models, self.metrics is None
        for name, where, parent in self.config.adapters if first else ():
            models.sources[name] = Source(where)
            if parent is not None:
                models.parents[name] = parent
        found = dict(ready.adapters)
        for name, source in models.sources.copy().items():
            self.link.does(f"loading adapter {name}")
            try:
                found[name] = await self.link.load_adapter(name, *source)
            except ApiError as error:
                if self.link.down is not None:
                    raise
                if first:
                    raise EngineRefused(f"adapter {name}: {error}") from None
                log.error("adapter %s is not there any more: %s", name, error)
        for name in models.adapters.keys() - found.keys():
            models.forget(name)
        models.adapters.update(found)

    def _name(self, ready: Ready) -> str:
        """The name of the model, as it was given. Of a path answers show the last part; requests may use either."""
        given: str = self.flags.get("model") or ready.facts.get("name") or "default"
        self.serving.models.given_name = given
        return Path(given).name or given if given.startswith(("/", "~")) else given

    def _log_address(self) -> None:
        config = self.config
        address = config.uds or self._url()
        log.info("listening on %s; not ready before the model is loaded", address)
        if config.uds is None and not config.keys and config.host not in ("127.0.0.1", "localhost", "::1"):
            log.warning(
                "listening on %s without an API key: whoever reaches this port may use the model (--api-key)",
                config.host,
            )

    def _url(self) -> str:
        host, port = self.socket.getsockname()[:2] if self.config.uds is None else ("", 0)
        scheme = "https" if self.config.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in str(host) else host}:{port}"

    def _log_ready(self, ready: Ready, began: float) -> None:
        log.info("store: %s", ready.facts["store"] or "none")
        seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in self.link.spent.items() if spent >= 0.05)
        log.info(
            "ready in %.1f s%s: %s, %s tokens of context",
            time.monotonic() - (began if self._restarts else self.began),
            f" ({seconds})" if seconds else "",
            self.serving.models.names[0],
            f"{ready.max_model_len:,}",
        )
        if self.config.uds is None and not self._restarts:
            key = ' -H "Authorization: Bearer $SAPWOOD_API_KEY"' if self.config.keys else ""
            log.info(
                "try:\n\n  curl %s/v1/chat/completions%s -H 'Content-Type: application/json' \\\n"
                '    -d \'{"messages": [{"role": "user", "content": "What is a prefix tree?"}], "max_tokens": 60}\'\n\n'
                "  sapwood chat --url %s\n",
                self._url(),
                key,
                self._url(),
            )

    # ---- the end

    def _signal(self, which: signal.Signals) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("%s again: ending at once", which.name)
            self.link.kill()
            os._exit(130 if which == signal.SIGINT else 143)
        if which == signal.SIGINT and self.metrics is None:
            log.warning("interrupted before the server was ready (%s)", self.link.doing)
            self._end(130)
            return
        live, seconds = len(self.app.calls), self.config.drain_seconds
        log.info("%s: no new requests; %d may end within %.0f s", which.name, live, seconds)
        self._end(0)

    def _end(self, status: int) -> None:
        self._status = status
        self.serving.draining = True
        self._stopping.set()

    async def _drain(self) -> None:
        """Let running requests end for a while; then cut the rest, which get an error."""
        if self.link.down is None:
            until = time.monotonic() + self.config.drain_seconds
            while self.app.calls and time.monotonic() < until:
                await asyncio.sleep(0.02)
            self.link.cut("the server is stopping")
        until = time.monotonic() + _CUT_SECONDS
        while self.app.calls and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _engine_died(self, why: str) -> None:
        log.error("%s", why)
        if self._stopping.is_set():
            self._end(1)
        self._death.set()

    # ---- figures

    async def _render_metrics(self) -> bytes:
        if self.metrics is None:
            raise self.serving.unready or engine_down("there are no metrics yet")
        stats = None
        with contextlib.suppress(Exception):
            stats = await asyncio.wait_for(self.link.ask("stats"), 2.0)
        live, waiting = len(self.link.lanes), self.link.waiting
        if stats is not None:  # then samples that are computed before their first token are known
            waiting = max(0, live - stats["prefilling"] - stats["decoding"])
        for call in self.app.calls:
            if call.generation is not None:
                self.metrics.generated(call.generation.model, call.generation.uncounted())
        held = self.protocol.inflight.used
        return await asyncio.to_thread(self.metrics.render, stats, live - waiting, waiting, held)

    async def _log_status(self) -> None:
        every = self.config.status_seconds
        if not every:
            return
        quiet = True
        while True:
            await asyncio.sleep(every)
            busy = bool(self.link.lanes)
            if self.serving.unready is not None or (quiet and not busy):
                continue
            quiet = not busy
            with contextlib.suppress(Exception):
                stats = await self.link.ask("stats")
                waiting = self.link.waiting
                running = len(self.link.lanes) - waiting
                log.info("%s", status_line(stats, running, waiting, self.recent.take(stats, self.link.generated)))


def _read_files(
    ready: Ready, config: ServerConfig
) -> tuple[AsyncTokenizer | None, ChatTemplate | None, dict[str, Any]]:
    """What the API process needs of a model's files. A disk may be slow: this is no work for the event loop."""
    path = ready.facts.get("tokenizer")
    tokens = None if path is None else AsyncTokenizer(path)
    template = None if path is None else find_template(ready.model, config.chat_template)
    return tokens, template, generation_defaults(ready.model, config.generation_config)
