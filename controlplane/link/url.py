"""Where a server of this host is reached."""

from __future__ import annotations

#: A server that listens on all addresses is reached on the loopback.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int) -> str:
    """The URL under which a process of this host reaches what listens on `host`, a name or an address."""
    return url("http", _LOOPBACK.get(host, host), port)


def url(scheme: str, host: str, port: int) -> str:
    """An IPv6 address, with brackets (RFC 3986) or without, gets them."""
    bare = host.strip("[]")
    return f"{scheme}://[{bare}]:{port}" if ":" in bare else f"{scheme}://{bare}:{port}"
