"""Where all kernels of our own are launched; and how many of them are compiled side by side. Needs Triton; import it
late.

Triton compiles a kernel when it is first launched: a second or two for a large one, and half a second of a C compiler
for its launch, while all requests wait. Inside `compiling` a launch runs nothing and only says what is to be
compiled; threads do that, and leaving it waits for them. (They do run at once: Triton's passes let go of the
interpreter's lock, and its assembler and the C compiler are processes.) What was compiled before, in this process or
any other, is found in Triton's cache on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from ..progress import bar

_MOST_THREADS = 16


class _Ahead:
    """What is being compiled, by what was launched."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def compile(self, kernel: Any, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        # At least as fine as what Triton tells kernels apart by: layers that launch the same are asked about once.
        kinds = tuple((each.dtype, each.data_ptr() % 16) if isinstance(each, Tensor) else each for each in args)
        key = id(kernel), kinds, tuple(constants.items())
        if key not in self._seen:
            self._seen.add(key)
            kernel.warmup(*args, grid=grid, **constants)


_ahead: ContextVar[_Ahead | None] = ContextVar("_ahead", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> bool:
    """Run a kernel. False inside `compiling`: nothing ran, and what it would have written is as it was."""
    ahead = _ahead.get()
    if ahead is None:
        kernel[grid](*args, **constants)
        return True
    ahead.compile(kernel, grid, args, constants)
    return False


@contextmanager
def compiling(progress: bool = False) -> Iterator[None]:
    """Launches in here are compiled and not run; on leaving all of them are ready. One that cannot be compiled says so
    when it is launched. Under Triton's interpreter, and with a Triton that cannot do this, they run as ever."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or triton.knobs.runtime.interpret:
        yield
        return
    shown = bar(0, "compiling kernels", progress, delay=1.0)
    with shown as progress_bar, _Threads(progress_bar) as threads, mode(threads, ignore_errors=True):
        before = _ahead.set(_Ahead())
        try:
            yield
        finally:
            _ahead.reset(before)


class _Threads(ThreadPoolExecutor):
    """Compile, and make what launches the kernel too."""

    def __init__(self, shown: Any) -> None:
        begin = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else (None, ())
        super().__init__(min(_MOST_THREADS, os.cpu_count() or 1), "compile", *begin)
        self._shown = shown

    def submit(self, work: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        future = super().submit(_compiled, work)
        if self._shown is not None:
            self._shown.total += 1
            future.add_done_callback(lambda _: self._shown.update())
        return future


def _compiled(work: Callable[[], Any]) -> Any:
    kernel = work()
    with suppress(Exception):  # the launch raises it again
        getattr(kernel, "run", None)  # made when it is first asked for
    return kernel
