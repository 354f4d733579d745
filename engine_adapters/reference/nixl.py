"""One-sided writes into a peer's memory: the little of NIXL that the transfer half uses, behind one protocol.

Everything here is called on one thread (the transfer loop) and returns at once. `poll` and `notifications` move the
bytes on: NIXL's progress thread never sleeps, and two of them take two cores for nothing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, Protocol

from dsv4ctl.engine_adapters.reference.launch import NIXL
from dsv4ctl.engine_adapters.reference.pools import Region

Status = Literal["busy", "done", "error"]
#: (local address, remote address, bytes)
Span = tuple[int, int, int]
Memory = Literal["DRAM", "VRAM"]

_STATUS: dict[str, Status] = {"PROC": "busy", "DONE": "done", "ERR": "error"}


class NixlError(RuntimeError):
    """NIXL refused a call; nothing was posted."""


@dataclass(eq=False, slots=True)
class Write:
    """One write: its bytes, and the notification that its reader gets once they are in place."""

    remote: str
    status: Status = "busy"
    handle: Any = None


class Transport(Protocol):
    """What sender and receiver need of NIXL."""

    metadata: bytes
    dropped: int  #: handles that could not be released

    def connect(self, metadata: bytes) -> str:
        """Makes a peer's memory writable; returns the peer's name. Raises NixlError."""

    def disconnect(self, remote: str) -> None: ...

    def write(self, remote: str, spans: Sequence[Span], notification: bytes) -> Write:
        """Posts a write. Raises NixlError if nothing was posted; a failed post is a Write in error."""

    def poll(self, write: Write) -> Status: ...

    def abandon(self, write: Write) -> None:
        """The peer is gone: gives up what is left of the write, whatever its state."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """(writer's name, payload) of writes into our memory that completed since the last call."""

    def close(self) -> None: ...


class Nixl:
    """An agent over UCX with all of `regions` registered. Raises NixlError if NIXL is missing or refuses."""

    def __init__(self, name: str, regions: Sequence[Region], memory: Memory = "DRAM", device: int = 0) -> None:
        api = _api()
        self.dropped = 0
        self._memory, self._device = memory, device
        self._errors = _errors(api)
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
            areas = [(region.base, region.nbytes, device, region.pool) for region in regions]
            self._registered = self._agent.register_memory(areas, memory)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise NixlError(f"no NIXL agent over UCX: {error}") from error

    def connect(self, metadata: bytes) -> str:
        try:
            name: str | bytes = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise NixlError(f"the peer's NIXL metadata were refused: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def disconnect(self, remote: str) -> None:
        try:
            self._agent.remove_remote_agent(remote)
        except self._errors:
            self.dropped += 1

    def write(self, remote: str, spans: Sequence[Span], notification: bytes) -> Write:
        local = [(here, size, self._device) for here, _, size in spans]
        there = [(address, size, self._device) for _, address, size in spans]
        try:
            source = self._agent.get_xfer_descs(local, self._memory)
            target = self._agent.get_xfer_descs(there, self._memory)
            handle = self._agent.initialize_xfer("WRITE", source, target, remote, notification)
        except self._errors as error:
            raise NixlError(f"a write to {remote} was refused: {error}") from error
        write = Write(remote, handle=handle)
        try:
            self._settle(write, self._agent.transfer(handle))
        except self._errors:
            # Whether a part of it was posted is unknown: the caller treats it as a write that failed in flight.
            self._settle(write, "ERR")
        return write

    def poll(self, write: Write) -> Status:
        if write.status == "busy":
            try:
                self._settle(write, self._agent.check_xfer_state(write.handle))
            except self._errors:
                self._settle(write, "ERR")
        return write.status

    def abandon(self, write: Write) -> None:
        if write.status == "busy":
            self._settle(write, "ERR")

    def notifications(self) -> list[tuple[str, bytes]]:
        return [(name, payload) for name, payloads in self._agent.get_new_notifs().items() for payload in payloads]

    def close(self) -> None:
        try:
            self._agent.deregister_memory(self._registered)
        except self._errors:
            self.dropped += 1
        del self._agent

    def _settle(self, write: Write, state: str) -> None:
        write.status = _STATUS[state]
        if write.status == "busy":
            return
        handle, write.handle = write.handle, None
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors:
            self.dropped += 1


def _api() -> ModuleType:
    # Read by NIXL when it is imported: its INFO lines say nothing that ours do not.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in NIXL:
        if find_spec(name) is not None:
            return importlib.import_module(f"{name}._api")
    raise NixlError("NIXL is not installed: pip install 'dsv4ctl[reference]' (nixl-cu12), or nixl-cu13 for CUDA 13")


def _errors(api: ModuleType) -> tuple[type[Exception], ...]:
    """What NIXL raises: RuntimeError from its Python layer, and its own classes, which share no public base."""
    bindings = importlib.import_module(api.__name__.rpartition(".")[0] + "._bindings")
    own = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (RuntimeError, *own)
