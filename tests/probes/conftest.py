"""The bounds of the probes are on what is waited for, whatever else the machine does meanwhile."""

from __future__ import annotations

from deliberate import pytest_asyncio_loop_factories  # noqa: F401 - a hook
