"""What two ranks of an engine do in the collectives that SGLang and the hooks share: two processes, gloo between them.

`outcomes` forks, and so runs before this process has a thread. A rank that leaves a collective out ends, and the other
one fails with it: nothing here waits for a time-out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.managers.io_struct import AbortReq

from dsv4ctl.controlplane.link.wire import Role
from dsv4ctl.controlplane.rooms.states import Quiet
from sglang_contract.situations import exposed, prealloc_queue, request_receiver, transfer_queue, turn, world
from sglang_world import PEER

Scenario = Callable[[int, bool], Any]
_DEADLINE = timedelta(seconds=60)


def enter_the_handshake_reduction(number: int, hooked: bool) -> Any:
    """Rank 0 has nobody left to shake hands with, rank 1 has one."""
    world(Role.DECODE, hooked)
    queue = prealloc_queue(waiting=number == 0, group=dist.group.WORLD)
    queue._update_handshake_waiters()
    return queue.queue[0].waiting_for_input


def heed_a_verdict_of_one(number: int, hooked: bool) -> Any:
    """Rank 1 alone finds another room's number in the metadata. What each does in a turn, and in the one after acks."""
    made = world(Role.DECODE, hooked)
    key = exposed(made)
    queue = transfer_queue(made, KVPoll.Success, written=7 if number == 0 else 9)
    queue.gloo_group = dist.group.WORLD
    turn(queue)
    first = [*made.host.done]
    if hooked:
        made.rank.agent.peer_ack(key, PEER, Quiet.QUIET)
    turn(queue)
    return [first, made.host.done]


def apply_an_abort_in_one_turn(number: int, hooked: bool) -> Any:
    """The control plane's abort has reached rank 0 and, a turn later, rank 1."""
    made = world(Role.DECODE, hooked)
    key = exposed(made)
    group = SimpleNamespace(rank=number, ranks=[0, 1], cpu_group=dist.group.WORLD)
    receiver = request_receiver(tp_size=2, tp_group=group)
    turns = []
    for aborted in (None, 0, 1):
        arrived = [SimpleNamespace(bootstrap_room=7, rid="the request")] if aborted is None else []
        if aborted == number:
            made.abort(key)
        agreed = receiver._broadcast_reqs_across_ranks(arrived if number == 0 else None)
        turns.append([item.rid for item in agreed if isinstance(item, AbortReq)])
    return turns


#: What both ranks answer.
EXPECTED: dict[Scenario, Any] = {
    enter_the_handshake_reduction: True,
    heed_a_verdict_of_one: [[], ["released", 0]],
    apply_an_abort_in_one_turn: [[], ["the request"], []],
}
#: The hook without which a release needs none.
NEEDS: dict[Scenario, str] = {enter_the_handshake_reduction: "hooks.agreement:handshake_waiters"}


def outcomes(placed: set[str]) -> dict[str, dict[str, str]]:
    """By scenario, with hooks and without: `holds`, or what the two ranks answered."""
    found = {}
    for scenario, expected in EXPECTED.items():
        if NEEDS.get(scenario) in placed | {None}:
            answers = {name: _both(scenario, hooked) for name, hooked in (("with", True), ("without", False))}
            alike = json.dumps([expected] * 2)
            found[scenario.__name__] = {n: "holds" if a == alike else f"fails: {a}" for n, a in answers.items()}
    return found


def _both(scenario: Scenario, hooked: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ends = [_forked(scenario, number, hooked, f"{folder}/store") for number in (0, 1)]
        answers = []
        for pid, reading in ends:
            with os.fdopen(reading) as pipe:
                answers.append(json.loads(pipe.read() or '"it ended"'))
            os.waitpid(pid, 0)
    return json.dumps(answers)


def _forked(scenario: Scenario, number: int, hooked: bool, store: str) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, 2), rank=number, world_size=2, timeout=_DEADLINE
        )  # fmt: skip
        answer = scenario(number, hooked)
    except Exception as error:  # noqa: BLE001 - it is the outcome
        answer = f"{type(error).__name__}: {error}"[:200]
    os.write(writing, json.dumps(answer, default=repr).encode())
    os._exit(0)  # noqa: TID251 - what would be cleaned up is the forking process's
