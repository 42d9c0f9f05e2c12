"""The official `anthropic` client and the Messages API. Answers of the server are scripted: see test_anthropic.py."""

import asyncio
import sys

import anthropic
from anthropic import types

URL = sys.argv[1]
TOOL = {
    "name": "weather",
    "description": "the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


def asked(text, **more):
    return {"model": "scripted", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


def valid(message):
    """Checked as the types say, which the client itself does not do."""
    types.Message.model_validate(message.model_dump())
    return message


def in_one_piece():
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    message = valid(client.messages.create(**asked("plain", system=system)))
    assert message.content[0].text == "Hello you, it is a fine day"
    assert message.stop_reason == "end_turn" and message.role == "assistant"
    usage = message.usage
    counted = client.messages.count_tokens(model="scripted", system=system, messages=asked("plain")["messages"])
    told = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert told == counted.input_tokens > 0
    stopped = valid(client.messages.create(**asked("plain", stop_sequences=[" fine"])))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " fine")
    short = valid(client.messages.create(**{**asked("plain"), "max_tokens": 3}))
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3


def as_a_stream():
    thinking = {"type": "adaptive"}
    with client.messages.stream(**asked("think and call", tools=[TOOL], thinking=thinking)) as stream:
        kinds = [event.type for event in stream]
        final = valid(stream.get_final_message())
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, one, two = final.content
    assert thought.thinking == "let me see" and text.text == "I call"
    assert one.input == {"city": "Rome"} and two.input == {"city": "Oslo"} and one.id != two.id
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 0
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    whole = valid(client.messages.create(**asked("think and call", tools=[TOOL], thinking=thinking)))
    assert [block.type for block in whole.content] == [block.type for block in final.content]
    assert whole.content[2].input == one.input and whole.usage == final.usage
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": "sunny"} for each in (one, two)]
    turns = [
        {"role": "user", "content": "plain"},
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": results},
    ]
    valid(client.messages.create(model="scripted", max_tokens=200, messages=turns, tools=[TOOL]))


def errors():
    for wrong, kind in (
        ({"model": "none-such"}, anthropic.NotFoundError),
        ({"container": "box"}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**asked("plain"), **wrong})
            raise AssertionError(f"{wrong} was taken")
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]
    try:
        with client.messages.stream(**asked("break")) as stream:
            for _ in stream:
                pass
        raise AssertionError("it broke")
    except anthropic.APIStatusError as error:
        assert "a step broke" in str(error)


async def at_once():
    other = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)

    async def one():
        async with other.messages.stream(**asked("plain")) as stream:
            return "".join([text async for text in stream.text_stream])

    assert set(await asyncio.gather(*[one() for _ in range(8)])) == {"Hello you, it is a fine day"}


in_one_piece()
as_a_stream()
errors()
asyncio.run(at_once())
sys.stdout.write("all is well\n")
