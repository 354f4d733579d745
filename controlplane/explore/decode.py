"""The decode rank's node: what the receiver and the decode half of the step loop do with the machines."""

from __future__ import annotations

from dsv4ctl.controlplane.explore.nodes import Event, Violation
from dsv4ctl.controlplane.explore.rank import GONE, LAYERS, SPACE, Rank, Sequence, Setup
from dsv4ctl.controlplane.rooms.effects import Effect
from dsv4ctl.controlplane.rooms.half import Half
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.tickets.ledger import GRANTED, REVOKING, LedgerError
from dsv4ctl.controlplane.tickets.types import Consumer, LoadKind


class DecodeRank(Rank):
    STEP = "decoding"

    def __init__(self, me: str, setup: Setup) -> None:
        super().__init__(me, setup)
        self.unacked: dict[str, dict[RoomKey, None]] = {}  #: aborts told to a peer and not answered
        self.comparing: dict[RoomKey, Sequence] = {}  #: whose digests are being taken, whatever became of the room

    def make_half(self, key: RoomKey, peers: tuple[str, ...]) -> Half:
        return Reader(key, peers)

    # ---- the receiver ----------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> None:
        """All pages that the room will need, and the lease under which its peers write the prompt's."""
        seq.stage = "transferring"
        target = self.ledger.extent(SPACE, seq.pages[: self.setup.prompt])
        seq.transfer = self.ledger.open_load(LoadKind.TRANSFER, [target], room=seq.key, verify=self.setup.verify)
        seq.expected = True

    def on_expose(self, key: RoomKey) -> None:
        seq = self.seqs[key]
        if not self.try_apply(key, Reader.expose):
            seq.expected = False
            return
        seq.exposed, seq.peers = True, self._peers(key)
        for peer in self._peers(key):
            self._tell(seq, peer)

    def on_connected(self, peer: str) -> None:
        """The channel to `peer` is there again: pages and aborts are told again."""
        for seq in self.seqs.values():
            if seq.expected and seq.exposed and peer in self._peers(seq.key):
                self._tell(seq, peer)
        for key in self.unacked.get(peer, ()):
            self._peer(peer, "abort", key)

    def on_land(self, page: int, key: RoomKey, logical: int, writer: str) -> None:
        """The ghost: a peer's write changes the bytes of a page, whoever owns it by now."""
        before = self.memory[page]
        writers = before[2] if before is not None and before[:2] == (key, logical) else ()
        self.memory[page] = (key, logical, tuple(sorted({*writers, writer})))

    def on_notified(self, writer: str, key: RoomKey, logical: int) -> None:
        seq = self.seqs.get(key)
        if seq is None or not seq.expected or writer not in self._peers(key):
            return
        seq.landed.setdefault(writer, set()).add(logical)
        if len(seq.landed[writer]) < self.setup.prompt:
            return
        last = all(len(seq.landed.get(peer, ())) == self.setup.prompt for peer in self._peers(key))

        def landed(reader: Reader) -> list[Effect]:
            if last and seq.transfer is not None and seq.transfer.open:
                self.ledger.layer_landed(seq.transfer, LAYERS)
            return reader.landed(writer)

        if not self.try_apply(key, landed):
            seq.expected = False
        elif last and seq.expected:
            seq.expected, seq.stage = False, "landed"

    def on_compare(self, key: RoomKey) -> None:
        """The digests of what landed are taken under a `checksum` ticket."""
        seq = self.seqs[key]
        assert seq.transfer is not None
        try:
            ticket = self.ledger.request(Consumer.CHECKSUM, list(seq.transfer.extents), room=key)
        except LedgerError:
            seq.stage = "failed"
            self.abort(key)
            return
        seq.checksum = ticket
        seq.stage = "comparing"
        self.comparing[key] = seq

    def on_verdict(self, key: RoomKey) -> None:
        """Nothing is compared (policy `off`), or what was compared matched."""
        seq = self.comparing.pop(key) if self.setup.verify else self.seqs[key]
        if seq.checksum is not None:
            self.leave(seq.checksum)
            seq.checksum = None

        def verified(reader: Reader) -> list[Effect]:
            effects = reader.verified()
            assert seq.transfer is not None
            if seq.transfer.verify:
                self.ledger.layer_verified(seq.transfer, LAYERS)
            self.ledger.end_load(seq.transfer)
            return effects

        if seq.stage in ("landed", "comparing"):
            seq.stage = "transferring"
        if self.try_apply(key, verified):
            seq.ready = True

    def dropped(self, key: RoomKey) -> None:
        seq = self.seqs.get(key)
        if seq is not None:
            seq.expected = False

    def forget_peer(self, peer: str) -> None:
        self.unacked.pop(peer, None)
        for seq in self.seqs.values():
            if seq.expected and peer in self._peers(seq.key):
                seq.expected = False

    def tell_peer(self, key: RoomKey, peer: str) -> None:
        self.unacked.setdefault(peer, {})[key] = None
        super().tell_peer(key, peer)

    # ---- from the peer ---------------------------------------------------------------------------------------------

    def on_peer_abort(self, peer: str, key: RoomKey) -> None:
        half = self.rooms.get(key)
        if half is not None:
            self.carry_out(key, half, half.abort(AbortSource.CLIENT, ""))

    def on_peer_ack(self, peer: str, key: RoomKey, outcome: Quiet) -> None:
        self.unacked.get(peer, {}).pop(key, None)
        half = self.rooms.get(key)
        if half is not None:
            self.carry_out(key, half, half.ack(peer, outcome))

    # ---- the step loop ---------------------------------------------------------------------------------------------

    def start(self, seq: Sequence) -> None:
        """The prompt's full pages are read under a ticket; what grows stands under the room's own lease."""
        seq.stage = "decoding"
        sealed, growing = seq.pages[: self.setup.prompt], seq.pages[self.setup.prompt :]
        try:
            seq.lease = self.ledger.open_load(LoadKind.FORWARD, [self.ledger.extent(SPACE, growing)], room=seq.key)
            read = [self.ledger.extent(SPACE, sealed)]
            seq.tickets["attention"] = self.ledger.request(Consumer.ATTENTION, read, room=seq.key)
            self.apply(seq.key, lambda half: half.forward_begin())
        except GONE:
            return
        except LedgerError:
            self.abort(seq.key)

    def on_step(self, key: RoomKey) -> None:
        """The last token is out, on every rank."""
        self.seqs[key].stage = "finished"
        self.op("finish", key)

        def over(reader: Reader) -> list[Effect]:
            return [*reader.forward_end(), *(reader.finished() if reader.live else [])]

        self.try_apply(key, over)

    def on_overdue(self, key: RoomKey) -> None:
        """The ack deadline of an aborting room passed."""
        self.ack_due.discard(key)
        half = self.rooms.get(key)
        if half is not None:
            self.carry_out(key, half, half.ack_overdue())

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _tell(self, seq: Sequence, peer: str) -> None:
        self._peer(peer, "destination", seq.key, seq.pages[: self.setup.prompt])

    def _peers(self, key: RoomKey) -> tuple[str, ...]:
        half = self.rooms.get(key)
        return () if half is None else half.peers

    def moves(self) -> list[Event]:
        moves: list[Event] = []
        for seq in self.seqs.values():
            if seq.stage == "transferring" and seq.expected and not seq.exposed:
                moves.append(("expose", seq.key))
            if seq.stage == "landed":
                moves.append(("compare" if self.setup.verify else "verdict", seq.key))
        return moves + [("verdict", key) for key in self.comparing]

    def check(self) -> None:
        super().check()
        reading = [(seq, seq.tickets.get("attention")) for seq in self.seqs.values() if seq.stage == self.STEP]
        for seq, ticket in [*reading, *((seq, seq.checksum) for seq in self.comparing.values())]:
            if ticket is None or ticket.state not in (GRANTED, REVOKING):
                continue
            for logical, page in enumerate(seq.pages[: self.setup.prompt]):
                if self.memory[page] != (seq.key, logical, tuple(sorted(seq.peers))):
                    who, found = ticket.consumer.value, self.memory[page]
                    raise Violation("S1", f"{self.me}: {who} reads page {page} of room {seq.key}, which holds {found}")
