"""What the device does in some steps, by part: as torch's profiler sees it. On a GPU these are kernels, also those of
graphs, and their names tell the part. On a CPU they are torch's operations, and those of attention and of sampling
are told by where they are called. torch is imported late."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sapwood.engine.core import Engine

PARTS = ("matmuls", "attention", "sampling", "rest")
# The first that is found in a name. Attention first: kernels of torch's own have "cutlass" or "splitkv" in theirs.
_NAMES = (
    ("attention", re.compile(r"^_(attend|write|merge)$|attention|flash_|fmha|sdpa", re.I)),
    ("sampling", re.compile(r"^_(choose_kernel|end)$|^sampling$|argmax|MaxOps|multinomial", re.I)),
    (
        "matmuls",
        re.compile(
            r"gemm|gemv|gemmk|nvjet|cutlass|cublas|xmma|splitk|^_(shrink|expand)_kernel$|^dot_kernel|"
            r"^(aten|mkldnn|onednn)::(\w*linear(_pointwise)?|matmul|einsum|v?dot|\w*m[mv](_activation)?)$",
            re.I,
        ),
    ),
)
_NO_WORK = re.compile(r"^(Context|Device|Event|Stream|Unknown) (Sync|Wait)")  # somebody waits for the device
_SPACES = re.compile(r"^void |(?:\w+|\(anonymous namespace\)|<unnamed>)::")
_LONGEST = 60


class Ran(NamedTuple):
    """A kernel or an operation, in all its calls."""

    part: str
    calls: float
    seconds: float  # without what it has called, or what ran beside it


def part_of(name: str) -> str:
    """The part that a kernel or an operation belongs to."""
    return next((part for part, names in _NAMES if names.search(name)), "rest")


def shortened(name: str) -> str:
    """For a table: without namespaces, and not too long."""
    short = _SPACES.sub("", name)
    return short if len(short) <= _LONGEST else f"{short[: _LONGEST - 3]}..."


@contextmanager
def traced(engine: Engine) -> Iterator[dict[str, Ran]]:
    """What runs meanwhile, by part and name: filled at the end."""
    import torch
    from torch.profiler import ProfilerActivity, kineto_available, profile, supported_activities

    cuda = engine.device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    if not kineto_available() or activity not in supported_activities():
        raise RuntimeError(f"this build of torch cannot profile a {'GPU' if cuda else 'CPU'}: it has no Kineto for it")
    found: dict[str, Ran] = {}
    with ExitStack() as stack:
        if cuda:
            torch.cuda.synchronize(engine.device)  # what was begun before is not in it
            # graphs do not survive that CUPTI is left and entered again; torch says so where it makes them itself
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
        else:
            stack.enter_context(replaced(engine.served, "forward", _marking_attention))
            stack.enter_context(replaced(engine, "draw", _marking("sampling")))
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

    def by(inner: Any) -> Any:
        def marked(*args: Any, **kwargs: Any) -> Any:
            with record_function(part):
                return inner(*args, **kwargs)

        return marked

    return by


def _marking_attention(forward: Any) -> Any:
    """`ServedModel.forward` is given what attends, with the writing of K and V."""
    mark = _marking("attention")
    return lambda ids, positions, wanted, attend, states: forward(ids, positions, wanted, mark(attend), states)


def kernels(events: Iterable[Any]) -> Iterator[tuple[str, str, float]]:
    """Part, name and seconds of each kernel of a GPU. Where two run at a time, the later one counts from the end of the
    other."""
    busy = 0.0
    ran = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    for event in sorted(ran, key=lambda event: event.time_range.start):
        if not _NO_WORK.search(event.name):
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
