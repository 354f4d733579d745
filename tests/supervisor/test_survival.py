"""Processes that outlive whoever started them: found again by pid and start time, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import ANY

import anyio
import msgspec
import pytest

from dsv4ctl.controlplane.supervisor import survival
from dsv4ctl.controlplane.supervisor.survival import Kept, SurvivingProcess, Survivors, Wanted, anybody_left
from running import PATIENCE, until

pytestmark = pytest.mark.asyncio

#: A control plane that starts two ranks of `e` and is gone at once; given a word more, before its registry has them.
_STARTER = """
import os, sys, anyio
from pathlib import Path
from dsv4ctl.controlplane.supervisor.survival import Survivors
async def main():
    survivors = Survivors(Path(sys.argv[1]))
    for rank in (0, 1):
        argv = (sys.executable, "-c", "print('said', flush=True); import time; time.sleep(600)")
        process = await survivors.start(f"incarnation{rank}", argv, {})
        if len(sys.argv) == 2:
            survivors.note("e", rank, f"incarnation{rank}", process.pid, "told")
            process.go()
        print(process.pid, flush=True)
    os._exit(0)
anyio.run(main)
"""
WANTED = {"e": Wanted(2, "told")}


def _left_behind(*arguments: str) -> list[int]:
    starter = subprocess.run([sys.executable, "-c", _STARTER, *arguments], capture_output=True, text=True, timeout=60)
    found = [int(line) for line in starter.stdout.split()]
    assert len(found) == 2, starter.stderr
    return found


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[list[int]]:
    """Of the ranks left behind in `tmp_path`."""
    found = _left_behind(str(tmp_path))
    yield found
    for pid in found:  # the registry may have forgotten them
        if _alive(pid) and b"said" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, 9)


def _registry(folder: Path) -> list[Kept]:
    return msgspec.json.decode((folder / "engines.json").read_bytes(), type=list[Kept])


def _alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # reaped before it was opened, or read
        return False


async def _settle(folder: Path, wanted: dict[str, Wanted]) -> tuple[Survivors, dict[str, list[str]], list[str]]:
    survivors, reasons = Survivors(folder), []
    with anyio.fail_after(PATIENCE):
        going_on = await survivors.settle(wanted, lambda kept, reason: reasons.append(reason))
    return survivors, going_on, reasons


def _adopted(survivors: Survivors, incarnation: str) -> SurvivingProcess:
    process = survivors.adopted(incarnation)
    assert process is not None
    return process


async def test_a_process_of_another_is_found_killed_and_known_to_be_gone(tmp_path: Path, pids: list[int]) -> None:
    survivors, going_on, reasons = await _settle(tmp_path, WANTED)
    assert (going_on, reasons) == ({"e": ["incarnation0", "incarnation1"]}, [])
    process = _adopted(survivors, "incarnation0")
    assert process.pid == pids[0]
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(process.reaped)
            waiting.start_soon(process.relay, lambda stream, text: None)
            process.kill()
            assert await process.reaped() is None
    process.kill()
    await process.close()
    assert not _alive(pids[0])
    assert _alive(pids[1])
    assert survivors.adopted("incarnation0") is None


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({}, "the configuration has no such engine that survives"),
        ({"e": Wanted(2, "other")}, "it was started with another configuration"),
        ({"e": Wanted(3, "told")}, "of 3 ranks there are left: 0, 1"),
    ],
)
async def test_what_does_not_fit_is_killed_before_anything_starts(
    tmp_path: Path, pids: list[int], wanted: dict[str, Wanted], reason: str
) -> None:
    _, going_on, reasons = await _settle(tmp_path, wanted)
    assert (going_on, reasons) == ({}, [reason, reason])
    assert not any(_alive(pid) for pid in pids)


async def test_a_pid_that_is_somebody_else_s_now_is_left_alone(tmp_path: Path, pids: list[int]) -> None:
    """Its start time is another: the process that is meant is gone."""
    kept = [msgspec.structs.replace(entry, born=entry.born - 1) for entry in _registry(tmp_path)]
    (tmp_path / "engines.json").write_bytes(msgspec.json.encode(kept))
    _, going_on, reasons = await _settle(tmp_path, {})
    assert (going_on, reasons) == ({}, [])
    assert all(_alive(pid) for pid in pids)


class Waiting(NamedTuple):
    """Of a `settle` under way: what it said of whom, whom it waits for, and what it found once it is over."""

    reasons: dict[str, str]
    child: subprocess.Popen[bytes]
    found: list[dict[str, list[str]]]


def _sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


@asynccontextmanager
async def waiting(folder: Path, wanted: dict[str, Wanted]) -> AsyncIterator[Waiting]:
    """The first entry of the registry is of a process that does not survive and takes its time to end."""
    child = _sleeping()
    before = _registry(folder)
    survivors = Survivors(folder)
    survivors.note("f", 0, "first", child.pid)
    (folder / "engines.json").write_bytes(msgspec.json.encode([*_registry(folder), *before]))
    told = Waiting({}, child, [])

    async def settle() -> None:
        told.found.append(
            await survivors.settle(wanted, lambda kept, reason: told.reasons.update({kept.incarnation: reason}))
        )

    with anyio.fail_after(PATIENCE):
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(settle)
                await until(lambda: "first" in told.reasons)
                yield told
                tasks.cancel_scope.cancel()
        finally:
            child.kill()
            child.wait()


async def test_what_ends_with_its_control_plane_is_waited_for_not_killed(tmp_path: Path, pids: list[int]) -> None:
    """It may have children to kill first."""
    async with waiting(tmp_path, WANTED) as told:
        assert (told.child.poll(), told.found) == (None, [])
        told.child.kill()
        await until(lambda: told.found == [{"e": ["incarnation0", "incarnation1"]}])
        assert all(_alive(pid) for pid in pids)


async def test_whoever_is_to_end_is_killed_before_anybody_is_waited_for(tmp_path: Path, pids: list[int]) -> None:
    async with waiting(tmp_path, {}) as told:
        await until(lambda: not any(_alive(pid) for pid in pids))
        assert set(told.reasons) == {"first", "incarnation0", "incarnation1"}
        assert (told.child.poll(), told.found) == (None, [])
        told.child.kill()
        await until(lambda: told.found == [{}])


async def test_an_engine_that_loses_a_rank_while_another_is_waited_for_does_not_go_on(
    tmp_path: Path, pids: list[int]
) -> None:
    async with waiting(tmp_path, WANTED) as told:
        assert set(told.reasons) == {"first"}
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: not _alive(pids[1]))
        told.child.kill()
        await until(lambda: told.found == [{}])
        assert told.reasons["incarnation0"] == "of 2 ranks there are left: 0"
        assert "incarnation1" not in told.reasons
        assert not _alive(pids[0])


async def test_who_looks_after_one_that_was_cancelled_finds_what_is_left(tmp_path: Path, pids: list[int]) -> None:
    async with waiting(tmp_path, WANTED):
        assert anybody_left(tmp_path)
    _, going_on, reasons = await _settle(tmp_path, WANTED)
    assert (going_on, reasons) == ({"e": ["incarnation0", "incarnation1"]}, [])
    async with waiting(tmp_path, {"e": Wanted(2, "other")}):
        await until(lambda: not any(_alive(pid) for pid in pids))
    assert await _settle(tmp_path, WANTED) == (ANY, {}, [])
    assert not anybody_left(tmp_path)


async def test_a_registry_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text("[{]")
    with pytest.raises(OSError, match=r"engines\.json is no registry of engines"):
        await _settle(tmp_path, {})


async def test_a_child_s_output_and_exit_code_are_ours(tmp_path: Path) -> None:
    survivors = Survivors(tmp_path)
    argv = (sys.executable, "-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    process = await survivors.start("incarnation0", argv, {})
    process.go()
    lines: list[tuple[str, str]] = []
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.relay, lambda stream, text: lines.append((stream, text)))
            assert await process.reaped() == 3
    await process.close()
    assert sorted(lines) == [("stderr", "two"), ("stdout", "one")]
    assert os.listdir(tmp_path) == []


async def test_a_control_plane_gone_before_its_registry_has_an_engine_leaves_none(tmp_path: Path) -> None:
    held = _left_behind(str(tmp_path), "too early")
    await until(lambda: not any(map(_alive, held)))
    assert {name: os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)} == {
        f"incarnation{rank}.{stream}": 0 for rank in (0, 1) for stream in ("stdout", "stderr")
    }, "it said nothing, and never began"


async def test_a_name_that_is_no_text_hides_no_process() -> None:
    argv = (sys.executable, "-c", "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff)'); print(flush=True); input()")
    async with await anyio.open_process(argv) as named:
        assert named.stdout is not None
        await named.stdout.receive()
        assert (await anyio.Path(f"/proc/{named.pid}/comm").read_bytes()) == b"\xff)\n"
        assert (survival._born(named.pid) or 0) > 0
        named.kill()


async def test_a_process_that_never_began_leaves_nothing_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    process = await Survivors(tmp_path).start("incarnation0", ("sleep", "600"), {})
    process.kill()
    with anyio.fail_after(PATIENCE):
        assert await process.reaped() == -signal.SIGKILL
    await process.close()
    assert (os.listdir("/proc/self/fd"), os.listdir(tmp_path)) == (before, [])


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-python"):
        await Survivors(tmp_path).start("incarnation0", ("/no-such-python", "-c", "1"), {})
    assert os.listdir(tmp_path) == []


async def test_output_that_somebody_removed_ends_no_engine(tmp_path: Path) -> None:
    """As whoever cleans a temporary directory does with files that are old."""
    process = await Survivors(tmp_path).start("incarnation0", ("sleep", "600"), {})
    process.go()
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.relay, lambda stream, text: None)
            process.kill()
            assert await process.reaped() == -signal.SIGKILL
    assert process.relayed.is_set()
    await process.close()
