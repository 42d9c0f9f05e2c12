"""Flags of vLLM's HTTP frontend that are no field of ServerConfig; sapwood.engine.foreign has those of its engine."""

from __future__ import annotations

from collections.abc import Mapping

from sapwood.engine.foreign import Foreign, idle, not_here, with_short

_PROXY = "a proxy before the server does it"
_CODE = "no code of others is loaded"

FOREIGN: Mapping[str, Foreign] = with_short(
    {
        # ---- tools, templates, answers
        **idle("calls are always read where a request has tools", enable_auto_tool_choice=True),
        **idle("usage always says how many prompt tokens were cached", enable_prompt_tokens_details=True),
        **idle("every answer has an X-Request-Id", enable_request_id_headers=True),
        **idle("there are no models that compare texts", enable_flash_late_interaction=False),
        **not_here("with tool_choice none the model is told of no tools", exclude_tools_when_tool_choice_none=True),
        **not_here(_CODE, tool_parser_plugin="", reasoning_parser_plugin=None, tool_server=None, middleware=()),
        **not_here("content is given to a template as text", "auto", chat_template_content_format="string"),
        **not_here("requests bring no template of their own", trust_request_chat_template=False),
        **not_here("requests say it: chat_template_kwargs", default_chat_template_kwargs=None),
        **not_here("requests say it: return_tokens_as_token_ids", return_tokens_as_token_ids=False),
        **not_here("it is not told", "full", "hash", fingerprint_mode="none"),
        **not_here("it is not told", fingerprint_value=None, enable_per_request_metrics=False),
        **not_here(
            "there is no such endpoint", enable_tokenizer_info_endpoint=False, enable_server_load_tracking=False
        ),
        **not_here("/v1/completions takes and returns token ids", tokens_only=False),
        **not_here("Cohere's API is not spoken", cohere_format=None, cohere_is_reasoning_model=True),
        # ---- processes and sockets
        **not_here("one process answers HTTP here", api_server_count=1, headless=False, grpc=False),
        **idle(
            "it is for several servers under one",
            data_parallel_supervisor_port=0,
            dp_supervisor_probe_interval_s=0.0,
            dp_supervisor_probe_timeout_s=0.0,
            dp_supervisor_probe_failure_threshold=0,
        ),
        **idle("it is one process behind two sockets", disable_frontend_multiprocessing=False),
        **not_here("here it is --drain-seconds", shutdown_timeout=None),
        **not_here("here it is --header-bytes", h11_max_incomplete_event_size=None, h11_max_header_count=None),
        **not_here(_PROXY, enable_ssl_refresh=False, ssl_ciphers=None, allow_credentials=False),
        **not_here("clients need a certificate where --ssl-ca-certs is given", ssl_cert_reqs=None),
        **not_here("those that the API has are allowed", '["*"]', allowed_methods=None, allowed_headers=None),
        **not_here("/openapi.json is there for whoever has a key", disable_fastapi_docs=False),
        **idle("there are no pages of documentation but /openapi.json", enable_offline_docs=False),
        # ---- logs
        **idle("--log-level warning leaves out the lines of requests", disable_log_requests=True),
        **idle("every request has a line in the log", enable_log_requests=True, enable_log_deltas=True),
        **idle("here it is --log-level", uvicorn_log_level="", disable_uvicorn_access_log=True),
        **idle("only what generates has a line in the log", disable_access_log_for_endpoints=""),
        **idle("prompts are in the log with --log-prompts alone, cut", max_log_len=0),
        **idle("the log has what went wrong here", log_error_stack=False),
        **not_here("answers are never logged", enable_log_outputs=False),
        **not_here("here it is --log-format and --log-level", log_config_file=None),
    },
    api_server_count="-asc",
)
