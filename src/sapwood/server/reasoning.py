"""Reasoning in generated text: `<think> ... </think>`, told apart from the answer as the text comes."""

from __future__ import annotations

from .marks import half_mark

OPENING, CLOSING = "<think>", "</think>"


def opens_reasoning(prompt: str, opening: str = OPENING) -> bool:
    """Whether the prompt, as the chat template made it, ends inside: the model goes on without a tag of its own."""
    return prompt.rstrip().endswith(opening)


class ReasoningSplitter:
    """One text, split into reasoning and content, the same however it is cut into pieces.

    A text has at most one reasoning, at its beginning: a tag that comes later is content like any other word. Whether
    the text begins inside, as `opens_reasoning` tells, says what a text without an opening tag is: then reasoning, up
    to the closing tag or to its end; else content, all of it. A model that repeats the tag of the prompt is forgiven.

    Whitespace is kept as vLLM's parsers for deepseek_r1 and qwen3 keep it: what is between the tags is the reasoning
    and what follows is the content, with every space and line break. Only whitespace before an opening tag is dropped.
    """

    __slots__ = ("_begins_inside", "_closing", "_half", "_opening", "_spaces", "_state")

    def __init__(self, *, begins_inside: bool, opening: str = OPENING, closing: str = CLOSING) -> None:
        for field, tag in (("opening", opening), ("closing", closing)):
            if not tag or tag != tag.strip():
                raise ValueError(f"{field} must be a tag without spaces around it, got {tag!r:.60}")
        self._begins_inside = begins_inside
        self._opening, self._closing = opening, closing
        self._state = "beginning"  # then "inside", then "outside"
        self._spaces: list[str] = []  # of the beginning
        self._half = ""  # what may become a tag

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that are final with one more piece of text."""
        text, self._half = self._half + text, ""
        if self._state == "beginning":
            text = self._begin(text)
        if self._state == "inside":
            return self._inside(text)
        return "", text

    def finish(self) -> tuple[str, str]:
        """The rest of both."""
        rest = "".join(self._spaces) + self._half
        self._spaces, self._half = [], ""
        inside = self._begins_inside if self._state == "beginning" else self._state == "inside"
        return (rest, "") if inside else ("", rest)

    def _begin(self, text: str) -> str:
        """What of the text is left once it is known how it begins."""
        body = text.lstrip()
        self._spaces.append(text[: len(text) - len(body)])
        if body.startswith(self._opening):
            self._state, body = "inside", body[len(self._opening) :]
        elif self._opening.startswith(body):
            self._half = body
            return ""
        else:
            self._state = "inside" if self._begins_inside else "outside"
            body = "".join(self._spaces) + body
        self._spaces = []
        return body

    def _inside(self, text: str) -> tuple[str, str]:
        reasoning, tag, content = text.partition(self._closing)
        if tag:
            self._state = "outside"
            return reasoning, content
        cut = half_mark(text, self._closing)
        self._half = text[cut:]
        return text[:cut], ""
