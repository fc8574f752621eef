"""Where a server is, and what it takes to be let in."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec


class ServerAddress(msgspec.Struct, frozen=True):
    """One vLLM server."""

    url: str
    """`http://host:port`, no path."""
    api_key: str | None = None
    """Sent as a bearer token with every request, control routes included; None on loopback only."""

    def __repr__(self) -> str:
        return f"ServerAddress({self.url!r})"  # the key must not reach a log

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
