"""The URL that a rank says at its Hello, and the one that the gateway tells."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from dsv4ctl.controlplane.link.url import local_url, url


@pytest.mark.parametrize(
    ("host", "hostname"),
    [("127.0.0.1", "127.0.0.1"), ("node-1", "node-1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("fd00::7", "fd00::7")],
)
def test_a_server_is_reached_where_it_listens(host: str, hostname: str) -> None:
    parts = urlsplit(local_url(host, 8000))
    assert (parts.scheme, parts.hostname, parts.port) == ("http", hostname, 8000)


@pytest.mark.parametrize(
    ("host", "told"),
    [("10.0.0.7", "10.0.0.7"), ("node-1", "node-1"), ("fd00::7", "[fd00::7]"), ("[fd00::7]", "[fd00::7]")],
)
def test_an_address_with_colons_gets_brackets_once(host: str, told: str) -> None:
    assert url("tcp", host, 5) == f"tcp://{told}:5"
