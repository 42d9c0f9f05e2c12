"""Flags of vLLM's that a command or a script may bring along, and that are no field here: what would change something
is refused by name, what says what is the case anyway or means nothing here is accepted with a line in the log.

All by vLLM's names with underscores. Those of its HTTP frontend are in sapwood.server.foreign.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Foreign(NamedTuple):
    """A flag that is not ours. `value`: what is the case anyway; nothing is, if that is None, "" or (). Its type is
    that of the flag: a bool is a switch, a tuple are several words. `idle`: whatever it says changes nothing here.
    `others`: values that say what is the case, too."""

    value: Any
    why: str
    idle: bool = False
    others: tuple[Any, ...] = ()
    short: tuple[str, ...] = ()


def not_here(why: str, *others: Any, **flags: Any) -> dict[str, Foreign]:
    """Flags that are refused, unless they say what is the case anyway."""
    return {name: Foreign(value, why, others=others) for name, value in flags.items()}


def idle(why: str, **flags: Any) -> dict[str, Foreign]:
    """Flags that change nothing here, whatever they say. Only the types of these values count."""
    return {name: Foreign(value, why, idle=True) for name, value in flags.items()}


def with_short(flags: Mapping[str, Foreign], **names: str) -> dict[str, Foreign]:
    return {name: flag._replace(short=tuple(names.get(name, "").split())) for name, flag in flags.items()}


def take_foreign(name: str, value: Any, known: Mapping[str, Foreign]) -> None:
    """A flag of `known` that says `value`: a line in the log if that changes nothing, else ValueError."""
    flag = known[name]
    nothing = flag.value in (None, "", ())
    if flag.idle or value == flag.value or value in flag.others or (nothing and value in (None, "", "None", ())):
        log.warning("%s changes nothing here: %s", name, flag.why)
    elif nothing:
        raise ValueError(f"{name} is not served here: {flag.why}, got {value!r:.60}")
    else:
        raise ValueError(f"{name} must be {flag.value!r}: {flag.why}, got {value!r:.60}")


_ONE_GPU = "one GPU serves a model here"
_MODELS = "a model is what its folder says"
_OTHERS_CODE = "no code of others is loaded"
_TEXT = "models are served for text alone"
_KV = "K and V are kept as the model computes them"
_OURS = "kernels and their order are chosen for the model and its device"
_SPECULATIVE = "there is no speculative decoding yet"

FOREIGN: Mapping[str, Foreign] = with_short(
    {
        # ---- where and on what it runs
        **not_here(
            _ONE_GPU,
            **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "nnodes"), 1),
            **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
            **dict.fromkeys(("enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_elastic_ep"), False),
            **dict.fromkeys(("enable_batch_sharded_sampling", "enable_ep_weight_filter"), False),
            **dict.fromkeys(("enable_fault_tolerance", "enable_nccl_comm_suspend"), False),
            node_rank=0,
            worker_use_ray=False,
            engine_use_ray=False,
            eplb_config=None,
            device_ids=None,
            fault_tolerance_config=None,
            ubatch_size=0,
        ),
        **not_here(
            "start several servers, and a router before them",
            **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank", "data_parallel_rpc_port"), None),
            data_parallel_address=None,
            **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), False),
            data_parallel_size=1,
            data_parallel_size_local=1,
            data_parallel_multi_port_external_lb=False,
        ),
        **idle(
            "it is for several GPUs, and one serves a model here",
            **dict.fromkeys(("distributed_executor_backend", "data_parallel_backend", "master_addr"), ""),
            **dict.fromkeys(("all2all_backend", "expert_placement_strategy", "dcp_comm_backend"), ""),
            **dict.fromkeys(("disable_custom_all_reduce", "disable_nccl_for_dp_synchronization"), False),
            **dict.fromkeys(("ray_workers_use_nsight", "dcp_q_replicate", "eplb_log_balancedness"), False),
            **dict.fromkeys(("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size", "master_port"), 0),
            **dict.fromkeys(("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"), 0),
            **dict.fromkeys(("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dp_sync_interval"), 0),
            **dict.fromkeys(("num_redundant_experts", "eplb_window_size", "eplb_step_interval"), 0),
            max_parallel_loading_workers=0,
        ),
        **not_here(
            "processors are left to the system: taskset or numactl bind a server to some",
            numa_bind=False,
            numa_bind_nodes=(),
            numa_bind_cpus=(),
        ),
        # ---- what is loaded
        **not_here("no code that comes with a model is run", trust_remote_code=False, code_revision=None),
        **not_here(
            "quantised weights are not served yet",
            quantization=None,
            quantization_config=None,
            allow_deprecated_quantization=False,
        ),
        **not_here(
            _MODELS,
            **dict.fromkeys(("hf_config_path", "rope_scaling", "rope_theta", "hf_overrides"), None),
            **dict.fromkeys(("model_class_overrides", "override_attention_dtype"), None),
            disable_sliding_window=False,
        ),
        **not_here(_MODELS, "hf", config_format="auto", tokenizer_mode="auto"),
        **not_here(
            "give a folder with a generation_config.json to --generation-config", override_generation_config=None
        ),
        **not_here("give the tokenizer as a folder or a tokenizer.json", tokenizer_revision=None),
        **not_here("models generate text here", "auto", task="generate", runner="generate", convert="none"),
        **not_here(
            "models generate text here",
            pooler_config=None,
            override_pooler_config=None,
            diffusion_config=None,
        ),
        **not_here(
            _OTHERS_CODE,
            **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "io_processor_plugin"), None),
            **dict.fromkeys(("logits_processors", "external_parameters"), ()),
            logits_processor_pattern=None,
            additional_config=None,
        ),
        **not_here("set HF_TOKEN, which is in no list of processes", hf_token=None),
        **not_here("set HF_HUB_CACHE", download_dir=None),
        **not_here("safetensors are read as they lie", model_loader_extra_config=None, pt_load_map_location="cpu"),
        **not_here(
            "weights are where they are computed with, all of them",
            **dict.fromkeys(("offload_group_size", "offload_num_in_group"), 0),
            **dict.fromkeys(("cpu_offload_params", "offload_params"), ()),
            cpu_offload_gb=0.0,
            offload_backend=None,
            offload_prefetch_step=1,
        ),
        **not_here("a server is there or it is not", enable_sleep_mode=False, enable_cumem_allocator=False),
        **not_here("weights are changed by LLM.update_weights alone", weight_transfer_config=None),
        **idle("the model is what transformers makes of it", model_impl="transformers"),
        **idle(
            "only safetensors are read, one tensor after the other",
            ignore_patterns=(),
            safetensors_load_strategy="",
            safetensors_prefetch_num_threads=0,
            safetensors_prefetch_block_size=0,
        ),
        **idle("a bar is shown on a terminal; --no-progress turns it off", use_tqdm_on_load=True),
        # ---- memory
        **not_here(_KV, kv_cache_dtype="auto", calculate_kv_scales=False, kv_cache_dtype_skip_layers=()),
        **not_here(
            _KV,
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            enable_mamba_cache_stochastic_rounding=False,
        ),
        **not_here("here it is --device-cache, in bytes with a unit", kv_cache_memory_bytes=None),
        **not_here("here it is --device-cache, in bytes with a unit", num_gpu_blocks_override=None),
        **not_here("here it is --host-cache, in bytes with a unit", kv_offloading_size=None),
        **not_here("pages go to --host-cache and --store", kv_offloading_backend="native", kv_transfer_config=None),
        **not_here(_TEXT, ec_transfer_config=None, ec_manager_config=None),
        **idle("what must give its memory back is computed again, or comes back from --host-cache", swap_space=4.0),
        **idle("what must give its memory back is computed again, or comes back from --host-cache", preemption_mode=""),
        **idle(
            "the cache takes care of it for every kind of layer",
            **dict.fromkeys(("mamba_block_size", "prefix_match_unit", "mamba_cache_philox_rounds"), 0),
            **dict.fromkeys(("replayssm_buffer_len", "prefix_cache_retention_interval"), 0),
            **dict.fromkeys(("use_v2_block_manager", "disable_hybrid_kv_cache_manager", "use_replayssm"), True),
            kv_sharing_fast_prefill=False,
            mamba_cache_mode="",
            prefix_caching_hash_algo="",
        ),
        # ---- steps
        **not_here("prompts are always computed in chunks", enable_chunked_prefill=True),
        **not_here("here it is --max-num-batched-tokens", max_num_scheduled_tokens=None),
        **not_here("here it is --max-queue, of requests", max_num_queued_reqs=None, max_num_queued_tokens=None),
        **not_here("here it is --max-mixed-tokens", long_prefill_token_threshold=0),
        **not_here("every token is sent when it is there", stream_interval=1),
        **not_here(_SPECULATIVE, spec_method=None, spec_model=None, spec_tokens=0, num_lookahead_slots=0),
        **not_here(
            _SPECULATIVE,
            speculative_config=None,
            speculative_model=None,
            num_speculative_tokens=0,
            per_request_spec_decode_metrics="none",
        ),
        **not_here("log-probabilities are those before anything was applied", logprobs_mode="raw_logprobs"),
        **not_here("prompts are text or token ids", enable_prompt_embeds=False),
        **not_here("it is not told", enable_return_routed_experts=False, return_sampling_mask=False),
        **not_here("it is not served", enable_trace_replay=False, use_fp64_gumbel=False),
        **idle("priorities always count, and requests of one priority come in turn", scheduling_policy="fcfs"),
        **idle("here it is --overlap, which is 1 on a GPU", async_scheduling=True, disable_async_output_proc=False),
        **idle(
            "the scheduler decides it in every step",
            **dict.fromkeys(("max_num_partial_prefills", "max_long_partial_prefills", "num_scheduler_steps"), 0),
            **dict.fromkeys(("scheduler_delay_factor", "watermark"), 0.0),
            scheduler_reserve_full_isl=False,
            prefill_schedule_interval=0,
            disable_chunked_mm_input=False,
            multi_step_stream_outputs=False,
        ),
        **idle(
            _OURS,
            **dict.fromkeys(("compilation_config", "attention_config", "mamba_config", "kernel_config"), ""),
            **dict.fromkeys(("attention_backend", "mamba_backend", "mamba_ssu_algorithm", "ir_op_priority"), ""),
            **dict.fromkeys(("moe_backend", "linear_backend", "gdn_prefill_backend", "kda_prefill_backend"), ""),
            **dict.fromkeys(("performance_mode", "optimization_level"), ""),
            **dict.fromkeys(("cudagraph_capture_sizes", "cuda_graph_sizes"), ()),
            **dict.fromkeys(("max_cudagraph_capture_size", "max_seq_len_to_capture"), 0),
            **dict.fromkeys(("enable_flashinfer_autotune", "enable_bf16x3_router_gemm"), False),
            disable_cascade_attn=False,
        ),
        # ---- structured output
        **idle(
            "llguidance makes the masks",
            guided_decoding_backend="",
            guided_decoding_disable_fallback=False,
            guided_decoding_disable_any_whitespace=False,
            guided_decoding_disable_additional_properties=False,
        ),
        **not_here("llguidance makes the masks, and schemas are taken as they are", structured_outputs_config=None),
        **not_here("reasoning has no budget of its own", reasoning_config=None),
        # ---- adapters
        **idle("adapters that are loaded stay in host memory", max_cpu_loras=0),
        **idle(
            "adapters are on one GPU, in the model's dtype", fully_sharded_loras=False, specialize_active_lora=False
        ),
        **not_here("adapters are in the model's dtype", lora_dtype="auto"),
        **not_here("adapters with tokens of their own are not served", lora_extra_vocab_size=0, enable_lora_bias=False),
        **not_here(
            "an adapter says itself which modules it has", lora_target_modules=(), long_lora_scaling_factors=None
        ),
        **not_here("no adapters of experts or of images are served", enable_moe_shared_loras=False),
        **not_here(
            "no adapters of experts or of images are served",
            enable_mixed_moe_lora_format=False,
            enable_tower_connector_lora=False,
            default_mm_loras=None,
        ),
        **not_here("prompt adapters are not served", enable_prompt_adapter=False),
        # ---- images, audio and video
        **not_here(_TEXT, enable_mm_embeds=False, mm_encoder_only=False, allowed_local_media_path=None),
        **idle(
            _TEXT,
            **dict.fromkeys(("limit_mm_per_prompt", "media_io_kwargs", "mm_processor_kwargs", "mm_tensor_ipc"), ""),
            **dict.fromkeys(("mm_processor_cache_type", "mm_hasher_algorithm", "mm_encoder_tp_mode"), ""),
            **dict.fromkeys(("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "video_pruning_method"), ""),
            **dict.fromkeys(("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"), ""),
            **dict.fromkeys(("mm_processor_cache_gb", "mm_encoder_fp8_scale_save_margin"), 0.0),
            **dict.fromkeys(("mm_ipc_gpu_memory_gb", "video_pruning_rate"), 0.0),
            **dict.fromkeys(("language_model_only", "interleave_mm_strings", "skip_mm_profiling"), True),
            **dict.fromkeys(("disable_mm_preprocessor_cache", "mm_device_do_normalize"), False),
            enable_multimodal_encoder_data_parallel=False,
            enable_mm_processor_stats=False,
            allowed_media_domains=(),
            mm_processor_device="",
            mm_shm_cache_max_object_size_mb=0,
        ),
        # ---- figures and logs
        **idle("a line of status is logged every --status-seconds; 0: none", disable_log_stats=True),
        **idle("one engine has one log", aggregate_engine_logging=False, enable_logging_iteration_details=False),
        **idle(
            "/metrics shows what there is",
            **dict.fromkeys(("kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics"), False),
            show_hidden_metrics_for_version="",
            kv_cache_metrics_sample=0.0,
        ),
        **idle("here it is `sapwood bench profile`", profiler_config="", enable_layerwise_nvtx_tracing=False),
        **idle("kernels are compiled before the server is ready", jit_monitor_mode="", jit_monitor_verbose=False),
        **idle("environments of others are not looked at", fail_on_environ_validation=False),
        **not_here("traces are not sent anywhere", otlp_traces_endpoint=None, collect_detailed_traces=()),
        **idle("texts are made on threads of the API process", renderer_num_workers=1, tokenizer_pool_size=0),
        **idle("texts are made on threads of the API process", tokenizer_pool_type="", tokenizer_pool_extra_config=""),
    },
    tensor_parallel_size="-tp",
    pipeline_parallel_size="-pp",
    data_parallel_size="-dp",
    decode_context_parallel_size="-dcp",
    prefill_context_parallel_size="-pcp",
    data_parallel_rank="-dpn",
    data_parallel_start_rank="-dpr",
    data_parallel_size_local="-dpl",
    data_parallel_address="-dpa",
    data_parallel_rpc_port="-dpp",
    data_parallel_backend="-dpb",
    data_parallel_hybrid_lb="-dph",
    data_parallel_external_lb="-dpe",
    data_parallel_multi_port_external_lb="-dpm",
    enable_expert_parallel="-ep",
    nnodes="-n",
    node_rank="-r",
    quantization="-q",
    speculative_config="-sc",
    diffusion_config="-dc",
    compilation_config="-cc",
    attention_config="-ac",
    optimization_level="-O",
)
