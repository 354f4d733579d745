"""HiCache: pages move between host and device on threads of their own, layer by layer, under tickets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsv4ctl.controlplane.rooms.states import RoomKey
from dsv4ctl.controlplane.tickets.gate import Gate, TicketRevokedError
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Extent, Guard
from dsv4ctl.engine_adapters.reference.cache import Node
from dsv4ctl.engine_adapters.reference.copies import Copies
from dsv4ctl.engine_adapters.reference.digests import digest_pages
from dsv4ctl.engine_adapters.reference.evidence import Witness, load_mismatch
from dsv4ctl.engine_adapters.reference.facts import FAILED, LOADED, LOADING
from dsv4ctl.engine_adapters.reference.pools import DevicePools, HostPools

#: Of a counter: layers of loads in which a pool's bytes were not those that were sealed.
MISMATCH = "load differs: "


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one space under one load: `host.pages[i]` and `device.pages[i]` are the same page of `nodes[i]`."""

    load: Load
    host: Extent
    device: Extent
    nodes: tuple[Node, ...]


@dataclass(eq=False, slots=True)
class LoadJob:
    """What one request loads from the host. `ticket` is the `load` consumer's right to read the host pages.

    Each space is a load of its own, in this order within a layer: small ones first, so that what waits only for
    the states or the window does not wait for the whole prefix.
    """

    ticket: Ticket
    pieces: tuple[Piece, ...]
    nodes: tuple[Node, ...]
    room: RoomKey  #: the first that asked for it; its end ends nothing here
    verify: bool  #: compared with the digests that were sealed, layer by layer, before it is read
    state: int = LOADING  #: on this rank; every rank drops the nodes if one of them failed


@dataclass(frozen=True, slots=True)
class BackupJob:
    """A device-to-host backup of one node. `ticket` is the `backup` consumer's right to read the device pages."""

    ticket: Ticket
    pieces: tuple[Piece, ...]


class HiCache:
    """Two daemon threads. A job that fails revokes its sharers.

    `told` is called when loads ended (None), or with the reason when one failed; `died` when a thread died.
    """

    def __init__(
        self,
        gate: Gate,
        device: DevicePools,
        host: HostPools,
        copies: Copies,
        *,
        witness: Witness,
        counters: Callable[[str, int], None],
        told: Callable[[str | None], None],
        died: Callable[[str, BaseException], None],
    ) -> None:
        self._gate = gate
        self._device = device
        self._host = host
        self._layers = device.geometry.layers
        self._copies = copies
        self._witness = witness
        self._count = counters
        self._told = told
        self._died = died
        self._loads: queue.SimpleQueue[Sequence[LoadJob] | None] = queue.SimpleQueue()
        self._backups: queue.SimpleQueue[BackupJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(name, jobs, work), name=name, daemon=True)
            for name, jobs, work in (
                ("hicache-load", self._loads, self._load_all),
                ("hicache-backup", self._backups, self._back_up),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._loads.put(None)
        self._backups.put(None)

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Queues the loads of one step as one merged load: layer by layer over all of them."""
        self._loads.put(jobs)

    def keeps(self, space: str, page: int, pools: frozenset[str]) -> frozenset[str]:
        """Which of `pools` the host has memory for at this page."""
        return pools

    def back_up(self, job: BackupJob) -> None:
        self._backups.put(job)

    def _run(self, name: str, jobs: queue.SimpleQueue, work: Callable) -> None:  # type: ignore[type-arg]
        try:
            with self._copies.stream():
                while (job := jobs.get()) is not None:
                    work(job)
        except BaseException as error:  # the thread's last word: nobody else can report it
            self._died(name, error)
            raise

    # ---- host -> device ------------------------------------------------------------------------------

    def _load_all(self, jobs: Sequence[LoadJob]) -> None:
        alive = list(jobs)
        for layer in range(self._layers):
            alive = [job for job in alive if self._load_layer(job, layer)]
        for job in jobs:
            for piece in job.pieces:
                self._gate.end_load(piece.load)
            self._gate.leave(job.ticket)
        for job in alive:
            job.state = LOADED
        self._told(None)

    def _load_layer(self, job: LoadJob, layer: int) -> bool:
        """True if the layer landed as it was sealed; else every load of the job has failed."""
        try:
            self._gate.read(job.ticket, "*", layer)
        except TicketRevokedError as error:
            return self._fail(job, f"the host copy never landed: {error}")
        for piece in job.pieces:
            self._copy(piece, layer, released=not job.verify)
            self._gate.layer_landed(piece.load, layer + 1)
            stale = self._mismatches(piece, layer) if job.verify else []
            if stale:
                self._count("digest_mismatches", len(stale))
                for pool in stale:
                    self._count(f"{MISMATCH}{pool}", 1)
                if self._gate.guarded(Guard.VERDICT):
                    return self._fail(job, f"digest mismatch in {', '.join(stale)} layer {layer} of a hicache load")
            if job.verify:
                self._copies.release(layer, piece.device)
            self._gate.layer_verified(piece.load, layer + 1)
        return True

    def _fail(self, job: LoadJob, why: str) -> bool:
        for piece in job.pieces:
            self._gate.fail_load(piece.load, why)
        job.state = FAILED
        self._told(why)
        return False

    def _copy(self, piece: Piece, layer: int, *, released: bool) -> None:
        """The layer is in place when this returns; `released`: kernels that wait for its pages may read then."""
        for pool in self._pools_at(piece, layer):
            self._copies.load(pool, layer, piece.host.pages, piece.device.pages)
        if released:
            self._copies.release(layer, piece.device)
        self._copies.wait()

    def _pools_at(self, piece: Piece, layer: int) -> list[str]:
        specs = self._device.specs.values()
        return [spec.name for spec in specs if spec.space == piece.device.space and layer in spec.model_layers]

    def _mismatches(self, piece: Piece, layer: int) -> list[str]:
        """Pools of the piece whose bytes of `layer` on the device are not those that were sealed."""
        stale = []
        for pool in self._pools_at(piece, layer):
            spec = self._device.specs[pool]
            local = spec.local_layer(layer)
            rows = spec.valid_rows(0, self._device.geometry.page_tokens)
            found = digest_pages(self._device, pool, layer, piece.device.pages, rows)
            sealed = np.array([node.digests.values[pool][local] for node in piece.nodes], dtype=np.uint64)
            self._count("digests_compared", len(sealed))
            if (found != sealed).any():
                pages = [node.logical for node in piece.nodes]
                self._witness.mismatch("load from the host", load_mismatch(pool, layer, pages, sealed, found))
                stale.append(pool)
        return stale

    # ---- device -> host ------------------------------------------------------------------------------

    def _back_up(self, job: BackupJob) -> None:
        try:
            for layer in range(self._layers):
                self._gate.read(job.ticket, "*", layer)
                self._back_up_layer(job, layer)
        except TicketRevokedError as error:
            for piece in job.pieces:
                self._gate.fail_load(piece.load, str(error))
        for piece in job.pieces:
            self._gate.end_load(piece.load)
        self._gate.leave(job.ticket)

    def _back_up_layer(self, job: BackupJob, layer: int) -> None:
        for piece in job.pieces:
            self._save(piece, layer)
            self._gate.layer_landed(piece.load, layer + 1)

    def _save(self, piece: Piece, layer: int) -> None:
        for pool in self._pools_at(piece, layer):
            if pool in piece.host.pools:
                self._copies.save(pool, layer, piece.device.pages, piece.host.pages)
        self._copies.wait()
