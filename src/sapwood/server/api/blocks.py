"""A sample as blocks that follow each other, each of one kind: reasoning, text, or a tool call. The Responses API calls
them items, Anthropic's content blocks; both tell when one begins, what is added to it, and when it is over.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..generation import TextPiece
from ..text.answer_parts import AnswerParser, Part, Reasoning
from ..text.tools import CallArguments, CallBegins, Content, call_id

Kind = Literal["reasoning", "text", "call"]
_KINDS: dict[type, Kind] = {Reasoning: "reasoning", Content: "text", CallBegins: "call", CallArguments: "call"}


class Block:
    """`call`, `name`: of a tool call, whose text is its arguments as JSON."""

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
    """`block`: as it begins, without text."""

    block: Block


class Said(NamedTuple):
    block: Block
    text: str


class Closed(NamedTuple):
    block: Block


Step = BlockOpened | Said | Closed


class Blocks:
    """The blocks of one sample so far; at most the last is open. `parser`: the format of the model's tool calls."""

    def __init__(self, spoken: AnswerParser, parser: str | None) -> None:
        self.all: list[Block] = []
        self.reasoning_tokens = 0
        self._spoken = spoken
        self._parser = parser
        self._open: Block | None = None
        self._tokens = 0  # before anything but reasoning has come
        self._answers = False

    @property
    def full(self) -> bool:
        """Nothing comes any more that counts."""
        return self._spoken.full

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def push(self, piece: TextPiece) -> list[Step]:
        """What a piece adds. The last block stays open after the last piece: `close` closes it."""
        parts = self._spoken.push(piece.text) if piece.text else []
        if piece.finish is not None:
            parts += self._spoken.finish()
        if not self._answers:
            self._count(piece, parts)
        return [step for part in parts for step in self.take(part)]

    def take(self, part: Part) -> list[Step]:
        """What a part adds."""
        steps: list[Step] = []
        kind = _KINDS[type(part)]
        block = self._open
        if block is None or block.kind != kind or isinstance(part, CallBegins):
            steps += self.close()
            named = (part.name, call_id(self._parser)) if isinstance(part, CallBegins) else ("", "")
            steps.append(BlockOpened(Block(len(self.all), kind, *named)))
            block = self._open = Block(len(self.all), kind, *named)
            self.all.append(block)
        if not isinstance(part, CallBegins) and part.text:
            block.add(part.text)
            steps.append(Said(block, part.text))
        return steps

    def close(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Closed(block)]

    def _count(self, piece: TextPiece, parts: list[Part]) -> None:
        """Tokens count as reasoning up to the piece that brings something else."""
        self._answers = any(not isinstance(part, Reasoning) for part in parts)
        if not self._answers:
            self._tokens += len(piece.tokens)
            if parts or self.all:
                self.reasoning_tokens = self._tokens
