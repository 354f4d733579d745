"""Every metric, fed from events: a name and its meaning stand here and nowhere else.

Names follow those that operators know (`sglang:num_prefill_bootstrap_queue_reqs`, ...) with our prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from dsv4ctl.controlplane.telemetry.events import Event

PREFIX = "dsv4ctl:"
disable_created_metrics()  # type: ignore[no-untyped-call] # no second series beside every counter
#: Seconds: from one layer's copy to a long decode.
SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

#: By role and queue of an engine: the name that SGLang gives to the same queue.
QUEUES = {
    ("prefill", "waiting"): "num_prefill_bootstrap_queue_reqs",
    ("prefill", "transferring"): "num_prefill_inflight_queue_reqs",
    ("decode", "waiting"): "num_decode_prealloc_queue_reqs",
    ("decode", "transferring"): "num_decode_transfer_queue_reqs",
}
PAGE_KINDS = ("owned", "leased", "retiring", "quarantined")


class Metrics:
    """Counters and histograms from events; gauges from what the plane says when it is scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._events = self._counter("events", "Events by name and level", "event", "level")
        self._counted: dict[tuple[Event, str], Counter] = {}
        self._requests = self._counter("requests", "Requests answered by the gateway", "path", "status")
        self._request_seconds = self._histogram("request_seconds", "Request to last byte", "path")
        self._refused = self._counter("requests_refused", "Requests refused before a room was opened", "code")
        self._rooms_ended = self._counter("rooms_ended", "Rooms ended", "state", "source")
        self._retracted = self._counter(
            "rooms_retracted", "Generations of rooms that ended for want of pages on decode"
        )
        self._room_seconds = self._histogram("room_seconds", "Opened to ended", "state")
        self._bytes = self._counter("kv_transfer_bytes", "Bytes sent from prefill to decode", "pool")
        self._acks = self._histogram(
            "decode_deferred_kv_release_seconds", "Abort to acknowledgement by a rank", "outcome"
        )
        self._mismatches = self._counter("digest_mismatches", "Pools whose landed pages differ from the sealed", "pool")
        self._restarts = self._counter("engine_restarts", "Engine restarts", "engine")
        self._dropped = self._counter("log_lines_dropped", "Log lines lost to a slow reader")
        self._rooms = self._gauge("rooms", "Rooms in flight", "state")
        self._engine = self._gauge("engine_state", "1 for the state an engine is in", "engine", "role", "state")
        self._pages = self._gauge("pages", "Pages of a rank by space and kind", "engine", "rank", "space", "kind")
        self._tickets = self._gauge("tickets", "Live tickets of a rank", "engine", "rank")
        self._queue = self._gauge("queue_reqs", "Requests in a queue of an engine", "engine", "queue")
        self._queues = {
            key: self._gauge(name, f"Requests {key[1]} on a {key[0]} engine", "engine") for key, name in QUEUES.items()
        }
        self._work = self._gauge("engine_counter", "What an engine's process counted since it began", "engine", "name")
        self._observers: dict[Event, Callable[[Mapping[str, Any]], None]] = {
            Event.GATEWAY_REQUEST: self._on_request,
            Event.GATEWAY_REFUSED: lambda fields: self._refused.labels(fields.get("code", "")).inc(),
            Event.ROOM_CLOSED: lambda fields: self._on_ended("closed", fields),
            Event.ROOM_ABORTED: lambda fields: self._on_ended("aborted", fields),
            Event.ROOM_RETRACTED: lambda fields: self._retracted.inc(),
            Event.ABORT_ACKED: self._on_ack,
            Event.DIGEST_MISMATCH: self._on_mismatch,
            Event.ENGINE_RESTARTING: lambda fields: self._restarts.labels(fields.get("engine", "")).inc(),
            Event.LOG_DROPPED: lambda fields: self._dropped.inc(fields.get("count", 0)),
        }

    def observe(self, event: Event, record: Mapping[str, Any]) -> None:
        """Counts one event and what it says. Thread-safe."""
        self.count(event, record["level"])
        observer = self._observers.get(event)
        if observer:
            observer(record)

    def observes(self, event: Event) -> bool:
        """Whether anything but the number of such events is counted."""
        return event in self._observers

    def count(self, event: Event, level: str) -> None:
        """One more `event`, whatever it says. Thread-safe."""
        counter = self._counted.get((event, level))
        if counter is None:
            counter = self._counted[event, level] = self._events.labels(event.value, level)
        counter.inc()

    def render(self, status: Mapping[str, Any], engines: Iterable[Mapping[str, Any]]) -> bytes:
        """The text exposition; gauges are set from `Plane.status()` and `Plane.engines()`."""
        gauges = (self._rooms, self._engine, self._pages, self._tickets, self._queue, self._work)
        for gauge in (*gauges, *self._queues.values()):
            gauge.clear()
        for state, count in status.get("rooms", {}).items():
            self._rooms.labels(state).set(count)
        for engine in engines:
            self._show(engine)
        return generate_latest(self.registry)

    def _show(self, engine: Mapping[str, Any]) -> None:
        name = engine["name"]
        self._engine.labels(name, engine["role"], engine["state"]).set(1)
        for queue, length in (engine.get("queues") or {}).items():
            self._queue.labels(name, queue).set(length)
            if (engine["role"], queue) in self._queues:
                self._queues[engine["role"], queue].labels(name).set(length)
        for what, count in (engine.get("counters") or {}).items():
            self._work.labels(name, what).set(count)
        for rank, ledger in (engine.get("ledger") or {}).items():
            self._tickets.labels(name, rank).set(ledger.get("tickets", 0))
            for kind in PAGE_KINDS:
                for space, pages in ledger.get(f"pages_{kind}", {}).items():
                    self._pages.labels(name, rank, space, kind).set(pages)

    def _on_request(self, fields: Mapping[str, Any]) -> None:
        path = fields.get("path", "")
        self._requests.labels(path, fields.get("status", "")).inc()
        if "seconds" in fields:
            self._request_seconds.labels(path).observe(fields["seconds"])

    def _on_ended(self, state: str, fields: Mapping[str, Any]) -> None:
        self._rooms_ended.labels(state, fields.get("source", "")).inc()
        if "seconds" in fields:
            self._room_seconds.labels(state).observe(fields["seconds"])
        for pool, count in fields.get("bytes_by_pool", {}).items():
            self._bytes.labels(pool).inc(count)

    def _on_ack(self, fields: Mapping[str, Any]) -> None:
        if "seconds" in fields:
            self._acks.labels(fields.get("outcome", "")).observe(fields["seconds"])

    def _on_mismatch(self, fields: Mapping[str, Any]) -> None:
        for pool in fields.get("pools", ()):
            self._mismatches.labels(pool).inc()

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, doc, labels, registry=self.registry)

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, doc, labels, registry=self.registry, buckets=SECONDS)
