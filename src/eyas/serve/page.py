"""The page at ``/``: a chat in which drafted-and-kept tokens are tinted. One file, no network but this server."""

from __future__ import annotations

import secrets
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(model: str, positions: int, *, needs_key: bool) -> tuple[str, dict[str, str]]:
    """HTML, and the headers it must be sent with: only the two blocks with this answer's nonce run or style."""
    nonce = secrets.token_urlsafe(16)
    html = _template().render(
        model=model,
        most=min(256, positions // 2),
        needs_key=needs_key,
        nonce=nonce,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
    )
    headers = {
        "Content-Security-Policy": POLICY.format(nonce=nonce),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return html, headers


@cache
def _template() -> Template:
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja")
