"""Event files: what a user reported, as events on the real machines in virtual time, and how it must end.

A file is TOML: `report`, `title`, `story`, `events`, `removed` (the guard without which it fails, a name in
`removals`) and `fails` (with which words). One event a line; `#` begins a comment:

  rank P0 prefill 8                  a verb of the world (`World.do_*`): ranks, rooms, messages, time, `expect ...`
  P0 post 7.1 D0                     a verb of a rank (`Rank.do_*`)
  refused (no free): D0 take x full 9   the event must be refused, in words that contain those
  each 1..8: open {n}.1 P0 D0 ; tick 1  the same for every number
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.tickets.gate import TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.engine_adapters.agent import UnknownRoomError
from event_rank import NoPages, Rank, Unmet
from event_world import World

#: How the machines say no.
REFUSALS = (Refusal, UnknownRoomError, LedgerError, TicketRevokedError, TicketTimeoutError, NoPages)
_EACH = re.compile(r"each (\d+)\.\.(\d+): (.*)")
_REFUSED = re.compile(r"refused \(([^)]*)\): (.*)")


class EventFile(msgspec.Struct, forbid_unknown_fields=True):
    report: int  #: its number in the list of reports
    title: str
    story: str  #: what users saw, where, and why
    removed: str
    fails: str
    events: str


def load(path: Path) -> EventFile:
    """Raises msgspec.ValidationError, tomllib.TOMLDecodeError."""
    return msgspec.convert(tomllib.loads(path.read_text()), EventFile)


def play(file: EventFile) -> World:
    """Plays the file. Raises Unmet at the first line that does not go as it says; ValueError: the file is wrong."""
    world = World()
    for number, line in _lines(file.events):
        try:
            _event(world, line)
            world.settle()
            world.check_undamaged()
        except Unmet as unmet:
            raise Unmet(f"line {number}, {line!r}: {unmet}") from None
    for rank in world.ranks.values():
        if rank.fault is not None:
            raise Unmet(f"the link thread of {rank.name} died: {rank.fault}")
    return world


def _lines(events: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(events.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        each = _EACH.fullmatch(line)
        if each is not None:
            for n in range(int(each[1]), int(each[2]) + 1):
                for one in each[3].split(" ; "):
                    yield number, one.strip().replace("{n}", str(n))
        elif line:
            yield number, line


def _event(world: World, line: str) -> None:
    refused = _REFUSED.fullmatch(line)
    try:
        _call(world, refused[2] if refused else line)
    except REFUSALS as refusal:
        why = f"{type(refusal).__name__}: {refusal}"
        if refused is None or refused[1] not in why:
            raise Unmet(f"refused: {why}") from None
        return
    if refused is not None:
        raise Unmet("a refusal was expected, there was none")


def _call(world: World, line: str) -> None:
    words = shlex.split(line)
    target: World | Rank = world
    if words[0] in world.ranks:
        target = world.ranks[words.pop(0)]
    elif words[0] == "expect":
        words[:2] = ["_".join(words[:2])]
    verb: Any = getattr(target, f"do_{words[0]}", None)
    if verb is None:
        verbs = ", ".join(name.removeprefix("do_") for name in dir(target) if name.startswith("do_"))
        raise ValueError(f"{line!r}: no event {words[0]!r}; there are {verbs}")
    plain = [word for word in words[1:] if "=" not in word]
    verb(*plain, **dict(word.split("=", 1) for word in words[1:] if "=" in word))
