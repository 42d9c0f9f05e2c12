"""What a client can make of a chat template (case S19): no template of its own, and of the model's no loops without
end."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.ext
import pytest

from sapwood.server.text import template
from sapwood.server.text.template import ChatTemplate, TemplateError

from .scripted import Scripted

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": f"number {n}", "tags": ["a", "b"][: n % 3]} for n in range(5)]
# gpt-oss has one of these: for each message, those behind it.
QUADRATIC = (
    "{% for m in messages %}{% set ns = namespace(last=true) %}{% for other in messages[loop.index:] %}"
    "{% if other.role == m.role %}{% set ns.last = false %}{% endif %}{% endfor %}{{ m.content }}{% endfor %}"
)


def rendered(text: str, messages: Any = MESSAGES, **more: Any) -> str:
    return ChatTemplate(text, {}).render(
        messages, tools=None, add_generation_prompt=True, continue_final_message=False, more=more
    )


LOOPS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.revindex0 }}{{ loop.nextitem is defined }}{{ loop.previtem }}{% endfor %}",
    "{% for m in messages if m.tags %}{{ loop.index0 }}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in nobody %}{{ m }}{% else %}none{% endfor %}{% for m in [] %}{% else %}none{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ key }}{{ value }}{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ loop.cycle('x', 'y') }}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is number %}{{ x }}{% else %}{{ loop(x) }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% for tag in m.tags %}{{ loop.changed(tag) }}{{ tag }}{% endfor %}{% endfor %}",
    "{% macro all(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ all('abc') }}{{ messages | length }}",
    QUADRATIC,
]


@pytest.mark.parametrize("text", LOOPS, ids=range(len(LOOPS)))
def test_loops_are_what_they_are_in_jinja(text):
    """Counting their turns changes nothing of them.

    Mutation: `_counted` leaves out the last value.
    """
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    want = plain.from_string(text).render(messages=MESSAGES)
    assert want and rendered(text) == want


@pytest.mark.parametrize(
    "text",
    [
        QUADRATIC,
        "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}",
        "{% macro again(x) %}{% for a in range(9) %}{{ again(x) if x > 0 else '' }}{% endfor %}{% endmacro %}"
        "{% for a in range(9) %}{% for b in range(n) %}{{ again(0) }}{% endfor %}{% endfor %}",
        "{% for a in documents %}{% for b in documents %}{% for c in documents %}{% endfor %}{% endfor %}{% endfor %}",
    ],
    ids=["quadratic", "numbers", "macro", "documents"],
)
def test_S19_loops_within_loops_have_an_end(text, monkeypatch):
    """The turns of all loops of a template together, whatever they go through; the next conversation has all of them
    again.

    Mutation: `_generate` wraps the first loop alone; `render` does not begin to count anew.
    """
    monkeypatch.setattr(template, "MAX_TEMPLATE_TURNS", 10_000)
    many = [{"role": "user", "content": "x"}] * 1000
    for _ in range(2):
        with pytest.raises(TemplateError, match="goes through its loops more than 10000 times"):
            rendered(text, many, n=5000, documents=many)
        assert rendered(text, MESSAGES, n=5, documents=MESSAGES) is not None


def test_S19_a_conversation_that_is_too_much_for_its_template_is_refused(monkeypatch):
    """A 400 with the reason; a template in the request is one too, and so are the names of what templates are given;
    and a good request is answered.

    Mutation: `conversation` lets other errors than TemplateError through; `CHAT` has no chat_template.
    """
    monkeypatch.setattr(template, "MAX_TEMPLATE_TURNS", 100_000)
    app = Scripted("Hello you", template=QUADRATIC + "{% if add_generation_prompt %}!{% endif %}")
    much = [{"role": "user", "content": "x"}] * 4000
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for body, says in (
        ({"messages": much}, "goes through its loops more than 100000 times"),
        ({"messages": MESSAGES, "chat_template": endless}, "chat_template is not supported here"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": much}},
            "kwargs may not have messages",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": {"namespace": "x"}}, "does not take these messages"),
    ):
        refused = app.post(CHAT, body)
        assert refused.status == 400 and says in refused.error["message"]
        good = app.post(CHAT, {"messages": MESSAGES})
        assert good.status == 200 and good.json["choices"][0]["message"]["content"] == "Hello you"
    for name in ("range", "raise_exception", "sapwood.counted", "loop", "m", "self", "cycler"):
        assert app.post(CHAT, {"messages": MESSAGES, "chat_template_kwargs": {name: "x"}}).status == 200
