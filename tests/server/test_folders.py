"""What a server leaves on the disk, and finds there: folders for sockets, the secret of salts; and what clients see."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sapwood.engine.loading.usercache import cache_folder
from sapwood.server.command import main
from sapwood.server.config import ServerConfig
from sapwood.server.errors import without_paths
from sapwood.server.lifecycle import _Server
from sapwood.server.process import engine_child
from sapwood.server.process.engine_child import PrivateFolder, sweep
from sapwood.server.process.messages import End, Ready, StepOutput, Submit
from sapwood.server.salt_key import salt_key, salt_of
from sapwood.store import open_store

from ..store.kit import fingerprint
from .kit import Running, alive, paced_flags, until
from .scripted import Scripted

COMPLETIONS = "/v1/completions"


# ---- folders for sockets


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """A temporary directory of our own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left(where: Path) -> Path:
    """As a server that was killed leaves it: nobody holds the lock."""
    folder = PrivateFolder()
    os.close(folder._lock)
    (folder.path / "api").touch()
    return folder.path


def test_what_killed_servers_left_is_swept(temporary):
    """And nothing else: not the folder of one that lives, nor anything of a similar name without a lock of ours.

    Mutation: `PrivateFolder` does not sweep; `_sweep` does not ask for the lock; it needs no lock file.
    """
    dead = left(temporary)
    living = PrivateFolder()
    assert not dead.exists() and living.path.stat().st_mode & 0o777 == 0o700
    (temporary / "sapwood-of-somebody").mkdir()
    (temporary / "sapwood-file").touch()
    (temporary / "sapwood-link").symlink_to(living.path)
    (temporary / "other").mkdir()
    (temporary / "other" / engine_child._LOCK).touch()
    dead = left(temporary)
    another = PrivateFolder()
    assert not dead.exists() and living.path.is_dir() and another.path.is_dir()
    assert {path.name for path in temporary.iterdir()} == {
        *("sapwood-of-somebody", "sapwood-file", "sapwood-link", "other", living.path.name, another.path.name)
    }
    living.close()
    living.close()
    assert not living.path.exists() and another.path.is_dir()
    another.close()


def test_a_folder_of_another_user_is_left_alone(temporary, monkeypatch):
    """Whoever may put folders into the temporary directory cannot make us remove one.

    Mutation: `_sweep` does not look at the owner; it follows links.
    """
    dead = left(temporary)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: dead.stat().st_uid + 1)
        sweep(temporary)
    assert dead.is_dir()
    precious = temporary / "precious"
    precious.mkdir()
    (precious / engine_child._LOCK).symlink_to(dead / engine_child._LOCK)
    (temporary / "sapwood-trap").symlink_to(precious)
    trap = temporary / "sapwood-lock"
    trap.mkdir()
    (trap / engine_child._LOCK).symlink_to(dead / engine_child._LOCK)
    os.mkfifo(temporary / "sapwood-pipe")
    sweep(temporary)
    assert not dead.exists() and precious.is_dir() and trap.is_dir()


@pytest.mark.parametrize("when", ["before the lock", "after the sweep"])
def test_a_sweeper_that_meets_an_owner_that_begins(temporary, monkeypatch, when):
    """It has the lock of a folder that was just made, or removed it before it was locked: the owner takes another.

    Mutation: `__init__` does not look whether it got the lock, or whether the file is still there.
    """
    first: list[Path] = []
    locked = engine_child._locked

    def meets(file: int) -> bool:
        if first:
            return locked(file)
        first.append(Path(os.readlink(f"/proc/self/fd/{file}")).parent)
        if when == "after the sweep":
            sweep(temporary)
            return locked(file)
        other = os.open(first[0] / engine_child._LOCK, os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        got = locked(file)
        os.close(other)
        return got

    monkeypatch.setattr(engine_child, "_locked", meets)
    folder = PrivateFolder()
    assert folder.path != first[0] and folder.path.is_dir()
    sweep(temporary)
    assert folder.path.is_dir()
    folder.close()


@pytest.mark.server
@pytest.mark.xdist_group("folders")
def test_a_server_that_is_killed_leaves_nothing_for_long(tmp_path):
    """The next one to start removes it; one that ends by itself leaves nothing.

    Mutation: `EngineChild` makes its folder by itself.
    """

    def folders() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if path.name.startswith("sapwood-")]

    environment = {"TMPDIR": str(tmp_path)}
    first = Running(*paced_flags(), environment=environment).ready()
    (mine,) = folders()
    engine = first.engine()
    first.kill()
    until(lambda: not alive(engine))
    assert folders() == [mine]
    second = Running(*paced_flags(), environment=environment).ready()
    assert len(folders()) == 1 and folders() != [mine]
    assert second.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}).status == 200
    assert second.stop(signal.SIGTERM) == 0
    assert folders() == []


# ---- the secret of salts


def test_the_secret_is_made_once_and_shared_by_the_servers_of_a_store(tmp_path, monkeypatch):
    """In a store's folder, where it is no obstacle to the store; for this user alone. Other stores: one in the user's
    cache folder. Without a store, one for each server.

    Mutation: `salt_key` makes a new one each time; `_make` gives it no mode.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = f"file://{tmp_path}/store?size=64MiB"
    secret = salt_key(None, store)
    (file,) = (tmp_path / "store").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and len(secret) >= 32 and secret in file.read_bytes()
    assert salt_key(None, store) == salt_key(None, f"faulty+{store}") == secret
    open_store(store, fingerprint()).close()
    assert salt_key(None, store) == secret
    other = salt_key(None, "redis://host:6379/0")
    assert other == salt_key(None, "mooncake://host:50051") != secret
    assert other in (cache_folder() / "salt-key").read_bytes()
    assert len({salt_key(None, None), salt_key(None, None), salt_key(None, "memory://x"), other, secret}) == 5
    (tmp_path / "given").write_text("g" * 64 + "\n")
    assert salt_key(str(tmp_path / "given"), store) == b"g" * 64


def test_of_many_who_make_it_all_have_the_same(tmp_path):
    """Processes that start together on an empty store.

    Mutation: `_make` writes to the file's own name, or replaces it.
    """
    code = "import sys; from sapwood.server.salt_key import salt_key; print(salt_key(None, sys.argv[1]).hex())"
    uri = f"file://{tmp_path}/store?size=64MiB"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, uri], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in processes}) == 1
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["sapwood-store-salt-key"]


def test_a_secret_that_another_may_write(tmp_path, caplog):
    """It is none, nor is one that is too short, or no file; one that others may read is warned of.

    Mutation: `_read` does not look at the mode; at the length; at what kind of file it is.
    """
    file = tmp_path / "key"
    for content, mode, words in (
        ("x" * 64, 0o620, "changed by others"),
        ("x" * 64, 0o602, "changed by others"),
        ("short\n" + " " * 64, 0o600, "32 bytes or more"),
    ):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(ValueError, match=words):
            salt_key(str(file), None)
    file.write_text("x" * 64)
    file.chmod(0o644)
    assert salt_key(str(file), None) == b"x" * 64 and "can be read by others" in caplog.text
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="plain file"):
        salt_key(str(tmp_path / "pipe"), None)
    with pytest.raises(ValueError, match="--salt-key-file"):
        salt_key(str(tmp_path / "nothing"), None)
    with pytest.raises(ValueError, match="salt_key_file needs salt_by_key"):
        ServerConfig(salt_key_file=str(file))


def test_a_salt_cannot_be_made_from_a_key_alone():
    """Without the secret nobody can try keys against what KV events say. Servers of one secret share.

    Mutation: `salt_of` does not use the secret.
    """

    def salts(secret: bytes | None) -> list[str]:
        app = Scripted("Hello", api_key=("alpha", "beta"), salt_by_key=True)
        if secret is not None:
            app.serving.parameters._secret = secret
        for key in ("alpha", "beta", "alpha"):
            assert app.post(COMPLETIONS, {"prompt": "hi"}, key).status == 200
        return [each.params.cache_salt for each in app.link.submitted]

    one, other = salts(b"1" * 32), salts(b"2" * 32)
    assert one == salts(b"1" * 32) and one[0] == one[2] != one[1] and not {*one} & {*other}
    assert one[0] == salt_of(b"1" * 32, "alpha") and not {*salts(None)} & {*salts(None)}


def test_a_folder_that_cannot_be_trusted_is_said_before_anything_is_loaded(tmp_path, capsys, logging_kept):
    """Status 2, and what to do: the store's folder, the secret's file.

    Mutation: `main` does not call `_secret`; `_secret` looks with `salt_by_key` only.
    """
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    store = ["--factory", "nowhere:nothing", "--factory-flags", f'{{"store": "file://{tmp_path}/store?size=64MiB"}}']
    assert main(store) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"sapwood serve: file store .*everybody may write to it.*trusted=1.*\n", said)
    (tmp_path / "key").write_text("short")
    salted = ["--api-key", "a", "--salt-by-key", "--salt-key-file", str(tmp_path / "key")]
    assert main(["--factory", "nowhere:nothing", "--factory-flags", "{}", *salted]) == 2
    assert "32 bytes or more" in capsys.readouterr().err


# ---- paths and process ids


def test_paths_in_errors_of_the_engine():
    """The last part says what is wrong; where it lies is in the log.

    Mutation: `without_paths` returns what it is given.
    """
    for told, shown in {
        "OSError: no such file: '/srv/models/x/weights.bin'": "OSError: no such file: '.../weights.bin'",
        "adapter /srv/adapters/one: r must be a number": "adapter .../one: r must be a number",
        "~/models/x is gone (see /var/log/x.log)": ".../x is gone (see .../x.log)",
        "see https://example.com/a/b, or and/or": "see https://example.com/a/b, or and/or",
    }.items():
        assert without_paths(told) == shown


def test_a_step_that_breaks_shows_no_paths():
    """Also in a stream.

    Mutation: `_last` tells the engine's error as it is.
    """
    app = Scripted("Hello")

    def breaks(message: Submit, script: object) -> None:
        end = End(message.number, "error", None, 0, "OSError: cannot read /srv/models/secret/x.bin")
        app.link._dispatch(StepOutput(1, 0.0, b"", b"", [], [end], {}, {}))
        app.link._wake_readers()

    app.link._begin = breaks  # type: ignore[assignment,method-assign]
    for stream in (False, True):
        answer = app.post(COMPLETIONS, {"prompt": "hi", "stream": stream})
        assert b"x.bin" in answer.body and b"/srv" not in answer.body, answer.body
    app.link.down = None


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    for name in ("one", "empty"):
        (folder / "adapters" / name).mkdir(parents=True)
    (folder / "adapters" / "one" / "adapter_config.json").write_text("{}")
    (folder / "adapters" / "one" / "adapter_model.safetensors").touch()
    return folder


@pytest.fixture(scope="module")
def flags(places) -> list[str]:
    adapters = places / "adapters"
    given = {"host_pages": 2000, "max_loras": 2, "store": f"file://{places}/store?size=64MiB"}
    return [
        *paced_flags(**given),
        *("--lora-root", str(adapters), "--enable-lora", "--lora-modules", f"mine={adapters}/one"),
    ]


LOOKS = ["/cache/stats", "/v1/models", "/v1/models/mine", "/version", "/metrics", "/health", "/ping", "/openapi.json"]


@pytest.mark.server
@pytest.mark.xdist_group("folders")
def test_paths_and_process_ids_are_for_the_administrator(places, flags):
    """All that is answered to somebody else, and by a server without an admin key, holds neither.

    Mutation: `cache_stats` leaves `pid` or `uri`; `_models` shows every root.
    """
    path, admin = str(places).encode(), {"Authorization": "Bearer root"}
    for more in ((), ("--admin-key", "root")):
        server = Running(*flags, *more).ready()
        try:
            server.post(COMPLETIONS, {"prompt": "hello " * 100, "max_tokens": 2})
            load = {"lora_name": "new", "lora_path": "empty"}
            answers = [server.get(look) for look in LOOKS]
            answers += [
                server.post("/v1/load_lora_adapter", load),
                server.post("/cache/explain", {"prompt": "hello " * 100}),
                server.post(COMPLETIONS, {"prompt": "hi", "model": "nobody"}),
                server.get("/nowhere"),
            ]
            for answer in answers:
                assert path not in answer.body and b'"pid"' not in answer.body, answer.body
            stats = answers[0].json["tiers"]["store"]
            assert stats["uri"] == "file://" and stats["process"]["alive"]
            assert answers[2].json["root"] == "one"
            if more:
                stats = server.get("/cache/stats", headers=admin).json["tiers"]["store"]
                assert stats["uri"] == f"file://{places}/store" and stats["process"]["pid"] == server.store()
                roots = [each["root"] for each in server.get("/v1/models", headers=admin).json["data"]]
                assert roots == ["paced", f"{places}/adapters/one"]
                failed = server.post("/v1/load_lora_adapter", load, headers=admin)
                assert failed.status == 400 and b"adapter_config.json is missing" in failed.body
            assert server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}).status == 200
        finally:
            server.kill()


def test_a_model_given_as_a_path_is_called_by_its_last_part():
    """Requests may use the path as well: whoever knows it.

    Mutation: `_name` returns what was asked for; `model` does not know `given_name`.
    """
    for asked, name in {
        "/srv/models/qwen3-8b": "qwen3-8b",
        "/srv/models/qwen3-8b/": "qwen3-8b",
        "~/model.gguf": "model.gguf",
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
        "/": "/",
    }.items():
        app = Scripted("Hello")
        server = _Server(ServerConfig(), {"model": asked}, "", None, None)  # type: ignore[arg-type]
        server.serving = app.serving
        app.serving.models.names[:] = [server._name(Ready("", 1, 1, [], 1, {}, {}))]
        assert [each["id"] for each in app.request("GET", "/v1/models").json["data"]] == [name]
        for model in (asked, name):
            answer = app.post(COMPLETIONS, {"prompt": "hi", "model": model})
            assert answer.status == 200 and answer.json["model"] == name
        if asked != "/":
            assert app.request("GET", f"/v1/models/{asked}").json["id"] == name
        assert app.post(COMPLETIONS, {"prompt": "hi", "model": "/srv"}).status == 404
