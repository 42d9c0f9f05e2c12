"""The self-check at the start: models as they are pass in every dtype, and an engine that misreads one is found."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sapwood.cache import CacheGroup
from sapwood.engine.executor.executor import ModelExecutor
from sapwood.engine.llm import LLM
from sapwood.engine.models import self_check
from sapwood.engine.models.kv_groups import Unsupported
from sapwood.engine.models.model import ServedModel
from sapwood.engine.models.recurrent import Mixers, settle_time_steps
from sapwood.engine.transfer.torch_mover import TorchArena
from sapwood.scheduler import SchedulerConfig

from .test_parity import CONTROLS, Wrong
from .zoo import CONFIGS, LATENT, build, torch, transformers

NO_TEXT: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "device": "cpu", "device_cache": "4MiB"}


class Started:
    """A model as an engine starts it, up to the check."""

    def __init__(self, model: Any, attention: Any = None, page: int = 4) -> None:
        settle_time_steps(model)
        self.reference = self_check.reference_of(model)
        self.served = ServedModel(model, page, attention)
        groups = [CacheGroup(g.name, g.family, 24, 0, g.window, g.layout.page_bytes) for g in self.served.groups]
        arena = TorchArena.allocate(groups, {group.name: group.layout for group in self.served.groups})
        self.config = SchedulerConfig(page, groups, 64, 4, max_columns=16)
        self.executor = ModelExecutor(self.served, arena, 4)

    def check(self, longest: int = 64) -> float:
        """By how much its tolerance is used: at most one, or it is refused."""
        name = self.served.model.config.model_type
        apart = self_check.check(self.reference, name, self.executor, self.config, longest)
        return apart / (self_check._TOLERANCE * self.reference.rounding)


@pytest.mark.parametrize("name", CONFIGS)
def test_f21_nobody_is_refused_by_chance(name):
    """Less than half of what is tolerated is used.

    Mutation: `_rounded_otherwise` moves only some modules' numbers; `_apart` takes the worst token.
    """
    assert Started(build(name, torch.float32)).check() < 0.5


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", [*CONFIGS, *LATENT])
def test_f21_nobody_is_refused_by_chance_in_any_dtype(name, dtype):
    """Mutation: the tolerance is a number, the same for all."""
    assert Started(build(name, getattr(torch, dtype))).check() < 0.5


def places_for_positions(started: Started) -> None:
    """Every row begins where it stands in the batch."""
    inner = started.served.forward

    def forward(ids: Any, positions: Any, *rest: Any) -> Any:
        return inner(ids, torch.arange(len(ids)), *rest)

    started.served.forward = forward  # type: ignore[method-assign]


def calls_mixed_up(started: Started) -> None:
    """What two layers keep lies in one place."""
    kept = started.served.kept
    kept.update(dict.fromkeys(kept, kept[0]))


FAINT = ("no softcap", "no sinks")  # of these models: less than what bfloat16 rounds away
BROKEN = {"places for positions": ("llama", places_for_positions), "two layers in one": ("llama", calls_mixed_up)}


@pytest.mark.parametrize(
    ("control", "dtype"),
    [
        *((control, "float32") for control in [*CONTROLS, *BROKEN]),
        *((control, "bfloat16") for control in [*CONTROLS, *BROKEN] if control not in FAINT),
    ],
)
def test_f21_a_broken_engine_is_refused_by_name(control, dtype):
    """A window that is ignored, a scale that is another, positions that are places: each is found, in half precision
    too unless it is fainter than rounding.

    Mutation: `check` compares what the engine says with itself; what is tolerated in half precision is 1.
    """
    if control in CONTROLS:
        name, change = CONTROLS[control]
        started = Started(build(name, getattr(torch, dtype)), Wrong(change))
    else:
        name, spoil = BROKEN[control]
        started = Started(build(name, getattr(torch, dtype)))
        spoil(started)
    with pytest.raises(Unsupported, match=r"cannot be served: its answers would not be those of transformers") as told:
        started.check()
    assert str(told.value).startswith(started.served.model.config.model_type) and "\n" not in str(told.value)


def test_f21_positions_that_begin_elsewhere_are_found():
    """Where positions are learned, not turned by: rotary embeddings see distances alone, and nobody else here has any.

    Mutation: `ModelExecutor._flat` begins positions at one.
    """
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wpe.weight.normal_(0, 0.5)
    started = Started(model)
    assert started.check() < 0.5
    inner = started.served.forward
    started.served.forward = lambda ids, positions, *rest: inner(ids, positions + 1, *rest)  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=r"gpt2 cannot be served: its answers would not be those of transformers"):
        started.check()


def test_f21_what_is_off_with_some_tokens_alone_is_no_misreading(monkeypatch):
    """A rounding that has sent an early token to another expert, which all later ones see: other rows are right.

    Mutation: `check` refuses after the first rows; it never does.
    """
    inner, asked, off = self_check._said, [], 1

    def said(*given: Any) -> Any:
        asked.append(given[-1])
        return [each + (len(asked) <= off) * torch.randn_like(each) for each in inner(*given)]

    monkeypatch.setattr(self_check, "_said", said)
    started = Started(build("llama", torch.float32))
    assert started.check() < 0.5
    assert len(asked) == 2 and asked[0] != asked[1]
    asked.clear()
    off = 9
    with pytest.raises(Unsupported, match=r"off by [0-9.e+-]+, [0-9.e+-]+, [0-9.e+-]+ with other tokens"):
        started.check()


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3-next"])
def test_f21_states_that_are_not_kept_are_found(name, monkeypatch):
    """Mutation: the rows of the check are computed in one step."""
    inner = Mixers._run

    def forgetful(self: Any, module: Any, layer: int, hidden: Any, rows: Any, call: Any) -> Any:
        before = {part: kept.clone() for part, kept in self._memory[layer].items()}
        out = inner(self, module, layer, hidden, rows, call)
        for part, kept in self._memory[layer].items():
            kept.copy_(before[part])
        return out

    started = Started(build(name, torch.float32))
    monkeypatch.setattr(Mixers, "_run", forgetful)
    with pytest.raises(Unsupported, match=r"would not be those of transformers"):
        started.check()


def test_f21_contexts_shorter_than_its_rows():
    """Mutation: rows are not cut to `max_model_len`."""
    started = Started(build("llama", torch.float32))
    assert all(started.check(longest) < 0.5 for longest in (1, 2, 5, 18))


def test_f21_nothing_is_left_of_it():
    """Its tokens are nobody's last ones, and the executor asks whom it asked before.

    Mutation: `_said` leaves its hooks behind; `ModelExecutor.forget` does nothing.
    """
    started = Started(build("llama", torch.float32))
    source = started.executor.source
    started.check()
    assert started.executor.source is source and not started.executor._last.any() and not started.executor._running
    assert not any(module._forward_hooks for module in started.served.model.modules())


def test_f21_what_cannot_be_compared_is_refused_in_words():
    """Weights that give no numbers, a model that transformers cannot run, and one that fails in the engine alone.

    Mutation: NaN is less than everything; an error of the check is let through as it is.
    """
    model = build("llama", torch.float32)
    model.model.norm.weight.data[3] = math.nan
    with pytest.raises(Unsupported, match=r"llama cannot be served: what transformers says .* no numbers"):
        Started(model).check()
    started = Started(build("llama", torch.float32))

    def fails(*_: Any) -> None:
        raise KeyError("no such layer")

    started.served.forward = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(Unsupported, match=r"llama cannot be served: a self-check of two rows fails \('no such layer'"):
        started.check()
    model = build("llama", torch.float32)
    inner, model.forward = model.forward, fails
    assert isinstance(self_check.reference_of(model), self_check.ReferenceFailed)
    model.forward = inner


def test_f21_tokens_that_are_never_said_do_not_count():
    """Some models keep tokens from being said by the least number there is, beside which all else is nothing.

    Mutation: `_apart` takes them for logits.
    """
    theirs, ours = torch.randn(2, 3, 50)
    theirs[:, 7] = ours[:, 7] = torch.finfo(torch.float32).min
    assert self_check._apart(theirs, ours) > 1
    assert self_check._apart(theirs, theirs + 5) < 1e-6
    assert math.isnan(self_check._apart(theirs, ours.index_fill(1, torch.tensor([9]), math.nan)))


def test_f21_at_the_start_of_an_engine(tmp_path, monkeypatch):
    """Every engine is asked at its start, and one that misreads its model is refused; unless nobody wants to know.

    Mutation: `Engine` does not check; the flag is not read; a refused engine keeps its memory.
    """
    build("llama", torch.float32).save_pretrained(tmp_path)
    with LLM(str(tmp_path), **NO_TEXT) as llm:
        assert llm.engine.start["self-check"] > 0
        assert llm.stats()["submitted"] == 0
    inner = ServedModel.forward
    closed = []
    monkeypatch.setattr(
        ServedModel, "forward", lambda self, ids, positions, *rest: inner(self, ids, 0 * positions, *rest)
    )
    close = ModelExecutor.close
    monkeypatch.setattr(ModelExecutor, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(ValueError, match=r"llama cannot be served: .*skip_self_check=True .--skip-self-check"):
        LLM(str(tmp_path), **NO_TEXT)
    assert len(closed) == 1
    with LLM(str(tmp_path), skip_self_check=True, **NO_TEXT) as llm:
        assert "self-check" not in llm.engine.start
