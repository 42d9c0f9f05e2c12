"""Other weights for a model that is loaded: read, checked against it, and then copied over, tensor by tensor.

The version of the new weights is taken from their content, so that two servers which update differently share nothing
in a store, and two which update alike do. Weights for a part of the model leave the rest as it is: then the version
before counts too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fingerprint import file_digest
from .model_files import ModelError, tensors_in, weights_in


class Update(NamedTuple):
    """Weights that fit a model. Files must stay as they are until it is applied."""

    files: dict[str, Path]  # tensor -> where it is
    digest: bytes  # of the files' content
    whole: bool  # every tensor of the model is there

    def apply(self, model: nn.Module, version: int) -> int:
        """Copy everything over. Returns the version of the weights the model has then; `version` is that before."""
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
    state: dict[str, Any] = model.state_dict()
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
