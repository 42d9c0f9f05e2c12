"""What the device does in some steps, by part, as torch's profiler sees it. On a GPU these are kernels, also those of
graphs, and their names tell the part. On a CPU they are torch's operations; what belongs to attention and to sampling
is told by where they are called. torch is imported late."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sapwood.engine.engine import Engine

PARTS = ("matmuls", "attention", "sampling", "rest")
# The first that is found in a name. Attention first: torch's own kernels for it have "cutlass" or "splitkv" in theirs.
_NAMES = {
    "attention": r"^_(attend|write|merge)$|attention|flash_|fmha|sdpa",
    "sampling": r"^_(choose_kernel|end)$|^sampling$|argmax|::MaxOps",
    "matmuls": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|^_(shrink|expand)_kernel$|\bdot_kernel"
    r"|^(aten|mkldnn)::(\w*linear|_linear_pointwise|matmul|einsum|v?dot|\w*m[mv](_activation)?)$",
}
_WAITS = re.compile(r"^(Context|Device|Event|Stream|Unknown) (Sync|Wait)")  # for the device: no work of its own
_SPACES = re.compile(r"^void |(?:\w+|\(anonymous namespace\)|<unnamed>)::")
_WIDTH = 60
# Kineto says nothing of what it does; and it stays, because graphs do not survive that it leaves and comes again.
_KINETO = {"KINETO_LOG_LEVEL": "99", "DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


class Ran(NamedTuple):
    """A kernel or an operation, in all its calls."""

    part: str
    calls: float
    seconds: float  # without what it has called, or what ran beside it


def part_of(name: str) -> str:
    """The part that a kernel or an operation belongs to."""
    return next((part for part, names in _NAMES.items() if re.search(names, name, re.I)), "rest")


def shortened(name: str) -> str:
    """For a table: without namespaces, and not too long."""
    short = _SPACES.sub("", name)
    return short if len(short) <= _WIDTH else f"{short[: _WIDTH - 3]}..."


@contextmanager
def traced(engine: Engine) -> Iterator[dict[str, Ran]]:
    """What runs meanwhile, by part and name: filled at the end."""
    import torch
    from torch.profiler import ProfilerActivity, kineto_available, profile, supported_activities

    cuda = engine.device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    if not kineto_available() or activity not in supported_activities():
        raise RuntimeError(f"torch was built without Kineto for a {activity.name}: there is nothing to profile it with")
    for name, value in _KINETO.items():
        os.environ.setdefault(name, value)
    found: dict[str, Ran] = {}
    with ExitStack() as stack:
        if cuda:
            torch.cuda.synchronize(engine.device)  # what was begun before is not in it
        else:
            stack.enter_context(replaced(engine.served, "forward", _marking_attention))
            stack.enter_context(replaced(engine.sampler, "sample", _marking("sampling")))
        seen = stack.enter_context(profile(activities=[activity]))
        yield found
    for part, name, seconds in kernels(seen.events()) if cuda else operations(seen.events()):
        name = f"{part}: {shortened(name)}"
        before = found.get(name, Ran(part, 0, 0.0))
        found[name] = Ran(part, before.calls + 1, before.seconds + seconds)
    if not found:
        raise RuntimeError(
            "the profiler saw nothing run: another one may have the device, or CUPTI cannot be used here"
        )


def kernels(events: Iterable[Any]) -> Iterator[tuple[str, str, float]]:
    """Part, name and seconds of each kernel of a GPU. What runs beside another counts from the end of that."""
    busy = 0.0
    ran = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    for event in sorted(ran, key=lambda event: event.time_range.start):
        if not _WAITS.search(event.name):
            begin, end = max(busy, event.time_range.start), event.time_range.end
            yield part_of(event.name), event.name, max(0.0, end - begin) / 1e6
            busy = max(busy, end)


def operations(events: Iterable[Any]) -> Iterator[tuple[str, str, float]]:
    """The same of each operation on a CPU. What it calls belongs to the same part, unless that is the rest."""

    def part(event: Any) -> str:
        above = "rest" if event.cpu_parent is None else part(event.cpu_parent)
        return part_of(event.name) if above == "rest" else above

    for event in events:
        if not event.is_user_annotation:  # in a mark itself Python works
            yield part(event), event.name, event.self_cpu_time_total / 1e6


@contextmanager
def replaced(owner: Any, method: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """For a while an object has another method, made from its own."""
    setattr(owner, method, by(getattr(owner, method)))
    try:
        yield
    finally:
        delattr(owner, method)


def _marking(part: str) -> Callable[[Any], Any]:
    from torch.profiler import record_function

    return lambda inner: record_function(part)(inner)


def _marking_attention(forward: Any) -> Any:
    """`ServedModel.forward` is given what attends, and writes K and V before."""
    mark = _marking("attention")
    return lambda ids, positions, wanted, attend, *more: forward(ids, positions, wanted, mark(attend), *more)
