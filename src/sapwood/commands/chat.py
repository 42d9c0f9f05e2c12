"""`sapwood chat`: a conversation with a running server, in the terminal or through a pipe. It needs only the standard
library, so it starts at once."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, TextIO
from urllib.parse import urlsplit

from sapwood import __version__

_HELP = """\
/help         this
/reset        forget the conversation
/system TEXT  a new system prompt; without TEXT: show it
/save FILE    write the conversation there, as JSON
/quit         end; Ctrl-D does too
Ctrl-C stops an answer. A line that begins with a space is no command.
"""
_MOST_ANSWER_BYTES = 64 << 20  # of an answer that is not streamed, and of a line of one that is
_TIERS = ("device", "host", "store", "shared")
# A model may write control characters that move a terminal's cursor or change its title: only newlines and tabs pass.
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sapwood chat",
        description="Talk to a running server. Shows for each turn how much of it was cached, and how long it took.",
        epilog="while it runs:\n" + "".join(f"  {line}\n" for line in _HELP.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--url", "--base-url", default="http://127.0.0.1:8000", help="of the server (default %(default)s)"
    )
    made.add_argument("--model", metavar="NAME", help="as the server calls it (default: the first that it lists)")
    made.add_argument("--system", metavar="TEXT", default="", help="what the conversation begins with")
    made.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    made.add_argument("--insecure", action="store_true", help="take any certificate of an https server")
    numbers = made.add_argument_group("sampling; what is not given is as the server has it")
    numbers.add_argument("--temperature", type=_number(float, 0, 100), metavar="N")
    numbers.add_argument("--top-p", type=_number(float, 0, 1), metavar="N")
    numbers.add_argument("--max-tokens", type=_number(int, 1, 1 << 24), metavar="N", help="of an answer")
    numbers.add_argument("--seed", type=_number(int, 0, 2**31 - 1), metavar="N")
    made.add_argument(
        "--timeout",
        type=_number(float, 0.001, 86400),
        default=600.0,
        metavar="N",
        help="seconds without a byte after which an answer has failed (default 600)",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    asked = parser().parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it stops an answer, not the conversation
    try:
        server = Server(asked.url, asked.api_key or os.environ.get("OPENAI_API_KEY"), asked.timeout, asked.insecure)
    except ValueError as error:
        sys.stderr.write(f"sapwood chat: {error}\n")
        return 2
    try:
        model = asked.model or server.first_model()
    except Trouble as trouble:
        sys.stderr.write(f"sapwood chat: {trouble}\n")
        return 1
    sampling = {name: getattr(asked, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    chat = Chat(server, model, sampling, asked.system, Screen(sys.stdout))
    failed = chat.run(_lines(f"{model} at {asked.url}; /help says more\n"))
    return 1 if failed and not sys.stdin.isatty() else 0


def _number(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    def checked(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {noun} from {low} to {high}, got {text!r:.60}")
        return value

    return checked


def _lines(welcome: str) -> Iterator[str]:
    """The lines that the user types, or those of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ModuleNotFoundError):
        import readline  # noqa: F401  # makes the lines of `input` editable
    sys.stdout.write(welcome)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n(Ctrl-D or /quit ends)\n")
        except EOFError:
            sys.stdout.write("\n")
            return


class Screen:
    """Where answers go. Figures and reasoning are dim on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._dim = ("\033[2m", "\033[0m") if out.isatty() and "NO_COLOR" not in os.environ else ("", "")

    def say(self, text: str) -> None:
        self._out.write(text.translate(_CONTROLS))
        self._out.flush()

    def whisper(self, text: str) -> None:
        self._out.write(self._dim[0] + text.translate(_CONTROLS) + self._dim[1])
        self._out.flush()


class Chat:
    """Turns, and the commands between them."""

    def __init__(self, server: Server, model: str, sampling: Mapping[str, Any], system: str, screen: Screen) -> None:
        self._server = server
        self._screen = screen
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._fields = {
            "model": model,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_report": True,  # where the prompt was found; others than `sapwood serve` do not know it
        }
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: screen.say(_HELP),
            "/reset": self._reset,
            "/system": self._change_system,
            "/save": self._save,
        }

    def run(self, lines: Iterable[str]) -> int:
        """Run until the last line or /quit. Returns how many turns failed."""
        failed = 0
        for line in lines:
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                break
            try:
                if not line.startswith("/"):
                    self._turn(line.strip())
                elif command in self._commands:
                    self._commands[command](rest.strip())
                else:
                    self._screen.say(f"{command:.60} is no command: /help says what is\n")
            except KeyboardInterrupt:
                self._screen.whisper("\n(stopped)\n")
            except Trouble as trouble:
                failed += 1
                self._screen.say(f"{trouble}\n")
        return failed

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}, *self._turns] if self._system else self._turns

    def _turn(self, text: str) -> None:
        """One question and its answer. An answer that was stopped stays in the conversation as far as it came."""
        if not text:
            return
        asked = {"role": "user", "content": text.encode("utf-8", "replace").decode()}
        answer = ShownAnswer(self._screen)
        try:
            self._listen({**self._fields, "messages": [*self.messages, asked]}, answer)
        except Trouble:
            self._screen.say("\n" if answer.begun else "")
            raise
        finally:
            if answer.text:
                self._turns += [asked, {"role": "assistant", "content": answer.text}]
        self._screen.whisper(f"\n{answer.report()}\n")

    def _listen(self, asked: Mapping[str, Any], answer: ShownAnswer) -> None:
        try:
            with closing(self._server.stream(asked)) as events:
                for event in events:
                    answer.take(event)
        except RequestRefused as refused:
            if refused.status != 400 or "cache_report" not in refused.message or "cache_report" not in asked:
                raise
            del self._fields["cache_report"]
            self._listen({name: value for name, value in asked.items() if name != "cache_report"}, answer)

    def _reset(self, _: str) -> None:
        self._turns = []
        self._screen.say("forgotten\n")

    def _change_system(self, text: str) -> None:
        self._system = text or self._system
        self._screen.say(f"system: {self._system or '(none)'}\n")

    def _save(self, path: str) -> None:
        if not path:
            self._screen.say("/save needs a FILE\n")
            return
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"model": self._fields["model"], "messages": self.messages}, file, indent=1)
                file.write("\n")
        except OSError as error:
            self._screen.say(f"{path:.200} cannot be written: {error.strerror}\n")
        else:
            self._screen.say(f"{len(self.messages)} messages in {path:.200}\n")


class ShownAnswer:
    """One answer, shown while it arrives."""

    def __init__(self, screen: Screen) -> None:
        self.text = ""
        self._screen = screen
        self._begin = time.perf_counter()
        self._first = self._last = 0.0  # when text came
        self._usage: dict[str, Any] = {}
        self._cache: dict[str, Any] = {}

    @property
    def begun(self) -> bool:
        return self._first > 0

    def take(self, event: Mapping[str, Any]) -> None:
        self._usage = _object(event, "usage") or self._usage
        self._cache = _object(event, "cache") or self._cache
        choices = event.get("choices") or [{}]
        delta = _object(choices[0], "delta") if isinstance(choices, list) else {}
        reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        content = _text(delta, "content")
        if reasoning or content:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        if reasoning:
            self._screen.whisper(reasoning)
        if content:
            self.text += content
            self._screen.say(content)

    def report(self) -> str:
        """Such as: 42 of 51 prompt tokens cached (device 42), first token 0.12 s, 31 tokens at 45/s"""
        prompt, tokens = _count(self._usage, "prompt_tokens"), _count(self._usage, "completion_tokens")
        cached = _count(_object(self._usage, "prompt_tokens_details"), "cached_tokens")
        tiers = ", ".join(f"{tier} {_count(self._cache, tier)}" for tier in _TIERS if _count(self._cache, tier))
        parts = [f"{cached} of {prompt} prompt tokens cached" + (f" ({tiers})" if tiers else "")] if prompt else []
        if self.begun:
            parts.append(f"first token {self._first - self._begin:.2f} s")
        taken = self._last - self._first
        speed = f" at {(tokens - 1) / taken:.0f}/s" if taken > 0 and tokens > 1 else ""
        return ", ".join([*parts, f"{tokens} tokens{speed}"] if self._usage else parts)


def _object(event: Any, name: str) -> dict[str, Any]:
    found = event.get(name) if isinstance(event, dict) else None
    return found if isinstance(found, dict) else {}


def _text(event: Mapping[str, Any], name: str) -> str:
    found = event.get(name)
    return found if isinstance(found, str) else ""


def _count(event: Mapping[str, Any], name: str) -> int:
    found = event.get(name)
    return found if isinstance(found, int) else 0


# ---- the server


class Trouble(Exception):
    """An error that the user sees as it is."""


class RequestRefused(Trouble):
    """The server answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        hint = ": --api-key or OPENAI_API_KEY must have a key of this server" if status in (401, 403) else ""
        super().__init__(f"the server refuses with status {status}: {message}{hint}")
        self.status = status
        self.message = message


class Server:
    """A server that speaks OpenAI's HTTP. One request at a time, each on a connection of its own; closing it stops the
    answer."""

    def __init__(self, url: str, key: str | None, timeout: float, insecure: bool = False) -> None:
        """ValueError if `url` is no address of a server, or the key cannot be sent."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"--url must be like http://127.0.0.1:8000, got {url!r:.60}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("the API key must be printable ASCII")
        self.url = url
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        if self._tls is not None and insecure:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"Content-Type": "application/json", "User-Agent": f"sapwood/{__version__}"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        with self._opened("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read(_MOST_ANSWER_BYTES))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise Trouble(f"{self.url} lists no model: --model must name one") from None

    def stream(self, asked: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of an answer. Closing this stops the answer."""
        with self._opened("POST", "/v1/chat/completions", json.dumps(asked).encode()) as response:
            while line := response.readline(_MOST_ANSWER_BYTES):
                if not line.startswith(b"data:"):
                    continue  # a comment that keeps the connection alive, or the empty line behind an event
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                try:
                    event = json.loads(data)
                except (ValueError, RecursionError):
                    event = None
                if not isinstance(event, dict):
                    raise Trouble(f"the server says what is no event: {data!r:.60}")
                if event.get("error") is not None:
                    raise Trouble(f"the server says: {_message_of(event)}")
                yield event
            raise Trouble("the server broke off in the middle of the answer")

    @contextmanager
    def _opened(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)
        response = None
        try:
            try:
                connection.connect()
            except OSError as error:
                message = f"no server answers at {self.url} ({error}): start one with `sapwood serve`"
                raise Trouble(message) from None
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestRefused(response.status, _message_of(response.read(_MOST_ANSWER_BYTES)))
            yield response
        except TimeoutError:
            raise Trouble(f"the server says nothing for {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Trouble(f"the server broke off ({error or type(error).__name__})") from None
        finally:
            if response is not None:
                response.close()
            connection.close()


def _message_of(error: Any) -> str:
    """The message of an error in OpenAI's form, in one line."""
    if isinstance(error, bytes):
        try:
            error = json.loads(error)
        except (ValueError, RecursionError):
            error = error.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return " ".join(str(error).split())[:500]
