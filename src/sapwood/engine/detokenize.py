"""Text from tokens, as they come: a character appears when its last byte is there. No torch here: the API process makes
the text of a server.

Byte-level vocabularies, which most models have, are a table: the text of a token where that is whole characters, its
bytes for an incremental UTF-8 decoder where not, a tenth of the cost of decoding. All others are decoded in a window
that begins where text was last whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

_HALF = "\ufffd"  # what tokenizers make of the bytes of a character that is not there yet
# Tokens without a whole end after which their text is taken as it is, so that windows stay small.
_MAX_UNFINISHED_TOKENS = 64
TAIL_TOKENS = 6  # tokens of a prompt that are enough for the spaces around the first token generated

_utf8 = codecs.getincrementaldecoder("utf-8")


class TextDecoder(Protocol):
    """The text of one sample."""

    def push(self, token: int) -> str:
        """The text that is whole with one more token."""

    def finish(self) -> str:
        """What is left, half characters as such."""


class Detokenizer:
    """`tokenizer`: a `tokenizers.Tokenizer`, or what transformers wraps around one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._tables: tuple[_ByteTable, _ByteTable] | None = None
        if type(self.tokenizer.decoder).__name__ == "ByteLevel":
            special = {id for id, added in self.tokenizer.get_added_tokens_decoder().items() if added.special}
            self._tables = _ByteTable(self.tokenizer, set()), _ByteTable(self.tokenizer, special)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself."""
        if self._tables is not None:
            found = self._tables[False][token]
            return found.encode() if isinstance(found, str) else found
        return self.decode([token], False).encode()

    def stream(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> TextDecoder:
        """A text that goes on behind the last tokens of a prompt."""
        tail = [int(token) for token in prompt_tail[-TAIL_TOKENS:]]
        if self._tables is not None:
            return _Bytes(self._tables[skip_special_tokens], tail)
        return _Window(self.tokenizer.decode, skip_special_tokens, tail)


class _ByteTable(dict[int, str | bytes]):
    """Tokens of a byte-level vocabulary as text, or as bytes where they are no whole characters, each made when it is
    first asked for."""

    def __init__(self, tokenizer: Any, skipped: set[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token: int) -> str | bytes:
        named = None if token in self._skipped else self._tokenizer.id_to_token(token)
        found: str | bytes = ""
        if named is not None:
            try:
                found = bytes([_BYTES[char] for char in named])
                found = found.decode()
            except KeyError:  # a token that was added as text
                found = named
            except UnicodeDecodeError:
                pass
        self[token] = found
        return found


def _characters() -> dict[str, int]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _characters()


class _Bytes:
    __slots__ = ("_decode", "_half", "_state", "_table")

    def __init__(self, table: _ByteTable, tail: list[int]) -> None:
        self._table = table
        decoder = _utf8("replace")
        self._decode, self._state = decoder.decode, decoder.getstate
        self._half = False  # a character is not whole yet
        for token in tail:  # a prompt may end in half a character
            self.push(token)

    def push(self, token: int) -> str:
        found = self._table[token]
        if type(found) is str:
            if not self._half:
                return found
            found = found.encode()
        text = self._decode(found)  # type: ignore[arg-type]
        self._half = bool(self._state()[0])
        return text

    def finish(self) -> str:
        self._half = False
        return self._decode(b"", True)


class _Window:
    __slots__ = ("_decode", "_read", "_sent", "_skips", "_window")

    def __init__(self, decode: Any, skips: bool, tail: list[int]) -> None:
        self._decode = decode
        self._skips = skips
        self._window = tail
        self._read = self._sent = 0
        self._sent = len(self._begin(0).rstrip(_HALF))

    def push(self, token: int) -> str:
        self._window.append(token)
        full: str = self._decode(self._window, skip_special_tokens=self._skips)
        long = len(self._window) - self._read >= _MAX_UNFINISHED_TOKENS
        whole = full if long else full.rstrip(_HALF)
        new = whole[self._sent :]
        if long or (new and len(whole) == len(full)):
            self._begin(self._read)
        else:
            self._sent = max(self._sent, len(whole))
        return new

    def finish(self) -> str:
        rest: str = self._decode(self._window, skip_special_tokens=self._skips)[self._sent :]
        self._window, self._read, self._sent = [], 0, 0
        return rest

    def _begin(self, at: int) -> str:
        """The next window begins with the tokens from `at` on, whose text is out already: what a token becomes may
        depend on the one before it (spaces), not on earlier ones. Returns their text."""
        del self._window[:at]
        self._read = len(self._window)
        known: str = self._decode(self._window, skip_special_tokens=self._skips)
        self._sent = len(known)
        return known
