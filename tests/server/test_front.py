"""What a server shows of itself beside its APIs: the page at `/`, the path a proxy shows it below, who may read
/metrics; and flags that change what every request gets."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from .scripted import Scripted

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value for name, value in attrs if name == "href" and value is not None]


@pytest.mark.parametrize("root", ["", "/models/one"])
def test_S17_the_page_of_links(root: str):
    """`/` shows where to look: to anybody, before the server is ready, and each link leads somewhere. It loads nothing,
    and nothing of the model, the keys or the version is in it.

    Mutation: `_links` wants a key; `page` leaves `root` out; PAGE_HEADERS has no policy.
    """
    app = Scripted("hi", api_key=("secret",), root_path=root)
    app.serving.ready = False
    answer = app.request("GET", f"{root}/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
    text = answer.body.decode()
    links = Links(text)
    assert len(links.found) >= 6 and {"script", "style", "link", "img"}.isdisjoint(links.tags)
    assert "secret" not in text and "scripted" not in text and not re.search(r"\d+\.\d+\.\d+", text)
    app.serving.ready = True
    for link in links.found:
        where = link if root else f"/{link}"
        assert where.startswith(f"{root}/")
        if not link.endswith("/cache/stats") and link != "cache/stats":  # that is the engine's to answer
            assert app.request("GET", where, key="secret").status == 200


def test_a_path_that_a_proxy_shows_the_server_below():
    """With --root-path a request is answered whether the proxy takes the path off or not; clients that read
    /openapi.json learn of it. A path that only begins alike is none.

    Mutation: `__call__` takes nothing off; `description` gets no root.
    """
    app = Scripted("hi", root_path="/models/one/")
    for path in (CHAT, f"/models/one{CHAT}"):
        assert app.post(path, HELLO).json["choices"][0]["message"]["content"] == "hi"
    assert app.request("GET", "/models/one").status == 200
    assert app.request("GET", "/models/one/openapi.json").json["servers"] == [{"url": "/models/one"}]
    for path in ("/models/onev1/models", f"/models/two{CHAT}", f"/models/one/models/one{CHAT}"):
        assert app.request("GET", path).status == 404
    assert "servers" not in Scripted("hi").request("GET", "/openapi.json").json


@pytest.mark.parametrize(
    ("metrics_key", "statuses"),
    [("api", (401, 401, 200, 200)), ("admin", (401, 401, 403, 200)), ("none", (200, 200, 200, 200))],
)
def test_L21_who_may_read_the_metrics(metrics_key: str, statuses: tuple[int, ...]):
    """Whoever has a key; the administrator alone; or anybody: nobody else sees a figure.

    Mutation: `_endpoints` does not look at `metrics_key`.
    """
    app = Scripted("hi", api_key=("user",), admin_key="admin", metrics_key=metrics_key)
    assert tuple(app.request("GET", "/metrics", key=key).status for key in (None, "x", "user", "admin")) == statuses


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_S18_usage_is_sent_where_the_server_says_so(path: str, options: dict | None):
    """With --enable-force-include-usage every stream ends with its usage, once; without, those that ask for it.

    Mutation: `ChatWriter` or `CompletionWriter` does not look at the flag.
    """
    asked = {"stream": True, **({} if options is None else {"stream_options": options})}
    asked |= HELLO if path == CHAT else {"prompt": "hello"}
    for forced in (True, False):
        app = Scripted("hi", enable_force_include_usage=forced)
        wanted = forced or bool(options and options["include_usage"])
        assert app.post(path, asked).body.count(b'"usage":{') == wanted


def test_S18_how_many_logprobs_a_request_may_ask_for():
    """As many as the engine was started for, in every API that has them: one more is a 400 that names the field.

    Mutation: chat, completions or responses have a bound of their own.
    """
    app = Scripted("hi")
    app.link.ready.facts["max_logprobs"] = 30
    for path, body, field in (
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        ("/v1/completions", {"prompt": "hello", "logprobs": 30}, "logprobs"),
        ("/v1/responses", {"input": "hello", "top_logprobs": 30}, "top_logprobs"),
    ):
        assert app.post(path, body).status == 200
        refused = app.post(path, {**body, field: 31})
        assert refused.status == 400 and refused.error["param"] == field and "from 0 to 30" in refused.error["message"]
