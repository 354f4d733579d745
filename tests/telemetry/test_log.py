"""What an event looks like as a line, and that no reader of stdout can block the control plane."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import LibraryHandler, Telemetry


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # the test closed it itself


def lines_of(read_end: int, write_end: int) -> list[dict[str, Any]]:
    os.close(write_end)
    with open(read_end, encoding="utf-8") as reader:
        return [json.loads(line) for line in reader]


def test_a_line_is_one_json_object_with_the_known_fields_first(pipe: tuple[int, int]) -> None:
    telemetry = Telemetry(fd=pipe[1], now=lambda: 1_800_000_000.25)
    telemetry.emit(
        Event.ROOM_ABORTED,
        "warning",
        reason="client left",
        source=AbortSource.CLIENT,
        engine=None,
        room=RoomKey(7, 2),
        request_id="req-1",
    )
    telemetry.close()
    (line,) = lines_of(*pipe)
    assert line == {
        "ts": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "event": "room.aborted",
        "request_id": "req-1",
        "room": "7.2",
        "reason": "client left",
        "source": "client",
    }
    assert list(line)[:5] == ["ts", "level", "event", "request_id", "room"]


def test_levels_below_the_threshold_are_not_written(pipe: tuple[int, int]) -> None:
    telemetry = Telemetry(fd=pipe[1], level="warning")
    telemetry.emit(Event.ROOM_STATE, "info")
    telemetry.emit(Event.LINK_LOST, "warning")
    telemetry.close()
    assert [line["event"] for line in lines_of(*pipe)] == ["link.lost"]


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_no_prompt_text_at_info_or_above(pipe: tuple[int, int], level: Any) -> None:
    telemetry = Telemetry(fd=pipe[1])
    telemetry.emit(Event.GATEWAY_REQUEST, level, prompt="secret words", path="/v1/completions")
    telemetry.close()
    (line,) = lines_of(*pipe)
    assert line["prompt"] == "<12 withheld>"
    assert line["path"] == "/v1/completions"


def test_console_lines_are_for_people(pipe: tuple[int, int]) -> None:
    telemetry = Telemetry(fd=pipe[1], console=True, now=lambda: 1_800_000_000.25)
    telemetry.emit(Event.ENGINE_READY, engine="prefill0", seconds=1.5)
    telemetry.close()
    os.close(pipe[1])
    with open(pipe[0], encoding="utf-8") as reader:
        text = reader.read()
    assert text.startswith("08:00:00.250 ")
    assert "engine.ready" in text
    assert "engine=prefill0" in text
    assert "\x1b" not in text


def fill(telemetry: Telemetry, capacity: int) -> int:
    """Emits until far more lines were given than a pipe and the queue can hold; returns how many."""
    count = capacity + 4000
    for number in range(count):
        telemetry.emit(Event.ENGINE_OUTPUT, line=f"{number:06d}" + "x" * 200)
    return count


def test_a_pipe_that_nobody_reads_blocks_nobody_and_drops_are_reported_when_it_flows(
    pipe: tuple[int, int],
) -> None:
    capacity = 50
    telemetry = Telemetry(fd=pipe[1], queue=capacity)
    emitted = threading.Event()
    count = 0

    def emit_all() -> None:
        nonlocal count
        count = fill(telemetry, capacity)
        emitted.set()

    # In a thread, so that an emit that blocks fails this test instead of hanging it.
    threading.Thread(target=emit_all, daemon=True).start()
    assert emitted.wait(60), "emit blocked on a stalled reader"
    assert telemetry.dropped > 0

    numbers: list[int] = []
    reported = 0
    with open(pipe[0], encoding="utf-8", closefd=False) as reader:
        while len(numbers) + reported < count:
            record = json.loads(reader.readline())
            if record["event"] == "log.dropped":
                reported += record["count"]
            else:
                numbers.append(int(record["line"][:6]))
                assert numbers[-1] == len(numbers) - 1 + reported, "drops are reported where they happened"
    assert reported == telemetry.dropped
    telemetry.close()
    assert lines_of(*pipe) == []


def test_close_gives_up_on_a_stalled_reader(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.telemetry.log.CLOSE_TIMEOUT", 0.05)
    telemetry = Telemetry(fd=pipe[1], queue=5000)
    fill(telemetry, 100)
    closer = threading.Thread(target=telemetry.close, daemon=True)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    os.close(pipe[0])  # frees the writer thread


@pytest.mark.asyncio
async def test_a_reader_that_is_gone_is_said_to_the_subscribers(pipe: tuple[int, int]) -> None:
    telemetry = Telemetry(fd=pipe[1])
    os.close(pipe[0])
    async with telemetry.subscribe() as stream:
        telemetry.emit(Event.LINK_LOST)
        with anyio.fail_after(60):
            assert (await stream.receive())["event"] == "link.lost"
            died = await stream.receive()
    assert (died["event"], died["loop"]) == ("loop.died", "log-writer")
    telemetry.emit(Event.LINK_LOST)
    assert telemetry.dropped == 2


@pytest.mark.asyncio
async def test_a_slow_subscriber_misses_events_and_is_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4ctl.controlplane.telemetry.hub.BUFFER", 2)
    telemetry = Telemetry()
    async with telemetry.subscribe() as stream:
        for seq in range(5):
            telemetry.emit(Event.ABORT_SENT, seq=seq)
        assert [(await stream.receive())["seq"] for _ in range(2)] == [0, 1]
        telemetry.emit(Event.ABORT_SENT, seq=5)
        dropped, last = await stream.receive(), await stream.receive()
    assert (dropped["event"], dropped["count"], last["seq"]) == ("log.dropped", 3, 5)
    telemetry.emit(Event.ABORT_SENT, seq=6)  # nobody listens: nothing happens


@pytest.mark.asyncio
async def test_events_of_other_threads_reach_subscribers() -> None:
    telemetry = Telemetry()
    async with telemetry.subscribe() as stream:
        await anyio.to_thread.run_sync(lambda: telemetry.emit(Event.LINK_LOST, engine="decode0"))
        with anyio.fail_after(60):
            record = await stream.receive()
    assert record["engine"] == "decode0"


@pytest.mark.asyncio
async def test_what_libraries_log_becomes_an_event() -> None:
    telemetry = Telemetry()
    logger = logging.getLogger("test.library")
    logger.propagate = False
    logger.addHandler(LibraryHandler(telemetry))
    async with telemetry.subscribe() as stream:
        logger.error("worker %d failed", 3)
        record = stream.receive_nowait()
    assert (record["event"], record["level"]) == ("log.library", "error")
    assert (record["logger"], record["message"]) == ("test.library", "worker 3 failed")
