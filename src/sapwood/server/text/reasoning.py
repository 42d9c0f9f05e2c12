"""Reasoning in generated text: `<think> ... </think>`, split from the answer as the text comes. The parsers:

think        text behind no opening tag, of the model or of the prompt, is the answer (glm45 and glm47 too)
qwen3        it is reasoning, up to the closing tag or a tool call, unless the request turns thinking off (mimo too)
deepseek_r1  it is reasoning, up to the closing tag
"""

from __future__ import annotations

from .tools.base import half_mark

OPENING, CLOSING = "<think>", "</think>"
PARSERS = {name: name for name in ("think", "qwen3", "deepseek_r1")} | {
    "glm45": "think",
    "glm47": "think",
    "mimo": "qwen3",
}
_CALL = "<tool_call>"


def opens_reasoning(prompt: str, opening: str = OPENING) -> bool:
    """Whether the prompt, as the chat template made it, ends inside reasoning: the model goes on without a tag."""
    return prompt.rstrip().endswith(opening)


def splitter_for(parser: str, prompt: str, *, thinks: bool, calls: bool, held: bool) -> ReasoningSplitter:
    """The splitter of one text behind this prompt. `thinks`: the request does not turn thinking off; `calls`: it has
    tools; `held`: a grammar holds the text from its beginning, and only the grammar may open reasoning."""
    kind = PARSERS[parser]
    inside = opens_reasoning(prompt)
    if kind != "think" and (thinks or kind == "deepseek_r1"):
        inside = not prompt.rstrip().endswith(CLOSING)  # else the template has ended the reasoning already
    inside = inside and not held
    return ReasoningSplitter(begins_inside=inside, cut_by=_CALL if kind == "qwen3" and calls else "")


class ReasoningSplitter:
    """One text, split into reasoning and content, the same however it is cut into pieces.

    A text has at most one reasoning, at its beginning: a tag that comes later is content like any other word. A text
    without an opening tag is content, all of it; where it begins inside reasoning (`opens_reasoning`), it is reasoning
    up to the closing tag or to its end. A model may repeat the tag of the prompt. `cut_by`: a mark that ends the
    reasoning as well, and is content itself.

    Whitespace is kept as vLLM's parsers for deepseek_r1 and qwen3 keep it: what is between the tags is the reasoning
    and what follows is the content, with every space and line break. Only whitespace before an opening tag is dropped.
    """

    __slots__ = ("_begins_inside", "_closing", "_cut_by", "_half", "_opening", "_spaces", "_state")

    def __init__(
        self, *, begins_inside: bool, opening: str = OPENING, closing: str = CLOSING, cut_by: str = ""
    ) -> None:
        for field, tag in (("opening", opening), ("closing", closing)):
            if not tag or tag != tag.strip():
                raise ValueError(f"{field} must be a tag without spaces around it, got {tag!r:.60}")
        self._begins_inside = begins_inside
        self._opening, self._closing, self._cut_by = opening, closing, cut_by
        self._state = "beginning"  # then "inside", then "outside"
        self._spaces: list[str] = []  # at the beginning of the text
        self._half = ""  # the end of the text so far, which may become a tag

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
        """The text that is left once its beginning is known."""
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
        if self._cut_by and (place := reasoning.find(self._cut_by)) >= 0:
            self._state = "outside"
            return text[:place], text[place:]
        if tag:
            self._state = "outside"
            return reasoning, content
        cut = half_mark(text, self._closing)
        if self._cut_by:
            cut = min(cut, half_mark(text, self._cut_by))
        self._half = text[cut:]
        return text[:cut], ""
