"""One architecture of the sweep (sweep.py), in a process of its own: a small model with seeded weights is saved, served
by `LLM` in every state of the cache, and compared with what `generate` of transformers says.

Tokens must be equal, and log-probabilities of tokens and prompts within a tolerance. Where the reference's two best
tokens are as good as equal, either is right, and the answers part there.
"""

from __future__ import annotations

import inspect
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from sapwood.engine.models.model import settle_experts
from sapwood.engine.models.recurrent import settle_time_steps

from .sweep_configs import VOCABULARY, Case, small_config

TIE = 1e-3  # of the reference's two best log-probabilities
CLOSE = 5e-3  # log-probabilities; those that are right are within 1e-4, or 2e-3 where a scan is computed in two ways
ALIKE = 1e-2  # the reference with itself: with a cache and without
TELLS = 1e-3  # what an early token must change in the log-probabilities after a late one
FEWEST = 8  # different tokens of the reference's answers
PAGE = 16
SMALL_POOL = 12  # pages of full attention, for about twice the longest request
ROWS = 4
WEIGHTS = ((1, 1.0), (2, 1.5), (3, 2.0), (4, 0.7), (5, 3.0), (6, 4.0))  # seed and size, until one says enough


class Result(NamedTuple):
    """outcome: equal, wrong, refused, crash, contradictory (the reference with itself), reference (it fails), hang."""

    name: str
    kind: str
    outcome: str
    why: str
    notes: dict[str, Any]


class Refused(Exception):
    """The engine refused a model, in words."""


class Said(NamedTuple):
    """What the reference says to a prompt."""

    tokens: list[int]
    scores: list[float]  # the log-probability of each
    margins: list[float]  # between the two best
    prompt: list[float] | None  # of the prompt's own tokens from the second on


def tokens(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()


_TRUNK = tokens(10, 64)
LONG = [tokens(1, 5), tokens(2, 37), tokens(3, 54), [*_TRUNK, *tokens(4, 26)], [*_TRUNK, *tokens(5, 26)]]
SHORT = [tokens(20 + n, 3 + n) for n in range(4)]
NEW, NEW_SHORT = 24, 64
PROMPTS = [(prompt, NEW) for prompt in LONG] + [(prompt, NEW_SHORT) for prompt in SHORT]


def judge(case: Case) -> Result:
    """Never raises: whatever happens is a result. What is wrong in float32 is asked again in float64: where rounding
    alone has turned a router, which is a step, both say the same there."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    result = _judged(case, torch.float32)
    if result.outcome == "wrong":
        again = _judged(case, torch.float64)
        if again.outcome == "equal":
            return again._replace(why=f"in float64; in float32 {result.why}")
    return result


def _judged(case: Case, dtype: torch.dtype) -> Result:
    notes: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="sapwood-sweep-") as folder:
            try:
                reference = Reference(case, dtype)
            except Exception as error:
                return Result(case.name, case.kind, "reference", _line(error), {"trace": traceback.format_exc()})
            try:
                reference.answer(notes)
            except Exception as error:
                notes |= {"reference": _line(error), "trace": traceback.format_exc()}
            reference.save(Path(folder))
            outcome, why = _served(reference, Path(folder), notes)
    except Exception as error:
        return Result(case.name, case.kind, "crash", _line(error), {**notes, "trace": traceback.format_exc()})
    if outcome == "wrong" and notes["alike"] > ALIKE:
        outcome = "contradictory"
        why = f"generate and forward of transformers differ by {notes['alike']:.2g}; {why}"
    return Result(case.name, case.kind, outcome, why, notes)


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


# ---- the reference


class Reference:
    """A model of transformers and its answers."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.config = small_config(case)
        self.model = _model(case, self.config, dtype, *WEIGHTS[0])
        self.takes = set(inspect.signature(self.model.forward).parameters)
        self.answers: dict[tuple[int, ...], Said] = {}

    def answer(self, notes: dict[str, Any]) -> None:
        """Ask it, with other weights until it says something that tells right from wrong."""
        for seed, size in WEIGHTS:
            self.config = small_config(self.case)
            self.model = _model(self.case, self.config, self.dtype, seed, size)
            self.answers = {tuple(prompt): self.says(prompt, new) for prompt, new in PROMPTS}
            notes["tokens"] = len({token for said in self.answers.values() for token in said.tokens})
            notes["early"] = self._early()
            notes["weights"] = f"{seed}, {size}"
            if notes["tokens"] >= FEWEST and notes["early"] > TELLS:
                break
        notes["weak"] = notes["tokens"] < FEWEST or not notes["early"] > TELLS
        notes["alike"] = max(self._alike(prompt) for prompt, _ in PROMPTS[:3])
        turn = [*LONG[4], *self.answers[tuple(LONG[4])].tokens, *tokens(30, 7)]
        self.chat = (turn, NEW)
        self.answers[tuple(turn)] = self.says(turn, NEW)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if type(self.config) is not type(self.model.config):  # a text model of a checkpoint that has more
            self.config.architectures = [type(self.model).__name__]
            self.config.save_pretrained(folder)

    def says(self, prompt: list[int], new: int) -> Said:
        ids = torch.tensor([prompt])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            use_cache=True,
        )
        answer = found.sequences[0, len(prompt) :]
        if len(answer) != new:
            raise RuntimeError(f"generate gave {len(answer)} tokens, not {new}")
        scores = torch.cat([logits.float().log_softmax(-1) for logits in found.logits])
        if not bool(scores.isfinite().any(1).all()) or bool(scores.isnan().any()):
            raise RuntimeError("generate gave logits that are not finite")
        best = scores.topk(2).values
        alone = self.logits(prompt)
        told = None
        if alone is not None:
            told = alone[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        chosen = scores.gather(1, answer[:, None])[:, 0]
        return Said(answer.tolist(), chosen.tolist(), (best[:, 0] - best[:, 1]).tolist(), told)

    @torch.no_grad()
    def logits(self, prompt: list[int]) -> torch.Tensor | None:
        """Of every token in one forward without a cache. Positions are given where they can be: some models begin them
        elsewhere if they are not, and `generate` gives them. None: the model gives only some."""
        ids = torch.tensor([prompt])
        more = {"position_ids": torch.arange(len(prompt))[None]} if "position_ids" in self.takes else {}
        found = self.model(input_ids=ids, use_cache=False, **more).logits[0].float()
        return found if len(found) == len(prompt) else None

    def _early(self) -> float:
        """How much the first tokens of a prompt change what is said after the last."""
        prompt = LONG[1]
        other = [token % (VOCABULARY - 6) + 6 for token in prompt[:4]] + prompt[4:]
        first, second = self.logits(prompt), self.logits(other)
        if first is None or second is None:
            return 1.0
        return float((first[-1].log_softmax(-1) - second[-1].log_softmax(-1)).abs().max())

    def _alike(self, prompt: list[int]) -> float:
        """How far generate, with a cache, is from one forward without one."""
        said = self.answers[tuple(prompt)]
        whole = self.logits([*prompt, *said.tokens])
        if whole is None:
            return 0.0
        scores = whole.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        return float((scores - torch.tensor(said.scores)).abs().max())


def _model(case: Case, config: Any, dtype: torch.dtype, seed: int, size: float) -> Any:
    """With eager attention, which has soft-caps and sinks in every version."""
    torch.manual_seed(seed)
    model = getattr(transformers, case.loader).from_config(config, dtype=dtype, attn_implementation="eager")
    settle_experts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan = parameter[0].numel() if "conv" in name else parameter.shape[-1]
                parameter.normal_(0, size * fan**-0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    settle_time_steps(model)  # the one thing in which we do not follow transformers
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval().requires_grad_(False)


# ---- the engine


def _served(reference: Reference, folder: Path, notes: dict[str, Any]) -> tuple[str, str]:
    """What became of it, and why."""
    from sapwood.engine.llm import LLM

    flags: dict[str, Any] = {
        "device": "cpu",
        "dtype": str(reference.dtype).removeprefix("torch."),
        "max_model_len": 256,
        "page_size": PAGE,
        "progress": False,
        "skip_tokenizer_init": True,
    }
    try:
        llm = LLM(str(folder), device_cache="64MiB", max_num_seqs=16, **flags)
    except ValueError as error:  # Unsupported, ModelError and flags: what the engine says in words
        if not _in_words(error):
            raise
        return "refused", str(error).strip().splitlines()[0].replace(str(folder), "FOLDER")
    if "reference" in notes:
        llm.close()
        return "reference", notes["reference"]
    wrong: list[str] = []
    notes["gathers"] = llm.engine.served.gathers
    with llm:
        look = Look(llm, reference, wrong, notes)
        for prompt, new in PROMPTS[:5:2]:
            look.at("alone", [(prompt, new)], "alone")
        look.at("batch", PROMPTS, "batch", prompts_too=True)
        look.at("batch", PROMPTS, "warm")
        look.at("again", PROMPTS, "warm")
        cached = look.at("warm", PROMPTS, "warm")
        if not cached:
            wrong.append("warm: nothing was cached")
        notes["cached"] = cached
        notes["chat cached"] = look.at("chat", [reference.chat], "warm")
    with (
        _small_pool(),
        LLM(
            str(folder),
            device_cache="64MiB",
            host_cache="16MiB",
            max_num_seqs=ROWS,
            max_num_batched_tokens=16,
            overlap=1,
            **flags,
        ) as llm,
    ):
        look = Look(llm, reference, wrong, notes)
        for state in ("small pool", "small pool again"):
            look.at(state, [*PROMPTS, reference.chat], "small")
        stats = llm.stats()
        notes["retractions"] = stats.get("retractions", 0)
        notes["loads"] = stats["tiers"].get("loads", 0)
    return ("wrong", "; ".join(wrong[:3])) if wrong else ("equal", "")


def _in_words(error: BaseException) -> bool:
    """Whether an error at the start is a refusal: one of the engine's own, raised in its files."""
    from sapwood.engine.loading.model_files import ModelError
    from sapwood.engine.models.kv_groups import Unsupported

    return isinstance(error, ModelError | Unsupported)


class Look:
    """Asks an engine, and compares."""

    def __init__(self, llm: Any, reference: Reference, wrong: list[str], notes: dict[str, Any]) -> None:
        self.llm, self.reference, self.wrong, self.notes = llm, reference, wrong, notes

    def at(self, state: str, prompts: list[tuple[list[int], int]], salt: str, prompts_too: bool = False) -> int:
        """All of these together; what they had cached."""
        from sapwood.engine.params import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt, _ in prompts],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=new,
                    logprobs=1,
                    ignore_eos=True,
                    detokenize=False,
                    prompt_logprobs=0 if prompts_too else None,
                )
                for _, new in prompts
            ],
            use_tqdm=False,
        )
        for (prompt, new), output in zip(prompts, outputs, strict=True):
            self._compare(f"{state}, {len(prompt)} + {new}", self.reference.answers[tuple(prompt)], output)
        return sum(output.num_cached_tokens for output in outputs)

    def _compare(self, where: str, said: Said, output: Any) -> None:
        if output.error:
            self.wrong.append(f"{where}: failed ({output.error})"[:200])
            return
        got = output.outputs[0]
        off = 0.0
        for at, (right, token) in enumerate(zip(said.tokens, got.token_ids, strict=True)):
            if right != token:
                if said.margins[at] > TIE:
                    self.wrong.append(f"{where}: token {at} is {token}, not {right}, by {said.margins[at]:.2g}")
                else:
                    self.notes["ties"] = self.notes.get("ties", 0) + 1
                break
            off = max(off, abs(got.logprobs[at][token].logprob - said.scores[at]))
        if output.prompt_logprobs is not None and said.prompt is not None:
            ids = output.prompt_token_ids
            for at, score in enumerate(said.prompt, 1):
                off = max(off, abs(output.prompt_logprobs[at][ids[at]].logprob - score))
        if not off < CLOSE:
            self.wrong.append(f"{where}: log-probabilities are off by {off:.2g}")
        self.notes["off"] = max(self.notes.get("off", 0.0), off)


class _small_pool:
    """Inside, engines get so few pages and slots that not all rows fit, and rows come in without room to spare."""

    def __enter__(self) -> None:
        from sapwood.engine import engine as engine_module
        from sapwood.engine.models import sizing

        self._size = inner = sizing.size

        def size(*arguments: Any, **more: Any) -> Any:
            sized = inner(*arguments, **more)
            groups = tuple(_smaller(group) for group in sized.groups)
            return sized._replace(groups=groups)

        sizing.size = size
        self._config = engine_module.SchedulerConfig
        engine_module.SchedulerConfig = partial(self._config, headroom=0)

    def __exit__(self, *_: object) -> None:
        from sapwood.engine import engine as engine_module
        from sapwood.engine.models import sizing

        sizing.size, engine_module.SchedulerConfig = self._size, self._config


def _smaller(group: Any) -> Any:
    from dataclasses import replace

    if group.family != "state":
        return replace(group, device_pages=SMALL_POOL)
    return replace(group, device_pages=ROWS + 2)
