"""The yardstick: tokenspeed-scheduler 0.1.0, a whole scheduler with a radix tree in C++. A thin wrapper."""

from __future__ import annotations

from typing import Any

try:
    import tokenspeed_scheduler as ts
except ImportError:
    ts = None

MISSING = "no peer: tokenspeed-scheduler==0.1.0 is not installed (`make env` installs it on x86-64 Linux)"


def installed() -> bool:
    return ts is not None


def scheduler(page_size: int, pages: int, batch: int, chunk: int) -> Any:
    """One that mixes prefill and decode, with no host tier."""
    config = ts.SchedulerConfig()
    config.page_size = page_size
    config.num_device_pages = pages
    config.max_batch_size = batch
    config.max_scheduled_tokens = chunk
    config.disable_l2_cache = True
    config.enable_mixed_prefill_decode = True
    return ts.Scheduler(config)


def request(name: str, tokens: list[int]) -> Any:
    spec = ts.RequestSpec()
    spec.request_id = name
    spec.tokens = tokens
    return spec


def read(plan: Any) -> tuple[list[str], list[int], list[int], int]:
    """Read what a runner must have: ids, lengths, cached prefixes, and how many rows are prefills; tokens and pages."""
    ids: list[str] = []
    lengths: list[int] = []
    prefixes: list[int] = []
    extends = 0
    for op in plan.forward:
        ids += op.request_ids
        lengths += op.input_lengths
        prefixes += op.extend_prefix_lens
        extends += op.num_extends()
        _ = op.request_pool_indices, op.input_ids, op.decode_input_ids, op.begins, op.sizes, op.new_occupied_pages
    return ids, lengths, prefixes, extends


def sampled(results: list[tuple[str, int]], finished: list[str]) -> Any:
    """The event of a step: (request, token) for every row that yields one, and the requests that end with it."""
    event = ts.ExecutionEvent()
    for name, token in results:
        result = ts.ForwardEvent.ExtendResult()
        result.request_id = name
        result.tokens = [token]
        event.add_event(result)
    for name in finished:
        end = ts.ForwardEvent.Finish()
        end.request_id = name
        event.add_event(end)
    return event
