"""The official `openai` client and the Responses API. Answers of the server are scripted: see test_responses.py."""

import asyncio
import sys

import openai
from openai.types import responses as types

URL = sys.argv[1]
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def valid(response):
    """Checked as the types say, which the client itself does not do."""
    types.Response.model_validate(response.model_dump(by_alias=True))
    return response


def in_one_piece():
    first = valid(client.responses.create(model="scripted", input="plain", instructions="Be kind.", temperature=0.5))
    assert first.output_text == "Hello you, it is a fine day"
    assert first.status == "completed" and first.error is None and first.temperature == 0.5
    assert first.usage.input_tokens > 0 and first.usage.input_tokens_details.cached_tokens == 0
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    second = valid(client.responses.create(model="scripted", input="plain", previous_response_id=first.id))
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
        raise AssertionError("it was deleted")
    except openai.NotFoundError as error:
        assert error.code == "response_not_found"


def as_a_stream():
    kinds, text = [], ""
    with client.responses.stream(model="scripted", input="think and call", tools=[TOOL], top_logprobs=2) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text and event.logprobs
        final = valid(stream.get_final_response())
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, one, two = final.output
    assert reasoning.content[0].text == "let me see"
    assert final.output_text == text == "I call"
    assert message.content[0].logprobs[0].token == "I" and len(message.content[0].logprobs[0].top_logprobs) == 2
    assert one.parsed_arguments == {"city": "Rome"} and two.parsed_arguments == {"city": "Oslo"}
    assert one.name == "weather" and one.call_id != two.call_id
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    for kind in ("reasoning_text.delta", "function_call_arguments.delta", "function_call_arguments.done"):
        assert f"response.{kind}" in kinds
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in (one, two)]
    valid(client.responses.create(model="scripted", input=outputs, previous_response_id=final.id, tools=[TOOL]))
    stateless = [{"role": "user", "content": "plain"}, *final.output, *outputs]
    valid(client.responses.create(model="scripted", input=stateless, tools=[TOOL], store=False))


def cut_off():
    short = valid(client.responses.create(model="scripted", input="plain", max_output_tokens=3))
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    with client.responses.create(model="scripted", input="break", stream=True) as stream:
        *_, last = stream
    assert last.type == "response.failed" and last.response.error.code == "server_error"


def refused():
    try:
        client.responses.create(model="scripted", input="plain", background=True)
        raise AssertionError("there is no background")
    except openai.BadRequestError as error:
        assert error.param == "background" and error.code == "unsupported_parameter"


async def at_once():
    other = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

    async def one():
        stream = await other.responses.create(model="scripted", input="plain", stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert set(await asyncio.gather(*[one() for _ in range(8)])) == {"Hello you, it is a fine day"}


in_one_piece()
as_a_stream()
cut_off()
refused()
asyncio.run(at_once())
sys.stdout.write("all is well\n")
