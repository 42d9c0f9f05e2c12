"""Random traffic on a GPU for some minutes: `make gpu-soak`. Prompts of all lengths that share prefixes come and go,
some are aborted, the cache is too small for those who run, pages go to host memory and come back, and steps fail:
before they begin, behind their forward, and because a row has no numbers. Answers are those of quiet times, whatever
happened beside them; memory stays as it is; and in the end every page is free."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sapwood import LLM
from sapwood.engine.samples import Sample

from .answers import TIE, Ask, Right, asks, parting, poison, quiet, tie
from .kit import say
from .shapes import EXACT, opened

FLAGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 64, "max_mixed_tokens": 768}
BUSY = {"device_cache": "48MiB", "host_cache": "240MiB"}  # 8,000 and 40,000 tokens
QUIET = {"device_cache": "1GiB", "overlap": 0, "enforce_eager": True, "enable_prefix_caching": False}
SEED, ASKS, MOST_LIVE = 7, 160, 100
_DRAIN = 60.0  # seconds in which whoever is left must end
_HANGS = 150.0  # seconds beyond the traffic's, for start, drain and all: then it is over, one way or the other
_LOOKS = 30.0  # seconds between two lines
_MORE = {"allocated": 16, "reserved": 64, "resident": 128}  # MiB that memory may grow by after a third of the time
_LOGPROB = 1e-3  # what log-probabilities may differ by


class Live(NamedTuple):
    which: int
    sample: Sample


class Memory(NamedTuple):
    """In MiB: of the device as torch gave it out and as it took it, and of this process."""

    allocated: int
    reserved: int
    resident: int

    @classmethod
    def now(cls) -> Memory:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if not torch.cuda.is_available():
            return cls(0, 0, pages >> 8)
        return cls(torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20, pages >> 8)


class Trouble:
    """Makes steps fail, now and then, and counts them. Steps of one row are spared: nobody may be blamed for it."""

    def __init__(self, llm: LLM, seed: int, counts: Counter[str]) -> None:
        self._rng, self._counts = np.random.default_rng(seed), counts
        self.stopped = False
        engine: Any = llm.engine
        executor = engine.executor
        self._begin, self._rows = executor.begin, executor.source.rows
        executor.begin, executor.source.rows = self.begin, self.rows
        if hasattr(executor, "_drawn"):
            self._drawn, executor._drawn = executor._drawn, self.drawn
        self._row: int | None = None  # of the plan that begins: the one whose logits become NaN

    def _chance(self, what: str, chance: float) -> bool:
        if self.stopped or self._rng.random() > chance:
            return False
        self._counts[what] += 1
        return True

    def begin(self, plan: Any) -> None:
        batch = plan.batch
        tokens = int(batch.lengths.sum())
        kind = "decode steps" if tokens == len(batch.ids) else "mixed steps" if tokens <= 512 else "larger steps"
        self._counts[kind] += 1
        several, self._row = len(batch.ids) > 1, None
        if several and self._chance("failed: begin", 0.003):
            raise RuntimeError("a step that fails on purpose")
        rows = batch.samples.nonzero()[0]
        if several and len(rows) and self._chance("failed: one NaN", 0.002):
            self._row = int(self._rng.integers(0, len(rows)))
        self._begin(plan)

    def rows(self, plan: Any) -> Any:
        rows, row = self._rows(plan), self._row
        if row is None:
            return rows
        draw = rows.draw

        def draw_nan(logits: torch.Tensor, newest: Any) -> Any:
            logits = logits.clone()
            logits[row] = torch.nan
            return draw(logits, newest)

        rows.plain, rows.draw = lambda: False, draw_nan
        return rows

    def drawn(self, rows: Any, *given: Any) -> Any:
        found = self._drawn(rows, *given)
        if len(rows.plan.batch.ids) > 1 and self._chance("failed: behind", 0.003):
            raise RuntimeError("a step that fails on purpose behind its forward")
        return found


class Soak:
    """Traffic on an engine."""

    def __init__(self, llm: LLM, some: list[Ask], right: list[list[Right]], seed: int) -> None:
        self.llm, self.engine, self.some, self.right = llm, llm.engine, some, right
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[Memory] = []
        self.live: dict[str, Live] = {}
        self.farthest = 0.0  # of the ties
        self._rng = np.random.default_rng(seed)
        self._number = 0
        self.trouble = Trouble(llm, seed + 1, self.counts)

    def run(self, seconds: float) -> None:
        begin, next_look = time.monotonic(), 0.0
        while (spent := time.monotonic() - begin) < seconds or self.live:
            if spent > seconds + _DRAIN:
                self.wrong.append(f"{len(self.live)} requests do not end: {sorted(self.live)[:5]}")
                break
            if spent < seconds:
                self.traffic()
            else:
                self.trouble.stopped = True
            self.engine.requests.step()
            self.engine.requests.rest(0.1)
            self.over()
            if spent > next_look:
                next_look += _LOOKS
                self.look()
        self.look()

    def traffic(self) -> None:
        rng = self._rng
        while len(self.live) < MOST_LIVE and rng.random() < 0.5:
            which = int(rng.integers(0, len(self.some)))
            ask = self.some[which]
            samples = self.engine.requests.submit(str(self._number), ask.prompt, ask.params)
            self._number += 1
            self.counts["requests"] += 1
            self.counts["long prompts"] += len(ask.prompt) > 512
            self.live.update({sample.id: Live(which, sample) for sample in samples})
            if rng.random() < 0.01:
                self.abort(samples)  # before anybody has looked at it
        if self.live and rng.random() < 0.02:
            live = list(self.live.values())
            sample = live[int(rng.integers(0, len(live)))].sample
            together = [each.sample for each in live if each.sample.request == sample.request]
            self.abort(together if rng.random() < 0.5 else [sample])
        if rng.random() < 0.02:
            begun = [each.sample for each in self.live.values() if each.sample.seated and not each.sample.token_ids]
            self.abort(begun[-1:])

    def abort(self, samples: list[Sample]) -> None:
        for sample in samples:
            state = "running" if sample.token_ids else "begun" if sample.seated else "waiting"
            self.counts[f"aborted: {state}"] += 1
        self.engine.requests.abort(samples)

    def over(self) -> None:
        for id, (which, sample) in list(self.live.items()):
            if sample.finish_reason is None:
                continue
            del self.live[id]
            ask = self.some[which]
            if sample.finish_reason == "error" or ask.poisoned:
                self.ends_badly(ask, sample)
            else:
                self.compare(ask, self.right[which][sample.index], sample)

    def ends_badly(self, ask: Ask, sample: Sample) -> None:
        if ask.poisoned and sample.finish_reason == "abort" and not sample.token_ids:
            return
        if ask.poisoned and sample.finish_reason == "error" and "no numbers" in sample.error:
            self.counts["failed: no numbers"] += 1
        else:
            self.wrong.append(f"{sample.id} ended with {sample.finish_reason}: {sample.error[:200]}")

    def compare(self, ask: Ask, right: Right, sample: Sample) -> None:
        done = sample.finish_reason != "abort"
        self.counts["done"] += done
        self.counts["tokens"] += len(sample.token_ids)
        cached, loaded = sample.cache.cached, sample.cache.host + sample.cache.store
        self.counts["cached"] += cached
        self.counts["loaded"] += loaded
        at = parting(right, sample.token_ids)
        if at is None:
            if done and len(sample.token_ids) != len(right.tokens):
                self.wrong.append(f"{sample.id} has {len(sample.token_ids)} tokens of {len(right.tokens)}")
            self.likely(ask, right, sample, len(sample.token_ids))
            return
        token = sample.token_ids[at]
        near = tie(right, at, token, ask.params, sample.index)
        if near < TIE:
            self.counts["ties"] += 1
            self.farthest = max(self.farthest, near)
            self.likely(ask, right, sample, at)
        else:
            self.counts["different"] += 1
            kind = "the likeliest" if ask.params.greedy else "drawn"
            self.wrong.append(
                f"{sample.id}: token {at} of {len(right.tokens)} ({kind}, prompt of {len(ask.prompt)}, {cached} "
                f"cached, {loaded} loaded) is {token}, not {right.tokens[at]}: {near:.2g} from a tie"
            )

    def likely(self, ask: Ask, right: Right, sample: Sample, same: int) -> None:
        """Log-probabilities, where they were asked for, are those of quiet times as far as the tokens are the same."""
        if ask.params.logprobs is None:
            return
        self.counts["with logprobs"] += 1
        told = zip(sample.logprobs[:same], right.likely[:same], sample.token_ids[:same], strict=True)
        off = [abs(ours[token].logprob - theirs[token]) for ours, theirs, token in told]
        if len(sample.logprobs) != len(sample.token_ids) or max(off, default=0.0) > _LOGPROB:
            self.wrong.append(f"{sample.id}: log-probabilities are off by {max(off, default=0.0):.2g}")

    def look(self) -> None:
        self.engine.scheduler.cache.check()
        self.memory.append(Memory.now())
        stats = self.llm.stats()
        tiers = {name: stats["tiers"][name] for name in ("loads", "saves")}
        told = {**dict(sorted(self.counts.items())), "retractions": stats["retractions"], **tiers}
        words = ", ".join(f"{name} {value}" for name, value in told.items())
        say(f"{words}; {len(self.live)} live, {len(self.wrong)} wrong; MiB {tuple(self.memory[-1])}")

    def end(self) -> None:
        """Nobody is left: nothing is under way, and forgetting everything frees every page."""
        engine, until = self.engine, time.monotonic() + _DRAIN / 2
        while (engine.loop.tiers.busy or engine.loop._flights) and time.monotonic() < until:
            engine.requests.step()
            engine.requests.rest(0.1)
        engine.scheduler.cache.check()
        stats = self.llm.stats()
        engine.scheduler.flush()
        engine.requests.step()
        for group, by_tier in engine.scheduler.cache.stats()["pages"].items():
            for tier, pages in by_tier.items():
                say(f"{group} on {tier}: {pages['free']} of {pages['capacity']} pages are free")
                if pages["free"] != pages["capacity"]:
                    self.wrong.append(f"{group} on {tier}: {pages}")
        happened = {**self.counts, "retractions": stats["retractions"], **stats["tiers"]}
        expected = ["done", "long prompts", "cached", "loaded", "with logprobs", "retractions", "loads", "saves"]
        expected += ["aborted: waiting", "aborted: begun", "aborted: running", "failed: begin", "failed: one NaN"]
        expected += ["failed: no numbers", "decode steps", "mixed steps", "larger steps"]
        expected += ["failed: behind"] * hasattr(engine.executor, "_drawn")
        self.wrong += [f"it never came to this: {name}" for name in expected if not happened.get(name)]
        first = self.memory[len(self.memory) // 3]
        for name, more in _MORE.items():
            if getattr(self.memory[-1], name) > getattr(first, name) + more:
                self.wrong.append(f"memory grows: {name}, {[getattr(each, name) for each in self.memory]} MiB")


def main(seconds: float) -> None:
    logging.getLogger("sapwood").setLevel(logging.CRITICAL)  # of every step that fails a line is written
    faulthandler.dump_traceback_later(seconds + _HANGS, exit=True)
    began = time.monotonic()
    some = asks(SEED, ASKS, FLAGS["max_model_len"])
    with opened(EXACT, **{**FLAGS, **QUIET}) as llm:
        poison(llm)
        right = quiet(llm, some)
    tokens = sum(len(each.tokens) for rights in right for each in rights)
    say(f"{len(some)} requests in quiet times, {tokens} tokens: {time.monotonic() - began:.0f} s")
    with opened(EXACT, **{**FLAGS, **BUSY}) as llm:
        poison(llm)
        sizes = llm.engine.executor.graphs.sizes if hasattr(llm.engine.executor, "graphs") else []
        say(f"ready after {time.monotonic() - began:.0f} s; graphs of {sizes}")
        soak = Soak(llm, some, right, SEED)
        soak.run(seconds)
        soak.end()
    if torch.cuda.is_available() and not sizes:
        soak.wrong.append("there are no graphs")
    different, done, ties = (soak.counts[name] for name in ("different", "done", "ties"))
    say(f"{different} of {done} answers are different, {ties} more at ties, which were {soak.farthest:.1e} at the most")
    for line in soak.wrong[:20]:
        say(f"WRONG {line}")
    say(f"{'right' if not soak.wrong else f'{len(soak.wrong)} WRONG'} after {time.monotonic() - began:.0f} s")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    main(parser.parse_args().seconds)
