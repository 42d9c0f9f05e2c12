"""What /metrics shows of the engine: the counts in its stats. They are not added up here, so nothing is counted twice;
an engine that was started again counts from 0."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .figures import page_use

STEP = (1.0, *(float(1 << power) for power in range(3, 15)))  # bounds of a step's tokens, as vLLM has them
Values = float | Mapping[Any, float]  # one value; or by the value of a label, or by those of several
Stats = Mapping[str, Any]
_OWNERS = ("free", "leases", "tree", "flight", "unhooked")
_STATES = ("waiting", "fetching", "loading", "prefilling", "decoding")
_MOVES = {"save": "saves", "load": "loads", "fetch": "fetches", "backup": "backups"}
_LOOKUPS = ("lookups", "joined", "hits", "shortened", "late", "offered_again", "not_backed_up")
_JOBS = ("submitted", "done", "timeout", "error", "closed", "late", "dropped", "refused")
_KEYS = ("found", "absent", "hit", "miss", "failed", "stored", "full", "lost")
_BOTH = ("group", "tier")


class EngineFamilies:
    """Made once for a server. A count of the engine can fall a little, when a request is counted anew; a scraper would
    take that for a restart and add everything again. So the highest value that was shown stays until it is passed."""

    def __init__(self, model: str, facts: Stats) -> None:
        self._model = model
        self._facts = facts
        self._highest: dict[tuple[str, ...], float] = {}
        self._age = (0, 0)

    def of(self, stats: Stats) -> Iterator[Metric]:
        age = (stats["submitted"], stats["steps"])
        if age[0] < self._age[0] or age[1] < self._age[1]:  # another engine
            self._highest.clear()
        self._age = age
        yield from self._vllm(stats)
        yield from self._requests(stats)
        yield from self._pages(stats["cache"])
        yield from self._moves(stats["cache"]["transfers"], stats["tiers"])
        if stats["tiers"]["store"]:
            yield from self._store(stats["store"], stats["tiers"]["store"])

    def config(self) -> Metric:
        """vLLM's figures of the cache, of which gateways read its size: that of the full-attention group."""
        facts = self._facts
        pages, hosts, families = facts.get("device_pages", {}), facts.get("host_pages", {}), facts.get("families", {})
        full = [name for name, family in families.items() if family == "full" and name in pages]
        group = full[0] if full else max(pages, key=lambda name: pages[name], default=None)
        labels = {
            "engine": "0",
            "block_size": str(facts.get("page_size", "")),
            "num_gpu_blocks": str(pages.get(group, "")),
            "num_cpu_blocks": str(hosts.get(group, "")),
            "cache_dtype": str(facts.get("dtype", "")),
            "enable_prefix_caching": str(facts.get("enable_prefix_caching", "")),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "How the cache is made.", labels=tuple(labels))
        info.add_metric(list(labels.values()), 1)
        return info

    # ---- what vLLM has

    def _vllm(self, stats: Stats) -> Iterator[Metric]:
        cache, engine = stats["cache"], {"engine": "0"}
        says = "Device pages needed now, from 0 to 1, in the fullest group; what is only cached does not count."
        yield self._gauge("vllm:kv_cache_usage_perc", says, page_use(stats, "device").held, **engine)
        says = "Tokens of prompts"
        yield self._counter("vllm:prefix_cache_queries", f"{says}.", cache["prompt_tokens"], **engine)
        yield self._counter("vllm:prefix_cache_hits", f"{says} that were cached.", cache["cached_tokens"], **engine)
        says = "Requests that had to give their memory back."
        yield self._counter("vllm:num_preemptions", says, stats["retractions"], **engine)
        yield self._step_sizes(stats["step_tokens"])
        most = self._facts.get("max_loras", 0)
        if most:
            yield self._lora_info(stats, most)

    def deferred(self, stats: Stats) -> int:
        """Requests that wait for anything but room."""
        running, waiting = stats["live_adapters"]["running"], stats["live_adapters"]["waiting"]
        most, held = self._facts.get("max_loras", 0), 0
        if most and len(running) >= most:
            held = sum(count for adapter, count in waiting.items() if adapter not in running)
        return int(stats["fetching"] + stats["loading"] + held)

    def _step_sizes(self, steps: Stats) -> Metric:
        """The engine counts them by powers of two, of which vLLM shows some."""
        upto = list(accumulate(steps["sizes"]))
        bounds = [(str(bound), float(upto[int(bound).bit_length() - 1])) for bound in STEP]
        labels = ("model_name", "engine")
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens computed in a step.", labels=labels)
        family.add_metric([self._model, "0"], [*bounds, ("+Inf", float(upto[-1]))], steps["sum"])
        return family

    @staticmethod
    def _lora_info(stats: Stats, most: int) -> Metric:
        """The adapters of requests that are computed, and of requests that wait. vLLM has no label for the model
        here."""
        named: dict[str, str] = {}
        for state, live in stats["live_adapters"].items():
            names = [name for name, digest in stats["adapters"].items() if digest.hex() in live and "," not in name]
            named[state] = ",".join(sorted(names))
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of live requests; when it was so.", labels=labels)
        info.add_metric([str(most), named["running"], named["waiting"]], time.time())
        return info

    # ---- what we have

    def _requests(self, stats: Stats) -> Iterator[Metric]:
        states = {state: stats[state] for state in _STATES}
        yield self._gauge("sapwood:requests_live", "Samples by what they do.", states, "state")
        yield self._counter("sapwood:retractions", "Requests retracted.", stats["retractions"])
        yield self._counter("sapwood:steps", "Steps done.", stats["steps"])
        yield self._counter("sapwood:steps_failed", "Steps that failed.", stats["steps_failed"])
        yield self._gauge("sapwood:adapters_loaded", "Adapters that requests may name.", len(stats["adapters"]))
        yield self._gauge("sapwood:namespaces", "Namespaces of the cache.", len(stats["cache"]["namespaces"]))

    def _pages(self, cache: Stats) -> Iterator[Metric]:
        tiers = {(group, tier): pages for group, both in cache["pages"].items() for tier, pages in both.items()}
        says = "Pages by owner: nobody, requests (leases), the cache (tree), transfers (flight), readers of what was "
        owners = {(*where, owner): pages[owner] for where, pages in tiers.items() for owner in _OWNERS}
        yield self._gauge("sapwood:pages", f"{says}forgotten (unhooked).", owners, *_BOTH, "owner")
        capacity = {where: pages["capacity"] for where, pages in tiers.items()}
        yield self._gauge("sapwood:page_capacity", "Pages there are.", capacity, *_BOTH)
        used = {(group, tier): cache["bytes"][group][tier] for group, tier in tiers}
        yield self._gauge("sapwood:page_bytes_used", "Bytes of pages that are not free.", used, *_BOTH)
        evicted = {(group, tier): cache["evicted"][group][tier] for group, tier in tiers}
        yield self._counter("sapwood:pages_evicted", "Cached pages that had to make room.", evicted, *_BOTH)

    def _moves(self, counts: Stats, tiers: Stats) -> Iterator[Metric]:
        says = "Transfers begun: save and load between device and host, fetch and backup between host and store."
        begun = {kind: counts[many] for kind, many in _MOVES.items()}
        yield self._counter("sapwood:transfers", says, begun, "kind")
        failed = {kind: counts[f"{many}_failed"] for kind, many in _MOVES.items()}
        yield self._counter("sapwood:transfers_failed", "Transfers that failed.", failed, "kind")
        pages = {
            "save": counts["pages_saved"],
            "load": counts["pages_loaded"],
            "fetch": counts["pages_fetched"],
            "backup": tiers["pages_backed_up"],
        }
        yield self._counter("sapwood:pages_transferred", "Pages that arrived.", pages, "kind")
        moved = {
            "save": tiers["mover"].get("save_bytes", 0),
            "load": tiers["mover"].get("load_bytes", 0),
            "fetch": tiers["store"].get("bytes_read", 0),
            "backup": tiers["store"].get("bytes_written", 0),
        }
        yield self._counter("sapwood:bytes_transferred", "Bytes that arrived.", moved, "kind")
        yield self._gauge("sapwood:transfers_under_way", "Transfers now.", tiers["under_way"])

    def _store(self, asked: Stats, store: Stats) -> Iterator[Metric]:
        breakers = {"read": store["breaker"], "write": store["write_breaker"]}
        up = {way: float(breaker["state"] != "open") for way, breaker in breakers.items()}
        yield self._gauge("sapwood:store_up", "Whether the store is asked: 0 after errors.", up, "direction")
        outages = {way: breaker["opened"] for way, breaker in breakers.items()}
        yield self._counter("sapwood:store_outages", "How often it was given up for a while.", outages, "direction")
        lookups = {what: asked[what] for what in _LOOKUPS}
        yield self._counter("sapwood:store_lookups", "Prefixes looked for; backups put off.", lookups, "result")
        jobs = {what: store[what] for what in _JOBS}
        yield self._counter("sapwood:store_jobs", "Jobs by what became of them.", jobs, "result")
        keys = {what: store[what] for what in _KEYS}
        yield self._counter("sapwood:store_keys", "Keys by what the store said.", keys, "result")
        yield self._counter("sapwood:store_values_bad", "Values that were not as stored.", store["bad"], "reason")
        yield self._gauge("sapwood:store_keys_waiting", "Keys that wait for the store.", store["waiting"])
        again = store.get("process", {}).get("restarts", 0)
        yield self._counter("sapwood:store_restarts", "How often its process was started again.", again)
        room = {what: store["backend"][what] for what in ("used", "limit") if store["backend"].get(what) is not None}
        yield self._gauge("sapwood:store_bytes", "Bytes that the store uses, and may use.", room, "what")

    # ---- families

    def _gauge(self, name: str, says: str, values: Values, *labels: str, **more: str) -> Metric:
        family = GaugeMetricFamily(name, says, labels=("model_name", *more, *labels))
        for key, value in _rows(values):
            family.add_metric([self._model, *more.values(), *key], value)
        return family

    def _counter(self, name: str, says: str, values: Values, *labels: str, **more: str) -> Metric:
        family = CounterMetricFamily(name, says, labels=("model_name", *more, *labels))
        for key, value in _rows(values):
            value = self._highest[name, *key] = max(value, self._highest.get((name, *key), 0.0))
            family.add_metric([self._model, *more.values(), *key], value)
        return family


def _rows(values: Values) -> Iterator[tuple[tuple[str, ...], float]]:
    if not isinstance(values, Mapping):
        yield (), values
        return
    for key, value in values.items():
        yield (key,) if isinstance(key, str) else key, value
