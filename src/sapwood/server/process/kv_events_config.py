"""`--kv-events-config`: vLLM's JSON, checked when it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sapwood.cache import whole_number

_MAX_BATCHES = 10_000_000  # batches, in any queue
_MAX_JSON_CHARACTERS = 65_536  # characters
_TCP = re.compile(r"tcp://(\*|[^\s:/\[\]]+|\[[^\s\[\]]+\]):(\*|[0-9]{1,5})")
_IPC = re.compile(r"ipc://[^\s\0]{1,100}")
_WIDE = ("*", "0.0.0.0", "[::]", "[*]")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """The fields of vLLM's `--kv-events-config`, and some of our own: `encoding` of events ("map", tagged with `type`,
    or "array", as vLLM had it up to 0.23), `bind` (None: as vLLM, which binds "*", "::" and ipc, and connects to
    anything else), `buffer_bytes` (a bound of the replay buffer beside `buffer_steps`) and `first_sequence` (None:
    microseconds since 1970, so that numbers do not fall back when a server starts again, which some routers would not
    notice)."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: str = "map"
    bind: bool | None = None
    buffer_bytes: int = 64 << 20
    first_sequence: int | None = None

    def __post_init__(self) -> None:
        _one_of("enable_kv_cache_events", self.enable_kv_cache_events, (True, False))
        _one_of("publisher", self.publisher, ("zmq", "null", None))
        _one_of("encoding", self.encoding, ("map", "array"))
        _one_of("bind", self.bind, (True, False, None))
        _endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":*"):
                raise ValueError(f"replay_endpoint must be another than endpoint, got {self.endpoint!r:.60} for both")
        whole_number("buffer_steps", self.buffer_steps, 0, _MAX_BATCHES)
        whole_number("hwm", self.hwm, 1, _MAX_BATCHES)
        whole_number("max_queue_size", self.max_queue_size, 1, _MAX_BATCHES)
        whole_number("buffer_bytes", self.buffer_bytes, 0, 1 << 40)
        if self.first_sequence is not None:
            whole_number("first_sequence", self.first_sequence, 0, 1 << 62)
        if not isinstance(self.topic, str) or len(self.topic) > 1024 or "\0" in self.topic:
            raise ValueError(f"topic must be a string of at most 1024 characters, got {self.topic!r:.60}")
        try:
            self.topic.encode()
        except UnicodeEncodeError:
            raise ValueError(f"topic must be a string that can be written as UTF-8, got {self.topic!r:.60}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        """From the fields of vLLM's JSON. ValueError names the field that is wrong."""
        if not isinstance(given, Mapping):
            raise ValueError(f"kv_events_config must be an object with fields, got {given!r:.60}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"kv_events_config has no field {name!r:.60}; it has {', '.join(known)}")
        return cls(**given)

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig:
        """From the JSON of the command line."""
        if len(text) > _MAX_JSON_CHARACTERS:
            raise ValueError(f"kv_events_config must have at most {_MAX_JSON_CHARACTERS} characters, got {len(text)}")
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"kv_events_config must be JSON, got {text!r:.60} ({error!s:.60})") from None
        return cls.of(given)

    @property
    def active(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether subscribers connect to `endpoint`, and not it to a subscriber."""
        if self.bind is not None:
            return self.bind
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith("ipc://")

    @property
    def open_to_all(self) -> list[str]:
        """The endpoints that can be read by any machine that reaches this one."""
        bound = [self.endpoint] if self.binds else []
        bound += [self.replay_endpoint] if self.replay_endpoint is not None else []
        return [each for each in bound if (found := _TCP.fullmatch(each)) and found[1] in _WIDE]


def _one_of(name: str, value: object, right: Sequence[object]) -> None:
    if not any(value is each or (isinstance(value, str) and value == each) for each in right):
        choices = " or ".join(json.dumps(each) for each in right)
        raise ValueError(f"{name} must be {choices}, got {value!r:.60}")


def _endpoint(name: str, value: object) -> None:
    if isinstance(value, str) and len(value) <= 512:
        found = _TCP.fullmatch(value)
        if _IPC.fullmatch(value) or (found and (found[2] == "*" or 0 < int(found[2]) < 65536)):
            return
    raise ValueError(f"{name} must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH, got {value!r:.60}")
