"""What /metrics shows, for Prometheus: `vllm:` names as dashboards and gateways know them, and our own.

    a request is over --> finished --> counts and histograms here --+
    the engine's stats (metrics_engine.py) -------------------------+--> render

Requests are counted when they are over. Labels are bounded: names that come from outside are known to the server, and
of each kind there are only so many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sapwood.engine.cache_report import TIERS

from ..generation import Model
from .figures import Finished
from .metrics_engine import EngineFamilies

MAX_ADAPTER_LABELS = 100  # adapters with a label of their own
_MAX_NAME_CHARACTERS = 100  # characters of a name
_DEFAULT_CONTEXT_TOKENS = 1 << 20  # tokens, for bounds, where the model's context is not known
_REASONS = ("short", "empty", "diverged", "evicted", "no_snapshot", "window_gone", "off")
_FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "abort", "error": "error"}
# Bounds of histograms in seconds: vLLM's, so that its dashboards and ours can be laid over each other.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
GAP = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
# Bounds below them, where a quick server spends its time.
QUICK_GAP = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.015)
QUICK_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)


class Metrics:
    """`facts`: those of the engine's `Ready`. One thread calls `finished`; another may call `render`, which takes a few
    ms."""

    def __init__(self, model_name: str, facts: Mapping[str, Any]) -> None:
        self._model = model_name
        self._engine = EngineFamilies(model_name, facts)
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._adapters = _Few(MAX_ADAPTER_LABELS)
        self._paths = _Few(32)
        self._reasons = _Few(32)

        self._success = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        base = [("base",)]  # labels that are known are shown from the start: a rate needs a first value
        self._requests = _counts([])
        self._prompts = _counts(base)
        self._prompt_tokens = _counts(base)
        self._generated = _counts(base)
        self._cached = _counts([(tier, "base") for tier in TIERS])
        self._misses = _counts([(reason, "base") for reason in _REASONS])

        lengths = one_two_five(facts.get("max_model_len") or _DEFAULT_CONTEXT_TOKENS)
        self._first = Histogram(FIRST_TOKEN)
        self._gaps = Histogram(GAP, QUICK_GAP)
        self._whole = Histogram(REQUEST, QUICK_REQUEST)
        self._queued = Histogram(REQUEST, QUICK_REQUEST)
        self._prefill = Histogram(REQUEST)
        self._decode = Histogram(REQUEST)
        self._lengths = Histogram(lengths)
        self._answers = Histogram(lengths)
        self._computed = Histogram(REQUEST)
        self._samples = Histogram(SAMPLES)
        self._most = Histogram(lengths)

    def finished(self, done: Finished) -> None:
        adapter = self._adapter(done.adapter)
        self._requests[self._paths.of(done.path), str(done.status)] += 1
        for prompt in done.prompts:
            if not prompt.cache.reason:  # never computed
                continue
            length = len(prompt.ids)
            self._prompts[(adapter,)] += 1
            self._prompt_tokens[(adapter,)] += length
            self._lengths.add(length)
            self._queued.add(prompt.queued)
            for tier, tokens in zip(TIERS, prompt.cache.by_tier, strict=True):
                self._cached[tier, adapter] += tokens
            if prompt.cache.missed:
                self._misses[self._reasons.of(prompt.cache.reason), adapter] += 1
        for reason in done.reasons:
            self._success[_FINISHED.get(reason, "error")] += 1
        self._generated[(adapter,)] += done.uncounted_tokens
        self._answers.add(done.completion_tokens / max(1, len(done.reasons)), len(done.reasons))
        self._whole.add(done.ended - done.arrived)
        self._samples.add(done.n, len(done.prompts))
        self._most.add(done.max_tokens, len(done.reasons))
        if done.first is not None:
            self._first.add(done.first - done.arrived)
            self._decode.add(done.ended - done.first)
            if done.prompts:
                self._prefill.add(max(0.0, done.first - done.arrived - done.prompts[0].queued))
                self._computed.add(max(0.0, done.ended - done.arrived - done.prompts[0].queued))
        self._gaps.add_all(done.gaps)

    def generated(self, model: Model, tokens: int) -> None:
        """A request that still runs has so many more tokens."""
        self._generated[(self._adapter(None if model.adapter is None else model.name),)] += tokens

    def _adapter(self, name: str | None) -> str:
        return "base" if name is None else self._adapters.of(name)

    def render(self, stats: Mapping[str, Any] | None, running: int, waiting: int, held: int = 0) -> bytes:
        """The text of /metrics. `stats`: None while the engine does not answer. `held`: bytes of bodies and answers."""
        families = [
            *self._process.collect(),
            self._now("sapwood:engine_up", "Whether the engine answers.", float(stats is not None)),
            self._now("vllm:num_requests_running", "Requests that are computed.", running),
            self._now("vllm:num_requests_waiting", "Requests that wait.", waiting),
            self._waiting(waiting, 0 if stats is None else self._engine.deferred(stats)),
            self._now("sapwood:inflight_bytes", "Bytes of bodies, and of answers that were not taken.", held),
            self._engine.config(),
            *(self._engine.of(stats) if stats is not None else ()),
            *self._counters(),
            *self._histograms(),
        ]
        return generate_latest(_Collected(families))

    def _counters(self) -> Iterator[Metric]:
        tokens, answers = sum([*self._prompt_tokens.values()]), sum([*self._generated.values()])
        by_reason: dict[tuple[str, ...], int] = {(reason,): n for reason, n in self._success.items()}
        yield self._vllm_counter("vllm:prompt_tokens", "Tokens of prompts.", {(): tokens})
        yield self._vllm_counter("vllm:generation_tokens", "Tokens generated.", {(): answers})
        yield self._vllm_counter("vllm:request_success", "Samples that ended, by why.", by_reason, "finished_reason")
        yield self._counter("sapwood:requests", "Requests by path and status.", self._requests, "path", "status")
        yield self._counter("sapwood:prompts", "Prompts computed.", self._prompts, "adapter")
        yield self._counter("sapwood:prompt_tokens", "Tokens of prompts.", self._prompt_tokens, "adapter")
        yield self._counter("sapwood:generation_tokens", "Tokens generated.", self._generated, "adapter")
        yield self._counter(
            "sapwood:cached_tokens",
            "Tokens of prompts that were not computed, by where they came from; shared: computed by another request "
            "meanwhile.",
            self._cached,
            *("tier", "adapter"),
        )
        yield self._counter(
            "sapwood:cache_misses",
            "Prompts of which more could have been cached, by why it was not.",
            self._misses,
            *("reason", "adapter"),
        )

    def _histograms(self) -> Iterator[Metric]:
        vllm = ("vllm:", ("model_name", "engine"), [self._model, "0"])
        ours = ("sapwood:", ("model_name",), [self._model])
        for family_of, name, says, histogram, bounds in (
            (vllm, "time_to_first_token_seconds", "Until the first token.", self._first, FIRST_TOKEN),
            (vllm, "inter_token_latency_seconds", "Between two tokens.", self._gaps, GAP),
            (ours, "inter_token_latency_seconds", "Between two tokens.", self._gaps, None),
            (vllm, "e2e_request_latency_seconds", "Until a request was over.", self._whole, REQUEST),
            (ours, "e2e_request_latency_seconds", "Until a request was over.", self._whole, None),
            (vllm, "request_queue_time_seconds", "Until a prompt was first computed.", self._queued, REQUEST),
            (ours, "request_queue_time_seconds", "Until a prompt was first computed.", self._queued, None),
            (vllm, "request_prefill_time_seconds", "From then to the first token.", self._prefill, REQUEST),
            (vllm, "request_decode_time_seconds", "From the first token to the end.", self._decode, REQUEST),
            (vllm, "request_inference_time_seconds", "From then to the end.", self._computed, REQUEST),
            (vllm, "request_params_n", "Samples that a prompt was to have.", self._samples, SAMPLES),
            (vllm, "request_params_max_tokens", "Tokens that a sample might have.", self._most, None),
            (vllm, "request_prompt_tokens", "Tokens of a prompt.", self._lengths, None),
            (vllm, "request_generation_tokens", "Tokens of an answer.", self._answers, None),
        ):
            prefix, labels, values = family_of
            family = HistogramMetricFamily(prefix + name, says, labels=labels)
            family.add_metric(values, histogram.buckets(bounds), histogram.sum)
            yield family

    def _now(self, name: str, says: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, says, labels=("model_name", "engine"))
        family.add_metric([self._model, "0"], value)
        return family

    def _waiting(self, all: int, deferred: int) -> Metric:
        says = "Requests that wait: for room; or (deferred) for pages on their way, or for adapters to leave."
        labels = ("model_name", "engine", "reason")
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", says, labels=labels)
        deferred = min(all, deferred)
        family.add_metric([self._model, "0", "capacity"], all - deferred)
        family.add_metric([self._model, "0", "deferred"], deferred)
        return family

    def _vllm_counter(self, name: str, says: str, counts: Mapping[tuple[str, ...], int], *labels: str) -> Metric:
        return self._counter(name, says, {("0", *key): n for key, n in counts.items()}, "engine", *labels)

    def _counter(self, name: str, says: str, counts: Mapping[tuple[str, ...], int], *labels: str) -> Metric:
        family = CounterMetricFamily(name, says, labels=("model_name", *labels))
        for values, count in list(counts.items()):  # a copy: another thread may add to them
            family.add_metric([self._model, *values], count)
        return family


def _counts(known: Iterable[tuple[str, ...]]) -> defaultdict[tuple[str, ...], int]:
    return defaultdict(int, dict.fromkeys(known, 0))


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


class _Few:
    """Labels for the first so many names, and "other" for the rest: a series in Prometheus stays for ever."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        known = self._known.get(name)
        if known is not None:
            return known
        if len(self._known) >= self._most:
            return "other"
        return self._known.setdefault(name, name[:_MAX_NAME_CHARACTERS])


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to `most`."""
    steps = (digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


class Histogram:
    """Counts by upper bound, of a thousand values at once; a value that equals a bound is below it."""

    def __init__(self, *bounds: Sequence[float]) -> None:
        self.bounds = sorted({bound for some in bounds for bound in some})
        self.sum = 0.0
        self._edges = np.array(self.bounds)
        self._counts = np.zeros(len(self.bounds) + 1, np.int64)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add_all(self, values: Sequence[float]) -> None:
        if values:
            these = np.asarray(values, np.float64)
            self._counts += np.bincount(self._edges.searchsorted(these), minlength=len(self._counts))
            self.sum += float(these.sum())

    def buckets(self, bounds: Sequence[float] | None = None) -> list[tuple[str, float]]:
        """How many values are up to each bound, for all bounds or for some of them; and how many values there are."""
        upto = self._counts.cumsum().tolist()
        shown = self.bounds if bounds is None else bounds
        found = [(str(bound), upto[bisect_left(self.bounds, bound)]) for bound in shown]
        return [*found, ("+Inf", upto[-1])]
