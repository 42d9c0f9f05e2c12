"""A server whose engine says what a test tells it to: everything of the API process is real, and nothing else is there.

app = Scripted("Hello you")
app.post("/v1/responses", {"input": "hi"}).json["output"]
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import uvicorn

from sapwood.engine.cache_report import CacheReport
from sapwood.engine.loading.default_model import default_model
from sapwood.server.app import App
from sapwood.server.config import ServerConfig
from sapwood.server.frontend import Serving
from sapwood.server.process.engine_client import EngineClient
from sapwood.server.process.messages import Drop, End, EngineQuery, Ready, SampleBegun, Submit
from sapwood.server.process.messages import QueryAnswer as Said
from sapwood.server.process.messages import StepOutput as Step
from sapwood.server.text.template import ChatTemplate
from sapwood.server.text.tokens import AsyncTokenizer

from .kit import Answer

NAME = "scripted"
PAGE = 16
TEMPLATE = """\
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if reasoning_effort %}{{ '/effort ' + reasoning_effort }}{% endif %}
{%- if enable_thinking is defined %}{{ '<think>' if enable_thinking else '/no_think' }}{% endif %}
{%- endif %}"""


class Script(NamedTuple):
    """What the engine says. `fails`: the step after the text breaks."""

    text: str
    cached: int = 0
    fails: bool = False


THINKS_AND_CALLS = """\
<think>let me see</think>I call
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>"""


def for_clients(prompt: str) -> Script:
    """What the scripts in clients/ expect, by the user's last words."""
    last = prompt.rpartition("<|im_start|>user")[2].partition("<|im_end|>")[0].strip()
    said = {"think and call": Script(THINKS_AND_CALLS), "break": Script("Hello you", fails=True)}
    return said.get(last, Script("Hello you, it is a fine day"))


@cache
def tokens() -> AsyncTokenizer:
    return AsyncTokenizer(str(default_model() / "tokenizer.json"))


def scored(token: int, top: int) -> dict[int, tuple[float, int]]:
    """The token itself is the likeliest."""
    return {token + at: (-0.25 - at, at + 1) for at in range(max(1, top))}


class ScriptedLink(EngineClient):
    """`say(prompt)` is asked for every prompt. A token a step, and `likely` ones that are made up."""

    def __init__(self, say: Callable[[str], Script]) -> None:
        super().__init__(lambda: None, lambda why: None)  # type: ignore[arg-type,return-value]
        self.ready = Ready("", tokens().tokenizer.get_vocab_size(), 2000, [2], PAGE, {}, {"max_loras": 0})
        self.up = True
        self.say = say
        self.prompts: list[str] = []
        self.submitted: list[Submit] = []
        self.dropped: list[Drop] = []
        self.answers: dict[str, Any] = {}  # to questions
        self.held: list[tuple[Submit, Script]] | None = None  # what is submitted waits here, if it is to

    def _send(self, message: Any) -> None:
        if isinstance(message, Drop):
            self.dropped.append(message)
        if isinstance(message, EngineQuery) and message.name in self.answers:
            self._other(Said(message.number, self.answers[message.name], ""))
        if isinstance(message, Submit):
            prompt = tokens().decode(np.frombuffer(message.tokens, np.int32).tolist())
            self.prompts.append(prompt)
            self.submitted.append(message)
            if self.held is not None:
                self.held.append((message, self.say(prompt)))
            else:
                self._begin(message, self.say(prompt))

    def go(self) -> None:
        """What was held goes on; what comes after it waits no more."""
        held, self.held = self.held or [], None
        for submit, script in held:
            self._begin(submit, script)

    def _begin(self, submit: Submit, script: Script) -> None:
        said = tokens().tokenizer.encode(script.text, add_special_tokens=False).ids
        room = 2000 - len(submit.tokens) // 4 if submit.params.max_tokens is None else submit.params.max_tokens
        reason, error = ("error", "a step broke") if script.fails else ("stop", "")
        if len(said) + 1 > room:
            said, reason, error = said[:room], "length", ""
        elif not script.fails:
            said.append(2)
        for number in range(submit.number, submit.number + submit.params.n):
            self._step(submit, said, End(number, reason, None, 0, error), script.cached)

    def _step(self, submit: Submit, said: list[int], end: End, cached: int) -> None:
        number = end.number
        token, *rest = said
        begun = []
        lane = self.lanes.get(number)
        if lane is not None and lane.begun is None:
            begun = [SampleBegun(number, 0.0, CacheReport(cached, reason="hit" if cached else "cold", position=cached))]
        likely, prompts = {}, {}
        top, scores = submit.params.logprobs, submit.params.prompt_logprobs
        if top is not None:
            likely = {number: scored(token, top)}
        if begun and scores is not None:
            ids = np.frombuffer(submit.tokens, np.int32).tolist()
            prompts = {number: [None, *(scored(each, scores) for each in ids[1:])]}
        one = np.array([number], np.int64).tobytes(), np.array([token], np.int32).tobytes()
        self._dispatch(Step(1, 0.0, *one, begun, [] if rest else [end], likely, prompts))
        self.lag = 0.0
        self._wake_readers()
        if rest:
            asyncio.get_running_loop().call_soon(self._step, submit, rest, end, cached)


class Scripted:
    """The app over such an engine. `says`: one answer for all prompts, one for each in turn, or who decides."""

    def __init__(
        self,
        *says: str | Script | Callable[[str], Script],
        parser: str | None = "hermes",
        template: str = TEMPLATE,
        **config: Any,
    ) -> None:
        turns = list(says)

        def say(prompt: str) -> Script:
            said = turns.pop(0) if len(turns) > 1 else turns[0]
            return Script(said) if isinstance(said, str) else said if isinstance(said, Script) else said(prompt)

        self.link = ScriptedLink(say)
        self.serving = Serving(ServerConfig(served_model_name=(NAME,), **config), self.link)
        self.serving.prompts.tokens = tokens()
        self.serving.prompts.template = ChatTemplate(template, {})
        self.serving.tool_parser = parser
        self.serving.ready = True

        async def nothing() -> bytes:
            return b""

        self.app = App(self.serving, nothing)

    @property
    def prompt(self) -> str:
        """The last one."""
        return self.link.prompts[-1]

    @property
    def params(self) -> Any:
        return self.link.submitted[-1].params

    def post(self, path: str, body: Any, key: str | None = None) -> Answer:
        return self.request("POST", path, body, key)

    def request(
        self, method: str, path: str, body: Any = None, key: str | None = None, headers: Sequence[Any] = ()
    ) -> Answer:
        """`headers`: pairs of bytes, in small letters."""
        return asyncio.run(asyncio.wait_for(self.ask(method, path, body, key, headers), 30))

    def events(self, path: str, body: Any, key: str | None = None) -> list[tuple[str, Any]]:
        """The name and the data of each event."""
        answer = self.post(path, {"stream": True, **body}, key)
        assert answer.status == 200, answer.body
        found = []
        for chunk in answer.body.decode().split("\n\n"):
            name, _, data = chunk.partition("\n")
            if name.startswith("event: "):
                assert data.startswith("data: ") and "\n" not in data
                found.append((name[7:], json.loads(data[6:])))
        return found

    def chunks(self, path: str, body: Any) -> list[Any]:
        """What each event of a stream of chunks says, but the last, which says that it is over."""
        answer = self.post(path, {"stream": True, **body})
        assert answer.status == 200, answer.body
        *events, last, rest = answer.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def ask(
        self, method: str, path: str, body: Any, key: str | None = None, headers: Sequence[Any] = ()
    ) -> Answer:
        """The same inside a loop, where several run."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = [{"type": "http.request", "body": raw, "more_body": False}]
        status, told, parts = 0, {}, []

        async def receive() -> Any:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        async def send(message: Any) -> None:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                parts.append(message["body"])

        where, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": where,
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*headers, *([] if key is None else [(b"authorization", f"Bearer {key}".encode())])],
        }
        await self.app(scope, receive, send)
        return Answer(status, told, b"".join(parts))

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its address, for clients of their own."""
        server = uvicorn.Server(uvicorn.Config(self.app, port=0, lifespan="off", log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
