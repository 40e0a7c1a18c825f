"""The web page: one file without outside resources, allowed to load nothing but itself and to talk to this service only."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
def page() -> HTMLResponse:
    """The page."""
    html, policy = _page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy, which names its script and its style by their digests."""
    html = resources.files("mok_api").joinpath("page.html").read_text(encoding="utf-8")
    hashes = {tag: _hash(html, tag) for tag in ("script", "style")}
    policy = (f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; img-src data:; "
              "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return html, policy


def _hash(html: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None, f"the page has one <{tag}>"
    return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
