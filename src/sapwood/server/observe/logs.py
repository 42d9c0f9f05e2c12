"""Lines of the log, as text or as JSON objects: one for each request, one of status now and then, and all others.

Text from outside (ids, names, messages of errors) is escaped before it is written: no newline and no control character
of a client reaches the log, so no client can forge a line of it. Prompts are in it only with --log-prompts.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

from sapwood.engine.cache_report import TIERS

from .figures import Finished, page_use

TEXT = 2000  # characters of a prompt, where it is logged
_WORD = 200  # of an id or a name
_ERROR = 500  # of an error
_PLAIN = re.compile(r"[\w./:@+#,-]+", re.ASCII)
# Control characters, those that end a line or turn its direction in some viewers, and halves of characters.
_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def set_up(format: str, level: str, stream: TextIO | None = None) -> None:
    """Log to stderr, or to `stream`: lines of sapwood from `level` on, and warnings of other packages."""
    if format not in ("text", "json"):
        raise ValueError(f"log_format must be text or json, got {format!r:.60}")
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"log_level must be debug, info, warning or error, got {level!r:.60}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_Text() if format == "text" else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.ERROR if level == "error" else logging.WARNING)
    logging.getLogger("sapwood").setLevel(level.upper())


class RequestLog:
    """A line for each request."""

    def __init__(self) -> None:
        self._log = logging.getLogger("sapwood.requests")

    def finished(self, done: Finished) -> None:
        level = logging.WARNING if done.status >= 500 else logging.INFO
        if self._log.isEnabledFor(level):
            self._log.log(level, "request", extra={"fields": _fields(done)})


class Interval(NamedTuple):
    """The work of so many seconds."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class Recent:
    """The work since the last look, from counts that only grow."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counted = (0, 0, 0)

    def take(self, stats: Mapping[str, Any], generated: int) -> Interval:
        """`stats`: the engine's; `generated`: tokens since the start. An engine that was started again counts anew."""
        now, (prompt, cached, out) = time.monotonic(), self._counted
        self._counted = stats["cache"]["prompt_tokens"], stats["cache"]["cached_tokens"], generated
        if self._counted[0] < prompt:
            prompt = cached = 0
        taken = Interval(
            now - self._since, self._counted[0] - prompt, self._counted[1] - cached, self._counted[2] - out
        )
        self._since = now
        return taken


def status_line(stats: Mapping[str, Any] | None, running: int, waiting: int, interval: Interval) -> str:
    """The state of the server. `stats`: None if the engine does not answer."""
    parts = [f"running {running}, waiting {waiting}"]
    if stats is None:
        parts.append("the engine does not answer")
    else:
        use, host = page_use(stats, "device"), page_use(stats, "host")
        parts.append(f"pages {use.used:.0%} used, {use.held:.0%} needed")
        if host.used:
            parts.append(f"host {host.used:.0%} used")
    rate = f"{interval.cached_tokens / interval.prompt_tokens:.1%}" if interval.prompt_tokens else "-"
    seconds = max(interval.seconds, 1e-3)
    parts.append(f"hit rate {rate}")
    parts.append(f"{interval.prompt_tokens / seconds:.0f} tokens/s in, {interval.generated_tokens / seconds:.0f} out")
    return ", ".join(parts)


def _fields(done: Finished) -> dict[str, str | int | float]:
    """The fields of a request's line, in order."""
    by_tier = [prompt.cache.by_tier for prompt in done.prompts]
    tiers = [sum(tokens) for tokens in zip(*by_tier, strict=True)] or [0] * len(TIERS)
    fields: dict[str, str | int | float] = {
        "id": done.id[:_WORD],
        "path": done.path[:_WORD],
        "status": done.status,
        "model": (done.adapter or done.model)[:_WORD],
        "prompt_tokens": sum(len(prompt.ids) for prompt in done.prompts),
        "cached_tokens": sum(prompt.cache.cached for prompt in done.prompts),
        **{f"cached_{tier}": tokens for tier, tokens in zip(TIERS, tiers, strict=True)},
        "generated_tokens": done.completion_tokens,
        "reason": ",".join(dict.fromkeys(done.reasons))[:_WORD],
        "queue_seconds": round(max((prompt.queued for prompt in done.prompts), default=0.0), 4),
    }
    if done.first is not None:
        fields["first_seconds"] = round(done.first - done.arrived, 4)
    fields["total_seconds"] = round(done.ended - done.arrived, 4)
    if done.first is not None and done.ended > done.first and done.completion_tokens > 1:
        fields["tokens_per_second"] = round(done.completion_tokens / (done.ended - done.first), 1)
    if done.error:
        fields["error"] = done.error[:_ERROR]
    if done.text is not None:
        fields["text"] = done.text[:TEXT]
    return fields


# ---- how a line is written


def _safe(text: str) -> str:
    return _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _word(value: object) -> str:
    """A value behind its name: quoted where it is not plain."""
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else _safe(json.dumps(value, ensure_ascii=False))


def _message(record: logging.LogRecord) -> str:
    """The message. Newlines in our own text stay, as in an example to try; values that are filled in have none."""
    if record.name.partition(".")[0] != "sapwood":
        return _safe(record.getMessage())
    values = record.args
    if isinstance(values, Mapping):
        return str(record.msg) % {name: _without_newlines(value) for name, value in values.items()}
    return str(record.msg) % tuple(map(_without_newlines, values)) if values else str(record.msg)


def _without_newlines(value: object) -> object:
    return value if isinstance(value, (int, float)) else _safe(str(value))


class _Text(logging.Formatter):
    """2026-01-31 12:00:00.123 INFO    message name=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{when}.{int(record.msecs):03d} {record.levelname:<7} {_message(record)}"
        fields: Mapping[str, object] = getattr(record, "fields", {})
        if fields:
            line = " ".join([line, *(f"{name}={_word(value)}" for name, value in fields.items())])
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            line = "\n".join([line, *(f"  | {_safe(each)}" for each in traceback)])
        return line


class _Json(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        shown: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)  # ASCII: everything else is escaped
