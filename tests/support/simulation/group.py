"""The ranks of one life of an engine: rounds in which all take part, steps, and the HTTP server of the first.

A round is one moment: what all ranks know is applied on all of them, in one order; while a rank is stopped there
is none. That stands for the reference engine's reductions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.effects import Effect, Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Consumer, LoadKind
from dsv4ctl.engine_adapters.agent import UnknownRoomError
from simulation.http import Answer
from simulation.memory import Bytes
from simulation.rank import GONE, SPACE, Rank

if TYPE_CHECKING:
    from simulation.host import Host

#: Seconds: to the round that a fact asks for; of one step; to the next look for pages that come back.
_ROUND, _STEP, _LOOK_AGAIN = 0.0005, 0.02, 0.05
_MAX_BATCH = 16


@dataclass(eq=False)
class Part:
    """What one rank holds for a sequence, and what it knows of it."""

    rank: Rank
    pages: tuple[int, ...] = ()
    transfer: Load | None = None
    lease: Load | None = None
    ticket: Ticket | None = None
    aborting: tuple[AbortSource, str] | None = None
    ready: bool = False
    quiet: bool = False
    quarantining: bool = False
    freed: bool = False

    def free(self, key: RoomKey) -> None:
        if not self.freed:
            self.freed = True
            gate = self.rank.gate
            if self.pages and gate.free(SPACE, self.pages) == len(self.pages):
                self.rank.memory.give_back(key, self.pages)

    def quarantine(self, key: RoomKey) -> None:
        self.free(key)
        if self.transfer is not None and self.transfer.open:
            self.rank.gate.quarantine(self.transfer)

    def release(self, key: RoomKey) -> None:
        for load in (self.transfer, self.lease):
            if load is not None and load.open:
                self.rank.gate.end_load(load)
        if self.ticket is not None:
            self.rank.gate.leave(self.ticket)
        self.free(key)


@dataclass(eq=False)
class Sequence:
    key: RoomKey
    prompt: int  #: pages
    tokens: int
    answer: Answer
    streams: bool
    parts: list[Part]
    computed: int = 0
    generated: int = 0
    dropped: bool = False
    finished: bool = False
    sealed: list[Bytes] = field(default_factory=list)

    @property
    def aborting(self) -> tuple[AbortSource, str] | None:
        return next((part.aborting for part in self.parts if part.aborting is not None), None)


class Group:
    """Also the HTTP server of the engine."""

    def __init__(self, host: Host, name: str, role: Role, numbers: range, pages: int, life: int) -> None:
        self.host, self.name, self.role, self.numbers, self.pages, self.life = host, name, role, numbers, pages, life
        self.ranks: list[Rank] = []
        self.steps = 0
        self.wedged = False
        self.sequences: dict[RoomKey, Sequence] = {}
        self._submitted: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.transferring: dict[RoomKey, Sequence] = {}
        self._answers: list[Answer] = []
        self._round_due = self._step_due = self._look_due = False

    @property
    def whole(self) -> bool:
        """Every rank lives."""
        return len(self.ranks) == len(self.numbers) and not any(rank.stopped for rank in self.ranks)

    def work(self) -> int:
        return len(self._submitted) + len(self.running)

    def queues(self) -> dict[str, int]:
        return {
            "waiting": len(self.waiting), "running": len(self.running), "transferring": len(self.transferring),
        }  # fmt: skip

    # ---- HTTP ----------------------------------------------------------------------------------------

    def accepts(self) -> bool:
        return self.ranks[0].reaped_at is None and not self.ranks[0].stopped

    def serve(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> None:
        self._answers.append(answer)
        self.ranks[0].post(lambda: self._submit(body, headers, answer))

    def left(self, answer: Answer) -> None:
        def abort() -> None:
            for sequence in self.sequences.values():
                if sequence.answer is answer:
                    self.ranks[0].agent.abort(sequence.key, AbortSource.CLIENT, "the client went away")
            self._answers.remove(answer)

        self.ranks[0].post(abort)

    def break_off(self) -> None:
        """Its first rank's process is gone."""
        for answer in self._answers:
            answer.break_off()

    def _submit(self, body: dict[str, Any], headers: dict[str, str], answer: Answer) -> None:
        first = self.ranks[0]
        key = first.agent.current(body["bootstrap_room"])
        if key is None or headers["x-dsv4ctl-generation"] != str(key.generation):
            answer.whole(400, {"error": {"message": f"room {body['bootstrap_room']} is not open here"}})
            return
        sequence = Sequence(
            key, body["pages"], body["tokens"], answer, body["stream"], [Part(rank) for rank in self.ranks]
        )
        try:
            self._register(sequence, first)
        except GONE as error:
            answer.whole(400, {"error": {"message": f"the room has ended: {error}"}})
            return
        self.sequences[key] = sequence
        self._submitted.append(sequence)
        self.wake()

    def _register(self, sequence: Sequence, rank: Rank) -> None:
        """Raises Refusal, UnknownRoomError."""

        def enter(half: Any) -> list[Effect]:
            if not half.live or sequence.key in rank.parts:
                raise Refusal(f"room {sequence.key} is {half.state.value}")
            rank.parts[sequence.key] = sequence.parts[rank.number]
            return []

        rank.agent.apply(sequence.key, enter)

    def failed(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        sequence = self.sequences.get(key)
        if sequence is not None:
            self._tell(sequence, 500, {"error": {"message": f"aborted: {reason}", "source": source.value}})

    def _tell(self, sequence: Sequence, status: int, body: dict[str, Any]) -> None:
        if not sequence.finished:
            sequence.finished = True
            if sequence.streams and sequence.generated:
                sequence.answer.event(body, last=True)
            else:
                sequence.answer.whole(status, body)

    # ---- rounds --------------------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._round_due:
            self._round_due = True
            self.host.loop.call_later(_ROUND, self._round)

    def _all_run(self) -> bool:
        return len(self.ranks) == len(self.numbers) and all(rank.running for rank in self.ranks) and not self.wedged

    def _round(self) -> None:
        self._round_due = False
        if not self._all_run():
            return  # whoever goes on wakes it
        self._enter_submitted()
        for sequence in list(self.sequences.values()):
            if sequence not in self._submitted:
                self._apply(sequence)
        self._admit()
        if self.running and not self._step_due:
            self._step_due = True
            self.ranks[0].after(_STEP, self._step)
        if self.waiting and not self._look_due:
            self._look_due = True
            self.host.loop.call_later(_LOOK_AGAIN, self._look)

    def _look(self) -> None:
        self._look_due = False
        self.wake()

    def _enter_submitted(self) -> None:
        for sequence in self._submitted:
            for rank in self.ranks[1:]:
                try:
                    self._register(sequence, rank)
                except GONE as error:
                    part = sequence.parts[rank.number]
                    part.aborting, part.quiet = (AbortSource.ENGINE_FAULT, str(error)), True
            self.waiting.append(sequence)
        self._submitted.clear()

    def _apply(self, sequence: Sequence) -> None:
        aborting = sequence.aborting
        if aborting is not None and not sequence.dropped:
            self._drop(sequence, *aborting)
        elif sequence.key in self.transferring and all(part.ready for part in sequence.parts):
            del self.transferring[sequence.key]
            self._start(sequence)
        for part in sequence.parts:
            if part.quarantining and not part.freed:
                part.quarantine(sequence.key)
        if all(part.quiet for part in sequence.parts):
            self._retire(sequence)

    def _drop(self, sequence: Sequence, source: AbortSource, reason: str) -> None:
        sequence.dropped = True
        running = sequence in self.running
        for rank in self.ranks:
            rank.agent.abort(sequence.key, source, reason)
            if running:
                with contextlib.suppress(*GONE):
                    rank.agent.apply(sequence.key, lambda half: half.forward_end())
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.transferring.pop(sequence.key, None)

    def _retire(self, sequence: Sequence) -> None:
        for part in sequence.parts:
            part.release(sequence.key)
            part.rank.parts.pop(sequence.key, None)
        del self.sequences[sequence.key]
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def retract(self) -> None:
        """Its pages are wanted: the youngest room that decodes begins again as its next generation."""
        if self._all_run() and self.running:
            key = self.running[-1].key
            for rank in self.ranks:
                rank.agent.abort(key, AbortSource.RETRACTION, "its pages are wanted")

    # ---- admission -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= _MAX_BATCH:
                return
            if not all(rank.agent.told(sequence.key) for rank in self.ranks):
                continue
            grows = self.role is not Role.PREFILL
            if not self._allocate(sequence, sequence.prompt + grows):
                return
            self.waiting.remove(sequence)
            (self._expect if grows else self._begin)(sequence)

    def _allocate(self, sequence: Sequence, pages: int) -> bool:
        if any(rank.gate.room_in(SPACE)[0] < pages for rank in self.ranks):
            return False
        for part in sequence.parts:
            taken = part.rank.gate.allocate({SPACE: pages})
            assert taken is not None
            part.pages = taken[SPACE]
            part.rank.memory.take(sequence.key, part.pages)
        return True

    def _begin(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        for part in sequence.parts:
            gate = part.rank.gate
            part.lease = gate.open_load(LoadKind.FORWARD, [gate.extent(SPACE, part.pages)], room=sequence.key)
            with contextlib.suppress(*GONE):
                part.rank.agent.apply(sequence.key, lambda writer: writer.forward_begin())

    def _expect(self, sequence: Sequence) -> None:
        self.transferring[sequence.key] = sequence
        for part in sequence.parts:
            gate, prompt = part.rank.gate, part.pages[: sequence.prompt]
            part.transfer = gate.open_load(
                LoadKind.TRANSFER, [gate.extent(SPACE, prompt)], room=sequence.key, verify=True
            )
            opening = part.rank.openings.get(sequence.key)
            if opening is not None:
                part.rank.receiver.expect(sequence.key, opening.peers[0], prompt, part.transfer)

    def _start(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        for part in sequence.parts:
            gate, prompt = part.rank.gate, sequence.prompt
            grown = gate.extent(SPACE, part.pages[prompt:])
            part.lease = gate.open_load(LoadKind.FORWARD, [grown], room=sequence.key)
            part.ticket = gate.request(Consumer.ATTENTION, [gate.extent(SPACE, part.pages[:prompt])], room=sequence.key)
            with contextlib.suppress(*GONE):
                part.rank.agent.apply(sequence.key, lambda reader: reader.forward_begin())

    # ---- steps ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._step_due = False
        if not self._all_run():
            return
        self.steps += 1
        for sequence in list(self.running):
            if sequence.aborting is None:
                with contextlib.suppress(*GONE):
                    (self._prefill if self.role is Role.PREFILL else self._decode)(sequence)
        self.wake()

    def _prefill(self, sequence: Sequence) -> None:
        """One page of the prompt."""
        logical = sequence.computed
        sequence.computed += 1
        sequence.sealed.append(Bytes(sequence.key, logical))
        for part in sequence.parts:
            assert part.lease is not None
            part.rank.memory.content[part.pages[logical]] = Bytes(sequence.key, logical)
            part.rank.gate.seal(part.lease, SPACE, (part.pages[logical],))
            part.rank.sender.computed(sequence.key, part.pages, logical, tuple(sequence.sealed))
        if sequence.computed == sequence.prompt:
            self.running.remove(sequence)
            self._tell(sequence, 200, {"text": ""})
            for part in sequence.parts:
                part.rank.agent.apply(sequence.key, lambda writer: writer.forward_end())

    def _decode(self, sequence: Sequence) -> None:
        """One token: every page of the prompt is read."""
        for part in sequence.parts:
            assert part.ticket is not None
            part.rank.gate.read(part.ticket, "c4_kv", part.rank.gate.layers - 1, deadline=0.0)
            for logical, page in enumerate(part.pages[: sequence.prompt]):
                part.rank.memory.read(sequence.key, page, logical)
        sequence.generated += 1
        self.ranks[0].agent.counters["tokens_out"] += 1
        last = sequence.generated == sequence.tokens
        if sequence.streams:
            sequence.finished = sequence.finished or last
            told = {"text": "a" * sequence.generated, "meta_info": {"finish_reason": "length" if last else None}}
            sequence.answer.event(told, last=last)
        elif last:
            self._tell(sequence, 200, {"text": "a" * sequence.tokens})
        if last:
            self.running.remove(sequence)
            for part in sequence.parts:
                with contextlib.suppress(UnknownRoomError):
                    part.rank.agent.apply(sequence.key, _finished)


def _finished(reader: Any) -> list[Effect]:
    return [*reader.forward_end(), *(reader.finished() if reader.live else [])]
