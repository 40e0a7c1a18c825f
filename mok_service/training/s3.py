"""Files in S3 and in stores that speak its language, by fsspec's s3fs (the extra `s3`).

Credentials come from variables of the worker's environment, by the list below, and from nowhere else: no files, no metadata
service, no other variables that name an endpoint or a proxy. Without credentials, requests are anonymous.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from mok_service.errors import SourceUnavailable, Unrunnable
from mok_service.net import Refused, Resolve, choose, resolve_name
from mok_service.settings import Network, Settings
from mok_service.urls import scheme_of

VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
BLOCK_BYTES: Final = 8 << 20
CAUSE_LENGTH_MAX: Final = 300
REGION: Final = "us-east-1"
TIMEOUTS: Final = {"connect_timeout": 10, "read_timeout": 30}  # seconds


def allowed_variables(settings: Settings) -> frozenset[str]:
    """The variables that workers need; none unless data may come from S3."""
    return frozenset(VARIABLES) if any(scheme_of(prefix) == "s3" for prefix in settings.data_urls) else frozenset()


def s3_pieces(
    url: str, endpoint: str | None, environment: Mapping[str, str], networks: Sequence[Network], resolve: Resolve | None
) -> Generator[bytes, None, None]:
    """The bytes of s3://bucket/key. Raises Unrunnable without s3fs, Refused by the address, SourceUnavailable for the rest."""
    try:
        filesystem = _filesystem(endpoint, environment, networks, resolve)
    except ModuleNotFoundError as missing:
        need = f"{url}: S3 needs the package {missing.name}: pip install 'mok-service[s3]'"
        raise Unrunnable(need, package=missing.name) from None
    yield from pieces(filesystem, url)


def pieces(filesystem: Any, url: str) -> Generator[bytes, None, None]:
    """The bytes of s3://bucket/key by an fsspec file system."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    try:
        with filesystem.open(f"{bucket}/{unquote(key)}", "rb", block_size=BLOCK_BYTES, cache_type="readahead") as file:
            while piece := file.read(BLOCK_BYTES):
                yield piece
    except FileNotFoundError:
        raise SourceUnavailable(f"{url}: there is no such object", url=url) from None
    except Exception as error:  # s3fs raises OSError, botocore's errors, and those of the HTTP library
        refused = _refused(error)
        if refused is not None:
            raise refused from None
        raise SourceUnavailable(f"{url}: {type(error).__name__}: {str(error)[:CAUSE_LENGTH_MAX]}", url=url) from None


def _refused(error: BaseException | None) -> Refused | None:
    """The refusal of an address that libraries in between have wrapped."""
    while error is not None and not isinstance(error, Refused):
        error = error.__cause__ or error.__context__
    return error


def _filesystem(
    endpoint: str | None, environment: Mapping[str, str], networks: Sequence[Network], resolve: Resolve | None
) -> Any:
    config: dict[str, Any] = {
        **TIMEOUTS, "retries": {"max_attempts": 2}, "proxies": {}, "ignore_configured_endpoint_urls": True,
        "s3": {"addressing_style": "auto" if endpoint is None else "path"},
    }
    s3fs = importlib.import_module("s3fs")
    if endpoint is None:
        config["connector_args"] = {"resolver": _guarded_resolver(networks, resolve or resolve_name)}
    key = environment.get("AWS_ACCESS_KEY_ID")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or REGION
    return s3fs.S3FileSystem(
        anon=key is None, key=key, secret=environment.get("AWS_SECRET_ACCESS_KEY"), token=environment.get("AWS_SESSION_TOKEN"),
        endpoint_url=endpoint, client_kwargs={"region_name": region}, config_kwargs=config, skip_instance_cache=True,
        use_listings_cache=False,
    )


def _guarded_resolver(networks: Sequence[Network], resolve: Resolve) -> Any:
    """How the HTTP library below s3fs finds addresses: only those that `mok_service.net` lets it connect to."""
    abc = importlib.import_module("aiohttp.abc")

    class Guarded(abc.AbstractResolver):  # type: ignore[misc, name-defined]
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
            found = await asyncio.to_thread(resolve, host, port)
            address = choose(host, found, networks)
            kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
            return [{"hostname": host, "host": str(address), "port": port, "family": kind, "proto": 0,
                     "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV}]

        async def close(self) -> None:
            pass

    return Guarded()
