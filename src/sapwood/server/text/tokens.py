"""Text to token ids, and messages to text: what a server without transformers needs of a tokenizer.

Encoding runs on threads, by the one call of `tokenizers` that lets go of the interpreter, so that a long prompt does
not hold up the streams of others. A prompt is encoded in segments between special tokens, and each segment's ids are
kept: the next turn of a chat encodes its new messages alone. That this is exact for a tokenizer is tried when it is
loaded; where it is not, prompts are encoded whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from sapwood.engine.detokenize import Detokenizer

T = TypeVar("T")
Ids = npt.NDArray[np.int32]
_INLINE_CHARACTERS = 2000  # characters that are encoded at once, without a thread; and tokens that are decoded so
_SLICE_CHARACTERS = 32768  # characters that are counted at once
_MOST_SEGMENTS = 16384
_NICE = 10  # how much less the threads count than the event loop, where both want one core
_SEGMENT_CACHE_BYTES = 64 << 20  # bytes of segments and their ids
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


class AsyncTokenizer:
    """A tokenizer, for one event loop."""

    def __init__(self, path: str, threads: int = 2) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.detokenizer = Detokenizer(self.tokenizer)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize", initializer=_give_way)
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        self._special_ids = {text: np.int32(id).tobytes() for text, id in self.special.items()}
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
        self._token_texts: dict[int, str] = {}
        self._segments: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    @property
    def by_segment(self) -> bool:
        """Whether prompts are encoded in segments."""
        return self._split is not None

    async def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of a text. Special tokens written in it count as such."""
        if not add_special_tokens and self._split is not None:
            pieces = self._split.split(text, _MOST_SEGMENTS)  # text, special token, text, ..., text
            if len(pieces) <= 2 * _MOST_SEGMENTS:
                return await self._in_segments(pieces)
        (ids,) = await self._encoded([text], add_special_tokens)
        return np.frombuffer(ids, np.int32)

    async def surely_more(self, text: str, most: int) -> bool:
        """Whether a text certainly has more than so many tokens, found without looking at all of it."""
        found = 0
        for at in range(0, len(text), _SLICE_CHARACTERS):
            (ids,) = await self._encoded([text[at : at + _SLICE_CHARACTERS]], False)
            found += len(ids) // 4 - 16  # a cut makes a few more of them than there are
            if found > most:
                return True
        return False

    async def decode_long(self, ids: Sequence[int]) -> str:
        """As `decode`, without holding up others."""
        if len(ids) <= _INLINE_CHARACTERS:
            return self.decode(ids)
        texts = await self.run(lambda: self.tokenizer.decode_batch([ids], skip_special_tokens=False))
        return texts[0]

    async def run(self, work: Callable[[], T]) -> T:
        """Do something that takes longer on a thread, in turn with texts that are encoded."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _in_segments(self, pieces: list[str]) -> Ids:
        kept, ids, unknown = self._segments, {"": b"", **self._special_ids}, list[str]()
        for piece in dict.fromkeys(pieces[::2]):
            if piece in kept:
                ids[piece] = kept[piece]
                kept.move_to_end(piece)
            elif piece:
                unknown.append(piece)
        for piece, made in zip(unknown, await self._encoded(unknown, False), strict=True):
            ids[piece] = made
            self._keep(piece, made)
        return np.frombuffer(b"".join([ids[piece] for piece in pieces]), np.int32)

    def _keep(self, piece: str, ids: bytes) -> None:
        if len(ids) + 4 * len(piece) > _SEGMENT_CACHE_BYTES // 16 or piece in self._segments:
            return
        self._segments[piece] = ids
        self._size += len(ids) + 4 * len(piece)
        while self._size > _SEGMENT_CACHE_BYTES:
            old, gone = self._segments.popitem(last=False)
            self._size -= len(gone) + 4 * len(old)

    async def _encoded(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return self._encode(texts, add_special_tokens)
        return await self.run(lambda: self._encode(texts, add_special_tokens))

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[bytes]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, np.int32).tobytes() for encoding in encodings]

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

    def token_text(self, token: int) -> str:
        """A token by itself."""
        found = self._token_texts.get(token)
        if found is None:
            found = self._token_texts[token] = self.detokenizer.token_bytes(token).decode(errors="replace")
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """For a thread whose work may wait for the streams."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
