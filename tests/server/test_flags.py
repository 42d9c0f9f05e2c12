"""The flags of `sapwood serve`, as people have them: those of vLLM, in its spellings, in files, in the environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sapwood.cli import main
from sapwood.engine.flags import EngineConfig, from_flags
from sapwood.engine.foreign import FOREIGN as ENGINE
from sapwood.server.command import engine_flags, parser, server_flags, warn_of_unknown
from sapwood.server.config import LoraModule, ServerConfig
from sapwood.server.foreign import FOREIGN as FRONTEND

# All flags of `vllm serve`: of 0.30, as its parser adds them, and those that 0.6 to 0.12 had besides.
VLLM = """
headless api-server-count config grpc disable-log-stats aggregate-engine-logging fail-on-environ-validation
shutdown-timeout gdn-prefill-backend kda-prefill-backend enable-log-requests disable-log-requests
lora-modules chat-template chat-template-content-format trust-request-chat-template default-chat-template-kwargs
response-role return-tokens-as-token-ids enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser
tool-parser-plugin tool-server log-config-file max-log-len enable-prompt-tokens-details enable-per-request-metrics
enable-server-load-tracking enable-force-include-usage enable-tokenizer-info-endpoint enable-log-outputs
enable-log-deltas cohere-is-reasoning-model cohere-format log-error-stack tokens-only fingerprint-mode fingerprint-value
host port data-parallel-supervisor-port dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
dp-supervisor-probe-failure-threshold uds uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints
allow-credentials allowed-origins allowed-methods allowed-headers api-key ssl-keyfile ssl-certfile ssl-ca-certs
enable-ssl-refresh ssl-cert-reqs ssl-ciphers root-path middleware enable-request-id-headers disable-fastapi-docs
h11-max-incomplete-event-size h11-max-header-count enable-offline-docs enable-flash-late-interaction
model runner convert tokenizer tokenizer-mode trust-remote-code dtype seed hf-config-path allowed-local-media-path
allowed-media-domains revision code-revision tokenizer-revision max-model-len quantization quantization-config
allow-deprecated-quantization enforce-eager enable-return-routed-experts return-sampling-mask max-logprobs logprobs-mode
use-fp64-gumbel enable-trace-replay disable-sliding-window disable-cascade-attn skip-tokenizer-init enable-prompt-embeds
served-model-name config-format hf-token hf-overrides model-class-overrides pooler-config generation-config
override-generation-config enable-sleep-mode enable-cumem-allocator enable-nccl-comm-suspend model-impl
logits-processors io-processor-plugin renderer-num-workers
load-format download-dir safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size
model-loader-extra-config ignore-patterns use-tqdm-on-load pt-load-map-location attention-backend mamba-backend
mamba-ssu-algorithm enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds reasoning-parser
reasoning-parser-plugin
distributed-executor-backend pipeline-parallel-size master-addr master-port nnodes node-rank
distributed-timeout-seconds cpu-distributed-timeout-seconds numa-bind numa-bind-nodes numa-bind-cpus device-ids
tensor-parallel-size decode-context-parallel-size dcp-comm-backend dcp-q-replicate dcp-kv-cache-interleave-size
cp-kv-cache-interleave-size prefill-context-parallel-size data-parallel-size data-parallel-rank
data-parallel-start-rank data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb enable-expert-parallel
enable-batch-sharded-sampling enable-ep-weight-filter all2all-backend enable-dbo ubatch-size enable-elastic-ep
dbo-decode-token-threshold dp-sync-interval dbo-prefill-token-threshold disable-nccl-for-dp-synchronization enable-eplb
eplb-config expert-placement-strategy max-parallel-loading-workers ray-workers-use-nsight disable-custom-all-reduce
worker-cls worker-extension-cls enable-fault-tolerance fault-tolerance-config
block-size gpu-memory-utilization kv-cache-memory-bytes kv-cache-dtype num-gpu-blocks-override enable-prefix-caching
prefix-caching-hash-algo prefix-cache-retention-interval kv-cache-dtype-skip-layers kv-sharing-fast-prefill
mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size prefix-match-unit mamba-cache-mode replayssm-buffer-len
use-replayssm kv-offloading-size kv-offloading-backend offload-backend cpu-offload-gb cpu-offload-params
offload-group-size offload-num-in-group offload-prefetch-step offload-params
language-model-only limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb
mm-processor-cache-type mm-hasher-algorithm mm-shm-cache-max-object-size-mb mm-encoder-only mm-encoder-tp-mode
mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path
mm-encoder-fp8-scale-save-margin interleave-mm-strings skip-mm-profiling video-pruning-rate video-pruning-method
mm-tensor-ipc mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize
enable-lora max-loras max-lora-rank lora-dtype enable-tower-connector-lora max-cpu-loras fully-sharded-loras
lora-target-modules default-mm-loras specialize-active-lora enable-mixed-moe-lora-format enable-moe-shared-loras
show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces per-request-spec-decode-metrics
kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-layerwise-nvtx-tracing enable-mfu-metrics
enable-logging-iteration-details jit-monitor-mode jit-monitor-verbose enable-mm-processor-stats
max-num-batched-tokens max-num-scheduled-tokens max-num-seqs max-num-queued-reqs max-num-queued-tokens
long-prefill-token-threshold scheduling-policy enable-chunked-prefill disable-chunked-mm-input scheduler-cls
scheduler-reserve-full-isl watermark prefill-schedule-interval disable-hybrid-kv-cache-manager async-scheduling
stream-interval cudagraph-capture-sizes max-cudagraph-capture-size ir-op-priority enable-flashinfer-autotune
enable-bf16x3-router-gemm moe-backend linear-backend speculative-config spec-method spec-model spec-tokens
diffusion-config kv-transfer-config kv-events-config ec-transfer-config ec-manager-config compilation-config
attention-config reasoning-config kernel-config additional-config structured-outputs-config profiler-config
optimization-level performance-mode weight-transfer-config mamba-config
task override-pooler-config logits-processor-pattern override-attention-dtype rope-scaling rope-theta
guided-decoding-backend guided-decoding-disable-fallback guided-decoding-disable-any-whitespace
guided-decoding-disable-additional-properties num-redundant-experts eplb-window-size eplb-step-interval
eplb-log-balancedness enable-multimodal-encoder-data-parallel swap-space calculate-kv-scales
disable-mm-preprocessor-cache lora-extra-vocab-size max-num-partial-prefills max-long-partial-prefills
num-lookahead-slots external-parameters cuda-graph-sizes use-v2-block-manager max-seq-len-to-capture
tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config enable-lora-bias long-lora-scaling-factors
num-scheduler-steps multi-step-stream-outputs scheduler-delay-factor preemption-mode device worker-use-ray
engine-use-ray disable-async-output-proc disable-frontend-multiprocessing speculative-model num-speculative-tokens
enable-prompt-adapter
"""
PASTED = """
meta-llama/Llama-3.2-1B-Instruct --enable-auto-tool-choice --tool-call-parser hermes --enable-chunked-prefill
--max-cpu-loras 8 --disable-log-requests --swap-space 4 --enable-prompt-tokens-details --api-server-count 1
--max_model_len 4096 --gpu_memory_utilization=0.8 -tp 1 --dtype half --uvicorn-log-level info
--no-enable-log-requests --compilation-config.level 3 -O3 --limit-mm-per-prompt {"image":0} --scheduling-policy priority
--max-num-seqs 32
--served-model-name one two --cudagraph-capture-sizes 1 2 4 --distributed-executor-backend mp --disable-log-stats
"""


def read(*arguments: str, environment: dict[str, str] | None = None) -> tuple[ServerConfig, dict[str, Any]]:
    """What a server would be started with."""
    asked, config = server_flags(["--store", "none", *arguments], environment or {})
    return config, engine_flags(asked)


def fails(*arguments: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        read(*arguments, environment=environment)
    return str(caught.value)


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_S18_no_flag_of_vllm_is_unknown():
    """Each is one of ours, or accepted with a line, or refused with a reason: nobody is told that there is none.

    Mutation: a row of FOREIGN is left out; `add_foreign` is not called for the frontend's.
    """
    options = {option for action in parser()._actions for option in action.option_strings}
    assert [name for name in VLLM.split() if f"--{name}" not in options] == []
    ours = {action.dest for action in parser()._actions} - ENGINE.keys() - FRONTEND.keys()
    assert not ENGINE.keys() & FRONTEND.keys() and not (ENGINE.keys() | FRONTEND.keys()) & ours


@pytest.mark.parametrize("name", [*ENGINE, *FRONTEND])
def test_S18_every_foreign_flag_is_told_or_refused_by_name(name, caplog):
    """What is the case anyway, and what means nothing here, has one line in the log; anything else is refused in one
    line that names the flag and says why.

    Mutation: `take_foreign` accepts everything; or says nothing of what it accepts.
    """
    flag = {**ENGINE, **FRONTEND}[name]
    option = "--" + name.replace("_", "-")
    words = {bool: [], int: ["7"], float: ["7.5"]}.get(type(flag.value), ["something"])
    if isinstance(flag.value, bool) and flag.value and not flag.idle:
        option = "--no-" + option[2:]  # what is not the case
    if flag.idle:
        read(option, *words)
        assert [record.getMessage() for record in caplog.records] == [f"{name} changes nothing here: {flag.why}"]
        return
    said = fails(option, *words)
    assert said.startswith(f"{name} ") and flag.why in said and "\n" not in said
    if flag.value not in (None, "", ()):
        as_it_is = ["--" + name.replace("_", "-")] if flag.value is True else [f"--no-{name.replace('_', '-')}"]
        read(*(as_it_is if isinstance(flag.value, bool) else [option, str(flag.value)]))
        assert f"{name} changes nothing here: {flag.why}" in caplog.text


def test_S18_a_command_that_was_made_for_vllm(caplog):
    """What people paste starts a server: with what means something here, and a line for each of the others.

    Mutation: `_dashed` leaves underscores as they are; `half` is no dtype; a switch takes the word behind it.
    """
    config, flags = read(*PASTED.split())
    assert flags["model"] == "meta-llama/Llama-3.2-1B-Instruct" and flags["dtype"] == "float16"
    assert (flags["max_model_len"], flags["gpu_memory_utilization"], flags["max_num_seqs"]) == (4096, 0.8, 32)
    assert config.tool_call_parser == "hermes" and config.served_model_name == ("one", "two")
    told = [record.getMessage().split()[0] for record in caplog.records]
    assert len(told) == len(set(told)) == 17 and {"swap_space", "api_server_count", "tensor_parallel_size"} < set(told)


def test_S18_sizes_have_a_unit_or_none(capsys):
    """As `--device-cache` has; what is no size is refused by the flag's name.

    Mutation: `_add` takes `_bytes` for whole numbers.
    """
    config, _ = read("--inflight-bytes", "64MiB", "--body-bytes", "4096")
    assert (config.inflight_bytes, config.body_bytes) == (64 << 20, 4096)
    with pytest.raises(SystemExit):
        main(["serve", "--inflight-bytes", "much"])
    assert "--inflight-bytes: must be bytes with a unit such as 20GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("-tp 2", "tensor_parallel_size must be 1: one GPU serves a model here, got 2"),
        ("--api-server-count 4", "api_server_count must be 1: one process answers HTTP here, got 4"),
        ("--no-enable-chunked-prefill", "enable_chunked_prefill must be True: prompts are always computed in chunks"),
        ("--max-logprobs -1", "max_logprobs must be a number here, got -1: the whole vocabulary is not told"),
        ("--max-logprobs 1025", "max_logprobs must be an integer from 0 to 1024, got 1025"),
        ("--kv-cache-memory-bytes 5", "kv_cache_memory_bytes is not served here: here it is --device-cache"),
        ("--middleware a.b", "middleware is not served here: no code of others is loaded"),
        ("--root-path models", "root_path must be a path such as /models/one, got 'models'"),
        ("--root-path /a//b", "root_path must be a path"),
        ("--metrics-key all", "metrics_key must be one of none, api, admin, got 'all'"),
        ("--metrics-key admin", "metrics_key=admin needs admin_key"),
        ("--dtype fp8", "dtype must be one of auto, float32, bfloat16, float16, float64, got 'fp8'"),
        ("--load-format tensorizer", "load_format must be one of auto, dummy"),
        ("--device tpu", 'device must be "auto", "cpu" or "cuda", got \'tpu\''),
        ("--cache-policy lru", "cache_policy must be one of fcfs, prefix"),
    ],
)
def test_S18_what_would_change_something_is_refused(arguments, says):
    """By the name of the flag, with what would be right.

    Mutation: `EngineConfig` does not look at one of them; `-tp` is no option.
    """
    assert says in fails(*arguments.split())


def test_S18_an_engine_in_a_script_refuses_the_same(caplog):
    """`LLM(swap_space=4)` runs and says so, `LLM(tensor_parallel_size=2)` does not; nor does a mistyped keyword.

    Mutation: `from_flags` does not know FOREIGN.
    """
    assert from_flags("m", {"swap_space": 4, "enable_chunked_prefill": True}) == EngineConfig(model="m")
    assert len(caplog.records) == 2
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1"):
        from_flags("m", {"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=r"there is no flag 'max_modellen' \(did you mean max_model_len\?\)"):
        from_flags("m", {"max_modellen": 2})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("serve --max-model-length 5", "unrecognized arguments: --max-model-length (did you mean --max-model-len?)"),
        ("serve --no_such_flag", "unrecognized arguments: --no_such_flag\n"),
        ("serve --kv-events-config.topic x", "--kv-events-config takes its value in one piece"),
        ("bench latency --batch-sise 3", "unrecognized arguments: --batch-sise 3 (did you mean --batch-size?)"),
    ],
)
def test_S18_who_mistypes_a_flag_is_asked_whether_he_meant_the_nearest(arguments, says, capsys):
    """A flag that nobody has is an error, with the name that it looks like.

    Mutation: `parsed` calls `parse_args`.
    """
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2 and says in capsys.readouterr().err


FILES = {
    "server.yaml": "swap-space: 4\nmax_model_len: 77\nblock-size: 32\nlora-modules: [{name: a, path: /p}]\n",
    "server.toml": 'swap-space = 4\nmax_model_len = 77\nblock-size = 32\nlora-modules = [{name = "a", path = "/p"}]\n',
    "server.json": '{"swap-space": 4, "max_model_len": 77, "block-size": 32, "lora-modules": ["a=/p"]}',
}


@pytest.mark.parametrize("name", FILES)
def test_S18_flags_in_a_file_are_those_of_the_command_line(name, tmp_path, caplog):
    """Also vLLM's, by their names with dashes or underscores, aliases and lists; what is refused is refused there too,
    and what nobody has is named.

    Mutation: `_from_file_and_environment` knows only the names of fields; `_as_arguments` writes an object as Python
    does.
    """
    config, flags = read("--enable-lora", "--config", written(tmp_path, name, FILES[name]))
    assert flags["max_model_len"] == 77 and flags["page_size"] == 32
    assert config.adapters == (LoraModule("a", "/p"),) and "swap_space changes nothing here" in caplog.text
    assert "quantization is not served" in fails("--config", written(tmp_path, "q.yaml", "quantization: awq\n"))
    said = fails("--config", written(tmp_path, "m.yaml", "max_model_length: 3\n"))
    assert "there is no flag 'max_model_length' (did you mean max_model_len?)" in said


def test_S18_flags_in_the_environment_are_those_of_the_command_line(caplog):
    """Numbers that look like switches, lists as JSON, vLLM's names; the command line goes before them, and a list comes
    from one place.

    Mutation: `_plain` takes 1 for True everywhere; the names of the environment are added to those of the command line.
    """
    given = {
        "SAPWOOD_MAX_LORAS": "1",
        "SAPWOOD_HOST_CACHE": "0",
        "SAPWOOD_ENABLE_LORA": "1",
        "SAPWOOD_ENFORCE_EAGER": "false",
        "SAPWOOD_SWAP_SPACE": "4",
        "SAPWOOD_SERVED_MODEL_NAME": '["a", "b"]',
        "SAPWOOD_LORA_MODULES": '[{"name": "x", "path": "/x"}, "y=/y"]',
        "SAPWOOD_MAX_QUEUE": "9",
    }
    config, flags = read(environment=given)
    assert (flags["max_loras"], flags["host_cache"], flags["enable_lora"]) == (1, "0", True)
    assert config.served_model_name == ("a", "b") and config.adapters == (LoraModule("x", "/x"), LoraModule("y", "/y"))
    assert "swap_space changes nothing here" in caplog.text and config.max_queue == 9
    config, _ = read("--max-queue", "5", "--served_model_name", "c", environment=given)
    assert config.max_queue == 5 and config.served_model_name == ("c",)
    assert "tensor_parallel_size must be 1" in fails(environment={"SAPWOOD_TENSOR_PARALLEL_SIZE": "2"})
    said = "must be words or a JSON list"
    assert said in fails(environment={"SAPWOOD_SERVED_MODEL_NAME": "[a"})


def test_S18_a_variable_that_nobody_reads_is_warned_of(caplog):
    """A flag that is mistyped in the environment is not ignored in silence. Those of keys, builds and tests are known.

    Mutation: `warn_of_unknown` is silent; or warns of SAPWOOD_API_KEY.
    """
    ours = ("CONFIG", "API_KEY", "ADMIN_KEY", "TEST_VENVS", "TEST_CACHE", "SEED", "DEVICE", "BLOCK_SIZE")
    with caplog.at_level(logging.WARNING):
        warn_of_unknown({**{f"SAPWOOD_{name}": "1" for name in ours}, "PATH": "x", "SAPWOODS": "y"})
        assert not caplog.records
        warn_of_unknown({"SAPWOOD_MAX_MODEL_LENGTH": "5", "SAPWOOD_QQQ": ""})
    assert [record.getMessage() for record in caplog.records] == [
        "there is no flag for the variable SAPWOOD_MAX_MODEL_LENGTH (did you mean SAPWOOD_MAX_MODEL_LEN?)",
        "there is no flag for the variable SAPWOOD_QQQ",
    ]


def test_S18_adapters_as_vllm_names_them():
    """name=path, JSON objects with a base model, and a JSON list of them; another field is refused.

    Mutation: `_lora_module` splits JSON at its first equals sign, or takes fields it does not know.
    """
    one = {"name": "a", "path": "/p=1", "base_model_name": "base"}
    config, _ = read("--enable-lora", "--lora-modules", json.dumps(one), "b=/q=2", json.dumps([{**one, "name": "c"}]))
    assert config.adapters == (
        LoraModule("a", "/p=1", "base"),
        LoraModule("b", "/q=2"),
        LoraModule("c", "/p=1", "base"),
    )
    for wrong in ('{"name": "a"}', '{"name": "a", "path": 3}', json.dumps({**one, "is_3d": True}), "a", "=b", "{"):
        assert "lora_modules must be name=path or a JSON object with name, path" in fails(
            "--enable-lora", "--lora-modules", wrong
        )


def test_S18_origins_as_vllm_names_them():
    """A JSON list is a list, not an origin that no page has.

    Mutation: `_json_list` gives words back as they are.
    """
    config, _ = read("--allowed-origins", '["https://a.example", "https://b.example"]')
    assert config.allowed_origins == ("https://a.example", "https://b.example")
