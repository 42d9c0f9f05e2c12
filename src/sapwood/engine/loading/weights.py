"""From what a user names to a model in memory: a folder, a GGUF file, a hub's id or nothing at all, then its weights.

transformers builds the model and reads safetensors tensor by tensor, straight to where they are wanted; here is what it
leaves open: which files those are, that nothing is missing or left over, and errors that name the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..flags import DTYPES, LOAD_FORMATS, EngineConfig
from .default_model import converted, default_file
from .fingerprint import file_digest
from .model_files import ModelError, ModelFiles, config_in, files_in, tensors_in, weights_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
_WEIGHTS = ("model.safetensors", "model-*.safetensors")
_RANDOM = {"uniform_", "normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"}
_RANDOM |= {"trunc_normal_"}
_LARGE = 1 << 16  # numbers of a tensor: what is computed from random ones is smaller
_PERIOD = 4_194_301  # a prime, so that the rows of a matrix never begin at the same number again


def find_model(model: str | None, *, load_format: str, revision: str | None = None) -> ModelFiles:
    """The files of a model. `load_format="dummy"` needs a config alone: the folder of one, or the file itself."""
    dummy = load_format == "dummy"
    place = place_of(model, load_format)
    if place is None:
        place = _from_hub(str(model), revision, _TEXTS if dummy else _TEXTS + _WEIGHTS)
    folder = place if place.is_dir() else converted(place)
    name = model or "the default model"
    return ModelFiles(name, folder, config_in(folder), ()) if dummy else files_in(folder, name)


def place_of(model: str | None, load_format: str) -> Path | None:
    """The folder or the GGUF file of a model here, of which nothing is read; None: it is on the hub."""
    _one_of("load_format", load_format, LOAD_FORMATS)
    path = Path(model or "").expanduser()
    if model is None:
        return default_file()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.name == "config.json" and path.is_file() and load_format == "dummy":
        return path.parent
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")
    if _HUB_ID.fullmatch(model):
        return None
    raise ModelError(f"{path} is not there")


def check_start(config: EngineConfig) -> Path | None:
    """The model's folder, if it is one here. ValueError if model or tokenizer are not there, or are none. This runs
    before torch is imported and anything large is read, so that a mistyped name is found at once. No hub is asked."""
    place = place_of(config.model, config.load_format)
    if place is None:
        pass
    elif place.is_file():
        _check_gguf(place)
    elif config.load_format == "dummy":
        config_in(place)
    else:
        files_in(place, str(config.model))
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        path = Path(config.tokenizer).expanduser()
        if not path.exists() and (path.is_absolute() or path.suffix):
            raise ModelError(f"the tokenizer in {config.tokenizer} is not there: give a folder or a tokenizer.json")
    return place if place is not None and place.is_dir() else None


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as problem:
        raise ModelError(f"{path}: {problem}") from None
    if begins != b"GGUF":
        raise ModelError(f"{path} is no GGUF file: it begins with {begins!r}")


def import_transformers(files: ModelFiles) -> None:
    """What `load_model` needs of transformers for these files: seconds, where nothing of it was imported before."""
    config = _config(files)
    with _named(files.folder):
        _loader_for(config)._model_mapping.get(type(config), None)  # its file is imported now


def load_model(files: ModelFiles, *, dtype: str, device: str, seed: int = 0, progress: bool = False) -> torch.nn.Module:
    """The model on its device, ready to compute. No second copy of its weights is made in host memory on the way. What
    its config tells that we cannot serve is refused before anything is read.

    `dtype="auto"` is float32 on a CPU and the checkpoint's elsewhere. Where there are no weights, they are random.
    """
    import torch

    from ..models.kv_groups import refuse

    _one_of("dtype", dtype, DTYPES)
    place = torch.device(device)
    config = _config(files)
    refuse(config)
    kind: Any = getattr(torch, dtype) if dtype != "auto" else torch.float32 if place.type == "cpu" else "auto"
    if not files.weights:
        model = _dummy(files, config, kind, place, seed)
    else:
        model = _load(files, config, kind, place, progress)
    return model.eval().requires_grad_(False)


def _from_hub(model: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except Exception as problem:  # offline, unreachable, gated, no such id: the caller gets one error for all
        why = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelError(
            f"{model} is no folder here, and it cannot be had from the hub ({why}). A folder with config.json and "
            "safetensors, or a GGUF file, needs no hub"
        ) from None


def _config(files: ModelFiles) -> Any:
    """The config as transformers understands it. Code that comes with a model is never run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from ..models.kv_groups import refuse_encoder

    path = files.folder / "config.json"
    kind = files.config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        code = " and runs code of its own (auto_map), which is never executed" if "auto_map" in files.config else ""
        raise ModelError(f"{path}: transformers does not know model_type {kind!r:.60}: the model is too new{code}")
    with _named(path):
        config = AutoConfig.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
    if _loader_for(config) is None:
        refuse_encoder(config)
        raise ModelError(f"{path}: transformers has no class for a {kind} model that generates text from text")
    return config


def _loader_for(config: Any) -> Any:
    """What of transformers makes a model of this config: that of language models, or those of models that take images
    or sound too, which are served for text alone; where both do, the one whose class the checkpoint was saved from
    (Llama 3.2 Vision). None: nothing does."""
    import transformers

    loaders: tuple[Any, ...] = (transformers.AutoModelForCausalLM, transformers.AutoModelForMultimodalLM)
    able = [loader for loader in loaders if type(config) in loader._model_mapping]
    saved_from = getattr(config, "architectures", None) or ()
    named = (loader for loader in able if loader._model_mapping[type(config)].__name__ in saved_from)
    return next(named, able[0] if able else None)


def _load(files: ModelFiles, config: Any, dtype: Any, device: torch.device, progress: bool) -> torch.nn.Module:
    loader = _loader_for(config)
    held = {name: path for path in files.weights for name in tensors_in(path)}
    on_device = {} if device.type == "cpu" else {"device_map": {"": device}}
    with _named(files.folder), quiet(progress), _each_in_its_own_memory():
        model, report = loader.from_pretrained(
            files.folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the report has them all; the error would have none
            output_loading_info=True,
            **on_device,
        )
    _complain(files, held, report)
    if device.type == "cpu":
        _own_memory(model)
    found: torch.nn.Module = model
    return found


def _complain(files: ModelFiles, held: dict[str, Path], report: dict[str, Any]) -> None:
    def first(names: list[str]) -> str:
        where = held.get(names[0], files.folder)
        return f"{where}: tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    if wrong := sorted(report["mismatched_keys"]):
        _, got, wanted = wrong[0]
        raise ModelError(f"{first([name for name, *_ in wrong])}: shape {tuple(got)}, by config.json {tuple(wanted)}")
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{first(missing)} missing: the weights are not all there, or config.json is another model's")
    if unknown := sorted(report["unexpected_keys"]):
        raise ModelError(f"{first(unknown)} has no place in the model: config.json is another model's")
    if report["error_msgs"]:
        raise ModelError(f"{files.folder}: {report['error_msgs'][0]}")


def _own_memory(model: torch.nn.Module) -> None:
    """On a CPU, weights that need no cast are still the mapped file, and would change with it: they are copied out of
    it, tensor by tensor. What torch has not allocated itself, it cannot resize."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What transformers makes of values that it did not expect may be any error; this one says in which file they are.
    Too little memory is not the file's fault."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, MemoryError) or "memory" in str(problem):
            raise
        raise ModelError(f"{path}: transformers makes no model of it ({problem})") from problem


@contextmanager
def _each_in_its_own_memory() -> Iterator[None]:
    """transformers takes one piece of a GPU's memory for all weights; what is freed inside it, when some are replaced
    by one (fused.py), could not be given back."""
    from transformers import modeling_utils

    name = "caching_allocator_warmup"
    before = getattr(modeling_utils, name, None)
    if before is None:
        yield
        return
    setattr(modeling_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(modeling_utils, name, before)


@contextmanager
def quiet(progress: bool) -> Iterator[None]:
    """transformers shows its progress bar only where `progress` wants it, and logs no report."""
    from transformers import utils

    logging: Any = utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    switch = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    switch[progress]()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        switch[bars]()
        logging.set_verbosity(level)


def _dummy(files: ModelFiles, config: Any, dtype: Any, device: torch.device, seed: int) -> torch.nn.Module:
    """Weights for measuring: the same on every machine and device for one seed, and close to normal(0, 0.02).

    Each tensor reads one ring of numbers from a place of its own, so that a large model is filled at the speed of
    memory. Where the model begins with ones (norms), the numbers are added to them.
    """
    import torch

    if dtype == "auto":
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    with _named(files.folder / "config.json"), device, torch.random.fork_rng(devices=[]), _not_random():
        model: torch.nn.Module = _loader_for(config).from_config(config, dtype=dtype, trust_remote_code=False)
    ring = torch.from_numpy(_ring(seed)).to(device)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _PERIOD
            flat = tensor.data.view(-1)
            base = 1.0 if bool((flat[:1] == 1).all()) and bool((flat == 1).all()) else 0.0
            for at in range(0, len(flat), _PERIOD):
                piece = flat[at : at + _PERIOD]
                piece.copy_(ring[start : start + len(piece)] + base)
    return model


def _not_random() -> AbstractContextManager[Any]:
    """Large tensors are not filled with random numbers in here, which others will replace: they stay as they came."""
    import torch
    from torch.overrides import TorchFunctionMode

    class NotRandom(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "__name__", "") in _RANDOM:
                tensor = args[0] if args else kwargs.get("tensor")
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= _LARGE:
                    return tensor
            return func(*args, **kwargs)

    return NotRandom()


def _ring(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A ring of `_PERIOD` numbers, twice, so that a piece may begin anywhere. Sums of four whole random numbers: exact
    on every machine, where a normal distribution's logarithms are not."""
    words = np.random.Philox(seed).random_raw(_PERIOD).view(np.uint16).reshape(-1, 4)
    centred = words.sum(axis=1, dtype=np.int64) - 2 * 65535
    once = (centred * (0.02 / (65536 / math.sqrt(3)))).astype(np.float32)
    return np.concatenate([once, once])


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ModelError(f"{what} must be one of {', '.join(known)}, got {value!r:.60}")


# ---- other weights for a model that is loaded: read, checked against it, and then copied over, tensor by tensor
#
# The version of the new weights is taken from their content, so that two servers which update differently share nothing
# in a store, and two which update alike do. Weights for a part of the model leave the rest as it is: then the version
# before counts too.


class Update(NamedTuple):
    """Weights that fit a model. Files must stay as they are until it is applied."""

    files: dict[str, Path]  # tensor -> where it is
    digest: bytes  # of the files' content
    whole: bool  # every tensor of the model is there

    def apply(self, model: nn.Module, version: int) -> int:
        """Copy everything over. Returns the version of the weights the model has then; `version` is that before."""
        import torch
        from safetensors import safe_open

        places = tensors_of(model)
        with torch.inference_mode():
            for path in dict.fromkeys(self.files.values()):
                with safe_open(path, framework="pt") as file:
                    for name in [name for name, where in self.files.items() if where == path]:
                        places[name].copy_(file.get_tensor(name))
        before = b"" if self.whole else version.to_bytes(8, "little")
        return int.from_bytes(hashlib.sha256(b"sapwood.update.1" + before + self.digest).digest()[:8], "little") >> 1


def read_update(model: nn.Module, path: str | Path) -> Update:
    """The weights in a folder or a safetensors file, checked: names and shapes are those of the model. Changes nothing,
    so that any thread may do it."""
    path = Path(path).expanduser()
    if path.is_dir():
        weights = weights_in(path)
    elif path.is_file():
        weights = [path]
    else:
        raise ModelError(f"{path} is not there: new weights are a folder or a safetensors file")
    files = {name: file for file in weights for name in tensors_in(file)}
    if not files:
        raise ModelError(f"{path} holds no tensors")
    places = tensors_of(model)
    for name, file in files.items():
        if name not in places:
            raise ModelError(
                f"{file}: tensor {name} has no place in the model: the weights are another model's, or named otherwise "
                "than in it"
            )
    _check_shapes(files, places)
    covered = {places[name].data_ptr() for name in files}
    whole = all(tensor.data_ptr() in covered for tensor in places.values())
    digest = hashlib.sha256(b"".join(file_digest(file) for file in weights)).digest()
    return Update(files, digest, whole)


def _check_shapes(files: dict[str, Path], places: dict[str, Tensor]) -> None:
    from safetensors import safe_open

    for path in dict.fromkeys(files.values()):
        with safe_open(path, framework="numpy") as file:
            for name in [name for name, where in files.items() if where == path]:
                got, wanted = tuple(file.get_slice(name).get_shape()), tuple(places[name].shape)
                if got != wanted:
                    raise ModelError(f"{path}: tensor {name} has shape {got}, and the model's has {wanted}")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of this model holds, by name; tied tensors by each of their names."""
    from torch import Tensor

    state: dict[str, Any] = model.state_dict()
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
