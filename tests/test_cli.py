"""The command line: what it takes, refuses and says, without a model. No torch is needed for any of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import sapwood
from sapwood.bench import command, latency, profile
from sapwood.bench.tables import BenchReport, as_json, as_text, differences
from sapwood.cli import main
from sapwood.engine.flags import EngineConfig

REPORT = BenchReport("latency", {"median": "{:.1f} ms"}, {"first token": {"median": 20.0}}, ["one note"])


def fails(capsys: Any, *arguments: str) -> str:
    """What a command that is wrong says."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    return capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch) -> list[EngineConfig]:
    """`sapwood bench latency` without a model: it answers REPORT, and the list has the configs it was asked with."""
    asked: list[EngineConfig] = []

    def measure(_: Any, config: EngineConfig) -> BenchReport:
        asked.append(config)
        return REPORT

    monkeypatch.setattr(latency, "measure", measure)
    return asked


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [("--help", {"numpy", "torch"}), ("bench latency --help", {"torch", "transformers"})],
)
def test_help_imports_nothing_heavy(arguments, heavy):
    """Somebody who asks for help gets it at once.

    Mutation: cli.py imports `command` at its top; bench/run.py imports `Engine` at its top.
    """
    code = f"""
import sys
from sapwood.cli import main
try:
    main({arguments.split()!r})
except SystemExit as end:
    print(end.code, sorted({heavy!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: sapwood" in done.stdout and done.stdout.splitlines()[-1] == "0 []"


def test_it_runs_as_a_module_and_says_its_version():
    """`python -m sapwood --version`.

    Mutation: `main` does not give `__version__` to its parser.
    """
    done = subprocess.run([sys.executable, "-m", "sapwood", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"sapwood {sapwood.__version__}\n"


def test_every_flag_of_an_engine_is_an_option(capsys):
    """By its name with dashes, with what the docstring of EngineConfig says of it.

    Mutation: `add_engine_arguments` has a list of its own; `_words` finds only fields that have a line for themselves.
    """
    with pytest.raises(SystemExit):
        main(["bench", "latency", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in said
    assert "tokens computed in one step; None: 2048 on a CPU" in said
    assert "a GPU if there is one (default auto) --seed" in said, "of device, which shares a line with dtype"


def test_options_become_a_config(measured):
    """Numbers, switches in both directions, text and aliases; what is not given is as in `LLM(...)`.

    Mutation: `given_flags` leaves aliases out; `_add` makes a switch that cannot be turned off.
    """
    options = "--model m --max-num-seqs 3 --no-enable-prefix-caching --enable-lora --block-size 32 --host-cache 1GiB"
    assert main(["bench", "latency", *options.split(), "--gpu-memory-utilization", "0.5"]) == 0
    assert measured == [
        EngineConfig(
            model="m",
            max_num_seqs=3,
            enable_prefix_caching=False,
            enable_lora=True,
            page_size=32,
            host_cache="1GiB",
            gpu_memory_utilization=0.5,
        )
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--batch-size 0", "--batch-size: must be a whole number from 1 to 65536, got '0'"),
        ("--input-len many", "--input-len: must be a whole number from 1"),
        ("--output-len -1", "--output-len: must be a whole number from 1"),
        ("--num-iters 9999999999", "--num-iters: must be a whole number from 1"),
        ("--max-num-seqs 1.5", "--max-num-seqs: must be a whole number, got '1.5'"),
        ("--max-num-seqs 0", "max_num_seqs must be an integer from 1"),
        ("--device-cache much", "device_cache must be bytes"),
        ("--tensor-parallel-size 2", "tensor_parallel_size must be 1: one GPU"),
        ("--trust-remote-code", "trust_remote_code must be False"),
        ("--quantization awq", "quantization is not served here: quantised weights"),
        ("--max-num 3", "unrecognized arguments: --max-num"),
        ("--compare nowhere.json", "nowhere.json cannot be read"),
        ("--output-json /no/such/folder/x.json", "the folder of /no/such/folder/x.json is not there"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(options, says, measured, capsys):
    """Every number has bounds, and an error names the option.

    Mutation: `number` does not look at `high`; `main` of bench/command.py looks for the folder after `measure`.
    """
    assert says in fails(capsys, "bench", "latency", *options.split())
    assert not measured


def test_a_prefix_that_is_the_whole_prompt_is_refused(capsys):
    """Prompts that share all their tokens would measure nothing.

    Mutation: `measure` of bench/throughput.py lets `shared_prefix_len` be `input_len`.
    """
    said = fails(capsys, "bench", "throughput", "--input-len", "8", "--shared-prefix-len", "8")
    assert "--shared-prefix-len must be less than --input-len, which is 8, got 8" in said


def test_profile_is_a_bench_with_two_spellings(monkeypatch, capsys):
    """`--profile` instead of a bench's name, wherever it stands; beside one it is refused.

    Mutation: `_spelled` looks at the first argument alone.
    """
    asked: list[Any] = []
    monkeypatch.setattr(profile, "measure", lambda *given: asked.append(given) or REPORT)
    for words in ("profile --input-len 9 --page-size 8", "--profile --input-len 9 --page-size 8",
                  "--input-len 9 --page-size 8 --profile"):  # fmt: skip
        assert main(["bench", *words.split()]) == 0
    assert [given[0].input_len for given in asked] == [9, 9, 9]
    assert [given[1] for given in asked] == 3 * [EngineConfig(page_size=8)]
    assert "--profile is a bench of its own: leave out 'latency'" in fails(capsys, "bench", "latency", "--profile")
    with pytest.raises(SystemExit):
        main(["bench", "--profile", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "decode rows (default 64 on a GPU, 8 on a CPU)" in said and "not cached (default 64)" in said


def test_a_run_is_compared_with_an_older_one(measured, tmp_path, capsys):
    """What one run has written the next one shows ratios to, and says in what it was asked for something else. A file
    of another bench is refused.

    Mutation: `_ratio` divides the older figure by the newer one; `read_json` does not look at `bench`.
    """
    file = tmp_path / "old.json"
    assert main(["bench", "latency", "--num-iters", "5", "--model", "m", "--output-json", str(file)]) == 0
    read = json.loads(file.read_text())
    assert read["settings"]["num_iters"] == 5 and read["settings"]["model"] == "m" and read["notes"] == ["one note"]
    read["figures"]["first token"]["median"] = 16.0
    file.write_text(json.dumps(read))
    capsys.readouterr()
    assert main(["bench", "latency", "--model", "m", "--compare", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "median / older"
    assert " ".join(lines[1].split()) == "first token 20.0 ms 1.25 x"
    assert lines[2:] == ["", "one note", "num_iters: 10 now, 5 in the older run"]
    file.write_text(json.dumps({**read, "bench": "cache"}))
    assert "sapwood bench latency --output-json" in fails(capsys, "bench", "latency", "--compare", str(file))


def test_tables_line_up():
    """Names to the left, figures to the right; a row may lack a column, and an older run a row.

    Mutation: `as_text` takes the width of a column from its head alone.
    """
    report = BenchReport("x", {"a": "{:.0f}", "b": "{:.1%}"}, {"one": {"a": 12345.0}, "another": {"a": 1.0, "b": 0.5}})
    assert as_text(report).splitlines() == ["             a      b", "one      12345", "another      1  50.0%"]
    older = as_text(report, {"one": {"a": 12345.0}})
    assert older.splitlines()[1:] == ["one      12345   1.00 x", "another      1           50.0%"]
    assert differences(report, {"settings": "broken"}) == []


def test_tables_below_a_table():
    """Each under its name, also as JSON; ratios are those of the first alone.

    Mutation: `as_json` leaves `then` out.
    """
    report = REPORT._replace(then=[BenchReport("longest", {"ms": "{:.1f}"}, {"mm": {"ms": 2.0}})])
    said = as_text(report, {"first token": {"median": 10.0}, "mm": {"ms": 1.0}}).splitlines()
    assert said[2:] == ["", "one note", "", "longest", "     ms", "mm  2.0"]
    assert as_json(report)["tables"] == {"longest": {"mm": {"ms": 2.0}}} and "tables" not in as_json(REPORT)


@pytest.mark.parametrize(
    ("problem", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("no torch", name="torch"), 1, "needs torch: pip install 'sapwood[engine]'"),
        (RuntimeError("a request failed"), 1, "sapwood bench latency: a request failed"),
    ],
)
def test_what_goes_wrong_ends_in_a_line(problem, status, says, monkeypatch, capsys):
    """Ctrl-C, a package that is missing, a bench that fails: one line, a status, no traceback.

    Mutation: `main` of cli.py does not catch KeyboardInterrupt.
    """

    def measure(*_: Any) -> BenchReport:
        raise problem

    monkeypatch.setattr(latency, "measure", measure)
    assert main(["bench", "latency"]) == status
    said = capsys.readouterr()
    assert says in said.err and not said.out
    assert command.BENCHES["latency"] is latency


@pytest.mark.parametrize(("package", "command"), [("msgspec", ["serve", "-h"]), ("httptools", ["serve"])])
def test_serve_without_its_packages_says_what_to_install(package, command):
    """With the core alone `sapwood serve` is one line, whichever of its packages is the first to be missing.

    Mutation: `main` of cli.py imports a command's module before it catches anything.
    """
    script = f"import sys; sys.modules[{package!r}] = None; from sapwood.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == f"sapwood serve: needs {package}: pip install 'sapwood[server]'\n"
