"""Models are found, loaded and refused: what a user may name, and every way in which its files can be wrong."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from sapwood.engine.loading import weights
from sapwood.engine.loading.model_files import ModelError
from sapwood.engine.loading.weights import find_model, load_model
from sapwood.engine.models.kv_groups import Unsupported

from .model_kit import logits, saved, tiny


@pytest.fixture
def folder(tmp_path):
    return saved(tiny(), tmp_path / "model")


def load(model, load_format="auto", dtype="auto", **options):
    return load_model(find_model(str(model), load_format=load_format), dtype=dtype, device="cpu", **options)


def edit(path, **changes):
    told = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (told | changes).items() if value is not None}))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_folder_is_loaded_whole_or_in_shards(tmp_path, kind, shards):
    """A model that was saved says the same when loaded, with tied embeddings (Gemma) and with experts that the model
    keeps fused and the file one by one; rotary frequencies, which are in no file, are there.

    Mutation: `weights_in` returns the first shard alone.
    """
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    options = {"llama": {}, "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 16}, "qwen3_moe": experts}
    model = tiny(kind, **options[kind])
    saved(model, tmp_path, max_shard_size="20KB" if shards else "1GB")
    files = find_model(str(tmp_path), load_format="auto")
    assert (len(files.weights) > 1) == shards
    again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert not again.training and not any(tensor.requires_grad for tensor in again.parameters())
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == (kind == "gemma3_text")


def test_l20_a_loaded_model_does_not_change_with_its_file(folder):
    """Somebody trains on and writes new weights over the file while the model serves: it keeps those it has loaded.

    Mutation: `_own_memory` is not called.
    """
    model = load(folder)
    before = logits(model)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 4)
        file.write(b"\0" * (size - size // 4))
    assert torch.equal(logits(model), before)


def test_dtype(folder):
    """On a CPU, auto is float32, whatever the checkpoint is; a dtype that is named is used.

    Mutation: "auto" is the checkpoint's dtype everywhere.
    """
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    edit(folder / "config.json", dtype="bfloat16")
    assert {tensor.dtype for tensor in load(folder).parameters()} == {torch.float32}
    for dtype in ("bfloat16", "float64"):
        assert {tensor.dtype for tensor in load(folder, dtype=dtype).parameters()} == {getattr(torch, dtype)}
    with pytest.raises(ModelError, match="dtype must be one of auto, float32"):
        load(folder, dtype="int8")


def test_the_progress_bar_is_a_choice(folder, capfd):
    """Mutation: `_quiet` always enables the bar."""
    load(folder)
    assert capfd.readouterr() == ("", "")
    load(folder, progress=True)
    assert "100%" in capfd.readouterr().err


# ---- random weights


def test_dummy_weights_need_a_config_alone(folder, tmp_path):
    """Without weights and without a tokenizer, from the folder or its config.json: the same numbers for one seed, in
    every process and dtype; others for another seed; spread as real weights are, and norms around one.

    Mutation: `_dummy` leaves the weights as the model began; `_ring` does not use its seed.
    """
    (folder / "model.safetensors").unlink()
    first, again = load(folder, "dummy"), load(folder / "config.json", "dummy")
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(load(folder, "dummy", seed=1)))
    assert load(folder, "dummy", dtype="float64").dtype == torch.float64
    weight = first.get_input_embeddings().weight
    assert abs(float(weight.mean())) < 2e-3 and abs(float(weight.std()) - 0.02) < 2e-3
    assert [round(float(value), 7) for value in weight[0, :3]] == [0.0150793, 0.0179331, 0.0039532]
    assert abs(float(first.model.norm.weight.mean()) - 1) < 0.02
    up, down = first.model.layers[0].mlp.up_proj.weight, first.model.layers[0].mlp.down_proj.weight
    assert not torch.equal(up.flatten(), down.flatten())
    assert not find_model(str(folder), load_format="dummy").has_tokenizer
    with pytest.raises(ModelError, match="load_format must be one of auto, dummy"):
        load(folder, "pickle")


def test_dummy_weights_are_not_filled_with_random_numbers_first(tmp_path, monkeypatch):
    """Which takes most of the time of a large model, and changes nothing: norms still begin with ones, however wide.

    Mutation: `_not_random` lets large tensors be filled; or leaves ones alone too.
    """
    wide = {"vocab_size": 1 << 14, "hidden_size": 64, "num_hidden_layers": 1}
    folder = saved(tiny(**wide), tmp_path)
    monkeypatch.setattr(weights, "_LARGE", 64)
    spared = load(folder, "dummy").state_dict()
    monkeypatch.setattr(weights, "_not_random", nullcontext)
    filled = load(folder, "dummy").state_dict()
    assert all(torch.equal(spared[name], filled[name]) for name in filled) and len(spared) == len(filled)
    monkeypatch.undo()
    ran = []
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self, *_, **__: ran.append(self.numel()) or self)
    load(folder, "dummy")
    assert max(ran, default=0) < weights._LARGE <= wide["vocab_size"] * wide["hidden_size"]


def test_dummy_weights_keep_the_config_s_tie(tmp_path):
    """Mutation: `_dummy` fills tied tensors apart."""
    model = load(saved(tiny(tie_word_embeddings=True), tmp_path), "dummy")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_digest_is_of_the_weights_or_of_their_seed(folder, tmp_path, monkeypatch):
    """Mutation: `ModelFiles.digest` takes the seed's way for files too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real, dummy = (find_model(str(folder), load_format=how) for how in ("auto", "dummy"))
    assert real.digest("float32", 0) == real.digest("float32", 1)
    assert dummy.digest("float32", 0) != dummy.digest("float32", 1)
    old = real.digest("float32", 0)
    tensors = load_file(real.weights[0])
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, real.weights[0], {"format": "pt"})
    assert real.digest("float32", 0) != old


# ---- everything that can be wrong


def refused(model, *says, load_format="auto"):
    with pytest.raises(ModelError) as told:
        load(model, load_format)
    for what in says:
        assert what in str(told.value)


def test_a_name_that_leads_nowhere(tmp_path, monkeypatch):
    """No folder, no hub: what is wrong, and what would be right.

    Mutation: `_from_hub` lets the hub's own errors through.
    """
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "nobody/nothing is no folder here", "A folder with config.json and safetensors")
    refused(tmp_path / "nothing" / "here", "nothing/here is not there")
    (tmp_path / "file.txt").write_text("hm")
    refused(tmp_path / "file.txt", "neither a model folder nor a .gguf file")
    refused(tmp_path, "has no config.json")


def test_only_what_is_needed_comes_from_the_hub(folder, monkeypatch):
    """Weights in other formats stay where they are, and for random weights the weights do as well.

    Mutation: `_from_hub` asks for everything.
    """
    asked = []

    def download(model, revision, allow_patterns):
        asked.append((model, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("some/model", load_format="auto", revision="v1").weights
    assert not find_model("some/model", load_format="dummy").weights
    (model, revision, whole), (_, _, config) = asked
    assert (model, revision) == ("some/model", "v1")
    assert [pattern for pattern in whole if pattern not in config] == ["model.safetensors", "model-*.safetensors"]
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in config)


def test_pickle_is_refused(folder):
    """Weights as pickle run code when they are loaded. Beside safetensors they do no harm.

    Mutation: `_PICKLES` is empty.
    """
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    load(folder)
    (folder / "model.safetensors").unlink()
    refused(folder, "pytorch_model.bin", "pickle", "runs code")


def test_code_that_comes_with_a_model_is_never_run(folder, tmp_path):
    """A model that only its own code knows is refused. One that transformers knows is loaded by transformers' code.

    Mutation: `trust_remote_code` is true.
    """
    ran = tmp_path / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')")
    code = {"auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    edit(folder / "config.json", **code)
    load(folder)
    edit(folder / "config.json", model_type="theirs")
    refused(folder, "config.json", "model_type 'theirs'", "auto_map", "never executed")
    assert not ran.exists()


def test_quantised_checkpoints_are_refused(folder):
    """Mutation: `config_in` does not look into text_config."""
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, "config.json", "quantised", "gptq")
    edit(folder / "config.json", quantization_config=None, text_config={"quantization_config": {"quant_method": "fp8"}})
    refused(folder, "quantised", "fp8")


def test_folders_that_are_something_else(folder):
    """An adapter, a model that does not write, weights that transformers would take from elsewhere.

    Mutation: `config_in` does not look for adapter_config.json; `_config` says of T5 that it does not write.
    """
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "holds an adapter")
    (folder / "adapter_config.json").unlink()
    edit(folder / "config.json", transformers_weights="other.safetensors")
    refused(folder, "transformers_weights")
    edit(folder / "config.json", transformers_weights=None, model_type="clip")
    refused(folder, "no class for a clip model that generates text")
    edit(folder / "config.json", model_type="t5")
    with pytest.raises(Unsupported, match="t5 cannot be served yet: it has an encoder"):
        load(folder)
    edit(folder / "config.json", model_type="llama")
    shutil.copy(folder / "model.safetensors", folder / "shard-00000-model-00001-of-00001.safetensors")
    refused(folder, "shard-00000-model-00001-of-00001.safetensors", "divided by rank")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\x01", '{"model_type": 5}', '{"model_type": []}'])
def test_a_config_of_garbage(folder, text):
    """Mutation: `read_json` lets an error of JSON through."""
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")
    refused(folder, "config.json", load_format="dummy")


@pytest.mark.parametrize("change", [{"num_attention_heads": "many"}, {"hidden_act": "none such"}, {"vocab_size": -5}])
def test_a_config_with_impossible_values(folder, change):
    """Mutation: `_config` and `_load` let the errors of transformers through."""
    edit(folder / "config.json", **change)
    refused(folder, str(folder))
    refused(folder, str(folder), load_format="dummy")


@pytest.mark.parametrize("left", [0, 4, 100, 5000, -1])
def test_a_truncated_file(folder, left):
    """A download that stopped: the file is named.

    Mutation: `tensors_in` is not called before transformers loads.
    """
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refused(folder, str(path), "only a part of one")


def test_a_shard_that_is_broken_or_not_there(tmp_path):
    """Of many files the one that is wrong is named; an index cannot lead out of the folder.

    Mutation: `weights_in` does not look whether shards are there, or where they are.
    """
    saved(tiny(), tmp_path, max_shard_size="20KB")
    shard = find_model(str(tmp_path), load_format="auto").weights[1]
    content = shard.read_bytes()
    shard.write_bytes(b"not this")
    refused(tmp_path, str(shard), "not a safetensors file")
    shard.unlink()
    refused(tmp_path, "model.safetensors.index.json names", shard.name)
    shard.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    edit(index, weight_map={"model.norm.weight": "../model.safetensors"})
    refused(tmp_path, str(index), "../model.safetensors")
    edit(index, weight_map=None)
    refused(tmp_path, str(index), "weight_map")
    index.write_text("{")
    refused(tmp_path, str(index), "JSON")
    index.write_text(whole)
    load(tmp_path)


def test_tensors_that_do_not_fit(folder):
    """A tensor of another shape, one that is missing, one too many: each is named, with its file.

    Mutation: `_complain` does not look at what is missing, or what is left over.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 32)}, path)
    refused(folder, f"{path}: tensor {name}: shape (3, 32), by config.json (48, 32)")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    refused(folder, str(folder), f"tensor {name} missing")
    save_file(tensors | {"model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)}, path)
    refused(folder, f"{path}: tensor model.layers.7.mlp.up_proj.weight has no place")


def test_eos_is_every_id_that_there_is(folder):
    """Of generation_config.json, else of config.json.

    Mutation: `eos_token_ids` gives the first id alone.
    """
    edit(folder / "config.json", eos_token_id=4)
    (folder / "generation_config.json").unlink()
    assert find_model(str(folder), load_format="auto").eos_token_ids == (4,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert find_model(str(folder), load_format="auto").eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ModelError, match="eos_token_id must be token ids"):
        _ = find_model(str(folder), load_format="auto").eos_token_ids
