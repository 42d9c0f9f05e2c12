"""Real architectures on our memory: the same tokens as transformers' own `generate`, in every state of the cache.

On a GPU: SAPWOOD_DEVICE=cuda python -m pytest tests/models/test_parity.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from sapwood.cache import CacheGroup
from sapwood.engine import EngineLoop, HostArena, Tiers, open_mover
from sapwood.engine.executor.attention import FoldedAttention, PlainAttention
from sapwood.engine.executor.executor import ModelExecutor
from sapwood.engine.models.model import ServedModel
from sapwood.engine.models.recurrent import Mixers
from sapwood.engine.transfer.torch_mover import PinnedArena, TorchArena
from sapwood.scheduler import Ended, RequestSpec, Scheduler, SchedulerConfig, StepFailed

from .zoo import CONFIGS, STATEFUL, answer, build, each_model, prompt, torch

DEVICE = os.environ.get("SAPWOOD_DEVICE", "cpu")
PAGE = 4
NEW = 10
AHEAD = ("llama", "gemma3", "gpt-oss", "bamba", "qwen3-next", "deepseek-v3")  # with two plans in flight too
PROMPTS = [prompt(1, 5), prompt(2, 23), prompt(3, 38), prompt(4, 17)]
PROMPTS += [[*PROMPTS[2][:30], 1, 2, 3], PROMPTS[1]]  # one parts from another in a page, one is the same


class Bed:
    """A model, its memory (poisoned at the start and whenever a page is freed), and a loop."""

    def __init__(
        self,
        name: str,
        pages: int = 120,
        slots: int = 24,
        host: int = 0,
        batch: int = 6,
        attention: Any = None,
        **config,
    ) -> None:
        self.name = name
        self.served = ServedModel(build(name).to(DEVICE), PAGE, attention)
        self.groups = [
            CacheGroup(g.name, g.family, slots if g.family == "state" else pages, host, g.window, g.layout.page_bytes)
            for g in self.served.groups
        ]
        layouts = {group.name: group.layout for group in self.served.groups}
        self.arena = TorchArena.allocate(self.groups, layouts, device=DEVICE)
        self.config = {"max_batch_tokens": 24, "max_batch_size": batch, **config}
        for rows in self.arena.rows.values():
            rows.fill_(0xFF)  # NaN, as any float
        self.scheduler = Scheduler(SchedulerConfig(PAGE, self.groups, **self.config))
        self.scheduler.cache.watch(self.poison)
        self.executor = ModelExecutor(self.served, self.arena, batch)
        kind = PinnedArena if DEVICE == "cuda" else HostArena
        mover = open_mover(self.arena, kind(self.groups)) if host else None
        self.loop = EngineLoop(self.scheduler, self.executor, Tiers(self.scheduler, mover))
        self.ended: dict[str, Ended] = {}
        self.number = 0

    def poison(self, group: str, tier: str, what: str, pages: Any) -> None:
        if tier == "device" and what == "freed":
            self.arena.rows[group][torch.tensor(pages.tolist(), dtype=torch.long)] = 0xFF

    def said(self, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
        """What the engine says to prompts that come together."""
        ids = []
        for tokens in prompts:
            self.number += 1
            ids.append(f"r{self.number}")
            self.loop.submit([RequestSpec(ids[-1], tokens, new)])
        said: dict[str, list[int]] = {id: [] for id in ids}
        for _ in range(5000):
            step = self.loop.step()
            for id, token in step.tokens().items():
                said[id].append(token)
            self.ended.update({end.id: end for end in step.ended})
            if not self.loop.live and not step.in_flight:
                break
            self.loop.rest(0.2)
        self.scheduler.cache.check()
        assert all(self.ended[id].reason == "length" for id in ids), [self.ended[id] for id in ids]
        return [said[id] for id in ids]

    def cached(self) -> int:
        return sum(end.cached for end in self.ended.values())


def right(name: str, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    said = [answer(name, tokens, new) for tokens in prompts]
    assert len({token for each in said for token in each}) >= 8, "a reference that says one thing proves nothing"
    return said


@pytest.mark.parametrize(("name", "overlap"), [*((name, 0) for name in CONFIGS), *((name, 1) for name in AHEAD)])
def test_p02_the_same_tokens_cold_shared_and_warm(name, overlap):
    """Prompts that come together and share their beginnings, then once more when all is cached, then the next turn of
    each: what transformers says, and computed only where it must be.

    Mutation: any line of `rows_of`; `ServedModel.logits` writes K and V after it attends; `Mixers` keep no state.
    """
    bed = Bed(name, overlap=overlap)
    assert bed.said(PROMPTS) == right(name, PROMPTS)
    before = bed.cached()
    assert bed.said(PROMPTS) == right(name, PROMPTS)
    assert bed.cached() - before >= sum(len(tokens) // PAGE * PAGE - PAGE for tokens in PROMPTS) * 0.5
    turns = [[*tokens, *answer(name, tokens, NEW), 7, 8] for tokens in PROMPTS[:3]]
    assert bed.said(turns) == right(name, turns)


@each_model
@pytest.mark.parametrize("overlap", [1])
def test_s03_the_same_tokens_when_retracted(name, overlap):
    """A pool in which not all of them fit, without room to spare: somebody is retracted and resumes, and a page that is
    given to another shows nothing of its last owner (free pages are NaN).

    Mutation: `ModelExecutor._scrub` does nothing; `_copy` copies the first tokens of a page only.
    """
    if name in ("mistral", "mamba", "mamba2"):
        bed = Bed(name, pages=16, slots=4, overlap=overlap, headroom=0)  # they keep a bounded memory: all fit
    else:
        bed = Bed(name, pages=23, slots=8, overlap=overlap, headroom=0)
    prompts = PROMPTS[:4]
    assert bed.said(prompts, 20) == right(name, prompts, 20)
    if name not in ("mistral", "mamba", "mamba2"):
        assert bed.scheduler.stats()["retractions"] > 0


@each_model
def test_t01_the_same_tokens_from_host(name):
    """Written to host, pushed off the device by others, and loaded back: not computed again.

    Mutation: a mover leaves out the last part of a page.
    """
    bed = Bed(name, pages=24, slots=7, host=200, batch=3)
    first = PROMPTS[1:3]
    assert bed.said(first) == right(name, first)
    others = [prompt(50 + n, 40) for n in range(4)]
    for other in others:
        bed.said([other], 2)
    loads = bed.loop.tiers.stats()["loads"]
    assert bed.said(first) == right(name, first)
    assert bed.loop.tiers.stats()["loads"] > loads


@pytest.mark.parametrize("name", ["llama", "gemma3", "bamba", "qwen3-next", "deepseek-v3"])
@pytest.mark.parametrize("overlap", [1])
def test_p09_the_same_tokens_with_failing_steps(name, overlap):
    """Every fifth step fails after it has written: rows go back, and say what they would have.

    Mutation: `ModelExecutor._copy` takes state source 0 for a slot.
    """
    bed = Bed(name, overlap=overlap, max_tries=9)
    right_finish, count = bed.executor.finish, [0]

    def finish(block: bool = True) -> Any:
        events = right_finish()
        count[0] += 1
        return [StepFailed(events[0].step, "bad luck")] if count[0] % 5 == 0 else events

    bed.executor.finish = finish  # type: ignore[method-assign]
    assert bed.said(PROMPTS) == right(name, PROMPTS)
    assert bed.scheduler.stats()["steps_failed"] >= 3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bamba", "deepseek-v3"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_the_same_tokens_in_chunks_of_any_size(name, chunk):
    """Mutation: `_chunk` of attention.py takes keys for positions."""
    bed = Bed(name, max_batch_tokens=max(chunk, 6), batch=2 if chunk < 6 else 6)
    assert bed.said(PROMPTS[1:3]) == right(name, PROMPTS[1:3])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_the_plain_way_says_the_same(name):
    """Mutation: any line of `PlainAttention._row`."""
    assert Bed(name, attention=PlainAttention()).said(PROMPTS) == right(name, PROMPTS)


# ---- wrong on purpose: what must show, shows


class Wrong(FoldedAttention):
    def __init__(self, change: Any) -> None:
        self.change = change

    def attend(self, q: Any, k_pages: Any, v_pages: Any, rows: Any, asked: Any) -> Any:
        rows, asked = self.change(rows, asked)
        return super().attend(q, k_pages, v_pages, rows, asked)


def blind(rows: Any, asked: Any) -> Any:
    """Decode rows see every key of their table, their window or not."""
    return rows._replace(decodes=[d._replace(seen=d.seen | True) for d in rows.decodes]), asked


CONTROLS = {
    "no window": ("gemma3", blind),
    "no sinks": ("gpt-oss", lambda rows, asked: (rows, asked._replace(sinks=None))),
    "no softcap": ("gemma2", lambda rows, asked: (rows, asked._replace(softcap=None))),
    "no scaling": ("llama", lambda rows, asked: (rows, asked._replace(scaling=1.0))),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_attention_is_noticed(control):
    name, change = CONTROLS[control]
    longer = [prompt(60 + n, 30 + n) for n in range(4)]
    bed = Bed(name, attention=Wrong(change))
    for rows in bed.arena.rows.values():
        rows.zero_()
    assert bed.said(longer, 24) != right(name, longer, 24), f"{control}, and nobody noticed"


@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_a_state_that_is_not_kept_is_noticed(name, monkeypatch):
    inner = Mixers._run

    def forgetful(self: Any, module: Any, layer: int, hidden: Any, rows: Any, call: Any) -> Any:
        before = {part: kept.clone() for part, kept in self._memory[layer].items()}
        out = inner(self, module, layer, hidden, rows, call)
        for part, kept in self._memory[layer].items():
            kept.copy_(before[part])
        return out

    bed = Bed(name)
    monkeypatch.setattr(Mixers, "_run", forgetful)
    assert bed.said(PROMPTS) != right(name, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("broken", [False, True])
def test_m03_shared_pages_are_never_written_again(name, broken):
    """The bytes of pages that another has computed stay as they are under a request that shares them. (An engine that
    ignores `write_from` gives the same tokens, and only the bytes show it.)

    Mutation: `rows_of` does not send positions below `write_from` to the null page.
    """
    bed = Bed(name)
    tokens = PROMPTS[2][:36]  # nine whole pages: the second time its last token is computed and not written
    bed.said([tokens], 2)
    marked = {}
    for group, rows in bed.arena.rows.items():
        pages = torch.unique(torch.nonzero((rows != 0xFF).any(1)).flatten())
        marked[group] = (pages[pages > 0], rows[pages[pages > 0]].clone())
    if broken:
        inner = bed.scheduler.next_plan

        def careless() -> Any:
            plan = inner()
            plan.batch = replace(plan.batch, write_from=dict.fromkeys(plan.batch.write_from, plan.batch.starts))
            return plan

        bed.scheduler.next_plan = careless  # type: ignore[method-assign]
        with torch.no_grad():
            for parameter in bed.served.model.parameters():
                parameter.mul_(1.01)  # else it would write the same bytes
    bed.said([tokens], 1)
    same = all(torch.equal(bed.arena.rows[group][pages], bytes_) for group, (pages, bytes_) in marked.items())
    assert same != broken


@pytest.mark.parametrize("name", STATEFUL)
def test_f11_the_next_turn_begins_from_a_snapshot(name):
    """A chat of a model with state, second sight: all but the last page is not computed again.

    Mutation: `ModelExecutor.begin` copies snapshots before the batch instead of after.
    """
    bed = Bed(name, checkpoint_interval=1)
    tokens = PROMPTS[2]
    for _ in range(2):
        assert bed.said([tokens]) == [answer(name, tokens, NEW)]
    assert list(bed.ended.values())[-1].cached >= (len(tokens) - 1) // PAGE * PAGE - PAGE
