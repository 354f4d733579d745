"""Whole cores for each server: a scheduler and its transfer agent spin, and two that share a core slow each other down.

That is by a third and for as long as neither is moved, and on which of two compared servers it falls is luck.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: For a scheduler's main thread, the one that drives its transfers, and the processes around it.
EACH = 4


def pin(ports: Sequence[int]) -> dict[int, list[int]]:
    """Gives every process of the servers at these ports to its server's cores. By port the processors.

    As many cores as two servers have stay free for clients and control planes. Too few cores for that: none is pinned.
    """
    cores, parents = _cores(), _parents()
    each = min(EACH, len(cores) // (len(ports) + 2))
    pinned = {}
    for at, port in enumerate(ports):
        mine = sorted(cpu for core in cores[at * each : (at + 1) * each] for cpu in core)
        pinned[port] = mine
        for pid in _tree(port, parents) if mine else ():
            for thread in _threads(pid):
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.sched_setaffinity(thread, mine)
    return pinned


def waited(ports: Sequence[int]) -> float:
    """Seconds so far that main threads of the servers' schedulers could have run, and others ran (proc: schedstat)."""
    parents, nanoseconds = _parents(), 0
    for pid in {pid for port in ports for pid in _tree(port, parents)}:
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith("sglang::scheduler"):
                nanoseconds += int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _cores() -> list[frozenset[int]]:
    """The processors of each core that this process may use (sysfs: topology/thread_siblings_list)."""
    mine = os.sched_getaffinity(0)
    found: dict[frozenset[int], None] = {}
    for cpu in sorted(mine):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found[frozenset(_numbers(siblings.read_text()) if siblings.exists() else {cpu}) & mine] = None
    return list(found)


def _numbers(text: str) -> set[int]:
    """Of `0-1,16-17`."""
    ranges = (part.split("-") for part in text.strip().split(","))
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _parents() -> dict[int, int]:
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            found[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    return found


def _tree(port: int, parents: dict[int, int]) -> set[int]:
    """Every process below one that was started with `--port PORT`, and that one."""
    tree = {pid for pid in parents if _port(pid) == port}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree


def _port(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    at = words.index("--port") + 1 if "--port" in words else len(words)
    return int(words[at]) if at < len(words) and words[at].isdigit() else None


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
