"""Fields of requests: nothing that would change the answer is ignored in silence, whichever server a client was written
for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sapwood.server.api import unserved
from sapwood.server.api.anthropic_request import MessagesRequest
from sapwood.server.api.openapi import description
from sapwood.server.api.response_request import ResponsesRequest
from sapwood.server.api.schemas import ChatRequest, CompletionRequest, StructuredOutputs
from sapwood.server.process.grammars import GrammarSpec

from .kit import Running
from .scripted import TEMPLATE, Scripted, tokens

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 50},
}


def names(text: str) -> list[str]:
    return text.split()


# The fields that other servers' requests have, as of 2026.
VLLM = names("""
frequency_penalty logit_bias logprobs max_tokens model n presence_penalty response_format seed stop stream
stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs repetition_detection thinking_token_budget stream_interval guided_json guided_regex guided_choice
guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors early_stopping
best_of
""")
VLLM_CHAT = names("""
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text
""")
VLLM_COMPLETIONS = names("""
prompt echo suffix prompt_embeds
""")
SGLANG = names("""
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
top_p user return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
ignore_eos skip_special_tokens lora_path session_id session_params response_format custom_params
custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority
""")
SGLANG_CHAT = names("""
messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
return_meta_info reasoning_effort task continue_final_message separate_reasoning stream_reasoning chat_template_kwargs
max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids reasoning
""")
SGLANG_COMPLETIONS = names("""
prompt best_of echo suffix json_schema custom_labels
""")
LLAMA = names("""
verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress sse_ping_interval n_predict
max_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p
top_n_sigma xtc_probability xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n
repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs logprobs min_keep
backend_sampling post_sampling_probs lora json_schema grammar grammar_lazy grammar_triggers preserved_tokens
chat_format chat_parser generation_prompt parse_tool_calls reasoning_format thinking_forced_open reasoning_control
reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags
reasoning_budget_message reasoning_budget_arm_immediately thinking_budget_tokens logit_bias ignore_eos stop samplers
id_slot response_format
""")
LLAMA_CHAT = names("""
messages tools tool_choice parallel_tool_calls add_generation_prompt continue_final_message chat_template_kwargs
max_completion_tokens top_logprobs modalities echo
""")
LLAMA_COMPLETIONS = names("""
prompt max_completion_tokens echo
""")
OPENAI_CHAT = names("""
audio function_call functions max_completion_tokens metadata modalities parallel_tool_calls prediction
prompt_cache_key prompt_cache_retention reasoning_effort safety_identifier service_tier store verbosity
web_search_options
""")
OPENAI_RESPONSES = names("""
background context_management conversation include input instructions max_output_tokens max_tool_calls metadata model
moderation parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning
safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p
truncation user
""")
VLLM_RESPONSES = names("""
request_id media_io_kwargs mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params chat_template
chat_template_kwargs presence_penalty frequency_penalty top_k skip_special_tokens include_stop_str_in_output logit_bias
""")
ANTHROPIC = names("""
cache_control container context_management inference_geo max_tokens mcp_servers messages metadata model output_config
output_format service_tier stop_sequences stream system temperature thinking tool_choice tools top_k top_p
""")
# What clients of one API send to another by mistake.
OF_CHAT = names("""
chat_template documents enable_thinking add_generation_prompt continue_final_message functions function_call modalities
logprobs max_completion_tokens n reasoning_effort response_format suffix echo verbosity prompt audio web_search_options
""")
STRUCTURED = names("""
json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties
whitespace_pattern
""")


# ---- the tables


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (ChatRequest, VLLM + VLLM_CHAT + SGLANG + SGLANG_CHAT + LLAMA + LLAMA_CHAT + OPENAI_CHAT),
        (CompletionRequest, VLLM + VLLM_COMPLETIONS + SGLANG + SGLANG_COMPLETIONS + LLAMA + LLAMA_COMPLETIONS),
        (StructuredOutputs, STRUCTURED),
        (ResponsesRequest, [*OPENAI_RESPONSES, *VLLM_RESPONSES, *OF_CHAT, "messages"]),
        (MessagesRequest, [*ANTHROPIC, *OF_CHAT, "input", "instructions", "parallel_tool_calls", "reasoning", "stop"]),
    ],
)
def test_S18_it_is_known_of_every_field_what_becomes_of_it(kind, theirs):
    """Each field of vLLM's, SGLang's, llama.cpp's and OpenAI's requests is one of ours, or known to change nothing.

    Mutation: a line of a table of unserved.py is missing.
    """
    unknown = set(theirs) - set(kind.__struct_fields__) - unserved.ACCEPTED
    assert not unknown
    told = {"metadata", "safety_identifier", "store", "user"} if kind is ResponsesRequest else set()  # that it reads
    assert unserved.ACCEPTED & set(kind.__struct_fields__) == told, "what is read here is not ignored"


def test_S18_the_tables_do_not_contradict_each_other():
    """A field is served, refused or ignored. What is described says which values a refused one may have.

    Mutation: `also_unserved` describes no enum.
    """
    own = (unserved.CHAT, unserved.COMPLETIONS, unserved.RESPONSES, unserved.MESSAGES)
    for table in (unserved.EVERY, *own, unserved.STRUCTURED, unserved.PROMPT):
        assert not table.keys() & unserved.ACCEPTED
        assert all(each.why and each.why == each.why.rstrip(".") for each in table.values())
    assert not any(unserved.EVERY.keys() & table.keys() for table in own)
    schemas = description([(CHAT, "POST")])["components"]["schemas"]
    told = schemas["ChatRequest"]["properties"]
    for name, each in {**unserved.EVERY, **unserved.CHAT}.items():
        assert told[name]["enum"] == [None, *each.neutral] and each.why in told[name]["description"]
    assert "enum" not in told["temperature"]
    assert schemas["MessagesRequest"]["properties"]["thinking"] != told["thinking"], "which it serves"


@pytest.mark.parametrize(
    ("path", "table"),
    [
        (CHAT, {**unserved.EVERY, **unserved.CHAT}),
        (COMPLETIONS, {**unserved.EVERY, **unserved.COMPLETIONS}),
        (RESPONSES, {**unserved.EVERY, **unserved.RESPONSES}),
        (MESSAGES, {**unserved.EVERY, **unserved.MESSAGES}),
    ],
)
def test_S18_what_is_not_served_is_refused_by_name(path, table):
    """Every field of the tables, whatever it asks for; null and what asks for nothing are taken, and true is not 1.

    Mutation: `refuse_unserved` is not called for a table; `_same` is `==`; it takes every number for neutral.
    """
    app = Scripted("Hello")
    for name, each in table.items():
        booleans = [value for value in (True, False) if not any(value is neutral for neutral in each.neutral)]
        for value in ({"a": 1}, "x", 0.123, 77, [1], *booleans):
            refused = app.post(path, {**GOOD[path], name: value})
            assert refused.status == 400 and name in refused.error["message"], (name, value)
            if path != MESSAGES:
                assert (refused.error["param"], refused.error["code"]) == (name, "unsupported_parameter")
        for value in (None, *each.neutral):
            assert app.post(path, {**GOOD[path], name: value}).status == 200, (name, value)
    assert len(app.link.submitted) == sum(1 + len(each.neutral) for each in table.values())


@pytest.mark.parametrize("path", ["/tokenize", "/cache/explain"])
def test_S18_a_prompt_alone_is_made_as_for_a_request_that_generates(path):
    """What such a request may have and these do not is refused by name, and not left out of the prompt.

    Mutation: `_check_supported` looks at requests that generate alone.
    """
    app = Scripted("Hello")
    for name, value in (("chat_template", "x"), ("documents", [{"text": "a"}]), ("truncate_prompt_tokens", 3)):
        refused = app.post(path, {"messages": HI, name: value})
        assert refused.status == 400 and refused.error["param"] == name
    assert app.post("/tokenize", {"messages": HI, "documents": [], "chat_template": None}).status == 200


def test_S18_what_changes_nothing_is_accepted():
    """Fields about who asks, about where it is computed, about images: the same prompt and the same parameters as
    without them.

    Mutation: a field of `ACCEPTED` becomes one of the structs.
    """
    for path, body in GOOD.items():
        app = Scripted("Hello")
        assert app.post(path, body).status == 200
        plain = app.params
        told = {"user", "safety_identifier"} if path == RESPONSES else set()  # back to the client, and so of a type
        for name in sorted(unserved.ACCEPTED - {"metadata", "store", "service_tier"} - told):
            for value in (5, "x", [1], {"a": 1}):
                assert app.post(path, {**body, name: value}).status == 200, (path, name)
            assert app.params == plain and app.prompt == app.link.prompts[0]
    body = {**GOOD[CHAT], "metadata": {"a": [1]}, "store": 5, "service_tier": "flex", "user": 7}
    assert Scripted("Hello").post(CHAT, {**body, "prediction": {"type": "content", "content": "hi"}}).status == 200


# ---- forms by other names


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", SCHEMA),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "structural_tag", TAGS),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "structural_tag", TAGS),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"json": True}}, "json_object", ""),
        ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
def test_S18_forms_of_vllm_sglang_and_llama_cpp(asked, kind, text):
    """Each way to ask for a form becomes the same grammar, of chats and completions alike.

    Mutation: a line of `_PLAIN` is missing; `_formats` does not look at `schema`.
    """
    for path in (CHAT, COMPLETIONS):
        app = Scripted("{}")
        assert app.post(path, {**GOOD[path], **asked}).status == 200
        grammar = app.link.submitted[-1].grammar
        assert isinstance(grammar, GrammarSpec) and grammar.kind == kind
        assert (grammar.text if isinstance(text, str) else json.loads(grammar.text)) == text


def test_S18_two_forms_are_refused():
    """By the name of the second, wherever they come from.

    Mutation: `form_of` takes the first.
    """
    for asked, field in [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"regex": "a", "guided_regex": "a"}, "regex"),
    ]:
        refused = Scripted("a").post(CHAT, {**GOOD[CHAT], **asked})
        assert refused.status == 400 and refused.error["param"] == field, refused.body


@pytest.mark.server
@pytest.mark.xdist_group("http")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "(yes|no), [0-9]{2}"}, ("yes, ", "no, ")),
        ({"ebnf": 'root ::= "left" | "right" rest\nrest ::= " turn"'}, ("left", "right turn")),
        ({"grammar": 'root ::= "one" | "two"'}, ("one", "two")),
        ({"json_schema": {"enum": ["oak", "ash"]}}, ('"oak"', '"ash"')),
        ({"response_format": {"type": "json_object", "schema": {"enum": ["oak"]}}}, ('"oak"',)),
    ],
)
def test_S18_an_engine_holds_to_them(server: Running, asked, said):
    """Whatever the model would like to say.

    Mutation: the grammar of `ebnf` has the kind regex.
    """
    for seed in range(3):
        told = server.post(CHAT, {**GOOD[CHAT], **asked, "seed": seed, "max_tokens": 40})
        assert told.status == 200, told.body
        assert told.json["choices"][0]["message"]["content"].startswith(said)


# ---- prompts that are cut


def test_S18_a_prompt_is_cut_on_the_side_that_is_asked_for():
    """The last tokens, or the first; without a number nothing is cut. What is echoed is what is left.

    Mutation: `truncated` looks at no side; `_echoed` shows the whole text.
    """
    app = Scripted(" nine")
    text = "one two three four five six seven eight"
    ids = tokens().tokenizer.encode(text, add_special_tokens=False).ids
    for more, left in [
        ({}, ids),
        ({"truncation_side": "right"}, ids),
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 1000, "truncation_side": "right"}, ids),
    ]:
        told = app.post(COMPLETIONS, {"prompt": text, "echo": True, **more})
        assert told.status == 200, told.body
        assert np.frombuffer(app.link.submitted[-1].tokens, np.int32).tolist() == left
        assert told.json["choices"][0]["text"] == tokens().decode(left) + " nine"
        assert told.json["usage"]["prompt_tokens"] == len(left)
    app.post(CHAT, {**GOOD[CHAT], "truncate_prompt_tokens": 4, "truncation_side": "right"})
    assert app.prompt == tokens().decode(np.frombuffer(app.link.submitted[-1].tokens, np.int32).tolist())
    assert app.prompt.startswith("<|im_start|>user")


# ---- tokens by their ids


def test_S18_tokens_are_named_by_their_ids():
    """As vLLM writes them, in both forms of log-probabilities; bytes and places in the text stay true.

    Mutation: `chat_logprobs` or `CompletionLogprobs` is not told; `text_offset` counts the names.
    """
    app = Scripted("Hello you")
    ids = tokens().tokenizer.encode("Hello you", add_special_tokens=False).ids
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    content = app.post(CHAT, {**GOOD[CHAT], **asked}).json["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{id}" for id in [*ids, 2]]
    assert bytes(content[0]["bytes"]) == b"Hello"
    assert [each["token"] for each in content[0]["top_logprobs"]] == [f"token_id:{ids[0]}", f"token_id:{ids[0] + 1}"]
    asked = {"prompt": "hi", "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    told = app.post(COMPLETIONS, asked).json["choices"][0]["logprobs"]
    hi = tokens().tokenizer.encode("hi").ids
    assert told["tokens"] == [f"token_id:{id}" for id in [*hi, *ids, 2]]
    assert told["top_logprobs"][1:] == [{f"token_id:{id}": -0.25} for id in [*ids, 2]]
    assert told["text_offset"] == [0, 2, 7, 11]
    plain = app.post(COMPLETIONS, {**asked, "return_tokens_as_token_ids": False}).json["choices"][0]["logprobs"]
    assert plain["tokens"][:2] == ["hi", "Hello"] and plain["text_offset"] == told["text_offset"]
    for path in (RESPONSES, MESSAGES):
        refused = app.post(path, {**GOOD[path], "return_tokens_as_token_ids": True})
        assert refused.status == 400 and "return_tokens_as_token_ids" in refused.error["message"]


# ---- what the template decides


def test_a_role_is_what_the_template_takes():
    """Any role that the template writes down; one that it refuses is a 400 in its words.

    Mutation: `_message` has a list of roles.
    """
    for role in ("system", "tool", "function", "ipython", "latest_reminder", "Zauberer"):
        app = Scripted("Hello")
        assert app.post(CHAT, {"messages": [{"role": role, "content": "as told"}, *HI]}).status == 200
        assert f"<|im_start|>{role}\nas told" in app.prompt
    strict = (
        "{% for each in messages %}{% if each.role not in ('user', 'wizard') %}{{ raise_exception('no ' + each.role)"
    )
    app = Scripted("Hello", template=strict + " }}{% endif %}{{ each.content }}{% endfor %}")
    assert app.post(CHAT, {"messages": [{"role": "wizard", "content": "as told"}]}).status == 200
    refused = app.post(CHAT, {"messages": [{"role": "ipython", "content": "as told"}]})
    assert refused.status == 400 and "no ipython" in refused.error["message"]
    for role in ("", "r" * 65, 5, None, ["user"]):
        refused = app.post(CHAT, {"messages": [{"role": role, "content": "hi"}]})
        assert refused.status == 400 and refused.error["param"] == "messages[0].role"


def test_S18_verbosity_is_the_templates():
    """A template that asks for it is told; another one leaves "medium" alone, which changes nothing.

    Mutation: `with_verbosity` takes everything; `variables` is empty.
    """
    app = Scripted("Hello", template=TEMPLATE + "{% if verbosity %}(be {{ verbosity }}){% endif %}")
    for asked in ("low", "medium", "high"):
        assert app.post(CHAT, {**GOOD[CHAT], "verbosity": asked}).status == 200
        assert app.prompt.endswith(f"(be {asked})")
    both = {"verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}
    assert app.post(CHAT, {**GOOD[CHAT], **both}).status == 200 and app.prompt.endswith("(be high)")
    app = Scripted("Hello")
    assert app.post(CHAT, {**GOOD[CHAT], "verbosity": "medium"}).status == 200
    refused = app.post(CHAT, {**GOOD[CHAT], "verbosity": "low"})
    assert (refused.status, refused.error["param"]) == (400, "verbosity")


def test_S18_documents_need_a_template_that_shows_them():
    """Else a model would answer without having seen them.

    Mutation: `_template` does not ask `template_reads`.
    """
    pages = [{"title": "Trees", "text": "An oak is one."}]
    refused = Scripted("Hello").post(CHAT, {**GOOD[CHAT], "documents": pages})
    assert (refused.status, refused.error["param"]) == (400, "documents")
    app = Scripted("Hello", template="{% for page in documents %}{{ page.text }}{% endfor %}{{ messages[0].content }}")
    assert app.post(CHAT, {**GOOD[CHAT], "documents": pages}).status == 200 and app.prompt == "An oak is one.hi"
    assert Scripted("Hello").post(CHAT, {**GOOD[CHAT], "documents": []}).status == 200
