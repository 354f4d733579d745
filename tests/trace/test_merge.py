"""Events of several ranks in an order that respects cause and effect, whatever their clocks say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsv4ctl.controlplane.trace.format import Event, Extents
from dsv4ctl.controlplane.trace.merge import merge


def order(streams: Mapping[str, list[Event]], ahead: Mapping[str, int] | None = None) -> list[str]:
    def stream(events: list[Event]) -> Iterator[tuple[Event, Extents]]:
        for event in events:
            yield event, ()

    return [f"{i}{event.seq}" for i, event, _ in merge({i: stream(e) for i, e in streams.items()}, ahead or {})]


def event(seq: int, at: int, kind: str = "x", who: str = "", note: str = "") -> Event:
    return Event(seq, at, kind, "step", "7.1", who, note=note)


def test_by_time_where_nothing_orders_them() -> None:
    streams = {"D": [event(0, 1), event(1, 4)], "P": [event(0, 2), event(1, 3)]}
    assert order(streams) == ["D0", "P0", "P1", "D1"]
    assert order(streams, {"P": 10}) == ["D0", "D1", "P0", "P1"]


def test_nothing_is_received_before_it_is_sent() -> None:
    """P's clock runs far ahead."""
    told = [event(0, 1, "sent", "P", "destination"), event(1, 2, "received", "P", "ack:quiet")]
    wrote = [event(0, 100, "received", "D", "destination"), event(1, 101), event(2, 102, "sent", "D", "ack:quiet")]
    assert order({"D": told, "P": wrote}) == ["D0", "P0", "P1", "P2", "D1"]


def test_a_notification_rides_on_its_write() -> None:
    wrote, landed = [event(0, 100, "write", "D", "chunk 3"), event(1, 101)], [event(0, 1, "received", "P", "chunk 3")]
    assert order({"D": landed, "P": wrote}) == ["P0", "D0", "P1"]


def test_a_frame_whose_sending_was_not_recorded_is_not_waited_for_for_ever() -> None:
    lost = [event(0, 5, "received", "P", "ack:quiet"), event(1, 6)]
    assert order({"D": lost, "P": [event(0, 1), event(1, 9)]}) == ["P0", "P1", "D0", "D1"]
    assert order({"D": lost, "Q": [event(0, 9)]}) == ["D0", "D1", "Q0"], "P is not in the trace"
    both = {"D": lost, "P": [event(0, 4, "received", "D", "destination"), event(1, 9)]}
    assert order(both) == ["P0", "P1", "D0", "D1"]


def test_a_frame_that_is_sent_again_is_received_twice() -> None:
    sent = [event(0, 1, "sent", "P", "destination"), event(1, 2, "sent", "P", "destination")]
    got = [event(0, 1, "received", "D", "destination"), event(1, 1, "received", "D", "destination")]
    assert order({"D": sent, "P": got}) == ["D0", "P0", "D1", "P1"]
