"""`sapwood bench` on small models with random weights: figures are what they say they are. None of them is a bar."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sapwood.bench.cache import Found, _must_be
from sapwood.bench.calibrate import StepTimer
from sapwood.bench.predict import Predicted
from sapwood.bench.run import Prompts, opened, run
from sapwood.cli import leave, main
from sapwood.engine.executor.executor import ModelExecutor
from sapwood.engine.flags import EngineConfig
from sapwood.sim import MeasuredCost

from .zoo import config_of

SMALL = "--load-format dummy --device-cache 8MiB --max-num-seqs 8 --page-size 4 --max-model-len 300 --no-progress"

ONE = MeasuredCost(((1, 1.0), (1 << 20, 1.0)), ((1, 1.0), (1 << 20, 1.0)), 0.0, 0.0, 0.0, 0.0)  # a second a step


@pytest.fixture
def folder(tmp_path, request) -> Path:
    """A model's folder with nothing but its config."""
    kind = getattr(request, "param", "llama")
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind).to_dict()))
    return tmp_path


def config_for(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), load_format="dummy", device_cache="8MiB", max_num_seqs=2, max_model_len=300, progress=False
    )


def bench(folder: Path, what: str, options: str = "") -> dict[str, Any]:
    """What a bench has written."""
    file = folder / f"{what}.json"
    status = main(["bench", what, "--model", str(folder), *SMALL.split(), *options.split(), "--output-json", str(file)])
    assert status == 0
    return json.loads(file.read_text())


def test_tokens_are_timed_one_by_one(folder):
    """Every request has a time for each of its tokens, in order, and none before anything was computed.

    Mutation: `run` notes a time for every sample that `RequestTable.step` returns, also without a token.
    """
    with opened(config_for(folder)) as engine:
        prompts = Prompts(engine, 0)
        done = run(engine, prompts.some(3, 20), [5, 1, 7])
        assert [len(request.times) for request in done.requests] == [5, 1, 7]
        for request in done.requests:
            assert request.times[0] > 0 and request.times == sorted(request.times)
            assert request.times[-1] <= done.seconds
        assert done.requests[2].times[0] > done.requests[0].times[0], "two at a time: the third waits"
        with pytest.raises(ValueError, match="must fit into the context, which is 300"):
            run(engine, [prompts.one(299)], [2])


@pytest.mark.parametrize("handler", [signal.default_int_handler, leave])
def test_ctrl_c_waits_for_the_end_of_a_step(folder, caplog, handler):
    """Pressed in the middle of a step, it comes out after it, and the engine closes without a complaint: in a script,
    and in a program that it would end at once while it loads.

    Mutation: `interrupts` leaves the signal as it is, or leaves it to cli.py.
    """
    before = signal.signal(signal.SIGINT, handler)  # what runs in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), opened(config_for(folder)) as engine:
            begin = engine.executor.begin
            engine.executor.begin = lambda plan: (signal.raise_signal(signal.SIGINT), begin(plan))
            run(engine, Prompts(engine, 0).some(2, 20), [50, 50])
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not engine.requests.samples and not caplog.records


def test_latency(folder, capsys):
    """A whole request takes longer than its first token, and nothing was cached.

    Mutation: `measure` of bench/latency.py counts the batches of `num_iters_warmup` too; asks with the same prompts.
    """
    read = bench(folder, "latency", "--input-len 24 --output-len 4 --batch-size 3 --num-iters 2")
    whole, first, each = (read["figures"][name] for name in ("whole request", "first token", "per output token"))
    assert whole["median"] > first["median"] > 0 and whole["p99"] >= whole["median"]
    assert each["mean"] == pytest.approx((whole["mean"] - first["mean"]) / 3)
    assert read["notes"] == ["6 requests, 0 prompt tokens cached"]
    assert "whole request" in capsys.readouterr().out


def test_throughput_counts_tokens_and_what_was_shared(folder):
    """Rates belong together, and a prefix that all share is computed once.

    Mutation: `_figures` counts prompt tokens as output; `_prompts` makes a new prefix for each.
    """
    read = bench(folder, "throughput", "--num-prompts 6 --input-len 40 --output-len 3 --shared-prefix-len 32")
    ours = read["figures"]["sapwood"]
    assert ours["output tokens/s"] == pytest.approx(3 * ours["requests/s"])
    assert ours["total tokens/s"] == pytest.approx(43 * ours["requests/s"])
    assert 5 * 32 / 240 <= ours["cached"] < 5 * 36 / 240
    assert [*read["figures"]] == ["sapwood"]


def test_transformers_beside(folder):
    """Its two ways of generating have done the same work, and ratios are of output tokens.

    Mutation: `measure_peers` times setting up memory; the ratio is upside down.
    """
    read = bench(folder, "throughput", "--num-prompts 3 --input-len 20 --output-len 4 --peer transformers")
    figures = read["figures"]
    assert [*figures] == ["sapwood", "generate_batch", "generate"]
    for name in ("generate_batch", "generate"):
        ratio = figures["sapwood"]["requests/s"] / figures[name]["requests/s"]
        assert figures[name]["sapwood does"] == pytest.approx(ratio)


@pytest.mark.parametrize("folder", ["llama", "gemma3", "bamba"], indirect=True)
def test_cache_finds_each_prompt_where_it_says(folder):
    """Cold, on the device, on host, in a store: with nothing cached the first time and all but a page's rest later.

    Mutation: `_little` gives the second engine all of the device's memory; `settle` does not wait for backups.
    """
    figures = bench(folder, "cache", "--input-len 90 --repeats 5 --host-cache 16MiB")["figures"]
    assert [*figures] == ["cold", "device", "host", "store"]
    assert [figures[name]["cached tokens"] >= 88 for name in figures] == [False, True, True, True]
    assert (
        figures["host"]["pages loaded"] and not figures["host"]["pages fetched"] and figures["store"]["pages fetched"]
    )
    assert figures["cold"]["of cold"] == 1


def test_a_store_of_the_users_may_be_measured_twice(folder):
    """The same prompts again, on a store that has them: still cold, because nobody may share with an earlier run.

    Mutation: `_stages` asks without a salt of its own.
    """
    for _ in range(2):
        store = f"file://{folder}/store?size=1GiB"
        figures = bench(
            folder, "cache", f"--input-len 90 --repeats 3 --host-cache 16MiB --store {store} --store-patience 600"
        )["figures"]
        assert not figures["cold"]["cached tokens"] and figures["store"]["pages fetched"]


def test_cache_needs_room_on_host(folder, capsys):
    """Host memory that cannot hold the prompts would show something else: refused, with what would do.

    Mutation: `_must_fit` looks at the device's pages.
    """
    options = ["--model", str(folder), *SMALL.split(), "--input-len", "200", "--host-cache", "64KiB"]
    assert main(["bench", "cache", *options]) == 2
    assert "host_cache must hold 5 prompts of 200 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "found"),
    [
        ("cold", Found(1.0, 1, 0, 0)),
        ("device", Found(1.0, 99, 1, 0)),
        ("host", Found(1.0, 99, 0, 0)),
        ("host", Found(1.0, 99, 25, 25)),
        ("store", Found(1.0, 90, 25, 25)),
        ("store", Found(1.0, 99, 25, 0)),
    ],
)
def test_a_figure_that_is_not_what_it_says_is_an_error(stage, found):
    """A prompt that was found somewhere else, or not all of it.

    Mutation: `_must_be` takes a request that was served by the device for one from host.
    """
    with pytest.raises(RuntimeError, match="not what it would be called"):
        _must_be(stage, [found], 100, 4)


def test_calibration_predicts_a_workload(folder, monkeypatch):
    """Step times of a tiny model, on a clock of its own that knows what each step takes, are read back by the simulator
    and predict a small workload.

    Mutation: `StepTimer.decode` gives the time of all steps for that of one; `_at` reads seconds for counts.
    """
    clock, begin = SimpleNamespace(now=0.0), ModelExecutor.begin

    def takes(executor: ModelExecutor, plan: Any) -> None:
        begin(executor, plan)
        starts, lengths = np.asarray(plan.batch.starts), np.asarray(plan.batch.lengths)
        clock.now += 1e-3 + 2e-5 * lengths.sum() + 1e-7 * (starts + lengths).sum()

    monkeypatch.setattr(ModelExecutor, "begin", takes)
    monkeypatch.setattr("sapwood.bench.run.time", SimpleNamespace(perf_counter=lambda: clock.now))
    read = bench(folder, "calibrate", "--repeats 2 --context-len 128 --num-prompts 8")
    cost = MeasuredCost.load(folder / "calibrate.json")
    assert cost.tokens[0][0] == 2 and cost.rows[0][0] == 1 and cost.rows[-1][0] == 8
    assert cost.kv_bytes == 3 * 2 * 2 * 16 * 4, "layers, K and V, heads, numbers of a head, bytes"
    assert read["predicted"] / read["took"] == pytest.approx(1, rel=0.15)
    assert "decode, 8 rows of 1, context 32" in read["figures"]


def test_steps_are_measured_at_the_sizes_they_are_filled_up_to(folder):
    """Where steps are graphs: each of their sizes, one just beyond, twice the largest and just beyond, and the largest
    step; what is between takes as long as the next one.

    Mutation: `_sizes` leaves out those beyond; `StepTimer.cost` keeps rows as they were measured.
    """
    with opened(replace(config_for(folder), max_num_seqs=6, max_num_batched_tokens=128)) as engine:
        engine.executor.graphs = SimpleNamespace(sizes=[4, 8, 16])
        meter = StepTimer(engine, 128)
        assert [size.tokens for size in meter.prefills] == [4, 8, 16, 18, 32, 36, 128]
        assert [size.rows for size in meter.decodes] == [4, 6]
        meter.round()
        cost = meter.cost()
        assert cost.padded == (4, 8, 16) and [n for n, _ in cost.rows] == [4, 8]
        five, eight = (cost.seconds(np.zeros(n), np.ones(n)) for n in (5, 8))
        assert five == eight


def test_a_small_cache_holds_all_rows_with_their_contexts(folder):
    """Contexts are as long as all rows of the smallest step fit with, also where steps have many rows at the least.

    Mutation: `StepTimer` gives one row as much as it gives them all.
    """
    with opened(replace(config_for(folder), max_num_seqs=8, max_num_batched_tokens=128)) as engine:
        engine.executor.graphs = SimpleNamespace(sizes=[8, 16])
        pages = next(group.device_pages for group in engine.sized.groups)
        meter = StepTimer(engine, 1 << 20)
        assert meter.long.rows * meter.long.context <= pages * engine.config.page_size // 2
        assert meter.same == meter.long._replace(shared=True)


def test_the_simulator_plans_ahead_like_the_engine(folder):
    """As many steps as the engine itself takes, with one step ahead and a smaller budget beside those who stream.

    Mutation: `Predicted` gives its loop an executor in one piece; forgets what it has computed.
    """
    for overlap, mixed in ((0, 0), (1, 0), (1, 24)):
        flags = {"overlap": overlap, "max_mixed_tokens": mixed, "max_num_batched_tokens": 64}
        with opened(replace(config_for(folder), **flags)) as engine:
            prompts = Prompts(engine, 0).some(5, 40)
            run(engine, prompts, [9, 3, 1, 20, 5])
            simulated = Predicted(ONE, engine.scheduler.config)
            answers = simulated.run(prompts, [9, 3, 1, 20, 5])
            assert [len(answer) for answer in answers] == [9, 3, 1, 20, 5]
            assert simulated.seconds == pytest.approx(engine.scheduler.stats()["steps"], abs=0.5)
            run(engine, prompts, [2] * 5)
            simulated.run(prompts, [2] * 5)
            assert simulated.seconds == pytest.approx(engine.scheduler.stats()["steps"], abs=0.5)


@pytest.mark.long
def test_calibration_predicts_within_15_percent(folder):
    """On a machine that has nothing else to do, of three tries the best. A model large enough that steps take longer
    than what surrounds them.

    Mutation: `MeasuredCost.seconds` leaves out decode rows beside chunks.
    """
    config = config_of("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    tries = [bench(folder, "calibrate", "--repeats 5 --num-prompts 16 --device-cache 64MiB") for _ in range(3)]
    errors = [read["predicted"] / read["took"] - 1 for read in tries]
    assert min(map(abs, errors)) < 0.15, errors
