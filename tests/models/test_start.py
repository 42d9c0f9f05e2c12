"""How an engine starts: what it imports, what it says of the time that took, and what somebody who waits is shown."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from sapwood.engine.llm import LLM
from sapwood.engine.progress import Phases, bar

from .model_kit import SMALL

# Packages that something here could import, and that no engine needs to answer token ids.
SPARED = (
    "IPython bitsandbytes datasets diffusers fastapi flax gguf jax kernels librosa matplotlib pandas peft PIL scipy "
    "sentencepiece sklearn soundfile starlette tensorboard tensorflow timm torchaudio torchvision triton trl uvicorn"
)
FLAGS = {"load_format": "dummy", "device": "cpu", "device_cache": "1MiB", "progress": False}
CODE = """
import sys
from sapwood import LLM
with LLM(sys.argv[1], load_format="dummy", device="cpu", device_cache="1MiB", progress=False) as llm:
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
print(*sys.modules)
"""


def config_in(folder: Path) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 0, **SMALL}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_nothing_is_imported_that_is_not_needed(tmp_path):
    """From nothing to an answer: the model's own file of transformers, and no other's; none of the packages that
    transformers knows of and this model has no use for.

    Mutation: a file of the engine imports pandas, or the models of another family.
    """
    command = [sys.executable, "-c", CODE, config_in(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    imported = done.stdout.split()
    assert not {name.partition(".")[0] for name in imported} & set(SPARED.split())
    models = {name.split(".")[2] for name in imported if name.startswith("transformers.models.")}
    assert "llama" in models and models <= {"auto", "llama", "encoder_decoder"}, models
    assert not any(name.startswith("sapwood.server") for name in imported)


def test_an_engine_says_what_its_start_was_made_of(tmp_path, caplog):
    """Mutation: a part that is not timed; `over` is not called."""
    caplog.set_level(logging.INFO, "sapwood")
    with LLM(config_in(tmp_path), **FLAGS) as llm:
        start = llm.engine.start
    assert {"imports", "weights", "patches", "total"} <= set(start)
    assert 0 < start["weights"] < start["total"] and sum(start.values()) < 2 * start["total"] + 0.01
    assert [line for line in caplog.messages if line.startswith("ready after")] == [
        line for line in caplog.messages if f"ready after {start['total']:.1f} s" in line
    ]


def test_parts_of_a_start_add_up():
    """One that comes twice is one. Mutation: `timed` forgets what was there."""
    phases = Phases()
    for _ in range(2):
        with phases.timed("kernels"):
            sum(range(1000))
    once = phases["kernels"]
    with phases.timed("kernels"):
        pass
    phases.over()
    assert phases["kernels"] > once and set(phases) == {"kernels", "total"}


def test_a_bar_is_there_for_who_wants_it_and_for_what_takes_long(capsys):
    """Mutation: `bar` does not pass on its delay, or shows what nobody wants."""
    for wanted, delay, seen in ((True, 0.0, True), (True, 60.0, False), (False, 0.0, False)):
        with bar(2, "compiling kernels", wanted, delay) as shown:
            if shown is not None:
                shown.update()
        assert ("compiling kernels" in capsys.readouterr().err) == seen
