"""Policies by kind and name: those in this package, and third-party ones by entry point.

A module of this package that is named in `KINDS` holds `POLICIES`: name -> class. A third party adds a name
by an entry point in the group `dsv4ctl.policies.<kind>`; its class takes the arguments of the kind's
`Factory`. A class with a `parameter(text)` is named with one, as in `sample:0.1`, and takes what that gives first.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args, overload

from dsv4ctl.policies import abort, admission, drain, hicache, integrity, restart, routing

Kind = Literal["abort", "admission", "drain", "hicache", "integrity", "restart", "routing"]
KINDS: tuple[str, ...] = get_args(Kind)
GROUP = "dsv4ctl.policies"


class PolicyError(ValueError):
    """No such policy, or one that cannot be loaded; the message says what would be right."""


@overload
def load(kind: Literal["abort"], name: str) -> abort.Factory: ...
@overload
def load(kind: Literal["admission"], name: str) -> admission.Factory: ...
@overload
def load(kind: Literal["drain"], name: str) -> drain.Factory: ...
@overload
def load(kind: Literal["hicache"], name: str) -> hicache.Factory: ...
@overload
def load(kind: Literal["integrity"], name: str) -> integrity.Factory: ...
@overload
def load(kind: Literal["restart"], name: str) -> restart.Factory: ...
@overload
def load(kind: Literal["routing"], name: str) -> routing.Factory: ...


def load(kind: Kind, name: str) -> Any:
    """The class called `name` among the policies of `kind`, with its parameter if it has one; called, it is the policy.

    Raises PolicyError for an unknown kind or name (naming the nearest valid ones), for a name that is taken twice, for
    an entry point that does not import, and for a parameter that is missing, wrong, or not taken.
    """
    name, colon, text = name.partition(":")
    found = _find(kind, name)
    read = getattr(found, "parameter", None)
    if read is None and colon:
        raise PolicyError(f"{kind} policy {name!r} takes no parameter, found {name + colon + text!r}")
    if read is None:
        return found
    try:
        return partial(found, read(text))
    except ValueError as error:
        raise PolicyError(f"{kind} policy {name!r}: {error}") from error


def _find(kind: Kind, name: str) -> Any:
    builtin, added = _builtin(kind), _added(kind)
    if len(added.get(name, ())) + (name in builtin) > 1:
        takers = ", ".join(sorted(entry.value for entry in added[name]))
        raise PolicyError(f"{kind} policy {name!r} is defined more than once: entry points {takers}; rename one")
    if name in builtin:
        return builtin[name]
    if name in added:
        return _import(kind, added[name][0])
    raise PolicyError(f"unknown {kind} policy {name!r}: {nearest(name, names(kind))}")


def names(kind: str) -> tuple[str, ...]:
    """All valid names of `kind`, sorted. Raises PolicyError for an unknown kind."""
    return tuple(sorted({*_builtin(kind), *_added(kind)}))


def nearest(given: str, valid: tuple[str, ...]) -> str:
    """'did you mean ...? valid: ...', the first part only where something comes close."""
    close = difflib.get_close_matches(given, valid, n=2)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}valid: {', '.join(map(repr, valid))}"


def _builtin(kind: str) -> Mapping[str, Any]:
    if kind not in KINDS:
        raise PolicyError(f"unknown kind of policy {kind!r}: {nearest(kind, KINDS)}")
    found: Mapping[str, Any] = import_module(f"dsv4ctl.policies.{kind}").POLICIES
    return found


def _added(kind: str) -> dict[str, list[EntryPoint]]:
    added: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=f"{GROUP}.{kind}"):
        added.setdefault(entry.name, []).append(entry)
    return added


def _import(kind: str, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{kind} policy {entry.name!r} ({entry.value}) cannot be imported: {error}") from error
