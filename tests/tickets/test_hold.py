"""The awaitable front: cancelled at any point, woken from any thread, never left holding, never released too early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from dsv4ctl.controlplane.tickets.gate import TicketRevokedError, TicketTimeoutError
from dsv4ctl.controlplane.tickets.hold import Held, hold
from dsv4ctl.controlplane.tickets.ledger import LedgerError
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Consumer, TicketState
from small_gate import LAYERS, SmallGate

pytestmark = pytest.mark.asyncio
LIMIT = 60.0


@asynccontextmanager
async def held(gate: SmallGate, load: Load) -> AsyncIterator[Held]:
    async with hold(gate, Consumer.SENDER, load.extents, room=7) as found:
        yield found


async def test_the_scope_holds_and_leaving_it_releases(gate: SmallGate) -> None:
    load = gate.load(landed=LAYERS)
    async with held(gate, load) as found:
        await found.granted()
        assert gate.totals()["tickets"] == 1
    assert gate.totals()["tickets"] == 0
    assert found.ticket.state is TicketState.RELEASED


async def test_what_the_ledger_refuses_is_raised_and_nothing_is_held(gate: SmallGate) -> None:
    load = gate.load()
    gate.end_load(load)
    with pytest.raises(LedgerError, match="not every asked pool"):
        async with held(gate, load):
            pytest.fail("the scope was entered")
    assert gate.totals()["tickets"] == 0


async def test_it_waits_for_as_many_layers_as_asked(gate: SmallGate) -> None:
    load = gate.load(landed=1)
    async with held(gate, load) as found:
        await found.granted(layers=1)
        with pytest.raises(TicketTimeoutError, match=r"sender: not granted within 0.01 s"):
            await found.granted(layers=2, deadline=0.01)
        gate.layer_landed(load, 2)
        await found.granted(layers=2)


@pytest.mark.parametrize("awaits", range(4))
async def test_a_cancellation_at_any_await_releases(gate: SmallGate, awaits: int) -> None:
    """The task is cancelled while it stands at its n-th await, before, between and after its grants."""
    load = gate.load()
    at = [anyio.Event() for _ in range(4)]

    async def reader() -> None:
        async with held(gate, load) as found:
            at[0].set()
            await found.granted(layers=1)
            at[1].set()
            await found.granted()
            at[2].set()
            await anyio.lowlevel.checkpoint()
            at[3].set()
            await anyio.sleep_forever()

    with anyio.fail_after(LIMIT):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            for layers, reached in zip((0, 1, LAYERS, LAYERS), at[: awaits + 1], strict=False):
                gate.layer_landed(load, layers)
                await reached.wait()
            assert gate.totals()["tickets"] == 1
            tasks.cancel_scope.cancel()
    assert gate.totals()["tickets"] == 0
    gate.end_load(load)
    gate.free("full", load.extents[0].pages)
    assert gate.room_in("full") == (8, 0)


async def test_a_cancellation_that_meets_the_landing_releases_once(gate: SmallGate) -> None:
    load = gate.load()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, gate, load, anyio.Event())
        await anyio.wait_all_tasks_blocked()
        gate.layer_landed(load, LAYERS)
        tasks.cancel_scope.cancel()
    assert gate.totals()["tickets"] == 0
    assert gate.totals()["refused"] == 0


async def test_a_revocation_ends_the_wait_and_the_scope_has_nothing_to_release(gate: SmallGate) -> None:
    async with held(gate, gate.load()) as found:
        gate.revoke(7)
        with pytest.raises(TicketRevokedError, match="sender ticket is revoked"):
            await found.granted()
    assert (gate.totals()["tickets"], gate.totals()["refused"]) == (0, 0)


async def test_a_granted_ticket_that_is_revoked_begins_no_read_and_holds_on(gate: SmallGate) -> None:
    async with held(gate, gate.load(landed=LAYERS)) as found:
        gate.revoke(7)
        with pytest.raises(TicketRevokedError, match="is revoking"):
            await found.granted()
        assert gate.totals()["tickets"] == 1
    assert found.ticket.state is TicketState.RELEASED


async def test_a_revocation_between_leaving_and_releasing_is_no_error(gate: SmallGate) -> None:
    """Another thread revokes at the last moment: the scope must still end."""
    leave = gate.leave

    def revoked_first(ticket: object) -> None:
        gate.revoke(7)
        leave(ticket)  # type: ignore[arg-type]

    gate.leave = revoked_first  # type: ignore[method-assign]
    async with held(gate, gate.load()):
        pass
    assert gate.totals()["tickets"] == 0


async def test_a_failed_load_is_not_taken_for_a_time_out(gate: SmallGate) -> None:
    load = gate.load()
    async with held(gate, load) as found:
        gate.fail_load(load, "digest mismatch")
        with pytest.raises(TicketRevokedError):
            await found.granted(deadline=0.0)


async def test_a_posted_read_outlives_its_cancelled_scope(gate: SmallGate) -> None:
    load = gate.load(landed=LAYERS)
    posted = anyio.Event()
    found: list[Held] = []

    async def sender() -> None:
        async with held(gate, load) as scope:
            await scope.granted()
            scope.post()
            found.append(scope)
            posted.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender)
        await posted.wait()
        tasks.cancel_scope.cancel()
    gate.end_load(load)
    gate.free("full", load.extents[0].pages)
    assert (found[0].ticket.state, gate.room_in("full")) == (TicketState.REVOKING, (7, 1))
    found[0].complete()
    assert gate.room_in("full") == (8, 0)


async def test_a_landing_on_another_thread_wakes_the_loop(gate: SmallGate, monkeypatch: pytest.MonkeyPatch) -> None:
    load = gate.load()
    waiting = threading.Event()
    woken: list[threading.Thread] = []
    wake = Held._wake
    monkeypatch.setattr(Held, "_wake", lambda found: (woken.append(threading.current_thread()), wake(found)))

    def loader() -> None:
        assert waiting.wait(LIMIT)
        for layer in range(1, LAYERS + 1):
            gate.layer_landed(load, layer)

    thread = threading.Thread(target=loader)
    thread.start()
    async with held(gate, load) as found:
        asyncio.get_running_loop().call_soon(waiting.set)  # the loader starts once this task is suspended
        await found.granted(deadline=LIMIT)
    await anyio.to_thread.run_sync(thread.join)
    assert set(woken) == {threading.current_thread()}


async def test_a_landing_that_is_not_enough_wakes_once_and_does_not_spin(gate: SmallGate) -> None:
    load = gate.load()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, gate, load, anyio.Event())
        await anyio.wait_all_tasks_blocked()
        gate.layer_landed(load, 1)
        with anyio.fail_after(LIMIT):
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_no_wake_up_is_lost_between_looking_and_waiting(gate: SmallGate) -> None:
    """The layers land right after the look at the ticket, before the wait begins."""
    load = gate.load()

    class Late:
        def __init__(self, event: anyio.Event) -> None:
            self.set = event.set
            self._event = event

        async def wait(self) -> None:
            await anyio.to_thread.run_sync(gate.layer_landed, load, LAYERS)
            await anyio.wait_all_tasks_blocked()
            await self._event.wait()

    async with held(gate, load) as found:
        found._event = Late(found._event)  # type: ignore[assignment]
        await found.granted(deadline=LIMIT)


async def test_races_of_many_scopes_with_a_loader_thread_end(gate: SmallGate) -> None:
    """Every waiter of every load is woken, layer by layer, by a thread that goes as fast as it can."""
    for _ in range(20):
        load = gate.load()
        thread = threading.Thread(target=lambda load=load: [gate.layer_landed(load, n) for n in range(LAYERS + 1)])
        done = [anyio.Event() for _ in range(8)]
        with anyio.fail_after(LIMIT):
            async with anyio.create_task_group() as tasks:
                for event in done:
                    tasks.start_soon(_read, gate, load, event)
                thread.start()
        assert all(event.is_set() for event in done)
        thread.join()
        gate.end_load(load)
        gate.free("full", load.extents[0].pages)
    assert gate.room_in("full") == (8, 0)


async def test_a_loader_outlives_a_loop_that_was_closed_around_its_waiters(gate: SmallGate) -> None:
    load = gate.load()
    scopes = []

    async def abandon() -> None:
        scopes.append(held(gate, load))
        await scopes[0].__aenter__()

    def run_and_close() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(abandon())
        loop.close()

    await anyio.to_thread.run_sync(run_and_close)
    gate.layer_landed(load, LAYERS)
    assert gate.totals()["tickets"] == 1


async def _read(gate: SmallGate, load: Load, done: anyio.Event) -> None:
    async with held(gate, load) as found:
        for layer in range(1, LAYERS + 1):
            await found.granted(layers=layer)
        done.set()
