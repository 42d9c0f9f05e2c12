"""Structured output: texts made of random tokens that a grammar allows have its form, whatever happens on the way; and
grammars of strangers cost a bounded time, and nobody else's answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from sapwood.engine.loading.default_model import default_model
from sapwood.server.process import grammar_trial
from sapwood.server.process.grammar_trial import LARGE, SLOW, Trial, Vocabulary, lark
from sapwood.server.process.grammars import (
    _MAX_CACHED,
    _MAX_STRIKES,
    _MAX_WAITING,
    Grammars,
    GrammarSpec,
    TokenGrammar,
    _Cache,
    check,
)

EOS = (2, 0)
SMALL = Vocabulary(300, [0], {0: "<end>"})
VOCABULARY = 49152  # SmolLM2's; token 1 is special, and so are those up to 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(default_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, VOCABULARY, EOS, seconds=5)  # of a machine that has others to serve
    yield made
    made.close()


def grammar_of(grammars: Grammars, kind: str, value: Any = "") -> TokenGrammar:
    text = value if isinstance(value, str) else json.dumps(value)
    (grammar,) = grammars.compile(GrammarSpec(kind, text)).result(timeout=240)
    return grammar


def refusal(grammars: Grammars, kind: str, value: Any) -> str:
    with pytest.raises(ValueError) as refused:
        grammar_of(grammars, kind, value)
    return str(refused.value)


def flags(bits: Any) -> Any:
    return np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")


def ids(bits: Any) -> list[int]:
    return np.flatnonzero(flags(bits)).tolist()


def write(grammar: TokenGrammar, rng: random.Random, closing: Sequence[int], most: int = 500) -> list[int]:
    """Random tokens that are allowed, until one ends the text. Every third is one that brings an end nearer, where such
    are allowed: otherwise strings would never end."""
    tokens = []
    for _ in range(most):
        allowed = flags(grammar.allowed())
        nearer = [token for token in (*EOS, *closing) if allowed[token]] if rng.random() < 0.33 else []
        token = int(rng.choice(nearer if nearer else np.flatnonzero(allowed)))
        if token in EOS:
            return tokens
        tokens.append(token)
        grammar.accept(token)
    raise AssertionError(f"no end after {most} tokens")


@pytest.fixture(scope="module")
def closing(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.encode(text).ids[0] for text in '"}]),~&>']


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 10},
        "age": {"type": "integer", "minimum": 17, "maximum": 99},
        "city": {"enum": ["Kraków", "東京", "São Paulo"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-zé]{1,5}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
ARITHMETIC = """
    root ::= term ("+" term)*
    term ::= [0-9]+ | "(" root ")"
"""


def is_tree(text: str) -> bool:
    def node(value: Any) -> bool:
        return (
            set(value) == {"name", "children"}
            and len(value["name"]) <= 8
            and len(value["children"]) <= 2
            and all(node(child) for child in value["children"])
        )

    return node(json.loads(text))


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "city", "tags"]
        and 2 <= len(value["name"]) <= 10
        and type(value["age"]) is int
        and 17 <= value["age"] <= 99
        and value["city"] in ("Kraków", "東京", "São Paulo")
        and len(value["tags"]) <= 3
        and all(re.fullmatch("[a-zé]{1,5}", tag) for tag in value["tags"])
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9+()]+", text) is not None and eval(re.sub(r"\b0+(?=\d)", "", text)) >= 0


FORMS: dict[str, tuple[str, Any, Callable[[str], object]]] = {
    "schema": ("json_schema", PERSON, is_person),
    "recursive schema": ("json_schema", TREE, is_tree),
    "object": ("json_object", "", lambda text: isinstance(json.loads(text), dict)),
    "regex": ("regex", r"(\d{1,3}\.){3}[^\x00-\x7f]{2,5}/", re.compile(r"(\d{1,3}\.){3}[^\x00-\x7f]{2,5}/").fullmatch),
    "choice": ("choice", ["yes", "no, never", "żółw", "🙂🙃", 'a "quoted" \\ one\n'], None),  # type: ignore[dict-item]
    "lark": (
        "grammar",
        'start: "<" NAME "&&" NAME ">"\nNAME: /[a-z~]+/ "~"',
        re.compile(r"<[a-z~]+~&&[a-z~]+~>").fullmatch,
    ),
    "gbnf": ("grammar", ARITHMETIC, is_sum),
}


@pytest.mark.parametrize("form", FORMS)
def test_random_texts_have_the_form(grammars, tokenizer, closing, form):
    """Whatever tokens are chosen among those allowed, the text is of the form when it ends: schemas with bounds, with
    references to themselves and with text beyond ASCII, expressions, lists, and grammars of both syntaxes.

    Mutation: `TokenGrammar.accept` leaves out `consume_token`; `Grammars.fill` allows everything; the escape of `&` in
    `_without_operators` is another character's.
    """
    kind, value, has_form = FORMS[form]
    has_form = has_form or value.__contains__
    rng = random.Random(form)
    for _ in range(8):
        grammar = grammar_of(grammars, kind, value)
        text = tokenizer.decode(write(grammar, rng, closing))
        assert has_form(text), text
        assert grammar.error == ""


def test_every_choice_can_be_written(grammars, tokenizer):
    """Its own tokens are allowed one after the other, and then its end: also where characters are cut into bytes, and
    where one choice begins another.

    Mutation: `lark` sorts out choices that begin others; it makes each a rule, and thousands are too many for a row.
    """
    choices = ["yes", "yes, sir", "🙂", "naïve\ttext", "", *(f"number {i}" for i in range(3000))]
    for choice in [*choices[:5], "number 2999"]:
        grammar = grammar_of(grammars, "choice", choices)
        for token in tokenizer.encode(choice).ids:
            assert token in ids(grammar.allowed())
            grammar.accept(token)
        assert 2 in ids(grammar.allowed())
    wrong = grammar_of(grammars, "choice", choices)
    assert tokenizer.encode("maybe").ids[0] not in ids(wrong.allowed())


def test_text_between_structures_is_free(grammars, tokenizer):
    """Ordinary text passes; what begins with a trigger goes on as a structure that begins so, and then text is free
    again.

    Mutation: `_tags` takes the first trigger for every structure; the schema of a structure is left out.
    """
    call = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tag = {
        "triggers": ["{{", "<f="],
        "structures": [
            {"begin": "<f=add>", "schema": call, "end": "</f>"},
            {"begin": "{{x", "schema": {"type": "null"}, "end": "}}"},
        ],
    }
    check(GrammarSpec("structural_tag", json.dumps(tag)))

    def fits(text: str) -> bool:
        grammar = grammar_of(grammars, "structural_tag", tag)
        for token in tokenizer.encode(text).ids:
            grammar.accept(token)
        return not grammar.error and 2 in ids(grammar.allowed())

    assert fits("Let me see & think ~ a bit < more.")
    assert fits('so: <f=add>{"a": 1}</f> and {{xnull}}!')
    assert not fits("so: <f=sub>")
    assert not fits('so: <f=add>{"b": 1}</f>')
    assert not fits('so: <f=add>{"a": 1}')


def test_json_is_written_as_people_write_it(grammars, tokenizer):
    """On one line, without spaces, indented by spaces or tabs; but nobody writes empty lines for ever. A schema that
    has its own idea of spaces keeps it.

    Mutation: `_SPACES` allows no new line, or any number; `_json` puts it before the schema's own `x-guidance`.
    """
    value = {"a": [1, {"b": {"c": [[2.5, None], "x"]}}], "d": True}
    compact = {"type": "object", "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}

    def fits(text: str, schema: Any) -> bool:
        grammar = grammar_of(grammars, "json_schema", schema)
        for token in tokenizer.encode(text).ids:
            grammar.accept(token)
        return not grammar.error

    for options in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 8}, {"indent": "\t"}):
        text = json.dumps(value, **options)
        assert fits(text, {"type": "object"}) and fits(text.replace("\n", "\r\n"), {"type": "object"})
        assert fits(text, compact) == (" " not in text and "\n" not in text)
    assert fits("{\n", {}) and not fits("{\n\n", {}) and not fits("{" + " " * 9, {})


# ---- ends, errors, and going back


def test_where_nothing_can_follow_only_an_end_is_allowed(grammars, tokenizer):
    """A complete text that cannot go on, one that has ended, and one that went wrong: in all of them the tokens that
    end a text are allowed, and no other. Going back takes each of these back, as often as one likes.

    Mutation: tokens of `eos` reach `consume_token` (llguidance forgets them: it would go back one too far);
    `TokenGrammar.rollback` keeps `error`, or the matcher that has one.
    """
    yes, no = tokenizer.encode("yes").ids[0], tokenizer.encode("no").ids[0]
    grammar = grammar_of(grammars, "choice", ["yes"])
    first = ids(grammar.allowed())
    assert yes in first and not {*EOS} & {*first}
    for _ in range(3):
        grammar.accept(yes)
        assert ids(grammar.allowed()) == sorted(EOS)
        grammar.accept(2)
        grammar.rollback(1)
        assert ids(grammar.allowed()) == sorted(EOS)
        for end in (*EOS, 2):
            grammar.accept(end)
            assert ids(grammar.allowed()) == sorted(EOS)
        grammar.rollback(2)
        assert ids(grammar.allowed()) == sorted(EOS)
        grammar.rollback(2)
        assert ids(grammar.allowed()) == first

        grammar.accept(no)
        assert "token" in grammar.error
        grammar.accept(yes)
        assert ids(grammar.allowed()) == sorted(EOS)
        grammar.rollback(1)
        assert "token" in grammar.error and ids(grammar.allowed()) == sorted(EOS)
        grammar.rollback(1)
        assert grammar.error == "" and ids(grammar.allowed()) == first
    with pytest.raises(ValueError, match="from 0 to 0"):
        grammar.rollback(1)


@pytest.mark.parametrize("form", FORMS)
def test_going_back_is_exact(grammars, closing, form):
    """After any tokens are taken back and told again, the masks are those of the first time: at random places, over
    lexemes half done, and over the end.

    Mutation: `TokenGrammar.rollback` goes back one token less; `_fed` is not lowered.
    """
    kind, value, _ = FORMS[form]
    rng = random.Random(f"back {form}")
    tokens = [*write(grammar_of(grammars, kind, value), rng, closing), 2, 2]
    grammar = grammar_of(grammars, kind, value)
    masks = [grammar.allowed()]
    for token in tokens:
        grammar.accept(token)
        masks.append(grammar.allowed())
    at = len(tokens)
    for _ in range(40):
        back = rng.randint(0, at)
        grammar.rollback(back)
        at -= back
        assert (grammar.allowed() == masks[at]).all()
        for token in tokens[at : at + rng.randint(0, 12)]:
            grammar.accept(token)
            at += 1
            if rng.random() < 0.5:  # masks are not asked for after every token
                assert (grammar.allowed() == masks[at]).all()
        assert (grammar.allowed() == masks[at]).all()


def test_samples_of_one_grammar_know_nothing_of_each_other(grammars, tokenizer):
    """Three samples of one request, and a later request of the same form, which is compiled no second time.

    Mutation: `TokenGrammar` uses `compiled` itself and no `deep_copy` of it; `_Cache.get` finds nothing.
    """
    spec = GrammarSpec("choice", '["left", "right"]')
    one, two, three = grammars.compile(spec, 3).result(timeout=240)
    one.accept(tokenizer.encode("left").ids[0])
    two.accept(tokenizer.encode("right").ids[0])
    again = grammars.compile(spec)
    assert again.done()
    (four,) = again.result()
    assert ids(one.allowed()) == ids(two.allowed()) == sorted(EOS)
    assert ids(three.allowed()) == ids(four.allowed()) != sorted(EOS)


# ---- masks


def test_a_step_s_masks_are_those_of_its_rows(grammars, closing):
    """All at once and one by one give the same, in the rows that are named; other rows stay as they are. So it does
    while slow grammars are looked for.

    Mutation: `Grammars.fill` mixes up `rows`; `_compute` leaves out those after the first while it is `_watching`.
    """
    rng = random.Random(7)
    followed = []
    for kind, value, _ in [*FORMS.values()] * 3:
        grammar = grammar_of(grammars, kind, value)
        for token in write(grammar_of(grammars, kind, value), rng, closing)[: rng.randint(0, 6)]:
            grammar.accept(token)
        followed.append(grammar)
    followed[3].accept(2)
    followed[4].accept(VOCABULARY - 1)
    rows = rng.sample(range(40), len(followed))
    for watching in (0, 1):
        grammars._watching = watching
        masks = np.full((40, VOCABULARY // 32), -1, np.int32)
        grammars.fill(followed, masks, rows)
        for grammar, row in zip(followed, rows, strict=True):
            assert (masks[row] == grammar.allowed()).all()
        assert (masks[[row for row in range(40) if row not in rows]] == -1).all()
    with pytest.raises(ValueError, match="1536 int32"):
        grammars.fill(followed[:1], np.zeros((1, 1535), np.int32), [0])
    with pytest.raises(ValueError, match="1536 int32"):
        grammars.fill(followed[:1], np.zeros((VOCABULARY // 32, 2), np.int32).T, [0])


@pytest.mark.parametrize("vocabulary", [VOCABULARY + 77, VOCABULARY - 152])
def test_tokens_that_are_none_are_never_allowed(tokenizer, vocabulary):
    """A model may have more logits than its tokenizer has tokens, or fewer; and grammars can ask for special tokens by
    name or number. None of these is allowed; where nothing else is left, the sample has an error and ends. Tokens that
    were added and are not special can be asked for.

    Mutation: `Grammars.fill` leaves out `_text`; `text` has all ids up to `size`; the masks are as wide
    as the tokenizer's.
    """
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([AddedToken("<tool_call>", special=False)])
    made = Grammars(extended, vocabulary, EOS, seconds=5)
    special = set(range(17)) - {*EOS}
    for kind, value in (("grammar", "start: <[0-49100]>"), ("grammar", "start: <[*]>"), ("regex", "(?s:.*)")):
        grammar = grammar_of(made, kind, value)
        bits = grammar.allowed()
        assert bits.shape == (-(-vocabulary // 32),)
        allowed = set(ids(bits))
        assert not allowed & special and max(allowed) < min(vocabulary, VOCABULARY + 1)
        assert len(allowed) > 40000
    grammar = grammar_of(made, "grammar", "start: <|im_start|>")
    assert ids(grammar.allowed()) == sorted(EOS) and "not generated" in grammar.error
    grammar = grammar_of(made, "grammar", 'start: <tool_call> "x"')
    assert ids(grammar.allowed()) == ([VOCABULARY] if vocabulary > VOCABULARY else sorted(EOS))
    made.close()


def test_a_grammar_that_is_slow_token_after_token_ends(grammars, tokenizer):
    """Everybody's step waits for masks: a few slow ones are borne, and then its sample ends, also after going back.
    Others are untouched.

    Mutation: `TokenGrammar.took` counts nothing; `rollback` forgets `_strikes`.
    """
    slow, other = grammars.compile(GrammarSpec("choice", '["one", "two"]'), 2).result(timeout=240)
    for _ in range(_MAX_STRIKES - 1):
        slow.took(1.0)
    slow.accept(tokenizer.encode("one").ids[0])
    assert slow.error == ""
    slow.rollback(1)
    slow.took(1.0)
    assert "too long" in slow.error and ids(slow.allowed()) == sorted(EOS)
    slow.accept(2)
    slow.rollback(1)
    assert "too long" in slow.error and ids(slow.allowed()) == sorted(EOS)
    assert other.error == "" and len(ids(other.allowed())) > 3


def test_masks_of_bytes_that_must_follow_are_cheap(grammars, tokenizer):
    """A million characters without a choice are not worked out ahead: the mask shows the tokens that can begin them.

    Mutation: `_OPTIONS` has no `no_forcing`, or comes before the grammar, which then says otherwise.
    """
    options = '%llguidance {"no_forcing": false}\n'
    for kind, value in (("regex", "[xy](a{1000}){1000}"), ("grammar", options + "start: /[xy](a{1000}){1000}/")):
        grammar = grammar_of(grammars, kind, value)
        grammar.accept(tokenizer.encode("x").ids[0])
        allowed = [tokenizer.decode([token]) for token in ids(grammar.allowed())]
        assert {*"".join(allowed)} == {"a"} and len(allowed) > 1


# ---- what the API process checks


CHECKED = {
    "kind": [GrammarSpec("pickle", "x")],
    "json_schema must have at most": [
        GrammarSpec("json_schema", json.dumps({"enum": [f"{i:09}" for i in range(9999)]}))
    ],
    "regex must have at most": [GrammarSpec("regex", "a" * 65537), GrammarSpec("regex", "é" * 33000)],
    "grammar must have at most": [GrammarSpec("grammar", "start: " + '"a" | ' * 20000)],
    "choice must be a list of 1 to 1024": [
        GrammarSpec("choice", json.dumps([str(i) for i in range(1025)])),
        GrammarSpec("choice", "[]"),
        GrammarSpec("choice", '"yes"'),
    ],
    "choice must have at most": [GrammarSpec("choice", json.dumps([f"{i:09}" for i in range(100_000)]))],
    "choice must hold strings": [GrammarSpec("choice", '["a", 1]'), GrammarSpec("choice", json.dumps(["x" * 4097]))],
    "must be JSON": [
        GrammarSpec("json_schema", '{"type": "object"'),
        GrammarSpec("json_schema", '{"minimum": NaN}'),
        GrammarSpec("json_schema", ""),
        GrammarSpec("choice", "yes"),
        GrammarSpec("json_schema", '{"minimum": ' + "1" * 5000 + "}"),
    ],
    "must be a JSON object": [GrammarSpec("json_schema", "[]"), GrammarSpec("json_schema", "true")],
    "nested": [
        GrammarSpec("json_schema", '{"items":' * 65 + "{}" + "}" * 65),
        GrammarSpec("json_schema", '{"items":' * 7000 + "{}"),
        GrammarSpec("json_schema", "[" * 65000),
        GrammarSpec("json_schema", '{"a":' + "[" * 700 + "]" * 700 + "}"),
    ],
    "not be empty": [GrammarSpec("regex"), GrammarSpec("grammar")],
    "half a character": [GrammarSpec("regex", "a\ud800b")],
    "triggers": [
        GrammarSpec("structural_tag", '{"structures": []}'),
        GrammarSpec("structural_tag", '{"triggers": [""]}'),
    ],
    "structures": [
        GrammarSpec("structural_tag", '{"triggers": ["<"], "structures": []}'),
        GrammarSpec("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "<a", "end": ""}]}'),
        GrammarSpec("structural_tag", '{"triggers": ["<"], "structures": ["x"]}'),
    ],
}


@pytest.mark.parametrize("words", CHECKED)
def test_what_is_too_large_is_refused_at_once(words):
    """By the API process, which has no tokenizer: sizes, depths, numbers of things; and what is certainly wrong. The
    text says which of them, and is short.

    Mutation: the comparison with `max_bytes`, `max_choices`, `MOST_CHOICE` or `max_depth` in `check` is left out, or
    RecursionError is not caught in `_parsed`.
    """
    for spec in CHECKED[words]:
        with pytest.raises(ValueError, match=words) as refused:
            check(spec)
        assert len(str(refused.value)) < 250


def test_what_is_within_the_limits_passes():
    """At each limit, not one below it; and what was checked comes over the wire as it was.

    Mutation: `max_depth` counts one too many; a field of `GrammarSpec` is left out on the wire.
    """
    for spec in (
        GrammarSpec("json_object"),
        GrammarSpec("json_schema", '{"items":' * 63 + "{}" + "}" * 63),
        GrammarSpec("regex", "a" * 65536),
        GrammarSpec("choice", json.dumps([str(i) for i in range(1023)] + ["x" * 4096])),
        GrammarSpec("grammar", "start: /é/"),
    ):
        check(spec)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=GrammarSpec) == spec


# ---- grammars of strangers


REFUSED = [
    ("json_schema", {"type": "strin"}, "json_schema cannot be served: Invalid type: strin"),
    ("json_schema", {"not": {"type": "string"}}, 'json_schema cannot be served: Unimplemented keys: ["not"]'),
    ("json_schema", {"$ref": "http://localhost/x.json"}, "does not fetch"),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text has this form"),
    ("json_schema", {"x-guidance": 7}, "json_schema cannot be served"),
    ("regex", "a(", "regex cannot be served: unclosed group"),
    ("regex", r"(a)\1", "regex cannot be served: backreferences are not supported"),
    ("regex", "(" * 300 + ")" * 300, "nested parentheses"),
    ("grammar", "start: foo", 'unknown name: "foo"'),
    ("grammar", "root ::= foo", "Rule 'foo' not found"),
    ("grammar", "start: T\nT: /a+/ & /[ab]+/", "operators & and ~"),
    ("grammar", "start: T\nT: ~/b/", "operators & and ~"),
    ("grammar", "start: /[a-z&&[^b]]/", "cannot be intersected"),
    ("structural_tag", {"triggers": ["<"], "structures": [{"begin": "[", "schema": {}, "end": ""}]}, "a trigger"),
]


@pytest.mark.parametrize(("kind", "value", "words"), REFUSED, ids=range(len(REFUSED)))
def test_errors_are_for_those_who_wrote_it(grammars, kind, value, words):
    """What llguidance refuses is told in its words, without those of the grammar it was put into.

    Mutation: `explained` returns the error as it is; `_without_operators` leaves `&` alone (and never comes back).
    """
    said = refusal(grammars, kind, value)
    assert words in said
    assert "no_forcing" not in said and "start: /" not in said.replace(str(value), "") and len(said) < 1100


CHAIN = {"$ref": "#/$defs/4999", "$defs": {str(i): {"$ref": f"#/$defs/{i - 1}"} for i in range(1, 5000)} | {"0": {}}}
RULES = "start: t3000\n" + "\n".join(f't{i}: t{i - 1} "b"' for i in range(1, 3001)) + '\nt0: "a"'
COUNT = {"type": "integer", "multipleOf": 999983}
# What each needs is more than it may have of memory, or of the stack: no machine is so fast that it is served.
BOMBS = {
    "a product of automata": ("json_schema", {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(100)]}),
    "a million states": ("json_schema", COUNT),
    "a million states in a tag": (
        "structural_tag",
        {"triggers": ["<"], "structures": [{"begin": "<", "schema": COUNT, "end": ">"}]},
    ),
    "options": ("regex", ".?" * 4096),
    "references without end": ("json_schema", CHAIN),
    "rules without end": ("grammar", RULES),
}


@pytest.fixture(scope="module")
def strict(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, VOCABULARY, EOS, seconds=0.4, compilers=1)
    yield made
    made.close()


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_end_as_errors(strict, bomb):
    """What would take minutes, gigabytes or more stack than there is, is refused when its time or its memory is up,
    whichever is first on this machine; and the thread that waited for it serves the next one: no process of ours is
    the worse for it.

    Mutation: `Trial.of` is passed by, and the interpreter ends; `_tried` takes an end without an answer for a grammar.
    """
    kind, value = BOMBS[bomb]
    assert refusal(strict, kind, value) in (SLOW, LARGE)
    assert len(ids(grammar_of(strict, "choice", ["next", bomb]).allowed())) > 1


def spin(*_: Any) -> list[Any]:
    while True:
        pass


def wait(seconds: float) -> Callable[..., list[Any]]:
    def waits(*_: Any) -> list[Any]:
        time.sleep(seconds)
        return ["", "done", 0]

    return waits


@pytest.mark.parametrize(
    ("compiles", "seconds", "patience", "said"),
    [
        (spin, 0.1, 6000, SLOW),
        (wait(0.3), 0.1, 6000, ""),
        (wait(3600), 0.1, 10, SLOW),
    ],
    ids=["computes", "waits for a processor", "hangs"],
)
def test_the_time_of_a_grammar_is_that_of_a_processor(monkeypatch, compiles, seconds, patience, said):
    """One that computes for longer than it may is refused; one that has to wait for others, as on a busy machine, is
    not, unless it hangs.

    Mutation: `_tried` waits for `seconds` by the clock; it sets no timer; it waits without an end.
    """
    monkeypatch.setattr(grammar_trial, "_compiled", compiles)
    monkeypatch.setattr(grammar_trial, "_WALL_TIMES_CPU", patience)
    assert grammar_trial._tried(None, "regex", "a", seconds)[:2] == [said, "" if said else "done"]


def test_a_trial_ends_when_its_time_is_up():
    """With all the memory of the machine, a million states take more than a hundredth of a second anywhere; and the
    next grammar has time of its own.

    Mutation: `_tried` sets no timer; the timer is that of the trial, and not of its fork.
    """
    trial = Trial(0.01, 1 << 40, SMALL)
    for _ in range(3):
        with pytest.raises(ValueError, match=SLOW):
            trial.of("json_schema", json.dumps(COUNT))
    trial.close()


def test_memory_has_a_limit(tokenizer):
    """A grammar that needs more than it may have is refused for that, before its time is up.

    Mutation: `_lower` is not called with RLIMIT_AS.
    """
    trial = Trial(30.0, 32 << 20, SMALL)
    with pytest.raises(ValueError, match=LARGE):
        trial.of("regex", r"\w?" * 2700)
    grammar, size = trial.of("regex", "ab*c")
    assert grammar == lark("regex", "ab*c") and 0 <= size < 8 << 20
    trial.close()


def test_a_trial_that_was_killed_is_begun_again():
    """As by somebody who looks for memory: the next grammar is tried in a new one.

    Mutation: `Trial.of` asks once; `_ask` does not `close` after a failure.
    """
    trial = Trial(30.0, 256 << 20, SMALL)
    first = trial.start()
    first.kill()
    first.wait()
    assert trial.of("choice", '["a"]')[0]
    assert trial.start() is not first
    trial.close()


def test_trials_end_with_the_engine():
    """The engine is killed while a trial is busy: the trial process and its fork are gone too.

    Mutation: `_die_with` is not called, by `main` or in `_tried`, or does not look at its parent.
    """
    code = """
import sys
from sapwood.server.process.grammar_trial import Trial, Vocabulary
trial = Trial(600.0, 1 << 40, Vocabulary(300, [0], {}))
trial.of("choice", '["a"]')
print(trial.start().pid, flush=True)
trial.of("json_schema", '{"type": "integer", "multipleOf": 999983}')
"""
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    trial = int(engine.stdout.readline())
    fork = 0
    while not fork:
        with open(f"/proc/{trial}/task/{trial}/children") as file:
            fork = int((file.read().split() or ["0"])[0])
    watched = [os.pidfd_open(pid) for pid in (trial, fork)]
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    try:
        for pidfd in watched:
            assert select.select([pidfd], [], [], 240)[0]
    finally:
        for pidfd in watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_grammars_are_compiled_beside_the_steps(grammars, closing):
    """Eight requests bring grammars while a thread makes the masks of others: all are served, and every text is right.

    Mutation: `Grammars.fill` makes masks with the matcher that `_compiled` keeps for others.
    """
    followed = [grammar_of(grammars, "json_schema", PERSON) for _ in range(8)]
    masks = np.empty((8, VOCABULARY // 32), np.int32)
    rng, stop, steps, errors = random.Random(3), threading.Event(), [0], []

    def step() -> None:
        while not stop.is_set() or not steps[0]:
            grammars.fill(followed, masks, range(8))
            for grammar, bits in zip(followed, masks, strict=True):
                grammar.accept(rng.choice(ids(bits)))
            errors.extend(grammar.error for grammar in followed if grammar.error)
            steps[0] += 1

    stepping = threading.Thread(target=step)
    stepping.start()
    futures = [
        grammars.compile(GrammarSpec("json_schema", json.dumps(PERSON | {"title": str(i), "maxProperties": 4})))
        for i in range(8)
    ]
    made = [future.result(timeout=240)[0] for future in futures]
    stop.set()
    stepping.join()
    assert errors == [] and steps[0] > 0
    assert len({tuple(ids(grammar.allowed())) for grammar in made}) == 1


def test_only_so_many_wait():
    """Nobody compiles here: those that would wait behind too many others are told so, and the rest wait.

    Mutation: `compile` has no bound on `_jobs`.
    """
    made = Grammars(default_model() / "tokenizer.json", VOCABULARY, EOS, compilers=0)
    futures = [made.compile(GrammarSpec("regex", f"a{i}")) for i in range(_MAX_WAITING + 1)]
    assert [future.done() for future in futures] == [False] * _MAX_WAITING + [True]
    with pytest.raises(ValueError, match="try again later"):
        futures[-1].result()


def test_what_is_kept_is_bounded():
    """By number and by memory, and what was used last stays.

    Mutation: `_Cache.put` compares with neither bound; `get` does not `move_to_end`.
    """
    cache, matcher = _Cache(), object()
    specs = [GrammarSpec("regex", str(i)) for i in range(_MAX_CACHED + 2)]
    for spec in specs[:_MAX_CACHED]:
        cache.put(spec, matcher, 1000)
    assert cache.get(specs[0]) is matcher
    cache.put(specs[_MAX_CACHED], matcher, 1000)
    assert cache.get(specs[1]) is None and cache.get(specs[0]) is matcher
    cache.put(specs[_MAX_CACHED], matcher, 2000)  # two threads have compiled the same
    assert cache._bytes == 1000 * _MAX_CACHED + 1000
    cache.put(specs[_MAX_CACHED + 1], matcher, 255 << 20)
    assert cache._bytes == 1000 * _MAX_CACHED + (255 << 20)
    cache.put(specs[1], matcher, 255 << 20)
    assert [spec for spec in specs if cache.get(spec) is not None] == [specs[1]]


def test_a_model_without_what_it_takes_says_so(tokenizer):
    """A tokenizer whose tokens are no bytes, or a model that ends nothing: the engine starts, and requests are told.

    Mutation: `Grammars` does not catch what `LLTokenizer` raises; `compile` leaves out `_trouble`.
    """
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    assert "not possible with this model" in refusal(Grammars(words, 3, [2]), "regex", "a")
    assert "no token that ends" in refusal(Grammars(words, 3, []), "regex", "a")
