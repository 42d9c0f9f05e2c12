"""`LLM`: a model for scripts. Names and fields follow vLLM, so that a script written for it runs with another import.

with LLM("path/to/model") as llm:
    for output in llm.generate(["Hello"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text, output.num_cached_tokens)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .engine import Engine
from .flags import from_flags
from .loading.updates import read_update
from .params import SamplingParams
from .progress import bar
from .samples import Logprob, Sample

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]


class Miss(NamedTuple):
    """Why no more of a prompt was cached: the reason, and the token at which it parted from what is."""

    reason: str
    position: int


class LoRARequest(NamedTuple):
    """An adapter to use: a name, a number of the caller's, and its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """`error`: why it failed, if its `finish_reason` is "error"; what it had said until then is there."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    miss: Miss | None = None
    lora_request: LoRARequest | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


class LLM:
    """A model, loaded. `model`: a folder, a .gguf file or a hub's id; None is the default model. Flags are those of the
    command line, with underscores. Close it, or use it in a `with`."""

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        self.engine = Engine(from_flags(model, {"max_mixed_tokens": 0, **flags}))  # nobody waits for single tokens
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. Whoever still runs is aborted."""
        self.engine.close()

    def get_tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """All answers, in the order of the prompts. If one fails, the others are there all the same: see `error` of
        each. Ctrl-C aborts those that run, and comes out."""
        jobs = self._submit(prompts, sampling_params, lora_request)
        with bar(len(jobs), "Processed prompts", use_tqdm) as shown:
            for _ in self._run(jobs, shown):
                pass
        return [self._output(job) for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for conversations, each a list of messages with role and content."""
        tokenizer = self._text_needs_a_tokenizer()
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = []
        for conversation in many:
            text = tokenizer.apply_chat_template(
                list(conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
            ids = tokenizer.encode(text, add_special_tokens=False)  # the template has put them already
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """One answer as it grows: an output whenever there is more of it. Leaving the loop aborts it."""
        jobs = self._submit([prompt], sampling_params, lora_request)
        try:
            for _ in self._run(jobs, None):
                yield self._output(jobs[0])
        finally:
            self.engine.requests.abort(jobs[0].samples)

    def explain(self, prompt: Prompt, cache_salt: str | None = None) -> Any:
        """How much of a prompt is cached now, and why no more."""
        from sapwood.cache import Namespace

        _, ids = self._tokens(prompt)
        return self.engine.scheduler.cache.explain(Namespace(None, cache_salt, self.engine.requests.version), ids)

    def stats(self) -> dict[str, Any]:
        """What the scheduler, the cache and the tiers have done."""
        return {**self.engine.scheduler.stats(), "tiers": self.engine.loop.tiers.stats()}

    def update_weights(self, path: str, abort: bool = False) -> None:
        """Serve with other weights from now on: those in a folder or a safetensors file, all of the model's or some.
        Streams that run end under the old ones first, or at once with `abort`. Nothing computed before is found
        again."""
        engine = self.engine
        engine.begin_update(read_update(engine.served.model, path), abort)
        while engine.requests.updating:
            engine.requests.step()
            engine.requests.rest(1.0)

    # ---- inside

    def _submit(self, prompts: Any, params: Any, lora: Any) -> list[_PromptJob]:
        """All prompts or, with an error for the first that cannot be served, none."""
        some = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        every = _each("sampling_params", SamplingParams() if params is None else params, SamplingParams, len(some))
        loras = _each("lora_request", lora, LoRARequest | None, len(some))
        jobs: list[_PromptJob] = []
        try:
            for prompt, wanted, adapter in zip(some, every, loras, strict=True):
                text, ids = self._tokens(prompt)
                if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
                    wanted = replace(wanted, cache_salt=prompt["cache_salt"])
                id = str(next(self._numbers))
                samples = self.engine.requests.submit(id, ids, wanted, self._adapter(adapter))
                jobs.append(_PromptJob(id, text, ids, samples, adapter))
        except BaseException:
            for job in jobs:
                self.engine.requests.abort(job.samples)
            raise
        return jobs

    def _tokens(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            if ids is not None:
                return prompt.get("prompt"), list(ids)
            prompt = prompt.get("prompt")
        if not isinstance(prompt, str):
            raise ValueError(f'a prompt must be text or {{"prompt_token_ids": [...]}}, got {prompt!r:.60}')
        return prompt, self._text_needs_a_tokenizer().encode(prompt)

    def _text_needs_a_tokenizer(self) -> Any:
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer here: give prompts as prompt_token_ids")
        return self.engine.tokenizer

    def _adapter(self, lora: LoRARequest | None) -> bytes | None:
        if lora is None:
            return None
        adapters = self.engine.adapters
        if adapters is None:
            raise ValueError("lora_request needs enable_lora=True")
        known = adapters.names().get(lora.lora_name)
        return known if known is not None else adapters.load(lora.lora_name, lora.lora_path)

    def _run(self, jobs: Sequence[_PromptJob], shown: Any) -> Iterator[None]:
        """Step until these are over. Yields whenever one of them has got further."""
        running = [job for job in jobs if not job.over]
        told = {job.id: 0 for job in jobs}
        try:
            while running:
                self.engine.requests.step()
                grown = {job.id: job.tokens for job in running}
                still = [job for job in running if not job.over]
                if shown is not None:
                    shown.update(len(running) - len(still))
                if len(still) < len(running) or any(told[id] < tokens for id, tokens in grown.items()):
                    yield
                told |= grown
                running = still
                self.engine.requests.rest(1.0)
        except KeyboardInterrupt:
            for job in jobs:
                self.engine.requests.abort(job.samples)
            raise

    def _output(self, job: _PromptJob) -> RequestOutput:
        first = job.samples[0]
        cache = first.cache
        return RequestOutput(
            job.id,
            job.prompt,
            job.ids,
            [_completion(sample) for sample in job.samples],
            job.over,
            cache.cached,
            Miss(cache.reason, cache.position) if cache.missed else None,
            job.lora,
            list(first.prompt_logprobs) if first.scores_prompt else None,
            next((sample.error for sample in job.samples if sample.error), None),
        )


class _PromptJob(NamedTuple):
    id: str
    prompt: str | None
    ids: list[int]
    samples: list[Sample]
    lora: LoRARequest | None

    @property
    def over(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


def _completion(sample: Sample) -> CompletionOutput:
    asked = sample.params.logprobs is not None
    return CompletionOutput(
        sample.index,
        sample.text,
        list(sample.token_ids),
        sample.cumulative if asked else None,
        list(sample.logprobs) if asked else None,
        sample.finish_reason,
        sample.stop_reason,
    )


def _each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """One for every prompt: the same for all, or as many as there are."""
    if isinstance(given, kind):
        return [given] * count
    every = list(given)
    if len(every) != count or not all(isinstance(each, kind) for each in every):
        raise ValueError(f"{name} must be one for all prompts or one for each of the {count}, got {len(every)}")
    return every
