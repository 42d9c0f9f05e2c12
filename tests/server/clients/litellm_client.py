"""`litellm`, unmodified: `litellm_client.py URL KEYED_URL`. The first server has a real model. The second, for
what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import json
import sys
import urllib.request

import litellm

URL, KEYED_URL = sys.argv[1:]
with urllib.request.urlopen(f"{URL}/v1/models", timeout=30) as found:
    NAME = json.load(found)["data"][0]["id"]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"messages": CAPITAL, "max_tokens": 16, "temperature": 0, "api_key": "none", "num_retries": 0}
PLANT = {
    "type": "function",
    "function": {
        "name": "plant",
        "description": "Plant a tree.",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["oak", "ash"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
}


def refused(kind, call):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def chats(provider, base):
    """In one piece, as a stream with usage, and the stream put together again by litellm itself."""
    asked = {**ASKED, "model": f"{provider}/{NAME}", "api_base": base}
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert "Paris" in text and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    built = litellm.stream_chunk_builder(chunks, messages=CAPITAL)
    assert built.choices[0].message.content == text
    assert built.usage.completion_tokens == whole.usage.completion_tokens, (built.usage, whole.usage)
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens, (built.usage, whole.usage)


def tools_and_forms():
    keyed = {"model": "openai/paced", "api_base": f"{KEYED_URL}/v1", "api_key": "right"}
    asked = {**ASKED, **keyed, "max_tokens": 600}
    named = {"type": "function", "function": {"name": "plant"}}
    for choice in ("required", named):
        message = litellm.completion(**asked, tools=[PLANT], tool_choice=choice).choices[0].message
        assert message.tool_calls[0].function.name == "plant"
        assert json.loads(message.tool_calls[0].function.arguments)["kind"] in ("oak", "ash")
        chunks = list(litellm.completion(**asked, tools=[PLANT], tool_choice=choice, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=CAPITAL).choices[0].message
        assert [call.function.arguments for call in built.tool_calls] == [
            call.function.arguments for call in message.tool_calls
        ]
    schema = {"name": "tree", "schema": PLANT["function"]["parameters"], "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    assert json.loads(litellm.completion(**asked, response_format=form).choices[0].message.content)["kind"]


def texts():
    told = litellm.text_completion(
        model=f"text-completion-openai/{NAME}",
        prompt="The capital of France is",
        api_base=f"{URL}/v1",
        api_key="none",
        max_tokens=5,
        temperature=0,
    )
    assert "Paris" in told.choices[0].text and told.usage.completion_tokens == 5


def errors():
    asked = {**ASKED, "api_base": f"{URL}/v1"}
    refused(litellm.NotFoundError, lambda: litellm.completion(**asked, model="openai/none-such"))
    refused(litellm.BadRequestError, lambda: litellm.completion(**{**asked, "temperature": -1}, model=f"openai/{NAME}"))
    long = [{"role": "user", "content": "word " * 50_000}]
    refused(litellm.BadRequestError, lambda: litellm.completion(**{**asked, "messages": long}, model=f"openai/{NAME}"))
    keyed = {**ASKED, "api_base": f"{KEYED_URL}/v1", "model": "openai/paced"}
    refused(litellm.AuthenticationError, lambda: litellm.completion(**{**keyed, "api_key": "wrong"}))
    assert litellm.completion(**{**keyed, "api_key": "right"}).usage.completion_tokens == 16


async def at_once():
    asked = {**ASKED, "model": f"openai/{NAME}", "api_base": f"{URL}/v1"}
    told = await asyncio.gather(*[litellm.acompletion(**asked) for _ in range(4)])
    assert len({each.choices[0].message.content for each in told}) == 1


chats("openai", f"{URL}/v1")
chats("hosted_vllm", f"{URL}/v1")
chats("anthropic", URL)
tools_and_forms()
texts()
errors()
asyncio.run(at_once())
sys.stdout.write("all is well\n")
