"""CUDA graphs of steps, one for each padded size and kind, in one pool of memory. A graph replays what was issued while
it was captured, at the same addresses: whatever changes from step to step is read from memory, and checked before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..progress import bar

log = logging.getLogger(__name__)
Key = tuple[int, bool]  # tokens, and whether every row has one
BUCKET_TOKENS = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # tokens; padding is almost free up to 128


class _At:
    """Memory of the device that another tensor owns, as numbers of so many bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same numbers, without keeping their memory: the graphs of one pool all write there."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_At(tensor), device=tensor.device).view(tensor.dtype)


class Graphs:
    """Graphs by size. Without any, `run` computes as asked: the same, kernel by kernel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Key, tuple[Any, Tensor]] = {}
        self.seconds, self.mebibytes = 0.0, 0  # what capturing took
        self.enabled = True  # False: what is captured is not used, for comparison

    @torch.inference_mode()
    def capture(self, steps: Mapping[Key, Callable[[], Tensor]], progress: bool = False) -> None:
        """Capture each, the largest first: the others fit into its memory. Where one cannot be captured, none is."""
        begin, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # memory may still be on its way to be cleared
        pool = torch.cuda.graph_pool_handle()
        try:
            with bar(len(steps), "capturing graphs", progress, delay=1.0) as shown, torch.cuda.stream(stream):
                for size in sorted(steps, reverse=True):
                    steps[size]()  # what is loaded or tuned when it first runs
                    stream.synchronize()
                    self._graphs[size] = self._captured(steps[size], pool)
                    if shown is not None:
                        shown.update()
        except Exception as error:
            self._graphs.clear()
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("steps run without graphs: this model cannot be captured (%s)", why)
            torch.cuda.synchronize(self.device)
            return
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.mebibytes = max(0, free - torch.cuda.mem_get_info(self.device)[0]) >> 20
        self.seconds = time.perf_counter() - begin
        figures = (len(steps), max(steps)[0], self.seconds, self.mebibytes)
        log.info("graphs of steps: %d, of up to %d tokens, %.1f s, %d MiB", *figures)

    @staticmethod
    def _captured(step: Callable[[], Tensor], pool: Any) -> tuple[Any, Tensor]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits = step()
        finally:
            graph.capture_end()
        return graph, _alias(logits)

    @property
    def captured(self) -> bool:
        return bool(self._graphs) and self.enabled

    @property
    def sizes(self) -> list[int]:
        return sorted({tokens for tokens, _ in self._graphs})

    def run(self, size: Key, step: Callable[[], Tensor]) -> Tensor:
        """The logits of a step of this size. They are valid until the next one."""
        if size not in self._graphs or not self.enabled:
            return step()
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def close(self) -> None:
        """Let go of all memory."""
        self._graphs.clear()
