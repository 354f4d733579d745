"""The step loop: one thread that admits, computes one chunk of every running sequence, and hands results on.

What other threads want of it comes through one mailbox and is applied between two steps, in order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource
from dsv4ctl.controlplane.tickets.gate import TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.decode import Decode
from dsv4ctl.engine_adapters.reference.hicache import BackupJob, HiCache, LoadJob
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.prefill import Prefill
from dsv4ctl.engine_adapters.reference.sequence import Chunk
from dsv4ctl.engine_adapters.reference.sequences import Sequence

#: Seconds between two looks for pages while a sequence waits for them and nothing runs.
_LOOK_AGAIN_SECONDS = 0.01
#: The room went away while its sequence was here: it is dropped by its own message.
GONE = (Refusal, UnknownRoomError)


class StepLoop:
    """`prefill` None on a decode engine, `decode` None on a prefill engine, both on a single one."""

    def __init__(
        self,
        agent: Agent,
        model: Model,
        prefill: Prefill | None,
        decode: Decode | None,
        hicache: HiCache | None,
        max_batch: int,
    ) -> None:
        self._agent = agent
        self._model = model
        self._prefill = prefill
        self._decode = decode
        self._hicache = hicache
        self._max_batch = max_batch
        self._wakeup = threading.Condition()
        self._mail: deque[Callable[[], None]] = deque()
        self._stopping = False
        self.waiting: deque[Sequence] = deque()
        self.transferring: dict[int, Sequence] = {}  #: by room number: admitted, bytes not all here
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.steps = 0

    # ---- from any thread -----------------------------------------------------------------------------

    def post(self, message: Callable[[], None]) -> None:
        """`message` is called by the loop between two steps."""
        with self._wakeup:
            self._mail.append(message)
            self._wakeup.notify()

    def submit(self, sequence: Sequence) -> None:
        self.post(lambda: self.waiting.append(sequence))

    def drop(self, sequence: Sequence) -> None:
        """The room is aborting."""
        self.post(lambda: self._drop(sequence))

    def ready(self, sequence: Sequence, manifest: Manifest) -> None:
        """The room's bytes landed and are verified."""
        self.post(lambda: self._start(sequence, manifest))

    def stop(self) -> None:
        self._stopping = True
        self.post(lambda: None)

    def work(self) -> int:
        """What this loop could go on with by itself: who waits for pages waits for rooms, which have deadlines."""
        return len(self._mail) + len(self.prefilling) + len(self.decoding)

    def queues(self) -> dict[str, int]:
        return {
            "waiting": len(self.waiting),
            "prefilling": len(self.prefilling),
            "transferring": len(self.transferring),
            "decoding": len(self.decoding),
        }

    # ---- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `stop`. Anything raised here is a defect: the caller reports it and ends the engine."""
        with torch.inference_mode():
            while not self._stopping:
                self._read_mail(wait=not (self.prefilling or self.decoding))
                self._admit()
                if self.prefilling or self.decoding:
                    self._step()

    def _read_mail(self, wait: bool) -> None:
        with self._wakeup:
            # Whatever gives this loop work posts a message - except a page that comes back: any thread may be its
            # last user, so whoever waits for pages looks again. With nobody waiting there is no deadline.
            again = _LOOK_AGAIN_SECONDS if self.waiting else None
            self._wakeup.wait_for(lambda: bool(self._mail) or not wait or self._stopping, again)
            mail, self._mail = self._mail, deque()
        for message in mail:
            message()

    def _admit(self) -> None:
        """First come, first served, of those that may begin; the first without pages makes the others wait."""
        jobs: list[LoadJob] = []
        for sequence in list(self.waiting):
            if len(self.prefilling) + len(self.decoding) >= self._max_batch:
                break
            try:
                if self._prefill is not None and not self._prefill.may_begin(sequence):
                    continue
                admitted = self._admit_one(sequence, jobs)
            except GONE:
                admitted = True
            if not admitted:
                break
            self.waiting.remove(sequence)
        if jobs and self._hicache is not None:
            self._hicache.load(jobs)

    def _admit_one(self, sequence: Sequence, jobs: list[LoadJob]) -> bool:
        if self._prefill is not None:
            if not self._prefill.admit(sequence, jobs):
                return False
            self.prefilling.append(sequence)
            return True
        assert self._decode is not None
        if not self._decode.admit(sequence):
            return False
        self.transferring[sequence.key.room] = sequence
        return True

    def _step(self) -> None:
        """One chunk of every sequence, layers outermost: a batch in which nobody depends on anybody."""
        batch = [(sequence, self._chunk(sequence)) for sequence in (*self.prefilling, *self.decoding)]
        hidden = {id(sequence): self._model.embed(chunk) for sequence, chunk in batch}
        for layer in range(self._model.geometry.layers):
            for sequence, chunk in batch:
                if sequence.finished:  # aborted: what it computes goes nowhere, and its peer waits for this step's end
                    hidden.pop(id(sequence), None)
                elif id(sequence) in hidden:
                    self._forward_layer(layer, sequence, chunk, hidden)
        self.steps += 1
        backups: list[BackupJob] = []
        for sequence, chunk in batch:
            if id(sequence) in hidden:
                self._computed(sequence, chunk, hidden[id(sequence)], backups)
        if self._hicache is not None:
            for job in backups:
                self._hicache.back_up(job)

    def _chunk(self, sequence: Sequence) -> Chunk:
        if sequence.computed < sequence.prompt:
            assert self._prefill is not None
            return self._prefill.chunk(sequence)
        assert self._decode is not None
        return self._decode.chunk(sequence)

    def _forward_layer(self, layer: int, sequence: Sequence, chunk: Chunk, hidden: dict[int, torch.Tensor]) -> None:
        try:
            hidden[id(sequence)] = self._model.forward_layer(layer, hidden[id(sequence)], chunk, sequence.read)
        except TicketRevokedError as error:
            del hidden[id(sequence)]
            self._agent.abort(sequence.key, AbortSource.ENGINE_FAULT, str(error))
        except TicketTimeoutError as error:
            del hidden[id(sequence)]
            self._agent.abort(sequence.key, AbortSource.DEADLINE, str(error))

    def _computed(self, sequence: Sequence, chunk: Chunk, hidden: torch.Tensor, backups: list[BackupJob]) -> None:
        try:
            if sequence.computed >= sequence.prompt:
                self._decoded(sequence, chunk, hidden)
            elif self._prefill is not None and self._prefill.computed(sequence, chunk.end, backups):
                self._prompt_done(sequence, self._model.next_token(hidden))
        except GONE:
            pass  # the room is aborting: its drop is in the mailbox
        except LedgerError as error:
            self._agent.abort(sequence.key, AbortSource.ENGINE_FAULT, f"the ledger refused: {error}")

    def _decoded(self, sequence: Sequence, chunk: Chunk, hidden: torch.Tensor) -> None:
        assert self._decode is not None
        self._decode.computed(sequence, chunk.end)
        sequence.emit(self._model.next_token(hidden))
        self._agent.counters["tokens_out"] += 1
        self._finish_if_over(sequence)

    def _prompt_done(self, sequence: Sequence, first_token: int) -> None:
        assert self._prefill is not None
        self._agent.note(sequence.key, sealed=self._prefill.sealed(sequence))
        if self._decode is None:
            self.prefilling.remove(sequence)
            self._prefill.hand_over(sequence, first_token)
            sequence.emit(first_token)
            sequence.finish("length")
            self._agent.apply(sequence.key, lambda writer: writer.forward_end())
            return
        # Refused on an aborted room: the sequence stays where its drop finds it.
        self._agent.apply(sequence.key, lambda reader: reader.decoding())
        self.prefilling.remove(sequence)
        self.decoding.append(sequence)
        sequence.emit(first_token)
        self._finish_if_over(sequence)

    # ---- mail ----------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence, manifest: Manifest) -> None:
        assert self._decode is not None
        if self.transferring.pop(sequence.key.room, None) is None:
            return
        try:
            self._decode.start(sequence, manifest)
            self.decoding.append(sequence)
            self._finish_if_over(sequence)
        except GONE:
            pass  # the room is aborting: its drop is in the mailbox
        except LedgerError as error:
            self._agent.abort(sequence.key, AbortSource.ENGINE_FAULT, f"the ledger refused: {error}")

    def _finish_if_over(self, sequence: Sequence) -> None:
        assert self._decode is not None
        reason = self._decode.over(sequence)
        if reason is not None:
            self._decode.finish(sequence, reason)
            self.decoding.remove(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Between two steps: no forward of the sequence runs any more."""
        running = sequence in self.prefilling or sequence in self.decoding
        for queue in (self.waiting, self.prefilling, self.decoding):
            if sequence in queue:
                queue.remove(sequence)
        self.transferring.pop(sequence.key.room, None)
        if running:
            with contextlib.suppress(UnknownRoomError):  # it ended already
                self._agent.apply(sequence.key, lambda half: half.forward_end())
