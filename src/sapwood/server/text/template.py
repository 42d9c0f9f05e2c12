"""Chat templates: messages to the text of a prompt. They come with a model and run in jinja2's sandbox, as transformers
runs them: a template can reach nothing of Python and change nothing. Their loops go over what clients send, often
within each other: the turns of all loops together have a bound (`MAX_TEMPLATE_TURNS`)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from sapwood.engine.loading.model_files import ModelError, read_json

from ..limits import MAX_TEMPLATE_TURNS

_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # of a request


class TemplateError(ValueError):
    """The template does not take these messages."""


class ChatTemplate:
    """`text` is the source of the template; `tokens` are the special tokens that it may name (bos_token, ...);
    `variables` are the names that it reads."""

    def __init__(self, text: str, tokens: Mapping[str, Any]) -> None:
        self.text = text
        self._tokens = dict(tokens)
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.filters[_COUNTED] = _counted
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(text)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is no template: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        more: Mapping[str, Any],
    ) -> str:
        """The prompt of a conversation. `continue_final_message`: the prompt ends where the last message does. `more`:
        further variables."""
        for name in _FIELDS:
            if name in more:
                raise TemplateError(f"chat_template_kwargs may not have {name}, which is a field of the request")
        given = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        _turns.set([MAX_TEMPLATE_TURNS])
        try:
            text = self._template.render({**self._tokens, **more, **given})
        except TemplateError:
            raise
        except Exception as error:  # a template may do anything with a client's messages
            raise TemplateError(f"the chat template does not take these messages: {error!s:.300}") from None
        if continue_final_message:
            return _up_to_the_last(text, messages)
        return text


def _up_to_the_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    last = messages[-1].get("content")
    if not isinstance(last, str) or not last.strip():
        raise TemplateError("continue_final_message needs a last message with text")
    at = text.rfind(last.strip())
    if at < 0:
        raise TemplateError("continue_final_message: the chat template does not show the last message as it is")
    end = text.find(last, at) + len(last) if text.find(last, at) >= 0 else at + len(last.strip())
    return text[:end]


def given_template(given: str, tokens: Mapping[str, Any]) -> ChatTemplate:
    """The template that `--chat-template` names: a file, or the text itself."""
    if "{" in given:
        return ChatTemplate(given, tokens)
    path = Path(given).expanduser()
    if not path.is_file():
        raise ModelError(f"chat_template: {given:.200} is neither a file nor a template")
    try:
        return ChatTemplate(path.read_text(), tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat_template: {given:.200} cannot be read: {error}") from None


def find_template(folder: str, given: str | None) -> ChatTemplate | None:
    """The template of a model, or the file or text that `--chat-template` names."""
    where = Path(folder)
    config = read_json(where / "tokenizer_config.json") if (where / "tokenizer_config.json").is_file() else {}
    tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    if given is not None:
        return given_template(given, tokens)
    if (where / "chat_template.jinja").is_file():
        return ChatTemplate((where / "chat_template.jinja").read_text(), tokens)
    if (where / "chat_template.json").is_file():
        config = {**config, **read_json(where / "chat_template.json")}
    text = config.get("chat_template")
    if isinstance(text, list):  # several templates with names
        named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
        text = named.get("default") or next(iter(named.values()), None)
    return ChatTemplate(text, tokens) if isinstance(text, str) else None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> str:
    raise TemplateError(str(message)[:1000])


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


_COUNTED = "sapwood.counted"  # a filter whose name no template could write
_turns: ContextVar[list[int]] = ContextVar("turns")  # that the template being rendered may still take


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    left = _turns.get()
    for value in values:
        left[0] -= 1
        if left[0] < 0:
            raise TemplateError(f"the chat template goes through its loops more than {MAX_TEMPLATE_TURNS} times")
        yield value


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every loop counts its turns."""

    def _generate(self, source: jinja2.nodes.Template, *more: Any, **named: Any) -> str:
        for loop in list(source.find_all(jinja2.nodes.For)):
            loop.iter = jinja2.nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, *more, **named)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's messages for training. Here it changes
    nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
