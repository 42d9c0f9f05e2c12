"""From what a client sends to the token ids of a prompt.

text, token ids --> `PromptBuilder.given` ------------------------------------------------> Prompt
messages --> `message_texts` (content as text) --> chat template --> tokenizer ----------> Prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import ApiError, bad, shown, unsupported
from .generation import Prompt
from .limits import MAX_CALLS, MAX_PARTS, MAX_PROMPT_CONTEXTS, MAX_ROLE_CHARACTERS, MAX_TOKEN_CHARACTERS
from .process.engine_client import EngineClient
from .text.answer_parts import with_tools_in_system_prompt
from .text.template import ChatTemplate, TemplateError
from .text.tokens import AsyncTokenizer

_INLINE_BYTES, _INLINE_MESSAGES = 256 << 10, 32  # of a conversation that is rendered without a thread
_SHOWN_TOKENS = 12  # on each side of a place in a prompt


class PromptBuilder:
    """How prompts of the served model are made. `tokens` and `template` are set when the model's files are read."""

    def __init__(self, link: EngineClient) -> None:
        self.tokens: AsyncTokenizer | None = None
        self.template: ChatTemplate | None = None
        self._link = link

    @property
    def limit(self) -> int:
        """The tokens that a prompt and its answer may have together."""
        assert self._link.ready is not None
        return self._link.ready.max_model_len

    def tokenizer(self) -> AsyncTokenizer:
        if self.tokens is None:
            raise ApiError(400, "this server has no tokenizer: send token ids to /v1/completions", "no_tokenizer")
        return self.tokens

    async def given(self, prompt: str | list[int], add_special_tokens: bool = True) -> Prompt:
        """A prompt that is a text or token ids already."""
        if isinstance(prompt, str):
            ids = await self._encoded(prompt, add_special_tokens)
            return Prompt(ids, prompt)
        if len(prompt) > MAX_PROMPT_CONTEXTS * self.limit:
            raise self.too_long(len(prompt))
        return Prompt(self.known_tokens("prompt", prompt))

    def known_tokens(self, field: str, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Token ids, if the model has all of them."""
        assert self._link.ready is not None
        most = self._link.ready.vocabulary - 1
        try:
            found = np.array(ids, np.int64)
        except OverflowError:
            found = np.array([-1])
        if len(found) and not 0 <= found.min() <= found.max() <= most:
            raise bad(field, f"{field} must be token ids from 0 to {most} for this model")
        return found.astype(np.int32)

    async def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """The prompt that the chat template makes of messages. `variables`: further ones for the template."""
        template, tokens = self.template, self.tokenizer()
        if template is None:
            raise ApiError(
                400,
                "this model has no chat template: give one with --chat-template, or use /v1/completions",
                "no_template",
            )
        continues = bool(continue_final_message)
        if continues and add_generation_prompt:
            raise bad("continue_final_message", "continue_final_message and add_generation_prompt cannot both be true")

        def render() -> str:
            texts = message_texts(messages)
            if "developer" not in template.text:  # many templates drop messages of a role that they do not know
                texts = [{**each, "role": "system"} if each["role"] == "developer" else each for each in texts]
            return template.render(
                with_tools_in_system_prompt(texts, tools) if tools and "tools" not in template.text else texts,
                tools=tools,
                add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=continues,
                more=variables or {},
            )

        size = len(msgspec.json.encode((messages, tools, variables)))
        if size > 4 * MAX_TOKEN_CHARACTERS * self.limit:
            raise self.too_long(None)
        short = size <= _INLINE_BYTES and len(messages) <= _INLINE_MESSAGES
        try:
            text = render() if short else await tokens.run(render)
        except TemplateError as error:
            raise bad("messages", str(error)) from None
        return Prompt(await self._encoded(text, add_special_tokens), text)

    def template_reads(self, variable: str) -> bool:
        return self.template is not None and variable in self.template.variables

    def with_verbosity(self, variables: dict[str, Any], field: str, verbosity: str | None) -> dict[str, Any]:
        """Variables of the chat template, with the verbosity that a field of the request asks for."""
        if verbosity is not None and self.template_reads("verbosity"):
            variables.setdefault("verbosity", verbosity)
        elif verbosity not in (None, "medium"):
            why = f'the model\'s chat template knows nothing of it but "medium", got {shown(verbosity)}'
            raise unsupported(field, why)
        return variables

    async def _encoded(self, text: str, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        tokens = self.tokenizer()
        if len(text) > MAX_TOKEN_CHARACTERS * self.limit:
            raise self.too_long(None)
        if len(text) > 4 * MAX_PROMPT_CONTEXTS * self.limit and await tokens.surely_more(
            text, MAX_PROMPT_CONTEXTS * self.limit
        ):
            raise self.too_long(None)
        try:
            ids = await tokens.encode(text, add_special_tokens)
        except UnicodeEncodeError:
            raise bad("prompt", "the text holds half of a surrogate pair, which is no character") from None
        if not len(ids):
            raise bad("prompt", "the prompt is empty")
        return ids

    def too_long(self, tokens: int | None, new: int = 0) -> ApiError:
        """`tokens`: of the prompt, if they were counted; `new`: those that the request wants generated."""
        has = "more" if tokens is None else f"{tokens} tokens"
        more = f" and {new} more are asked for" if new else ""
        return ApiError(
            400,
            f"this model's maximum context length is {self.limit} tokens with the answer: the prompt has {has}{more}",
            "context_length_exceeded",
            "max_tokens" if new else "prompt",
        )

    def truncated(self, prompts: list[Prompt], most: int | None, side: str | None) -> list[Prompt]:
        """By `truncate_prompt_tokens` and `truncation_side`: the last `most` tokens of each prompt, or the first."""
        if most is None:
            return prompts
        if most == -1:
            most = self.limit - 1
        if most < 1:
            raise bad("truncate_prompt_tokens", f"truncate_prompt_tokens must be 1 or more, got {shown(most)}")
        if side == "right":
            return [prompt if len(prompt.ids) <= most else Prompt(prompt.ids[:most]) for prompt in prompts]
        return [
            prompt if len(prompt.ids) <= most else Prompt(prompt.ids[-most:], prompt.text, cut=True)
            for prompt in prompts
        ]

    def text_around(self, prompt: Prompt, position: int) -> dict[str, str]:
        """The text of a prompt before and behind a token."""
        if self.tokens is None:
            return {}
        ids = prompt.ids
        return {
            "before": self.tokens.decode(ids[max(0, position - _SHOWN_TOKENS) : position].tolist()),
            "after": self.tokens.decode(ids[position : position + _SHOWN_TOKENS].tolist()),
        }


# ---- messages, as chat templates want them


class TextParts(NamedTuple):
    """How an API writes a text as a list of parts. `fields`: the type of a part -> the field that holds its text."""

    fields: Mapping[str, str]
    noun: str = "parts"
    subject: str = "content"  # of the error about a part of another type
    plain_strings: bool = False  # a part may be a string


_CHAT_PARTS = TextParts(
    {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}, plain_strings=True
)


def text_of(content: Any, path: str, form: TextParts) -> str:
    """A text, or the texts of a list of parts with line breaks between them. A part that is no text is a 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise bad(path, f"{path} must be text or a list of at most {MAX_PARTS} {form.noun}, got {shown(content)}")
    texts = []
    for at, part in enumerate(content):
        if form.plain_strings and isinstance(part, str):
            texts.append(part)
            continue
        kind = kind_of(part)
        field = form.fields.get(kind) if isinstance(kind, str) else None
        if field is None:
            raise unsupported(f"{path}[{at}].type", f"{form.subject} must be text, got {shown(kind)}")
        texts.append(string_of(part, field, f"{path}[{at}]"))
    return "\n".join(texts)


def kind_of(part: Any) -> Any:
    """The type of a part, a block or an item, whatever a client has put there."""
    return part.get("type") if isinstance(part, Mapping) else None


def string_of(given: Mapping[str, Any], field: str, path: str) -> str:
    """A field that must be a text."""
    value = given.get(field)
    if not isinstance(value, str):
        raise bad(f"{path}.{field}", f"{path}.{field} must be text, got {shown(value)}")
    return value


def message_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages: content as text, arguments of calls as objects. The chat template alone knows which roles
    there are."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARACTERS:
        raise bad(
            f"{path}.role", f"{path}.role must be text of 1 to {MAX_ROLE_CHARACTERS} characters, got {shown(role)}"
        )
    if content is None and role != "assistant":
        raise bad(f"{path}.content", f"{path}.content is missing")
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = "" if content is None else text_of(content, f"{path}.content", _CHAT_PARTS)
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    elif "tool_calls" in made:
        del made["tool_calls"]
    return made


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Clients send arguments as JSON in a string; templates write them down as objects."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise bad(path, f"{path} must be a list of at most {MAX_CALLS} calls")
    made = []
    for at, call in enumerate(calls):
        where = f"{path}[{at}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad(where, f"{where} must have a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except (msgspec.DecodeError, RecursionError):
                raise bad(f"{where}.arguments", f"{where}.arguments must be JSON in a string") from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
