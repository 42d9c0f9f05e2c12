"""Real models in engines that have run for years (case S16)."""

from __future__ import annotations

import itertools

import pytest

from ..ages import LIMITS, age
from .test_llm import GREEDY, ids, open_llm, said
from .zoo import answer, build, prompt, torch


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba"])  # full, with windows, with states
def test_S16_an_engine_that_has_counted_past_31_bits_answers_as_a_young_one(name, overlap, tmp_path):
    """With requests, steps and all else that is counted shortly before a limit, prompts are computed, decoded past it,
    retracted for want of memory and found again in the cache, and every answer is that of transformers.

    Mutation: `DecodeRows.shown` adds `np.int32(self.planned)`.
    """
    build(name, torch.float64).save_pretrained(tmp_path)
    prompts = [prompt(n, 30) for n in range(4)]
    right = [answer(name, tokens, 8) for tokens in prompts]
    for limit in LIMITS:
        with open_llm(tmp_path, overlap=overlap, max_num_seqs=3) as llm:
            age(llm.engine.scheduler, limit - 4)
            llm._numbers = itertools.count(limit - 2)
            for _ in range(2):
                outputs = llm.generate([ids(tokens) for tokens in prompts], GREEDY, use_tqdm=False)
                assert said(outputs) == right
            assert sum(output.num_cached_tokens for output in outputs) > 60, "the second time they are cached"
            assert llm.engine.scheduler._book.decoding.tick > limit < int(outputs[-1].request_id)
