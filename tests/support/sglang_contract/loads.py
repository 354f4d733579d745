"""The order of loads, backups, forwards and readers on the device's streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.sglang.hooks import life, loads
from sglang_contract.checks import alone, check
from sglang_contract.situations import loading, world
from sglang_world import LAYERS, World, tokens


@check
def fourth_load_waits_for_the_first(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    for _ in range(3):
        made.load_back()
        made.controller.start_loading()
    made.load_back()
    made.controller.start_loading()


@check
def load_runs_behind_the_forward(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.scheduler.forward_stream.put(lambda: made.host.done.append("forward"))
    made.load_back()
    made.controller.start_loading()
    made.device.run(made.device.streams[0], made.controller.load_stream)
    assert made.host.done == [], made.host.done
    made.device.run()
    assert made.host.done[-1] == ("load", LAYERS - 1), made.host.done


@check
def load_runs_behind_the_backup_of_what_it_reads(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.controller.write_queue.append(_operation(0, 7))
    made.controller.start_writing()
    made.load_back()
    made.controller.start_loading()
    made.device.run(made.device.streams[0], made.controller.load_stream)
    assert not made.host.done, made.host.done


@check
def backup_runs_behind_the_forward(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.scheduler.forward_stream.put(lambda: made.host.done.append("forward"))
    made.controller.write_queue.append(_operation(0, 7))
    made.controller.start_writing()
    made.device.run(made.device.streams[0], made.controller.write_stream)
    assert made.host.done == [], made.host.done
    made.device.run()
    assert made.host.done[-1] == ("backup",), made.host.done


@check
def backup_runs_behind_a_load(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    made.controller.write_queue.append(_operation(5, 7))
    made.controller.start_writing()
    made.device.run(made.device.streams[0], made.scheduler.forward_stream, made.controller.write_stream)
    assert not made.host.done, made.host.done


def _operation(host_page: int, device_page: int) -> Any:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import CacheOperation

    return CacheOperation(tokens(host_page), tokens(device_page), 1)


@check
def batch_without_a_load_waits_for_those_under_way(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    forward = made.scheduler.forward_stream
    with made.device.stream(forward):
        made.kvcache.get_index_k_with_scale_buffer(1)
        forward.put(lambda: made.host.done.append("read"))
    made.device.run()
    done = made.host.done
    assert done.index(("load", 1)) < done.index("read"), done


@check
def captured_prefill_waits_for_the_whole_load(hooked: bool) -> None:
    made = world(Role.PREFILL, hooked)
    made.load_back()
    made.controller.start_loading()
    forward = made.scheduler.forward_stream
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), reqs=[])
    with made.device.stream(forward):
        life.forward(lambda *args: forward.put(lambda: made.host.done.append("replay")), None, batch)
    made.device.run()
    assert made.host.done[-1] == "replay", made.host.done


@alone
def load_lands_layer_by_layer_and_ends(_: bool) -> None:
    made = world(Role.PREFILL, True)
    loading(made)
    made.device.run(made.device.streams[0], made.scheduler.forward_stream)  # all that it starts behind
    while made.controller.load_stream.step():
        made.rank.step()
    made.rank.step()
    landed = [
        event.note for event in made.rank.gate.trace.events() if event.kind == "landed" and event.who == "hicache"
    ]
    assert landed == [*list(range(1, LAYERS + 1)), LAYERS], landed
    assert made.rank.gate.totals()["loads"] == 0
    assert made.rank.gate.totals()["tickets"] == 0
    assert made.rank.gate.totals()["refused"] == 0


@alone
def readers_whose_guard_is_off_wait_for_nothing(_: bool) -> None:
    for off in ((), (Guard.ATTENTION,), (Guard.INDEXER,), (Guard.COMPRESSOR,)):
        made = World(Role.SINGLE, tuple(guard.value for guard in off))
        made.load_back()
        made.controller.start_loading()
        stream = made.device.current
        for read in (life.before_replay, lambda here, made=made: made.kvcache.wait_layer_transfer(0)):
            before = len(stream.operations)
            read(made.rank)
            assert (len(stream.operations) == before) is bool(off), (off, read)
        made.device.run()


@alone
def what_is_noted_is_behind_what_the_scheduler_put_before(_: bool) -> None:
    made, order = world(Role.SINGLE, True), []
    made.device.current.put(lambda: order.append("scheduler"))
    with loads.behind_forward(made.rank):
        made.device.current.put(lambda: order.append("noted"))
    while made.scheduler.forward_stream.step():
        pass
    assert not order
    made.device.run()
    assert order == ["scheduler", "noted"]
