"""Endpoints that generate nothing: models and adapters, tokens and text, the cache."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..errors import ApiError, bad, without_paths
from ..frontend import Serving, Source
from ..generation import Prompt
from ..http import Call, query_number, query_text
from ..limits import MAX_ADAPTER_NAME_CHARACTERS, MAX_ADAPTERS, MAX_TREE_NODES
from ..text.answer_parts import read_tools
from .schemas import DetokenizeRequest, ExplainRequest, LoadAdapter, TokenizeRequest, UnloadAdapter, parse

_NAME = re.compile(rf"[\w./:@+-]{{1,{MAX_ADAPTER_NAME_CHARACTERS}}}")
TIERS = ("device,host", "all")


# ---- models and adapters


def _shown(serving: Serving, name: str, root: str | None = None) -> dict[str, Any]:
    model = serving.models.names[0]
    return {
        "id": name,
        "object": "model",
        "created": serving.models.created,
        "owned_by": "sapwood",
        "root": root or model,
        "parent": serving.models.parents.get(name, model) if root is not None else None,
        "max_model_len": serving.prompts.limit if root is None else None,
    }


def _models(serving: Serving, admin: bool) -> list[dict[str, Any]]:
    base = [_shown(serving, name) for name in serving.models.names]
    sources = serving.models.sources
    roots = {name: sources.get(name, Source(name)).shown(admin) for name in serving.models.adapters}
    return base + [_shown(serving, name, root) for name, root in roots.items()]


async def models(serving: Serving, call: Call) -> None:
    await call.json({"object": "list", "data": _models(serving, call.caller.admin)})


async def one_model(serving: Serving, call: Call) -> None:
    name = call.scope["path_params"]["name"]
    model = serving.models.find(name).name
    known = {each["id"]: each for each in _models(serving, call.caller.admin)}
    await call.json(known.get(name) or known[model])


async def load_adapter(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), LoadAdapter)
    if not _NAME.fullmatch(request.lora_name):
        good = f"1 to {MAX_ADAPTER_NAME_CHARACTERS} letters, digits and ./:@+-"
        raise bad("lora_name", f"lora_name must be {good}, got {request.lora_name!r:.60}")
    if request.lora_name in serving.models.names:
        raise bad("lora_name", f"lora_name {request.lora_name!r} is the model's own name")
    if len(serving.models.adapters) >= MAX_ADAPTERS:
        raise bad("lora_name", f"{MAX_ADAPTERS} adapters are loaded already: unload one first")
    source = Source(request.lora_path, _lora_root(serving))
    if "\0" in request.lora_path:
        raise bad("lora_path", "lora_path must be a path")
    try:
        digest = await serving.link.load_adapter(request.lora_name, *source)
    except ApiError as error:
        if not call.caller.admin:
            error.message = without_paths(error.message)
        raise
    serving.models.adapters[request.lora_name] = digest
    serving.models.sources[request.lora_name] = source
    await call.json({"status": "ok", "message": f"adapter {request.lora_name!r} is loaded", "digest": digest.hex()})


def _lora_root(serving: Serving) -> str:
    root = serving.config.lora_root
    if not (serving.link.ready and serving.link.ready.facts.get("max_loras")):
        raise ApiError(400, "this server was started without --enable-lora", "no_lora")
    if root is None:
        raise ApiError(403, "adapters are loaded over HTTP only where the server has a --lora-root", "no_lora_root")
    return root


async def unload_adapter(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), UnloadAdapter)
    if not (serving.link.ready and serving.link.ready.facts.get("max_loras")):
        raise ApiError(400, "this server was started without --enable-lora", "no_lora")
    if request.lora_name not in serving.models.adapters:
        raise ApiError(404, f"there is no adapter {request.lora_name!r:.200} here", "no_adapter", "lora_name")
    serving.models.forget(request.lora_name)
    await serving.link.ask("unload_adapter", name=request.lora_name)
    message = f"adapter {request.lora_name!r} is gone; requests that run with it end"
    await call.json({"status": "ok", "message": message})


# ---- tokens


async def tokenize(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), TokenizeRequest)
    serving.models.find(request.model)
    prompt = await _prompt(serving, request)
    ids = prompt.ids.tolist()
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": serving.prompts.limit, "tokens": ids}
    if request.return_token_strs:
        tokens = serving.prompts.tokenizer()
        name = tokens.tokenizer.id_to_token
        answer["token_strs"] = await tokens.run(lambda: [name(token) for token in ids])
    await call.json(answer)


async def detokenize(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), DetokenizeRequest)
    serving.models.find(request.model)
    tokens = serving.prompts.tokenizer()
    serving.prompts.known_tokens("tokens", request.tokens)
    await call.json({"prompt": await tokens.decode_long(request.tokens)})


async def _prompt(serving: Serving, request: TokenizeRequest | ExplainRequest) -> Prompt:
    if (request.prompt is None) == (request.messages is None):
        raise bad("prompt", "give either prompt or messages")
    if request.prompt is not None:
        return await serving.prompts.given(request.prompt, request.add_special_tokens is not False)
    tools = read_tools(request.tools, None, None)
    return await serving.prompts.conversation(
        request.messages or [],
        tools=tools.shown,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
        add_special_tokens=bool(request.add_special_tokens),
    )


# ---- the cache


async def cache_stats(serving: Serving, call: Call) -> None:
    stats = await serving.link.ask("stats")
    if not call.caller.admin:
        stats["cache"].pop("namespaces", None)  # of other clients
        stats.pop("live_adapters", None)
        store = stats["tiers"].get("store") or {}
        store.get("process", {}).pop("pid", None)
        scheme, separator, _ = store.get("uri", "").partition("file://")
        if separator:
            store["uri"] = scheme + separator
    stats["adapters"] = {name: digest.hex() for name, digest in stats["adapters"].items()}
    await call.json(stats)


async def cache_explain(serving: Serving, call: Call) -> None:
    """How much of a prompt the cache would serve now, and why no more."""
    request = parse(await call.body(), ExplainRequest)
    model = serving.models.find(request.model)
    prompt = await _prompt(serving, request)
    if len(prompt.ids) > serving.prompts.limit:
        raise serving.prompts.too_long(len(prompt.ids))
    salt = serving.parameters.salt(request.cache_salt, call.caller)
    found = await serving.link.ask(
        "explain",
        tokens=np.ascontiguousarray(prompt.ids, np.int32).tobytes(),
        adapter=model.adapter,
        salt=salt,
        admin=call.caller.admin,
    )
    answer = {"prompt_tokens": len(prompt.ids), **found}
    if found["reason"] != "hit":
        answer |= serving.prompts.text_around(prompt, found["position"])
    await call.json(answer)


async def cache_tree(serving: Serving, call: Call) -> None:
    most = query_number(call, "limit", 1000, MAX_TREE_NODES)
    tree = await serving.link.ask("tree", most=most)
    if serving.prompts.tokens is not None:
        for node in tree["nodes"]:
            node["text"] = serving.prompts.tokens.decode(node["first_tokens"])
    await call.json(tree)


async def reset_prefix_cache(serving: Serving, call: Call) -> None:
    """Forget what is cached. This waits for nothing: running requests go on, and keep what they read until they end."""
    tiers = query_text(call, "tiers", TIERS[0])
    if tiers not in TIERS:
        raise bad("tiers", f"tiers must be {' or '.join(TIERS)}, got {tiers!r:.60}")
    removed = await serving.link.ask("reset", store=tiers == "all")
    await call.json({"status": "ok", **removed})
