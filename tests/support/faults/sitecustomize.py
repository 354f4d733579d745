"""Faults for the engines of a real deployment: a signal makes the process behave as if a defect had struck it.

A test puts this folder on the Python path of its deployment (`deployed(faults=True)`); the product knows nothing of it.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_REFERENCE = "dsv4ctl.engine_adapters.reference"


def _hangs(*_: Any) -> None:
    threading.Event().wait()


def _dies(*_: Any) -> None:
    raise RuntimeError("a fault of the test")


def _from_now_on(module: str, name: str, method: str, does: Callable[..., None]) -> Callable[..., None]:
    def strike(*_: Any) -> None:
        setattr(getattr(importlib.import_module(f"{_REFERENCE}.{module}"), name), method, does)

    return strike


#: As `deployment.Fault` names them.
_FAULTS = {
    signal.SIGUSR1: _from_now_on("step", "StepLoop", "_step", _hangs),
    signal.SIGUSR2: _from_now_on("step", "StepLoop", "_round", _hangs),
    signal.SIGRTMIN: _from_now_on("inbox", "Inbox", "drain", _dies),
}

if "DSV4CTL_ENGINE" in os.environ:
    for number, strike in _FAULTS.items():
        signal.signal(number, strike)
