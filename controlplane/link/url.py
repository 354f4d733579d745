"""Where a server of this host is reached."""

from __future__ import annotations

#: A server that listens on all addresses is reached on the loopback.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int) -> str:
    """The URL under which a process of this host reaches what listens on `host`, a name or an address."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
