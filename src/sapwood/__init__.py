"""Sapwood: an LLM serving engine grown around one prefix tree.

    from sapwood import LLM, SamplingParams

`LLM` needs the engine's packages (`pip install sapwood[engine]`); cache, scheduler and store do not, and importing this
package imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.llm import LLM, CompletionOutput, LoRARequest, RequestOutput
    from .engine.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "LoRARequest", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    where = "params" if name == "SamplingParams" else "llm"
    try:
        return getattr(import_module(f".engine.{where}", __name__), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"sapwood.{name} needs {error.name}: pip install 'sapwood[engine]'") from error
