"""Runs as the engine process itself, before the engine: `python child.py PARENT_PID ARGV...`.

Asks the kernel to kill this process when the control plane dies, then becomes the engine. It runs
here and not between fork and exec of the control plane, where other threads may hold locks.
Only the standard library: it is started by path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Becomes `argv`. Does not return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the control plane ended before its engine began")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
