"""No deadline passes because this machine is slow: the control plane and its engines live in one loop."""

from __future__ import annotations

from deliberate import pytest_asyncio_loop_factories  # noqa: F401 - a hook
