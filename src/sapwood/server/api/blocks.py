"""A sample as blocks that follow each other, each of one kind: reasoning, text, or a tool call. The Responses API calls
them items, Anthropic's API content blocks; both have events when a block begins, when text is added, and when it ends.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..generation import TextPiece
from ..text.answer_parts import AnswerParser, Part, Reasoning
from ..text.tools import CallArguments, CallBegins, Content, call_id

Kind = Literal["reasoning", "text", "call"]
_KINDS: dict[type, Kind] = {Reasoning: "reasoning", Content: "text", CallBegins: "call", CallArguments: "call"}


class Block:
    """The text of a tool call is its arguments as JSON. `call`: its id; `name`: of its function."""

    __slots__ = ("_pieces", "call", "index", "kind", "name")

    def __init__(self, index: int, kind: Kind, name: str = "", call: str = "") -> None:
        self.index = index
        self.kind = kind
        self.name = name
        self.call = call
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)


class BlockOpened(NamedTuple):
    """`block`: a copy without text."""

    block: Block


class BlockText(NamedTuple):
    block: Block
    text: str


class BlockClosed(NamedTuple):
    block: Block


BlockEvent = BlockOpened | BlockText | BlockClosed


class Blocks:
    """The blocks of one sample so far. At most the last one is open. `call_format`: of the model's tool calls."""

    def __init__(self, parser: AnswerParser, call_format: str | None) -> None:
        self.all: list[Block] = []
        self.reasoning_tokens = 0
        self._parser = parser
        self._call_format = call_format
        self._open: Block | None = None
        self._tokens = 0  # that came before the first text or call
        self._answers = False  # a text or a call has begun

    @property
    def full(self) -> bool:
        """All that may come has come: the text from here on is dropped."""
        return self._parser.full

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def push(self, piece: TextPiece) -> list[BlockEvent]:
        """The events of a piece. The last block stays open after the last piece until `close`."""
        parts = self._parser.push(piece.text) if piece.text else []
        if piece.finish is not None:
            parts += self._parser.finish()
        if not self._answers:
            self._count(piece, parts)
        return [event for part in parts for event in self.take(part)]

    def take(self, part: Part) -> list[BlockEvent]:
        """The events of a part."""
        events: list[BlockEvent] = []
        kind = _KINDS[type(part)]
        block = self._open
        if block is None or block.kind != kind or isinstance(part, CallBegins):
            events += self.close()
            named = (part.name, call_id(self._call_format)) if isinstance(part, CallBegins) else ("", "")
            events.append(BlockOpened(Block(len(self.all), kind, *named)))
            block = self._open = Block(len(self.all), kind, *named)
            self.all.append(block)
        if not isinstance(part, CallBegins) and part.text:
            block.add(part.text)
            events.append(BlockText(block, part.text))
        return events

    def close(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [BlockClosed(block)]

    def _count(self, piece: TextPiece, parts: list[Part]) -> None:
        """Tokens count as reasoning up to the piece that brings a text or a call."""
        self._answers = any(not isinstance(part, Reasoning) for part in parts)
        if not self._answers:
            self._tokens += len(piece.tokens)
            if parts or self.all:
                self.reasoning_tokens = self._tokens
