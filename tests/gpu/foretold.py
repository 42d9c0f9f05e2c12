"""Whether the simulator, with step times of this card, foretells how long workloads take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sapwood import LLM
from sapwood.bench.calibrate import Predicted, StepTimer, predicted
from sapwood.sim import MeasuredCost

from .figures import ANSWER, CHATS, SAID, SYSTEM, TURNS
from .kit import Line, say

CONTEXT, ROUNDS = 2048, 2


def foretold(llm: LLM, totals: dict[str, float]) -> Iterator[Line]:
    """`totals`: what workloads have taken."""
    meter = StepTimer(llm.engine, CONTEXT)
    meter.warm()
    for _ in range(ROUNDS):
        meter.round()
    cost, config = meter.cost(), llm.engine.scheduler.config
    for size, figures in meter.figures().items():
        say(f"    {size}: {figures['step']:.2f} ms")
    told = {"a key": cost.key, "read again": cost.again or 0.0, "a pair": cost.pair, "of its own": cost.own}
    say("    " + ", ".join(f"{name} {1e9 * each:.3f} ns" for name, each in told.items()))
    guesses = {
        "64": lambda: predicted(cost, config, [512] * 64, [128] * 64),
        "256": lambda: predicted(cost, config, [512] * 256, [128] * 256),
        "chats": lambda: _talk(cost, config),
    }
    names = {"64": "64 x (512 + 128)", "256": "256 x (512 + 128)", "chats": f"{CHATS} chats"}
    for which, took in totals.items():
        guess = guesses[which]()
        more = f"{guess:.2f} s, took {took:.2f} s"
        yield Line(f"{names[which]}: off from what was foretold", 0.1, abs(guess / took - 1), "{:.1%}", more=more)


def _talk(cost: MeasuredCost, config: Any) -> float:
    engine, random = Predicted(cost, config), np.random.default_rng(0)

    def tokens(length: int) -> list[int]:
        return random.integers(0, 1 << 30, length, np.int32).tolist()

    histories = [tokens(SYSTEM)] * CHATS
    for _ in range(TURNS):
        asked = [history + tokens(SAID) for history in histories]
        answers = engine.run([np.array(ids, np.int32) for ids in asked], [ANSWER] * CHATS)
        histories = [ids + answer for ids, answer in zip(asked, answers, strict=True)]
    return engine.seconds
