"""Digests of the cache: what a load filled is what was backed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import RoomState
from dsv4ctl.engine_adapters.sglang.digests import Check, Noted
from dsv4ctl.engine_adapters.sglang.hooks import life
from sglang_contract.checks import alone
from sglang_contract.situations import COUNTS, check_again
from sglang_world import PAGE, World, tokens


@alone
def wrong_bytes_after_a_load_fail_what_is_being_computed(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    next(iter(made.host._bytes.values()))[0, 3] ^= 1
    key = made.open(peers=())
    made.rank.rooms.forward_begin(7)
    made.load_back()
    made.controller.start_loading()
    made.device.run()
    check_again(made)
    assert made.rank.counters["load_mismatches"] == 1
    assert RoomState.ABORTING in made.states(key)


def _noted_on(made: World) -> list[Any]:
    """The streams on which digests of copies will have been noted."""
    streams: list[Any] = []
    digests = made.rank.digests
    sealer = digests._sealer

    def beside(call: Any) -> Any:
        return lambda *what: streams.append(made.device.current) or call(*what)

    digests._sealer = SimpleNamespace(**{name: beside(getattr(sealer, name)) for name in ("seal", "move", "digests")})
    return streams


@alone
def digests_are_noted_behind_the_forward(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    streams = _noted_on(made)
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    made.load_back()
    made.controller.start_loading()
    assert streams == [*[made.scheduler.forward_stream] * 2, made.controller.load_stream]


@alone
def digests_of_a_backup_are_noted_before_its_pages_are_sealed_anew(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    before = made.rank.digests.spaces["full"].sealed.numbers[:, [10, 11]].clone()
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    made.compute(10, 11)
    assert made.rank.digests.spaces["full"].on_host.numbers[:, [0, 1]].tolist() == before.tolist()
    assert made.rank.digests.spaces["full"].sealed.numbers[:, [10, 11]].tolist() != before.tolist()


@alone
def of_two_backups_to_one_host_page_the_last_is_noted(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    sealed = made.rank.digests.spaces["full"].sealed.numbers.clone()
    for device, host in ((10, 1), (10, 0), (11, 0)):
        made.back_up(device, host)
    sealer, together = made.rank.digests._sealer, []
    seal = lambda moves, places: together.append(len(moves)) or sealer.seal(moves, places)  # noqa: E731
    made.rank.digests._sealer = SimpleNamespace(seal=seal)
    made.compute(12)
    assert together == [1, 1, 1]
    assert made.rank.digests.spaces["full"].on_host.numbers[:, [0, 1]].tolist() == sealed[:, [11, 10]].tolist()


def _cached() -> World:
    """A rank with two pages on its host."""
    made = World(Role.SINGLE, (), "read")
    made.compute(10, 11)
    for host, device in enumerate((10, 11)):
        made.back_up(device, host)
    return made


@alone
def check_of_a_load_compares_with_what_was_noted_for_it(_: bool) -> None:
    made = _cached()
    pages = made.load_back()
    made.controller.start_loading()
    made.device.run()
    made.rank.digests.spaces["full"].sealed.numbers[:, list(pages)] = 0  # their next owner's
    check_again(made)
    assert made.rank.counters["load_mismatches"] == 0


def _window_load(made: World, device_page: int) -> None:
    """Page 7 of the window, backed up to host page 3, is loaded into another page."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation

    def operation(page: int) -> Any:
        window = PoolTransfer(name=PoolName.SWA, host_indices=tokens(3), device_indices=tokens(page))
        return CacheOperation(tokens(), tokens(), 1, pool_transfers=[window])

    for page, queued, start in (
        (7, made.controller.write_queue, made.controller.start_writing),
        (device_page, made.controller.load_queue, made.controller.start_loading),
    ):
        queued.append(operation(page))
        start()
        made.device.run()


@alone
def window_that_a_load_did_not_fill_is_seen(_: bool) -> None:
    for page, differences in ((7, 0), (9, COUNTS["swa"])):
        made = World(Role.SINGLE, (), "read")
        made.compute(7, 9)
        _window_load(made, page)
        check_again(made)
        assert made.rank.counters["load_mismatches"] == differences


@alone
def pages_of_the_window_are_sealed_where_the_window_has_them(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.rank.digests._to_window = lambda tokens: torch.where(tokens < 5 * PAGE, tokens + 2 * PAGE, -1)
    made.compute(4, 5)
    for space, pages in (("full", [4, 5]), ("swa", [6])):
        sealed = made.rank.digests.spaces[space].sealed.numbers[0]
        assert [page for page in range(16) if sealed[page]] == pages


@alone
def page_that_a_decoded_token_fills_is_sealed(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.scheduler.tp_worker = worker = object()
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: True),
        out_cache_loc=torch.tensor([PAGE * 4 - 1, PAGE * 6 + 10]),
        seq_lens_cpu=torch.tensor([2 * PAGE, PAGE + 11]),
    )
    life.forward(lambda *args: None, worker, batch)
    sealed = made.rank.digests.spaces["full"].sealed.numbers[0]
    assert [page for page in range(16) if sealed[page]] == [3]


@alone
def without_overlap_digests_are_noted_where_forwards_run(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    made.scheduler.enable_overlap = False
    streams = _noted_on(made)
    made.back_up(10, 0)
    made.compute(11)
    assert streams == [made.device.streams[0]]


@alone
def loaded_pages_stay_locked_until_they_were_compared(_: bool) -> None:
    made = _cached()
    given_back: list[bool] = []
    compare = made.rank.digests.compare

    def looked(noted: Noted) -> Check:
        made.device.current.put(lambda: given_back.append(made.controller.ack_load_queue[-1].finish_event.query()))
        return compare(noted)

    made.rank.digests.compare = looked
    made.load_back()
    made.controller.start_loading()
    made.device.run()
    assert given_back == [False]
    assert made.controller.ack_load_queue[-1].finish_event.query()


@alone
def pages_of_a_forward_begin_at_page_boundaries(_: bool) -> None:
    made = World(Role.SINGLE, (), "read")
    # One request goes on inside page 3 and into page 4, the next begins page 9 and ends inside it.
    locations = torch.cat([tokens(3)[40:], tokens(4)[:10], tokens(9)[:20]])
    assert made.rank.digests is not None
    made.rank.digests.seal(locations, [40, 0], [PAGE - 40 + 10, 20], torch.tensor([1, 2]))
    written = {
        space: [page for page in range(found.sealed.columns) if found.sealed.numbers[0, page]]
        for space, found in made.rank.digests.spaces.items()
    }
    assert written == {"full": [3, 4, 9], "swa": [3, 4, 9], "state": [1, 2]}, written
