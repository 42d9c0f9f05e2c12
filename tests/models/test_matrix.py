"""Every architecture in every state of the cache, at random, and from the store of another process. What transformers
says is right; where its two best tokens are as good as equal, either is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from sapwood.scheduler import RequestSpec, StepFailed

from .second import serve
from .test_parity import DEVICE, PAGE, Bed
from .zoo import CONFIGS, STATEFUL, VOCABULARY, answer, each_model, model_of, prompt, torch

pytestmark = pytest.mark.long
BOUNDED = ("mistral", "mamba", "mamba2")  # a request's memory does not grow: nobody is retracted
TIE = 1e-4


def same(name: str, tokens: list[int], said: list[int], new: int) -> bool:
    """Whether this is what transformers says, up to a tie: behind one, answers may part."""
    right = answer(name, tokens, new)
    if said == right:
        return True
    if len(said) != len(right):
        return False
    at = next(i for i, (a, b) in enumerate(zip(said, right, strict=True)) if a != b)
    with torch.no_grad():
        logits = model_of(name)(torch.tensor([[*tokens, *right[:at]]])).logits[0, -1]
    best = logits.topk(2).values
    return bool(best[0] - best[1] < TIE) and bool(best[0] - logits[said[at]] < TIE)


class Company(Bed):
    """A bed whose steps fail now and then, with requests that come at random."""

    def __init__(self, name: str, rng: random.Random, **config: Any) -> None:
        chunk = rng.choice([PAGE, 7, 24, 64])
        super().__init__(name, max_batch_tokens=max(8, chunk), max_tries=99, **config)
        self.rng = rng
        self.fails = 0.1
        begin = self.executor.begin

        def begin_or_fail(plan: Any) -> None:
            begin(plan)
            if rng.random() < self.fails:
                self.executor._running.pop()
                raise RuntimeError("a step that fails")

        self.executor.begin = begin_or_fail  # type: ignore[method-assign]

    def serve(self, prompts: list[list[int]], new: int) -> dict[str, tuple[list[int], list[int]]]:
        """By request: its prompt and what was said. They come a few at a time, while others run."""
        coming = list(prompts)
        said: dict[str, tuple[list[int], list[int]]] = {}
        for _ in range(20000):
            while coming and self.rng.random() < 0.4:
                self.number += 1
                tokens = coming.pop()
                said[f"r{self.number}"] = tokens, []
                self.loop.submit([RequestSpec(f"r{self.number}", tokens, new, priority=self.rng.choice([0, 0, 1]))])
            step = self.loop.step()
            for id, token in step.tokens().items():
                said[id][1].append(token)
            self.ended.update({end.id: end for end in step.ended})
            if not coming and not self.loop.live and not step.in_flight:
                break
            self.loop.rest(0.2)
        self.scheduler.cache.check()
        return said


@each_model
@pytest.mark.parametrize("overlap", [0, 1])
def test_p02_random_company(name, overlap):
    """Prompts that share beginnings come at random, again and again, into a pool that is too small, with a host behind
    it and steps that fail: all say what transformers says; retractions, loads, failures and hits have happened, and
    every prompt token was either cached or computed.

    Mutation: any of those in test_parity.py; `Request.computes` counts what was cached.
    """
    rng = random.Random(f"{name}{overlap}")
    trunk = prompt(50, 40)
    pool = [prompt(60 + n, rng.randrange(2, 50)) for n in range(4)]
    pool += [[*trunk[: rng.randrange(8, 40)], *prompt(70 + n, rng.randrange(1, 12))] for n in range(5)]
    new = 12
    assert len({token for tokens in pool for token in answer(name, tokens, new)}) >= 8
    counts = {"retractions": 0, "loads": 0, "steps_failed": 0, "cached": 0}
    for pages, slots, batch in ((20, 8, 4), (30, 10, 6)):
        bed = Company(name, rng, pages=pages, slots=slots, host=150, batch=batch, overlap=overlap, headroom=0)
        said = bed.serve(rng.choices(pool, k=26), new)
        wrong = [(tokens, got) for tokens, got in said.values() if not same(name, tokens, got, new)]
        assert not wrong, f"{len(wrong)} of {len(said)}: {wrong[0]}"
        for id, (tokens, _) in said.items():
            end = bed.ended[id]
            assert end.reason == "length" and end.cached + end.computed == len(tokens) == end.prompt
        stats = bed.scheduler.stats()
        counts["retractions"] += stats["retractions"]
        counts["steps_failed"] += stats["steps_failed"]
        counts["loads"] += bed.loop.tiers.stats()["loads"]
        counts["cached"] += bed.cached()
    never = [what for what, n in counts.items() if not n and not (what == "retractions" and name in BOUNDED)]
    assert not never, f"{never} did not happen: {counts}"


@pytest.fixture(scope="module")
def from_another_process(tmp_path_factory: Any) -> dict[str, Any]:
    """Each model's store, filled here and served from by one more process; by model: its prompts, what this process
    had cached, and what the other one said."""
    where = tmp_path_factory.mktemp("matrix")
    jobs = []
    for at, name in enumerate(CONFIGS):
        folder = where / name
        model_of(name).save_pretrained(folder)
        store = f"file://{where}/store-{name}?size=1GiB"
        prompts = [prompt(90, 41), [*prompt(90, 41)[:28], *prompt(91, 9)], prompt(92, 30)]
        jobs.append({"folder": str(folder), "store": store, "prompts": prompts, "new": 8, "overlap": at % 2})
        if name in STATEFUL:  # snapshots stand where chats go on: on second sight
            serve(**{**jobs[-1], "prompts": [tokens[:20] for tokens in prompts]})
        serve(**jobs[-1])
    (where / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.models.second", str(where / "jobs.json")]
    other = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert other.returncode == 0, other.stderr[-2000:]
    return {
        name: (job["prompts"], found)
        for name, job, found in zip(CONFIGS, jobs, json.loads(other.stdout.splitlines()[-1]), strict=True)
    }


@each_model
@pytest.mark.skipif(DEVICE != "cpu", reason="one process on the GPU is enough")
def test_t10_fetched_by_a_second_process(name, from_another_process):
    """Another process with the same weights serves from the store what this one has computed.

    Mutation: a page's bytes in the store leave out the last layer; the fingerprint takes in the folder's name.
    """
    prompts, found = from_another_process[name]
    assert all(same(name, tokens, said, 8) for tokens, said in zip(prompts, found["said"], strict=True))
    assert max(max(said) for said in found["said"]) < VOCABULARY
    assert all(cached >= 16 for cached in found["cached"]), found


def test_a_step_that_fails_is_told():
    """The company's failures are real ones.

    Mutation: `Company` swallows its error.
    """
    bed = Company("llama", random.Random(1))
    bed.fails = 1.0
    bed.loop.submit([RequestSpec("r", prompt(1, 9), 2)])
    step = bed.loop.step()
    assert isinstance(step.done[0].event, StepFailed)
