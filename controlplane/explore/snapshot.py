"""Canonical images and copies of the machines' object graphs: what the explorer tells states apart by.

Two nodes with equal images behave alike from there on. What no machine reads back is left out, and so are the
absolute values of page generations: they are compared for equality alone and only rise, so that an extent is told by
whether it is at its page's present generation or was left behind.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from enum import Enum
from functools import cache
from io import BytesIO
from typing import Any

import msgspec

from dsv4ctl.controlplane.tickets.ledger import Ledger
from dsv4ctl.controlplane.tickets.ticket import Load, Ticket
from dsv4ctl.controlplane.tickets.types import Extent

#: Fields that are only reported, never read back by a machine, or that stay as they were made.
UNREAD = frozenset(
    {
        "MOVES",  # class tables
        "after",  # of a ticket: see `_items`
        "before",
        "deadlines",
        "details",
        "generation",  # of pages: see above
        "history",
        "name",
        "now",
        "participants",
        "pools",
        "ready",  # of pages: their generation, by their state and what they hold
        "reason",
        "refused",
        "request_id",
        "session",
        "source",
        "stale",
        "waker",
    }
)
#: Mappings whose order of insertion decides nothing (within the bounds of what is remembered).
UNORDERED = frozenset({"_by_room", "_ended", "_forgotten", "_poisons", "_tombstones", "_turns"})
_PLAIN: frozenset[type] = frozenset({int, str, bool, float, bytes, type(None)})

_fields: dict[type, tuple[str, ...]] = {}


def fields_of(kind: type) -> tuple[str, ...]:
    """Every slot of the class and its bases, or nothing for a class whose objects have a `__dict__`."""
    found = _fields.get(kind)
    if found is None:
        slots = [slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ())]
        found = _fields[kind] = tuple(dict.fromkeys(slots))
    return found


def _items(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, Ledger):  # a room's tickets are a set, however they hang together
        rooms = {room: set(thing.of_room(room)) for room in thing._by_room}
        return list({**thing.__dict__, "_by_room": rooms}.items())
    slots = fields_of(type(thing))
    return [(slot, getattr(thing, slot)) for slot in slots] if slots else list(thing.__dict__.items())


@cache
def _seen(kind: type, skip: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in fields_of(kind) if name not in skip)


class _Image:
    """One traversal: an object met again is named by the number it got first."""

    def __init__(self, skip: frozenset[str], generations: Mapping[str, list[int]]) -> None:
        self._skip = UNREAD | skip
        self._generations = generations
        self._numbers: dict[int, int] = {}

    def of(self, thing: Any) -> Any:
        kind = type(thing)
        if kind in _PLAIN or kind is frozenset:
            return thing
        if kind is Extent:
            return self._extent(thing)
        if kind is list or kind is tuple or kind is deque or isinstance(thing, tuple):
            return tuple([item if type(item) in _PLAIN else self.of(item) for item in thing])
        if isinstance(thing, Enum):
            return thing.value
        if isinstance(thing, dict):
            return tuple([(self.of(key), self.of(value)) for key, value in thing.items()])
        if isinstance(thing, set):
            return self._set(thing)
        if kind is bytearray:
            return bytes(thing)
        return self._object(thing)

    def _object(self, thing: Any) -> Any:
        number = self._numbers.get(id(thing))
        if number is not None:
            return ("#", number)
        self._numbers[id(thing)] = len(self._numbers)
        parts: list[Any] = [type(thing).__name__]
        if isinstance(thing, Ledger):
            return (*parts, *[self._field(name, value) for name, value in _items(thing) if name not in self._skip])
        for name in _seen(thing.__class__, self._skip) or [name for name in thing.__dict__ if name not in self._skip]:
            value = getattr(thing, name)
            parts.append(value if type(value) in _PLAIN else self._field(name, value))
        return tuple(parts)

    def _field(self, name: str, value: Any) -> Any:
        if name in UNORDERED:
            return tuple([self.of(item) for item in sorted(value.items(), key=lambda item: repr(item[0]))])
        return self.of(value)

    def _extent(self, extent: Extent) -> Any:
        now = self._generations[extent.space]
        current = tuple([now[p] == g for p, g in zip(extent.pages, extent.generations, strict=True)])
        return (extent.space, extent.pages, current, tuple(sorted(extent.pools)))

    def _set(self, things: set[Any]) -> Any:
        """Objects are ordered by when they were met, then by what they look like without their neighbours.

        A tie that this leaves costs a state that is explored twice, never one that is left out.
        """
        return tuple([self.of(thing) for thing in sorted(things, key=self._rank)])

    def _rank(self, thing: Any) -> tuple[int, str]:
        number = self._numbers.get(id(thing))
        if number is not None:
            return (number, "")
        plain = [value for _, value in _items(thing) if type(value) in _PLAIN] if _is_object(thing) else thing
        return (len(self._numbers), repr(plain))


def _is_object(thing: Any) -> bool:
    return not isinstance(thing, (tuple, Enum)) and type(thing) not in _PLAIN


def image(thing: Any, skip: frozenset[str] = frozenset(), ledger: Ledger | None = None) -> Any:
    """A hashable value, equal for two graphs that no later event can tell apart. `ledger`: whose extents they hold."""
    spaces = {} if ledger is None else {name: space.generation for name, space in ledger._spaces.items()}
    return _Image(skip, spaces).of(thing)


def copy_of(thing: Any) -> Any:
    """A copy of the whole graph; values that can't change are shared."""
    return _copy(thing, {})


def packed(thing: Any) -> bytes:
    """The whole graph in a fifth of the memory; `unpacked` makes a copy of it."""
    to = BytesIO()
    _Packer(to).dump(thing)
    return to.getvalue()


def unpacked(graph: bytes) -> Any:
    return pickle.loads(graph)


class _Packer(pickle.Pickler):
    """A struct is made blank and filled then: tickets and loads refer to each other."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, (Ticket, Load)):
            return NotImplemented
        return _blank_struct, (type(thing),), (None, dict(_items(thing)))


def _blank_struct(kind: type[msgspec.Struct]) -> Any:
    return kind(*[None] * len(kind.__struct_fields__))


def _copy(thing: Any, made: dict[int, Any]) -> Any:
    kind = type(thing)
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _COPIERS[kind] = _copier_of(thing, kind)
    return copier(thing, made)


def _shared(thing: Any, made: dict[int, Any]) -> Any:
    return thing


def _copier_of(thing: Any, kind: type) -> _Copier:
    """Enum members, frozen sets, tuples and extents are values; everything else is an object with fields."""
    if isinstance(thing, (Enum, frozenset, tuple, Extent)):
        return _shared
    slots = () if hasattr(thing, "__dict__") else fields_of(kind)
    blank: Callable[[Any], Any] = copy if isinstance(thing, msgspec.Struct) else _blank

    def copy_object(thing: Any, made: dict[int, Any]) -> Any:
        known = made.get(id(thing))
        if known is not None:
            return known
        known = made[id(thing)] = blank(thing)
        for name, value in [(slot, getattr(thing, slot)) for slot in slots] if slots else thing.__dict__.items():
            setattr(known, name, value if type(value) in _PLAIN else _copy(value, made))
        return known

    return copy_object


def _blank(thing: Any) -> Any:
    return object.__new__(type(thing))


_Copier = Callable[[Any, dict[int, Any]], Any]
_COPIERS: dict[type, _Copier] = {
    **dict.fromkeys(_PLAIN, _shared),
    tuple: lambda thing, made: tuple([_copy(item, made) for item in thing]) if thing else thing,
    list: lambda thing, made: [item if type(item) in _PLAIN else _copy(item, made) for item in thing],
    deque: lambda thing, made: deque([_copy(item, made) for item in thing]),
    set: lambda thing, made: {_copy(item, made) for item in thing},
    dict: lambda thing, made: {_copy(key, made): _copy(value, made) for key, value in thing.items()},
    bytearray: lambda thing, made: bytearray(thing),
}
