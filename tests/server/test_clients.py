"""Real clients, unmodified, each in an environment of its own, with whole servers before them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapwood.engine.llm import LLM
from sapwood.engine.params import SamplingParams

from .kit import Running, model_folder, paced_flags
from .venvs import python_with, run

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.xdist_group("clients")]  # pip, and a real model

WELL = "all is well\n"


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """The default model."""
    yield from _url(Running("--store", "none", "--device-cache", "1GiB"))


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    """No model, and a key."""
    yield from _url(Running(*paced_flags(), "--api-key", "right"))


def _url(running: Running) -> Iterator[str]:
    try:
        yield f"http://127.0.0.1:{running.ready().port}"
    finally:
        running.kill()


def environment(*requirements: str) -> Path:
    found = python_with(*requirements)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_openai(real, keyed):
    """Chats, completions, responses, tools, answers of a demanded form, errors, a stream that is left; also many at
    once. All answers are as the client's types say.

    Mutation: `usage_of` leaves the details out; `_chunk` writes no index; `EngineJob.close` drops nothing.
    """
    assert run(environment("openai==3.49.0"), "openai_client.py", real, keyed) == WELL


def test_anthropic(real, keyed):
    """Messages in one piece and as streams, systems, tools, counts, errors, keys, a stream that is left.

    Mutation: `count_tokens` leaves the system out; `_let_in` reads no such header; `chat_choice` forgets any.
    """
    assert run(environment("anthropic==2.8.0"), "anthropic_client.py", real, keyed) == WELL


def test_litellm(real, keyed):
    """As an OpenAI server, as vLLM and as Anthropic; tools, forms, and errors that it tells apart.

    Mutation: `too_long` is a 500; `closing` writes no usage.
    """
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    assert run(environment("litellm==1.105.0"), "litellm_client.py", real, keyed, **variables).endswith(WELL)


def test_langchain(real, keyed):
    """Chats through both APIs, streams with usage, tools and what they return, forms by each method, texts, responses
    that follow others.

    Mutation: `ChunkWriter` never sets `usage`; `chat_choice` forgets functions.
    """
    assert run(environment("langchain-openai==1.6.7"), "langchain_client.py", real, keyed) == WELL


def test_instructor(real, keyed):
    """Forms by tools and by schemas, whole, in parts and many at once, at the first try.

    Mutation: `read_tools` holds no call to its schema.
    """
    assert run(environment("instructor==1.17.0"), "instructor_client.py", real, keyed) == WELL


def test_pydantic_ai(real, keyed):
    """Chats, streams, tools and forms through chat completions and through the Responses API.

    Mutation: `_closed` leaves out what a call's arguments were.
    """
    assert run(environment("pydantic-ai-slim[openai]==2.66.0"), "pydantic_ai_client.py", real, keyed) == WELL


def test_llama_index(real, keyed):
    """Chats, texts, streams, tools that must be called, forms.

    Mutation: `ChatWriter._delta` numbers no calls.
    """
    python = environment("llama-index-llms-openai-like==0.8.1")
    assert run(python, "llama_index_client.py", real, keyed) == WELL


def test_openai_agents(real, keyed):
    """Agents that answer, call and go on, and tell forms, through both APIs; responses that follow others.

    Mutation: `with_ids` gives an item no id; `Parameters.grammar` forgets the form beside tools.
    """
    assert run(environment("openai-agents==0.24.0"), "openai_agents_client.py", real, keyed) == WELL


def test_lm_evaluation_harness(real, tmp_path):
    """However it asks, the obvious choice wins, and log-likelihoods are those that the engine finds by itself.

    Mutation: `CompletionLogprobs` forgets the prompt, or shifts it by a token; `_best` leaves out the likeliest.
    """
    python = environment("lm-eval[api]==0.4.13", "transformers>=5,<6")
    folder = str(model_folder())
    with urllib.request.urlopen(f"{real}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    said = run(python, "lm_eval_client.py", real, name, folder, str(tasks), seconds=600, **variables)
    told = json.loads(said.rpartition("result: ")[2])
    with LLM(folder, device_cache="256MiB", max_num_seqs=4, progress=False) as llm:
        right = [_score(llm, each["context"], each["text"]) for each in told["ids, one by one"]["scores"]]
    for way, found in told.items():
        assert found["accuracy"] == 1.0, (way, found)
        assert found["written"] == told["ids, one by one"]["written"] and "Paris" in found["written"][0], way
        for each, (logprob, greedy) in zip(found["scores"], right, strict=True):
            assert each["logprob"] == pytest.approx(logprob, abs=1e-3), (way, each)
            assert each["greedy"] == greedy, (way, each)
    assert len({greedy for _, greedy in right}) == 2


def _score(llm: LLM, context: str, text: str) -> tuple[float, bool]:
    """The log-likelihood of a text behind a context, and whether each of its tokens was the likeliest."""
    encode = llm.get_tokenizer().encode
    before = len(encode(context))
    (output,) = llm.generate([context + text], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    ids, scores = output.prompt_token_ids, output.prompt_logprobs
    found = [scores[at][ids[at]] for at in range(before, len(ids))]
    return sum(each.logprob for each in found), all(each.rank == 1 for each in found)


def test_the_router_smg():
    """Before two servers: each prefix sticks to one of them and is cached there; when one is killed, all are answered.

    Mutation: `/version` or `/health` is not there; `cached_tokens` is not told.
    """
    python = environment("smg==1.13.0")
    servers = [Running(*paced_flags()) for _ in range(2)]
    try:
        urls = [f"http://127.0.0.1:{server.ready().port}" for server in servers]
        assert run(python, "smg_router.py", *urls, str(servers[1].process.pid)) == WELL
    finally:
        for server in servers:
            server.kill()
