"""SamplingParams: vLLM's names and defaults, and nothing that is out of bounds gets in."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from sapwood.engine.params import SamplingParams


def test_the_defaults_are_those_scripts_expect():
    """A script written for vLLM gets what it gets there.

    Mutation: `max_tokens` is None by default.
    """
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 1, 0, 0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert (params.detokenize, params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True, True)
    nothing = ("seed", "stop", "stop_token_ids", "bad_words", "logprobs", "prompt_logprobs", "logit_bias")
    assert all(getattr(params, field) is None for field in (*nothing, "allowed_token_ids", "cache_salt"))
    assert not params.include_stop_str_in_output and not params.greedy and params.stops == ()


BOUNDS = {
    "n": ([1, 16384], [0, -1, 1.0, True, "1", 16385]),
    "temperature": ([0, 0.5, 100], [-0.1, 101, float("nan"), float("inf"), "1", None, True]),
    "top_p": ([0.001, 1], [0, 1.1, -0.1, float("nan"), None]),
    "top_k": ([-1, 0, 1, 10**6], [-2, 1.0, 2**31, True]),
    "min_p": ([0, 1], [-0.1, 1.1, float("nan")]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1, float("nan")]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1, "0"]),
    "repetition_penalty": ([0.01, 1.5, 100], [0, -1, 101, float("nan")]),
    "seed": ([None, 0, -5, 2**63 - 1], [2**63, -(2**63) - 1, 1.5, "7", True]),
    "stop": (["x", ["x", "yz"], [], ("é",)], ["", [""], [1], ["x"] * 33, ["x" * 1025], {"x": 1}, 7]),
    "stop_token_ids": ([[0, 5], np.array([3])], [[-1], [2**31], [1.5], ["1"], 7, "12", [1] * 33, [True]]),
    "bad_words": ([["x"]], ["x", [""], [1], ["x"] * 1025]),
    "ignore_eos": ([True], [1, None]),
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 1.5, 2**31, True]),
    "min_tokens": ([0, 16], [-1, 17, None, 1.5]),
    "logprobs": ([None, 0, 1024], [-1, 1025, True, 1.0]),
    "prompt_logprobs": ([None, 0, 1024], [-1, 1025, True]),
    "detokenize": ([False], [0, "no"]),
    "skip_special_tokens": ([False], [0]),
    "spaces_between_special_tokens": ([False], [0]),
    "include_stop_str_in_output": ([True], [1]),
    "logit_bias": (
        [{5: 1, 6: -100.0}, {"7": 100}, {}],
        [{5: 101}, {-1: 0}, {"x": 1}, {5: float("nan")}, {1.5: 1}, {5: "1"}, [5], {"9" * 5000: 1}],
    ),
    "allowed_token_ids": ([[3], range(4)], [[], [-1], ["3"], "3", 3]),
    "cache_salt": ([None, "tenant"], ["", 7, "x" * 4097]),
    "priority": ([-5, 5], [1.5, 2**31, None]),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_every_field_is_checked(field):
    """Good values are taken; bad ones are refused with an error that names the field and shows the value.

    Mutation: `_number` lets NaN through, `not low <= value <= high` written as `value < low or value > high`; or any
    check is left out.
    """
    good, bad = BOUNDS[field]
    for value in good:
        SamplingParams(**{field: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{field} ") as error:
            SamplingParams(**{field: value})
        assert " must be " in str(error.value) or " must hold " in str(error.value) or " must map " in str(error.value)
        assert len(str(error.value)) < 300
    assert set(BOUNDS) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_fields_are_checked_together():
    """`min_tokens` within `max_tokens`; stop strings only where there is text.

    Mutation: `min_tokens` is bounded by `_MOST` alone; `detokenize` is not looked at beside `stop`.
    """
    SamplingParams(max_tokens=None, min_tokens=1000)
    with pytest.raises(ValueError, match="min_tokens must be an integer from 0 to 4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(ValueError, match="detokenize must be True"):
        SamplingParams(stop="x", detokenize=False)


def test_what_was_given_in_many_ways_is_kept_in_one():
    """Lists are copied and frozen, keys of JSON become tokens, a seed of -1 is none; `replace` checks anew.

    Mutation: `_strings` or `_tokens` keeps the caller's list; `logit_bias` the caller's dict.
    """
    stops, tokens, bias = ["a", "b"], [1, np.int64(2)], {"3": 1}
    params = SamplingParams(stop=stops, stop_token_ids=tokens, logit_bias=bias, seed=-1)
    stops.append("c")
    tokens.append(3)
    bias["4"] = 1
    assert params.stops == params.stop == ("a", "b")
    assert params.stop_token_ids == (1, 2) and type(params.stop_token_ids[1]) is int
    assert params.logit_bias == {3: 1.0} and params.seed is None
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=1e-4).greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert dataclasses.replace(params, n=2).stop == ("a", "b")
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2)


@pytest.mark.parametrize(
    "field, value", [("stop_token_ids", [9]), ("allowed_token_ids", [9, 1]), ("logit_bias", {9: 1})]
)
def test_tokens_must_be_the_models(field, value):
    """Tokens beyond the vocabulary are refused by name.

    Mutation: a field is missing in `check_vocabulary`.
    """
    params = SamplingParams(**{field: value})
    params.check_vocabulary(10)
    with pytest.raises(ValueError, match=f"{field} must name tokens from 0 to 8 for this model, got 9"):
        params.check_vocabulary(9)
    SamplingParams().check_vocabulary(1)


def test_neither_params_nor_text_need_torch():
    """The API process imports both without torch or transformers.

    Mutation: stops.py imports something of `sapwood.engine.executor.sampling`.
    """
    code = (
        "import sys, sapwood.engine.params, sapwood.engine.stops; print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
