"""The page at `/`: where to look. It holds no data, needs no key and loads nothing."""

from __future__ import annotations

from html import escape

_LINKS = {
    "health": "whether the next request is answered",
    "v1/models": "the model and its adapters",
    "metrics": "figures for Prometheus",
    "cache/stats": "what the cache holds and has done",
    "openapi.json": "everything else, described",
    "version": "of the server",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page(root: str) -> bytes:
    """`root`: the path that a proxy shows the server below, "" if there is none."""
    below = f"{escape(root)}/" if root else ""  # a proxy that says nothing of itself may be there too
    rows = "".join(f'<li><a href="{below}{path}">/{path}</a> {escape(what)}</li>\n' for path, what in _LINKS.items())
    text = f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Sapwood</title></head><body>
<h1>Sapwood</h1>
<p>This is a server for programs: it speaks OpenAI's API below <code>{escape(root)}/v1</code>.</p>
<ul>
{rows}</ul>
</body></html>
"""
    return text.encode()
