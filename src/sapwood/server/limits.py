"""Everything that bounds what a client may send, in one place.

A bound that an operator may want to move is a flag: its name, default and range are in config.py. All others are
constants of this file, the same for every server, and no flag moves them. docs/server.md ("Limits") lists both.
Bounds of sampling parameters are the engine's (engine/params.py), those of the queue of grammars are in
process/grammars.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from sapwood.cache import whole_number

# ---- connections: the flags are the fields of `HttpLimits`

MAX_PIPELINED_REQUESTS = 8  # of one connection, that wait for their answers
LINGER_SECONDS = 2.0  # for a client that still sends to read the answer
WRITE_PROGRESS_BYTES = 16 << 10  # that a slow reader must take within write_seconds


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """What one connection, or one client, may ask of the server. Each is a flag of `sapwood serve`, whose default is
    the one here.

    header_bytes        of the request line and all headers: 431
    header_seconds      from connecting, or from the first byte of a request, to the end of its headers: 408; a
                        connection that never sent a byte is closed
    body_bytes          of a request's body, by its Content-Length or while it is read: 413
    body_seconds        for the whole body, not counting while the application does not read it: 408; up to twice
                        that for a client that waits for 100 Continue
    write_seconds       for a reader that stops: then the connection is aborted
    streams_per_client  requests in flight from one address (with IPv6: from one network /64), over all its connections:
                        429; 0: no limit. Behind a proxy, and on a Unix socket, all clients are one
    inflight_bytes      of bodies and of answers that are not taken, over all connections: 503
    """

    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    body_bytes: int = 32 << 20
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    streams_per_client: int = 0
    inflight_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        whole_number("header_bytes", self.header_bytes, 256, 16 << 20)
        whole_number("body_bytes", self.body_bytes, 1, 1 << 40)
        whole_number("streams_per_client", self.streams_per_client, 0, 1 << 20)
        whole_number("inflight_bytes", self.inflight_bytes, 1, 1 << 44)
        if self.inflight_bytes < self.body_bytes:
            raise ValueError(
                f"inflight_bytes must be from body_bytes ({self.body_bytes}) on, got {self.inflight_bytes}"
            )
        for field in ("header_seconds", "body_seconds", "write_seconds"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.01 <= value <= 86400:
                raise ValueError(f"{field} must be a number from 0.01 to 86400, got {value!r:.60}")
            object.__setattr__(self, field, float(value))


# ---- queries and bodies. Flag: --body-bytes

MAX_QUERY_FIELDS = 16
MAX_JSON_DEPTH = 100  # lists and objects in each other
MAX_JSON_LISTS = 100_000  # lists and objects; brackets in texts count as well
MAX_JSON_STRINGS = 150_000  # quotes in texts count as well
MAX_JSON_VALUES = 2_000_000  # commas in texts count as well

# ---- fields of requests. Flags: --max-n, --max-logit-bias, --max-logprobs, --max-choices, --max-schema-bytes,
# ---- --max-schema-depth, --max-priority

DEFAULT_MAX_LOGPROBS = 20  # of an engine that does not report its --max-logprobs
MAX_COUNT = 2**31 - 1  # of tokens
MAX_PRIORITY = 2**31 - 1  # either way: the range of the engine
MAX_TEXT_CHARACTERS = 32 << 20
MAX_STRING_CHARACTERS = 1 << 20  # of one of several strings
MAX_NAME_CHARACTERS = 512  # names of models and adapters, ids
MAX_KEYWORD_CHARACTERS = 32  # values of fields that name one of a few things
MAX_REQUEST_ID_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024
MAX_NAMED_TOKENS = 1 << 15  # in allowed_token_ids and logit_bias, all prompts together
MAX_STOP_PREFIX_CHARACTERS = 1 << 25  # of all beginnings of all stop strings, all samples together
MAX_SCORED_TOKENS = 1 << 16  # of a prompt with prompt_logprobs, each with its likeliest others
MAX_SCORED_TOKENS_IN_ALL = 4 * MAX_SCORED_TOKENS  # of all prompts of a request

# ---- prompts and conversations. Flag: --max-model-len

MAX_PROMPT_CONTEXTS = 2  # a prompt that is to be cut, or only counted, may be so many contexts long
MAX_TOKEN_CHARACTERS = 64  # on average
MAX_DETOKENIZED_TOKENS = 1 << 20
MAX_MESSAGES = 4096  # of a conversation; also items of a response's input
MAX_PARTS = 4096  # of one message; also Anthropic's blocks
MAX_ROLE_CHARACTERS = 64
MAX_TEMPLATE_TURNS = 2_000_000  # of all loops of a chat template together: some seconds of a processor

# ---- tools

MAX_TOOLS = 128
MAX_TOOL_SCHEMA_DEPTH = 64
MAX_TOOL_SCHEMA_VALUES = 20_000
MAX_CALLS = 128  # in one message, sent or generated; the text of a further one is content
MAX_CALL_NAME_CHARACTERS = 256  # of a function, as a model writes it; also of an argument
MAX_CALL_JSON_DEPTH = 200  # of arguments that a model writes: many decoders refuse what is deeper
MAX_ARGUMENT_SCHEMAS = 200  # that are looked at for one argument's type: they may refer to each other in a circle

# ---- the Responses API. Flags: --max-responses, --max-responses-bytes

MAX_LISTED_ITEMS = 100  # on one page of input_items
MAX_ITEM_ID_CHARACTERS = 512
MAX_INCLUDED = 32
MAX_INCLUDED_CHARACTERS = 256
MAX_TOOL_CHOICE_CHARACTERS = 64
MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_CHARACTERS = 512

# ---- adapters and the cache

MAX_ADAPTERS = 4096
MAX_ADAPTER_NAME_CHARACTERS = 200
MAX_PATH_CHARACTERS = 4096
MAX_TREE_NODES = 10_000  # of one answer of /cache/tree
