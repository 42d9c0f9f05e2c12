"""Regular expressions of strangers over names of modules: those that are served match what `re` matches, in steps that
grow with the name and no faster; all others are refused."""

from __future__ import annotations

import random
import re

import pytest

from sapwood.engine.lora import name_patterns
from sapwood.engine.lora.name_patterns import Name, Pattern, PatternError

NAMES = [
    f"{head}model.layers.{layer}.{module}"
    for head in ("", "base.", "visual.")
    for layer in (0, 1, 11)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.3.up_proj", "linear_attn.q")
] + [
    "lm_head",
    "model.embed_tokens",
    "model.language_model.layers.3.mlp.gate_proj",
    "q_proj",
    "",
    "model..x",
    "modelXq",
]

# As PEFT's own documentation and tests have them, and as trainers write them into adapter_config.json.
WRITTEN = [
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj",
    r"^model\.layers\.11\.mlp\.down_proj",
    r".*\.(q_proj|v_proj)$",
    r".*(q|v)_proj",
    r"model.layers.\d+.self_attn.q_proj",
    r".*.(SelfAttention|self_attn|DenseReluDense).(k_proj|q_proj|v_proj|wo|wi)$",
    ".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"layers.[01].*_proj",
    r"(?:q|o)_proj",
    r".*\.layers\.(0|1|[2-9]|1[0-5])\.mlp\..*",
    r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(model\.language_model(?=\.).*\.(in_proj|out_proj|up_proj|down_proj|gate_proj|q_proj))$",
    r"^(?!.*visual).*(?:o_proj|up_proj|v_proj|down_proj|q_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp|ffn).*?(?:q_proj|gate_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj|down_proj)))",
    r"(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|mlp).*?\.(?:(?:q_proj|up_proj|down_proj)))",
    r"language_model(?=\.).*gate_proj",
    r"(?P<what>model|base)\.?\w*\.layers\.\d{1,2}\.[^.]+\.[^.]+",
    r"[^\d]*\.1{2}\..{3,9}proj\Z",
    r"\Amodel\b.*_proj",
    r"",
    r"model\.|lm_head|",
    r"(a|aa|mo)*del\.layers.*",
]


def right(pattern: str, name: str) -> None:
    mine = Pattern(pattern)
    assert mine.matches(Name(name)) == (re.fullmatch(pattern, name) is not None), (pattern, name)
    theirs = re.match(rf"(.*\.)?({pattern})$", name)
    assert mine.matches_end(Name(name)) == (theirs is not None), (pattern, name)


@pytest.mark.parametrize("pattern", WRITTEN)
def test_what_is_written_matches_as_re_says(pattern):
    """The whole name, or what follows one of its dots.

    Mutation: `_Ahead` of the wrong sign; `_Repeat` leaves out `found`; `matches_end` takes every place; `Name.before`
    finds no matches that overlap.
    """
    for name in NAMES:
        right(pattern, name)
    if pattern not in ("", ".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$"):
        found = [name for name in NAMES if Pattern(pattern).matches_end(Name(name))]
        assert 0 < len(found) < len(NAMES), "one that matches nothing, or all, proves nothing"


def any_pattern(rng: random.Random, depth: int = 0, repeats: bool = True) -> str:
    """A random pattern that is served."""
    kind = rng.randrange(9 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[a-b1]", r"[\d.]", r"\W", "1", r"\D"])
    if kind == 1:
        return rng.choice(["ab", "a.b", "b1", "aa", r"a\.a"])
    if kind == 2:
        return rng.choice(["^", "$", r"\b", ""])
    if kind == 3 and repeats:
        one = rng.choice(["a", "b", ".", r"\.", r"\w", "[^.]", "(?:ab|a)", "(a|b)"])
        return one + rng.choice(["*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{2,}", "{,2}", "??"])
    if kind in (4, 5):
        return "".join(any_pattern(rng, depth + 1, repeats) for _ in range(rng.randint(1, 3)))
    if kind == 6:
        parts = "|".join(any_pattern(rng, depth + 1, repeats) for _ in range(rng.randint(1, 3)))
        return rng.choice(["({})", "(?:{})"]).format(parts)
    if kind == 7:
        return rng.choice(["(?={})", "(?!{})"]).format(any_pattern(rng, depth + 1, repeats))
    if not repeats:
        return "a"
    return f"(?:{any_pattern(rng, depth + 1, False)}a)" + rng.choice(["*", "+", "?", "{0,3}"])


def test_random_patterns_match_as_re_says():
    """Whatever is served: also where matches are empty, overlap, or lie inside each other.

    Mutation: `_Either` stops at the first part; `_Repeat` counts `least` turns of `most`; `_word_edges` forgets the
    ends of the name.
    """
    rng = random.Random(5)
    matched = refused = 0
    for _ in range(4000):
        pattern = any_pattern(rng)
        names = ["".join(rng.choice("ab.1_") for _ in range(rng.randrange(8))) for _ in range(4)]
        try:
            Pattern(pattern)
        except PatternError:
            refused += 1
            continue
        for name in names:
            right(pattern, name)
            matched += re.fullmatch(pattern, name) is not None
    assert matched > 1000 and refused < 400


REFUSED = [
    (r"(a+)+", "repeat of what repeats"),
    (r"(a*)*b", "repeat of what repeats"),
    (r"(.*a){25}", "repeat of what repeats"),
    (r"((a{9}){9}){9}", "repeat of what repeats"),
    (r"(?:a(?=b*))*", "repeat of what repeats"),
    (r"(a?){65}", "at most 64"),
    (r"(a?){64}b{1000}", "numbers below 1000"),
    (r"(.)\1", "a backslash may stand before"),
    (r"(?P<a>x)(?P=a)", r"only \(...\), "),
    (r"(?<=a)b", r"only \(...\), "),
    (r"(?i)Q_PROJ", r"only \(...\), "),
    (r"(?>a*)b", r"only \(...\), "),
    (r"(?(1)a|b)", r"only \(...\), "),
    (r"a*+", "a repeat is repeated, or keeps what it has"),
    (r"a**", "a repeat is repeated"),
    (r"*a", "there is nothing to repeat"),
    (r"^*", "there is nothing to repeat"),
    (r"a{2", "must be followed by numbers"),
    (r"a{3,2}", "numbers in order"),
    (r"(a", "the bracket is not closed"),
    (r"a)", "there is no bracket that it closes"),
    (r"[a", "the class of characters is not closed"),
    (r"[b-a]", "a range must go"),
    (r"[a[b]", "the class of characters is not closed"),
    (r"[]", "must have some"),
    (r"\Ba", "a backslash may stand before"),
    (r"\x41", "a backslash may stand before"),
    ("a\\", "a backslash may stand before"),
    ("(" * 33 + ")" * 33, "more than 32 groups in each other"),
    ("(" * 60_000, "more than 32 groups in each other"),
    ("a" * 70_000, "65536 characters"),
]


@pytest.mark.parametrize(("pattern", "why"), REFUSED, ids=[pattern[:20] for pattern, _ in REFUSED])
def test_what_is_refused(pattern, why):
    """What could take long, what needs to remember, and what is no pattern; with the place, and cut short.

    Mutation: `_times` lets repeats be repeated; `_group` takes every mark behind "(?".
    """
    with pytest.raises(PatternError, match=why) as error:
        Pattern(pattern)
    assert len(str(error.value)) < 400


BOMBS = [  # from a name's end to its begin, and the other way
    *("(a|a)*b", "(a|aa)*$b", "(?:a|ab|b)*c", ".*.*.*.*.*.*x", "a?" * 60 + "a" * 60, "(?!.*.*b).*.*c", r"\w*\w*\w*\d"),
    *("b(a|a)*", "b(a?)*", "b(|a)*", "c(?:a|ab|b)*", "x.*.*.*.*.*.*", r"\d\w*\w*\w*", "b(?=.*.*c)(.|a)*", r"b(\w?a?)*"),
]


@pytest.mark.parametrize("pattern", BOMBS, ids=[bomb[:20] for bomb in BOMBS])
def test_S19_a_pattern_takes_steps_by_the_length_of_a_name(pattern, monkeypatch):
    """Patterns with more ways through a name than there is time: a name twice as long takes twice the steps, and there
    are no more of them than characters of one times characters of the other.

    Mutation: `_Repeat` goes on from places where it has been.
    """
    steps = 0
    one, text = name_patterns._One.begins, name_patterns._Text.begins

    def counted(self, name, ends):
        nonlocal steps
        steps += 1
        assert steps < 10**6, "it does not come to an end"
        return (one if isinstance(self, name_patterns._One) else text)(self, name, ends)

    monkeypatch.setattr(name_patterns._One, "begins", counted)
    monkeypatch.setattr(name_patterns._Text, "begins", counted)
    taken = []
    for length in (200, 400, 800):
        steps = 0
        assert not Pattern(pattern).matches(Name("a" * length))
        taken.append(steps)
        assert steps <= len(pattern) * (length + 1)
    assert taken[2] - taken[1] <= 2 * (taken[1] - taken[0]) + len(pattern)
