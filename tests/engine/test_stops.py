"""Text as tokens come: characters and stop strings cut anywhere, by every kind of tokenizer."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sapwood.engine.detokenize import Detokenizer
from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import TextStream, _Stops, bad_word_tokens

TEXTS = [
    "Hello world, this is a text. It ends here.",
    "日本語のテキスト、そして emoji 👩‍👩‍👧‍👦 und Umlaute: äöü ß. É è.",
    "a stop\nstop STOP sto p\n\nUser: no\n\nAssistant: yes ###\n",
]


def byte_level() -> Tokenizer:
    """As GPT-2's: pieces of bytes, half characters among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As Llama 2's: spaces as ▁, one before the first word that is dropped again, bytes for characters it lacks."""
    words = ["▁Hello", "▁world", "▁a", "▁stop", "stop", "▁", "▁▁", ".", ",", "H", "e", "l", "o", "s", "t", "p", "\n"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + words:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"bytes": byte_level(), "pieces": sentence_pieces()}
BYTES = TOKENIZERS["bytes"]
each_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(tokenizer=BYTES, tail=(), **asked) -> TextStream:
    return TextStream(Detokenizer(tokenizer), SamplingParams(max_tokens=None, **asked), tail)


def single_bytes(text: str) -> list[int]:
    """A token for each byte: every character beyond ASCII is cut."""
    table = dict(zip(range(256), byte_characters(), strict=True))
    return [BYTES.token_to_id(table[byte]) for byte in text.encode()]


def byte_characters() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def pushed(text: TextStream, tokens: list[int]) -> list[str]:
    return [text.push(token) for token in tokens]


def test_characters_cut_into_bytes():
    """A character comes when its last byte does; what is left half at the end is shown as such.

    Mutation: `_Bytes.push` decodes each token by itself; `finish` forgets the rest.
    """
    text = stream()
    assert pushed(text, single_bytes("é👍x")) == ["", "é", "", "", "", "👍", "x"]
    assert text.finish() == "" and text.text == "é👍x"
    text = stream()
    assert pushed(text, single_bytes("ab👍")[:-1]) == ["a", "b", "", "", ""]
    assert text.finish() == "\ufffd" and text.text == "ab\ufffd" and text.tokens == 5


@pytest.mark.parametrize("wrap", [False, True])
def test_a_real_text(wrap):
    """Whatever the text, the pieces together are what the tokenizer makes of all tokens at once; with one of
    transformers' too.

    Mutation: `_BYTES` has two bytes exchanged; the table of `_ByteTable` skips added tokens.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BYTES) if wrap else BYTES
    for text in TEXTS:
        tokens = BYTES.encode(text).ids
        made = stream(tokenizer)
        assert "".join(pushed(made, tokens)) + made.finish() == made.text == text
        assert made.tokens == len(tokens)


def test_the_prompt_decides_about_the_first_space():
    """A piece with a space before it keeps it behind a prompt, and loses it at the beginning of a text.

    Mutation: `prompt_tail` is not looked at.
    """
    pieces = TOKENIZERS["pieces"]
    hello, world = pieces.token_to_id("▁Hello"), pieces.token_to_id("▁world")
    assert pushed(stream(pieces), [hello, world]) == ["Hello", " world"]
    assert pushed(stream(pieces, tail=[hello] * 20), [world, hello]) == [" world", " Hello"]
    assert pushed(stream(pieces, tail=[1]), [world]) == ["world"]


def first_stop(text: str, stops: list[str], after: int) -> tuple[int, str] | None:
    """Where the stop string ends that is complete first, beyond `after`; the longest of those."""
    for end in range(after + 1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(found, key=len)
    return None


def some_tokens(kind: str, rng: random.Random) -> list[int]:
    """A text, or pieces of several and of characters cut into bytes, or now and then bytes that are none."""
    if kind == "bytes":
        return rng.choice(
            [BYTES.encode(rng.choice(TEXTS)).ids, single_bytes(rng.choice(TEXTS)), rng.choices(range(300), k=30)]
        )
    tokens: list[int] = []
    for _ in range(20):
        if rng.random() < 0.7:
            tokens.append(rng.randrange(259, TOKENIZERS[kind].get_vocab_size()))
        else:
            tokens += [3 + byte for byte in rng.choice(["é", "語", "👍", "x"]).encode()]
        if rng.random() < 0.02:
            tokens.append(3 + rng.randrange(128, 256))
    return tokens


@each_tokenizer
def test_any_tokens_and_any_stops(kind):
    """Random tokens, random stop strings, with and without the string itself in the text, `min_tokens`: the text is cut
    where the first stop string is complete, nothing beyond is told, and the tokens are those that were needed.

    Mutation: `_longest` is a character shorter; `find` prefers the first in the list, or begins behind `begun`, which
    is the shortest; `_take` looks at `firsts` alone; the text is held back with `include_stop_str_in_output` too, or
    not at all without it; `_Window` begins anew without context, or with `_sent` 0.
    """
    tokenizer = TOKENIZERS[kind]
    rng = random.Random(kind)
    found = 0
    for _ in range(400):
        tokens = some_tokens(kind, rng)
        plain = stream(tokenizer)
        known = [0]  # how long the text is after each token
        for token in tokens:
            plain.push(token)
            known.append(len(plain.text))
        text = plain.text
        if "\ufffd" not in tokenizer.decode(tokens):
            assert text == tokenizer.decode(tokens)

        starts = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(4))]
        stops = [text[start : start + rng.randrange(1, 6)] or "x" for start in starts] + [rng.choice(["oo", "zz", " "])]
        least, include = rng.choice([0, 0, 5]), rng.random() < 0.3
        made = stream(tokenizer, stop=stops, min_tokens=least, include_stop_str_in_output=include)
        told = "".join(pushed(made, tokens))
        match first_stop(text, stops, known[least]):
            case None:
                assert (
                    told == text[: len(text) if include else len(told)]
                    and made.stopped is None
                    and made.tokens == len(tokens)
                )
                assert told + made.finish() == made.text == text + plain.finish()
            case end, string:
                found += 1
                assert told == made.text == text[: end if include else end - len(string)] and made.stopped == string
                assert made.tokens == next(i for i, length in enumerate(known) if length >= end)
                assert made.push(tokens[0]) == made.finish() == "", "nothing comes after a stop string"
    assert 100 < found < 390


def test_stop_strings_cut_by_tokens():
    """What may become a stop string is held back, and comes when it does not.

    Mutation: `_take` returns all of what is held.
    """
    text = stream(stop=["###", "\n\nUser:"])
    assert pushed(text, single_bytes("a#")) == ["a", ""]
    assert pushed(text, single_bytes("#b\n")) == ["", "##b", ""]
    assert pushed(text, single_bytes("\nUs")) == ["", "", ""]
    assert pushed(text, single_bytes("es\n##")) == ["", "\n\nUses", "", "\n", ""]
    assert pushed(text, single_bytes("##")) == ["", ""]
    assert (text.stopped, text.text, text.tokens) == ("###", "a##b\n\nUses\n", 14)


def test_what_is_held_comes_at_the_end():
    """A text that ends in half a stop string, or half a character, loses nothing.

    Mutation: `finish` without `_held`.
    """
    text = stream(stop="stop!")
    assert "".join(pushed(text, single_bytes("no sto"))) == "no "
    assert text.finish() == "sto" and text.text == "no sto" and text.stopped is None


@pytest.mark.parametrize("include, expected", [(False, ""), (True, "stop")])
def test_a_stop_at_the_very_beginning(include, expected):
    """The first token may be all there is to it.

    Mutation: `find` looks from the second character on.
    """
    text = stream(stop=["stop"], include_stop_str_in_output=include)
    told = pushed(text, BYTES.encode("stop now").ids)
    assert text.text == "".join(told) == expected and text.stopped == "stop"
    one = stream(stop="é")
    assert pushed(one, single_bytes("éa")) == ["", "", ""] and one.stopped == "é" and one.tokens == 2


def test_stops_of_unicode_and_overlaps():
    """Stop strings of characters that are cut, and ones that overlap: the first complete wins.

    Mutation: `find` takes the string that begins first.
    """
    for text, stops, stopped, before in [
        ("aab👍👎x", ["👍👎"], "👍👎", "aab"),
        ("ababac", ["abac"], "abac", "ab"),
        ("aaab", ["aab"], "aab", "a"),
        ("xabcx", ["abcx", "bc"], "bc", "xa"),
        ("xabcx", ["c", "abc"], "abc", "x"),
        ("日本日本語", ["日本語"], "日本語", "日本"),
    ]:
        made = stream(stop=stops)
        pushed(made, single_bytes(text))
        assert (made.stopped, made.text) == (stopped, before)
        whole = stream(stop=stops)
        pushed(whole, BYTES.encode(text).ids)
        assert (whole.stopped, whole.text) == (stopped, before), "however it is cut"


def test_special_tokens_and_the_token_that_ends():
    """Special tokens are in the text only if asked for. The token that ended it counts and is left out of the text,
    like a stop string, unless that is wanted.

    Mutation: `skip_special_tokens` is not passed on; `finish` pushes `stop_token` always.
    """
    end, x = BYTES.token_to_id("<|end|>"), single_bytes("x")[0]
    assert pushed(stream(), [x, end, x]) == ["x", "", "x"]
    assert pushed(stream(skip_special_tokens=False), [x, end, x]) == ["x", "<|end|>", "x"]
    for asked, told in [
        ({}, ""),
        ({"skip_special_tokens": False}, ""),
        ({"include_stop_str_in_output": True}, ""),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "<|end|>"),
    ]:
        text = stream(**asked)
        text.push(x)
        assert text.finish(stop_token=end) == told and text.tokens == 2 and text.text == "x" + told


def test_no_stop_before_min_tokens():
    """A stop string that is complete within the first `min_tokens` tokens is text like any other.

    Mutation: `_least` is not looked at.
    """
    text = stream(stop="a", min_tokens=2)
    assert pushed(text, single_bytes("aaba")) == ["a", "a", "b", ""]
    assert text.stopped == "a" and text.tokens == 4


def test_without_text():
    """With `detokenize=False` tokens are only counted, and no tokenizer is needed.

    Mutation: `_decoding` is made all the same.
    """
    text = TextStream(None, SamplingParams(detokenize=False), [1, 2])
    assert pushed(text, [5, 6]) == ["", ""] and text.finish(stop_token=7) == "" and text.tokens == 3


@each_tokenizer
def test_nonsense_without_end_costs_no_more_and_more(kind):
    """Thousands of bytes that are no characters, or of tokens without text, are not decoded again and again.

    Mutation: `_LONGEST` is not looked at.
    """
    tokenizer = TOKENIZERS[kind]
    byte = tokenizer.token_to_id("<0xFF>") if kind == "pieces" else BYTES.token_to_id(byte_characters()[0xFF])
    special = tokenizer.token_to_id("</s>") if kind == "pieces" else tokenizer.token_to_id("<|end|>")
    for token, told in ((byte, "\ufffd" * 1000), (special, "")):
        text = stream(tokenizer)
        longest = 0
        for _ in range(1000):
            text.push(token)
            longest = max(longest, len(getattr(text._decoding, "_window", ())))
        text.finish()
        assert text.text == told and longest < 200


STOPS = [
    ("a" * 1023 + "b", "a" * 5000),
    ("a" * 511 + "b" + "a" * 511, ("a" * 511 + "b" + "a" * 300 + "c") * 6),
    ("ab" * 511 + "c", "ab" * 3000),
    ("a" * 500 + "b" * 500 + "c", ("a" * 600 + "b" * 499) * 5),
]


@pytest.mark.parametrize(("stop", "text"), STOPS, ids=range(len(STOPS)))
def test_S19_stop_strings_cost_what_a_text_is_long(stop, text):
    """Stop strings as long as they may be, that almost come again and again: what is looked up grows with the text, and
    not with the stop strings too.

    Mutation: `_Stops.find` keeps the window in `begun` where nothing begins.
    """
    stops = _Stops([stop, *(stop[n:] + "x" for n in range(0, 310, 10))])
    looked = 0

    class Counted(set[str]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(key)

    stops._begins = Counted(stops._begins)
    for char in text:
        assert stops.find(char) is None
        assert len(stops.begun) <= len(stop)
    assert looked <= 3 * len(text)


def test_bad_words_as_tokens():
    """Each word as at the beginning and behind a space; too long a one is refused by name.

    Mutation: the space is left out; the bound is not looked at.
    """
    words = bad_word_tokens(BYTES, SamplingParams(bad_words=["stop", " world"]))
    texts = {BYTES.decode(list(word)) for word in words}
    assert texts == {"stop", " stop", "world", " world"}
    with pytest.raises(ValueError, match="bad_words must have at most 8 tokens, got 'zzzzzzzzzz' of 10"):
        bad_word_tokens(PreTrainedTokenizerFast(tokenizer_object=BYTES), SamplingParams(bad_words=["z" * 10]))
    assert bad_word_tokens(BYTES, SamplingParams()) == ()
