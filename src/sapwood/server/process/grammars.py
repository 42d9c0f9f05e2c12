"""Answers of a given form: what a request demands of its text, and which tokens may come next to fulfil it. The API
process makes and checks `GrammarSpec`; the rest runs in the engine process, through llguidance.

    GrammarSpec --> a trial in another process --> compiled once --> a TokenGrammar for each sample
                    (time, memory, errors)         (cached)          (masks, tokens, back again)

Special tokens of the tokenizer and ids that it does not have are never allowed, whatever the grammar. Where a text is
complete, and nothing can be added, only the tokens that end it are allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from .grammar_trial import LIMITS, STACK, Trial, Vocabulary, explained

Masks = npt.NDArray[np.int32]
T = TypeVar("T")

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "tool_calls")
MOST_CHOICE = 4096  # characters of a choice
_MAX_WAITING = 64  # grammars that may wait to be compiled
_MAX_CACHED = 64  # compiled grammars that are kept
_MAX_CACHED_BYTES = 256 << 20  # memory that they may need together
_SLOW_TOKEN_SECONDS = 0.05  # seconds that a token may cost a grammar: the whole step waits for it
_MAX_STRIKES = 3  # slow tokens after which a grammar fails
_WATCHED_STEPS = 64  # steps in which the time of each grammar is taken, after a slow one


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The form of a text: one of `KINDS`, and in `text`

    json_object     nothing
    json_schema     a JSON schema
    regex           a regular expression that all of it matches (Rust's syntax)
    choice          a JSON list of strings
    grammar         a grammar in llguidance's kind of Lark, or in GBNF (as llama.cpp has it)
    structural_tag  {"triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}: any text, but from a trigger
                    on it goes on as one of the structures
    tool_calls      a grammar in Lark, made by the server of a request's tools
    """

    kind: str
    text: str = ""


def check(spec: GrammarSpec, *, max_bytes: int = 65536, max_depth: int = 64, max_choices: int = 1024) -> None:
    """ValueError if it is too large, or certainly not of its kind. Cheap, and safe with any text."""
    kind, text = spec.kind, spec.text
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r:.60}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{kind} must be text, got half a character in {text!r:.60}") from None
    if size > max_bytes:
        raise ValueError(f"{kind} must have at most {max_bytes} bytes, got {size}")
    if kind in ("regex", "grammar") and not text:
        raise ValueError(f"{kind} must not be empty")
    if kind in ("json_schema", "choice", "structural_tag"):
        _check_json(kind, _parsed(kind, text), max_depth, max_choices)


def _parsed(kind: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{kind} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{kind} must be JSON: {error!s:.100}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is none of its numbers")


def _check_json(kind: str, value: Any, max_depth: int, max_choices: int) -> None:
    if kind == "choice":
        if not isinstance(value, list) or not 0 < len(value) <= max_choices:
            raise ValueError(f"choice must be a list of 1 to {max_choices} strings, got {value!r:.60}")
        for choice in value:
            if not isinstance(choice, str) or len(choice) > MOST_CHOICE:
                raise ValueError(f"choice must hold strings of at most {MOST_CHOICE} characters, got {choice!r:.60}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{kind} must be a JSON object, got {value!r:.60}")
    layer: list[Any] = [value]
    for _ in range(max_depth):  # by layers, without recursion
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, dict) else each)]
        layer = [inner for inner in layer if isinstance(inner, (dict, list))]
    if layer:
        raise ValueError(f"{kind} must be nested at most {max_depth} deep, got {layer[0]!r:.60} below that")
    if kind == "structural_tag":
        _check_tags(value)


def _check_tags(value: dict[str, Any]) -> None:
    triggers, structures = value.get("triggers"), value.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
        raise ValueError(f"structural_tag must have a list of strings as triggers, got {triggers!r:.60}")
    if not isinstance(structures, list) or not structures:
        raise ValueError(f"structural_tag must have a list of structures, got {structures!r:.60}")
    for each in structures:
        texts = isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("begin", "end"))
        if not texts or not isinstance(each.get("schema"), dict):
            raise ValueError(f"structural_tag must have structures of begin, schema and end, got {each!r:.60}")


# ---- in the engine process


class GrammarsBusy(ValueError):
    """Too many grammars wait to be compiled."""


class TokenGrammar:
    """A grammar that follows one sample. `error`: why its text cannot go on. With an error, and after a token that ends
    the text, only the tokens that end it are allowed."""

    __slots__ = ("_compiled", "_fed", "_grammars", "_matcher", "_strikes", "_tokens", "error")

    def __init__(self, grammars: Grammars, compiled: LLMatcher) -> None:
        self.error = ""
        self._grammars = grammars
        self._compiled = compiled  # as it is before the first token
        self._matcher = compiled.deep_copy()
        self._tokens: list[int] = []
        self._fed = 0  # tokens that the matcher has consumed: none from the first that ends the text on
        self._strikes = 0

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher that knows the next tokens; None where only tokens that end the text are allowed."""
        return None if self.error or self._fed < len(self._tokens) else self._matcher

    def accept(self, token: int) -> None:
        matcher = self.matcher
        self._tokens.append(token)
        if matcher is None or token in self._grammars.eos:
            return
        begun = time.thread_time()
        if matcher.consume_token(token):
            self._fed += 1
        else:
            self.fails(f"token {token} is not of this form")
        self.took(time.thread_time() - begun)

    def rollback(self, tokens: int) -> None:
        left = len(self._tokens) - tokens
        if not 0 <= left <= len(self._tokens):
            raise ValueError(f"tokens must be from 0 to {len(self._tokens)}, all that were accepted, got {tokens}")
        rest = self._tokens[:left]
        if not self.error:
            if left >= self._fed or self._matcher.rollback(self._fed - left):
                self._tokens, self._fed = rest, min(left, self._fed)
                return
        elif self._strikes >= _MAX_STRIKES:
            self._tokens = rest
            return
        # A matcher does not lose an error: another one begins from the start.
        self._matcher, self._tokens, self._fed, self.error = self._compiled.deep_copy(), [], 0, ""
        for token in rest:
            self.accept(token)

    def allowed(self) -> Masks:
        masks = np.empty((1, self._grammars.words), np.int32)
        self._grammars.fill([self], masks, [0])
        return masks.reshape(-1)

    def fails(self, error: str) -> None:
        self.error = self.error or error

    def took(self, seconds: float) -> None:
        """Count the time of one token, for which the whole step has waited."""
        if seconds > _SLOW_TOKEN_SECONDS:
            self._strikes += 1
            if self._strikes >= _MAX_STRIKES:
                self.fails("grammar takes too long for each token")


class FairQueue(Generic[T]):
    """Things wait under names, which have equal shares of its places and its turns: one thing of each name is taken in
    turn. At most `most` may wait; where there is no place, the name with most things gives up its newest. Threads put
    and take."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[str, deque[T]] = {}  # by name; the first has the next turn
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    def put(self, name: str, thing: T) -> T | None:
        """What had to give way for it: a thing of another name, the thing itself, or nothing."""
        with self._changed:
            if self._count() >= self._most:
                longest = max(self._waiting, key=lambda each: len(self._waiting[each]))
                if len(self._waiting[longest]) <= len(self._waiting.get(name, ())) + 1:
                    return thing
                gone: T | None = self._waiting[longest].pop()
            else:
                gone = None
            self._waiting.setdefault(name, deque()).append(thing)
            self._changed.notify()
            return gone

    def take(self) -> T | None:
        """The next thing; waits for it. None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            name = next(iter(self._waiting))
            theirs = self._waiting.pop(name)
            thing = theirs.popleft()
            if theirs:
                self._waiting[name] = theirs  # behind all other names
            return thing

    def remove(self, unwanted: Callable[[T], bool]) -> None:
        """These need not be done any more, if they still wait."""
        with self._changed:
            for name, theirs in list(self._waiting.items()):
                left = deque(thing for thing in theirs if not unwanted(thing))
                if left:
                    self._waiting[name] = left  # its turn stays the same
                else:
                    del self._waiting[name]

    def close(self) -> list[T]:
        """What was still waiting. From now on `take` returns None."""
        with self._changed:
            left = [thing for theirs in self._waiting.values() for thing in theirs]
            self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
            return left

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))


class Grammars:
    """Compiles grammars for one tokenizer, and makes the masks of all samples of a step at once.

    tokenizer   or the path of its tokenizer.json
    vocabulary  how many logits the model has
    eos         the tokens that end a text
    seconds     processor time that a grammar may take to compile
    megabytes   memory that it may need for that
    compilers   threads that compile, each with a process to try grammars in
    threads     threads that make masks; 0: as many as there are cores, at most 16
    """

    def __init__(
        self,
        tokenizer: Tokenizer | str | Path,
        vocabulary: int,
        eos: Sequence[int],
        *,
        seconds: float = 0.8,
        megabytes: int = 256,
        compilers: int = 2,
        threads: int = 0,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_file(str(tokenizer))
        self.eos = frozenset(int(token) for token in eos if token < vocabulary)
        self.words = -(-vocabulary // 32)  # of a mask
        self._trouble = ""  # why this model can have no grammars
        ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
        size = max(vocabulary, int(ids.max()) + 1)  # a tokenizer may have more tokens than the model
        text = np.zeros(-(-size // 32) * 32, bool)
        text[ids[ids < vocabulary]] = True
        added = tokenizer.get_added_tokens_decoder()
        text[[id for id, token in added.items() if token.special]] = False
        self._ends = _bits(np.isin(np.arange(len(text)), list(self.eos)))
        self._text = _bits(text) | self._ends
        try:
            if not self.eos:
                raise ValueError("the model has no token that ends a text")
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(self.eos))
        except ValueError as error:
            self._trouble = f"structured output is not possible with this model: {error!s:.200}"
        self._executor = LLExecutor(threads or min(16, len(os.sched_getaffinity(0))))
        self._watching = 0  # steps that are still watched
        self._cache = _Cache()
        self._jobs = FairQueue[_Compile](_MAX_WAITING)
        names = {id: token.content for id, token in added.items()}
        self._tried = (seconds, megabytes << 20, Vocabulary(size, sorted(self.eos), names))
        self._compilers: list[threading.Thread] = []
        before = threading.stack_size(STACK)
        for _ in range(0 if self._trouble else compilers):
            self._compilers.append(threading.Thread(target=self._compile_all, name="grammars", daemon=True))
            self._compilers[-1].start()
        threading.stack_size(before)

    # ---- compiling

    def compile(self, spec: GrammarSpec, samples: int = 1, owner: str = "") -> Future[list[TokenGrammar]]:
        """A grammar for each of the samples, or a ValueError whose text is for the client. Owners have equal shares of
        the queue and of the compilers' time: GrammarsBusy if the owner's share is used up."""
        future: Future[list[TokenGrammar]] = Future()
        compiled = self._cache.get(spec)
        if self._trouble:
            future.set_exception(ValueError(self._trouble))
        elif compiled is not None:
            future.set_result([TokenGrammar(self, compiled) for _ in range(samples)])
        else:
            dropped = self._jobs.put(owner, _Compile(spec, samples, future))
            if dropped is not None and dropped.future.set_running_or_notify_cancel():
                dropped.future.set_exception(
                    GrammarsBusy(f"{_MAX_WAITING} other grammars wait to be compiled: try again later")
                )
        return future

    def cancel(self, future: Future[list[TokenGrammar]]) -> None:
        """The request is gone. A grammar that is being compiled already has its own bounds."""
        if future.cancel():
            self._jobs.remove(lambda job: job.future is future)

    def close(self) -> None:
        """Cancel all that waits, and end the threads."""
        for job in self._jobs.close():
            job.future.cancel()
        for thread in self._compilers:
            thread.join()

    def _compile_all(self) -> None:
        trial = Trial(*self._tried)
        with contextlib.suppress(OSError):  # each request gets the error
            trial.start()
        while (job := self._jobs.take()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                compiled = self._cache.get(job.spec) or self._compiled(trial, job.spec)
                job.future.set_result([TokenGrammar(self, compiled) for _ in range(job.samples)])
            except Exception as error:  # without its traceback, which would hold the future that holds the error
                job.future.set_exception(ValueError(str(error)))
        trial.close()

    def _compiled(self, trial: Trial, spec: GrammarSpec) -> LLMatcher:
        grammar, size = trial.of(spec.kind, spec.text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # its copies for samples have the lexer states of the first mask already
        if matcher.is_error():
            raise ValueError(explained(spec.kind, matcher.get_error()))
        self._cache.put(spec, matcher, size)
        return matcher

    # ---- masks

    def fill(self, grammars: Sequence[TokenGrammar], masks: Masks, rows: Sequence[int]) -> None:
        """Write what each of these grammars allows into its row of `masks`. They are made in parallel, without the
        interpreter."""
        if masks.dtype != np.int32 or masks.shape[1:] != (self.words,) or not masks.flags.c_contiguous:
            raise ValueError(f"masks must be rows of {self.words} int32, got {masks.dtype} of shape {masks.shape}")
        wide = masks if len(self._text) == self.words else np.empty((len(masks), len(self._text)), np.int32)
        asked = [(grammar, grammar.matcher, row) for grammar, row in zip(grammars, rows, strict=True)]
        self._compute([(grammar, matcher, row) for grammar, matcher, row in asked if matcher is not None], wide)
        for grammar, matcher, row in asked:
            bits = wide[row]
            if matcher is not None:
                if matcher.is_error():
                    grammar.fails(explained("grammar", matcher.get_error()))
                bits &= self._text
                if not bits.any():
                    grammar.fails("grammar asks for tokens that are not generated")
            if grammar.matcher is None:
                bits[:] = self._ends
            if wide is not masks:
                masks[row] = bits[: self.words]

    def _compute(self, asked: list[tuple[TokenGrammar, LLMatcher, int]], masks: Masks) -> None:
        begun, width = time.perf_counter(), masks.shape[1] * 4
        if self._watching:  # one after the other, to find the slow ones
            self._watching -= 1
            for grammar, matcher, row in asked:
                own = time.thread_time()
                matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, width)
                grammar.took(time.thread_time() - own)
        elif asked:
            pairs = [(matcher, row) for _, matcher, row in asked]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, width, len(masks))
        if time.perf_counter() - begun > _SLOW_TOKEN_SECONDS:
            self._watching = _WATCHED_STEPS


class _Compile(NamedTuple):
    spec: GrammarSpec
    samples: int
    future: Future[list[TokenGrammar]]


class _Cache:
    """The grammars used last, as they are before the first token."""

    def __init__(self) -> None:
        self._kept: OrderedDict[GrammarSpec, tuple[LLMatcher, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, spec: GrammarSpec) -> LLMatcher | None:
        with self._lock:
            if spec not in self._kept:
                return None
            self._kept.move_to_end(spec)
            return self._kept[spec][0]

    def put(self, spec: GrammarSpec, matcher: LLMatcher, size: int) -> None:
        with self._lock:
            self._bytes += size - self._kept.pop(spec, (None, 0))[1]
            self._kept[spec] = matcher, size
            while len(self._kept) > _MAX_CACHED or (self._bytes > _MAX_CACHED_BYTES and len(self._kept) > 1):
                self._bytes -= self._kept.popitem(last=False)[1][1]


def _bits(allowed: npt.NDArray[np.bool_]) -> Masks:
    return np.packbits(allowed, bitorder="little").view(np.int32)
