"""The bounds of the probes are on what is waited for, whatever else the machine does meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deliberate import DeliberateLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], DeliberateLoop]]:
    return {"deliberate": DeliberateLoop}
