"""The step loop: one thread that agrees with the other ranks, admits, computes one chunk of every running sequence.

It alone owns what the sequences hold: pages, leases, tickets, cached nodes. Other threads leave facts (an abort,
landed bytes, a quiet room) on a sequence and wake the loop; the facts take effect between two steps, in the same
step on every rank (`agreement`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch

from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.agreement import Agreement
from dsv4ctl.engine_adapters.reference.cache import PrefixCache
from dsv4ctl.engine_adapters.reference.decode import Decode
from dsv4ctl.engine_adapters.reference.facts import FAILED, LOADED, NO_ABORT, SOURCES, Budget, Known, Space, flatten
from dsv4ctl.engine_adapters.reference.hicache import HiCache, LoadJob
from dsv4ctl.engine_adapters.reference.model import Model
from dsv4ctl.engine_adapters.reference.orders import Orders, Submission, decoder, encode, submission
from dsv4ctl.engine_adapters.reference.prefill import Prefill
from dsv4ctl.engine_adapters.reference.pressure import Holder, grow
from dsv4ctl.engine_adapters.reference.sequence import Chunk
from dsv4ctl.engine_adapters.reference.sequences import Sequence

#: The room went away on this rank; the ranks drop its sequence together, in a round soon.
GONE = (Refusal, UnknownRoomError)
#: Facts without a wake-up (a page that comes back, a fact of another rank) are looked for this often, in seconds.
_LOOK_AGAIN = 0.005
#: An idle engine of several ranks shows each other that they live this often, in seconds.
_IDLE_ROUND = 0.5


class StepLoop:
    """`prefill` None on a decode engine, `decode` None on a prefill engine, both on a single one.

    `enter` makes a sequence of a submission on a rank that did not get the request itself; `left` is told of each
    sequence that holds nothing any more.
    """

    def __init__(
        self,
        agent: Agent,
        agreement: Agreement,
        model: Model,
        cache: PrefixCache,
        prefill: Prefill | None,
        decode: Decode | None,
        hicache: HiCache | None,
        max_batch: int,
        enter: Callable[[Submission], Sequence],
        left: Callable[[Sequence], None],
    ) -> None:
        self._agent = agent
        self._gate = agent.gate
        self._agreement = agreement
        self._model = model
        self._cache = cache
        self._prefill = prefill
        self._decode = decode
        self._hicache = hicache
        self._max_batch = max_batch
        self._enter = enter
        self._left = left
        self._wakeup = threading.Condition()
        self._woken = False
        self._stopping = False
        self._over = False
        self._link_lost = False
        self._submitted: deque[Sequence] = deque()
        self._flush = False
        self._pausing = False
        self._spaces = tuple(self._gate.spaces())
        self._loading: list[LoadJob] = []
        self.rooms: dict[RoomKey, Sequence] = {}  #: every sequence that may hold something, in the agreed order
        self.waiting: list[Sequence] = []  #: the oldest first
        self.transferring: dict[RoomKey, Sequence] = {}  #: admitted, bytes not all here
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.steps = 0
        self.layers = 0  #: of all steps: a long step is progress too
        self.rounds = 0
        self.paused = False  #: on every rank since the same round

    # ---- from any thread -----------------------------------------------------------------------------

    def wake(self) -> None:
        """A fact changed."""
        with self._wakeup:
            self._woken = True
            self._wakeup.notify()

    def submit(self, sequence: Sequence) -> None:
        """Rank 0 only: every rank gets it in the next round."""
        self._submitted.append(sequence)
        self.wake()

    def flush(self) -> None:
        """Rank 0 only: every rank drops its cached pages in the next round in which no sequence lives."""
        self._flush = True
        self.wake()

    def pause(self, pausing: bool) -> None:
        """Rank 0 only: from the next round on no rank computes, admits or begins to decode; or all go on.

        Rounds go on: aborts, landings, verdicts and what becomes quiet are applied as ever.
        """
        self._pausing = pausing
        self.wake()

    def lose_link(self) -> None:
        """This rank is out of the control plane's reach: every rank ends its loop after the next round."""
        self._link_lost = True
        self.wake()

    def stop(self) -> None:
        """Rank 0 only: every rank ends its loop after the next round."""
        self._stopping = True
        self.wake()

    def work(self) -> int:
        """What this loop could go on with by itself: who waits for pages waits for rooms, which have deadlines."""
        return len(self._submitted) + len(self._running())

    def queues(self) -> dict[str, int]:
        return {
            "waiting": len(self._submitted) + len(self.waiting),
            "prefilling": len(self.prefilling),
            "transferring": len(self.transferring),
            "decoding": len(self.decoding),
        }

    # ---- the loop ------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Until `stop` (True), or until a rank has lost its link. What is raised here is a defect: the caller
        reports it and ends the engine."""
        with torch.inference_mode():
            while not self._over:
                self._wait()
                budget = self._round()
                if budget is None:
                    self._agreement.least([0])  # no rank ends while another waits for it in a step
                    return False
                if not self.paused:
                    self._grow(budget)
                    self._admit(budget)
                if running := self._running():
                    self._step(running, budget)
        return True

    def _wait(self) -> None:
        """Rank 0 waits for something to do; the others wait for rank 0, in the round."""
        if self._agreement.rank:
            return
        with self._wakeup:
            busy = bool(self._running())
            self._wakeup.wait_for(lambda: busy or self._woken or self._stopping or self._may_flush, self._patience())
            self._woken = False

    def _patience(self) -> float | None:
        alone = self._agreement.ranks == 1
        if self.waiting or (self.rooms and not alone):
            return _LOOK_AGAIN
        # Alone and with nobody waiting for pages, whatever changes wakes the loop: no deadline is needed.
        return None if alone else _IDLE_ROUND

    # ---- rounds --------------------------------------------------------------------------------------

    def _round(self) -> Budget | None:
        """Every rank learns what is new, and applies to each sequence what all ranks know of it.

        None: some rank has lost its link.
        """
        self.rounds += 1
        self._take_orders()
        sequences, loading = list(self.rooms.values()), list(self._loading)
        linked = int(not self._link_lost)
        pages = [self._gate.room_in(space) for space in self._spaces]
        mine = flatten([(linked,), *pages, *map(self._known, sequences), tuple(job.state for job in loading)])
        agreed = iter(self._least(mine))
        if not next(agreed):
            return None
        budget = Budget(self._spaces, [Space(next(agreed), next(agreed)) for _ in pages])
        for sequence in sequences:
            self._apply(sequence, Known(*(next(agreed) for _ in Known._fields)))
        for job in loading:
            self._settle_load(job, next(agreed))
        return budget

    @property
    def _may_flush(self) -> bool:
        """Asked for, and no sequence lives: one that came in between only delays it."""
        return self._flush and not self.rooms

    def _least(self, mine: list[int]) -> list[int]:
        """What all ranks know; with the guard off, what this one knows."""
        return self._agreement.least(mine) if self._gate.guarded(Guard.AGREEMENT) else mine

    def _take_orders(self) -> None:
        mine = [self._submitted.popleft() for _ in range(len(self._submitted))]
        flush = self._may_flush and not mine
        self._flush = self._flush and not flush
        orders = Orders([submission(sequence) for sequence in mine], flush, self._pausing, self._stopping)
        told = self._agreement.tell(encode(orders))
        orders = decoder.decode(told) if told else Orders()
        self.paused, self._over = orders.paused, orders.stop
        entered = mine if self._agreement.rank == 0 else [self._enter(order) for order in orders.submissions]
        for sequence in entered:
            self.rooms[sequence.key] = sequence
        self.waiting = sorted([*self.waiting, *entered], key=lambda sequence: sequence.age)
        if orders.flush:
            self._cache.clear()

    def _known(self, sequence: Sequence) -> Known:
        aborting = sequence.aborting
        abort = NO_ABORT if aborting is None else SOURCES.index(aborting[0])
        told = self._prefill is None or self._decode is not None or self._agent.told(sequence.key)
        return Known(abort, int(told), int(sequence.manifest is not None), int(sequence.vouched), int(sequence.quiet))

    def _apply(self, sequence: Sequence, known: Known) -> None:
        sequence.may_begin = bool(known.told)
        starts = known.ready and not (sequence.dropped or self.paused)
        if known.abort != NO_ABORT and not sequence.dropped:
            self._drop(sequence, SOURCES[known.abort])
        elif starts and self.transferring.pop(sequence.key, None) is not None:
            self._start(sequence)
        if known.vouched and sequence.held is not None and not sequence.dropped:
            self._let_out(sequence)
        if sequence.quarantining and not sequence.freed:
            sequence.quarantine()
        if known.quiet:
            self._retire(sequence)

    def _drop(self, sequence: Sequence, source: AbortSource) -> None:
        """Between two steps, on every rank: no forward of the sequence runs any more."""
        sequence.dropped = True
        self._agent.abort(sequence.key, source, "aborted on another rank")
        running = sequence in self.prefilling or sequence in self.decoding
        for queue in (self.waiting, self.prefilling, self.decoding):
            if sequence in queue:
                queue.remove(sequence)
        self.transferring.pop(sequence.key, None)
        if running:
            with contextlib.suppress(*GONE):  # it ended already on this rank
                self._agent.apply(sequence.key, lambda half: half.forward_end())
        if not self._gate.guarded(Guard.QUIESCE):
            # What an engine does that frees an aborted room's pages at once.
            sequence.unquiesced = not sequence.quiet
            sequence.release()

    def _start(self, sequence: Sequence) -> None:
        """Its bytes are here, on every rank."""
        assert self._decode is not None
        self.decoding.append(sequence)
        try:
            self._decode.start(sequence)
            self._finish_if_over(sequence)
        except GONE:
            pass
        except LedgerError as error:
            self._break(sequence, AbortSource.ENGINE_FAULT, f"the ledger refused: {error}")

    def _let_out(self, sequence: Sequence) -> None:
        """Its verdict is good on every rank."""
        sequence.let_out()
        with contextlib.suppress(*GONE):
            self._end_if_over(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Quiet on every rank: what it holds goes back."""
        if sequence.unquiesced:
            self._gate.violations["pages reused before the writer was quiet"] += 1
        sequence.release()
        self._cache.unpin(sequence.path)
        del self.rooms[sequence.key]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._left(sequence)

    def _settle_load(self, job: LoadJob, state: int) -> None:
        """Loaded on every rank, or failed on one: then no rank keeps what it was to fill."""
        if state == FAILED:
            self._cache.forget(job.nodes)
        if state in (FAILED, LOADED):
            self._loading.remove(job)

    # ---- growth and admission ------------------------------------------------------------------------

    def _grow(self, budget: Budget) -> None:
        """Who decodes gets the page it grows into; if there is none, the youngest room is retracted (`pressure`)."""
        if self._decode is None or self._prefill is not None:
            return
        held = {s.key: s for s in (*self.transferring.values(), *self.decoding) if not s.retracted}
        leaving = any(s.owned and s.key not in held for s in self.rooms.values())
        holders = [
            Holder(s.age, s.key not in self.transferring and s.over is None and self._decode.grows(s))
            for s in held.values()
        ]
        growth = grow(holders, budget, leaving)
        for key in growth.grown:
            self._decode.grow(held[key])
        for key, sequence in held.items():
            sequence.starved = key in growth.starved
        if growth.retracted is not None:
            self._retract(held[growth.retracted])

    def _retract(self, sequence: Sequence) -> None:
        """On every rank in the same step: its room ends here, and begins again as its next generation."""
        sequence.retracted = True
        self._agent.counters["retractions"] += 1
        self._agent.abort(sequence.key, AbortSource.RETRACTION, "an older room needs its pages")

    def _admit(self, budget: Budget) -> None:
        """The oldest first, of those that may begin; the first without pages makes the others wait."""
        if any(sequence.starved for sequence in self.decoding):
            return
        jobs: list[LoadJob] = []
        for sequence in list(self.waiting):
            if len(self.prefilling) + len(self.decoding) >= self._max_batch:
                break
            if not sequence.may_begin:
                continue
            if not self._admit_one(sequence, budget, jobs):
                break
            self.waiting.remove(sequence)
        if jobs and self._hicache is not None:
            self._loading += jobs
            self._hicache.load(jobs)

    def _admit_one(self, sequence: Sequence, budget: Budget, jobs: list[LoadJob]) -> bool:
        half = self._prefill or self._decode
        assert half is not None
        sequence.oldest = all(sequence.age <= other.age for other in self.rooms.values() if not other.dropped)
        try:
            if not half.admit(sequence, budget, jobs):
                return False
        except GONE:
            pass  # on this rank; the others go on until the next round, and so does its sequence here
        if self._prefill is not None:
            self.prefilling.append(sequence)
        else:
            self.transferring[sequence.key] = sequence
        return True

    # ---- steps ---------------------------------------------------------------------------------------

    def _running(self) -> list[Sequence]:
        if self.paused:
            return []
        return [s for s in (*self.prefilling, *self.decoding) if not (s.starved or s.retracted or s.over)]

    def _step(self, running: list[Sequence], budget: Budget) -> None:
        """One chunk of every sequence, layers outermost: a batch in which nobody depends on anybody."""
        batch = [(sequence, self._chunk(sequence)) for sequence in running]
        hidden = [self._model.embed(chunk) for _, chunk in batch]
        for layer in range(self._model.geometry.layers):
            for at, (sequence, chunk) in enumerate(batch):
                if not self._skips(sequence):
                    hidden[at] = self._model.forward_layer(layer, hidden[at], chunk, sequence.read)
            self.layers += 1
        self._model.wait()
        self.steps += 1
        whole = self._least([int(self._whole(sequence)) for sequence, _ in batch])
        for (sequence, chunk), result, right in zip(batch, hidden, whole, strict=True):
            if right:
                self._computed(sequence, chunk, result, budget)

    def _skips(self, sequence: Sequence) -> bool:
        """Alone, a sequence whose result goes nowhere is left at once; ranks go through its gathers together."""
        return self._agreement.ranks == 1 and not self._whole(sequence)

    def _whole(self, sequence: Sequence) -> bool:
        """Its reads were all granted, and its room is not aborting here."""
        if sequence.broken is not None and sequence.aborting is None:
            self._break(sequence, *sequence.broken)
        return sequence.broken is None and sequence.aborting is None

    def _break(self, sequence: Sequence, source: AbortSource, why: str) -> None:
        """This rank cannot go on with it: the fact goes into the next round."""
        self._agent.abort(sequence.key, source, why)
        if sequence.aborting is None:
            sequence.aborting = (source, why)

    def _chunk(self, sequence: Sequence) -> Chunk:
        if sequence.computed < sequence.prompt:
            assert self._prefill is not None
            return self._prefill.chunk(sequence)
        assert self._decode is not None
        return self._decode.chunk(sequence)

    def _computed(self, sequence: Sequence, chunk: Chunk, hidden: torch.Tensor, budget: Budget) -> None:
        try:
            if sequence.computed >= sequence.prompt:
                self._decoded(sequence, chunk, hidden)
            elif self._prefill is not None and self._prefill.computed(sequence, chunk.end, budget):
                self._prompt_done(sequence, self._model.next_token(hidden))
        except GONE:
            pass
        except LedgerError as error:
            self._break(sequence, AbortSource.ENGINE_FAULT, f"the ledger refused: {error}")

    def _decoded(self, sequence: Sequence, chunk: Chunk, hidden: torch.Tensor) -> None:
        assert self._decode is not None
        self._decode.computed(sequence, chunk.end)
        sequence.emit(self._model.next_token(hidden))
        self._agent.counters["tokens_out"] += 1
        self._finish_if_over(sequence)

    def _prompt_done(self, sequence: Sequence, first_token: int) -> None:
        assert self._prefill is not None
        self._agent.note(sequence.key, sealed=self._prefill.sealed(sequence))
        self.prefilling.remove(sequence)
        if self._decode is None:
            self._prefill.hand_over(sequence, first_token)
            sequence.emit(first_token)
            sequence.finish("length")
            self._agent.apply(sequence.key, lambda writer: writer.forward_end())
            return
        self.decoding.append(sequence)
        self._agent.apply(sequence.key, lambda reader: reader.decoding())
        sequence.emit(first_token)
        self._finish_if_over(sequence)

    def _finish_if_over(self, sequence: Sequence) -> None:
        assert self._decode is not None
        sequence.over = self._decode.over(sequence)
        self._end_if_over(sequence)

    def _end_if_over(self, sequence: Sequence) -> None:
        """A room whose output is held ends with its verdict."""
        assert self._decode is not None
        if sequence.over is not None and sequence.held is None:
            self.decoding.remove(sequence)
            self._decode.finish(sequence, sequence.over)
