"""The flags of `sapwood serve` that are not the engine's, as one frozen object that is checked when it is made. Nothing
here imports torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from sapwood.cache import whole_number
from sapwood.engine.flags import one_of

from .limits import MAX_PRIORITY, HttpLimits
from .text.reasoning import PARSERS as REASONING_PARSERS
from .text.tools import PARSERS

_HOST = re.compile(r"\*|(\*\.)?[\w.-]+")


class LoraModule(NamedTuple):
    """An adapter to load at the start. `base_model_name`: what `/v1/models` shows as its parent."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens, which clients may use it, and how much. The help of each flag is its line here.

    host                 the address to listen on; anything but loopback can be reached by others
    port                 the port to listen on
    uds                  a Unix socket to listen on instead
    served_model_name    names that requests may use for the model; the first is the one that answers show
    api_key              keys, one of which every request must bring; also $SAPWOOD_API_KEY, and api_key_file
    api_key_file         a file with a key a line
    admin_key            a key for what shows other people's tokens (cache/tree, explanations across tenants), and
                         then the only one that resets the cache, loads and unloads adapters; also $SAPWOOD_ADMIN_KEY
    metrics_key          the key for /metrics: "api", as for everything else, "admin", or "none": anybody may read it
    salt_by_key          requests share cached prefixes only with those of the same API key; a salt in the body is
                         refused
    salt_key_file        the secret that these salts are made with; servers that share a store need the same. Without
                         it, a file that is made once: in a store's folder, for other stores in the user's cache folder
    chat_template        a file with a chat template, or the template itself, instead of the model's
    generation_config    "auto": what the model's generation_config.json says of sampling is the default; "none"; or
                         a folder with another one
    response_role        the role of answers
    enable_force_include_usage  every stream ends with its usage, as with stream_options.include_usage
    tool_call_parser     how the model writes tool calls: auto (by its chat template), none, hermes (qwen), granite4,
                         qwen3_coder (qwen3_xml, mimo), glm45 (glm47), llama3_json (llama4_json) or mistral
    reasoning_parser     "think": what a model writes between <think> and </think> is told apart as reasoning_content;
                         "qwen3", "deepseek_r1": also what it writes without an opening tag; "none": only in requests
                         that ask for it
    lora_modules         adapters to load at the start, as name=path or as vLLM's JSON
    lora_root            the folder below which /v1/load_lora_adapter may read; without it nothing is loaded by HTTP
    kv_events_config     vLLM's JSON: publish what the cache holds on ZMQ, for routers
    max_queue            requests that may wait; one more gets 429
    queue_timeout        seconds that a request may wait before it is computed; 0: as long as it takes
    max_priority         the most urgent priority of requests without the admin key: lower is more urgent, so what
                         is below this number is raised to it; with 0 a caller may only stand back for others
    max_requests_per_key  samples that may wait or run for one key, those of all its requests together (a request with
                         n=4 counts as four); one more gets 429; 0: no limit. The admin key has none
    max_n                samples of a request, all prompts together
    max_logit_bias       entries of logit_bias
    max_schema_bytes     of a JSON schema, a regular expression or a grammar
    max_schema_depth     how deep a JSON schema may be nested
    max_choices          of a structured output
    max_responses        that /v1/responses keeps for previous_response_id, for all keys together: where there is no
                         room, the key that has most loses its oldest, so that each is sure of an equal share
    max_responses_bytes  of all of them, shared in the same way
    keepalive_seconds    a stream that has nothing to say for so long sends an SSE comment
    drain_seconds        after SIGTERM, how long running requests may go on
    step_timeout         seconds without a sign of the engine, while somebody waits for it, after which /health is 503;
                         0: never
    restart              start the engine again when it dies, instead of ending
    header_bytes         of a request's line and headers
    header_seconds       for sending them
    body_bytes           of a request's body
    body_seconds         for sending it
    write_seconds        for a reader who stops
    streams_per_client   requests in flight from one address (with IPv6: one network /64), over all its connections;
                         0: no limit. Behind a proxy, and on a Unix socket, all clients are one
    inflight_bytes       of bodies until they are answered, of answers that are collected, and of those that readers do
                         not take, over all connections; beyond it some of those who hold much get 503, or are cut
    ssl_keyfile          the key of a certificate, for HTTPS
    ssl_certfile         the certificate
    ssl_ca_certs         certificates of clients that are trusted
    ssl_keyfile_password  of the key
    root_path            the path below which a proxy shows this server; paths with it are answered as those without
    allowed_origins      origins of web pages that may ask (CORS); * for all
    allowed_hosts        names that requests may have in Host, and pages in Origin, besides addresses, localhost, the
                         name of this machine and host; *.example.com for all below it, * for all. Without an API key
                         any other gets 403, with one only where this is given; on a Unix socket nobody looks
    log_level            debug, info, warning or error
    log_format           text, or json
    log_prompts          write prompts to the log, which is not done otherwise
    status_seconds       how often a line of status is logged while something runs; 0: never
    record_trace         a file to write what the server sees as a trace, without text; sapwood.sim replays it
    record_trace_bytes   of that file, after which it is put aside and begun anew
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_key: str | None = None
    metrics_key: str = "api"
    salt_by_key: bool = False
    salt_key_file: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    response_role: str = "assistant"
    enable_force_include_usage: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    lora_modules: tuple[str, ...] = ()
    lora_root: str | None = None
    kv_events_config: str | None = None
    max_queue: int = 1024
    queue_timeout: float = 0.0
    max_priority: int = 0
    max_requests_per_key: int = 0
    max_n: int = 128
    max_logit_bias: int = 1024
    max_schema_bytes: int = 65536
    max_schema_depth: int = 64
    max_choices: int = 1024
    max_responses: int = 4096
    max_responses_bytes: int = 256 << 20
    keepalive_seconds: float = 10.0
    drain_seconds: float = 30.0
    step_timeout: float = 120.0
    restart: bool = False
    header_bytes: int = HttpLimits.header_bytes
    header_seconds: float = HttpLimits.header_seconds
    body_bytes: int = HttpLimits.body_bytes
    body_seconds: float = HttpLimits.body_seconds
    write_seconds: float = HttpLimits.write_seconds
    streams_per_client: int = HttpLimits.streams_per_client
    inflight_bytes: int = HttpLimits.inflight_bytes
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_keyfile_password: str | None = None
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    log_prompts: bool = False
    status_seconds: float = 10.0
    record_trace: str | None = None
    record_trace_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        whole_number("port", self.port, 0, 65535)
        whole_number("max_queue", self.max_queue, 1, 1 << 20)
        whole_number("max_priority", self.max_priority, -MAX_PRIORITY, MAX_PRIORITY)
        whole_number("max_requests_per_key", self.max_requests_per_key, 0, 1 << 20)
        whole_number("max_n", self.max_n, 1, 16384)
        for name in (
            "max_logit_bias",
            "max_schema_bytes",
            "max_choices",
            "max_responses",
            "max_responses_bytes",
            "record_trace_bytes",
        ):
            whole_number(name, getattr(self, name), 1, 1 << 40)
        whole_number("max_schema_depth", self.max_schema_depth, 1, 256)
        for name in ("queue_timeout", "drain_seconds", "step_timeout", "status_seconds"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be seconds from 0 on, got {getattr(self, name)!r:.60}")
        if not 0 < self.keepalive_seconds < 1e9:
            raise ValueError(f"keepalive_seconds must be above 0, got {self.keepalive_seconds!r:.60}")
        one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        one_of("log_format", self.log_format, ("text", "json"))
        one_of("tool_call_parser", self.tool_call_parser, ("auto", "none", *PARSERS))
        one_of("reasoning_parser", self.reasoning_parser, ("none", *REASONING_PARSERS))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "api_key_file", "salt_key_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name} must be a file that is there, got {path!r:.200}")
        if self.lora_root is not None and not Path(self.lora_root).is_dir():
            raise ValueError(f"lora_root must be a folder that is there, got {self.lora_root!r:.200}")
        one_of("metrics_key", self.metrics_key, ("none", "api", "admin"))
        if self.metrics_key == "admin" and self.admin_key is None:
            raise ValueError("metrics_key=admin needs admin_key")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", self.root_path, re.ASCII):
            raise ValueError(f"root_path must be a path such as /models/one, got {self.root_path!r:.60}")
        if self.salt_by_key and not self.keys:
            raise ValueError("salt_by_key needs api_key: the salt is made from it")
        self.adapters  # noqa: B018  # reading it checks it
        if self.salt_key_file is not None and not self.salt_by_key:
            raise ValueError("salt_key_file needs salt_by_key")
        if self.max_requests_per_key and not self.keys:
            raise ValueError("max_requests_per_key needs api_key: without keys give streams_per_client")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"allowed_hosts must be names without port such as api.example.com, got {host!r:.100}")
        self.http_limits  # noqa: B018  # making it checks it

    @property
    def keys(self) -> frozenset[str]:
        """Every key that lets a request in, from flags and from the file of keys."""
        lines = Path(self.api_key_file).read_text().splitlines() if self.api_key_file is not None else []
        keys = frozenset(key.strip() for key in (*self.api_key, *lines) if key.strip())
        if self.api_key_file is not None and not keys:
            raise ValueError(f"api_key_file holds no key: {self.api_key_file}")
        return keys

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """`lora_modules` as data."""
        return tuple(map(_lora_module, self.lora_modules))

    @property
    def http_limits(self) -> HttpLimits:
        """The limits of connections."""
        return HttpLimits(**{field.name: getattr(self, field.name) for field in fields(HttpLimits)})


def _lora_module(text: str) -> LoraModule:
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        given: Any = {"name": name, "path": path}
    else:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            given = {}
    words = [given.get(field) for field in LoraModule._fields]
    known = given.keys() <= set(LoraModule._fields) and all(isinstance(word, str | None) for word in words)
    if not known or not words[0] or not words[1]:
        forms = "name=path or a JSON object with name, path and base_model_name"
        raise ValueError(f"lora_modules must be {forms}, got {text!r:.200}")
    return LoraModule(*words)
