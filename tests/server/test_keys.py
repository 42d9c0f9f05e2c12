"""Who may ask for what: API keys, the administrator's key, salts by key, adapters below a folder, origins."""

from __future__ import annotations

import pytest

from .kit import Running, paced_flags

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("keys")]

CHAT = "/v1/chat/completions"
GUARDED = [
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/cache/stats"),
    ("POST", "/cache/explain"),
    ("GET", "/cache/tree"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
]
LONG = "A secret that only one tenant should ever be able to find in the cache of this server. " * 6


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
    outside = tmp_path_factory.mktemp("outside")
    (outside / "adapter_config.json").write_text("{}")
    (folder / "link").symlink_to(outside)
    return folder, outside


@pytest.fixture(scope="module")
def server(roots, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("file-key\n\n")
    running = Running(
        *paced_flags(max_loras=2),
        *("--api-key", "alpha", "beta", "--api-key-file", str(keys), "--admin-key", "root", "--salt-by-key"),
        *("--lora-root", str(roots[0]), "--allowed-origins", "https://app.example"),
    )
    yield running.ready()
    running.kill()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("method, path", GUARDED)
def test_everything_but_health_wants_a_key(server: Running, method, path):
    """No key, a wrong one, half of one: 401, before the body is looked at.

    Mutation: an endpoint is `open`.
    """
    for headers in ({}, bearer("alph"), bearer("alphaa"), bearer(""), {"Authorization": "Basic alpha"}):
        assert server.request(method, path, b"{", headers=headers).status in (401, 403)
    assert server.get("/health").status == server.get("/ping").status == 200


@pytest.mark.parametrize("headers", [bearer("alpha"), bearer("file-key"), {"x-api-key": "beta"}, bearer("root")])
def test_any_of_the_keys(server: Running, headers):
    """From flags and from a file, as a bearer or as Anthropic's clients bring it.

    Mutation: `x-api-key` is not looked at.
    """
    assert server.get("/v1/models", headers=headers).status == 200


def test_tenants_by_key(server: Running):
    """The salt comes from the key: nobody finds what another key has computed, and no body can change that.

    Mutation: `salt` takes the body's.
    """

    def cached(key):
        told = server.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}, headers=bearer(key))
        return told.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alpha") == 0 and cached("alpha") > 50 and cached("beta") == 0
    refused = server.post("/v1/completions", {"prompt": LONG, "cache_salt": "x"}, headers=bearer("alpha"))
    assert refused.status == 400 and refused.error["param"] == "cache_salt"
    explained = server.post("/cache/explain", {"prompt": LONG}, headers=bearer("file-key")).json
    assert explained["cached"] == 0 and explained["reason"] in ("empty", "diverged")


def test_the_tree_is_for_the_administrator(server: Running):
    """It shows everybody's tokens: with the administrator's key only.

    Mutation: `admin` is not looked at.
    """
    assert server.get("/cache/tree", headers=bearer("alpha")).status == 403
    server.post("/v1/completions", {"prompt": LONG, "max_tokens": 1}, headers=bearer("alpha"))
    tree = server.get("/cache/tree?limit=5", headers=bearer("root")).json
    assert tree["total"] >= 1 and any("A secret" in node["text"] for node in tree["nodes"])
    assert all(space["salted"] for space in tree["namespaces"])
    assert server.get("/cache/stats", headers=bearer("alpha")).status == 403
    assert "namespaces" in server.get("/cache/stats", headers=bearer("root")).json["cache"]
    assert server.get("/cache/tree?limit=0", headers=bearer("root")).status == 400


def test_L19_load_use_unload_load_again(server: Running):
    """An adapter is a model by its name, with its own cache; gone, it is a 404; and it can come again.

    Mutation: `unload_adapter` keeps the name; `model` gives the base model's namespace.
    """

    def say(model):
        return server.post(
            "/v1/completions", {"prompt": "adapter " + LONG, "max_tokens": 1, "model": model}, headers=bearer("alpha")
        )

    for _ in range(2):
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "one"}, headers=bearer("root"))
        assert loaded.status == 200, loaded.body
        shown = {each["id"]: each for each in server.get("/v1/models", headers=bearer("alpha")).json["data"]}
        assert shown["mine"]["parent"] == "paced" and shown["paced"]["parent"] is None
        say("paced")
        first, second = say("mine").json, say("mine").json
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and first["model"] == "mine"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}, headers=bearer("root")).status == 200
        assert say("mine").status == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}, headers=bearer("root")).status == 404


@pytest.mark.parametrize(
    "path", ["..", "../outside", "link", "/etc", "one/../../x", "one\0", "no-such", "one/adapter_config.json", "~", "."]
)
def test_adapters_only_from_below_the_root(server: Running, roots, path):
    """By resolved path: neither dots nor links lead out of it.

    Mutation: `Folder` does not look where it is.
    """
    for asked in (path, str(roots[1])):
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": asked}, headers=bearer("root"))
        assert refused.status in (400, 404), (asked, refused.body)
    assert [each["id"] for each in server.get("/v1/models", headers=bearer("alpha")).json["data"]] == ["paced"]


@pytest.mark.parametrize("name", ["", "a" * 300, "a\nb", "../x y", "paced", "a\u0000"])
def test_names_of_adapters(server: Running, name):
    """No file name, no control characters, and not the model's own.

    Mutation: `_NAME` takes everything.
    """
    refused = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "one"}, headers=bearer("root"))
    assert refused.status == 400


def test_origins(server: Running):
    """A page of an allowed origin may ask, another may not; the preflight wants no key.

    Mutation: `_cors` allows every origin.
    """
    preflight = server.request("OPTIONS", CHAT, headers={"Origin": "https://app.example"})
    assert preflight.status == 204 and preflight.headers["access-control-allow-origin"] == "https://app.example"
    other = server.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
