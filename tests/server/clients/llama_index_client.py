"""`llama-index-llms-openai-like`, unmodified: `llama_index_client.py URL KEYED_URL`. The first server has a real model.
The second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
import urllib.request
from typing import Literal

import only_here
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

URL, KEYED_URL = sys.argv[1:]
with urllib.request.urlopen(f"{URL}/v1/models", timeout=30) as found:
    NAME = json.load(found)["data"][0]["id"]
CAPITAL = [ChatMessage(role="system", content="Answer in few words."), ChatMessage("What is the capital of France?")]
COMMON = {"temperature": 0, "max_retries": 0, "timeout": 120, "context_window": 2048}
llm = OpenAILike(model=NAME, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=40, **COMMON)
quick = OpenAILike(
    model="paced",
    api_base=f"{KEYED_URL}/v1",
    api_key="right",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    max_tokens=600,
    **COMMON,
)


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash"]
    age: int = Field(ge=1, le=99)


def plant(kind: Literal["oak", "ash"], count: Literal[1, 2]) -> str:
    """Plant trees."""
    return f"{count} {kind} planted"


def chats():
    whole = llm.chat(CAPITAL)
    assert "Paris" in whole.message.content and whole.raw.usage.completion_tokens > 0
    pieces = [piece.delta for piece in llm.stream_chat(CAPITAL)]
    assert "".join(pieces) == whole.message.content and len(pieces) > 3
    assert llm.complete("What is the capital of France?").text


def texts():
    plain = OpenAILike(model=NAME, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=5, **COMMON)
    told = plain.complete("The capital of France is").text
    assert (
        "Paris" in told and "".join(piece.delta for piece in plain.stream_complete("The capital of France is")) == told
    )


def tools():
    tool = FunctionTool.from_defaults(plant)
    answer = quick.chat_with_tools([tool], user_msg="Plant one oak.", tool_required=True)
    calls = quick.get_tool_calls_from_response(answer)
    assert calls and all(call.tool_name == "plant" for call in calls)
    assert calls[0].tool_kwargs["kind"] in ("oak", "ash") and tool(**calls[0].tool_kwargs).content
    *_, last = quick.stream_chat_with_tools([tool], user_msg="Plant one oak.", tool_required=True)
    same = quick.get_tool_calls_from_response(last)
    assert [call.tool_kwargs for call in same] == [call.tool_kwargs for call in calls]


def forms():
    told = quick.structured_predict(Tree, PromptTemplate("Tell of an old {kind}."), kind="oak")
    assert isinstance(told, Tree) and 1 <= told.age <= 99
    *_, last = quick.stream_structured_predict(Tree, PromptTemplate("Tell of an old {kind}."), kind="oak")
    assert Tree.model_validate(last.model_dump()) == told
    assert isinstance(quick.as_structured_llm(Tree).complete("An old oak.").raw, Tree)


async def at_once():
    told = await asyncio.gather(*[llm.achat(CAPITAL) for _ in range(4)])
    assert len({each.message.content for each in told}) == 1
    stream = await llm.astream_chat(CAPITAL)
    assert "".join([piece.delta async for piece in stream]) == told[0].message.content


chats()
texts()
tools()
forms()
asyncio.run(at_once())
only_here.well()
