"""The process that reads one adapter: a stranger's folder is opened, understood and brought to memory here, where
no other reader waits for it. process.py starts it, asks one thing and ends it. The standard library alone.

    Ask, a file of memory  -->  config, header --> fits the model? --> tensors to the file, each by itself
    Read, or what is wrong <--
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import signal
import socket
import stat
from typing import Any, NamedTuple

from . import files as lora_files
from .files import CONFIG, MOST_CONFIG, MOST_HEADER, TENSORS, AdapterError, Fitted, Half, ModelShape

ENDS_AT = 3  # the file that is the socket, as store/spawn.py has it
SIZE = 8  # bytes of the size that an Ask begins with
MOST_ASKED = 1 << 28
_ALIGNED = 64
_CHUNK = 1 << 24
_SHOWN = 4096  # names that are looked at in a folder without tensors
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NoFolder(AdapterError):
    """There is no such folder, or not below the root."""


class ReadRequest(NamedTuple):
    """What to read; the model is given beside it. `root`: nothing outside it may be opened, however it is linked;
    None: anything. `room`: bytes that there are on host for its tensors in the model's type, of `itemsize` bytes; None:
    any. `seconds`: then it ends by itself, if its parent has not ended it."""

    path: str
    root: str | None
    itemsize: int
    room: int | None
    seconds: int


class Placed(NamedTuple):
    """A tensor: its type as torch calls it, its shape, and where it begins in the file of memory."""

    dtype: str
    shape: tuple[int, int]
    at: int


class Read(NamedTuple):
    """An adapter in memory. `digest` is of its content: equal for what computes the same."""

    digest: bytes
    modules: dict[str, tuple[float, Placed, Placed]]  # scale of B, A, B


class Folder:
    """A folder whose files can be opened: regular ones below the root, also by links. `root` None: anywhere."""

    def __init__(self, root: str | None, path: str) -> None:
        try:
            self._root = None if root is None else os.path.realpath(root)
            self._folder = os.open(path if root is None else os.path.join(root, path), os.O_PATH | os.O_DIRECTORY)
        except (OSError, ValueError):  # also a name that is too long, or with a 0 in it; links in a ring
            raise NoFolder("no such folder" + ("" if root is None else " below the server's --lora-root")) from None
        if not self._inside(self._folder):
            os.close(self._folder)
            raise NoFolder("no such folder below the server's --lora-root")

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def open(self, name: str) -> int:
        """A regular file, to be read. What a name stands for is looked at before anything is opened in earnest: that
        alone can wait for ever, or do something to a device."""
        try:
            found = os.open(name, os.O_PATH, dir_fd=self._folder)
        except FileNotFoundError:
            if name == TENSORS and (pickle := self._pickle()):
                raise AdapterError(f"{pickle} is refused, since reading a pickle can run code: save {name}") from None
            raise AdapterError(f"{name} is missing") from None
        except OSError as error:
            raise AdapterError(f"{name} cannot be read: {error.strerror}") from None
        try:
            mode = os.fstat(found).st_mode
            if not stat.S_ISREG(mode):
                kind = next((kind for is_one, kind in _KINDS if is_one(mode)), "something else")
                raise AdapterError(f"{name} cannot be read: it must be a regular file, and is {kind}")
            if not self._inside(found):
                raise AdapterError(f"{name} cannot be read: it is a link that leads out of the server's --lora-root")
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY)
        except OSError as error:
            raise AdapterError(f"{name} cannot be read: {error.strerror}") from None
        finally:
            os.close(found)

    def read(self, name: str, most: int) -> bytes:
        """All of a small file."""
        with contextlib.closing(_File(name, self.open(name))) as file:
            if file.size > most:
                raise AdapterError(f"{name} has {file.size} bytes, and {most} are read at most")
            return file.take(0, file.size)

    def _inside(self, file: int) -> bool:
        """By the open folder, which a changed link moves no more."""
        if self._root is None:
            return True
        path = os.readlink(f"/proc/self/fd/{file}")
        return path == self._root or path.startswith(self._root.rstrip("/") + "/")

    def _pickle(self) -> str:
        with contextlib.suppress(OSError), os.scandir(f"/proc/self/fd/{self._folder}") as entries:
            names = [entry.name for _, entry in zip(range(_SHOWN), entries, strict=False)]
            others = [name for name in names if name.startswith("adapter_model.") and TENSORS not in name]
            return min(others, default="")
        return ""


class _File:
    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.size = os.fstat(fd).st_size

    def close(self) -> None:
        os.close(self.fd)

    def take(self, at: int, size: int) -> bytes:
        taken = bytearray(size)
        self.take_into(at, memoryview(taken))
        return bytes(taken)

    def take_into(self, at: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self.fd, [into[done : done + _CHUNK]], at + done)
            except OSError as error:
                raise AdapterError(f"{self.name} cannot be read: {error.strerror}") from None
            if not got:
                raise AdapterError(f"{self.name} is broken: it got shorter while it was read")
            done += got


def read(ask: ReadRequest, shape: ModelShape, memory: int) -> Read:
    """Read an adapter once: what is checked, digested and served are the same bytes, also if the files change."""
    with Folder(ask.root, ask.path) as folder:
        config = lora_files.config_of(folder.read(CONFIG, MOST_CONFIG))
        with contextlib.closing(_File(TENSORS, folder.open(TENSORS))) as file:
            begin, header = _header(file)
            pairs = lora_files.pairs_of(header, file.size - begin)
            modules = lora_files.fitted(config, pairs, shape)
            _has_room(modules, ask)
            return _brought(file, begin, modules, memory)


def _header(file: _File) -> tuple[int, bytes]:
    """Where the bytes of the tensors begin, and what tells of them."""
    if file.size < SIZE:
        raise AdapterError(f"{TENSORS} is broken: it has {file.size} bytes")
    size = int.from_bytes(file.take(0, SIZE), "little")
    if size > MOST_HEADER:
        raise AdapterError(f"{TENSORS} has a header of {size} bytes, and {MOST_HEADER} are read at most")
    if SIZE + size > file.size:
        raise AdapterError(f"{TENSORS} is broken: it ends within its header")
    return SIZE + size, file.take(SIZE, size)


def _has_room(modules: dict[str, Fitted], ask: ReadRequest) -> None:
    need = ask.itemsize * sum(a.shape[0] * (a.shape[1] + b.shape[0]) for _, (a, b) in modules.values())
    if ask.room is not None and need > ask.room:
        raise AdapterError(f"it needs {need} bytes of host memory, and lora_memory has {ask.room} left: unload some")


def _brought(file: _File, begin: int, modules: dict[str, Fitted], memory: int) -> Read:
    """All tensors in the file of memory."""
    places: dict[Half, int] = {}
    size = 0
    for _, pair in modules.values():
        for half in pair:
            places[half] = size
            size += -(-(half.end - half.begin) // _ALIGNED) * _ALIGNED
    os.ftruncate(memory, size)
    digest = hashlib.sha256(b"sapwood lora 1")
    with mmap.mmap(memory, size) as mapped, memoryview(mapped) as room:
        for head, pair in lora_files.digest_heads(modules):
            digest.update(head)
            for half in pair:
                with room[places[half] : places[half] + half.end - half.begin] as into:
                    file.take_into(begin + half.begin, into)
                    digest.update(into)

    def placed(half: Half) -> Placed:
        return Placed(half.dtype, half.shape, places[half])

    found = {module: (scale, placed(pair.a), placed(pair.b)) for module, (scale, pair) in modules.items()}
    return Read(digest.digest(), found)


# ---- between the two processes: JSON, once each way


def as_json(shape: ModelShape) -> bytes:
    """A model, as every Ask for it tells it."""
    return json.dumps(shape).encode()


def asked(ask: ReadRequest, shape: bytes) -> bytes:
    body = json.dumps(ask).encode() + b"\n" + shape
    return len(body).to_bytes(SIZE, "little") + body


def _ask_of(body: bytes) -> tuple[ReadRequest, ModelShape]:
    ask, _, shape = body.partition(b"\n")
    linears, others, max_rank = json.loads(shape)
    return ReadRequest(*json.loads(ask)), ModelShape(
        {name: (out, wide) for name, (out, wide) in linears.items()}, others, max_rank
    )


def answer_of(body: bytes) -> Read:
    """What the process has answered; its AdapterError is raised."""
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError:
        raise AdapterError("it cannot be read: the process that reads it has ended") from None
    if "wrong" in found:  # with what a stranger may have written: halves of characters cannot travel on
        words = found["wrong"].encode(errors="replace").decode()
        raise (NoFolder if found["none"] else AdapterError)(words)
    modules = {
        module: (float.fromhex(scale), Placed(*a), Placed(*b)) for module, (scale, a, b) in found["modules"].items()
    }
    return Read(bytes.fromhex(found["digest"]), modules)


def _answer(ask: ReadRequest, shape: ModelShape, memory: int) -> dict[str, Any]:
    try:
        found = read(ask, shape, memory)
    except AdapterError as error:
        return {"wrong": str(error), "none": isinstance(error, NoFolder)}
    except (OSError, MemoryError, RecursionError) as error:
        return {"wrong": f"it cannot be read: {error!r:.200}", "none": False}
    modules = {module: (scale.hex(), a, b) for module, (scale, a, b) in found.modules.items()}
    return {"digest": found.digest.hex(), "modules": modules}


def main() -> None:
    os.closerange(ENDS_AT + 1, 1 << 20)  # what others in that process left open
    end = socket.socket(fileno=ENDS_AT)
    body, files, *_ = socket.recv_fds(end, 1 << 16, 1)
    size = SIZE + int.from_bytes(body[:SIZE], "little")
    if not files or not SIZE < size <= MOST_ASKED:
        return
    while len(body) < size:
        more = end.recv(size - len(body))
        if not more:
            return
        body += more
    ask, shape = _ask_of(body[SIZE:])
    signal.alarm(ask.seconds)  # its parent would have ended it by then
    end.sendall(json.dumps(_answer(ask, shape, files[0])).encode())
