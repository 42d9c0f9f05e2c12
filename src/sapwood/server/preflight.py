"""Files, folders and addresses that flags name and that cannot work, found before anything is loaded. A ValueError
names the flag."""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path

from sapwood.engine.loading.model_files import read_json

from .config import ServerConfig
from .listen import MAX_SOCKET_PATH_BYTES
from .parameters import generation_defaults
from .process.kv_events_config import KVEventsConfig
from .text.template import find_template, given_template

_SOCKET_NAME_BYTES = len("/sapwood-01234567/engine")  # behind the temporary directory


def check_server(config: ServerConfig, folder: Path | None, has_tokenizer: bool) -> None:
    """`folder`: of the model, if it is one on this machine. A model without a tokenizer has no template either."""
    if config.chat_template is not None:
        given_template(config.chat_template, {})
    elif folder is not None and has_tokenizer:
        find_template(str(folder), None)
    _check_defaults(config.generation_config, folder)
    for name, path, _ in config.adapters:
        _check_adapter(name, Path(path).expanduser())
    _check_tls(config)
    if config.record_trace is not None:
        _check_trace(Path(config.record_trace))
    if config.kv_events_config is not None:
        _check_endpoints(KVEventsConfig.from_json(config.kv_events_config))
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + _SOCKET_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"the path of the temporary directory is too long for sockets: set TMPDIR, got {place!r:.200}")


def _check_defaults(source: str, folder: Path | None) -> None:
    if source in ("auto", "none", "vllm"):
        if folder is not None:
            generation_defaults(str(folder), source)
        return
    if not (Path(source) / "generation_config.json").is_file():
        kinds = "auto, none or a folder with a generation_config.json"
        raise ValueError(f"generation_config must be {kinds}, got {source!r:.200}")
    generation_defaults("", source)


def _check_adapter(name: str, path: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / file).is_file():
            raise ValueError(f"lora_modules: adapter {name:.200} must be a folder with {file}, got {str(path)!r:.200}")
    read_json(path / "adapter_config.json")


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return

    def password() -> str:
        if config.ssl_keyfile_password is None:
            raise ValueError("ssl_keyfile is encrypted: ssl_keyfile_password is wanted")
        return config.ssl_keyfile_password

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except OSError as error:  # SSLError is one
        wanted = "ssl_certfile and ssl_keyfile must be a certificate and its key"
        raise ValueError(f"{wanted}, got {config.ssl_certfile!r:.200}: {error}") from None
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:
        raise ValueError(f"ssl_ca_certs must hold certificates, got {config.ssl_ca_certs!r:.200}: {error}") from None


def _check_trace(path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"record_trace must be a file in a folder that can be written to, got {str(path)!r:.200}")


def _check_endpoints(config: KVEventsConfig) -> None:
    """Bind for a moment the endpoints that the publisher will bind once the model is loaded."""
    if not config.active:
        return
    import zmq

    bound = {"endpoint": config.endpoint} if config.binds else {}
    if config.replay_endpoint is not None:
        bound["replay_endpoint"] = config.replay_endpoint
    with zmq.Context() as context:
        for name, endpoint in bound.items():
            with context.socket(zmq.PUB if name == "endpoint" else zmq.ROUTER) as socket:
                socket.setsockopt(zmq.IPV6, 1)
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as error:
                    raise ValueError(f"kv_events_config: {name} {endpoint!r:.200} cannot be bound: {error}") from None
