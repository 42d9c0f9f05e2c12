"""`pydantic-ai`, unmodified: `pydantic_ai_client.py URL KEYED_URL`. The first server has a real model. The
second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import contextlib
import json
import sys
import urllib.request
from typing import Literal

import only_here
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEYED_URL = sys.argv[1:]
with urllib.request.urlopen(f"{URL}/v1/models", timeout=30) as found:
    NAME = json.load(found)["data"][0]["id"]
REAL = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
QUICK = OpenAIProvider(base_url=f"{KEYED_URL}/v1", api_key="right")
KINDS = (OpenAIChatModel, OpenAIResponsesModel)
FEW, MANY = {"max_tokens": 40, "temperature": 0.0}, {"max_tokens": 600, "temperature": 0.0}
CAPITAL = "What is the capital of France?"


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash"]
    age: int = Field(ge=1, le=99)


async def chats(kind):
    """In one piece and as a stream, and a second turn."""
    agent = Agent(kind(NAME, provider=REAL), instructions="Answer in few words.", model_settings=FEW)
    whole = await agent.run(CAPITAL)
    assert "Paris" in whole.output and whole.usage.output_tokens > 0
    async with agent.run_stream(CAPITAL) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output and len(pieces) > 3
    assert stream.usage.cache_read_tokens > 0
    second = await agent.run("And of Italy?", message_history=whole.all_messages())
    assert second.usage.input_tokens > whole.usage.input_tokens


async def forms(kind):
    """By a tool, and by the server's own structured output; also as a stream."""
    for output in (ToolOutput(Tree), NativeOutput(Tree)):
        agent = Agent(kind("paced", provider=QUICK), output_type=output, model_settings=MANY, retries=0)
        told = (await agent.run("An old oak.")).output
        assert isinstance(told, Tree) and 1 <= told.age <= 99
        async with agent.run_stream("An old oak.") as stream:
            assert await stream.get_output() == told


async def tools(kind):
    """A tool is called with arguments of its types, and the model goes on. One that says what comes into its mind calls
    until it happens to end; so it may ask a few times, and any of its seeds will do."""
    called = []
    agent = Agent(kind("paced", provider=QUICK), output_type=[Tree], retries=0)

    @agent.tool_plain
    def plant(kind: Literal["oak", "ash"], count: Literal[1, 2]) -> str:
        """Plant trees."""
        called.append((kind, count))
        return f"{count} {kind} planted"

    for seed in range(12):
        settings = {**MANY, "temperature": 1.0, "seed": seed, "parallel_tool_calls": False}
        with contextlib.suppress(UnexpectedModelBehavior, UsageLimitExceeded):
            await agent.run("Plant one oak.", model_settings=settings, usage_limits=UsageLimits(request_limit=3))
        if called:
            break
    assert called and all(kind in ("oak", "ash") and count in (1, 2) for kind, count in called)


async def main():
    for kind in KINDS:
        await chats(kind)
        await forms(kind)
        await tools(kind)
    agent = Agent(OpenAIChatModel(NAME, provider=REAL), model_settings=FEW)
    told = await asyncio.gather(*[agent.run(CAPITAL) for _ in range(4)])
    assert len({each.output for each in told}) == 1


asyncio.run(main())
only_here.well()
