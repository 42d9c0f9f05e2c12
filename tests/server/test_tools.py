"""Tool calls: what a request may say of them, and what a model writes, whole or broken, in pieces of any size."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from sapwood.server.limits import MAX_CALL_JSON_DEPTH, MAX_CALLS, MAX_TOOLS
from sapwood.server.text.tools import (
    CallArguments,
    CallBegins,
    Content,
    Delta,
    ForcedParser,
    ToolParser,
    call_id,
    check_tools,
    forced_schema,
    guess_parser,
    parser_for,
)
from sapwood.server.text.tools.json_text import JsonText


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON text, unless the call broke or was cut off


def gather(deltas: Iterable[Delta]) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole text."""
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content.append(delta.text)
        elif isinstance(delta, CallBegins):
            names.append(delta.name)
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    return "".join(content), [ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]


HARD = {"q": 'a "b" \\ } ] {', "deep": [{"é": [1.5e-3, None, {"x": {}}]}, "</tool_call>", "[TOOL_CALLS]"], "": "\n;"}
HARD_TEXT = json.dumps(HARD)  # with unicode escapes
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
CALLED_F, CALLED_G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def told(make: ToolParser | str, pieces: Iterable[str], **given: Any) -> list[Delta]:
    """All deltas of a text."""
    parser = parser_for(make)(**given) if isinstance(make, str) else make
    return [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()]


def read(make: ToolParser | str, text: str, **given: Any) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a whole text."""
    return gather(told(make, [text], **given))


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas, those that go on joined."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.index == delta.index:
            out[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            out.append(delta)
    return out


# What models write

WELL = {
    "one": ("hermes", hermes(F), "", [CALLED_F]),
    "alias": ("qwen", hermes(F), "", [CALLED_F]),
    "several, text around them": (
        *("hermes", f" Let me see.\n\n{hermes(F)}\n and\n{hermes(G)} \n Done.\n"),
        *(" Let me see.andDone.\n", [CALLED_F, CALLED_G]),
    ),
    "spaces between": ("hermes", f"\n{hermes(F)}\n\n{hermes(G)}\n", "", [CALLED_F, CALLED_G]),
    "hard arguments": ("hermes", hermes(f'{{"name": "f", "arguments": {HARD_TEXT}}}'), "", [ToolCall("f", HARD_TEXT)]),
    "escapes in the name": (
        "hermes",
        hermes('{"n\\u0061me": "f\\u00e9", "arguments": {}}'),
        "",
        [ToolCall("fé", "{}")],
    ),
    "other order, other keys": (
        *("hermes", hermes('{"id": {"name": 7}, "arguments": {"a": 1}, "x": -0.5e+1, "name": "f", "y": true}')),
        *("", [CALLED_F]),
    ),
    "no arguments": ("hermes", hermes('{"name": "g"}'), "", [CALLED_G]),
    "an array": ("hermes", hermes(f"[{F},\n{G}]"), "", [CALLED_F, CALLED_G]),
    "no spaces at all": (
        *("hermes", '<tool_call>{"name":"f","arguments":{"a":[]}}</tool_call>', "", [ToolCall("f", '{"a":[]}')]),
    ),
    "llama": ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [CALLED_F]),
    "llama with tag": ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [CALLED_F]),
    "llama, tag later": ("llama3_json", f"I call\n<|python_tag|> {F}", "I call", [CALLED_F]),
    "llama, several": ("llama3_json", f"\n{F}; {G} ;\n{F}\n{G};\n", "", [CALLED_F, CALLED_G] * 2),
    "llama, text after": ("llama3_json", f"{F}\n;-) Bye.", ";-) Bye.", [CALLED_F]),
    "mistral": ("mistral", f"Let me see.[TOOL_CALLS] [{F}, {G}]", "Let me see.", [CALLED_F, CALLED_G]),
    "mistral, new": ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [CALLED_F, CALLED_G]),
    "mistral, new with marks": (
        *("mistral", f"[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{HARD_TEXT}\n[TOOL_CALLS]g[ARGS]{{}} Done."),
        *("Done.", [ToolCall("f", HARD_TEXT), CALLED_G]),
    ),
    "mistral, the mark twice": ("mistral", "[TOOL_CALLS][TOOL_CALLS]g{}", "[TOOL_CALLS]", [CALLED_G]),
    "mistral, one object": ("mistral", f"[TOOL_CALLS]{F}", "", [CALLED_F]),
}


@pytest.mark.parametrize("name", WELL)
def test_calls_are_read(name):
    """Well-formed calls of each format, alone and in company, with all that JSON allows in them. Arguments stay the
    text that the model wrote.

    Mutation: `CallObject._begin` does not clear `held`; `JsonText` takes an escaped quote for the end of a string;
    `BaseParser._content` does not look at `_after_call`.
    """
    format, text, content, calls = WELL[name]
    assert read(format, text) == (content, calls)
    assert gather(told(format, text)) == (content, calls)
    assert all(json.loads(call.arguments) is not None for call in calls)


NONE = [
    ("hermes", "No call. <b>{}</b> </tool_call> \n"),
    ("hermes", "Write <tool_call> and </tool_call> around it."),
    ("hermes", hermes('{"name": "f", "arguments": [1]}')),
    ("hermes", hermes('{"name": "f", "arguments": "{}"}')),
    ("hermes", hermes('{"name": 5, "arguments": {}}')),
    ("hermes", hermes('{"name": "", "arguments": {}}')),
    ("hermes", hermes('{"name": "\\ud800", "arguments": {}}')),
    ("hermes", hermes('{"arguments": {}}')),
    ("hermes", hermes('{"name": "f", "name": "g", "arguments": {}}')),
    ("hermes", hermes("{'name': 'f', 'arguments': {}}")),
    ("hermes", hermes('"f"') + hermes("[]") + hermes("[1]") + hermes("")),
    ("hermes", hermes('{"name": "' + "f" * 300 + '", "arguments": {}}')),
    ("hermes", " \n<tool_call> <tool_call>\n{ x"),
    ("llama3_json", '{"name": "Bob", "age": 7}'),
    ("llama3_json", f"The call is {F}"),
    ("llama3_json", '<|python_tag|>print("hello")'),
    ("llama3_json", f"[{F}]"),
    ("llama3_json", " \n Hello \n"),
    ("mistral", "Hello [TOOL_CALLS] f(x), [1]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f [x]"),
    ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}"),
]


@pytest.mark.parametrize(("format", "text"), NONE)
def test_what_is_no_call_is_content_unchanged(format, text):
    """Nothing that a model writes is lost: what looks like a call and is none is told as it is, spaces included.

    Mutation: `BaseParser._fail` drops `_held`; `CallObject._take_key` does not look at `_seen`; `needs_arguments` is
    False for `Llama3JsonParser`.
    """
    assert read(format, text) == (text, [])
    assert gather(told(format, text)) == (text, [])


def test_a_call_after_a_broken_one():
    """What broke a call may begin the next one.

    Mutation: `BaseParser._fail` sets `_state` to `_plain`.
    """
    broken = '<tool_call>{"name":'
    assert read("hermes", broken + hermes(F)) == (broken, [CALLED_F])
    assert read("mistral", "[TOOL_CALLS]f [TOOL_CALLS]g{}") == ("[TOOL_CALLS]f", [CALLED_G])


def test_a_call_that_breaks_after_it_has_begun():
    """It cannot be taken back: its arguments stay what they were, no valid JSON; the rest is content, without the tag
    that would have closed it.

    Mutation: `BaseParser._fail` does not set `_unclosed`; `JsonText._structure` takes what it does not know.
    """
    for text, content, arguments in [
        (hermes('{"name": "f", "arguments": {"a": x}}'), "x}}", '{"a": '),
        (hermes('{"name": "f", "arguments": {"a": 1'), "", '{"a": 1\n'),
        (hermes('{"name": "f", "arguments": {"a": "1\n2"}}'), '\n2"}}', '{"a": "1'),
        (hermes('{"name": "f", "arguments": {"a": 01}}'), "1}}", '{"a": 0'),
        (hermes('{"name": "f", "arguments": {"a": NaN}}'), "NaN}}", '{"a": '),
    ]:
        assert read("hermes", text) == (content, [ToolCall("f", arguments)])
        with pytest.raises(ValueError):
            json.loads(arguments)


def test_a_call_whose_end_is_wrong_stands():
    """Once the arguments are complete, a missing or surplus brace costs nothing but a character of content.

    Mutation: `CallObject._take_value` does not set `whole`; `BaseParser._calls_over` does not set `_unclosed`.
    """
    for end, content in [
        ("", ""),
        ("}}", "}"),
        (', "x": ?}', ', "x": ?}'),
        (', "arguments": {}}', ', "arguments": {}}'),
    ]:
        text = hermes(F[:-1] + end) + " Done."
        assert read("hermes", text) == (content + "Done.", [CALLED_F])


def test_text_that_is_cut_off():
    """Where max_tokens ends the text in a call: content before the arguments have begun; then arguments as far as they
    came; nothing of what comes behind them.

    Mutation: `BaseParser.finish` ends without what the call has `held`, or says the beginning of the closing tag.
    """
    text = "Hi. " + hermes(F)
    begun, whole = text.index('{"a"'), text.index('{"a"') + len('{"a": 1}')
    for end in range(len(text)):
        content, calls = read("hermes", text[:end])
        if end <= begun:
            assert (content, calls) == (text[:end], [])
        else:
            assert (content, calls) == ("Hi.", [ToolCall("f", text[begun : min(end, whole)])])
    assert read("mistral", f'[TOOL_CALLS][{F}, {{"name') == (', {"name', [CALLED_F])
    assert read("mistral", f"[TOOL_CALLS][{F}, ") == ("", [CALLED_F])
    assert read("mistral", "[TOOL_CALLS]g{}[TOOL_") == ("[TOOL_", [CALLED_G])


def test_arguments_come_as_soon_as_they_are_certain():
    """As OpenAI streams them: the name first, then each piece of the arguments when it comes.

    Mutation: `CallObject._begin_value` does not begin the call.
    """
    parser = parser_for("hermes")()
    pieces = [
        "I",
        " call\n<tool",
        '_call>{"name": "f"',
        ', "arguments"',
        ": {",
        '"a": "x',
        'y\\"',
        '"',
        "}}",
        "</tool_call>",
    ]
    assert [parser.push(piece) for piece in pieces] == [
        [Content("I")],
        [Content(" call")],
        [],
        [],
        [CallBegins(0, "f"), CallArguments(0, "{")],
        [CallArguments(0, '"a": "x')],
        [CallArguments(0, 'y\\"')],
        [CallArguments(0, '"')],
        [CallArguments(0, "}")],
        [],
    ]
    assert parser.finish() == []


def test_names_of_the_request():
    """Names are passed on as they are; with `names`, a call to another function is content.

    Mutation: `CallObject._take_name` or `MistralParser._naming` does not look at `_names`.
    """
    names = frozenset({"f"})
    for format, text in [("hermes", hermes(G)), ("llama3_json", G), ("mistral", "[TOOL_CALLS]g{}")]:
        assert read(format, text) == ("", [CALLED_G])
        assert read(format, text, names=names) == (text, [])
        assert read(format, text, names=names | {"g"}) == ("", [CALLED_G])


@pytest.mark.parametrize("format", ["hermes", "hermes array", "llama3_json", "mistral", "mistral new"])
def test_calls_have_a_bound(format):
    """A model that cannot stop calling: after the bound the rest is content.

    Mutation: `BaseParser._outside`, `BaseParser._in_array` or `Llama3JsonParser._behind_call` does not look at
    `MAX_CALLS`.
    """
    first, one, between, last = {
        "hermes": ("", hermes(G), "", ""),
        "hermes array": ("<tool_call>[", G, ",", "]</tool_call>"),
        "llama3_json": ("", G, ";", ""),
        "mistral": ("[TOOL_CALLS][", G, ",", "]"),
        "mistral new": ("", "[TOOL_CALLS]g{}", "", ""),
    }[format]
    text = first + between.join([one] * (MAX_CALLS + 2)) + last
    content, calls = read(format.split()[0], text)
    assert calls == [CALLED_G] * MAX_CALLS
    assert content == between.join(["", one, one][not between :]) + last


# Any text, in any pieces

PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        F,
        G,
        "f",
        "{}",
    ),
    *(
        '{"name": "f", "arguments": {"a": ',
        '{"arguments": {"x": 1}, "name": "g"}',
        '{"name":',
        '"f"',
        '"arguments"',
        ":",
    ),
    *("{", "}", "[", "]", ",", ";", '"', "\\", " ", "\n", "-0.5e", "true", "hello", "é", "\u2003", "<", HARD_TEXT),
]
PARSERS = {
    **{name: parser_for(name) for name in ("hermes", "llama3_json", "mistral")},
    "names": lambda: parser_for("hermes")(names=frozenset({"f"})),
    "required": lambda: ForcedParser(None),
    "named": lambda: ForcedParser("f"),
}


@pytest.mark.parametrize("name", PARSERS)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
@settings(max_examples=80)
def test_cuts_do_not_matter(name, parts, cuts):
    """Whatever the text, other pieces of it say the same; content is a part of the text, all of it if there is no call,
    and arguments stand in it as they are told.

    Mutation: `BaseParser._outside` does not keep `_half`; `JsonText` forgets its `_state` between two pieces.
    """
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = told(PARSERS[name](), [text])
    for pieces in ([text[start:end] for start, end in itertools.pairwise(edges)], text):
        assert merged(told(PARSERS[name](), pieces)) == merged(whole)
    content, calls = gather(whole)
    rest = iter(text)
    assert all(char in rest for char in content)
    assert calls or content == text
    assert all(call.arguments in text or call.arguments == "{}" for call in calls)


ALMOST_JSON = [
    *(
        "[1,]",
        "[,1]",
        "[,]",
        "[1 2]",
        "[",
        "]",
        "[1}",
        '{"a": 1,}',
        "{,}",
        '{"a" 1}',
        '{"a"}',
        "{1: 2}",
        '{"a": }',
        "{]",
    ),
    *("01", "-", "-x", "1.", ".5", "+1", "1e", "1e+", "1.e5", "0x1", "1-", "NaN", "Infinity", "tru", "nulL", "falsee"),
    *('"', '"\\', '"\\x"', '"\\u12g4"', '"\\u123"', '"a\nb"', "'a'", '"a" "b"', "1 2"),
]
JSON = [
    *(
        HARD_TEXT,
        "[-0.5e+10, 20, 0, 1E5, -7, 3e-2, 10.25, 0e1]",
        '["\\u00eF\\n\\/\\b\\f\\r\\t", [], {}, ""]',
        '{"a": {"b": 1}, "c": [{}]}',
    ),
    *("[true, false, null]", "-0.0", '"\\ud800"', "{ }", "[ 1 , 2 ]", '{"a":1,"a":2}'),
]


def test_json_is_what_the_decoder_takes():
    """Values, and values with a few characters changed: taken to their end if Python's decoder takes them, and only
    then.

    Mutation: any state of `_MOVES` has no moves; `_NUMBERS` has "." in it; an array may end with a comma.
    """

    def is_json(text: str) -> bool:
        try:
            json.loads(text, parse_constant=int)
        except ValueError:
            return False
        return True

    drawn = random.Random(7)
    texts = [*ALMOST_JSON, *JSON]
    for text in JSON * 200:
        for _ in range(drawn.randrange(1, 3)):
            at, new = drawn.randrange(len(text) + 1), drawn.choice([*'{}[]",:\\u01e+-.tn \n\x01', ""])
            text = text[:at] + new + text[at + drawn.randrange(2) :]
        texts.append(text.strip(" \n"))
    for text in texts:
        value = JsonText()
        end = value.take(text + " ", 0)
        assert (value.over and end == len(text)) == is_json(text), text
        assert not (value.over and value.broken)
    assert [is_json(text) for text in texts[: len(ALMOST_JSON) + len(JSON)]] == [False] * len(ALMOST_JSON) + [
        True
    ] * len(JSON)


def test_depth_has_a_bound():
    """What decoders would refuse, or fall over, is broken here already.

    Mutation: `JsonText._structure` does not look at `MAX_CALL_JSON_DEPTH`.
    """
    for depth, over in ((MAX_CALL_JSON_DEPTH, True), (MAX_CALL_JSON_DEPTH + 1, False)):
        value = JsonText()
        value.take("[" * depth + "]" * depth, 0)
        assert (value.over, value.broken) == (over, not over)


LARGE = {
    "string": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x", '"}}</tool_call>'),
    "numbers": ("llama3_json", '{"name": "f", "arguments": {"a": [', "12, ", "1]}}"),
    "escapes": ("mistral", '[TOOL_CALLS]f{"a": "', "\\u00e9", '"}'),
    "arguments first": ("hermes", '<tool_call>{"arguments": {"a": "', "x", '"}, "name": "f"}</tool_call>'),
    "other keys": ("hermes", "<tool_call>{", '"k": 1, ', '"name": "f", "arguments": {"a": ""}}</tool_call>'),
}
HOSTILE = {
    "spaces": ("hermes", " "),
    "spaces in a call": ("hermes", "<tool_call> \n \n \n"),
    "tags": ("hermes", "<tool_call>"),
    "half calls": ("hermes", '<tool_call>{"name": "'),
    "half tags": ("hermes", "<tool_cal"),
    "brackets": ("mistral", "["),
    "names": ("mistral", "[TOOL_CALLS]a"),
}


def scaled(seconds: float) -> float:
    """What took so long, on a machine that counts to a million in 36 ms: less, if this one is slower now."""
    start = time.process_time()
    for _ in range(1_000_000):
        start += 0
    return seconds * min(1, 0.036 / (time.process_time() - start))


def check_large(size: int, seconds: float) -> None:
    """Texts of so many characters, one at a time. `seconds` of a processor that counts to a million in 36 ms are many
    times what linear work needs."""
    for format, before, piece, after in LARGE.values():
        text = before + piece * (size // len(piece)) + after
        start = time.process_time()
        content, calls = gather(told(format, text))
        assert scaled(time.process_time() - start) < seconds
        assert content == ""
        assert [call.name for call in calls] == ["f"]
        assert calls[0].arguments in text
        assert [*json.loads(calls[0].arguments)] == ["a"]
    for format, piece in HOSTILE.values():
        text = piece * (size // len(piece))
        start = time.process_time()
        assert gather(told(format, text)) == (text, [])
        assert scaled(time.process_time() - start) < seconds


def test_work_is_linear():
    """Large arguments and texts made to hurt, a character at a time.

    Mutation: `CallObject.take` begins anew with all it has `held` on each push.
    """
    check_large(30_000, 2)


@pytest.mark.long
def test_work_is_linear_for_a_megabyte():
    """The same, so large that work which grows with the text for each piece would take hours.

    Mutation: `CallObject._take_value` joins what it has `held`.
    """
    check_large(1_000_000, 60)


# Calls that a request demands


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


def item(kind: str) -> dict[str, Any]:
    """Parameters with a definition, a reference to themselves, and a constant that looks like one."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "x": {"$ref": "#/$defs/Item"},
            "next": {"$ref": "#"},
            "default": {"anyOf": [{"$ref": "#/$defs/Item"}]},
            "data": {"const": {"$ref": "#/$defs/Item"}},
        },
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"Item": {"type": kind}},
    }


TOOLS = [tool("f", item("integer")), tool("g", item("string")), tool("none"), tool("any", {})]
NAMED_G = {"type": "function", "function": {"name": "g"}}
BYTES = LLTokenizer("byte")


def allows(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of a schema lets a model write this text and end."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_schema_of_required_calls():
    """Each tool's calls with its own parameters, where two tools have different definitions of one name; at least one.

    Mutation: `forced_schema` does not use `moved`; `moved` looks into `_DATA`, or takes `_BY_NAME` for keywords.
    """
    schema = forced_schema(TOOLS, "required")
    for text in [
        '[{"name": "f", "parameters": {"x": 1, "next": {"x": 2}, "default": 3}}]',
        '[{"name": "g", "parameters": {"x": "1", "default": "3"}}, {"name": "none", "parameters": {}}]',
        '[{"name": "f", "parameters": {"x": 1, "data": {"$ref": "#/$defs/Item"}}}]',
        '[{"name": "any", "parameters": {"whatever": [1]}}]',
    ]:
        assert allows(schema, text), text
    for text in [
        "[]",
        "{}",
        '[{"name": "f", "parameters": {"x": "1"}}]',
        '[{"name": "g", "parameters": {"x": "1", "default": 3}}]',
        '[{"name": "h", "parameters": {}}]',
        '[{"name": "none", "parameters": {"x": 1}}]',
        '[{"name": "any", "parameters": 1}]',
    ]:
        assert not allows(schema, text), text
    assert TOOLS[0] == tool("f", item("integer"))  # untouched


def test_the_schema_of_a_named_call():
    """The parameters of that function, and nothing around them.

    Mutation: `forced_schema` returns the array whatever the `choice`; `_parameters` leaves a missing type open.
    """
    schema = forced_schema(TOOLS, NAMED_G)
    assert allows(schema, '{"x": "1", "next": {"x": "2"}}')
    assert not allows(schema, '{"x": 1}')
    anything = forced_schema(TOOLS, {"type": "function", "function": {"name": "any"}})
    assert allows(anything, '{"a": 1}')
    assert not allows(anything, "[1]")


def test_forced_calls_are_read():
    """The raw text of both forms, as it comes; cut off where it is cut off; content where no grammar held the model.

    Mutation: `ForcedParser._opened` does not begin the call; `CallObject` does not know "parameters".
    """
    text = f' [{{"name": "f", "parameters": {HARD_TEXT}}},\n{{"name":"g","parameters":{{}}}}] '
    assert gather(told(ForcedParser(None), text)) == ("", [ToolCall("f", HARD_TEXT), CALLED_G])
    assert gather(told(ForcedParser("f"), f" {HARD_TEXT}\n")) == ("", [ToolCall("f", HARD_TEXT)])
    parser = ForcedParser("f")
    assert parser.push('{"a') == [CallBegins(0, "f"), CallArguments(0, '{"a')]
    assert parser.finish() == []
    assert read(ForcedParser(None), text[: text.index('"g')]) == (',\n{"name":', [ToolCall("f", HARD_TEXT)])
    for name in (None, "f"):
        assert read(ForcedParser(name), " I would rather not. [] ") == (" I would rather not. [] ", [])


# Requests


def test_tools_and_choices():
    """What is right, and what it means.

    Mutation: `_choice` takes a missing choice for "none" where there are tools.
    """
    names = frozenset({"f", "g", "none", "any"})
    assert check_tools(TOOLS, None) == ("auto", None, names)
    for mode in ("none", "auto", "required"):
        assert check_tools(TOOLS, mode) == (mode, None, names)
    assert check_tools(TOOLS, NAMED_G) == ("named", "g", names)
    for tools in (None, []):
        for choice in (None, "auto", "none"):
            assert check_tools(tools, choice) == ("none", None, frozenset())
    most = [tool(f"a_.-{i}") for i in range(MAX_TOOLS)]
    assert len(check_tools(most, "auto").names) == MAX_TOOLS
    full = {"name": "f", "description": None, "strict": True, "parameters": None}
    assert check_tools([{"type": "function", "function": full}], None).mode == "auto"


def deep(levels: int) -> dict[str, Any]:
    return {"items": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ({}, None, "tools must be a list of at most 128 tools, got {}"),
        ([tool("f")] * 129, None, "tools must be a list of at most 128 tools, got 129 of them"),
        (["f"], None, r"tools\[0\] must be an object, got 'f'"),
        ([{"function": {"name": "f"}}], None, r'tools\[0\].type must be "function", got None'),
        ([{"type": "custom"}], None, r"tools\[0\].type must be \"function\", got 'custom'"),
        ([{"type": "function"}], None, r"tools\[0\].function must be an object, got None"),
        ([tool("f"), tool("a b")], None, r"tools\[1\].function.name must be 1 to 64 letters, .* got 'a b'"),
        ([tool("f\n")], None, r"tools\[0\].function.name must be"),
        ([tool("f" * 65)], None, r"tools\[0\].function.name must be"),
        ([tool(7)], None, r"tools\[0\].function.name must be .* got 7"),
        ([tool("f"), tool("f")], None, r"tools\[1\].function.name must be unique, got 'f' of tools\[0\] again"),
        ([tool("f", [])], None, r"tools\[0\].function.parameters must be a JSON schema, an object, got \[\]"),
        ([tool("f", {"type": "string"})], None, r"function.parameters.type must be \"object\", got 'string'"),
        ([tool("f", deep(64))], None, r"tools\[0\].function.parameters must have at most 20000 values, 64 deep"),
        ([tool("f", {"enum": [0] * 20_000})], None, r"tools\[0\].function.parameters must have at most 20000 values"),
        (
            *([{"type": "function", "function": {"name": "f", "description": 1}}], None),
            r"tools\[0\].function.description must be text, got 1",
        ),
        (
            *([{"type": "function", "function": {"name": "f", "strict": "yes"}}], None),
            r"tools\[0\].function.strict must be true or false, got 'yes'",
        ),
        ([], "required", 'tool_choice "required" needs tools'),
        (TOOLS, "any", "tool_choice must be .* got 'any'"),
        (TOOLS, [], r"tool_choice must be .* got \[\]"),
        (TOOLS, {"type": "custom"}, "tool_choice must be .* got .*custom"),
        (TOOLS, {"type": "function"}, "tool_choice.function must be an object, got None"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, "tool_choice.function.name must be .* got 'h'"),
        (None, NAMED_G, "tool_choice.function.name must be that of one of the tools, got 'g'"),
        (TOOLS, {"type": "function", "function": {"name": ["f"]}}, r"tool_choice.function.name must be .* got \['f'\]"),
    ],
)
def test_what_is_wrong_is_named(tools, choice, message):
    """The message says which field is wrong, what it is and what would be right.

    Mutation: any check of `_tool`, `_schema` or `_choice` is left out.
    """
    with pytest.raises(ValueError, match=message):
        check_tools(tools, choice)


def test_the_parser_of_a_model():
    """By name, or by what its chat template teaches; formats that only look alike are not taken for one of ours.

    Mutation: `_MARKS` begins with "hermes"; `guess_parser` does not expect None.
    """
    for template, name in [
        (None, None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("{{ '<tool_call>\n<function=' + tool_call.name + '>' }}", "qwen3_coder"),
        ("{{ '<seed:tool_call>\n<function=' + tool_call.name + '>' }}", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<|start_of_role|>system<|end_of_role|> within <tool_call></tool_call> XML tags", "granite4"),
        ("<|start_of_role|>system<|end_of_role|> <|tool_call|>", None),
        ("{{- '[TOOL_CALLS][' }}", "mistral"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ('format {"name": function name, "parameters": dictionary of argument name and its value}.', "llama3_json"),
    ]:
        assert guess_parser(template) == name
        assert name is None or parser_for(name)().finish() == []
    for name in ("pythonic", "deepseek_v3", "granite", "auto"):
        with pytest.raises(ValueError, match=f"one of hermes, qwen, .*, qwen3_coder, .*glm47, got '{name}'"):
            parser_for(name)


def test_ids_of_calls():
    """Fresh ones, as OpenAI's look; nine letters and digits where Mistral's templates check that.

    Mutation: `call_id` does not look at `parser`.
    """
    ids, short = {call_id() for _ in range(100)}, {call_id("mistral") for _ in range(100)}
    assert len(ids) == len(short) == 100
    assert all(len(id) == 29 and id.startswith("call_") and int(id[5:], 16) >= 0 for id in ids)
    assert all(len(id) == 9 and id.isascii() and id.isalnum() for id in short)
