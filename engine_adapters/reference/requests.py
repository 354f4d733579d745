"""A request as the engine's threads pass it on, and what comes back to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey


class Token(NamedTuple):
    """One generated token."""

    id: int


class Finished(NamedTuple):
    """The last thing emitted for a request. `reason`: `stop`, `length`, or `abort` (then `message` says why)."""

    reason: str
    message: str | None
    source: AbortSource | None
    prompt_tokens: int
    cached_tokens: int


Output = Token | Finished


@dataclass(frozen=True, slots=True)
class Request:
    """`emit` may be called from any thread; it must not block."""

    rid: str
    key: RoomKey
    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    bootstrap_host: str | None  #: where a decode engine finds the prefill engine's peer channel
    bootstrap_port: int | None
    emit: Callable[[Output], None]


class RequestRefusedError(ValueError):
    """The request can't be served; the message names what is wrong and what would be right (HTTP 400)."""


class BusyError(RuntimeError):
    """The engine is not idle (HTTP 400 for /flush_cache, as SGLang answers)."""


class Serving(Protocol):
    """What the HTTP server needs of the engine. Every method is thread-safe and returns at once."""

    def room_of(self, room: int | None) -> RoomKey:
        """The live generation of a room, or (single engine, None) of none. Raises RequestRefusedError."""

    def submit(self, request: Request) -> None:
        """Raises RequestRefusedError: too long, empty, unknown room, room already has its request."""

    def abort(self, rid: str | None, reason: str) -> int:
        """Aborts the requests whose rid starts with `rid` (SGLang's rule), or all (None); returns how many."""

    def flush(self) -> None:
        """Drops every cached page, device and host. Raises BusyError while a request lives."""

    def pause_generation(self, *, abort: bool) -> None:
        """Computes nothing, from the step after this one on, until told to continue. Requests are kept, or aborted."""

    def continue_generation(self) -> None: ...

    def info(self) -> dict[str, Any]:
        """For /server_info: configuration, queues, ledger counts."""

    def fault(self) -> str | None:
        """Why the engine cannot serve (a dead thread, no peer), or None."""
