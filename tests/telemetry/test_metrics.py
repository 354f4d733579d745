"""Metrics come from events and from the plane's answers."""

from __future__ import annotations

from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.telemetry.log import Telemetry

ENGINE = {
    "name": "decode0",
    "role": "decode",
    "state": "ready",
    "queues": {"transferring": 3, "decoding": 9},
    "counters": {"tokens_out": 41},
    "ledger": {"0": {"tickets": 4, "pages_owned": {"full": 12}, "pages_quarantined": {"full": 2}}},
}


def test_events_become_counters() -> None:
    telemetry = Telemetry()
    telemetry.emit(Event.GATEWAY_REQUEST, path="/v1/completions", status=200, seconds=0.02)
    telemetry.emit(Event.GATEWAY_REFUSED, code="draining", status=503)
    telemetry.emit(Event.ROOM_CLOSED, seconds=0.4, bytes_by_pool={"index_k": 16384})
    telemetry.emit(Event.ROOM_ABORTED, source="client", seconds=0.4)
    telemetry.emit(Event.ABORT_ACKED, outcome="quiet", seconds=0.003)
    telemetry.emit(Event.DIGEST_MISMATCH, "error", pools=["c4_kv", "index_k"])
    telemetry.emit(Event.ENGINE_RESTARTING, engine="decode0")
    text = telemetry.metrics.render({}, []).decode()
    for line in (
        'dsv4ctl:requests_total{path="/v1/completions",status="200"} 1.0',
        'dsv4ctl:requests_refused_total{code="draining"} 1.0',
        'dsv4ctl:rooms_ended_total{source="client",state="aborted"} 1.0',
        'dsv4ctl:kv_transfer_bytes_total{pool="index_k"} 16384.0',
        'dsv4ctl:decode_deferred_kv_release_seconds_count{outcome="quiet"} 1.0',
        'dsv4ctl:digest_mismatches_total{pool="c4_kv"} 1.0',
        'dsv4ctl:engine_restarts_total{engine="decode0"} 1.0',
        'dsv4ctl:events_total{event="digest.mismatch",level="error"} 1.0',
    ):
        assert line in text


def test_what_nobody_listens_to_is_counted_all_the_same() -> None:
    """No line and no record comes of these two; one of them says more than its number."""
    telemetry = Telemetry()
    telemetry.emit(Event.ROOM_STATE, "debug", state="landed")
    telemetry.emit(Event.ROOM_STATE, "debug", state="verified")
    telemetry.emit(Event.ABORT_ACKED, "debug", outcome="quiet", seconds=0.003)
    assert telemetry.recent() == []
    text = telemetry.metrics.render({}, []).decode()
    assert 'dsv4ctl:events_total{event="room.state",level="debug"} 2.0' in text
    assert 'dsv4ctl:events_total{event="abort.acked",level="debug"} 1.0' in text
    assert 'dsv4ctl:decode_deferred_kv_release_seconds_count{outcome="quiet"} 1.0' in text


def test_gauges_are_what_the_plane_says_now() -> None:
    metrics = Telemetry().metrics
    first = metrics.render({"rooms": {"sending": 2}}, [ENGINE]).decode()
    assert 'dsv4ctl:rooms{state="sending"} 2.0' in first
    assert 'dsv4ctl:num_decode_transfer_queue_reqs{engine="decode0"} 3.0' in first
    assert 'dsv4ctl:pages{engine="decode0",kind="quarantined",rank="0",space="full"} 2.0' in first
    assert 'dsv4ctl:queue_reqs{engine="decode0",queue="decoding"} 9.0' in first
    assert 'dsv4ctl:engine_counter{engine="decode0",name="tokens_out"} 41.0' in first
    assert "_created" not in first
    assert 'dsv4ctl:tickets{engine="decode0",rank="0"} 4.0' in first
    second = metrics.render({"rooms": {}}, [{**ENGINE, "state": "drained"}]).decode()
    assert "sending" not in second, "a state that no room is in any more is not shown for ever"
    assert 'dsv4ctl:engine_state{engine="decode0",role="decode",state="drained"} 1.0' in second
    assert 'state="ready"' not in second
