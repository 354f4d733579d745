"""Reports 5, 7, 28 and 34 in bytes, on the embedded engine: each ends well, and without its guard bytes are wrong."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.states import AbortSource, RoomKey
from dsv4ctl.engine_adapters.reference.digests import digest_pages
from dsv4ctl.engine_adapters.reference.engine import Engine
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.oracle import Oracle
from dsv4ctl.engine_adapters.reference.requests import Output, Request
from pair import Pair
from removals import REMOVALS
from single import DEADLINES, Single, answer

PAGE, DEVICE, HOST = 256, 12, 64
#: Pages of the prefix that comes from the host.
PREFIX = 4
GIVEN_AWAY = "pages given away under a load"
#: Tokens of an answer that is aborted: none is complete before.
ENDLESS = 4000


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(tokens)]


def until(what: str, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, f"not within 60 s: {what}"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(Geometry(), 0)


class Loads(Single):
    """Loads of the host wait for `let_go`; a prefix of one page is computed, not loaded."""

    def __init__(self, off: tuple[str, ...] = ()) -> None:
        hicache = HiCacheConfig(pages=HOST, h2d_gbps=0, load_threshold_pages=2)
        reference = ReferenceConfig(device_pages=DEVICE)
        super().__init__(EngineConfig(name="s", role="single", hicache=hicache, reference=reference), off)
        self.let_go = threading.Event()
        host = self.engine._hicache
        assert host is not None
        host._copies._link.carry = lambda nbytes: self.let_go.wait(60)  # type: ignore[attr-defined]

    def on_the_host(self, ids: list[int]) -> None:
        """`ids` are cached, on the host alone; every device page is free."""
        cache, evictor = self.engine._loop._cache, prompt(9, DEVICE * PAGE - 8)
        for each in (ids, evictor):
            self.answer(self.ask(each, 1)[1])
        self.settle()
        with self.between_rounds():
            cache.forget(cache.match(evictor))
        until("the device is empty", lambda: self.engine.gate.room_in("full") == (DEVICE, 0))

    def abort_under_load(self, key: RoomKey) -> None:
        """The room of `key` is over, and what it asked the host for is still on its way."""
        until("the load is under way", lambda: bool(self.engine._loop._loading))
        self.engine._agent.abort(key, AbortSource.CLIENT, "left")
        until("the room is over", lambda: key not in self.engine._rooms.live)
        assert not self.let_go.is_set()

    def loaded(self) -> None:
        self.let_go.set()
        until("the load has ended", lambda: not self.engine._loop._loading)

    def damaged(self) -> set[str]:
        """Pools in which a cached page on the device is not what was sealed."""
        pools = self.engine._pools
        found = set()
        for node in self.engine._loop._cache.nodes():
            for pool, spec in pools.specs.items():
                if spec.space != "full" or "full" not in node.device:
                    continue
                pages, rows = node.device["full"].pages, spec.valid_rows(0, PAGE)
                digests = [digest_pages(pools, pool, layer, pages, rows)[0] for layer in spec.model_layers]
                if (np.array(digests) != np.array(node.digests.values[pool], dtype=np.uint64)).any():
                    found.add(pool)
        return found

    def stop(self) -> None:
        self.let_go.set()
        super().stop()


@contextmanager
def loads(*off: str) -> Iterator[Loads]:
    single = Loads(off)
    try:
        yield single
    finally:
        single.stop()


def abort_a_load(single: Loads) -> tuple[list[int], queue.Queue[Output], list[int]]:
    """A request is aborted under its load; then another one wants every page. Its outputs; both prompts."""
    ids, filler = prompt(1, PREFIX * PAGE + 60), prompt(5, DEVICE * PAGE - 8)
    single.on_the_host(ids)
    single.abort_under_load(single.ask(ids, 4)[0])
    return filler, single.ask(filler, 1)[1], ids


def test_pages_of_an_aborted_load_are_free_when_its_last_byte_is_here(oracle: Oracle) -> None:
    """Report 5: not before, and each once."""
    with loads() as single:
        _, outputs, ids = abort_a_load(single)
        until("the pages are given back", lambda: single.engine.gate.counts()["retiring"]["full"] == PREFIX)
        assert outputs.empty()
        single.loaded()
        assert single.answer(outputs)[1].reason == "length"
        assert single.damaged() == set()
        assert single.answer(single.ask(ids, 4)[1])[0] == oracle.generate(ids, 4).tokens
        # Aborted once all is here: free at once, and each page once.
        key, outputs = single.ask(ids, 100)
        until("its first token is out", lambda: not outputs.empty())
        single.engine._agent.abort(key, AbortSource.CLIENT, "left")
        single.settle()
        single.engine.flush()
        single.settle()
        counts = single.engine.gate.counts()
        assert (counts["free"]["full"], counts["retiring"]["full"], single.ended) == (DEVICE, 0, [])


def test_pages_of_an_aborted_load_that_are_freed_early_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 5, with the guard removed."""
    REMOVALS["lease_holds_pages"](monkeypatch)
    with loads() as single:
        _, outputs, _ = abort_a_load(single)
        single.answer(outputs)  # the pages are its own, and the load has not ended
        assert single.damaged() == set()
        single.loaded()
        assert "c4_kv" in single.damaged()


@pytest.mark.parametrize("off", [(), ("fold",)], ids=["guarded", "fold off"])
def test_a_page_that_is_published_again_is_not_folded_away_under_its_load(off: tuple[str, ...], oracle: Oracle) -> None:
    """Report 7: one request computes the page that another one loads. Folded, it is overwritten at its next owner."""
    ids = prompt(1, PREFIX * PAGE + 60)
    computes, filler = ids[:PAGE] + prompt(2, 40), prompt(5, 8 * PAGE - 8)
    with loads(*off) as single:
        single.on_the_host(ids)
        with single.between_rounds():
            _, computed = single.ask(computes, 1)
            key, _ = single.ask(ids, 4)
        single.abort_under_load(key)  # it would wait for the load, and the step with it
        assert single.answer(computed)[1].cached_tokens == 0
        single.answer(single.ask(filler, 1)[1])
        single.loaded()
        assert single.engine.gate.violations[GIVEN_AWAY] == len(off)
        if off:
            assert "c4_kv" in single.damaged()
        else:
            assert single.damaged() == set()
            tokens, finished = single.answer(single.ask(ids, 4)[1])
            assert (tokens, finished.cached_tokens) == (oracle.generate(ids, 4).tokens, PREFIX * PAGE)


def take_host_pages_for_device_pages(single: Loads, ids: list[int]) -> queue.Queue[Output]:
    """The defect of the report: the cached prefix names its pages by their numbers on the host."""
    single.answer(single.ask(prompt(7, 2 * PAGE + 8), 1)[1])  # from here on the numbers differ
    single.answer(single.ask(ids, 1)[1])
    single.settle()
    for node in single.engine._loop._cache.match(ids):
        assert node.host["full"].pages != node.device["full"].pages
        node.device["full"] = node.host["full"]
    return single.ask(ids, 4)[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_host_pages_are_refused_where_device_pages_are_read() -> None:
    """Report 34: the engine ends rather than read them."""
    with loads() as single:
        outputs = take_host_pages_for_device_pages(single, prompt(1, PREFIX * PAGE + 60))
        single.engine._thread.join(60)
        assert "attention reads device pages" in single.ended[0]
        assert outputs.empty()


def test_host_pages_read_as_device_pages_are_other_bytes(monkeypatch: pytest.MonkeyPatch, oracle: Oracle) -> None:
    """Report 34, with the guard removed."""
    REMOVALS["two_index_spaces"](monkeypatch)
    with loads() as single:
        ids = prompt(1, PREFIX * PAGE + 60)
        outputs = take_host_pages_for_device_pages(single, ids)
        tokens, finished = single.answer(outputs)
        assert finished.cached_tokens == PREFIX * PAGE
        assert tokens != oracle.generate(ids, 4).tokens
        assert "c4_kv" in single.damaged()


class Retracted(Pair):
    """A room whose bytes are here and that was retracted; `again` opens it once more at the decode engine."""

    ids = prompt(1, 600)

    def __init__(self) -> None:
        super().__init__("read")
        transfer = self.decode._transfer
        assert transfer is not None
        self.receiver = transfer.receiver
        self.told: list[tuple[str, bytes]] = []
        plain = self.receiver.notified

        def notified(writer: str, payload: bytes) -> None:
            self.told.append((writer, payload))
            plain(writer, payload)

        self.receiver.notified = notified  # type: ignore[method-assign]
        sequence, _ = self.ask(self.ids, ENDLESS)
        self.key = sequence.key
        self.until("its bytes are here", lambda: sequence.manifest is not None)
        self.decode._agent.abort(self.key, AbortSource.RETRACTION, "an older room needs its pages")
        self.until("at rest", lambda: not self.decode._rooms.live and not self.prefill._rooms.live)
        self.until("the abort is answered", lambda: not any(transfer._unacked.values()))
        self.receiver.notified = plain  # type: ignore[method-assign]

    def again(self, key: RoomKey) -> queue.Queue[Output]:
        """Its writer has computed nothing yet: whatever is heard now is of the first time."""
        outputs: queue.Queue[Output] = queue.Queue()
        self.open_room(self.decode, key)
        self.submit(self.decode, key, outputs.put)
        self.until("it waits for its bytes", lambda: key in self.receiver._rooms)
        for told in self.told:
            self.receiver._inbox.put(partial(self.receiver.notified, *told))
        return outputs

    def open_room(self, engine: Engine, key: RoomKey) -> None:
        peer, ports = ("prefill", (self._port,)) if engine is self.decode else ("decode", ())
        engine._agent.handle(OpenRoom(key, "r", None, peer, (peer,), DEADLINES, "read", ports))

    def submit(self, engine: Engine, key: RoomKey, emit: Callable[[Output], None]) -> None:
        engine.submit(Request("r", key, tuple(self.ids), 4, True, "127.0.0.1", self._port, emit))

    @property
    def _port(self) -> int:
        assert self.prefill._transfer is not None
        return self.prefill._transfer.bootstrap_port


@contextmanager
def retracted() -> Iterator[Retracted]:
    pair = Retracted()
    try:
        yield pair
    finally:
        pair.stop()


def test_a_retracted_room_begins_again_and_waits_for_its_own_bytes(oracle: Oracle) -> None:
    """Report 28, over real NIXL."""
    with retracted() as pair:
        pair.open_room(pair.decode, pair.key)
        assert pair.decode._agent.counters["refused_rooms"] == 1
        key = pair.key._replace(generation=2)
        pair.open_room(pair.prefill, key)
        outputs = pair.again(key)
        pair.until("all is heard", lambda: pair.receiver.counters["late_notifications"] == len(pair.told))
        assert outputs.empty()
        pair.submit(pair.prefill, key, lambda output: None)
        tokens, finished = answer(outputs)
        assert (tokens, finished.reason) == (oracle.generate(pair.ids, 4, ignore_eos=True).tokens, "length")
        assert pair.decode._agent.counters["digest_mismatches"] == 0


def test_a_room_that_begins_again_as_it_was_takes_the_first_times_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 28, with the guard removed: pages in which nothing was written count as here."""
    REMOVALS["ended_generations"](monkeypatch)
    with retracted() as pair:
        pair.again(pair.key)
        pair.until("a verdict", lambda: pair.decode._agent.counters["digest_mismatches"] > 0)
