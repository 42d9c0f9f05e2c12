"""Checkpoints as users have them: those that take images, for text; those whose rotary frequencies change; and those
that are refused, as somebody sees it who starts a server."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sapwood import LLM, SamplingParams
from sapwood.engine import engine as core

from .zoo import build, prompt, torch, transformers

FLAGS: dict[str, Any] = {"skip_tokenizer_init": True, "progress": False, "device": "cpu", "device_cache": "4MiB"}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TEXT |= {"model_type": "mistral", "num_key_value_heads": 2, "vocab_size": 96, "sliding_window": None}


IMAGES = {"vision_config": {**TOWER, "model_type": "pixtral", "image_size": 28, "patch_size": 14}}
SOUND = {"audio_config": {**TOWER, "model_type": "voxtral_encoder", "max_source_positions": 8}}


def with_more(folder: Path, kind: str, tower: dict[str, Any]) -> Any:
    """A model that no class of language models loads: text is a part of it."""
    config = transformers.AutoConfig.for_model(kind, text_config=TEXT, **tower)
    torch.manual_seed(1)
    model = transformers.AutoModelForMultimodalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("kind", "tower"), [("mistral3", IMAGES), ("voxtral", SOUND)])
def test_text_from_a_model_that_takes_more(kind, tower, tmp_path):
    """Images or sound: it is loaded whole, and says to text what transformers says.

    Mutation: `_loader_for` knows language models alone, or those and models that take images.
    """
    model, tokens = with_more(tmp_path, kind, tower), [7, 3, 80, 41, 5, 66, 2, 19]
    ids = torch.tensor([tokens])
    right = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    with LLM(str(tmp_path), **FLAGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == right[0, len(tokens) :].tolist()
    assert len(set(output.outputs[0].token_ids)) > 2


def test_a_checkpoint_is_loaded_by_the_class_that_saved_it(tmp_path):
    """Llama 3.2 Vision has a class of language models too, in which most of such a checkpoint has no place.

    Mutation: `_loader_for` takes the first class that knows the config.
    """
    text = {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [], "pad_token_id": 0}
    text.pop("sliding_window")
    tower = {**TOWER, "image_size": 28, "patch_size": 14, "num_global_layers": 1, "vision_output_dim": 32}
    tower |= {"intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}
    config = transformers.AutoConfig.for_model("mllama", text_config=text, vision_config=tower)
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokens = [7, 3, 80, 41, 5, 66, 2, 19]
    right = model.generate(torch.tensor([tokens]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    with LLM(str(tmp_path), **FLAGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == right[0, len(tokens) :].tolist()


def test_an_encoder_alone_is_what_it_is(tmp_path):
    """Images in, classes out: it does not generate text, which is said before anything about its layers.

    Mutation: `_config` refuses by the layers first.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet", "layer_type": "bottleneck"}))
    with pytest.raises(ValueError, match="no class for a resnet model that generates text from text"):
        LLM(str(tmp_path), load_format="dummy", **FLAGS)


def test_a_host_too_small_is_no_reason_not_to_start(tmp_path, caplog, monkeypatch):
    """Host memory that nobody asked for: where there is too little, the model is served without, which is said. With a
    store, or by a flag, it was asked for.

    Mutation: `_size` refuses; or drops the store silently.
    """
    build("bamba").save_pretrained(tmp_path)
    monkeypatch.setattr(core, "available_bytes", lambda: 30_000)
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), host_cache="auto", **FLAGS) as llm:
        assert "no host cache" in caplog.text and "host_cache" in caplog.text
        assert all(not tiers["host"]["capacity"] for tiers in llm.stats()["cache"]["pages"].values())
    store = {"store": f"file://{tmp_path}/store?size=64MiB", "host_cache": "auto"}
    for asked in (store, {"host_cache": "1KiB"}):
        with pytest.raises(ValueError, match="of host memory for the cache are too little"):
            LLM(str(tmp_path), **FLAGS, **asked)


def test_a_context_that_would_change_its_company_is_lowered(tmp_path, caplog):
    """longrope beyond the length it was first trained for: the context ends there, and that is said; nobody who asked
    for less hears of it.

    Mutation: `_size` takes the whole context; it says nothing.
    """
    build("phi3", torch.float32).save_pretrained(tmp_path)
    caplog.set_level(logging.WARNING, "sapwood")
    with LLM(str(tmp_path), **FLAGS) as llm:
        assert llm.engine.requests.max_model_len == 128
        (output,) = llm.generate([{"prompt_token_ids": prompt(1, 20)}], use_tqdm=False)
        assert output.outputs[0].token_ids
    assert any("max_model_len lowered from 512 to 128" in line and "longrope" in line for line in caplog.messages)
    caplog.clear()
    with LLM(str(tmp_path), max_model_len=64, **FLAGS) as llm:
        assert llm.engine.requests.max_model_len == 64
    assert not any("lowered" in line for line in caplog.messages)


@pytest.mark.server
def test_f21_a_server_refuses_in_one_line(tmp_path):
    """Status 2, the model's name and the reason, and no traceback.

    Mutation: `Unsupported` is no ValueError; the engine's error is told with its traceback; `REFUSED` is 1.
    """
    config = {"model_type": "bart", "d_model": 32, "decoder_layers": 1, "vocab_size": 96, "is_encoder_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--load-format", "dummy", "--device", "cpu", "--device-cache", "4MiB", "--store", "none", "--port", "0")
    command = [sys.executable, "-m", "sapwood", "serve", str(tmp_path), *flags, "--skip-tokenizer-init"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cannot be served" in line]
    assert "bart" in line and "takes no position_ids" in line
