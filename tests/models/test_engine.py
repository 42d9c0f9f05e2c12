"""What an engine does beside answering: weights that change, prompts that are scored, answers of a certain form, too
little memory, adapters that are not there."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sapwood.engine.executor import executor as steps
from sapwood.engine.llm import LLM
from sapwood.engine.loading.model_files import ModelError
from sapwood.engine.loading.updates import read_update
from sapwood.engine.models.gathered import GatheringCache
from sapwood.engine.params import SamplingParams

from .test_llm import GREEDY, SMALL, ids, open_llm, said
from .zoo import STATEFUL, VOCABULARY, answer, build, model_of, prompt, torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    model_of("llama").save_pretrained(where)
    return where


def other_weights(folder: Any, seed: int, names: tuple[str, ...] = ("",)) -> Any:
    """A llama with other weights where a tensor's name contains one of `names`, saved; and the model itself."""
    model = build("llama")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and any(part in name for part in names):
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(folder)
    return model


def says(model: Any, tokens: list[int], new: int) -> list[int]:
    given = torch.tensor([tokens])
    whole = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    return whole[0, len(tokens) :].tolist()


# ---- weights that change


def test_l20_new_weights_match_nothing_older(folder, tmp_path):
    """After an update the answers are the new model's, nothing older is found on device, host or store, and what was
    computed with the same weights before is found again from the store.

    Mutation: `RequestTable._change_now` keeps the version; `Update.apply` takes the version before into that of
    whole weights; `Update.apply` copies nothing.
    """
    new = other_weights(tmp_path / "new", 7)
    tokens = prompt(1, 60)
    right = {"old": answer("llama", tokens, 8), "new": says(new, tokens, 8)}
    assert right["old"] != right["new"]
    flags = {"host_cache": "4MiB", "store": f"file://{tmp_path}/store?size=1GiB", "store_patience": 600}
    with open_llm(folder, **flags) as llm:
        assert said(llm.generate(ids(tokens), GREEDY, use_tqdm=False)) == [right["old"]]
        llm.update_weights(str(tmp_path / "new"))
        version = llm.engine.requests.version
        assert 0 < version < 2**63
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert said([output]) == [right["new"]] and output.num_cached_tokens == 0
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= 56
        llm.update_weights(str(folder))
        assert llm.engine.requests.version not in (0, version)
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert said([output]) == [right["old"]] and output.num_cached_tokens == 0
    with open_llm(folder, **flags) as llm:
        llm.update_weights(str(tmp_path / "new"))
        assert llm.engine.requests.version == version, "the same weights, whatever they came after"
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert said([output]) == [right["new"]] and output.num_cached_tokens >= 56


def test_l20_who_runs_ends_under_the_old_weights_and_who_waits_begins_under_the_new(folder, tmp_path):
    """Streams that have begun end as they would have; requests beyond max_num_seqs are bound anew; those that come
    meanwhile wait; with `abort`, who runs is aborted.

    Mutation: `Engine.begin_update` holds nobody back; `RequestTable.submit` lets requests in while weights change.
    """
    new = other_weights(tmp_path / "new", 7)
    prompts = [prompt(n, 30) for n in range(4)]
    for abort in (False, True):
        with open_llm(folder, max_num_seqs=2) as llm:
            engine = llm.engine
            params = SamplingParams(temperature=0, max_tokens=12)
            submit = engine.requests.submit
            running = [submit(str(n), prompts[n], params)[0] for n in (0, 1)]
            waiting = [submit("2", prompts[2], params)[0]]
            for _ in range(4):
                engine.requests.step()
            assert all(sample.token_ids for sample in running) and not waiting[0].seated
            engine.begin_update(read_update(engine.served.model, tmp_path / "new"), abort)
            (late,) = engine.requests.submit("3", prompts[3], params)
            assert engine.requests.updating and late.finish_reason is None
            with pytest.raises(RuntimeError, match="being changed already"):
                engine.begin_update(read_update(engine.served.model, tmp_path / "new"))
            while engine.requests.samples or engine.requests.held:
                engine.requests.step()
            for sample, tokens in zip([*running, *waiting, late], prompts, strict=True):
                if sample in running and abort:
                    assert sample.finish_reason == "abort" and len(sample.token_ids) < 12
                else:
                    old = sample in running
                    assert sample.token_ids == (answer("llama", tokens, 12) if old else says(new, tokens, 12))


def test_l20_weights_for_a_part(folder, tmp_path):
    """Some tensors are updated and the others stay; the version tells both; who waits can be aborted; weights that do
    not fit change nothing.

    Mutation: `read_update` takes every update for a whole one; `_check_shapes` looks at nothing; `RequestTable.abort`
    forgets those that are held.
    """
    from safetensors.torch import save_file

    state = model_of("llama").state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({name: state[name] * -1}, tmp_path / "part.safetensors")
    changed = build("llama")
    with torch.no_grad():
        changed.get_parameter(name).neg_()
    tokens = prompt(1, 30)
    with open_llm(folder) as llm:
        for wrong, says_what in (
            ({"model.nothing": torch.zeros(2)}, "model.nothing has no place in the model"),
            ({name: torch.zeros(2, 3)}, r"has shape \(2, 3\), and the model's has"),
        ):
            save_file(wrong, tmp_path / "wrong.safetensors")
            with pytest.raises(ModelError, match=says_what):
                llm.update_weights(str(tmp_path / "wrong.safetensors"))
        with pytest.raises(ModelError, match="is not there"):
            llm.update_weights(str(tmp_path / "nowhere"))
        assert said(llm.generate(ids(tokens), GREEDY, use_tqdm=False)) == [answer("llama", tokens, 8)]
        llm.update_weights(str(tmp_path / "part.safetensors"))
        first = llm.engine.requests.version
        assert said(llm.generate(ids(tokens), GREEDY, use_tqdm=False)) == [says(changed, tokens, 8)]
        llm.update_weights(str(tmp_path / "part.safetensors"))
        assert llm.engine.requests.version != first, "on top of other weights"
        engine = llm.engine
        (running,) = engine.requests.submit("a", tokens, GREEDY)
        engine.requests.step()
        engine.begin_update(read_update(engine.served.model, tmp_path / "part.safetensors"))
        held = engine.requests.submit("b", tokens, GREEDY)
        assert engine.requests.abort(held) == held and held[0].finish_reason == "abort" and not engine.requests.held
        while engine.requests.updating:
            engine.requests.step()
        assert running.finish_reason == "length"


# ---- prompts that are scored


def right_scores(tokens: list[int]) -> Any:
    with torch.no_grad():
        return model_of("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("overlap", [0, 1])
def test_m08_prompt_logprobs_read_nothing_from_the_cache(folder, overlap):
    """The log-probability of every prompt token but the first, in chunks, warm and cold alike; the prompt is computed
    anew, and what it computes is published; samples beside the first share it.

    Mutation: `RequestTable.submit` lets it read the cache; `_scored` is off by one; `pieces` loses rows that are cut.
    """
    tokens = prompt(1, 50)
    right = right_scores(tokens)
    with open_llm(folder, max_num_batched_tokens=16, overlap=overlap) as llm:
        for n in (1, 2):
            params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=n, logprobs=1)
            (output,) = llm.generate(ids(tokens), params, use_tqdm=False)
            assert output.num_cached_tokens == 0 and said([output]) == [answer("llama", tokens, 3)]
            scores = output.prompt_logprobs
            assert len(scores) == 50 and scores[0] is None
            for position in range(1, 50):
                row, told = right[position - 1], scores[position]
                assert math.isclose(told[tokens[position]].logprob, row[tokens[position]], abs_tol=1e-4)
                assert told[tokens[position]].rank == int((row > row[tokens[position]]).sum()) + 1
                assert set(told) == {tokens[position], *row.topk(2).indices.tolist()}
            assert [list(each) for each in output.outputs[0].logprobs] == [[token] for token in said([output])[0]]
        assert output.outputs[1].token_ids == output.outputs[0].token_ids
        assert llm.stats()["cache"]["cached_tokens"] >= 48, "the second sample finds the first one's prompt"
        (output,) = llm.generate(ids(tokens), GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= 48 and output.prompt_logprobs is None


# ---- too little memory


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_step_that_memory_does_not_suffice_for_is_tried_smaller(name, tmp_path, monkeypatch):
    """A forward of more than 20 tokens runs out of memory: steps are computed in pieces, with the same answers and
    scores. States have gone on in some layers by then: their rows are taken back first.

    Mutation: `ModelExecutor._fits` tries state models again itself; `pieces` samples rows that are cut; `_fits` keeps
    `most`; `_more` is left out.
    """
    model_of(name).save_pretrained(tmp_path)
    prompts = [prompt(n, 30 + n) for n in range(3)]
    served = steps.ServedModel.logits
    asked: list[int] = []

    def tight(self: Any, flat: Any) -> Any:
        logits = served(self, flat)
        asked.append(len(flat.ids))
        if len(flat.ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    with open_llm(tmp_path, max_num_batched_tokens=100) as llm:
        monkeypatch.setattr(steps.ServedModel, "logits", tight)
        outputs = llm.generate([*map(ids, prompts)], replace(GREEDY, prompt_logprobs=0), use_tqdm=False)
        assert [output.error for output in outputs] == [None] * 3
        assert said(outputs) == [answer(name, tokens, 8) for tokens in prompts]
        assert max(asked[10:]) <= 20 < max(asked) and llm.engine.executor.most <= 24
        for output, tokens in zip(outputs, prompts, strict=True):
            told = [output.prompt_logprobs[at][tokens[at]].logprob for at in range(1, len(tokens))]
            with torch.no_grad():
                right = model_of(name)(torch.tensor([tokens])).logits[0].log_softmax(-1)
            assert np.allclose(told, right[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=1e-3)
        monkeypatch.setattr(steps.ServedModel, "logits", served)
        monkeypatch.setattr(steps, "_STEPS_BEFORE_GROWTH", 3)
        llm.generate(ids(prompts[0]), GREEDY, use_tqdm=False)
        assert llm.engine.executor.most >= 64, "what took the memory is over"
    assert (name in STATEFUL) == (name == "bamba")


def test_a_model_that_attends_by_itself_takes_no_more_memory_than_it_may(tmp_path, monkeypatch):
    """Every token is multiplied with the keys of every row: rows come in pieces whose scores are not too many, with the
    same answers and scores.

    Mutation: `ModelExecutor._largest` gives `most`.
    """
    model_of("gptj").save_pretrained(tmp_path)
    prompts = [prompt(n, 30 + n) for n in range(5)]
    most, asked, inner = 4 * 20 * 160, [], GatheringCache.mask

    def mask(self: Any, dtype: Any) -> Any:
        asked.append(inner(self, dtype))
        return asked[-1]

    monkeypatch.setattr(GatheringCache, "mask", mask)
    monkeypatch.setattr(steps, "_MAX_GATHERED_SCORES", most)
    with open_llm(tmp_path, max_num_batched_tokens=200) as llm:
        outputs = llm.generate([*map(ids, prompts)], replace(GREEDY, prompt_logprobs=0), use_tqdm=False)
    assert said(outputs) == [answer("gptj", tokens, 8) for tokens in prompts]
    assert most / 4 < max(4 * each.numel() for each in asked) <= most
    for output, tokens in zip(outputs, prompts, strict=True):
        told = [output.prompt_logprobs[at][tokens[at]].logprob for at in range(1, len(tokens))]
        with torch.no_grad():
            right = model_of("gptj")(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert np.allclose(told, right[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=1e-3)


def test_a_step_that_never_fits_fails_its_request_and_no_other(folder, monkeypatch):
    """Out of memory whatever the size: the request fails with that reason, and the engine goes on.

    Mutation: `ModelExecutor._fits` halves for ever.
    """
    served = steps.ServedModel.logits
    broken = [True]

    def never(self: Any, flat: Any) -> Any:
        if broken[0]:
            raise MemoryError("no memory at all")
        return served(self, flat)

    with open_llm(folder) as llm:
        monkeypatch.setattr(steps.ServedModel, "logits", never)
        (output,) = llm.generate(ids(prompt(1, 30)), GREEDY, use_tqdm=False)
        assert "no memory at all" in output.error
        broken[0] = False
        assert said(llm.generate(ids(prompt(1, 30)), GREEDY, use_tqdm=False)) == [answer("llama", prompt(1, 30), 8)]


# ---- answers of a certain form


class Counting:
    """Allows the token after the last one, and what follows it: a grammar whose mask depends on every token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def rollback(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]

    def allowed(self) -> Any:
        last = self.tokens[-1] if self.tokens else 10
        bits = np.zeros(VOCABULARY, np.bool_)
        bits[[(last + 1) % VOCABULARY, (last + 2) % VOCABULARY]] = True
        return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("overlap", [0, 1])
def test_grammars_hold_through_company_and_failing_steps(folder, overlap, monkeypatch):
    """Rows with a grammar go on as it allows, beside rows without; also where every third step fails, and where the
    last token is not known yet when the next plan begins.

    Mutation: `GrammarMasks.of` never rolls back; it takes an older token for the newest.
    """
    drawn = itertools.count(1)
    draw = steps.ModelExecutor._run

    def failing(self: Any, plan: Any) -> Any:
        run = draw(self, plan)
        if next(drawn) % 3 == 0:
            raise RuntimeError("a step that fails")
        return run

    with open_llm(folder, overlap=overlap) as llm:
        monkeypatch.setattr(steps.ModelExecutor, "_run", failing)
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=20)
        (bound,) = engine.requests.submit("bound", prompt(1, 30), params, grammars=[Counting()])
        (free,) = engine.requests.submit("free", prompt(2, 30), params)
        while engine.requests.samples:
            engine.requests.step()
        assert free.token_ids == answer("llama", prompt(2, 30), 20)
        assert len(bound.token_ids) == 20 and not bound.error
        steps_taken = {(b - a) % VOCABULARY for a, b in itertools.pairwise([10, *bound.token_ids])}
        assert steps_taken == {1, 2}


# ---- adapters


def test_l16_a_row_whose_adapter_is_gone_fails_by_name_and_alone(folder, tmp_path):
    """Its adapter is not in the executor's memory any more: that request fails and says which adapter; who runs beside
    it does not, and it never runs as the base model.

    Mutation: `_RequestRows._whole_routing` names no culprits; `Adapters.begin` takes an unknown adapter for the base.
    """
    pytest.importorskip("peft", reason="peft is not installed: it makes the adapters of this test")
    from .test_adapters import adapter

    made = adapter(tmp_path / "a", build("llama"))
    with open_llm(folder, enable_lora=True, max_loras=1, max_lora_rank=8) as llm:
        engine = llm.engine
        digest = engine.adapters.load("a", made)
        (lost,) = engine.requests.submit("lost", prompt(1, 30), GREEDY, digest)
        (fine,) = engine.requests.submit("fine", prompt(2, 30), GREEDY)
        del engine.adapters._host[digest]
        while engine.requests.samples:
            engine.requests.step()
        assert digest.hex() in lost.error and not lost.token_ids
        assert fine.token_ids == answer("llama", prompt(2, 30), 8)


def test_adapters_on_modules_that_are_not_called_are_refused(tmp_path):
    """A layer whose weight the model reads without calling it: the adapter would be left out silently.

    Mutation: `Adapters.only_called` takes all modules as called.
    """
    pytest.importorskip("peft", reason="peft is not installed: it makes the adapters of this test")
    from sapwood.engine.lora.adapters import Adapters
    from sapwood.engine.lora.files import AdapterError

    from .test_adapters import adapter

    model = build("llama")
    adapters = Adapters(model, 1, 8)
    layer = model.model.layers[0]
    everywhere = adapter(tmp_path / "a", build("llama"), target_modules=["up_proj"])
    adapters.only_called(lambda: [each.mlp(torch.zeros(1, 2, 64).double()) for each in model.model.layers])
    assert adapters.load("fits", everywhere)
    adapters.only_called(lambda: layer.mlp(torch.zeros(1, 2, 64).double()))
    with pytest.raises(AdapterError, match=r"layers\.[12]\.mlp\.up_proj is read by the model without being called"):
        adapters.load("does not", everywhere)


def test_streams_beside_each_other(folder):
    """Two streams taken in turn, and a whole list in between: each gets all of its own.

    Mutation: `LLM._run` counts ends it has seen itself.
    """
    first, second = prompt(1, 20), prompt(2, 25)
    params = SamplingParams(temperature=0, max_tokens=10)
    with LLM(str(folder), **{**SMALL, "dtype": "float64"}) as llm:
        a, b = llm.stream(ids(first), params), llm.stream(ids(second), params)
        next(a), next(b)
        assert said(llm.generate(ids(prompt(3, 9)), params, use_tqdm=False)) == [answer("llama", prompt(3, 9), 10)]
        assert said([list(a)[-1], list(b)[-1]]) == [answer("llama", first, 10), answer("llama", second, 10)]


def test_what_is_closed_gives_its_memory_back(folder):
    """Device memory, host memory and weights are free once an engine is closed, whoever still holds it; and nothing can
    be asked of it any more.

    Mutation: `Engine.close` leaves the arena, or the weights.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    llm = open_llm(folder, host_cache="4MiB")
    llm.generate(ids(prompt(1, 30)), GREEDY, use_tqdm=False)
    (memory,), model = llm.engine.executor.arena.rows.values(), llm.engine.served.model
    assert memory.untyped_storage().nbytes() > 4 << 20
    kept = StorageWeakRef(memory.untyped_storage())
    del memory
    assert not kept.expired()
    llm.close()
    assert kept.expired() and sum(parameter.nbytes for parameter in model.parameters()) == 0
    assert llm.stats()["ended"] == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(ids(prompt(1, 30)), GREEDY, use_tqdm=False)
    llm.close()
