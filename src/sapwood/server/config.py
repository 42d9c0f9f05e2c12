"""How a server is set up, beside its engine: the flags of `sapwood serve`; frozen, and checked. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sapwood.cache import whole_number

from .http_limits import HttpLimits
from .tools import PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens, who may ask, and how much. The command line shows what is said of a field here.

    host                 the address to listen on; anything but loopback can be reached by others
    port                 the port to listen on
    uds                  a Unix socket to listen on instead
    served_model_name    names that requests may use for the model; the first is the one that answers show
    api_key              keys, one of which every request must bring; also $SAPWOOD_API_KEY, and api_key_file
    api_key_file         a file with a key a line
    admin_key            a key for what shows other people's tokens: cache/tree, explanations across tenants; also
                         $SAPWOOD_ADMIN_KEY
    salt_by_key          requests share cached prefixes only with those of the same API key; a salt in the body is
                         refused
    chat_template        a file with a chat template, or the template itself, instead of the model's
    generation_config    "auto": what the model's generation_config.json says of sampling is the default; "none"; or
                         a folder with another one
    response_role        the role of answers
    tool_call_parser     how the model writes tool calls: auto (by its chat template), none, hermes, qwen, llama3_json
                         or mistral
    reasoning_parser     "think": what a model writes between <think> and </think> is told apart as reasoning_content;
                         "none": only in requests that ask for it
    lora_modules         adapters to load at the start, as name=path
    lora_root            the folder below which /v1/load_lora_adapter may read; without it nothing is loaded by HTTP
    kv_events_config     vLLM's JSON: publish what the cache holds on ZMQ, for routers
    max_queue            requests that may wait; one more gets 429
    queue_timeout        seconds that a request may wait before it is computed; 0: as long as it takes
    max_n                samples of a request, all prompts together
    max_logit_bias       entries of logit_bias
    max_schema_bytes     of a JSON schema, a regular expression or a grammar
    max_schema_depth     how deep a JSON schema may be nested
    max_choices          of a structured output
    max_responses        that /v1/responses keeps for previous_response_id
    max_responses_bytes  of all of them
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
    streams_per_client   requests in flight from one address; 0: no limit
    ssl_keyfile          the key of a certificate, for HTTPS
    ssl_certfile         the certificate
    ssl_ca_certs         certificates of clients that are trusted
    ssl_keyfile_password of the key
    allowed_origins      origins of web pages that may ask (CORS); * for all
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
    salt_by_key: bool = False
    chat_template: str | None = None
    generation_config: str = "auto"
    response_role: str = "assistant"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "none"
    lora_modules: tuple[str, ...] = ()
    lora_root: str | None = None
    kv_events_config: str | None = None
    max_queue: int = 1024
    queue_timeout: float = 0.0
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
    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    streams_per_client: int = 0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_keyfile_password: str | None = None
    allowed_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    log_prompts: bool = False
    status_seconds: float = 10.0
    record_trace: str | None = None
    record_trace_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        whole_number("port", self.port, 0, 65535)
        whole_number("max_queue", self.max_queue, 1, 1 << 20)
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
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("log_format", self.log_format, ("text", "json"))
        _one_of("tool_call_parser", self.tool_call_parser, ("auto", "none", *PARSERS))
        _one_of("reasoning_parser", self.reasoning_parser, ("none", "think"))
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "api_key_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name} must be a file that is there, got {path!r:.200}")
        if self.lora_root is not None and not Path(self.lora_root).is_dir():
            raise ValueError(f"lora_root must be a folder that is there, got {self.lora_root!r:.200}")
        if self.salt_by_key and not self.keys:
            raise ValueError("salt_by_key needs api_key: the salt is made from it")
        for module in self.lora_modules:
            name, separator, path = module.partition("=")
            if not name or not separator or not path:
                raise ValueError(f"lora_modules must be name=path, got {module!r:.200}")
        self.http_limits  # noqa: B018  # checked by itself

    @property
    def keys(self) -> frozenset[str]:
        """Every key that lets a request in."""
        lines = Path(self.api_key_file).read_text().splitlines() if self.api_key_file is not None else []
        keys = frozenset(key.strip() for key in (*self.api_key, *lines) if key.strip())
        if self.api_key_file is not None and not keys:
            raise ValueError(f"api_key_file holds no key: {self.api_key_file}")
        return keys

    @property
    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            header_bytes=self.header_bytes,
            header_seconds=self.header_seconds,
            body_bytes=self.body_bytes,
            body_seconds=self.body_seconds,
            write_seconds=self.write_seconds,
            streams_per_client=self.streams_per_client,
        )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r:.60}")
