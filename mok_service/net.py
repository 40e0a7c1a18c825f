"""Connections that the service makes for its users: never to this machine, nor to the network behind it.

A name is resolved once, every address that it has is checked, and the connection goes to one of those addresses: a name that
points elsewhere a moment later changes nothing. Redirects are a matter of the client: don't follow them.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from mok_service.errors import MokError
from mok_service.settings import Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]

# Not for everybody, though not every version of Python's tables says so: protocol assignments (one of them a cloud's metadata),
# old relays, private NAT64; and a public number that is answered by a cloud's own machinery.
_NOT_PUBLIC: Final = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "168.63.129.16/32")))
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class Refused(MokError):
    """An address that the service doesn't connect to for users."""

    http_status, exit_status, code = 422, 2, "address_refused"


class GuardedTransport(httpx.HTTPTransport):
    """An httpx transport that connects to public addresses only, and to `allowed` networks.

    Give it to a client with `trust_env=False` (a proxy would connect for us) and without `follow_redirects`. Raises Refused.
    """

    def __init__(self, allowed: Sequence[Network] = (), resolve: Resolve | None = None) -> None:
        # Connections aren't kept: they are found again by address, and two names may share one.
        super().__init__(retries=0, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
        logger = logging.getLogger("httpcore")  # at DEBUG it writes whole URLs, also of redirects, whose queries may be secrets
        logger.setLevel(max(logging.INFO, logger.getEffectiveLevel()))
        self._allowed = tuple(allowed)
        self._resolve = resolve or resolve_name

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        address = choose(url.host, self._resolve(url.host, port), self._allowed)
        pinned = httpx.Request(
            request.method, url.copy_with(host=str(address)), headers=request.headers, stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},  # the certificate must be that of the name
        )
        return super().handle_request(pinned)


def resolve_name(host: str, port: int) -> list[str]:
    """All addresses of a name. Raises httpx.ConnectError for one that has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpx.ConnectError(f"{host} has no address: {error}") from None
    return [str(info[4][0]) for info in found]


def choose(host: str, addresses: Sequence[str], allowed: Sequence[Network] = ()) -> Address:
    """The address to connect to: the first one. Raises Refused if any of them isn't allowed: such a name is a trap."""
    if not addresses:
        raise httpx.ConnectError(f"{host} has no address")
    checked = [ipaddress.ip_address(text.partition("%")[0]) for text in addresses]
    for address in checked:
        if not is_allowed(address, allowed):
            raise Refused(f"{host} has the address {address}, which isn't public; MOK_OUTBOUND_NETWORKS allows others",
                          host=host, address=str(address))
    return checked[0]


def is_allowed(address: Address, allowed: Sequence[Network] = ()) -> bool:
    """Whether an address is public or in an allowed network; one that wraps another must be so with both."""
    if any(address in network for network in allowed):
        return True
    inner = _wrapped(address)
    if inner is not None:
        return is_allowed(inner, allowed)
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _wrapped(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address to which an IPv6 address leads: mapped, 6to4, Teredo, NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
