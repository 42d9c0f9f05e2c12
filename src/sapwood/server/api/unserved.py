"""Fields that clients of OpenAI, Anthropic, vLLM, SGLang and llama.cpp's server send, and this server does not have. A
field that would change the answer is refused by name, unless its value asks for nothing; a field that changes nothing
is accepted. Both kinds are listed, so that it is clear of every field of these APIs what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from msgspec import Meta, Struct, defstruct

from ..errors import unsupported

S = TypeVar("S", bound=Struct)


class Unserved(NamedTuple):
    """`neutral`: values besides null that ask for nothing, and are accepted."""

    why: str
    neutral: tuple[Any, ...] = (False, "", [])


_THINKS = "a model thinks as long as it does, within max_tokens"
_SAMPLERS = "of samplers there are temperature, top_p, top_k, min_p and penalties"
_TEMPLATE = "put it into chat_template_kwargs, where the model's template knows it"
_ONE_SERVER = "prefill and decode run in one server"

EVERY: dict[str, Unserved] = {  # requests to generate, of every API
    # vLLM
    "ec_transfer_params": Unserved(_ONE_SERVER, ({},)),
    "guided_whitespace_pattern": Unserved("whitespace in JSON is what the server allows"),
    "kv_transfer_params": Unserved(_ONE_SERVER, ({},)),
    "logits_processors": Unserved("no code of a client is run"),
    "logprob_token_ids": Unserved("log-probabilities are told of the likeliest tokens"),
    "repetition_detection": Unserved("nothing looks for repetitions"),
    "return_prompt_text": Unserved("use return_token_ids, and /detokenize"),
    "structural_tag": Unserved('use response_format with the type "structural_tag"'),
    "thinking_token_budget": Unserved(_THINKS, (-1,)),
    "use_beam_search": Unserved("there is no beam search"),
    "vllm_xargs": Unserved("there are no extensions that would read it", ({},)),
    "watermarking": Unserved("nothing is watermarked"),
    # SGLang
    "bootstrap_host": Unserved(_ONE_SERVER),
    "bootstrap_port": Unserved(_ONE_SERVER),
    "bootstrap_room": Unserved(_ONE_SERVER),
    "custom_logit_processor": Unserved("no code of a client is run"),
    "extra_key": Unserved("use cache_salt"),
    "input_ids": Unserved("use /v1/completions, whose prompt may be token ids"),
    "lora_path": Unserved("name the adapter as the model"),
    "no_stop_trim": Unserved("use include_stop_str_in_output"),
    "return_cached_tokens_details": Unserved("use cache_report"),
    "return_hidden_states": Unserved("hidden states are not kept"),
    "return_meta_info": Unserved("usage and cache_report tell what there is to tell"),
    "return_prompt_token_ids": Unserved("use return_token_ids"),
    "return_routed_experts": Unserved("the choice of experts is not kept"),
    "session_params": Unserved("send the whole conversation: what was computed of it is cached"),
    "stop_regex": Unserved("use stop"),
    "task": Unserved("no template here knows of tasks"),
    # llama.cpp
    "adaptive_target": Unserved(_SAMPLERS, (-1,)),
    "chat_format": Unserved("the format of an answer follows from the model's template"),
    "chat_parser": Unserved("the format of an answer follows from the model's template"),
    "dry_multiplier": Unserved(_SAMPLERS, (0,)),
    "dynatemp_range": Unserved(_SAMPLERS, (0,)),
    "generation_prompt": Unserved("the model's own template begins the answer"),
    "grammar_lazy": Unserved('use response_format with the type "structural_tag"'),
    "grammar_triggers": Unserved('use response_format with the type "structural_tag"'),
    "lora": Unserved("name the adapter as the model", ([],)),
    "min_keep": Unserved(_SAMPLERS, (0, 1)),
    "mirostat": Unserved(_SAMPLERS, (0,)),
    "n_cmpl": Unserved("use n", (1,)),
    "n_indent": Unserved("lines are indented as the model likes", (0,)),
    "n_predict": Unserved("use max_tokens", ()),
    "n_probs": Unserved("use logprobs", (0,)),
    "parse_tool_calls": Unserved('use "tool_choice": "none"', (True,)),
    "post_sampling_probs": Unserved("log-probabilities are those before sampling"),
    "preserved_tokens": Unserved("use skip_special_tokens"),
    "reasoning_budget_tokens": Unserved(_THINKS, (-1,)),
    "reasoning_format": Unserved("use separate_reasoning", ("auto",)),
    "repeat_last_n": Unserved("penalties look at all that was generated", (-1,)),
    "repeat_penalty": Unserved("use repetition_penalty", (1,)),
    "response_fields": Unserved("an answer has all its fields"),
    "return_tokens": Unserved("use return_token_ids"),
    "samplers": Unserved(_SAMPLERS),
    "t_max_predict_ms": Unserved("use max_tokens", (0, -1)),
    "thinking_budget_tokens": Unserved(_THINKS, (-1,)),
    "thinking_forced_open": Unserved("whether a model begins by thinking follows from its template"),
    "top_n_sigma": Unserved(_SAMPLERS, (0, -1)),
    "typical_p": Unserved(_SAMPLERS, (1,)),
    "xtc_probability": Unserved(_SAMPLERS, (0,)),
}
CHAT: dict[str, Unserved] = {
    "audio": Unserved("this server reads and writes text"),
    "chat_template": Unserved("templates come from the model or from --chat-template"),
    "echo": Unserved("it is for completions"),
    "enable_thinking": Unserved(_TEMPLATE, ()),
    "function_call": Unserved("use tool_choice", ("none",)),
    "functions": Unserved("use tools"),
    "modalities": Unserved("this server reads and writes text", ([], ["text"])),
    "reasoning": Unserved("use reasoning_effort", ()),
    "thinking": Unserved(_TEMPLATE, ()),
    "web_search_options": Unserved("this server searches nothing"),
}
COMPLETIONS: dict[str, Unserved] = {
    "max_completion_tokens": Unserved("use max_tokens", ()),
    "prompt_embeds": Unserved("prompts are text or token ids"),
    "suffix": Unserved("there is no filling in between"),
    "tools": Unserved("use /v1/chat/completions"),
    "top_logprobs": Unserved("use logprobs", (0,)),
}
_ONE_ANSWER: dict[str, Unserved] = {  # the APIs whose requests have one answer
    "add_generation_prompt": Unserved("the answer follows the last message", (True,)),
    "audio": Unserved("this server reads and writes text"),
    "chat_template": Unserved("templates come from the model or from --chat-template"),
    "continue_final_message": Unserved("use /v1/chat/completions"),
    "documents": Unserved("use /v1/chat/completions"),
    "echo": Unserved("it is for completions"),
    "enable_thinking": Unserved(_TEMPLATE, ()),
    "function_call": Unserved("use tool_choice", ("none",)),
    "functions": Unserved("use tools"),
    "modalities": Unserved("this server reads and writes text", ([], ["text"])),
    "n": Unserved("a request has one answer", (1,)),
    "prompt_logprobs": Unserved("use /v1/completions"),
    "return_token_ids": Unserved("use /v1/chat/completions"),
    "return_tokens_as_token_ids": Unserved("use /v1/chat/completions"),
    "suffix": Unserved("there is no filling in between"),
    "web_search_options": Unserved("this server searches nothing"),
}
RESPONSES: dict[str, Unserved] = {
    **_ONE_ANSWER,
    "background": Unserved("a response is made while its client waits"),
    "context_management": Unserved("use truncation"),
    "conversation": Unserved("use previous_response_id"),
    "enable_response_messages": Unserved("items are told as the API has them"),
    "logprobs": Unserved('use include: ["message.output_text.logprobs"]'),
    "max_completion_tokens": Unserved("use max_output_tokens", ()),
    "max_tokens": Unserved("use max_output_tokens", ()),
    "messages": Unserved("use input"),
    "moderation": Unserved("nothing is moderated here"),
    "previous_input_messages": Unserved("use previous_response_id, or send all items"),
    "prompt": Unserved("there are no prompt templates here: send input"),
    "reasoning_effort": Unserved("use reasoning.effort", ()),
    "response_format": Unserved("use text.format"),
    "thinking": Unserved(_TEMPLATE, ()),
    "verbosity": Unserved("use text.verbosity", ("medium",)),
}
MESSAGES: dict[str, Unserved] = {
    **_ONE_ANSWER,
    "container": Unserved("no code is run here"),
    "context_management": Unserved("nothing is left out of a conversation"),
    "input": Unserved("use messages"),
    "instructions": Unserved("use system"),
    "logprobs": Unserved("use /v1/chat/completions"),
    "max_completion_tokens": Unserved("use max_tokens", ()),
    "mcp_servers": Unserved("this server calls no others"),
    "parallel_tool_calls": Unserved("use tool_choice.disable_parallel_tool_use", (True,)),
    "prompt": Unserved("use messages"),
    "reasoning": Unserved("use thinking", ()),
    "reasoning_effort": Unserved("use output_config.effort", ()),
    "response_format": Unserved("use output_config.format"),
    "stop": Unserved("use stop_sequences"),
    "top_logprobs": Unserved("use /v1/chat/completions", (0,)),
    "verbosity": Unserved(_TEMPLATE, ("medium",)),
}
PROMPT: dict[str, Unserved] = {  # requests that make a prompt and generate nothing
    "chat_template": Unserved("templates come from the model or from --chat-template"),
    "documents": Unserved("send them to /v1/chat/completions"),
    "truncate_prompt_tokens": Unserved("it is for requests that generate"),
}
STRUCTURED: dict[str, Unserved] = {  # in vLLM's structured_outputs
    "disable_additional_properties": Unserved("say it in the schema: additionalProperties"),
    "disable_any_whitespace": Unserved("whitespace in JSON is what the server allows"),
    "whitespace_pattern": Unserved("whitespace in JSON is what the server allows"),
}
# Accepted: these change nothing of an answer here.
ACCEPTED = frozenset(
    (
        # the client, and its user
        *("user", "metadata", "session_id", "rid", "custom_labels", "safety_identifier"),
        *("service_tier", "store", "prompt_cache_retention", "cache_control", "inference_geo"),
        # where and how the engine computes
        *("guided_decoding_backend", "backend_sampling", "id_slot", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("data_parallel_rank", "ngram_corpus_id", "n_cache_reuse", "n_keep", "n_discard", "prediction"),
        # how a stream is cut into events; figures beside the answer
        *("stream_interval", "stream_reasoning", "sse_ping_interval", "timings_per_token", "return_progress"),
        "verbose",
        # images and sounds, of which a request has none
        *("media_io_kwargs", "mm_processor_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch"),
        *("use_audio_in_video", "return_mm_kwargs"),
        # numbers that belong to one of the unserved fields, and mean nothing without it
        *("length_penalty", "early_stopping", "routed_experts_prompt_start", "routed_experts_start_len"),
        *("custom_params", "adaptive_decay", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold"),
        *("reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags"),
        *("reasoning_budget_message", "reasoning_budget_arm_immediately", "reasoning_control", "return_token_offsets"),
    )
)


def also_unserved(table: Mapping[str, Unserved]) -> Callable[[type[S]], type[S]]:
    """A decorator that adds these fields to a struct, so that they are found and described. `UNSERVED`: all of them."""
    fields = []
    for name, each in table.items():
        meta = Meta(description=f"Not served: {each.why}.", extra_json_schema={"enum": [None, *each.neutral]})
        fields.append((name, Annotated[Any, meta], None))

    def made(kind: type[S]) -> type[S]:
        more = {"__doc__": kind.__doc__, "UNSERVED": {**getattr(kind, "UNSERVED", {}), **table}}
        name, module = kind.__name__, kind.__module__
        return cast("type[S]", defstruct(name, fields, bases=(kind,), module=module, namespace=more, kw_only=True))

    return made


def refuse_unserved(request: Struct, where: str = "") -> None:
    """ApiError for an unserved field with a value that asks for something; other values become None."""
    table: Mapping[str, Unserved] = getattr(request, "UNSERVED", {})
    for name, each in table.items():
        value = getattr(request, name)
        if value is None:
            continue
        if not any(_same(value, neutral) for neutral in each.neutral):
            raise unsupported(f"{where}{name}", each.why)
        setattr(request, name, None)


def _same(value: Any, neutral: Any) -> bool:
    """Equal as in JSON, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
