"""`langchain-openai`, unmodified: `langchain_client.py URL KEYED_URL`. The first server has a real model. The
second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
import urllib.request
from typing import Literal

import only_here
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL, KEYED_URL = sys.argv[1:]
with urllib.request.urlopen(f"{URL}/v1/models", timeout=30) as found:
    NAME = json.load(found)["data"][0]["id"]
CAPITAL = [SystemMessage("Answer in few words."), HumanMessage("What is the capital of France?")]


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash"]
    age: int = Field(ge=1, le=99)


@tool
def plant(kind: Literal["oak", "ash"], count: Literal[1, 2]) -> str:
    """Plant a tree."""
    return f"{count} {kind} planted"


def model(**more):
    return ChatOpenAI(model=NAME, base_url=f"{URL}/v1", api_key="none", max_retries=0, temperature=0, **more)


def any_model(**more):
    given = {"base_url": f"{KEYED_URL}/v1", "api_key": "right", "max_retries": 0, "temperature": 0, "max_tokens": 600}
    return ChatOpenAI(model="paced", **{**given, **more})


def chats(**more):
    """In one piece and as a stream, with usage; through chat completions and through the Responses API."""
    chat = model(max_tokens=40, **more)
    whole = chat.invoke(CAPITAL)
    assert "Paris" in whole.text and whole.usage_metadata["total_tokens"] > whole.usage_metadata["input_tokens"] > 0
    chunks = list(chat.stream(CAPITAL, **({} if more else {"stream_usage": True})))
    together = chunks[0]
    for chunk in chunks[1:]:
        together += chunk
    assert len(chunks) > 3 and together.text == whole.text
    assert together.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert together.usage_metadata["input_token_details"]["cache_read"] > 0


def tools(**more):
    """A call that is demanded, in one piece and as a stream, and what it returned sent back."""
    chat = any_model(**more)
    forced = chat.bind_tools([plant], tool_choice="plant", strict=True)
    called = forced.invoke("Plant one oak, please.")
    (call,) = called.tool_calls
    assert call["name"] == "plant" and call["args"]["kind"] in ("oak", "ash") and call["args"]["count"] in (1, 2)
    together = None
    for chunk in forced.stream("Plant one oak, please."):
        together = chunk if together is None else together + chunk
    assert together.tool_calls[0]["args"] == call["args"]
    back = ToolMessage(plant.invoke(call["args"]), tool_call_id=call["id"])
    short = any_model(**{**more, "max_tokens": 8}).bind_tools([plant])
    after = short.invoke([HumanMessage("Plant one oak, please."), called, back])
    assert isinstance(after, AIMessage) and after.usage_metadata["output_tokens"] <= 8


def forms():
    for method in ("json_schema", "function_calling"):
        told = any_model().with_structured_output(Tree, method=method).invoke("Tell me of an old oak.")
        assert isinstance(told, Tree) and 1 <= told.age <= 99, (method, told)
    strict = any_model().with_structured_output(Tree, method="json_schema", strict=True, include_raw=True)
    told = strict.invoke("Tell me of an old oak.")
    assert isinstance(told["parsed"], Tree) and told["parsing_error"] is None
    chat = any_model(use_responses_api=True)
    assert isinstance(chat.with_structured_output(Tree, method="json_schema").invoke("An oak."), Tree)


def follows():
    """A response that follows another is told the new words alone."""
    chat = model(max_tokens=40, use_responses_api=True, use_previous_response_id=True)
    first = chat.invoke(CAPITAL)
    second = chat.invoke([*CAPITAL, first, HumanMessage("And of Italy?")])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def texts():
    llm = OpenAI(model=NAME, base_url=f"{URL}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=5)
    told = llm.invoke("The capital of France is")
    assert "Paris" in told and "".join(llm.stream("The capital of France is")) == told


async def at_once():
    chat = model(max_tokens=12)
    told = await asyncio.gather(*[chat.ainvoke(CAPITAL) for _ in range(4)])
    assert len({each.text for each in told}) == 1
    assert len(await chat.abatch([CAPITAL, "hi"])) == 2
    pieces = [chunk.text async for chunk in chat.astream(CAPITAL)]
    assert "".join(pieces) == told[0].text


chats()
chats(use_responses_api=True)
tools()
tools(use_responses_api=True)
forms()
follows()
texts()
asyncio.run(at_once())
only_here.well()
