"""`openai-agents`, unmodified: `openai_agents_client.py URL KEYED_URL`. The first server has a real model. The
second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
from typing import Literal

import only_here
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, ConfigDict, Field

URL, KEYED_URL = sys.argv[1:]
set_tracing_disabled(True)  # traces go to OpenAI
KINDS = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
FEW, MANY = ModelSettings(max_tokens=40, temperature=0), ModelSettings(max_tokens=600, temperature=0)
CAPITAL = "What is the capital of France?"
called = []


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash"]
    age: int = Field(ge=1, le=99)


@function_tool
def plant(kind: Literal["oak", "ash"], count: Literal[1, 2]) -> str:
    """Plant trees."""
    called.append((kind, count))
    return f"{count} {kind} planted"


def deltas(event):
    return event.data.delta if event.data.type == "response.output_text.delta" else ""


async def chats(model):
    """In one piece and as a stream, and a second turn."""
    agent = Agent(name="answers", instructions="Answer in few words.", model=model, model_settings=FEW)
    whole = await Runner.run(agent, CAPITAL)
    assert "Paris" in whole.final_output and whole.context_wrapper.usage.output_tokens > 0
    stream = Runner.run_streamed(agent, CAPITAL)
    pieces = [deltas(event) async for event in stream.stream_events() if event.type == "raw_response_event"]
    assert "".join(pieces) == stream.final_output == whole.final_output and len(pieces) > 3
    turns = [*whole.to_input_list(), {"role": "user", "content": "And of Italy?"}]
    second = await Runner.run(agent, turns)
    assert second.context_wrapper.usage.input_tokens > whole.context_wrapper.usage.input_tokens


async def tools(model):
    """A tool that must be called is, with arguments of its types. Its result is the answer, or goes to the model again,
    which then has one thing to say."""
    called.clear()
    settings = MANY.resolve(ModelSettings(tool_choice="required", parallel_tool_calls=False))
    agent = Agent(
        name="plants", model=model, model_settings=settings, tools=[plant], tool_use_behavior="stop_on_first_tool"
    )
    run = await Runner.run(agent, "Plant one oak.")
    ((kind, count),) = called
    assert kind in ("oak", "ash") and count in (1, 2) and run.final_output == f"{count} {kind} planted"
    stream = Runner.run_streamed(agent, "Plant one oak.")
    async for _ in stream.stream_events():
        pass
    assert stream.final_output == run.final_output and called[1] == called[0]
    says = settings.resolve(ModelSettings(extra_body={"structured_outputs": {"choice": ["It is planted."]}}))
    goes_on = Agent(name="plants", model=model, model_settings=says, tools=[plant])
    after = await Runner.run(goes_on, "Plant one oak.", max_turns=3)  # the choice is "auto" after the first call
    assert after.final_output == "It is planted." and len(after.raw_responses) == 2 and len(called) == 3


async def forms(model):
    agent = Agent(name="tells", model=model, model_settings=MANY, output_type=Tree)
    told = (await Runner.run(agent, "An old oak.")).final_output
    assert isinstance(told, Tree) and 1 <= told.age <= 99
    stream = Runner.run_streamed(agent, "An old oak.")
    async for _ in stream.stream_events():
        pass
    assert stream.final_output == told


async def main():
    real = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    quick = openai.AsyncOpenAI(base_url=f"{KEYED_URL}/v1", api_key="right", max_retries=0)
    name = (await real.models.list()).data[0].id
    for kind in KINDS:
        await chats(kind(model=name, openai_client=real))
        await tools(kind(model="paced", openai_client=quick))
        await forms(kind(model="paced", openai_client=quick))
    follow = Agent(name="follows", model=KINDS[0](model=name, openai_client=real), model_settings=FEW)
    first = await Runner.run(follow, CAPITAL)
    second = await Runner.run(follow, "And of Italy?", previous_response_id=first.last_response_id)
    items = await real.responses.input_items.list(second.last_response_id, order="asc")
    assert [item.role async for item in items] == ["user", "assistant", "user"]
    assert json.loads(items.data[0].model_dump_json())["content"][0]["text"] == CAPITAL
    await real.close()
    await quick.close()


asyncio.run(main())
only_here.well()
