"""The prefill rank's sends: each sealed page goes to the peers under a `sender` ticket, by one NIXL write."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.types import Extent
from dsv4ctl.engine_adapters.reference.digests import PageDigests
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest


@dataclass(frozen=True, slots=True)
class SealedChunk:
    """One logical page of a prompt, to be sent.

    `extents`: one page each, at the generation meant: space `full`, `swa` if the page may lie in the window,
    and `state` on the prompt's tail page alone (the chunk with a `state` extent is the last of the room).
    `digests` were taken when the page was sealed (of the state: at the prompt's end).
    """

    logical: int
    extents: tuple[Extent, ...]
    digests: PageDigests


class Sender:
    def chunk(self, key: RoomKey, chunk: SealedChunk) -> None:
        """Thread-safe; returns at once. Chunks of a room may come in any order, before or after `finish`."""
        raise NotImplementedError

    def finish(self, key: RoomKey, manifest: Manifest) -> None:
        """Thread-safe; returns at once. `manifest.digests` is filled in here, from the chunks."""
        raise NotImplementedError
