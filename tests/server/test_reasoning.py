"""Reasoning is told apart from the answer, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.server.text.reasoning import ReasoningSplitter, opens_reasoning

PARTS = ["<think>", "</think>", "<thi", "nk>", "</", "<", "\n", " ", "so", "é"]


def split(pieces: Iterable[str], *, begins_inside: bool, **tags: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(begins_inside=begins_inside, **tags)
    told = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in told), "".join(content for _, content in told)


@pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "\nHm.\n", "\n\nYes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.\n", "\n\nYes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("Hm, still", True, "Hm, still", ""),
        ("<think>Hm, still", False, "Hm, still", ""),
        ("<think>Hm</thi", False, "Hm</thi", ""),
        (" \n<thi", True, " \n<thi", ""),
        (" \n<thi", False, "", " \n<thi"),
        ("\n Yes. \n", False, "", "\n Yes. \n"),
        ("Yes </think> no", False, "", "Yes </think> no"),
        ("Write <think> first", False, "", "Write <think> first"),
        ("Hm</think>a <think>b</think>", True, "Hm", "a <think>b</think>"),
        ("", True, "", ""),
    ],
)
def test_what_is_reasoning_and_what_is_content(text, begins_inside, reasoning, content):
    """As vLLM's parsers have it: whitespace on both sides of the closing tag stays where it is, that before the opening
    one goes; a text that began inside and has no end is all reasoning; a text without tags is all content.

    Mutation: `ReasoningSplitter._begin` keeps `_spaces` before a tag; `finish` does not look at `_begins_inside`.
    """
    assert split([text], begins_inside=begins_inside) == (reasoning, content)
    assert split(text, begins_inside=begins_inside) == (reasoning, content)


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.integers(0, 60)), st.booleans())
@settings(max_examples=200)
def test_cuts_do_not_matter(parts, cuts, begins_inside):
    """The same text in other pieces is the same reasoning and the same content.

    Mutation: `half_mark` returns the text's length, so half tags are given away.
    """
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert split(pieces, begins_inside=begins_inside) == split([text], begins_inside=begins_inside)


def test_text_comes_as_soon_as_it_is_certain():
    """Only what may be the beginning of a tag waits.

    Mutation: `ReasoningSplitter._inside` holds the whole text back until the tag has come.
    """
    splitter = ReasoningSplitter(begins_inside=True)
    assert [splitter.push(piece) for piece in ("Hm", " a < b", " <", "/", "x", "</think>", "Yes <think")] == [
        ("Hm", ""),
        (" a < b", ""),
        (" ", ""),
        ("", ""),
        ("</x", ""),
        ("", ""),
        ("", "Yes <think"),
    ]


def test_other_tags():
    """Tags are given by those who know the model; a mark that could be taken for a space is refused.

    Mutation: `_closing` is always `CLOSING`.
    """
    tags = {"opening": "[THINK]", "closing": "[/THINK]"}
    assert split("[THINK]a</think>[/THINK]b", begins_inside=False, **tags) == ("a</think>", "b")
    with pytest.raises(ValueError, match="closing must be a tag without spaces around it, got ' '"):
        ReasoningSplitter(begins_inside=False, closing=" ")


def test_whether_a_prompt_ends_inside():
    """Templates end with the opening tag and a line break; one that has closed it again does not end inside.

    Mutation: `opens_reasoning` looks for the tag anywhere in the prompt.
    """
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("<|im_start|>assistant\n")
