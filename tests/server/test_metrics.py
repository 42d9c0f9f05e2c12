"""/metrics: what it is called, what it counts, and that our dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sapwood.cache import Namespace
from sapwood.server.observe.metrics import (
    FIRST_TOKEN,
    GAP,
    MAX_ADAPTER_LABELS,
    QUICK_GAP,
    REQUEST,
    Histogram,
    Metrics,
    one_two_five,
)

from ..engine.machine import PROMPT, Machine, toks
from .over import over, prompt, stats_of

DASHBOARD = Path(__file__).parents[2] / "dashboards/grafana.json"
FACTS = {
    "page_size": 4,
    "device_pages": {"wide": 7, "full": 40},
    "host_pages": {"wide": 7, "full": 80},
    "families": {"wide": "window", "full": "full"},
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "max_loras": 4,
}
ADAPTER = b"an adapter".ljust(32, b".")


class Shown:
    """What /metrics shows: samples by name and labels."""

    def __init__(self, text: bytes) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text.decode())}
        self.samples = [sample for family in self.families.values() for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"{name} {labels} is not shown"
        return sum(found)

    def labels(self, name: str) -> set[str]:
        return {label for sample in self.samples if sample.name == name for label in sample.labels}

    def values(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if sample.name == name}

    def bounds(self, name: str) -> list[float]:
        return [float(each.labels["le"]) for each in self.samples if each.name == f"{name}_bucket"]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("a model", FACTS)


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    """An engine with host memory and a store that has served a prompt twice."""
    made = Machine("full+window", f"memory://{tmp_path}?size=10MiB", max_loras=4)
    made.serve("first", PROMPT)
    made.serve("second", PROMPT)
    yield made
    made.close()


def shown(metrics: Metrics, stats: Any = None, running: int = 0, waiting: int = 0) -> Shown:
    return Shown(metrics.render(stats, running, waiting))


# ---- what gateways and dashboards read

STEPS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VLLM = [  # name of the samples, type, labels beside model_name and engine, bounds
    ("num_requests_running", "gauge", [], None),
    ("num_requests_waiting", "gauge", [], None),
    ("kv_cache_usage_perc", "gauge", [], None),
    ("prefix_cache_queries_total", "counter", [], None),
    ("prefix_cache_hits_total", "counter", [], None),
    ("num_preemptions_total", "counter", [], None),
    ("prompt_tokens_total", "counter", [], None),
    ("generation_tokens_total", "counter", [], None),
    ("request_success_total", "counter", ["finished_reason"], None),
    ("time_to_first_token_seconds", "histogram", [], FIRST_TOKEN),
    ("inter_token_latency_seconds", "histogram", [], GAP),
    ("e2e_request_latency_seconds", "histogram", [], REQUEST),
    ("request_queue_time_seconds", "histogram", [], REQUEST),
    ("request_prefill_time_seconds", "histogram", [], REQUEST),
    ("request_decode_time_seconds", "histogram", [], REQUEST),
    ("num_requests_waiting_by_reason", "gauge", ["reason"], None),
    ("iteration_tokens_total", "histogram", [], STEPS),
    ("request_inference_time_seconds", "histogram", [], REQUEST),
    ("request_params_n", "histogram", [], (1, 2, 5, 10, 20)),
    ("request_params_max_tokens", "histogram", [], one_two_five(1 << 20)),
    ("request_prompt_tokens", "histogram", [], one_two_five(1 << 20)),
    ("request_generation_tokens", "histogram", [], one_two_five(1 << 20)),
]


@pytest.mark.parametrize(("name", "kind", "labels", "bounds"), VLLM, ids=[row[0] for row in VLLM])
def test_names_types_labels_and_bounds_are_those_of_vllm(metrics, machine, name, kind, labels, bounds):
    """Whoever reads vLLM's metrics reads ours.

    Mutation: `_histograms` shows all bounds of `_gaps` for vLLM's too; `_vllm_counter` leaves `engine` out.
    """
    metrics.finished(over(prompt()))
    found = shown(metrics, stats_of(machine))
    name = f"vllm:{name}"
    assert found.families[name if kind == "histogram" else name.removesuffix("_total")].type == kind
    assert found.labels(f"{name}_sum" if bounds else name) == {"model_name", "engine", *labels}
    assert {each.labels["engine"] for each in found.samples if each.name == name} <= {"0"}
    if bounds:
        assert found.bounds(name) == [*bounds, float("inf")]
        assert found(f"{name}_count") == found(f"{name}_bucket", le="+Inf")


def test_a_gateway_learns_the_size_of_the_cache(metrics):
    """Pages are those of the full-attention group, also while the engine does not answer.

    Mutation: `EngineFamilies.config` takes the first group.
    """
    found = shown(metrics)
    config = {"engine": "0", "block_size": "4", "num_gpu_blocks": "40", "num_cpu_blocks": "80"}
    assert found("vllm:cache_config_info", **config, cache_dtype="bfloat16", enable_prefix_caching="True") == 1


def test_a_gateway_learns_which_adapters_are_in_use(metrics, machine):
    """The adapters of live requests, by every name they have; the value is the time, as gateways take the latest. A
    server without adapters says nothing of them.

    Mutation: `_lora_info` shows all that are loaded; `Scheduler.adapters` takes who waits for one that runs.
    """
    loaded = {"sql": ADAPTER, "also-sql": ADAPTER, "idle": b"x" * 32, "no,list": ADAPTER}
    before = time.time()
    machine.submit("live", toks(5, 9), namespace=Namespace(ADAPTER))
    named = {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": "also-sql,sql"}
    assert before <= shown(metrics, stats_of(machine, loaded))("vllm:lora_requests_info", **named) <= time.time()
    machine.until(lambda: machine.said["live"])
    named = {"max_lora": "4", "running_lora_adapters": "also-sql,sql", "waiting_lora_adapters": ""}
    assert shown(metrics, stats_of(machine, loaded))("vllm:lora_requests_info", **named) > 0
    machine.see_to("live")
    found = shown(metrics, stats_of(machine, loaded))
    named = {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert found("vllm:lora_requests_info", **named) > 0
    assert found.labels("vllm:lora_requests_info") == set(named) and found("sapwood:adapters_loaded") == 4
    assert "vllm:lora_requests_info" not in shown(Metrics("m", {}), stats_of(machine)).names


def test_why_requests_wait():
    """For room, or for something that room does not help against: pages on their way, or another adapter to leave. All
    reasons together are all that wait.

    Mutation: `deferred` counts adapters that run, or forgets what is fetched; `_waiting` shows more than there are.
    """
    metrics, name = Metrics("a model", {**FACTS, "max_loras": 1}), "vllm:num_requests_waiting_by_reason"
    machine = Machine("full+window", max_loras=1)
    machine.submit("runs", toks(5, 9), 9, namespace=Namespace(ADAPTER))
    machine.until(lambda: machine.said["runs"])
    for number in range(3):
        machine.submit(f"held {number}", toks(6, 9), namespace=Namespace(b"other".ljust(32, b".")))
    machine.submit("with who runs", toks(6, 9), namespace=Namespace(ADAPTER))
    stats = stats_of(machine)
    found = shown(metrics, stats, running=1, waiting=5)
    assert (found(name, reason="capacity"), found(name, reason="deferred")) == (2, 3)
    assert found(name) == found("vllm:num_requests_waiting") == 5
    found = shown(metrics, {**stats, "fetching": 2, "loading": 1}, waiting=20)
    assert (found(name, reason="capacity"), found(name, reason="deferred")) == (14, 6)
    assert shown(metrics, {**stats, "fetching": 99}, waiting=4)(name, reason="capacity") == 0
    assert shown(Metrics("m", FACTS), stats, waiting=4)(name, reason="deferred") == 0, "there is room for more adapters"
    assert shown(metrics, None, waiting=4)(name, reason="capacity") == 4
    machine.close()


def test_how_many_tokens_a_step_computes(metrics):
    """Those of prompts and of answers, in one step together; steps that failed are none.

    Mutation: `_finish` counts rows; `_step_sizes` shows the bucket before.
    """
    machine, name = Machine("full"), "vllm:iteration_tokens_total"
    machine.submit("a", toks(5, 9), 3)
    machine.see_to("a")
    found = shown(metrics, stats_of(machine))
    assert found(f"{name}_count") == 3 and found(f"{name}_sum") == 11
    assert [found(f"{name}_bucket", le=bound) for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [2, 2, 3, 3, 3]
    machine.close()


def test_cached_pages_are_not_in_use(metrics, machine):
    """A cache that is full of what nobody needs now has all its room to give; a gateway that read 1.0 would send nobody
    here. What eviction could free is exact where the engine says it.

    Mutation: `page_use` counts pages of the `tree` as held; or does not look for `available`.
    """
    stats = stats_of(machine)
    assert stats["cache"]["pages"]["full"]["device"]["tree"] == 6
    stats["cache"].pop("available", None)
    assert shown(metrics, stats)("vllm:kv_cache_usage_perc") == 0
    machine.submit("live", toks(7, 22), 9)
    machine.until(lambda: machine.said["live"])
    stats = stats_of(machine)
    stats["cache"]["available"] = {"full": {"device": 30}, "wide": {"device": 10}}
    assert shown(metrics, stats)("vllm:kv_cache_usage_perc") == 0.75
    assert shown(metrics, None, running=3, waiting=2)("vllm:num_requests_running") == 3
    assert shown(metrics, None, running=3, waiting=2)("vllm:num_requests_waiting") == 2


# ---- what requests leave behind


def test_a_request_is_counted_where_it_belongs(metrics):
    """Tokens by tier, misses by reason, samples by why they ended. A prompt that was never computed counts nowhere but
    in the request; one that was served by another meanwhile is no miss.

    Mutation: `by_tier` counts what came from a store as device's; `missed` does not look at `position`; `finished`
    counts prompts without a reason.
    """
    metrics.finished(
        over(
            prompt(1000, 700, "diverged", host=100, store=300, shared=50),
            prompt(50, 40, "empty", position=0, shared=40),
            prompt(80, 0, ""),
            generated=7,
            reasons=["tool_calls", "length", "abort"],
        )
    )
    metrics.finished(over(prompt(10, 9, "hit"), adapter="sql", status=499, reasons=["what?"], generated=1))
    found = shown(metrics)
    cached = "sapwood:cached_tokens_total"
    tiers = {tier: found(cached, tier=tier, adapter="base") for tier in ("device", "host", "store")}
    assert tiers == {"device": 250, "host": 100, "store": 300}
    assert found(cached, tier="shared") == 90
    assert found(cached, adapter="sql") == 9
    assert found("sapwood:cache_misses_total") == found("sapwood:cache_misses_total", reason="diverged") == 1
    assert found("sapwood:prompts_total") == 3
    assert found("vllm:prompt_tokens_total") == found("sapwood:prompt_tokens_total") == 1060
    assert found("sapwood:generation_tokens_total", adapter="base") == 7 and found("vllm:generation_tokens_total") == 8
    ends = {sample.labels["finished_reason"]: sample.value for sample in found.families["vllm:request_success"].samples}
    assert ends == {"stop": 1, "length": 1, "abort": 1, "error": 1, "repetition": 0}
    assert found("sapwood:requests_total", path="/v1/chat/completions", status="499") == 1


def test_times_of_a_request(metrics):
    """From its arrival to the first token, to its end; the queue, prefill and decode within it. And what it asked for.

    Mutation: `finished` takes the first token's time for the end's; the queue is not taken off `_prefill` or
    `_computed`; `_most` counts a prompt of several samples once.
    """
    timed = {"arrived": 5.0, "first": 5.2, "ended": 9.0, "gaps": [0.25, 0.5]}
    metrics.finished(over(prompt(queued=0.03), generated=3, n=3, max_tokens=40, reasons=["stop"] * 3, **timed))
    metrics.finished(over(prompt(0, 0, ""), arrived=5.0, first=None, ended=6.0, generated=0))
    found = shown(metrics)
    sums = {
        "time_to_first_token": (0.2, 1),
        "e2e_request_latency": (5.0, 2),
        "request_queue_time": (0.03, 1),
        "request_prefill_time": (0.17, 1),
        "request_decode_time": (3.8, 1),
        "request_inference_time": (3.97, 1),
        "inter_token_latency": (0.75, 2),
    }
    for name, (seconds, times) in sums.items():
        assert found(f"vllm:{name}_seconds_sum") == pytest.approx(seconds), name
        assert found(f"vllm:{name}_seconds_count") == times, name
    assert found("sapwood:inter_token_latency_seconds_count") == 2
    asked = [
        found(f"vllm:request_params_{name}") for name in ("n_sum", "n_count", "max_tokens_sum", "max_tokens_count")
    ]
    assert asked == [4, 2, 136, 4]  # 3 samples of 40 tokens, and one of 16


def test_all_gaps_at_once_are_the_gaps_one_by_one():
    """Against prometheus-client's own histogram: random gaps, gaps that equal a bound, and beyond the last one.

    Mutation: `add_all` searches on the right side; `buckets` does not add up.
    """
    random = np.random.default_rng(7)
    gaps = [*random.exponential(0.02, 1000).tolist(), *GAP, *QUICK_GAP, 0.0, 81.0, 1e9]
    ours, single = Histogram(GAP, QUICK_GAP), Histogram(GAP, QUICK_GAP)
    theirs = prometheus_client.Histogram("gaps", "", buckets=GAP, registry=None)
    ours.add_all(gaps)
    for gap in gaps:
        theirs.observe(gap)
        single.add(gap)
    want = [(each.labels["le"], each.value) for each in theirs.collect()[0].samples if each.name == "gaps_bucket"]
    assert ours.buckets(GAP) == want
    assert ours.buckets() == single.buckets() and ours.sum == pytest.approx(single.sum)
    ours.add_all([])
    assert ours.buckets(GAP) == want


def test_names_from_outside_cannot_fill_prometheus(metrics):
    """A hundred adapters have series of their own; the others are counted together, and nothing is lost. Whatever a
    name holds, the text can be read.

    Mutation: `_Few.of` remembers every name; or does not cut it.
    """
    for number in range(150):
        metrics.finished(over(prompt(10), adapter=f'{number} "\n\\{{}}' + "x" * 999, generated=1))
    metrics.finished(over(prompt(10), adapter="149", generated=1))
    found = shown(metrics)
    names = found.values("sapwood:generation_tokens_total", "adapter")
    assert len(names) == MAX_ADAPTER_LABELS + 2 and {"base", "other"} <= names and max(map(len, names)) == 100
    assert found("sapwood:generation_tokens_total", adapter="other") == 51
    assert found("vllm:generation_tokens_total") == 151


# ---- what the engine says


def test_the_engine_counts_and_is_shown_as_it_is(metrics, machine):
    """Pages, evictions, transfers, steps and the store's figures; looking twice counts nothing twice.

    Mutation: `_counter` of `EngineFamilies` adds to what it has shown; `_moves` takes saves for loads.
    """
    stats = stats_of(machine)
    shown(metrics, stats)
    found = shown(metrics, stats)
    assert found("sapwood:engine_up") == 1
    assert found("sapwood:steps_total") == stats["steps"] > 0 and found("sapwood:steps_failed_total") == 0
    assert found("vllm:prefix_cache_queries_total") == 50 and found("vllm:prefix_cache_hits_total") == 24
    assert found("sapwood:pages", group="full", tier="device", owner="tree") == 6
    assert found("sapwood:pages") == found("sapwood:page_capacity") == 160
    assert found("sapwood:transfers_total", kind="save") == 1 and found("sapwood:transfers_total", kind="load") == 0
    assert found("sapwood:pages_transferred_total", kind="backup") == 6
    assert found("sapwood:bytes_transferred_total", kind="backup") == found(
        "sapwood:bytes_transferred_total", kind="save"
    )
    assert found("sapwood:store_keys_total", result="stored") == 12 and found("sapwood:store_up") == 2
    assert found("sapwood:store_bytes", what="used") > 0
    machine.crowd()
    stats = stats_of(machine)
    assert shown(metrics, stats)("sapwood:pages_evicted_total", group="full", tier="device") > 0


def test_an_engine_without_a_store_has_no_figures_of_one(metrics):
    """Mutation: `EngineFamilies.of` shows a store that is not there."""
    machine = Machine()
    assert not {name for name in shown(metrics, stats_of(machine)).names if "store_" in name}
    machine.close()


def test_counts_never_fall_but_with_the_engine(metrics, machine):
    """A request that is counted anew makes the engine's counts fall for a while, which Prometheus would take for a
    restart; a restart is shown as what it is.

    Mutation: `_counter` of `EngineFamilies` shows the value as it comes; `of` does not clear `_highest`.
    """
    stats = stats_of(machine)
    hits = "vllm:prefix_cache_hits_total"
    assert shown(metrics, stats)(hits) == 24
    less = {**stats, "cache": {**stats["cache"], "cached_tokens": 20}}
    assert shown(metrics, less)(hits) == 24
    more = {**stats, "cache": {**stats["cache"], "cached_tokens": 31}}
    assert shown(metrics, more)(hits) == 31
    assert shown(metrics, {**less, "submitted": 1, "steps": 2})(hits) == 20


def test_an_engine_that_is_silent_takes_nothing_else_with_it(metrics, machine):
    """Mutation: `render` asks the engine's stats for more than they are."""
    metrics.finished(over(prompt()))
    found = shown(metrics, None)
    assert found("sapwood:engine_up") == 0 and "sapwood:pages" not in found.names
    assert found("vllm:time_to_first_token_seconds_count") == 1 and found("process_open_fds") > 0


# ---- the dashboard

FUNCTIONS = {"rate", "increase", "histogram_quantile", "topk", "sum", "min", "max"}
GROUPING = r"\b(?:by|on|group_left)\s*\(([^)]*)\)"


class Query:
    """The metrics of a query, and for each the labels it wants; and the labels that the query leaves."""

    def __init__(self, text: str) -> None:
        self.wants: list[tuple[str, str, str, str]] = []  # metric, label, operator, value
        self.metrics: list[str] = []
        self.by: list[str] = []
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}"), text
        bare = re.sub(r"\[\$__rate_interval\]", "", text)
        for metric, inside in re.findall(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}", bare):
            matchers = re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', inside)
            assert len(matchers) == inside.count('"') // 2, text
            self.wants += [(metric, *each) for each in matchers]
        bare = re.sub(r"\{[^}]*\}", "{}", bare)
        for labels in re.findall(GROUPING, bare):
            self.by += re.findall(r"\w+", labels)
        bare = re.sub(GROUPING, "", bare)
        for name, behind in re.findall(r"([a-zA-Z_:][\w:]*)\s*(\(|\{\})?", bare):
            if behind == "(":
                assert name in FUNCTIONS, f"{name} in {text}"
            else:
                self.metrics.append(name)

    def wrong(self, found: Shown) -> list[str]:
        """What it asks for and /metrics does not have."""
        said = [f"no metric {metric}" for metric in self.metrics if metric not in found.names]
        for metric, label, operator, value in self.wants:
            if label not in found.labels(metric):
                said.append(f"{metric} has no label {label}")
            elif operator == "=" and value not in found.values(metric, label):
                said.append(f"{metric} has no {label} {value}")
            elif operator == "=~" and not value.startswith("$"):
                here = found.values(metric, label)
                said += [
                    f"{metric} has no {label} {each}"
                    for each in value.split("|")
                    if each.isalpha() and each not in here
                ]
        has = {label for metric in self.metrics for label in found.labels(metric)}
        return said + [f"no label {label}" for label in self.by if label not in has]


def targets() -> list[tuple[str, str]]:
    """Every query of the dashboard, with its legend."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [(target["expr"], target["legendFormat"]) for panel in dashboard["panels"] for target in panel["targets"]]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"])
            assert asked and variable["definition"] == variable["query"]["query"]
            found.append((f'{asked[1]}{{{asked[2]}=~"$x"}}', ""))
    return found


def test_every_query_of_the_dashboard_is_answered(metrics, machine):
    """Each metric and label that it names is on /metrics of a server with a store that has served two requests, and
    legends name labels that the query leaves.

    Mutation: `sapwood:store_up` is called something else; `_pages` has no label for the owner.
    """
    metrics.finished(over(prompt()))
    metrics.finished(over(prompt(), adapter="sql", status=503, reasons=["error"]))
    found = shown(metrics, stats_of(machine, {"sql": ADAPTER}))
    asked = [(expr, legend, Query(expr)) for expr, legend in targets()]
    assert len(asked) > 30
    assert {expr: wrong for expr, _, query in asked if (wrong := query.wrong(found))} == {}
    for expr, legend, query in asked:
        assert query.metrics, expr
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= set(query.by), f"{legend!r} of {expr}"
    named = {metric for *_, query in asked for metric in query.metrics}
    assert sum(metric.startswith("sapwood:") for metric in named) >= 15


@pytest.mark.parametrize(
    ("expr", "wrong"),
    [
        ("sum(rate(sapwood:nothing_total[$__rate_interval]))", ["no metric sapwood:nothing_total"]),
        ("1 - sum by (tier) (sapwood:pages)", []),
        ("sum by (colour) (sapwood:pages)", ["no label colour"]),
        ('sapwood:pages{colour="red"}', ["sapwood:pages has no label colour"]),
        ('sapwood:pages{owner="me"} / on (tier) sapwood:steps_total', ["sapwood:pages has no owner me"]),
        ('sapwood:store_jobs_total{result=~"timeout|bored"}', ["sapwood:store_jobs_total has no result bored"]),
    ],
)
def test_a_query_for_what_is_not_there_is_seen(metrics, machine, expr, wrong):
    """Mutation: `Query` takes a metric without braces for a function; `wrong` of `Query` does not look at values."""
    assert Query(expr).wrong(shown(metrics, stats_of(machine))) == wrong


def test_the_dashboard_is_one_that_grafana_takes():
    """Panels have numbers and places of their own, and ask the data source that is chosen above.

    Mutation: two panels of the file lie over each other.
    """
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 42 and dashboard["uid"] == "sapwood"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    places = [panel["gridPos"] for panel in panels]
    covered = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(covered) == len(set(covered)) and max(x for x, _ in covered) < 24
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
