from __future__ import annotations

import pytest

from small_gate import SmallGate


@pytest.fixture
def gate() -> SmallGate:
    return SmallGate()
