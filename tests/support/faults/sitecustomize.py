"""Faults for the engines of a real deployment: a signal makes the process behave as if a defect had struck it.

A test puts this folder on the Python path of its deployment (`deployed(faults=True)`); the product knows nothing of it.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

_REFERENCE = "dsv4ctl.engine_adapters.reference"


def _hangs(*_: Any) -> None:
    threading.Event().wait()


def _dies(*_: Any) -> None:
    raise RuntimeError("a fault of the test")


def _fails(*_: Any) -> str:
    return "failed"


def _says_it_again(send: Callable[..., None]) -> Callable[..., None]:
    """An ack goes out twice, and once more before the next one: late, and of a room that is over."""
    last: dict[int, Any] = {}

    def sent(self: Any, frame: Any) -> None:
        if type(frame).__name__ in ("AbortAck", "PeerAck"):
            if id(self) in last:
                send(self, last[id(self)])
            last[id(self)] = frame
            send(self, frame)
        send(self, frame)

    return sent


#: Seconds that a slow engine takes longer for each step, and for each look at what landed.
_SLOW = 0.5


def _slowly(plain: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(_SLOW)
        return plain(*arguments, **options)

    slow.plain = plain  # type: ignore[attr-defined]
    return slow


def _slow_or_not() -> None:
    receiver, loop = (importlib.import_module(f"{_REFERENCE}.{name}") for name in ("receiver", "step"))
    for owner, name in ((loop.StepLoop, "_step"), (receiver, "digest_landed")):
        now = getattr(owner, name)
        setattr(owner, name, now.plain if hasattr(now, "plain") else _slowly(now))


def _becomes(module: str, name: str, method: str, does: Callable[..., Any]) -> None:
    setattr(getattr(importlib.import_module(module), name), method, does)


def _acks_repeat() -> None:
    for module, name in ((f"{_REFERENCE}.peer", "Channel"), ("dsv4ctl.controlplane.link.client", "LinkClient")):
        send = getattr(importlib.import_module(module), name).send
        if send.__name__ == "send":  # not struck before
            _becomes(module, name, "send", _says_it_again(send))


#: As `deployment.Fault` names them.
_FAULTS: dict[int, Callable[[], None]] = {
    signal.SIGUSR1: lambda: _becomes(f"{_REFERENCE}.step", "StepLoop", "_step", _hangs),
    signal.SIGUSR2: lambda: _becomes(f"{_REFERENCE}.step", "StepLoop", "_round", _hangs),
    signal.SIGRTMIN: lambda: _becomes(f"{_REFERENCE}.inbox", "Inbox", "drain", _dies),
    signal.SIGRTMIN + 1: lambda: _becomes(f"{_REFERENCE}.nixl", "Nixl", "poll", _fails),
    signal.SIGRTMIN + 2: _acks_repeat,
    signal.SIGRTMIN + 3: _slow_or_not,
}

if "DSV4CTL_ENGINE" in os.environ:
    for number in _FAULTS:
        signal.signal(number, lambda struck, _: _FAULTS[struck]())
