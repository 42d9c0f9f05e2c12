"""An engine without a model: scheduler, cache and host memory as they are, and steps that take as long as one says. For
measuring a server apart from a model, and for testing what talks to one.

    sapwood serve --factory sapwood.bench.paced:paced --factory-flags '{"step_ms": 5, "tokenizer": "tokenizer.json"}'

Tokens are a function of what came before, so that the same prompt gets the same answer. `log` names a file that tells
when: rows of three float64, the seed of a request, how many tokens it has (-1: it was dropped), and the monotonic clock
when the step that brought the last of them was over.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sapwood.cache import CacheGroup
from sapwood.engine.loop import EngineLoop
from sapwood.engine.lora.files import CONFIG
from sapwood.engine.lora.reader import Folder
from sapwood.engine.params import Likely
from sapwood.engine.request_table import RequestTable
from sapwood.engine.samples import GrammarMasks, Sample, StepLogprobs
from sapwood.engine.transfer.arena import DeviceArena, HostArena, PageLayout, PagePart
from sapwood.engine.transfer.movers import open_mover
from sapwood.engine.transfer.tiers import Tiers
from sapwood.scheduler import Event, Plan, Scheduler, SchedulerConfig, StepDone, StepFailed
from sapwood.store import Fingerprint, GroupLayout, open_store

_FLAGS: dict[str, Any] = {
    "step_ms": 0.0,
    "token_us": 0.0,  # for each token of a prompt that is computed
    "vocabulary": 49152,
    "eos": 2,
    "says": None,  # the tokens it chooses from; None: any but special ones
    "ends_after": 0,  # tokens, then eos; 0: never
    "log": None,
    "page_size": 16,
    "device_pages": 8192,
    "host_pages": 0,
    "store": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 65536,
    "tokenizer": None,
    "folder": "",
    "name": "paced",
    "fails": 0,  # every so many steps
    "max_loras": 0,
    "max_logprobs": 20,
    "overlap": 0,
}
_PLAIN = 300  # tokens below are special, bytes and the like


class PacedEngine:
    """The parts of an engine, without a model."""

    def __init__(self, flags: Mapping[str, Any], events: bool) -> None:
        given = {**_FLAGS, **flags}
        unknown = given.keys() - _FLAGS.keys()
        if unknown:
            raise ValueError(f"there is no flag {min(unknown)!r}")
        self.flags = SimpleNamespace(**given)
        layout = PageLayout([PagePart(0, "k", (self.flags.page_size, 8), "uint8")])
        groups = [
            CacheGroup(
                "full", "full", self.flags.device_pages, host_pages=self.flags.host_pages, page_bytes=layout.page_bytes
            )
        ]
        self.scheduler = Scheduler(
            SchedulerConfig(
                self.flags.page_size,
                groups,
                self.flags.max_num_batched_tokens,
                self.flags.max_num_seqs,
                max_loras=self.flags.max_loras,
                events=events,
                store=self.flags.store is not None,
            )
        )
        mover = store = None
        if self.flags.host_pages:
            mover = open_mover(DeviceArena.allocate(groups, {"full": layout}), HostArena(groups))
        if self.flags.store is not None:
            layouts = (GroupLayout("full", "full", layout.page_bytes, None, "paced"),)
            print_ = Fingerprint(b"paced" * 6 + b"xx", "uint8", self.flags.page_size, layouts, 0, 1)
            store = open_store(self.flags.store, print_, process=True)
        samples: dict[str, Sample] = {}
        self.masks = GrammarMasks(self.flags.vocabulary)
        self.loop = EngineLoop(
            self.scheduler, _Pacer(self.flags, samples, self.masks), Tiers(self.scheduler, mover, store)
        )
        self.requests = _LoggedRequests(
            self.loop,
            samples,
            vocabulary=self.flags.vocabulary,
            max_model_len=self.flags.max_model_len,
            eos=[self.flags.eos],
            tokenizer=None,
            seeds=random.Random(0),
            max_logprobs=self.flags.max_logprobs,
            adapters=_Adapters() if self.flags.max_loras else None,
            logprobs=self._logprobs,
        )
        if self.flags.log is not None:
            self.requests.log = open(self.flags.log, "wb", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self.requests.close()
        if self.requests.log is not None:
            self.requests.log.close()
            self.requests.log = None

    def _logprobs(self, plan: Plan, event: StepDone | StepFailed) -> StepLogprobs:
        """Made up, where a request wants some: each token is likely, and its neighbours less so."""
        found: dict[str, Likely] = {}
        prompts: dict[str, list[tuple[int, Likely]]] = {}
        if isinstance(event, StepDone):
            for id, token in event.tokens.items():  # type: ignore[union-attr]
                sample = self.requests.samples.get(id)
                if sample is None:
                    continue
                if sample.params.logprobs is not None:
                    found[id] = self._likely(token, sample.params.logprobs)
                if sample.scores_prompt and not sample.token_ids:
                    top = sample.params.prompt_logprobs or 0
                    prompts[id] = [(at, self._likely(int(token), top)) for at, token in enumerate(sample.prompt[1:], 1)]
        return StepLogprobs(found, prompts)

    def _likely(self, token: int, top: int) -> Likely:
        return {(token + at) % self.flags.vocabulary: (-0.25 - at, at + 1) for at in range(max(1, top))}


class _LoggedRequests(RequestTable):
    """Writes down when samples get their tokens, and when they are dropped."""

    log: FileIO | None = None

    def step(self) -> list[Sample]:
        changed = super().step()
        if self.log is not None and changed:
            now = time.monotonic()
            rows = [(sample.params.seed or 0, len(sample.token_ids), now) for sample in changed]
            self.log.write(np.array(rows).tobytes())
        return changed

    def abort(self, samples: Sequence[Sample]) -> list[Sample]:
        over = super().abort(samples)
        if self.log is not None and over:
            now = time.monotonic()
            self.log.write(np.array([(sample.params.seed or 0, -1, now) for sample in over]).tobytes())
        return over


class _Pacer:
    """Runs nothing, in the time that flags give a step."""

    def __init__(self, flags: Any, samples: Mapping[str, Sample], masks: GrammarMasks) -> None:
        self.flags, self.samples, self.masks = flags, samples, masks
        self._due = 0.0

    def execute(self, plan: Plan) -> Sequence[Event]:
        batch, flags = plan.batch, self.flags
        if not batch.ids:
            return []
        now = time.monotonic()
        for _, id in plan.seated:
            sample = self.samples.get(id)
            if sample is not None:
                sample.seated = sample.seated or now
        fresh = int(batch.lengths[batch.decodes :].sum())
        step = flags.step_ms / 1e3 + fresh * flags.token_us / 1e6
        if step:
            self._due = max(now, self._due + step if now - self._due < step else now + step)
            time.sleep(max(0.0, self._due - time.monotonic()))
        assert plan.step is not None
        if flags.fails and plan.step % flags.fails == 0:
            raise RuntimeError("a step that was to fail")
        rows = batch.samples.nonzero()[0].tolist()
        samples = [self.samples.get(batch.ids[row]) for row in rows]
        index = np.array([0 if sample is None else len(sample.token_ids) for sample in samples])
        masks = self.masks.of(samples, index, lambda: index)
        tokens: dict[str, int] = {}
        for at, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            mask = None if masks is None or sample is None or sample.grammar is None else masks[at]
            tokens[batch.ids[row]] = self._next(sample, mask)
        return [StepDone(plan.step, tokens)]

    def _next(self, sample: Any, mask: Any) -> int:
        flags = self.flags
        if sample is None:
            return _PLAIN
        said = sample.token_ids
        last = said[-1] if said else int(sample.prompt[-1])
        seed = 0 if sample.params.seed is None else sample.params.seed + sample.index
        mixed = (last * 2654435761 + len(said) * 40503 + seed * 97 + 12345) & 0x7FFFFFFF
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            if flags.eos in allowed and len(said) > 40:
                return int(flags.eos)
            return int(allowed[mixed % len(allowed)]) if len(allowed) else int(flags.eos)
        if flags.ends_after and len(said) + 1 >= flags.ends_after and len(said) + 1 > sample.params.min_tokens:
            return int(flags.eos)
        if flags.says:
            return int(flags.says[mixed % len(flags.says)])
        return int(_PLAIN + mixed % (flags.vocabulary - _PLAIN - 1))


class _Adapters:
    """Names only: a folder's name is its content."""

    def __init__(self) -> None:
        self._names: dict[str, bytes] = {}

    def read(self, path: str, root: str | None = None) -> bytes:
        with Folder(root, path) as folder:
            os.close(folder.open(CONFIG))
        return Path(path).name.encode().ljust(32, b"\0")[:32]

    def add(self, name: str, digest: bytes) -> bytes:
        if self._names.get(name, digest) != digest:
            raise ValueError(f"the name {name!r} is in use for other content: unload it first")
        self._names[name] = digest
        return digest

    def unload(self, name: str) -> bytes:
        return self._names.pop(name)

    def names(self) -> dict[str, bytes]:
        return dict(self._names)

    def hold(self, digest: bytes) -> None:
        pass

    def release(self, digest: bytes) -> None:
        pass


def paced(flags: Mapping[str, Any], progress: Callable[[str], None], events: bool) -> Any:
    engine = PacedEngine(flags, events)
    groups = engine.scheduler.config.groups
    facts = {
        "name": engine.flags.name,
        "device": "none",
        "dtype": "none",
        "max_num_seqs": engine.flags.max_num_seqs,
        "max_num_batched_tokens": engine.flags.max_num_batched_tokens,
        "enable_prefix_caching": True,
        "max_logprobs": engine.flags.max_logprobs,
        "max_loras": engine.flags.max_loras,
        "page_size": engine.flags.page_size,
        "device_pages": {group.name: group.device_pages for group in groups},
        "host_pages": {group.name: group.host_pages for group in groups},
        "page_bytes": {group.name: group.page_bytes for group in groups},
        "families": {group.name: group.family for group in groups},
        "tokenizer": engine.flags.tokenizer,
    }
    return SimpleNamespace(engine=engine, folder=engine.flags.folder, tokenizer=engine.flags.tokenizer, facts=facts)
