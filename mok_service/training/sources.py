"""Data files from elsewhere: by HTTP(S) and from S3, into a cache where each file lies under its digest.

1. The URL, and every redirect's target, begins with a prefix that the service allows.
2. The connection goes to a public address, or to one that the service allows (`mok_service.net`). So HTTP is spoken by our own
   transport; fsspec's would resolve a name and follow redirects without asking. S3 goes through fsspec's s3fs.
3. The bytes are streamed beside the cache's files, hashed, compared with the digest that is known, and renamed.
4. What is read from the cache is hashed again, each time.

A file whose digest is known, from the job's manifest or from its spec, is taken from the cache without the network.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Final, Self
from urllib.parse import urljoin

import httpx
from filelock import FileLock, Timeout

from mok_service.errors import SourceDrift, SourceUnavailable
from mok_service.net import GuardedTransport, Refused, Resolve
from mok_service.provenance.manifest import ManifestFile
from mok_service.settings import Settings
from mok_service.spec import RemoteFile
from mok_service.training.s3 import s3_pieces
from mok_service.urls import BadUrl, allowed_words, matches, refuse_unless_allowed, scheme_of, unrunnable, with_query

GIB: Final = 1 << 30
TRIES_MAX: Final = 3
REDIRECTS_MAX: Final = 5
TIMEOUT: Final = {"connect": 10.0, "read": 30.0, "write": 10.0, "pool": 10.0}  # seconds; read: between two pieces
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_BUSY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})

Pieces = Generator[bytes, None, None]
Fetch = Callable[[str], Pieces]  # a URL -> the file's bytes; raises TryAgain


class TryAgain(Exception):
    """A failure that may be over soon."""


@dataclass(frozen=True, slots=True)
class Remote:
    """What a worker may fetch and how: plain values, which travel with an attempt."""

    prefixes: tuple[str, ...]       # URL prefixes in normal form; none: nothing may be fetched
    networks: tuple[str, ...]       # that may be connected to besides public ones
    s3_endpoint: str | None
    cache: str                      # a folder
    cache_bytes_max: int
    file_bytes_max: int
    fetch_seconds_max: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.data_urls, tuple(map(str, settings.outbound_networks)), settings.data_s3_endpoint,
            str(settings.data_cache()), int(settings.data_cache_gib_max * GIB), int(settings.data_file_gib_max * GIB),
            settings.data_fetch_seconds_max,
        )


class Sources:
    """Reads remote files; `told` hears of each one fetched. Tests give `resolve`, `s3` (bytes of an s3:// URL) and `sleep`."""

    def __init__(
        self, remote: Remote, told: Callable[[str], None] = lambda _: None, *, resolve: Resolve | None = None,
        s3: Fetch | None = None, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._remote, self._told, self._sleep = remote, told, sleep
        self._cache = Cache(Path(remote.cache), remote.cache_bytes_max)
        self._networks, self._resolve = [ip_network(text) for text in remote.networks], resolve
        s3 = s3 or (lambda url: s3_pieces(url, remote.s3_endpoint, os.environ, self._networks, resolve))
        self._fetch: Mapping[str, Fetch] = {"https": self._http, "http": self._http, "s3": s3}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """By this process's own settings."""
        return cls(Remote.of(settings))

    def read(self, file: RemoteFile, recorded: ManifestFile | None = None) -> bytes:
        """A file's bytes. `recorded` is what the job's manifest has of it.

        Raises SourceDrift when the bytes aren't those of the spec or the manifest; Unrunnable for a URL or an address that this
        service doesn't allow, and for a file that is too large; SourceUnavailable when it can't be fetched.
        """
        refuse_unless_allowed([file.url], self._remote.prefixes)
        known = file.sha256 or (recorded.sha256 if recorded is not None else None)
        with self._cache.locked(file.url, self._remote.fetch_seconds_max) as partial:
            content = None if known is None else self._cache.get(known)
            if content is None:
                try:
                    known = self._fetched(file, recorded, partial)
                finally:
                    partial.unlink(missing_ok=True)
                content = self._cache.get(known)
        if content is None:
            raise SourceUnavailable(f"{file.url}: the cache {self._remote.cache} lost the file that was fetched", url=file.url)
        assert known is not None, "content was found by its digest"
        _check(file, recorded, len(content), known)
        return content

    def _fetched(self, file: RemoteFile, recorded: ManifestFile | None, partial: Path) -> str:
        """The SHA-256 of a file that was fetched, checked and put into the cache."""
        self._told(f"fetching {file.url}")
        try:
            size, sha256 = self._tried(file.url, partial)
            _check(file, recorded, size, sha256)
            self._cache.put(partial, sha256, size)
        except Refused as error:
            raise unrunnable(file.url, f"isn't connected to: {error.message}", "a host with a public address") from None
        except OSError as error:
            raise SourceUnavailable(f"{file.url}: it can't be kept in {partial.parent}: {error}", url=file.url) from None
        self._told(f"fetched {file.url}: {size:,} bytes, sha256:{sha256}")
        return sha256

    def _tried(self, url: str, partial: Path) -> tuple[int, str]:
        """Size and SHA-256 of the bytes that were written. Each try begins anew."""
        deadline = time.monotonic() + self._remote.fetch_seconds_max
        for number in range(1, TRIES_MAX + 1):
            try:
                return self._stream(url, partial, deadline)
            except (TryAgain, httpx.TransportError) as error:
                cause = str(error) or type(error).__name__
                if number == TRIES_MAX:
                    raise SourceUnavailable(f"{url}: {cause} ({TRIES_MAX} tries)", url=url) from None
                self._told(f"{url}: {cause}; trying again")
                self._sleep(2.0 ** (number - 1))
        raise AssertionError("the last try returns or raises")

    def _stream(self, url: str, partial: Path, deadline: float) -> tuple[int, str]:
        limit = min(self._remote.file_bytes_max, self._remote.cache_bytes_max)
        size, digest = 0, hashlib.sha256()
        with partial.open("wb") as out, closing(self._fetch[scheme_of(url)](url)) as pieces:
            for piece in pieces:
                size += len(piece)
                if size > limit:
                    limits = "at most MOK_DATA_FILE_GIB_MAX and MOK_DATA_CACHE_GIB_MAX"
                    raise unrunnable(url, f"has more than {limit} bytes", limits)
                if time.monotonic() > deadline:
                    raise SourceUnavailable(
                        f"{url}: {size} bytes came within {self._remote.fetch_seconds_max:g} s, and it didn't end; "
                        "MOK_DATA_FETCH_SECONDS_MAX allows more", url=url,
                    )
                digest.update(piece)
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        return size, digest.hexdigest()

    def _http(self, url: str) -> Pieces:
        """The bytes at an HTTP(S) URL. The transport is used without a client, which would log the queries of redirects."""
        target = url
        with GuardedTransport(self._networks, self._resolve) as transport:
            for _ in range(REDIRECTS_MAX + 1):
                request = httpx.Request(
                    "GET", target, headers={"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "mok-service"},
                    extensions={"timeout": TIMEOUT},
                )
                response = transport.handle_request(request)
                response.request = request
                with closing(response):
                    if response.status_code in _REDIRECTS:
                        target = self._redirected(url, target, response.headers.get("Location", ""))
                        continue
                    _refuse_answer(url, response)
                    yield from response.iter_raw()  # pieces as they come, so that the deadline is seen
                    return
        raise unrunnable(url, f"leads through more than {REDIRECTS_MAX} redirects", f"at most {REDIRECTS_MAX}")

    def _redirected(self, url: str, at: str, location: str) -> str:
        """Where a redirect leads. Its query may be a signature: it is sent, and shown nowhere."""
        try:
            normal, query = with_query(urljoin(at, location))
        except (BadUrl, ValueError) as error:
            problem = error.problem if isinstance(error, BadUrl) else "isn't a URL"
            raise unrunnable(url, f"leads to what {problem}", "a redirect to an allowed URL") from None
        if scheme_of(normal) != "https" and (scheme_of(at) == "https" or scheme_of(normal) != "http"):
            raise unrunnable(url, f"leads from {scheme_of(at)} to {normal}", "https://, and from http:// also http://")
        if not matches(normal, self._remote.prefixes):
            raise unrunnable(url, f"leads to {normal}, which isn't allowed here", allowed_words(self._remote.prefixes))
        return normal + query


def _refuse_answer(url: str, response: httpx.Response) -> None:
    if response.status_code in _BUSY:
        raise TryAgain(f"the server answered {response.status_code}")
    if response.status_code != 200:
        raise SourceUnavailable(f"{url}: the server answered {response.status_code}", url=url, status=response.status_code)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise SourceUnavailable(f"{url}: the server sent it in the encoding {encoding!r}, which wasn't asked for", url=url)


def _check(file: RemoteFile, recorded: ManifestFile | None, size: int, sha256: str) -> None:
    """Raises SourceDrift naming the file, what was expected and what was found."""
    wanted = [("spec", file.size, file.sha256)]
    if recorded is not None:
        wanted.append(("record", recorded.size, recorded.sha256))
    for where, its_size, its_sha256 in wanted:
        if its_size in (None, size) and its_sha256 in (None, sha256):
            continue
        expected = " ".join(
            text for value, text in ((its_size, f"{its_size} bytes"), (its_sha256, f"sha256:{its_sha256}")) if value is not None
        )
        raise SourceDrift(
            f"data file {file.url!r} isn't the one of the {where}: expected {expected}, got {size} bytes sha256:{sha256}",
            reason="source_drift", file=file.url, expected=expected, got=f"{size} bytes sha256:{sha256}",
        )


class Cache:
    """Files by their digest in one folder, at most about `bytes_max` in all. Any number of processes may share it."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max

    @contextmanager
    def locked(self, url: str, seconds_max: float) -> Iterator[Path]:
        """While it lasts, no other process fetches this URL. Gives a path to write to; whatever lies there is incomplete."""
        name = hashlib.sha256(url.encode()).hexdigest()
        partials = self._folder / "partial"
        try:
            for folder in (partials, self._folder / "sha256"):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(partials / f"{name}.lock", timeout=seconds_max):
                yield partials / name
        except Timeout:
            raise SourceUnavailable(f"{url}: another process has been fetching it for {seconds_max:g} s", url=url) from None

    def get(self, sha256: str) -> bytes | None:
        """The bytes that have this digest; None where they aren't there. A file with other bytes is removed."""
        path = self._path(sha256)
        try:
            content = path.read_bytes()
            os.utime(path)  # what is used stays
        except FileNotFoundError:
            return None
        if hashlib.sha256(content).hexdigest() == sha256:
            return content
        path.unlink(missing_ok=True)
        return None

    def put(self, partial: Path, sha256: str, size: int) -> None:
        """Takes over a complete file, after making room for it."""
        files = []
        for path in (self._folder / "sha256").iterdir():
            with suppress(FileNotFoundError):  # another process made room
                found = path.stat()
                files.append((found.st_mtime_ns, found.st_size, path))
        total = size + sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in sorted(files):
            if total <= self._bytes_max:
                break
            path.unlink(missing_ok=True)
            total -= bytes_
        partial.replace(self._path(sha256))

    def _path(self, sha256: str) -> Path:
        return self._folder / "sha256" / sha256
