"""Grammars of clients are compiled here first, in a process of their own: a few bytes can ask for minutes, gigabytes or
more stack than there is, and llguidance cannot be interrupted. A fork of that process tries one grammar, and ends when
that has cost too much. What counts is processor time, so that the load of the machine does not decide what is served.

    engine --> Vocabulary, once         --> trial
    engine --> [kind, text]             --> trial
    engine <-- [error, grammar, bytes]  <-- trial      a line of JSON each; bytes: the memory that the grammar needs

The file is run as a script: it needs llguidance and the standard library, and imports nothing of Sapwood.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper, grammar_from, regex_to_lark

# What one token may cost. Steps wait for masks: a grammar that needs more is an error of its sample.
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,  # would walk through the whole vocabulary here, without a limit
    verbose_errors=False,
)
SLOW = "grammar took too long to compile"
LARGE = "grammar is too complex to compile"
_STACK = 8 << 20  # bytes of a trial
_WALL_TIMES_CPU = 10  # a trial may take so many times its processor seconds, if it has to wait for a processor
STACK = 8 * _STACK  # bytes of a thread that compiles grammars that have passed
_PR_SET_PDEATHSIG = 1

# Without it llguidance works out ahead which bytes must follow, up to a million of them between two steps. It stands at
# the end, so that it overrides options in the grammar itself.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# Between the parts of JSON: a new line with its indentation, or a few spaces. Without a bound models may write them for
# ever.
SPACES = {"whitespace_pattern": r"(\r?\n[ \t]{0,64}|[ \t]{1,8})"}


def lark(kind: str, text: str) -> str:
    """A grammar in llguidance's form. ValueError if `text` is not of this kind."""
    if kind == "json_object":
        made = _json({"type": "object"})
    elif kind == "json_schema":
        made = _json(json.loads(text))
    elif kind == "regex":
        made = f"start: /{regex_to_lark(text, '')}/"
    elif kind == "choice":
        made = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    elif kind == "structural_tag":
        made = _without_operators(_tags(json.loads(text)))
    elif kind == "tool_calls":
        made = _without_operators(text)
    elif kind == "grammar":
        is_gbnf = re.search(r"^[ \t]*[\w-]+\s*::=", text, re.M) is not None
        made = _without_operators(grammar_from("gbnf", text) if is_gbnf else text)
    else:
        raise ValueError(f"kind must be one that is known, got {kind!r:.60}")
    return made + _OPTIONS


def explained(kind: str, error: str) -> str:
    """An error of llguidance in words for a client that wrote no Lark, or not the parts that were added to it."""
    error = error.replace("<non-verbose/>", "").strip()
    if kind != "grammar":
        error = re.split(r"\n +\d+ \| ", error)[0]
        error = re.sub(r"^(at )?\d+\(\d+\): ", "", error).removeprefix("failed to compile JSON schema: ")
        error = error.rpartition("\nerror: ")[2]  # before it is a drawing of the place
    elif "\\u0026" in error or "\\u007e" in error:
        error = error.replace("\\u0026", "&").replace("\\u007e", "~") + "\nthe operators & and ~ are not served"
    error = re.sub(r"\n +\d+ \| ?(%llguidance .*)?(?=\n|$)", "", error)
    return f"{kind} cannot be served: {error.strip()[:1000]}"


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": SPACES | schema.get("x-guidance", {})}
    return "start: %json " + json.dumps(schema)


def _tags(wanted: Any) -> str:
    """Any text, and between its pieces structures that begin with one of the triggers, in vLLM's words."""
    tags = []
    for structure in wanted["structures"]:
        begin = structure["begin"]
        trigger = next((each for each in wanted["triggers"] if begin.startswith(each)), None)
        if not trigger:
            raise ValueError(f"structural_tag must have a trigger that begins {begin!r:.60}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


def _without_operators(text: str) -> str:
    """The operators `&` and `~` of terminals can take for ever to compile. As escapes they mean the same in strings and
    regular expressions, and are errors everywhere else; `x~2..3` stays."""
    if re.search(r"""\[[^][\n"' ]*&&""", text):
        raise ValueError("classes of characters cannot be intersected")
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\?&", r"\1\\u0026", text)
    return re.sub(r"(?<!\\)((?:\\\\)*)\\?~(?!\s*\d)", r"\1\\u007e", text)


# ---- the engine's side


class Vocabulary(NamedTuple):
    """What a grammar can know of a tokenizer: its number of tokens, which of them end a text, and the names of those
    that are no ordinary text."""

    size: int
    eos: Sequence[int]
    added: Mapping[int, str]


class Trial:
    """One trial process, for one thread. It ends with the thread that started it.

    seconds     processor time that a grammar may take
    most_bytes  memory that it may need
    """

    def __init__(self, seconds: float, most_bytes: int, vocabulary: Vocabulary) -> None:
        self._arguments = [str(seconds), str(most_bytes), str(os.getpid())]
        self._vocabulary = json.dumps([vocabulary.size, list(vocabulary.eos), [*vocabulary.added.items()]]) + "\n"
        self._process: subprocess.Popen[str] | None = None

    def of(self, kind: str, text: str) -> tuple[str, int]:
        """The grammar that llguidance is to compile, and the bytes it needs. ValueError if it should not."""
        line = json.dumps([kind, text]) + "\n"
        answer = self._ask(line) or self._ask(line)  # once more: the process may have been killed meanwhile
        if not answer:
            raise ValueError("grammars cannot be tried on this machine")
        error, grammar, size = json.loads(answer)
        if error:
            raise ValueError(error)
        return grammar, size

    def start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Rust writes there when a fork overflows its stack
                text=True,
                encoding="ascii",
                start_new_session=True,  # Ctrl-C is for the engine
            )
            assert self._process.stdin is not None
            self._process.stdin.write(self._vocabulary)
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe and pipe.close()

    def _ask(self, line: str) -> str:
        try:
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self.close()
        return answer


# ---- the trial's side


class _Bytes:
    """A tokenizer with the vocabulary's names, and bytes for all its text: the cost of compiling hardly depends on
    anything else."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.special_token_ids = sorted({*vocabulary.eos, *vocabulary.added})
        ordinary = iter(range(256))
        self.tokens = [b""] * vocabulary.size
        for id in range(vocabulary.size):
            if id in vocabulary.added:
                self.tokens[id] = vocabulary.added[id].encode()
            elif id not in vocabulary.eos:
                byte = next(ordinary, None)
                self.tokens[id] = b"" if byte is None else bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return []  # called for bytes that must follow, which are not worked out


def main() -> None:
    seconds, most_bytes, engine = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _die_with(engine)
    size, eos, added = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(Vocabulary(size, eos, dict(added)))), eos_token=eos)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_STACK, _STACK)
    _lower(resource.RLIMIT_AS, _pages(0) + most_bytes)
    for line in sys.stdin:
        kind, text = json.loads(line)
        sys.stdout.write(json.dumps(_tried(tokenizer, kind, text, seconds)) + "\n")
        sys.stdout.flush()


def _tried(tokenizer: LLTokenizer, kind: str, text: str, seconds: float) -> list[Any]:
    reader, writer = os.pipe()
    trial = os.getpid()
    child = os.fork()
    if not child:
        try:
            _die_with(trial)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            with open(writer, "w") as out:
                out.write(json.dumps(_compiled(tokenizer, kind, text)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        waits = select.poll()
        waits.register(pipe, select.POLLIN)
        if not waits.poll(_WALL_TIMES_CPU * seconds * 1000):
            os.kill(child, signal.SIGKILL)
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        found: list[Any] = json.loads(answer)
        return found
    slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL)
    return [SLOW if slow else LARGE, "", 0]


def _compiled(tokenizer: LLTokenizer, kind: str, text: str) -> list[Any]:
    try:
        grammar = lark(kind, text)
        before = _pages(1)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # some grammars only fail here, because no text at all has their form
    except RecursionError:
        return [LARGE, "", 0]
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        return [f"{kind} cannot be served: {error!s:.1000}", "", 0]
    if matcher.is_error():
        error_text = matcher.get_error()
        if error_text.startswith("NoExtension"):
            error_text = "no text has this form"
        return [explained(kind, error_text), "", 0]
    return ["", grammar, max(0, _pages(1) - before)]


def _pages(column: int) -> int:
    """Bytes of this process: of addresses (0), or of memory (1)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * resource.getpagesize()


def _lower(limit: int, most: int) -> None:
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _die_with(parent: int) -> None:
    """The same as in engine_process.py, which cannot be imported here."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


if __name__ == "__main__":
    main()
