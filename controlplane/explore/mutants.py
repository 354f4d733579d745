"""Seeded protocol faults: small changes of the real classes (or of a shell's duty), each to be found in one world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from dsv4ctl.controlplane.aborts.inbox import AbortInbox
from dsv4ctl.controlplane.aborts.log import AbortLog
from dsv4ctl.controlplane.explore.cache import CacheNode
from dsv4ctl.controlplane.explore.choices import Choices
from dsv4ctl.controlplane.explore.decode import DecodeRank
from dsv4ctl.controlplane.explore.prefill import PrefillRank
from dsv4ctl.controlplane.explore.rank import Rank, Sequence
from dsv4ctl.controlplane.explore.transfer import Transfer
from dsv4ctl.controlplane.rooms.effects import AckPeer, ReleasePages
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.rooms.room import Room
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.controlplane.rooms.table import RoomTable
from dsv4ctl.controlplane.rooms.writer import Writer
from dsv4ctl.controlplane.tickets.ledger import Ledger
from dsv4ctl.controlplane.tickets.space import Space
from dsv4ctl.controlplane.tickets.ticket import Load

Change = tuple[type, str, Any]


class Mutant(NamedTuple):
    """`world`: the plan in which it shows."""

    fault: str
    world: str
    changes: tuple[Change, ...]


@contextmanager
def seeded(mutant: Mutant) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in mutant.changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def _before(owner: type, name: str, first: Callable[..., Any]) -> Change:
    """`first` runs with the same arguments before the real method."""
    real = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    return (owner, name, changed)


def _after(owner: type, name: str, then: Callable[..., Any]) -> Change:
    """`then` makes the result out of the real one: called with the object, the result and the arguments."""
    real = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return then(self, real(self, *args, **kwargs), *args, **kwargs)

    return (owner, name, changed)


def _instead(owner: type, name: str, other: Callable[..., Any]) -> Change:
    """`other` is called in its place, with the real method first."""
    real = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return other(real, self, *args, **kwargs)

    return (owner, name, changed)


# ---- the changes ---------------------------------------------------------------------------------------------


def _renewed(real: Any, ledger: Ledger, consumer: Any, extents: Any, **kwargs: Any) -> Any:
    return real(ledger, consumer, [ledger.extent(e.space, e.pages, e.pools) for e in extents], **kwargs)


def _end(release: Any, ledger: Ledger, ticket: Any) -> bool:
    """Whatever is posted under it."""
    posted, ticket.posted = ticket.posted, 0
    release(ledger, ticket)
    ticket.posted = posted
    return True


def _nothing(self: Any, *_: Any, **__: Any) -> None:
    return None


def _free_at_abort(half: Any, effects: list[Any], *_: Any) -> list[Any]:
    return [*effects, ReleasePages()] if effects and ReleasePages() not in effects else effects


def _free_at_fault(half: Any, effects: list[Any], source: AbortSource, *_: Any) -> list[Any]:
    return _free_at_abort(half, effects) if source is AbortSource.ENGINE_FAULT else effects


def _one_ack(half: Any, effects: list[Any]) -> list[Any]:
    acks = [effect for effect in effects if isinstance(effect, AckPeer)]
    return [effect for effect in effects if effect not in acks[1:]]


def _ack_at_once(real: Any, writer: Writer) -> list[Any]:
    held, writer.in_flight = writer.in_flight, 0
    try:
        return real(writer)  # type: ignore[no-any-return]
    finally:
        writer.in_flight = held


def _for_another(real: Any, reader: Reader, peer: str, outcome: Quiet) -> list[Any]:
    waiting = sorted(reader.awaiting)
    return real(reader, peer if peer in waiting or not waiting else waiting[0], outcome)  # type: ignore[no-any-return]


def _all_quiet(reader: Reader, peer: str) -> None:
    reader._writing.clear()


def _any_generation(real: Any, rank: DecodeRank, peer: str, key: RoomKey, outcome: Quiet) -> None:
    current = rank.rooms.current(key.room)
    real(rank, peer, key if current is None else current[0], outcome)


def _again(table: RoomTable[Any], key: RoomKey, *_: Any) -> None:
    table._ended.pop(key.room, None)


def _as_they_come(real: Any, inbox: AbortInbox, entry: Any) -> list[Any]:
    new = entry.seq > inbox.received
    inbox.received = max(inbox.received, entry.seq)
    return [entry] if new else []


def _each_time(real: Any, inbox: AbortInbox, entry: Any) -> list[Any]:
    return real(inbox, entry) or ([entry] if entry.seq <= inbox.received else [])


def _only_new(real: Any, log: AbortLog, now: float) -> list[Any]:
    sent = log._sent
    return [entry for entry in real(log, now) if entry.seq > sent]


def _drop_cleared(real: Any, rank: PrefillRank, peer: str, key: Any) -> None:
    if rank.rooms.get(key) is not None:
        real(rank, peer, key)


def _forget_poisons(table: RoomTable[Any], *_: Any) -> None:
    table._poisons.clear()


def _forget_turns(table: RoomTable[Any], *_: Any) -> None:
    table._forgotten.clear()


def _hear_the_dead(reader: Reader, *_: Any) -> None:
    reader._fenced.clear()


def _lose_tickets(rank: Rank, seq: Sequence) -> None:
    if seq.dropped:
        seq.tickets.clear()


def _lapse(real: Any, rank: Rank, agreed: Any) -> None:
    before = [seq for seq in rank.seqs.values() if seq.may_begin]
    real(rank, agreed)
    for seq in before:
        seq.may_begin = False


def _first_done(room: Room, now: float) -> None:
    if any(rank.done for rank in room._ranks.values()):
        for rank in room._ranks.values():
            rank.done = True


def _end_at_once(ledger: Ledger, changed: list[Any], load: Load) -> list[Any]:
    return changed + ledger.end_load(load) if load.open else changed


def _as_ended(real: Any, writer: Writer, ok: bool) -> Any:
    return real(writer, True)


MUTANTS: tuple[Mutant, ...] = (
    # The ledger
    Mutant(
        "a layer is granted one too early",
        "cache: attention",
        (_after(Load, "readable", lambda load, layers, consumer: min(2, layers + 1)),),
    ),
    Mutant("the generation check is skipped", "cache: stranger", (_instead(Ledger, "request", _renewed),)),
    Mutant(
        "a page is reused under a reader",
        "cache: sender",
        ((Space, "quiet", lambda space, page: space.load[page] is None),),
    ),
    Mutant(
        "a page is reused under its load",
        "cache: attention",
        ((Space, "quiet", lambda space, page: not space.readers[page]),),
    ),
    Mutant("leaving the scope releases a posted read", "cache: sender", (_instead(Ledger, "release", _end),)),
    Mutant(
        "an abort releases a granted ticket",
        "cache: sender",
        ((Ledger, "_revoke", lambda ledger, ticket: _end(Ledger.release, ledger, ticket)),),
    ),
    Mutant(
        "a ticket is released twice, a page freed under another", "cache: slips", ((Ledger, "_check_live", _nothing),)
    ),
    Mutant(
        "half a group is granted", "cache: slips", ((Space, "covers", lambda space, pools, asked: bool(pools & asked)),)
    ),
    Mutant(
        "readers do not wait for the verdict",
        "cache: bad copies",
        ((Load, "readable", lambda load, consumer: load.landed),),
    ),
    Mutant("a backup takes no ticket", "cache: attention", ((CacheNode, "backup_ticket", _nothing),)),
    Mutant("a quarantine ends by itself", "early time-outs", (_after(Ledger, "quarantine", _end_at_once),)),
    # The halves of a room
    Mutant(
        "pages are freed at the abort, before the ack", "broken connections", (_after(Reader, "abort", _free_at_abort),)
    ),
    Mutant("a fault, unlike an abort, frees at once", "peer faults", (_after(Reader, "abort", _free_at_fault),)),
    Mutant("a time-out frees", "early time-outs", (_after(Reader, "ack_overdue", _free_at_abort),)),
    Mutant("one ack target a room", "one writer, two ranks that read", (_after(Writer, "_settle", _one_ack),)),
    Mutant(
        "the ack comes before the last write ended", "broken connections", (_instead(Writer, "_settle", _ack_at_once),)
    ),
    Mutant(
        "source pages are not held",
        "broken connections",
        (_after(Writer, "abort", _free_at_abort), (Ledger, "post", _nothing), (Ledger, "complete", _nothing)),
    ),
    Mutant("poisoned is acked as quiet", "failed writes", ((Writer, "_outcome", lambda writer: Quiet.QUIET),)),
    Mutant("a failed write counts as ended", "failed writes", (_instead(Writer, "written", _as_ended),)),
    Mutant("a repeated ack counts for another rank", "repeated acks", (_instead(Reader, "ack", _for_another),)),
    Mutant("the last bytes of one writer make every writer quiet", "fan in", (_before(Reader, "landed", _all_quiet),)),
    Mutant("the fence of a writer is ignored", "crash", ((Reader, "fenced", lambda reader, peer: []),)),
    Mutant(
        "an ack of a fenced writer counts",
        "write without an end, aborted late",
        (_before(Reader, "ack", _hear_the_dead),),
    ),
    Mutant(
        "the ack is dropped when the room is cleared",
        "broken connections",
        (_instead(PrefillRank, "on_peer_abort", _drop_cleared),),
    ),
    # The rooms of a rank, and the delivery of aborts
    Mutant(
        "a late ack of an older generation is accepted",
        "a room again, aborted",
        (_instead(DecodeRank, "on_peer_ack", _any_generation),),
    ),
    Mutant("the abort of an unknown room is forgotten", "link faults", ((RoomTable, "bury", _nothing),)),
    Mutant("an end without a known state is forgotten", "no memory", (_before(RoomTable, "ended", _forget_poisons),)),
    Mutant(
        "a late room opens once its end is forgotten",
        "no memory, link faults",
        (_before(RoomTable, "open", _forget_turns),),
    ),
    Mutant(
        "who opened an aborted room is not told again",
        "no memory, link faults, any abort",
        ((Room, "_again", lambda *_: []),),
    ),
    Mutant("an ended room opens again", "link faults", (_before(RoomTable, "open", _again),)),
    Mutant(
        "aborts are applied as they come", "two aborts, one overtakes", (_instead(AbortInbox, "offer", _as_they_come),)
    ),
    Mutant("a repeated abort is applied again", "link faults", (_instead(AbortInbox, "offer", _each_time),)),
    Mutant("a lost abort is not sent again", "link faults", (_instead(AbortLog, "due", _only_new),)),
    # The control plane and the ranks together
    Mutant("a room ends with its first ack", "early time-outs", (_before(Room, "_settle", _first_done),)),
    Mutant(
        "a rank applies an abort by itself",
        "two engines of two ranks",
        ((Transfer, "agreed", lambda world, known: known),),
    ),
    Mutant(
        "a rank admits by its own free pages",
        "a page of two ranks reused",
        ((Transfer, "agreed_budget", lambda world, free: free),),
    ),
    Mutant("a peer's frame overtakes an opening", "openings in order", ((Choices, "_may_arrive", lambda *_: True),)),
    Mutant("a request overtakes its opening", "openings in order", ((Choices, "_may_be_asked", lambda *_: True),)),
    Mutant("an aborted room leaves its ticket behind", "crash", (_before(Rank, "_release", _lose_tickets),)),
    Mutant("a turn that is not taken at once lapses", "crash", (_instead(Rank, "on_round", _lapse),)),
    Mutant(
        "the fence is told before the process is reaped",
        "crash",
        ((Transfer, "ended_with", lambda world, reaped, flights: flights),),
    ),
)
