"""What the administrator's key alone may do, which keys and pages are let in, and what nobody else is shown."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from sapwood.engine.arguments import _words
from sapwood.server.config import ServerConfig

from .scripted import Scripted

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
ASKED = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
}
CHANGES = [
    ("/reset_prefix_cache", {}),
    ("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"}),
    ("/v1/unload_lora_adapter", {"lora_name": "one"}),
]


def works(app: Scripted, key: str | None = None) -> bool:
    return app.post(COMPLETIONS, ASKED[COMPLETIONS], key).status == 200


def test_every_flag_has_its_words():
    """--help says what each is, from the docstring.

    Mutation: one space behind a name that is long.
    """
    assert _words(ServerConfig).keys() == {field.name for field in dataclasses.fields(ServerConfig)}


# ---- the administrator


@pytest.mark.parametrize("path, body", CHANGES)
def test_L21_what_changes_the_server_for_everybody_needs_the_admin_key(path, body):
    """Another key gets 403 and changes nothing, also where there are no other keys; without an admin key it is for all.

    Mutation: `_endpoints` gives these three no `admin`.
    """
    for keys, key in (((), None), (("alpha",), "alpha")):
        app = Scripted("Hello", admin_key="root", api_key=keys)
        app.link.answers["reset"] = {"forgotten_pages": {}}
        refused = app.post(path, body, key)
        assert (refused.status, refused.error["code"]) == (403, "admin") and "--admin-key" in refused.error["message"]
        assert works(app, key)
        taken = app.post(path, body, "root")
        assert taken.status == 200 if path.startswith("/reset") else taken.error["code"] == "no_lora"
    app = Scripted("Hello", api_key=("alpha",))
    app.link.answers["reset"] = {"forgotten_pages": {}}
    assert app.post(path, body, "alpha").status != 403


@pytest.mark.parametrize("path", ASKED)
def test_L21_priority_is_for_the_administrator(path):
    """Lower is more urgent: others may stand back, and not push forward; what is no priority stays wrong.

    Mutation: `params` does not call `_priority`; `_priority` takes the smaller number.
    """

    def given(key: str, priority: int | None, **config: int) -> int:
        app = Scripted("Hello", api_key=("alpha",), admin_key="root", **config)
        fields = {} if priority is None else {"priority": priority}
        answer = app.post(path, {**ASKED[path], **fields}, key)
        assert answer.status == 200, answer.body
        return app.params.priority

    assert [given("alpha", asked) for asked in (-5, 0, 7)] == [0, 0, 7]
    assert given("root", -5) == -5
    assert [given("alpha", asked, max_priority=-3) for asked in (-5, -2)] == [-3, -2]
    assert [given("alpha", asked, max_priority=3) for asked in (None, 2, 4)] == [3, 3, 4]
    app = Scripted("Hello")
    assert app.post(path, {**ASKED[path], "priority": -5}).status == 200 and app.params.priority == 0
    assert app.post(path, {**ASKED[path], "priority": -(2**40)}).status == 400
    assert works(app)


@pytest.mark.parametrize(
    "config, key, status",
    [
        ({}, None, 200),
        ({"api_key": ("alpha",)}, "alpha", 200),
        ({"api_key": ("alpha",), "admin_key": "root"}, "alpha", 200),
        ({"api_key": ("alpha", "beta"), "admin_key": "root"}, "alpha", 403),
        ({"api_key": ("alpha", "beta"), "admin_key": "root"}, "root", 200),
        ({"api_key": ("alpha", "beta")}, "alpha", 403),
        ({"api_key": ("alpha",), "salt_by_key": True}, "alpha", 403),
    ],
)
def test_L21_statistics_of_several_tenants_are_for_the_administrator(config, key, status):
    """They tell how many tokens were computed and found: with two tenants, what the other one does.

    Mutation: `_endpoints` gives /cache/stats no `admin`; it looks at `salt_by_key` alone, or at the keys alone.
    """
    app = Scripted("Hello", **config)
    app.link.answers["stats"] = {"cache": {}, "adapters": {}, "tiers": {}}
    assert app.request("GET", "/cache/stats", key=key).status == status
    assert works(app, key)


# ---- keys

TWO = [
    [(b"authorization", b"Bearer alpha"), (b"authorization", b"Bearer beta")],
    [(b"authorization", b"Bearer alpha"), (b"authorization", b"Bearer alpha")],
    [(b"x-api-key", b"beta"), (b"x-api-key", b"alpha")],
    [(b"authorization", b"Bearer alpha"), (b"x-api-key", b"beta")],
    [(b"authorization", b"Basic alpha"), (b"x-api-key", b"alpha")],
    [(b"authorization", b""), (b"x-api-key", b"alpha")],
]


@pytest.mark.parametrize("headers", TWO, ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, "/nowhere"])
def test_two_keys_are_none(headers, path):
    """A proxy may have let the request in by the key that the server does not look at.

    Mutation: `_key_of` takes the last; it compares nothing.
    """
    app = Scripted("Hello", api_key=("alpha", "beta"))
    refused = app.request("POST", path, ASKED.get(path), headers=headers)
    assert refused.status == 400, refused.body
    assert "alpha" not in refused.error["message"] and "beta" not in refused.error["message"]
    assert app.link.submitted == []
    same = [(b"authorization", b"bearer  alpha"), (b"x-api-key", b"alpha")]
    assert app.request("POST", COMPLETIONS, ASKED[COMPLETIONS], headers=same).status == 200


def test_keys_that_nobody_looks_at_may_differ():
    """Without keys clients send whatever they were set up with; two headers of one name are wrong all the same.

    Mutation: `_key_of` looks at neither `_keys` nor `_admin`.
    """
    app = Scripted("Hello")
    assert app.request("POST", COMPLETIONS, ASKED[COMPLETIONS], headers=TWO[3]).status == 200
    assert app.request("POST", COMPLETIONS, ASKED[COMPLETIONS], headers=TWO[0]).status == 400


# ---- hosts and origins

OWN = ["localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:8000", "[::1]:80", "10.1.2.3:8000", "[fe80::1]"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil",
    "",
]


def got(app: Scripted, host: str | None, origin: str | None = None, path: str = COMPLETIONS, key: str | None = None):
    named = ((b"host", host), (b"origin", origin))
    headers = [(name, text.encode()) for name, text in named if text is not None]
    return app.request("GET" if path == "/health" else "POST", path, ASKED.get(path, {}), key, headers)


def test_without_a_key_a_foreign_host_is_refused():
    """A page whose name was made to mean this machine: its browser says so in Host. Probes of /health may say anything.

    Mutation: `_answer` does not call `check`; `_ours` looks at the beginning of a name; `_bare` keeps the port.
    """
    app = Scripted("Hello")
    for host in [*OWN, socket.gethostname(), f"{socket.gethostname()}:99", "localhost.", None]:
        assert got(app, host).status == 200, host
    for host in FOREIGN:
        for path in (COMPLETIONS, "/reset_prefix_cache", "/v1/load_lora_adapter", "/nowhere"):
            refused = got(app, host, path=path)
            assert (refused.status, refused.error["code"]) == (403, "host_not_allowed"), host
            assert "--allowed-hosts" in refused.error["message"]
        assert got(app, host, path="/health").status == 200
    assert len(app.link.submitted) == len(OWN) + 4


def test_without_a_key_a_foreign_page_is_refused():
    """It may post to an address it cannot read from. Pages of this server, and of others on this machine, may.

    Mutation: `check` does not look at the origin; `_may_ask` takes every address.
    """
    app = Scripted("Hello")
    for origin in ("https://evil.example", "http://6.6.6.6", "null", "chrome-extension://abc", "localhost", ""):
        refused = got(app, "127.0.0.1:8000", origin)
        assert (refused.status, refused.error["code"]) == (403, "origin_not_allowed"), origin
        assert "--allowed-origins" in refused.error["message"]
    for origin in ("http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"):
        assert got(app, "127.0.0.1:8000", origin).status == 200, origin
    assert got(app, "10.1.2.3:8000", "http://10.1.2.3:8000").status == 200
    assert (
        got(Scripted("Hello", allowed_origins=("https://evil.example",)), "localhost", "https://evil.example").status
        == 200
    )


def test_allowed_hosts():
    """They are added to this machine's own, as names, as all names below one, or as everything. With a key nobody
    looks, unless they are given; a Unix socket has no name.

    Mutation: `App` looks at `allowed_hosts` with keys only, or without only; `Hosts` compares the ends of names.
    """
    app = Scripted("Hello", allowed_hosts=("api.example", "*.inner.example"))
    for host, status in {
        "api.example": 200,
        "API.example:8000": 200,
        "a.b.inner.example": 200,
        "inner.example": 403,
        "notapi.example": 403,
        "x.api.example": 403,
        "localhost": 200,
    }.items():
        assert got(app, host).status == status, host
    assert got(app, "localhost", "https://api.example").status == 200
    assert got(Scripted("Hello", allowed_hosts=("*",)), "evil.example", "https://evil.example").status == 200
    assert got(Scripted("Hello", api_key=("alpha",)), "evil.example", "https://evil.example", key="alpha").status == 200
    guarded = Scripted("Hello", api_key=("alpha",), allowed_hosts=("api.example",))
    assert got(guarded, "evil.example", key="alpha").status == 403
    assert got(Scripted("Hello", uds="/tmp/x"), "evil.example").status == 200
    assert got(Scripted("Hello", host="box.lan"), "box.lan:8000").status == 200
    with pytest.raises(ValueError, match=r"allowed_hosts must be names"):
        ServerConfig(allowed_hosts=("http://x",))
