"""What the control plane needs of an engine adapter: how to start the processes of an engine.

An adapter is the module `dsv4ctl.engine_adapters.<name>.launch`; it imports nothing heavy, so that
the control plane can load it and never loads torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple, Protocol, cast

import msgspec

import dsv4ctl.engine_adapters as adapters

#: The environment variable that carries a `LaunchRequest` as JSON to the engine process.
ENGINE_VARIABLE = "DSV4CTL_ENGINE"


class AdapterError(RuntimeError):
    """No engine can be started with this adapter; the message says why and what helps."""


class LaunchRequest(msgspec.Struct, frozen=True):
    """Everything a process is told at its start. `engine` is its table of the configuration."""

    engine: dict[str, object]
    rank: int  #: the first that this process runs
    incarnation: str  #: of `rank`
    group: str  #: the same for all ranks of one launch of the engine, and never used again
    link: str  #: path of the control plane's Unix socket
    unsafe_off: tuple[str, ...]  #: guards that are switched off
    integrity: str
    model: str  #: the name that clients use
    incarnations: tuple[str, ...] = ()  #: of every rank that this process runs, from `rank` on


class LaunchSpec(NamedTuple):
    """A process to start. `env` is added to the control plane's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    tree: bool = False  #: it starts processes of its own, which end with it
    health: tuple[str, int, str] | None = None  #: host, port and path that answer 200 once it serves


class Adapter(Protocol):
    def processes(self, ranks: int) -> int:
        """How many processes run an engine of `ranks` ranks; each runs as many."""

    def problems(self, engine: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """What is wrong with an engine's table of the configuration on any machine: keys below it, what was expected.

        The table has the keys and types of the schema; whoever launches an engine has asked first.
        """

    def least_deadlines(self) -> Mapping[str, float]:
        """Seconds below which a deadline, by its name in `[deadlines]`, would blame ranks that are well."""

    def launch(self, request: LaunchRequest) -> LaunchSpec:
        """How to start one process. Raises AdapterError if what the engine needs is not installed."""


def find(name: str) -> Adapter:
    """The adapter called `name`. Raises AdapterError with the names there are."""
    module = f"{adapters.__name__}.{name}.launch"
    try:
        return cast(Adapter, importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        known = sorted(entry.name for entry in pkgutil.iter_modules(adapters.__path__) if entry.ispkg)
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise AdapterError(f"no engine adapter {name!r}; {hint}") from error


def encode_request(request: LaunchRequest) -> dict[str, str]:
    """The environment that carries `request`."""
    return {ENGINE_VARIABLE: msgspec.json.encode(request).decode()}
