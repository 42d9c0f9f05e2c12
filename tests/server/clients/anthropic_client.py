"""The official `anthropic` client, unmodified: `anthropic_client.py URL KEYED_URL`. The first server has a real
model. The second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
import time
import urllib.request

import anthropic
from anthropic.types import Message

URL, KEYED_URL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
quick = anthropic.Anthropic(base_url=KEYED_URL, api_key="right", max_retries=0)
PLANT = {
    "name": "plant",
    "description": "Plant a tree.",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["oak", "ash"]}, "count": {"enum": [1, 2]}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    },
}


def get(url, key="none"):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-Api-Key": key}), timeout=30) as answer:
        return json.load(answer)


NAME, ANY = get(f"{URL}/v1/models")["data"][0]["id"], get(f"{KEYED_URL}/v1/models", "right")["data"][0]["id"]


GREEDY = {"temperature": 0}  # which this client has no name for


def asked(text="What is the capital of France?", **more):
    turns = [{"role": "user", "content": text}]
    return {"model": NAME, "max_tokens": 16, "extra_body": GREEDY, "messages": turns, **more}


def valid(message):
    """Checked as the types say, which the client itself does not do."""
    Message.model_validate(message.model_dump())
    return message


def refused(kind, call):
    try:
        call()
    except kind as error:
        assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        return error.body["error"]["type"]
    raise AssertionError(f"no {kind.__name__}")


def whole_and_streamed():
    system = [{"type": "text", "text": "You answer in one short sentence.", "cache_control": {"type": "ephemeral"}}]
    whole = valid(client.messages.create(**asked(system=system)))
    assert "Paris" in whole.content[0].text and whole.role == "assistant" and whole.model == NAME
    assert whole.stop_reason in ("end_turn", "max_tokens")
    usage = whole.usage
    counted = client.messages.count_tokens(model=NAME, system=system, messages=asked()["messages"])
    less = client.messages.count_tokens(model=NAME, system="Hm.", messages=asked()["messages"])
    prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert prompt == counted.input_tokens > less.input_tokens
    with client.messages.stream(**asked(system=system)) as stream:
        text = "".join(stream.text_stream)
        final = valid(stream.get_final_message())
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == usage.output_tokens
    assert final.usage.cache_read_input_tokens > 0
    raw = list(client.messages.create(**asked(system=system), stream=True))
    assert [raw[0].type, raw[-1].type] == ["message_start", "message_stop"]
    stopped = valid(client.messages.create(**asked(stop_sequences=["Paris"])))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    going_on = asked()["messages"] + [{"role": "assistant", "content": "The capital of France is"}]
    assert "Paris" in client.messages.create(**{**asked(), "messages": going_on}).content[0].text


def tools():
    please = "Plant one oak, please."
    free = valid(
        quick.messages.create(**asked(please, model=ANY, tools=[PLANT], tool_choice={"type": "auto"}, max_tokens=40))
    )
    assert free.content
    for choice in ({"type": "any"}, {"type": "tool", "name": "plant"}):
        more = {"tools": [PLANT], "tool_choice": choice, "max_tokens": 600}
        with quick.messages.stream(**asked(please, model=ANY, **more)) as stream:
            kinds = {event.type for event in stream}
            streamed = valid(stream.get_final_message())
        called = valid(quick.messages.create(**asked(please, model=ANY, **more)))
        assert "input_json" in kinds and called.stop_reason in ("tool_use", "max_tokens")
        assert all(block.type == "tool_use" and block.name == "plant" for block in called.content)
        whole = len(called.content) - (called.stop_reason == "max_tokens")  # the last one was cut off
        assert [use.input for use in called.content[:whole]] == [use.input for use in streamed.content[:whole]]
        assert called.content[0].input["kind"] in ("oak", "ash")
    use = called.content[0]
    turns = [
        *asked(please)["messages"],
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "It is planted."}]},
    ]
    assert valid(quick.messages.create(**{**asked(model=ANY, tools=[PLANT]), "messages": turns})).content


def errors():
    create = client.messages.create
    assert refused(anthropic.NotFoundError, lambda: create(**{**asked(), "model": "none-such"})) == "not_found_error"
    assert (
        refused(anthropic.BadRequestError, lambda: create(**asked(extra_body={"temperature": -1})))
        == "invalid_request_error"
    )
    assert refused(anthropic.BadRequestError, lambda: create(**asked(max_tokens=0))) == "invalid_request_error"
    wrong = anthropic.Anthropic(base_url=KEYED_URL, api_key="wrong", max_retries=0)
    assert refused(anthropic.AuthenticationError, lambda: wrong.messages.create(**asked())) == "authentication_error"
    for right in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
        other = anthropic.Anthropic(base_url=KEYED_URL, max_retries=0, **right)
        assert other.messages.create(**{**asked(), "model": ANY}).usage.output_tokens == 16


def decoding():
    return get(f"{URL}/cache/stats")["decoding"]


def abort():
    """A stream that is closed ends on the server, long before it would have ended by itself."""
    with client.messages.stream(**asked(max_tokens=4000, extra_body={"ignore_eos": True})) as stream:
        for _, _ in zip(range(8), stream, strict=False):
            pass
        assert decoding() == 1
    until = time.monotonic() + 5
    while decoding():
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.02)


async def at_once():
    other = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)

    async def streamed():
        async with other.messages.stream(**asked()) as stream:
            return "".join([text async for text in stream.text_stream])

    async def whole():
        return (await other.messages.create(**asked())).content[0].text

    said = await asyncio.gather(*[make() for make in (streamed, whole) for _ in range(3)])
    assert len(set(said)) == 1 and "Paris" in said[0], said
    await other.close()


for check in (whole_and_streamed, tools, errors, abort):
    began = time.monotonic()
    check()
    sys.stderr.write(f"{check.__name__} {time.monotonic() - began:.1f} s\n")
asyncio.run(at_once())
sys.stdout.write("all is well\n")
