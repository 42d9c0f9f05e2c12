"""Tool calls whose arguments stand between tags (Qwen3-Coder, GLM-4.5), and calls that are demanded in the form of the
model."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sapwood.engine.loading.default_model import default_model
from sapwood.server.config import ServerConfig
from sapwood.server.limits import MAX_CALLS
from sapwood.server.process.grammars import Grammars, GrammarSpec
from sapwood.server.text.tools import (
    PARSERS,
    CallArguments,
    CallBegins,
    Content,
    Delta,
    ForcedParser,
    forced_calls,
    parser_of,
)
from sapwood.server.text.tools.typed import json_of, kinds_of

from .kit import Running, paced_flags
from .scripted import Scripted
from .test_tools import ToolCall, gather, merged, scaled

QWEN, GLM = "qwen3_coder", "glm45"
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "thing": {"$ref": "#/$defs/Thing"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "kind": {"enum": ["oak", "a&b~c"]},
        "any": {},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"Thing": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": "open", "parameters": {}}},
]
NAMED_F = {"type": "function", "function": {"name": "f"}}


def qwen(name: str = "f", **arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str = "f", **arguments: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


WRITES = {QWEN: qwen, GLM: glm}


def told(form: str, pieces: Any, names: frozenset[str] | None = None) -> list[Delta]:
    parser = parser_of(form, TOOLS, names)()
    return [*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()]


def read(form: str, text: str, **more: Any) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a text, the same in one piece and character by character."""
    whole = gather(told(form, [text], **more))
    assert gather(told(form, text, **more)) == whole
    return whole


def arguments_of(form: str, **arguments: str) -> Any:
    content, (call,) = read(form, WRITES[form](**arguments))
    assert content == "" and call.name == "f"
    return json.loads(call.arguments)


# ---- what models write


@pytest.mark.parametrize("form", WRITES)
def test_an_argument_is_what_the_schema_says(form):
    """The same text is a number, a word, a list or a text, by the type that the tool gives it; also where the type
    stands behind a reference or among several. Models that were shown Python's words write those.

    Mutation: `json_of` looks at no kinds; `kinds_of` does not follow `$ref`, or looks at no `anyOf`.
    """
    assert arguments_of(form, text="5", count="5", share="5", either="5") == {
        "text": "5",
        "count": 5,
        "share": 5,
        "either": 5,
    }
    assert arguments_of(form, on="True", maybe="None", any="[1, {}]") == {"on": True, "maybe": None, "any": [1, {}]}
    assert arguments_of(form, text="None", maybe="true", either="x") == {"text": "None", "maybe": "true", "either": "x"}
    assert arguments_of(form, list="[1, 2]", thing='{"x": 1}', share="-1.5e3") == {
        "list": [1, 2],
        "thing": {"x": 1},
        "share": -1500.0,
    }
    assert arguments_of(form, kind="oak", any="half a {", unknown="1") == {
        "kind": "oak",
        "any": "half a {",
        "unknown": 1,
    }


@pytest.mark.parametrize("form", WRITES)
def test_what_is_not_of_its_type_stays_text(form):
    """Nothing is guessed: the function is called with what the model wrote.

    Mutation: `json_of` passes on what is no JSON.
    """
    wrong = {"count": "five", "share": "NaN", "on": "yes", "list": "1, 2", "thing": "{'x': 1}"}
    assert arguments_of(form, **wrong) == wrong
    assert arguments_of(form, count="05", list="[1,]", thing="[]") == {"count": "05", "list": "[1,]", "thing": "[]"}


@pytest.mark.parametrize("form", WRITES)
def test_texts_are_whole(form):
    """Several lines, quotes, tags of other languages, the format itself, and nothing at all.

    Mutation: `_behind_value` takes every mark for the end of the value; `_push_value` strips the text; `quoted` is left
    out.
    """
    html = '<p class="a">\n  "x" \\ y\n</p>\n'
    for text in (
        "",
        "é\n\n  two",
        html,
        "\t{}",
        "a</arg_value>b </parameter> c",
        "</parameter></arg_value> <tool_call>",
    ):
        assert arguments_of(form, text=text, count="1") == {"text": text, "count": 1}


ODD = {
    "one after the other": (
        QWEN,
        qwen(text="a") + "\n" + qwen("g"),
        "",
        [ToolCall("f", '{"text": "a"}'), ToolCall("g", "{}")],
    ),
    "text around": (
        QWEN,
        f"Let me see.\n\n{qwen(text='a')}\n\nDone.",
        "Let me see.Done.",
        [ToolCall("f", '{"text": "a"}')],
    ),
    "without the outer tags": (
        *(QWEN, "I call\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n and more"),
        *("I calland more", [ToolCall("f", '{"text": "a"}')]),
    ),
    "only the last tag": (QWEN, "<function=g>\n</function>\n</tool_call>", "", [ToolCall("g", "{}")]),
    "the last tag but one is missing": (
        *(QWEN, "<tool_call><function=f><parameter=text>a</parameter></tool_call> b"),
        *("b", [ToolCall("f", '{"text": "a"}')]),
    ),
    "in one line": (
        *(
            QWEN,
            "<tool_call><function=f><parameter=text>a</parameter><parameter=count>2</parameter></function></tool_call>",
        ),
        *("", [ToolCall("f", '{"text": "a", "count": 2}')]),
    ),
    "glm, one after the other": (
        GLM,
        glm(text="a") + "\n" + glm("g"),
        "",
        [ToolCall("f", '{"text": "a"}'), ToolCall("g", "{}")],
    ),
    "glm, in one line": (
        *(GLM, "<tool_call>f<arg_key>text</arg_key><arg_value>a</arg_value></tool_call><tool_call>g</tool_call>"),
        *("", [ToolCall("f", '{"text": "a"}'), ToolCall("g", "{}")]),
    ),
    "glm, its last tag once more": (GLM, glm("g") + "a </tool_call> b", "a </tool_call> b", [ToolCall("g", "{}")]),
    "glm, text around": (GLM, f"See.\n{glm(text='a')} Done.", "See.Done.", [ToolCall("f", '{"text": "a"}')]),
}


@pytest.mark.parametrize("name", ODD)
def test_calls_in_company(name):
    """Several, with text around them, and with the tags that models leave out.

    Mutation: `bare` is ""; `ends` has "</function>" alone; `_end` leaves `_unclosed` as it is.
    """
    form, text, content, calls = ODD[name]
    assert read(form, text) == (content, calls)


NONE = [
    (QWEN, "Write <tool_call> and <function=f> and <parameter=x> around it."),
    (QWEN, "<tool_call>\n{}\n</tool_call>"),
    (QWEN, "<tool_call><function=>\n</function></tool_call>"),
    (QWEN, "<tool_call><function=a b></function></tool_call>"),
    (QWEN, "<tool_call><function=" + "f" * 300 + "></function></tool_call>"),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=a\nb>\n</parameter>"),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=" + "k" * 300 + ">"),
    (QWEN, "<tool_call>\n<function=f>\n<parameter=>1</parameter>"),
    (QWEN, "<tool_call>\n<function=f>\nno arguments"),
    (QWEN, "<tool_call>\n<function=f>\n</func"),
    (QWEN, "<function=f"),
    (GLM, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    (GLM, "<tool_call>f and g</tool_call>"),
    (GLM, "<tool_call>\n</tool_call>"),
    (GLM, "<tool_call>f\n<arg_key>a<arg_key></tool_call>"),
    (GLM, "<tool_call>f\n<arg_key>text</arg_key>\nx"),
    (GLM, "<tool_call>f\n<arg_key></arg_key><arg_value>1</arg_value>"),
    (GLM, "<tool_call>f\n<arg_value>1</arg_value></tool_call>"),
    (GLM, "<tool_call>f\n<arg_key>te"),
]


@pytest.mark.parametrize(("form", "text"), NONE)
def test_what_is_no_call_is_content_unchanged(form, text):
    """Nothing is lost of what looks like a call and is none, or ends too early to be one.

    Mutation: `_hold` keeps nothing; `_keying` looks for no `_NO_KEY`; `_naming` takes an empty name.
    """
    assert read(form, text) == (text, [])


@pytest.mark.parametrize("form", WRITES)
def test_names_of_the_request(form):
    """With `names`, a call to another function is content.

    Mutation: `_naming` does not look at `_names`.
    """
    text = WRITES[form]("other", text="a")
    assert read(form, text)[1] == [ToolCall("other", '{"text": "a"}')]
    assert read(form, text, names=frozenset({"f"})) == (text, [])


@pytest.mark.parametrize("form", WRITES)
def test_a_call_that_is_cut_off(form):
    """Content before its arguments have begun; then arguments that are no JSON, whatever is missing, until the call has
    ended; nothing of a tag that was cut in two.

    Mutation: `finish` closes the arguments; `_behind_value` ends the value before it knows what follows.
    """
    text = "Hi. " + WRITES[form](text="one two", count="12")
    seen = set()
    for end in range(len(text)):
        content, calls = read(form, text[:end])
        if not calls:
            assert content == text[:end]
            continue
        (call,) = calls
        seen.add(call.arguments)
        assert content == "Hi." and '{"text": "one two", "count": 12}'.startswith(call.arguments)
        if end < len(text) - len("</function>\n</tool_call>"):
            with pytest.raises(ValueError):
                json.loads(call.arguments)
    assert {'{"text": "', '{"text": "one ', '{"text": "one two", "count": '} <= seen


def test_texts_come_as_they_are_written():
    """A text piece by piece; a line break at its end waits, and so does what may be a tag; a number comes whole.

    Mutation: `_push_value` waits for the end of every value.
    """
    parser = parser_of(QWEN, TOOLS)()
    pieces = ["I", " call\n<tool", "_call>\n<function=f>", "\n<parameter=te", "xt>\nab", 'c"\n', "d<", "/p>", "\n</par"]
    pieces += ["ameter>", "\n<", "parameter=count>\n1", "2\n</parameter>", "\n</function>\n", "</tool_call>"]
    assert [parser.push(piece) for piece in pieces] == [
        [Content("I")],
        [Content(" call")],
        [],
        [],
        [
            *(CallBegins(0, "f"), CallArguments(0, "{"), CallArguments(0, '"text": '), CallArguments(0, '"')),
            CallArguments(0, "ab"),
        ],
        [CallArguments(0, 'c\\"')],
        [CallArguments(0, "\\nd")],
        [CallArguments(0, "</p>")],
        [],
        [],
        [],
        [CallArguments(0, '"'), CallArguments(0, ", "), CallArguments(0, '"count": ')],
        [],
        [CallArguments(0, "12"), CallArguments(0, "}")],
        [],
    ]
    assert parser.finish() == []


def test_a_call_that_breaks_after_it_has_begun():
    """Its arguments stay what they were, no JSON; what broke it is content, and a call may follow.

    Mutation: `_fail` leaves `_begun`.
    """
    text = "<tool_call>f\n<arg_key>text</arg_key><arg_value>a</arg_value><arg_key>count</arg_key> 5 </tool_call>"
    content, calls = read(GLM, text + glm("g"))
    assert (content, calls) == ("5", [ToolCall("f", '{"text": "a"'), ToolCall("g", "{}")])


@pytest.mark.parametrize("form", WRITES)
def test_calls_have_a_bound(form):
    """A model that cannot stop calling: after the bound the rest is content.

    Mutation: `_outside` does not look at `MAX_CALLS` for the bare mark.
    """
    one = WRITES[form]("g")
    content, calls = read(form, one * (MAX_CALLS + 2))
    assert calls == [ToolCall("g", "{}")] * MAX_CALLS and content == one * 2
    if form == QWEN:
        one = "<function=g></function>"
        assert read(form, one * (MAX_CALLS + 2)) == (one * 2, calls)


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=text>",
        "<parameter=count>",
    ),
    *(
        "</parameter>",
        "<arg_key>",
        "text",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "f",
        ">",
        "<",
        "/",
        "\n",
        " ",
        "1",
    ),
    *(
        "<tool",
        "_call>",
        "</para",
        '"',
        "\\",
        "é",
        "{}",
        qwen(text="a"),
        glm(text="a"),
        "thing",
        "<arg_key>text</arg_key>",
    ),
]


@pytest.mark.parametrize("form", WRITES)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=16), cuts=st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=200)
def test_cuts_do_not_matter(form, parts, cuts):
    """Whatever the text, other pieces of it say the same, and nothing raises; without a call all of it is content.

    Mutation: `_mark` does not keep `_half`; `_keying` gives back another place when the text was cut before it.
    """
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = merged(told(form, [text]))
    for pieces in ([text[start:end] for start, end in itertools.pairwise(edges)], text):
        assert merged(told(form, pieces)) == whole
    content, calls = gather(whole)
    rest = iter(text)
    assert all(char in rest for char in content)
    assert calls or content == text


HOSTILE = ["<tool_call>", "<function=f", "<function=f>\n", "<parameter=text>\n", "</parameter>\n", "<", " \n", "x"]


@pytest.mark.parametrize("form", WRITES)
def test_work_is_linear(form):
    """Large arguments and texts made to hurt, in one piece and a character at a time.

    Mutation: `_outside` looks for each mark by itself; `_push_value` keeps what it has told.
    """
    for before in ("", WRITES[form](text="@").partition("@")[0], WRITES[form](thing="@").partition("@")[0]):
        for piece in HOSTILE:
            for text, whole in ((before + piece * (size // len(piece)), size > 20_000) for size in (60_000, 12_000)):
                start = time.process_time()
                told(form, [text] if whole else text)
                assert scaled(time.process_time() - start) < 1, (before, piece)


def test_schemas_that_say_little_or_go_in_circles():
    """Types are found wherever they stand, and the search ends.

    Mutation: `kinds_of` looks at no `MAX_ARGUMENT_SCHEMAS`; `_referred` asks a list for a key.
    """
    circle = {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/$defs/0/x"}, "c": {"$ref": "http://x"}}}
    assert [kinds_of({**circle, "$defs": [1]}, name) for name in "abcd"] == [()] * 4
    assert kinds_of({"additionalProperties": {"type": "boolean"}}, "x") == ("boolean",)
    assert kinds_of({"properties": {"a": {"enum": ["x", 1, None, True, 1.5, [], {}]}}}, "a") == (
        *("string", "integer", "null", "boolean", "number", "array", "object"),
    )
    assert kinds_of({"properties": {"a": {"allOf": [{"const": 5}, True]}}}, "a") == ("integer",)
    assert kinds_of({"properties": []}, "a") == ()
    assert json_of("[" * 300 + "]" * 300, ("array",)) == json.dumps("[" * 300 + "]" * 300)


# ---- calls that a request demands


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, 49152, (2, 0), seconds=20)
    yield made
    made.close()


def holds(grammars: Grammars, tokenizer: Tokenizer, forced: Any, text: str) -> bool:
    """Whether a model that is held to it can write this text, and end."""
    (grammar,) = grammars.compile(GrammarSpec(forced.kind, forced.text)).result(timeout=240)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        grammar.accept(token)
        if grammar.error:
            return False
    return bool(grammar.allowed()[0] & (1 << 2))


FORMS = {QWEN: qwen, GLM: glm}


@pytest.mark.parametrize("form", FORMS)
def test_a_demanded_call_is_held_to_the_form_that_the_model_writes(form, grammars, tokenizer):
    """The tags of its chat template, the tools of the request, arguments of the right types, required ones there, in
    the order of the schema; at most as many calls as there may be. Its own parser reads them.

    Mutation: `_value` is "text" for every type; `_tagged` makes every argument optional; `start` has no bound.
    """
    write, required = FORMS[form], forced_calls(TOOLS, "required", form, 2)
    good = [
        write(text="one\ntwo <b>&~</b>", count="5", thing='{"x": 1}', kind="a&b~c"),
        write("g") + "\n" + write(text=""),
        write("open", whatever="x y"),
    ]
    bad = [
        "",
        "I would rather not.",
        write(count="5"),
        write(text="a", count="x"),
        write(text="a", kind="ash"),
        write(text="a", thing='{"x": "1"}'),
        write(text="a", more="b"),
        write("h"),
        write("g", a="b"),
        "\n".join([write("g")] * 3),
        good[0][:-1],
    ]
    for text in good:
        assert holds(grammars, tokenizer, required, text), text
        content, calls = gather([*(parser := required.parser()).push(text), *parser.finish()])
        assert content == "" and all(isinstance(json.loads(call.arguments), dict) for call in calls)
    for text in bad:
        assert not holds(grammars, tokenizer, required, text), text
    named = forced_calls(TOOLS, NAMED_F, form)
    assert holds(grammars, tokenizer, named, write(text="a"))
    for text in (write("g"), write(text="a") + "\n" + write(text="b")):
        assert not holds(grammars, tokenizer, named, text), text


def test_granite_writes_objects_between_tags(grammars, tokenizer):
    """Each with the arguments of its own function.

    Mutation: `_objects` gives all functions the schema of the first.
    """
    required = forced_calls(TOOLS, "required", "granite4")

    def write(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    text = write("f", text="a", thing={"x": 1}) + "\n" + write("g")
    assert holds(grammars, tokenizer, required, text)
    parser = required.parser()
    calls = [ToolCall("f", '{"text": "a", "thing": {"x": 1}}'), ToolCall("g", "{}")]
    assert gather([*parser.push(text), *parser.finish()]) == ("", calls)
    for text in (write("f"), write("g", a=1), write("h"), write("f", text="a", thing={"x": "1"}), "{}"):
        assert not holds(grammars, tokenizer, required, text), text


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "granite4"])
def test_what_is_written_at_random_is_a_call(form, grammars, tokenizer):
    """Tokens drawn from those that are allowed: however little the model means, good calls come of it.

    Mutation: `text` ends with a line break before the tag alone, so that a value may hold the tag itself.
    """
    forced = forced_calls(TOOLS, "required", form, 3)
    endings = [
        tokenizer.encode(text, add_special_tokens=False).ids
        for text in ("</parameter>", "</arg_value>", '"', "}", "</function>\n</tool_call>", "</tool_call>")
    ]
    for seed in range(12):
        rng = random.Random(seed)
        (grammar,) = grammars.compile(GrammarSpec(forced.kind, forced.text)).result(timeout=240)
        tokens: list[int] = []
        while len(tokens) < 1500:
            allowed = np.flatnonzero(np.unpackbits(grammar.allowed().view(np.uint8), bitorder="little"))
            likely = [each for each in endings if each[0] in allowed]
            ending = rng.choice(likely) if likely and rng.random() < 0.3 else [int(rng.choice(allowed))]
            if {2, 0} & {*allowed.tolist()}:
                break
            for token in ending:
                if not grammar.allowed()[token // 32] >> token % 32 & 1:
                    break
                tokens.append(token)
                grammar.accept(token)
        assert len(tokens) < 1500 and not grammar.error
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        content, calls = gather([*(parser := forced.parser()).push(text), *parser.finish()])
        assert content == "" and 1 <= len(calls) <= 3, text
        assert all(call.name in ("f", "g", "open") for call in calls)
        assert all("text" in json.loads(call.arguments) for call in calls if call.name == "f"), text


def test_where_tags_cannot_say_it_json_does():
    """Keys that would break the tags, schemas that say more of their root than tags can, models without a form of their
    own: the whole text is JSON, as ever.

    Mutation: `_plain` lets all pass.
    """
    for parameters in (
        {"type": "object", "properties": {"a>b": {}}},
        {"type": "object", "anyOf": [{"required": ["a"]}]},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
        {"type": "object", "properties": {"a": {}}, "required": ["\n"]},
        {"type": "object", "minProperties": 1},
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        forced = forced_calls(tools, "required", QWEN)
        assert forced.kind == "json_schema" and isinstance(forced.parser(), ForcedParser)
    for form in (None, "hermes", "mistral", "llama3_json"):
        assert forced_calls(TOOLS, "required", form).kind == "json_schema"


# ---- a whole answer


ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
EXPECTED = {"maybe": "one\ntwo", "count": 5, "text": "12", "thing": {"x": 1}}


@pytest.mark.parametrize("form", [*WRITES, "qwen3_xml", "mimo", "glm47"])
def test_an_answer_with_calls(form):
    """Of all three APIs, in one piece and as a stream, by each name that vLLM has for the format.

    Mutation: `read_tools` makes the parser without the tools.
    """
    write = WRITES[{"qwen3_xml": QWEN, "mimo": QWEN, "glm47": GLM}.get(form, form)]
    called = write(maybe="one\ntwo", count="5", text="12", thing='{"x": 1}')
    said = f"I call\n{called}\n{write('g')}"
    app = Scripted(said, parser=form)
    message = app.post("/v1/chat/completions", ASK).json["choices"][0]["message"]
    assert message["content"] == "I call"
    one, two = (call["function"] for call in message["tool_calls"])
    assert json.loads(one["arguments"]) == EXPECTED and (two["name"], two["arguments"]) == ("g", "{}")
    answer = app.post("/v1/chat/completions", {**ASK, "stream": True}).body.decode()
    chunks = [json.loads(line[6:])["choices"] for line in answer.split("\n\n") if line.startswith("data: {")]
    calls = [call for (choice,) in chunks for call in choice["delta"].get("tool_calls", ())]
    told = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert json.loads(told) == EXPECTED and len(calls) > 10
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    output = app.post("/v1/responses", {"input": "hi", "tools": tools}).json["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert json.loads(output[1]["arguments"]) == EXPECTED
    anthropic = [{"name": tool["function"]["name"], "input_schema": PARAMETERS} for tool in TOOLS]
    asked = {"messages": ASK["messages"], "tools": anthropic, "max_tokens": 500}
    content = app.post("/v1/messages", asked).json["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "tool_use"] and content[1]["input"] == EXPECTED
    assert all(submit.params.skip_special_tokens is False for submit in app.link.submitted)


@pytest.mark.parametrize("form", WRITES)
def test_a_demanded_call_of_an_answer(form):
    """The grammar goes to the engine, and the answer has the call alone.

    Mutation: `read_tools` parses what is demanded as JSON, whatever the form.
    """
    app = Scripted(WRITES[form](text="a"), parser=form)
    for choice, finish in (("required", "tool_calls"), (NAMED_F, "stop")):
        answer = app.post("/v1/chat/completions", {**ASK, "tool_choice": choice}).json["choices"][0]
        assert answer["finish_reason"] == finish and answer["message"]["content"] is None
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == ['{"text": "a"}']
        grammar = app.link.submitted[-1].grammar
        assert grammar is not None and grammar.kind == "tool_calls" and "<tool_call>" in grammar.text
    assert app.post("/v1/chat/completions", ASK).status == 200 and app.link.submitted[-1].grammar is None


PLANT = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["oak", "ash"]}, "count": {"enum": [1, 2]}},
            "required": ["kind", "count"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# {{ tools }} <tool_call>\n<function=example> #}"


@pytest.mark.server
@pytest.mark.xdist_group("tagged")
@pytest.mark.parametrize(
    ("form", "flags"), [(QWEN, ["--chat-template", TEMPLATE]), (GLM, ["--tool-call-parser", "glm45"])]
)
def test_a_server_holds_a_model_that_means_nothing_to_its_form(form, flags):
    """By the template or by a flag: calls of the right types come, also as a stream, and as many as there may be.

    Mutation: `_bring_up` does not ask `guess_parser`; `lark` does not know "tool_calls".
    """
    running = Running(*paced_flags(), *flags)
    asked = {"messages": ASK["messages"], "tools": [PLANT], "temperature": 1, "max_tokens": 900}
    named = {"type": "function", "function": {"name": "plant"}}
    try:
        server = running.ready()
        for seed, more in enumerate(
            ({"tool_choice": named}, {"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named})
        ):
            body = {**asked, **more, "seed": seed, "return_token_ids": True}
            choice = server.post("/v1/chat/completions", body).json["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments["kind"] in ("oak", "ash") and arguments["count"] in (1, 2), choice
            text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json["prompt"]
            assert WRITES[form]("plant", kind=arguments["kind"], count=str(arguments["count"])) in text
            told = ""
            for event in server.stream("/v1/chat/completions", body).events():
                for delta in event["choices"] if event != "[DONE]" else ():
                    told += "".join(each["function"]["arguments"] for each in delta["delta"].get("tool_calls", ()))
            assert told == call["function"]["arguments"]
    finally:
        running.kill()


def test_S18_names_of_parsers():
    """Those that vLLM has for what is here are taken, all others refused with the list.

    Mutation: `PARSERS` has no glm47; `_one_of` is left out.
    """
    for name in (*PARSERS, "auto", "none"):
        assert ServerConfig(tool_call_parser=name).tool_call_parser == name
    for name in (
        "deepseek_v3",
        "granite",
        "granite-20b-fc",
        "internlm",
        "jamba",
        "kimi_k2",
        "pythonic",
        "xlam",
        "seed_oss",
    ):
        with pytest.raises(ValueError, match=f"tool_call_parser must be one of auto, none, hermes, .*, got '{name}'"):
            ServerConfig(tool_call_parser=name)
