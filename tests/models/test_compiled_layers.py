"""Layers that torch compiles: the model stays the model, and what is compiled is shared. torch's own code generator is
tried in `make test-all` only, as it takes a minute; elsewhere what it would be given is run as it is, which has the
same versions, seams and guards."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest

from sapwood.engine.flags import EngineConfig
from sapwood.engine.llm import LLM, LoRARequest
from sapwood.engine.models import compiled
from sapwood.engine.params import SamplingParams

from .test_adapters import adapter
from .zoo import CONFIGS, LATENT, build, config_of, prompt, torch, transformers

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")]
FLAGS: dict[str, Any] = {"dtype": "float32", "device_cache": "8MiB", "max_num_seqs": 4, "page_size": 8}
FLAGS |= {"max_model_len": 400, "progress": False, "device": "cpu"}
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
PROMPTS = [{"prompt_token_ids": prompt(length, length)} for length in (1, 7, 64, 300)]
MIXED = ["sliding_attention", "full_attention"]
LAYERS: dict[str, dict[str, Any]] = {"gemma3": {"layer_types": MIXED * 2}, "gpt-oss": {"layer_types": MIXED * 2}}


class Counting:
    """A backend that compiles nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.pieces = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.pieces += 1
        return graph.forward


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    counting = Counting()
    monkeypatch.setattr(compiled, "BACKEND", counting)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # else pytest listens to all it does
    yield counting
    torch._dynamo.reset()


def saved(folder: Any, name: str, **changes: Any) -> str:
    changes = {"num_hidden_layers": 4, **LAYERS.get(name, {}), **changes}
    build(name, torch.float32, **changes).save_pretrained(folder)
    return str(folder)


def said(llm: LLM, prompts: Any = PROMPTS, **more: Any) -> list[tuple[list[int], float]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, **more)
    assert not any(output.error for output in outputs), [output.error for output in outputs]
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


def same(found: list[Any], expected: list[Any]) -> bool:
    return [tokens for tokens, _ in found] == [tokens for tokens, _ in expected] and all(
        abs(a - b) < 1e-3 for (_, a), (_, b) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt-oss", "qwen3-next", pytest.param("deepseek-v3", marks=pytest.mark.long)]
)
def test_one_version_serves_all_layers_and_sizes(name, tmp_path, backend):
    """Answers are those of the model as it is. All of it is compiled at the start: steps of any size, alone or
    together, add nothing. Nor do more layers of the same kinds.

    Mutation: `_TOKENS` is 64, the width of the model; attention is not put outside; `Layer` compiles for one
    token.
    """
    folder = saved(tmp_path, name)
    with LLM(folder, **FLAGS) as llm:
        plain = said(llm)
    assert not backend.pieces
    with LLM(folder, compile=True, **FLAGS) as llm:
        made = backend.pieces
        together, alone = said(llm), [said(llm, [each])[0] for each in PROMPTS]
        assert 2 <= made == backend.pieces
    assert same(together, plain) and same(alone, plain)
    deeper = {key: value * 2 for key, value in LAYERS.get(name, {}).items()}
    with LLM(saved(tmp_path / "deeper", name, num_hidden_layers=8, **deeper), compile=True, **FLAGS):
        assert backend.pieces == made


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3-next"])
def test_the_code_that_torch_makes(name, tmp_path, monkeypatch):
    """The same with torch's own code generator. Mutation: a layer leaves out its residual."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    folder = saved(tmp_path, name)
    with LLM(folder, **FLAGS) as llm:
        plain = said(llm)
    with LLM(folder, compile=True, **FLAGS) as llm:
        assert same(said(llm), plain)


def test_adapters_and_new_weights(tmp_path, backend):
    """Adapters are applied to the rows that ask for them, and new weights count at once; none of it is compiled anew.

    Mutation: `_put_outside` leaves linear layers with adapters where they are; `Kind` keeps a copy of the weights.
    """
    folder = saved(tmp_path / "model", "llama")
    model = build("llama", torch.float32, num_hidden_layers=4)
    some = adapter(tmp_path / "adapter", model, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(tmp_path / "new")
    asked = [LoRARequest("a", 1, str(some)), None, LoRARequest("a", 1, str(some)), None]
    found: dict[bool, Any] = {}
    for compile in (False, True):
        with LLM(folder, compile=compile, enable_lora=True, **FLAGS) as llm:
            made = backend.pieces
            found[compile] = [said(llm), said(llm, lora_request=asked)]
            llm.update_weights(str(tmp_path / "new"))
            found[compile] += [said(llm), said(llm, lora_request=asked)]
            assert backend.pieces == made
    assert made
    for now, before in zip(found[True], found[False], strict=True):
        assert same(now, before)
    plain, adapted, new, both = found[True]
    assert not same(plain, adapted) and not same(plain, new) and not same(new, both)


def test_layers_that_cannot_be_compiled_run_as_they_are(tmp_path, monkeypatch, caplog):
    """Without a GPU that is an error; on a server with one the class is named, and it starts all the same.

    Mutation: `_first_forward` does not try again; `Kind` does not note why it failed.
    """

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler of any kind")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    folder = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"compile must be False: .*no compiler of any kind"):
        LLM(folder, compile=True, **FLAGS)
    monkeypatch.setattr(compiled, "_refuse", lambda *_: None)
    with LLM(folder, **FLAGS) as llm:
        plain = said(llm)
    with caplog.at_level(logging.WARNING), LLM(folder, compile=True, **FLAGS) as llm:
        assert same(said(llm), plain)
    assert "LlamaDecoderLayer run as they are" in caplog.text


def test_a_failure_while_serving_costs_one_step(tmp_path, caplog):
    """A compiler that fails later makes a step fail, which is tried again without it.

    Mutation: `Kind` notes nothing once it has run.
    """
    folder = saved(tmp_path, "llama")
    with LLM(folder, **FLAGS) as llm:
        plain = said(llm)
    with LLM(folder, compile=True, **FLAGS) as llm:
        (kind,) = {layer.forward.kind for layer in llm.engine.served.model.model.layers}
        assert same(said(llm, PROMPTS[:2]), plain[:2]) and not kind.failed

        def fails(*_: Any, **__: Any) -> Any:
            raise compiled.TorchDynamoException("on purpose")

        kind.compiled = fails
        assert same(said(llm), plain)
        assert kind.failed == "on purpose" and "LlamaDecoderLayer" in caplog.text


@pytest.mark.parametrize("name", [*CONFIGS, *LATENT])
def test_layers_are_found(name):
    """Mutation: `layers_of` looks into layers, too; or wants modules of one class."""
    if getattr(transformers, {**CONFIGS, **LATENT}[name][0], None) is None:
        pytest.skip("this version of transformers has none")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    found = compiled.layers_for_text(model)
    inner = getattr(model, "model", None) or getattr(model, "backbone", None) or model.transformer
    inner = getattr(inner, "language_model", inner)
    assert found == list(inner.layers if hasattr(inner, "layers") else inner.h)


def test_layers_are_found_where_the_decoder_is_something_else():
    """Mutation: `layers_for_text` asks the decoder alone."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("modernbert-decoder", vocab_size=96, pad_token_id=0, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert not list(compiled.layers_of(model.get_decoder())), "its output layer"
    assert compiled.layers_for_text(model) == list(model.model.layers)


def test_the_flag_is_yes_or_no():
    with pytest.raises(ValueError, match="compile must be True or False"):
        EngineConfig(compile="yes")  # type: ignore[arg-type]
