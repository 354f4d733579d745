"""The prefill rank's node: what the sender and the prefill half of the step loop do with the machines."""

from __future__ import annotations

from dsv4ctl.controlplane.explore.nodes import Event, Violation
from dsv4ctl.controlplane.explore.rank import SPACE, Rank, Sequence, Setup
from dsv4ctl.controlplane.rooms.effects import Effect
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.types import Consumer, LoadKind


class PrefillRank(Rank):
    STEP = "prefilling"

    def __init__(self, me: str, setup: Setup) -> None:
        super().__init__(me, setup)
        self.sending: dict[RoomKey, dict[str, tuple[int, ...]]] = {}  #: the sender's rooms: pages by peer

    def make_half(self, key: RoomKey, peers: tuple[str, ...]) -> Half:
        return Writer(key, peers)

    def opened(self, key: RoomKey) -> None:
        self.sending[key] = {}

    # ---- the step loop ---------------------------------------------------------------------------------------------

    def told(self, seq: Sequence) -> bool:
        half = self.rooms.get(seq.key)
        return half is None or half.told or not half.live

    def admit(self, seq: Sequence) -> None:
        seq.stage = "prefilling"
        leased = self.ledger.extent(SPACE, seq.pages)
        seq.lease = self.ledger.open_load(LoadKind.FORWARD, [leased], room=seq.key)
        self.try_apply(seq.key, Writer.forward_begin)

    def on_step(self, key: RoomKey) -> None:
        """The prompt is computed on every rank: its pages are sealed and handed to the sender."""
        seq = self.seqs[key]
        seq.stage = "computed"
        self.op("computed", key)
        assert seq.lease is not None
        prompt = seq.pages[: self.setup.prompt]
        for logical, page in enumerate(prompt):
            self.memory[page] = (key, logical)
        self.ledger.seal(seq.lease, SPACE, prompt)
        if key in self.sending:
            half = self.rooms.get(key)
            peers = () if half is None else half.peers
            seq.to_send = tuple((logical, peer) for logical in range(len(prompt)) for peer in peers)
        self.try_apply(key, Writer.forward_end)

    # ---- the sender ------------------------------------------------------------------------------------------------

    def on_destination(self, peer: str, key: RoomKey, pages: tuple[int, ...]) -> None:
        def told(writer: Writer) -> list[Effect]:
            return writer.destination(peer)

        if self.try_apply(key, told) and key in self.sending:
            self.sending[key].setdefault(peer, pages)

    def on_send(self, key: RoomKey, logical: int, peer: str) -> None:
        """One page to one peer, under a `sender` ticket: posted, unless the room is over."""
        seq = self.seqs[key]
        page = seq.pages[logical]
        try:
            ticket = self.ledger.request(Consumer.SENDER, [self.ledger.extent(SPACE, [page])], room=key)
        except LedgerError:
            self._fail(key)
            return
        seq.to_send = tuple(chunk for chunk in seq.to_send if chunk != (logical, peer))
        if not self.try_apply(key, Writer.post):
            self.leave(ticket)
            self.sending.pop(key, None)
            return
        try:
            self.ledger.post(ticket)
        except LedgerError:
            self.try_apply(key, lambda writer: writer.written(True))
            self.leave(ticket)
            self._fail(key)
            return
        if self.memory[page] != (key, logical):
            raise Violation("S1", f"{self.me}: sender reads page {page}, which holds {self.memory[page]}")
        seq.flights[logical, peer] = ticket
        self.out.append(("flight", peer, key, logical, page, self.sending[key][peer][logical]))

    def on_written(self, key: RoomKey, logical: int, peer: str, ok: bool) -> None:
        """A posted write ended; `ok` False: nobody knows how."""
        seq = self.seqs.get(key)
        ticket = None if seq is None else seq.flights.pop((logical, peer), None)
        if ticket is not None and ok:  # else it may still read its source: the ticket holds until this rank is fenced
            self.ledger.complete(ticket)
        self.try_apply(key, lambda writer: writer.written(ok))
        if ticket is not None and not ticket.left:
            self.leave(ticket)

    def on_sent_all(self, key: RoomKey) -> None:
        self.try_apply(key, Writer.sent_all)
        self.sending.pop(key, None)

    def dropped(self, key: RoomKey) -> None:
        """Whoever waits to post leaves; a read that was posted keeps its ticket."""
        self.sending.pop(key, None)
        seq = self.seqs.get(key)
        if seq is not None:
            for ticket in seq.flights.values():
                if not ticket.left:
                    self.leave(ticket)

    def forget_peer(self, peer: str) -> None:
        """Nothing can be written into a dead process."""
        self.out.append(("abandon", peer))
        for seq in list(self.seqs.values()):
            for logical, target in list(seq.flights):
                if target == peer:
                    self.on_written(seq.key, logical, peer, True)

    def _fail(self, key: RoomKey) -> None:
        self.abort(key)
        self.sending.pop(key, None)

    # ---- from the peer ---------------------------------------------------------------------------------------------

    def on_peer_abort(self, peer: str, key: RoomKey) -> None:
        half = self.rooms.get(key)
        if half is not None:
            self.carry_out(key, half, half.peer_abort(peer, AbortSource.CLIENT, ""))
        else:
            self._peer(peer, "ack", key, self.bury(key))

    def moves(self) -> list[Event]:
        moves: list[Event] = []
        for seq in self.seqs.values():
            if seq.stage != "computed" or seq.key not in self.sending:
                continue
            moves += [("send", seq.key, *chunk) for chunk in seq.to_send if chunk[1] in self.sending[seq.key]]
            if not seq.to_send and not seq.flights:
                moves.append(("sent_all", seq.key))
        return moves
