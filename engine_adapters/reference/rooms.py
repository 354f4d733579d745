"""The rooms of one rank of the reference engine, and the requests that run in them.

What the agent, a peer or a client says of a room becomes a fact on its sequence and wakes the step loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.effects import Refusal
from dsv4ctl.controlplane.rooms.states import AbortSource, Quiet, RoomKey
from dsv4ctl.engine_adapters.agent import Agent, UnknownRoomError
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.orders import Submission
from dsv4ctl.engine_adapters.reference.peer_wire import Manifest
from dsv4ctl.engine_adapters.reference.requests import Request, RequestRefusedError
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from dsv4ctl.engine_adapters.reference.staged import Staged
from dsv4ctl.engine_adapters.reference.step import StepLoop
from dsv4ctl.engine_adapters.reference.transfer import Transfer


class Rooms:
    """The agent's hooks. `pages`: of each space; `query` answers what is asked of the rank beside its rooms."""

    _agent: Agent
    _transfer: Transfer | None
    _loop: StepLoop

    def __init__(
        self, geometry: Geometry, pages: Mapping[str, int], staged: Staged, query: Callable[[str], Any]
    ) -> None:
        self.live: dict[RoomKey, Sequence] = {}  #: until every rank gave back what it held
        self._openings: dict[RoomKey, OpenRoom] = {}
        self._geometry = geometry
        self._pages = pages
        self._staged = staged
        self._query = query

    def bind(self, agent: Agent, transfer: Transfer | None, loop: StepLoop) -> None:
        """These are made with this; no room is opened before."""
        self._agent, self._transfer, self._loop = agent, transfer, loop

    # ---- Hooks ---------------------------------------------------------------------------------------

    def opened(self, opening: OpenRoom) -> None:
        self._openings[opening.key] = self._staged.opening(opening)
        if self._transfer is not None:
            self._transfer.opened(opening)

    def dropped(self, key: RoomKey, source: AbortSource, reason: str) -> None:
        if self._transfer is not None:
            self._transfer.dropped(key)
        sequence = self.live.get(key)
        if sequence is not None:
            sequence.aborting = (source, reason)
            sequence.finish("abort", reason, source)
            self._loop.wake()

    def tell_peer(self, key: RoomKey, peer: str, source: AbortSource, reason: str) -> None:
        if self._transfer is not None:
            self._transfer.tell_peer(key, peer, source, reason)

    def ack_peer(self, key: RoomKey, peer: str, outcome: Quiet) -> None:
        if self._transfer is not None:
            self._transfer.ack_peer(key, peer, outcome)

    def release(self, key: RoomKey) -> None:
        self._openings.pop(key, None)
        sequence = self.live.get(key)
        if sequence is not None:
            sequence.quiet = True
            self._loop.wake()

    def quarantine(self, key: RoomKey) -> dict[str, int]:
        sequence = self.live.get(key)
        if sequence is None:
            return {}
        sequence.quarantining = True
        self._loop.wake()
        return {space: len(pages) for space, pages in sequence.owned.items()}

    def query(self, what: str) -> Any:
        return self._query(what)

    # ---- from the peer -------------------------------------------------------------------------------

    def ready(self, key: RoomKey, manifest: Manifest) -> None:
        sequence = self.live.get(key)
        if sequence is not None:
            sequence.manifest = manifest
            self._loop.wake()

    def vouched(self, key: RoomKey) -> None:
        sequence = self.live.get(key)
        if sequence is not None:
            sequence.vouched = True
            self._loop.wake()

    # ---- from the step loop --------------------------------------------------------------------------

    def enter(self, submission: Submission) -> Sequence:
        """A request that rank 0 got. A room that is over here already is a fact for the next round."""
        request = Request(
            submission.rid,
            submission.opening.key,
            submission.input_ids,
            submission.max_new_tokens,
            submission.ignore_eos,
            submission.bootstrap_host,
            submission.bootstrap_port,
            emit=self._staged.emit(submission.opening.key, submission.opening.request_id),
        )
        try:
            return self._register(request)
        except (Refusal, UnknownRoomError) as error:
            ids = list(request.input_ids)
            sequence = Sequence(request, submission.opening, self._agent.gate, ids, len(ids))
            sequence.aborting = (AbortSource.ENGINE_FAULT, str(error))
            sequence.quiet = True
            return sequence

    def left(self, sequence: Sequence) -> None:
        self.live.pop(sequence.key, None)

    # ---- from clients --------------------------------------------------------------------------------

    def room_of(self, room: int | None) -> RoomKey:
        if room is None:
            raise RequestRefusedError("bootstrap_room is missing: requests come through the gateway, which opens rooms")
        key = self._agent.current(room)
        if key is None:
            raise RequestRefusedError(f"bootstrap_room {room} is not open here: the gateway opens rooms, not clients")
        return key

    def submit(self, request: Request) -> None:
        self._check_size(request)
        try:
            sequence = self._register(request)
        except (Refusal, UnknownRoomError) as error:
            raise RequestRefusedError(f"the room has ended: {error}") from error
        self._loop.submit(sequence)

    def _register(self, request: Request) -> Sequence:
        """The sequence of a room that lives here. Raises Refusal, UnknownRoomError, RequestRefusedError."""
        ids = list(request.input_ids)

        def enter(half: Any) -> list[Any]:
            if not half.live:
                raise Refusal(f"room {request.key} is {half.state.value}")
            if request.key in self.live:
                raise RequestRefusedError(f"room {request.key} already has its request")
            self.live[request.key] = Sequence(request, self._openings[request.key], self._agent.gate, ids, len(ids))
            return []

        self._agent.apply(request.key, enter)
        return self.live[request.key]

    def _check_size(self, request: Request) -> None:
        prompt, new = len(request.input_ids), request.max_new_tokens
        limit = self._geometry.context_tokens
        if not prompt:
            raise RequestRefusedError("the prompt is empty: at least one token expected")
        if prompt + new > limit:
            raise RequestRefusedError(
                f"the prompt's {prompt} tokens and max_new_tokens {new} exceed the context of {limit} tokens"
            )
        pages = self._geometry.pages_for(prompt + new)
        if pages > self._pages["full"]:
            have = self._pages["full"]
            raise RequestRefusedError(f"{prompt + new} tokens need {pages} pages, this engine has {have}")

    def abort(self, rid: str | None, source: AbortSource, reason: str) -> int:
        chosen = [s for s in list(self.live.values()) if rid is None or s.request.rid.startswith(rid)]
        for sequence in chosen:
            self._agent.abort(sequence.key, source, reason)
        return len(chosen)
