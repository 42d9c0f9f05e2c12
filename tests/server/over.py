"""Requests that are over, as the server tells of them; and what an engine that served some says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from sapwood.engine.cache_report import CacheReport
from sapwood.server.observe.figures import Finished, FinishedPrompt
from sapwood.server.process.engine_queries import EngineQueries
from sapwood.server.process.messages import EngineQuery, QueryAnswer, decode_to_api, encode

from ..engine.machine import Machine

SPACE = b"space".ljust(32, b".")


def prompt(tokens: Any = 100, cached: int = 0, reason: str = "empty", position: int | None = None, **more: Any) -> Any:
    """A prompt of so many tokens, or of these."""
    ids = np.arange(tokens, dtype=np.int32) if isinstance(tokens, int) else np.array(tokens, np.int32)
    queued = more.pop("queued", 0.002)
    position = cached if position is None else position
    return FinishedPrompt(ids, CacheReport(cached, reason=reason, position=position, **more), queued)


def over(*prompts: FinishedPrompt, generated: int = 3, reasons: Sequence[str] = ("stop",), **more: Any) -> Finished:
    """A request that came 10 seconds after the clock's start, and took two."""
    fields = {
        "id": "req-1",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": "a model",
        "adapter": None,
        "namespace": SPACE,
        "arrived": 10.0,
        "first": 10.1,
        "ended": 12.0,
        "gaps": [0.02] * max(0, generated - 1),
        "error": "",
        "text": None,
        "uncounted_tokens": generated,
        "n": 1,
        "max_tokens": 16,
    }
    return Finished(
        **{**fields, "prompts": list(prompts), "completion_tokens": generated, "reasons": list(reasons), **more}
    )


def stats_of(machine: Machine, adapters: dict[str, bytes] | None = None) -> dict[str, Any]:
    """What the engine process answers about itself, as it arrives in the API process."""
    names = SimpleNamespace(names=lambda: adapters or {})
    engine: Any = SimpleNamespace(scheduler=machine.scheduler, loop=machine.loop, adapters=names)
    told: list[QueryAnswer] = []
    EngineQueries(engine, told.append).take(EngineQuery(1, "stats", {}))
    answer = decode_to_api(encode(told[0]))
    assert isinstance(answer, QueryAnswer) and not answer.error
    return dict(answer.value)
