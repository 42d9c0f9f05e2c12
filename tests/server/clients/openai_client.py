"""The official `openai` client, unmodified: `openai_client.py URL KEYED_URL`. The first server has a real model. The
second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
import time
import urllib.request
from typing import Literal

import openai
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

URL, KEYED_URL = sys.argv[1:]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
quick = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key="right", max_retries=0)
NAME, ANY = client.models.list().data[0].id, quick.models.list().data[0].id
PLANT = {
    "type": "function",
    "function": {
        "name": "plant",
        "description": "Plant a tree.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["oak", "ash"]}, "count": {"enum": [1, 2]}},
            "required": ["kind", "count"],
            "additionalProperties": False,
        },
    },
}
PLEASE = [{"role": "user", "content": "Plant one oak, please."}]
ON = {"ignore_eos": True}


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    country: Literal["France", "Norway"]


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash", "elm"]
    age: int = Field(ge=1, le=99)
    place: Place


def valid(answer, kind):
    """Checked as the types say, which the client itself does not do."""
    dumped = answer.model_dump(by_alias=True)
    kind.validate_python(dumped) if isinstance(kind, TypeAdapter) else kind.model_validate(dumped)
    return answer


def refused(kind, call):
    try:
        call()
    except kind as error:
        assert error.body["message"] and error.body["type"], error.body
        return error
    raise AssertionError(f"no {kind.__name__}")


def models():
    model = valid(client.models.retrieve(NAME), Model)
    assert model.id == NAME
    assert refused(openai.NotFoundError, lambda: client.models.retrieve("none-such")).code == "model_not_found"


def chats():
    asked = {"model": NAME, "messages": CAPITAL, "max_tokens": 16, "temperature": 0}
    whole = valid(client.chat.completions.create(**asked), ChatCompletion)
    assert "Paris" in whole.choices[0].message.content and whole.object == "chat.completion"
    assert whole.choices[0].finish_reason in ("stop", "length") and whole.model == NAME
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [valid(chunk, ChatCompletionChunk) for chunk in stream]
    *said, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole.choices[0].message.content
    assert said[0].choices[0].delta.role == "assistant" and said[-1].choices[0].finish_reason
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0
    assert {chunk.id for chunk in chunks} == {last.id}
    some = valid(
        client.chat.completions.create(**{**asked, "temperature": 1.5, "n": 3, "seed": 7, "max_completion_tokens": 8}),
        ChatCompletion,
    )
    assert [choice.index for choice in some.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in some.choices}) > 1
    system = [{"role": "developer", "content": "You are a pirate."}, *CAPITAL]
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    assert client.chat.completions.create(**{**asked, "messages": system}).usage.prompt_tokens > 0
    same = client.chat.completions.create(**{**asked, "messages": parts})
    assert same.choices[0].message.content == whole.choices[0].message.content


def logprobs():
    asked = {"model": NAME, "messages": CAPITAL, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = valid(client.chat.completions.create(**asked), ChatCompletion).choices[0]
    told = choice.logprobs.content
    raw = b"".join(bytes(each.bytes) for each in told)
    assert raw.decode().startswith(choice.message.content)
    for each in told:
        scores = [other.logprob for other in each.top_logprobs]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True) and each.logprob == scores[0] <= 0
    stream = client.chat.completions.create(**asked, stream=True)
    streamed = [each for chunk in stream if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in told]


def completions():
    asked = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
    whole = valid(client.completions.create(**asked, logprobs=2), Completion)
    (choice,) = whole.choices
    assert "Paris" in choice.text and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.token_logprobs) == 5
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage.completion_tokens == 5
    both = client.completions.create(**{**asked, "prompt": ["The capital of France is", "Two plus two is"], "n": 2})
    assert [each.index for each in both.choices] == [0, 1, 2, 3] and both.choices[0].text == choice.text
    echoed = client.completions.create(**{**asked, "max_tokens": 0}, echo=True, logprobs=1).choices[0]
    assert echoed.text == "The capital of France is" and echoed.logprobs.token_logprobs[0] is None
    stopped = client.completions.create(**{**asked, "max_tokens": 20}, stop=["Paris"]).choices[0]
    assert "Paris" not in stopped.text and stopped.finish_reason == "stop"
    assert refused(openai.BadRequestError, lambda: client.completions.create(**asked, suffix=".")).param == "suffix"


def tools():
    asked = {"model": ANY, "messages": PLEASE, "tools": [PLANT], "temperature": 0, "max_tokens": 600}
    free = valid(quick.chat.completions.create(**{**asked, "max_tokens": 40}, tool_choice="auto"), ChatCompletion)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls
    named = {"type": "function", "function": {"name": "plant"}}
    for choice in ("required", named):
        whole = valid(quick.chat.completions.create(**asked, tool_choice=choice), ChatCompletion).choices[0]
        calls = whole.message.tool_calls
        assert calls and whole.message.content is None, whole
        assert all(call.function.name == "plant" and call.type == "function" for call in calls)
        with quick.chat.completions.stream(**asked, tool_choice=choice) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        assert [call.function.arguments for call in final.message.tool_calls] == [c.function.arguments for c in calls]
        if whole.finish_reason != "length":  # else the last call was cut off
            assert all(json.loads(call.function.arguments)["kind"] in ("oak", "ash") for call in calls)
    call = calls[0]
    turns = [
        *PLEASE,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is planted."},
    ]
    after = quick.chat.completions.create(model=ANY, messages=turns, tools=[PLANT], max_tokens=16, temperature=0)
    assert after.usage.prompt_tokens > free.usage.prompt_tokens
    strict = openai.pydantic_function_tool(Tree, name="describe")
    told = quick.chat.completions.parse(
        model=ANY,
        messages=[{"role": "user", "content": "Describe an old oak in France."}],
        tools=[strict],
        tool_choice={"type": "function", "function": {"name": "describe"}},
        max_tokens=600,
        temperature=0,
    )
    assert isinstance(told.choices[0].message.tool_calls[0].function.parsed_arguments, Tree)


def forms():
    asked = {
        "model": ANY,
        "messages": [{"role": "user", "content": "An oak of 80 years stands in France. Tell it as JSON."}],
        "max_tokens": 600,
        "temperature": 0,
    }
    parsed = quick.chat.completions.parse(**asked, response_format=Tree).choices[0].message.parsed
    assert isinstance(parsed, Tree) and 1 <= parsed.age <= 99
    with quick.chat.completions.stream(**asked, response_format=Tree) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    schema = {"name": "tree", "strict": True, "schema": Tree.model_json_schema()}
    plain = quick.chat.completions.create(**asked, response_format={"type": "json_schema", "json_schema": schema})
    Tree.model_validate_json(plain.choices[0].message.content)
    any_json = quick.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    assert any_json.finish_reason == "length" or isinstance(json.loads(any_json.message.content), dict)
    answered = quick.responses.parse(
        model=ANY, input=asked["messages"], text_format=Tree, max_output_tokens=600, temperature=0
    )
    assert isinstance(answered.output_parsed, Tree)


def responses():
    asked = {"model": NAME, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 60}
    first = valid(client.responses.create(**asked, instructions="Answer in few words."), Response)
    assert "Paris" in first.output_text and first.usage.output_tokens <= 60
    with client.responses.stream(**asked, instructions="Answer in few words.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = valid(stream.get_final_response(), Response)
    assert text == final.output_text == first.output_text
    assert final.usage.input_tokens_details.cached_tokens > 0
    follow = {**asked, "input": "And of Italy?"}
    second = valid(client.responses.create(**follow, previous_response_id=first.id), Response)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    refused(openai.NotFoundError, lambda: client.responses.create(**asked, previous_response_id="resp_none"))
    items = [valid(item, TypeAdapter(ResponseItem)) for item in client.responses.input_items.list(second.id, limit=1)]
    assert [item.content[0].text for item in items] == ["And of Italy?", first.output_text, asked["input"]]
    counted = client.responses.input_tokens.count(model=NAME, input="And of Italy?", previous_response_id=first.id)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
    assert refused(openai.BadRequestError, lambda: client.responses.cancel(second.id)).param == "background"
    turns = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "yes"}] * 60
    cut = quick.responses.create(model=ANY, input=[*turns, *CAPITAL], truncation="auto", max_output_tokens=4)
    assert 15_000 < valid(cut, Response).usage.input_tokens <= 19_996 and cut.truncation == "auto"
    flat = {"type": "function", **PLANT["function"], "strict": True}
    named = {"type": "function", "name": "plant"}
    called = valid(
        quick.responses.create(
            model=ANY, input=PLEASE, tools=[flat], tool_choice=named, max_output_tokens=600, temperature=0
        ),
        Response,
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "plant" and json.loads(call.arguments)["kind"] in ("oak", "ash")
    back = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is planted."}]
    after = quick.responses.create(
        model=ANY, input=back, previous_response_id=called.id, tools=[flat], max_output_tokens=16, temperature=0
    )
    assert after.usage.input_tokens > called.usage.input_tokens


def errors():
    asked = {"model": NAME, "messages": CAPITAL, "max_tokens": 4}
    create = client.chat.completions.create
    assert refused(openai.NotFoundError, lambda: create(**{**asked, "model": "none-such"})).code == "model_not_found"
    assert refused(openai.BadRequestError, lambda: create(**asked, temperature=-1)).param == "temperature"
    assert refused(openai.BadRequestError, lambda: create(**asked, stream=True, top_p=7)).param == "top_p"
    long = [{"role": "user", "content": "word " * 50_000}]
    assert refused(openai.BadRequestError, lambda: create(**{**asked, "messages": long})).code == (
        "context_length_exceeded"
    )
    wrong = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key="wrong", max_retries=0)
    refused(openai.AuthenticationError, lambda: wrong.models.list())
    assert quick.chat.completions.create(**{**asked, "model": ANY}).usage.completion_tokens == 4


def decoding():
    with urllib.request.urlopen(f"{URL}/cache/stats", timeout=30) as answer:
        return json.load(answer)["decoding"]


def abort():
    """A stream that is closed ends on the server, long before it would have ended by itself."""
    stream = client.chat.completions.create(model=NAME, messages=CAPITAL, max_tokens=4000, stream=True, extra_body=ON)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert decoding() == 1
    stream.close()
    until = time.monotonic() + 5
    while decoding():
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.02)


async def at_once():
    """Eight of everything at the same time, and one that is left in the middle."""
    other = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    asked = {"model": NAME, "messages": CAPITAL, "max_tokens": 12, "temperature": 0}

    async def streamed():
        stream = await other.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole():
        return (await other.chat.completions.create(**asked)).choices[0].message.content

    async def responded():
        async with other.responses.stream(model=NAME, input=CAPITAL, temperature=0, max_output_tokens=12) as stream:
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def left():
        stream = await other.chat.completions.create(**{**asked, "max_tokens": 4000}, stream=True, extra_body=ON)
        async for _ in stream:
            break
        await stream.close()

    *said, _ = await asyncio.gather(*[make() for make in (streamed, whole, responded) for _ in range(3)], left())
    assert len(set(said)) == 1 and "Paris" in said[0], said
    assert [model.id async for model in other.models.list()] == [NAME]
    await other.close()


for check in (models, chats, logprobs, completions, tools, forms, responses, errors, abort):
    began = time.monotonic()
    check()
    sys.stderr.write(f"{check.__name__} {time.monotonic() - began:.1f} s\n")
asyncio.run(at_once())
sys.stdout.write("all is well\n")
