"""URLs of data: one spelling each, so that they can be compared with an allow-list and with a record.

A URL is in normal form when scheme and host are in lower case, a default port is left out and the path begins with a slash. What
servers and parsers read in different ways is refused: dot segments, encoded slashes, dots and percent signs, backslashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from mok_service.errors import Unrunnable

SCHEMES: Final = ("https", "http", "s3")
URL_LENGTH_MAX: Final = 2000
_DEFAULT_PORTS: Final = {"https": "443", "http": "80"}

_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(\?[^#]*)?(#.*)?")
_AUTHORITY = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_AMBIGUOUS = re.compile(r"%(?:00|25|2e|2f|5c)", re.IGNORECASE)


class BadUrl(ValueError):
    """Why a text is no URL that data may come from; `secret` when the text may hold one and shouldn't be shown."""

    def __init__(self, problem: str, secret: bool = False) -> None:
        super().__init__(problem)
        self.problem, self.secret = problem, secret


def normal_url(text: str) -> str:
    """The normal form of a URL without user name, query and fragment. Raises BadUrl."""
    normal, query = _parsed(text)
    if query:
        raise BadUrl("has a query string, which may hold a secret and would be kept on record", secret=True)
    return normal


def with_query(text: str) -> tuple[str, str]:
    """The normal form of a URL, and its query string with the question mark, or "". For redirects only. Raises BadUrl."""
    return _parsed(text)


def scheme_of(url: str) -> str:
    """The scheme of a URL in normal form."""
    return url.partition("://")[0]


def matches(url: str, prefixes: Iterable[str]) -> bool:
    """Whether a URL in normal form is one of the prefixes (in normal form), or lies below one."""
    return any(url == prefix or url.startswith(prefix.removesuffix("/") + "/") for prefix in prefixes)


def refuse_unless_allowed(urls: Iterable[str], prefixes: Sequence[str]) -> None:
    """Raises Unrunnable for the first URL of a spec that lies below no allowed prefix (MOK_DATA_URLS)."""
    for url in urls:
        if not matches(url, prefixes):
            raise unrunnable(url, "isn't allowed here", allowed_words(prefixes))


def allowed_words(prefixes: Sequence[str]) -> str:
    """What a URL may begin with, in words."""
    return f"URLs that begin with {', '.join(prefixes)} (MOK_DATA_URLS)" if prefixes else "none, since MOK_DATA_URLS is unset"


def unrunnable(url: str, problem: str, allowed: str) -> Unrunnable:
    """The error for a URL of a spec that this installation doesn't fetch."""
    fault = {"field": "training.data.urls", "value": url, "problem": problem, "allowed": allowed, "nearest": None}
    return Unrunnable(f"training.data.urls: {url} {problem} (allowed: {allowed})", errors=[fault])


def _parsed(text: str) -> tuple[str, str]:
    parts = _PARTS.fullmatch(text)
    secret = "@" in text or "?" in text
    if not 1 <= len(text) <= URL_LENGTH_MAX or not all("!" <= c <= "~" for c in text) or "\\" in text:
        raise BadUrl(f"isn't 1 to {URL_LENGTH_MAX} printable ASCII characters without spaces and backslashes", secret)
    if parts is None:
        raise BadUrl("isn't a URL", secret)
    scheme, authority, path, query, fragment = parts.groups()
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise BadUrl(f"has the scheme {scheme}", secret)
    if "@" in authority:
        raise BadUrl("holds a user name or a password", secret=True)
    if fragment is not None:
        raise BadUrl("has a fragment", secret)
    return f"{scheme}://{_authority(scheme, authority.lower(), secret)}{_path(path, secret)}", query or ""


def _authority(scheme: str, authority: str, secret: bool) -> str:
    found = _AUTHORITY.fullmatch(authority)
    if found is None or int(found[2] or 1) > 65_535:
        raise BadUrl("has no usable host", secret)
    host, port = found.groups()
    if scheme == "s3" and (port is not None or _BUCKET.fullmatch(host) is None):
        raise BadUrl("has no usable bucket", secret)
    return host if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{host}:{port}"


def _path(path: str, secret: bool) -> str:
    if any(part in (".", "..") for part in path.split("/")):
        raise BadUrl("has a . or .. part", secret)
    if _PERCENT.search(path) or _AMBIGUOUS.search(path):
        raise BadUrl("has an encoded slash, backslash, dot, percent sign or NUL, or a percent sign that encodes nothing", secret)
    return path or "/"
