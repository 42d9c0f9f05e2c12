"""Text to token ids and back, without transformers; and the tokenizer.json of a model, which is made from other forms
where a model has none.

Encoding runs on threads, by the one call of `tokenizers` that releases the interpreter, so that a long prompt does not
hold up other streams. A prompt is encoded in segments between special tokens, and the ids of each segment are cached:
the next turn of a chat encodes its new messages alone. Whether that is exact for a tokenizer is tested when it is
loaded; where it is not, prompts are encoded whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from sapwood.engine.detokenize import Detokenizer
from sapwood.engine.loading.model_files import ModelError
from sapwood.engine.loading.usercache import cache_folder, made_once

T = TypeVar("T")
Ids = npt.NDArray[np.int32]
_INLINE_CHARACTERS = 2000  # that are encoded without a thread; also tokens that are decoded without one
_SLICE_CHARACTERS = 32768  # that are counted together
_MAX_SEGMENTS = 16384  # of a prompt: one with more is encoded whole
_NICE = 10  # of the threads, which give way to the event loop where both want one core
_SEGMENT_CACHE_BYTES = 64 << 20  # of segments and their ids
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_EXACTNESS_SAMPLES = (
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
    """A tokenizer that one event loop calls."""

    def __init__(self, path: str, threads: int = 2) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.detokenizer = Detokenizer(self.tokenizer)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize", initializer=_lower_priority)
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

    async def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of a text. Special tokens written in it count as such."""
        if not add_special_tokens and self._split is not None:
            pieces = self._split.split(text, _MAX_SEGMENTS)  # text, special token, text, ..., text
            if len(pieces) <= 2 * _MAX_SEGMENTS:
                return await self._in_segments(pieces)
        (ids,) = await self._encoded([text], add_special_tokens)
        return np.frombuffer(ids, np.int32)

    async def surely_more(self, text: str, most: int) -> bool:
        """Whether a text certainly has more than `most` tokens. It is not read to its end to find out."""
        found = 0
        for at in range(0, len(text), _SLICE_CHARACTERS):
            (ids,) = await self._encoded([text[at : at + _SLICE_CHARACTERS]], False)
            found += len(ids) // 4 - 16  # a cut through a text makes a few more
            if found > most:
                return True
        return False

    async def decode_long(self, ids: Sequence[int]) -> str:
        """As `decode`, on a thread where it would hold up streams."""
        if len(ids) <= _INLINE_CHARACTERS:
            return self.decode(ids)
        texts = await self.run(lambda: self.tokenizer.decode_batch([ids], skip_special_tokens=False))
        return texts[0]

    async def run(self, work: Callable[[], T]) -> T:
        """Do longer work on a thread, in turn with texts that are encoded."""
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
        for first in _EXACTNESS_SAMPLES:
            for second in _EXACTNESS_SAMPLES:
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


def _lower_priority() -> None:
    """For a thread whose work may wait for streams."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def tokenizer_file(folder: str) -> str | None:
    """The path of the tokenizer.json of a model, made once in the user's cache folder from another form if it has none.
    None if the folder has no tokenizer."""
    where = Path(folder).expanduser()
    if where.is_file() and where.suffix == ".json":
        return str(where)
    if (where / "tokenizer.json").is_file():
        return str(where / "tokenizer.json")
    sources = [where / name for name in (*_OTHER_FORMS, *_BESIDE) if (where / name).is_file()]
    if not any(path.name in _OTHER_FORMS for path in sources):
        if not where.is_dir():
            raise ModelError(f"the tokenizer in {folder} is not there: give a folder or a tokenizer.json")
        return None
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:24]

    def convert(target: Path) -> None:
        from transformers import AutoTokenizer

        try:
            made = AutoTokenizer.from_pretrained(str(where), trust_remote_code=False, local_files_only=True)
            made.backend_tokenizer.save(str(target / "tokenizer.json"))
        except (OSError, ValueError, AttributeError, ImportError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"the tokenizer in {folder} cannot be read: {why}") from error

    return str(made_once(cache_folder("tokenizers") / content, convert) / "tokenizer.json")
