"""What a server streams back, in OpenAI's form, read and timed while it arrives. Tokens are what `usage` says, never
how many pieces their text came in."""

from __future__ import annotations

import time
from array import array
from typing import Annotated, Any, NamedTuple

import msgspec

from .client import Client, Failure

SILENT = "nothing said"  # the kind of a failure: tokens, and neither text nor their ids
_MOST_LINE = 16 << 20  # bytes of one event
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    token_ids: list[int] | None = None  # where they were asked for
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether tokens came with it. A completion's may have no text, such as the first half of a character; a chat
        begins with a role and may end with a reason, which are none."""
        if self.delta is None:
            return bool(self.text or self.token_ids) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class Heard(NamedTuple):
    """One request that was answered. Times are of time.perf_counter."""

    sent: float
    times: array[float]  # of each piece of the answer, one or more
    end: float
    prompt: int  # tokens, all as `usage` has them
    cached: int | None  # None: the server does not say
    output: int
    text: str  # of a chat


class Stream:
    """An answer while it arrives."""

    def __init__(self) -> None:
        self.times = array("d")
        self.text: list[str] = []
        self.usage: _Usage | None = None
        self._ended = False
        self._rest = b""  # of a line that is not complete

    def receive(self, piece: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            raise Failure("not understood", f"an event of more than {_MOST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise Failure("not understood", f"{error!s:.100}") from None
        if chunk.error is not None:
            raise Failure("error in the stream", message_of(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            if choice.says_something:
                self.times.append(now)
                if choice.delta is not None:
                    self.text.append(choice.delta.content or "")

    def close(self) -> _Usage:
        """Its usage, when no more comes. Raises Failure if something is missing."""
        if not self._ended:
            raise Failure("broken", "the stream ended without [DONE]")
        if self.usage is None:
            raise Failure("no usage", "the server does not say how many tokens there were")
        if not self.times:
            raise Failure(SILENT, f"{self.usage.completion_tokens} tokens, and no text")
        return self.usage


def message_of(error: Any) -> str:
    """What an error of OpenAI's form says, cut to a line."""
    if isinstance(error, bytes):
        try:
            error = msgspec.json.decode(error)
        except msgspec.DecodeError:
            error = error.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return " ".join(str(error).split())[:200]


async def ask(client: Client, path: str, body: bytes) -> Heard:
    """Raises Failure."""
    stream = Stream()
    sent = time.perf_counter()
    answer = await client.post(path, body, stream.receive)
    end = time.perf_counter()
    if answer.status != 200:
        raise Failure(f"status {answer.status}", message_of(answer.body))
    usage = stream.close()
    details = usage.prompt_tokens_details
    return Heard(
        sent,
        stream.times,
        end,
        usage.prompt_tokens,
        None if details is None else details.cached_tokens,
        usage.completion_tokens,
        "".join(stream.text),
    )
