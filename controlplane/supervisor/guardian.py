"""The root of an engine that is a tree of processes: `python guardian.py PARENT_PID ARGV...`.

Starts `ARGV` and stays: every process below it that loses its parent becomes its child (it is a subreaper), and it
ends only once all of them are reaped. So the end of this one process is the proof that none of the tree is left.
SIGTERM goes to `ARGV` alone; `KILL`, sent by the control plane or by the kernel when that dies, ends the tree; so
does the end of `ARGV`, whose exit status becomes ours. Only the standard library: it is started by path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Asks for the end of the whole tree.
KILL = signal.SIGUSR1
_AWAITED = (signal.SIGTERM, signal.SIGCHLD, KILL)
#: Exit code of a shell for a command that cannot be run.
_NOT_RUN = 127


def main(parent: int, argv: list[str]) -> int:
    """Runs the tree to its end; the exit status of `argv` as `os.waitpid` gives it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _die_with(parent, KILL)
    root = _start(argv)
    status = _until_over(root)
    return _end(root, status)


def _start(argv: list[str]) -> int:
    """The process id of `argv`: in a group of its own, killed with this process."""
    guardian = os.getpid()
    root = os.fork()
    if root:
        return root
    _die_with(guardian, signal.SIGKILL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(_NOT_RUN)  # noqa: TID251 - the fork of a process that has nothing to clean up


def _until_over(root: int) -> int | None:
    """The status of `root` if it ended; None if the tree is to be killed. No deadline: an engine may live for ever."""
    while True:
        match signal.sigwait(_AWAITED):
            case signal.SIGTERM:
                os.kill(root, signal.SIGTERM)
            case signal.SIGCHLD:
                while (found := _reap(os.WNOHANG)) is not None and found[0]:
                    if found[0] == root:
                        return found[1]
            case _:
                return None


def _end(root: int, status: int | None) -> int:
    """Kills until nothing is left. Each death may bring orphans, so each is followed by another look."""
    while True:
        for pid in _below(os.getpid()):
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)
        found = _reap(0)
        if found is None:
            return status if status is not None else signal.SIGKILL
        if found[0] == root:
            status = found[1]


def _reap(options: int) -> tuple[int, int] | None:
    """(pid, status) of a child that ended, (0, 0) if none did, None if there is no child at all."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
        return None


def _below(pid: int) -> list[int]:
    """Every living descendant of `pid`."""
    children: dict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            children[int(fields[1])].append(int(process.name))
    found = list(children[pid])
    for one in found:
        found.extend(children[one])
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _die_with(parent: int, number: signal.Signals) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the control plane ended before its engine began")


def _exit_as(status: int) -> None:
    """Ends this process as the one with `status` ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _exit_as(main(int(sys.argv[1]), sys.argv[2:]))
