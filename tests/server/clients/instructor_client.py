"""`instructor`, unmodified: `instructor_client.py URL KEYED_URL`. The first server has a real model. The
second, for what any model must do, has none, and lets in who brings the key "right"."""

import asyncio
import sys
from typing import Literal

import instructor
import only_here
import openai
from pydantic import BaseModel, ConfigDict, Field

URL, KEYED_URL = sys.argv[1:]
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
quick = openai.OpenAI(base_url=f"{KEYED_URL}/v1", api_key="right", max_retries=0)
NAME, ANY = plain.models.list().data[0].id, quick.models.list().data[0].id
ASKED = {"messages": [{"role": "user", "content": "An oak of 80 years stands in France."}], "max_tokens": 600}


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    country: Literal["France", "Norway"]


class Tree(BaseModel):
    """A tree."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["oak", "ash", "elm"]
    age: int = Field(ge=1, le=99)
    place: Place


class City(BaseModel):
    """A city."""

    name: str


def modes():
    """Each way of asking for a form that holds the model to it, without a try more."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(quick, mode=mode)
        told, raw = client.chat.completions.create_with_completion(
            model=ANY, response_model=Tree, max_retries=0, temperature=0, **ASKED
        )
        assert isinstance(told, Tree) and 1 <= told.age <= 99, (mode, told)
        assert raw.usage.completion_tokens > 0


def streams():
    """Parts of a form as they come, and each one of several."""
    client = instructor.from_openai(quick, mode=instructor.Mode.JSON_SCHEMA)
    partly = list(
        client.chat.completions.create_partial(model=ANY, response_model=Tree, max_retries=0, temperature=0, **ASKED)
    )
    assert len(partly) > 1 and partly[-1].kind in ("oak", "ash", "elm") and partly[-1].place.country
    whole = client.chat.completions.create(model=ANY, response_model=Tree, max_retries=0, temperature=0, **ASKED)
    assert partly[-1].model_dump() == whole.model_dump()


def a_real_model():
    """It is asked for JSON in words, too, and what it says is true."""
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(plain, mode=mode)
        told = client.chat.completions.create(
            model=NAME,
            response_model=City,
            max_retries=2,
            temperature=0,
            max_tokens=60,
            messages=[{"role": "user", "content": "What is the capital of France? Tell its name."}],
        )
        assert "Paris" in told.name, (mode, told)


def without_a_form():
    client = instructor.from_openai(plain)
    asked = {"model": NAME, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    told = client.chat.completions.create(response_model=None, max_tokens=16, temperature=0, **asked)
    assert "Paris" in told.choices[0].message.content
    stream = plain.chat.completions.create(stream=True, max_tokens=16, temperature=0, **asked)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)


async def at_once():
    other = openai.AsyncOpenAI(base_url=f"{KEYED_URL}/v1", api_key="right", max_retries=0)
    client = instructor.from_openai(other, mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": ANY, "response_model": Tree, "max_retries": 0, "temperature": 0, **ASKED}
    told = await asyncio.gather(*[client.chat.completions.create(**asked) for _ in range(4)])
    assert len({each.model_dump_json() for each in told}) == 1
    await other.close()


modes()
streams()
a_real_model()
without_a_form()
asyncio.run(at_once())
only_here.well()
