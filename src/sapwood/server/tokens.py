"""Text to token ids, and messages to text: what a server without transformers needs of a tokenizer.

Encoding runs on threads, by the one call of `tokenizers` that lets go of the interpreter, so that a long prompt does
not hold up the streams of others. A prompt is encoded in segments between special tokens, and each segment's ids are
kept: the next turn of a chat encodes its new messages alone. That this is exact for a tokenizer is tried when it is
loaded; where it is not, prompts are encoded whole.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from sapwood.engine.detokenize import Detokenizer

Ids = npt.NDArray[np.int32]
_SHORT = 2000  # characters that are encoded at once, without a thread
_KEPT = 64 << 20  # bytes of segments and their ids
_TRIED = (
    "Hello world",
    " leading space",
    "\nnew line\n\n",
    "a  b\tc ",
    "user\nWhat is 1+1?",
    "é日本語👍",
    "   ",
    "x" * 40,
    "'s don't",
    "123 4567",
)


class Tokens:
    """A tokenizer, for one event loop."""

    def __init__(self, path: str, threads: int = 2) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.detokenizer = Detokenizer(self.tokenizer)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        plain = [
            token.content
            for token in added.values()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        ]
        self._split: re.Pattern[str] | None = None
        if plain:
            longest = sorted(map(re.escape, plain), key=len, reverse=True)
            self._split = re.compile(f"({'|'.join(longest)})")
            if not self._exact():
                self._split = None
        self._segments: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    @property
    def by_segment(self) -> bool:
        """Whether prompts are encoded in segments."""
        return self._split is not None

    async def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of a text. Special tokens written in it count as such."""
        if not add_special_tokens and self._split is not None:
            return await self._in_segments(text)
        return np.frombuffer(await self._encoded([text], add_special_tokens), np.int32)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def _in_segments(self, text: str) -> Ids:
        assert self._split is not None
        pieces = self._split.split(text)  # text, special token, text, ..., text
        kept = self._segments
        unknown = list(dict.fromkeys(piece for piece in pieces[::2] if piece and piece not in kept))
        if unknown:
            found = {piece: await self._encoded([piece], False) for piece in unknown}
            for piece, ids in found.items():
                self._keep(piece, ids)
        else:
            found = {}
        parts: list[bytes] = []
        for at, piece in enumerate(pieces):
            if at % 2:
                parts.append(np.int32(self.special[piece]).tobytes())
            elif piece in found:
                parts.append(found[piece])
            elif piece:
                parts.append(kept[piece])
                kept.move_to_end(piece)
        return np.frombuffer(b"".join(parts), np.int32)

    def _keep(self, piece: str, ids: bytes) -> None:
        if len(ids) + 4 * len(piece) > _KEPT // 16 or piece in self._segments:
            return
        self._segments[piece] = ids
        self._size += len(ids) + 4 * len(piece)
        while self._size > _KEPT:
            old, gone = self._segments.popitem(last=False)
            self._size -= len(gone) + 4 * len(old)

    async def _encoded(self, texts: list[str], add_special_tokens: bool) -> bytes:
        if sum(map(len, texts)) <= _SHORT:
            return self._encode(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, texts, add_special_tokens)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> bytes:
        (encoding,) = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, np.int32).tobytes()

    def _exact(self) -> bool:
        """Whether encoding segments by themselves gives what encoding everything at once does."""
        assert self._split is not None
        special = next(iter(self.special))
        for first in _TRIED:
            for second in _TRIED:
                text = f"{first}{special}{second}{special}{special}{first}"
                whole = self.tokenizer.encode(text, add_special_tokens=False).ids
                parts: list[int] = []
                for at, piece in enumerate(self._split.split(text)):
                    if at % 2:
                        parts.append(self.special[piece])
                    elif piece:
                        parts += self.tokenizer.encode(piece, add_special_tokens=False).ids
                if parts != whole:
                    return False
        return True

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.detokenizer.decode([int(id) for id in ids], skip_special_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
