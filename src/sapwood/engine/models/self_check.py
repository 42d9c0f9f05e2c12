"""Whether a model answers here as it does in transformers, asked at every start before anybody is served.

    Reference   two rows of some 20 tokens through the model as transformers runs it, before it is changed in any way;
                and once more, with every number that a module answers rounded to one next to it
    check       the same rows through the executor: in chunks, together, then token by token

Our logits must be as far from those of transformers as rounding can take them, and not further. How far that is depends
on the model and its dtype, and is measured: it is the distance of the two references. In a model with experts one
rounding may send a token to another expert, here or there. So the distance of a row is that of its middle token; and as
every later token sees an early one, what is off is asked again with other rows. Whoever misreads a model does so with
any rows.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sapwood.cache import CacheGroup
from sapwood.scheduler import Plan, RequestSpec, Scheduler, SchedulerConfig

from ..executor.executor import out_of_memory
from ..executor.rows import Greedy, Newest, PlanRows
from ..executor.sampling import Sampled
from ..loading.weights import quiet
from .kv_groups import Unsupported, text_config
from .model import settle_experts

if TYPE_CHECKING:
    from ..executor.executor import ModelExecutor

log = logging.getLogger(__name__)
_ROW_TOKENS = (22, 17)  # tokens of the rows
_MAX_TRIES = 3  # with other rows each
_ANSWER_TOKENS = 4  # of them are given one by one, as if they had been sampled
_CHUNK_TOKENS = 16  # tokens of a step, so that a row takes two
_TOLERANCE = 3.0  # how many times as far as the references are apart ours may be
_SUM_ROUNDING = 2.0**-20  # relative: sums in float32, which are computed in every dtype, are off by some such
_NEVER_SAID_LOGIT = 6e4  # a logit below minus this: a token that the model is kept from saying


class ReferenceFailed(NamedTuple):
    """transformers itself could not run the rows."""

    why: str


class Reference(NamedTuple):
    """What transformers says to each token of each row, and how far rounding takes that. Rows of all tries, the first
    one's first."""

    rows: list[list[int]]
    logits: list[Tensor]  # [tokens, vocabulary], float32 on the host
    rounding: float


@torch.inference_mode()
def reference_of(model: Any) -> Reference | ReferenceFailed:
    """Ask a model that is as transformers has made it."""
    text = text_config(model.config)
    try:
        longest = int(getattr(text, "max_position_embeddings", None) or 0)
        lengths = [length if longest < 1 else min(length, longest) for length in _ROW_TOKENS]  # -1 is no limit
        rows = [_tokens(row, length, int(text.vocab_size)) for row, length in enumerate(lengths * _MAX_TRIES)]
        with _as_it_is(model):
            alike = [_logits(model, rows[first :: len(lengths)]) for first in range(len(lengths))]  # of one length
            said = [logits[at] for at in range(_MAX_TRIES) for logits in alike]
            with _rounded_otherwise(model):
                otherwise = [_logits(model, [tokens])[0] for tokens in rows[: len(lengths)]]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return ReferenceFailed(_line(error))
    finally:
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # what is free is counted after this
    return Reference(rows, said, _most(map(_apart, said, otherwise)))


def check(
    reference: Reference | ReferenceFailed,
    name: str,
    executor: ModelExecutor,
    config: SchedulerConfig,
    max_model_len: int,
) -> float:
    """How far the executor's logits are from those of transformers. Unsupported if that is more than rounding can be,
    whichever rows it is asked.
    `config`: that of the scheduler whose plans the executor will run. Nothing of this is left in it."""
    if isinstance(reference, ReferenceFailed):
        raise Unsupported(f"{name} cannot be served: transformers itself cannot run it ({reference.why})")
    if not math.isfinite(reference.rounding):
        raise Unsupported(
            f"{name} cannot be served: what transformers says with these weights is no numbers (NaN or infinite); "
            "another dtype may be wide enough"
        )
    most, told = _TOLERANCE * reference.rounding, []
    for first in range(0, len(reference.rows), len(_ROW_TOKENS)):
        some = slice(first, first + len(_ROW_TOKENS))
        rows = [tokens[:max_model_len] for tokens in reference.rows[some]]
        try:
            said = _said(executor, config, rows)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise Unsupported(f"{name} cannot be served: a self-check of two rows fails ({_line(error)})") from error
        triples = zip(rows, reference.logits[some], said, strict=True)
        apart = _most(_apart(theirs[: len(row)][-len(ours) :], ours) for row, theirs, ours in triples)
        if apart <= most:
            log.info(
                "self-check: off by %.1e from transformers, where rounding takes it by %.1e", apart, most / _TOLERANCE
            )
            return apart
        told.append(f"{apart:.1e}")
    raise Unsupported(
        f"{name} cannot be served: its answers would not be those of transformers (a self-check of two rows is off by "
        f"{', '.join(told)} with other tokens each time, where rounding explains {most:.1e}); skip_self_check=True "
        "(--skip-self-check) serves it all the same"
    )


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- transformers' own way


def _logits(model: Any, rows: list[list[int]]) -> Tensor:
    """Of rows of one length, in one forward: all of them take as long as one."""
    ids = torch.tensor(rows, device=model.device)
    more = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        more["position_ids"] = torch.arange(ids.shape[1], device=model.device).expand(ids.shape)
    return model(input_ids=ids, use_cache=False, **more).logits.float().cpu()  # type: ignore[no-any-return]


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """With the attention of transformers that has everything a model may ask for: others leave out soft-caps."""
    before = model.config._attn_implementation
    settle_experts(model)
    with quiet(False):
        model.set_attn_implementation("eager")
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@contextmanager
def _rounded_otherwise(model: Any) -> Iterator[None]:
    """The innermost modules of a model answer with numbers next to those that they would answer with."""
    generator = torch.Generator(model.device).manual_seed(1)

    def moved(module: Any, given: Any, answer: Any) -> Any:
        if not isinstance(answer, Tensor) or not answer.is_floating_point():
            return answer
        signs = torch.randint(0, 2, answer.shape, generator=generator, device=answer.device, dtype=torch.int8)
        step = max(torch.finfo(answer.dtype).eps, _SUM_ROUNDING)
        return answer * (1 + step * (2 * signs - 1)).to(answer.dtype)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(moved) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---- the executor's way


class _Forced(Greedy):
    """Every row gets the next token of its text, and its logits are kept."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        self.texts = texts
        self.logits: dict[str, list[Tensor]] = {id: [] for id in texts}

    def rows(self, plan: Plan) -> PlanRows:
        return _ForcedRows(plan, self)


class _ForcedRows(PlanRows):
    def __init__(self, plan: Plan, forced: _Forced) -> None:
        super().__init__(plan)
        self._forced = forced

    def plain(self) -> bool:
        return False

    def draw(self, logits: Tensor, newest: Newest) -> Sampled:
        batch, tokens = self.plan.batch, []
        for at, row in enumerate(self.sampling):
            id, end = batch.ids[row], int(batch.starts[row] + batch.lengths[row])
            self._forced.logits[id].append(logits[at].float().cpu())
            tokens.append((*self._forced.texts[id], 0)[end])
        none = torch.zeros(len(tokens), dtype=torch.bool, device=logits.device)
        return Sampled(torch.tensor(tokens, device=logits.device), none, np.zeros(0, np.int64), None)


@torch.inference_mode()
def _said(executor: ModelExecutor, config: SchedulerConfig, rows: list[list[int]]) -> list[Tensor]:
    """The executor's logits for the last tokens of each row."""
    groups = [CacheGroup(g.name, g.family, g.device_pages, 0, g.window, g.page_bytes) for g in config.groups]
    scheduler = Scheduler(
        SchedulerConfig(
            config.page_size, groups, _CHUNK_TOKENS, min(config.max_batch_size, 2), max_columns=config.max_columns
        )
    )
    forced = _Forced({str(at): tokens for at, tokens in enumerate(rows)})
    specs = []
    for id, tokens in forced.texts.items():
        answer = min(_ANSWER_TOKENS, len(tokens))
        specs.append(RequestSpec(id, tokens[: len(tokens) - answer + 1], answer))
    scheduler.submit(specs)
    before, executor.source = executor.source, forced
    try:
        while not (plan := scheduler.next_plan()).empty:
            executor.begin(plan)
            scheduler.advance(executor.finish())
    finally:
        executor.source = before
        executor.forget()
    return [torch.stack(logits) for logits in forced.logits.values()]


# ---- how far


def _tokens(row: int, length: int, vocabulary: int) -> list[int]:
    numbers = np.random.Philox(row + 1).random_raw(length) % np.uint64(vocabulary)
    return [int(number) for number in numbers]


def _most(distances: Iterable[float]) -> float:
    """NaN if there is one."""
    return float(np.max([*distances]))


def _apart(theirs: Tensor, ours: Tensor) -> float:
    """Of logits [tokens, vocabulary]: by the token in the middle. What adds the same to all logits changes nothing, and
    tokens that a model never says (its logits are the least number there is) do not count."""
    said = ~(theirs[0] < -_NEVER_SAID_LOGIT)
    theirs, ours = (each[:, said].double() for each in (theirs, ours))
    theirs, ours = (each - each.mean(-1, keepdim=True) for each in (theirs, ours))
    by_token = (theirs - ours).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-9)
    if not bool(by_token.isfinite().all()):
        return math.nan
    return float(by_token.sort().values[(len(by_token) - 1) // 2])
