"""The same processors for compared servers: a thread whose core a stranger uses too is slower by a third.

A scheduler's main thread spins, and so does the one that drives its transfers. Which of a virtual machine's processors
share their core, and with whom, it is not told, and it changes within half a second. So threads that do the same in
compared servers share a processor, and only the schedulers of the servers that are asked run; the others are stopped.
(At a low priority they would run whenever the asked ones wait, for their interpreter, say, and gain what those lose.)
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import anyio

#: How long threads are watched, and the share of it that one which spins has run for.
_WATCHED_SECONDS, _SPINS = 0.25, 0.6
#: Processors that stay free for everything else: clients, control planes, and what does not spin in servers.
_FREE = 4


class Thread(NamedTuple):
    process: int
    number: int


class Shared(NamedTuple):
    """By arm the threads that spin; by processor those that share it. Empty: nothing is shared."""

    arms: tuple[tuple[Thread, ...], ...] = ()
    processors: tuple[tuple[Thread | None, ...], ...] = ()

    def asked(self, arm: int | None) -> None:
        """Its processes run, those of the others are stopped. None: all run.

        Stopped before others go on, whichever arm it is: how long a change takes must not depend on it.
        """
        for number, threads in sorted(enumerate(self.arms), key=lambda one: arm in (None, one[0])):
            _send(signal.SIGCONT if arm in (None, number) else signal.SIGSTOP, threads)

    def ran(self) -> list[float]:
        """Seconds on a processor so far, of all threads of each arm that spin."""
        return [sum(_ran(threads).values()) for threads in self.arms]


@asynccontextmanager
async def shared(arms: Sequence[Sequence[int]], turn: int = 0) -> AsyncIterator[Shared]:
    """`arms`: ports of idle servers, in one order in each. Each `turn` takes the next processors.

    Nothing is shared on few processors, or where a server has no thread that spins. At the end all run, and everywhere.
    """
    mine, parents = os.sched_getaffinity(0), _parents()
    spinning = await _spinning([[_threads(_schedulers(port, parents)) for port in arm] for arm in arms])
    processors = [threads for servers in zip(*spinning, strict=True) for threads in zip_longest(*servers)]
    every = all(threads for servers in spinning for threads in servers)
    if not every or len(processors) + _FREE > len(mine):
        yield Shared()
        return
    found = Shared(tuple(tuple(one for server in arm for one in server) for arm in spinning), tuple(processors))
    ordered = deque(sorted(mine))
    ordered.rotate(-turn * len(processors))
    own = {one: cpu for cpu, threads in zip(ordered, processors, strict=False) for one in threads if one}
    rest = mine - set(own.values())
    try:
        for one in _threads(_tree({os.getpid()}, parents)):
            _place(one, {own[one]} if one in own else rest)
        yield found
    finally:
        found.asked(None)
        for one in _threads(_tree({os.getpid()}, _parents())):  # one that began meanwhile began where its parent was
            _place(one, mine)


async def _spinning(arms: list[list[list[Thread]]]) -> list[list[list[Thread]]]:
    """Of the threads of each server of each arm those that spin."""
    every = [one for arm in arms for threads in arm for one in threads]
    before = _ran(every)
    await anyio.sleep(_WATCHED_SECONDS)
    after = _ran(every)
    spin = {one for one in after if after[one] - before.get(one, after[one]) > _SPINS * _WATCHED_SECONDS}
    return [[[one for one in threads if one in spin] for threads in arm] for arm in arms]


def _ran(threads: Iterable[Thread]) -> dict[Thread, float]:
    """Seconds on a processor so far."""
    found = {}
    for one in threads:
        with suppress(OSError):  # it ended meanwhile
            fields = _fields(Path(f"/proc/{one.process}/task/{one.number}/stat"))
            found[one] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _place(thread: Thread, processors: Iterable[int]) -> None:
    with suppress(ProcessLookupError):  # it ended meanwhile
        os.sched_setaffinity(thread.number, processors)


def _send(what: signal.Signals, threads: Iterable[Thread]) -> None:
    for process in sorted({one.process for one in threads}):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(process, what)


def _parents() -> dict[int, int]:
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            found[int(status.parent.name)] = int(_fields(status)[1])
    return found


def _fields(stat: Path) -> list[str]:
    """Of proc_pid_stat(5), from the third on: a name may hold anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def _schedulers(port: int, parents: dict[int, int]) -> set[int]:
    """Below what was started with `--port PORT`, which itself serves HTTP and is never stopped."""
    serving = {pid for pid in parents if f"\0--port\0{port}\0" in _command(pid)}
    return _tree(serving, parents) - serving


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


def _tree(roots: set[int], parents: dict[int, int]) -> set[int]:
    """They, and every process below them."""
    tree = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _threads(pids: Iterable[int]) -> list[Thread]:
    found = []
    for pid in sorted(pids):
        with suppress(OSError):  # it ended meanwhile
            found += [Thread(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task")]
    return sorted(found)
