"""The decode half of a step: pages for a room, its transfer lease, and one token a step under its tickets."""

from __future__ import annotations

from typing import Protocol

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.rooms.effects import Effect
from dsv4ctl.controlplane.rooms.reader import Reader
from dsv4ctl.controlplane.tickets.gate import Gate
from dsv4ctl.controlplane.tickets.ticket import Load
from dsv4ctl.controlplane.tickets.types import Guard, LoadKind
from dsv4ctl.engine_adapters.agent import Agent
from dsv4ctl.engine_adapters.reference.facts import Budget
from dsv4ctl.engine_adapters.reference.hicache import LoadJob
from dsv4ctl.engine_adapters.reference.pools import DevicePools
from dsv4ctl.engine_adapters.reference.pressure import PAGE, first_pages
from dsv4ctl.engine_adapters.reference.sequence import Chunk, PageTable, make_chunk
from dsv4ctl.engine_adapters.reference.sequences import Sequence
from dsv4ctl.engine_adapters.reference.tokenizer import EOS
from dsv4ctl.engine_adapters.reference.verdicts import verdict
from dsv4ctl.policies.integrity import Verdict


class Inbox(Protocol):
    """What decode hands to the transfer half: a room whose pages are ready to be written."""

    def expect(
        self,
        opening: OpenRoom,
        table: PageTable,
        prompt_tokens: int,
        load: Load,
        address: tuple[str, int],
        verdict: Verdict,
        observe: bool,
    ) -> None: ...


class Decode:
    """`inbox` None: a single engine, whose prompts are computed in place.

    Under a policy with a verdict only what matched its digests is read; with the guard `verdict` off the digests
    are compared all the same, and a mismatch is only reported.
    """

    def __init__(self, agent: Agent, pools: DevicePools, inbox: Inbox | None) -> None:
        self._agent = agent
        self._gate: Gate = agent.gate
        self._pools = pools
        self._page_tokens = pools.geometry.page_tokens
        self._window = pools.geometry.window
        self._inbox = inbox

    # ---- rooms ---------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, budget: Budget, jobs: list[LoadJob]) -> bool:
        """Gives the room the pages that it begins with (`pressure`), or none (False: no room yet).

        The receiver exposes them to the peer once it is reachable. `jobs` stays as it is: nothing is loaded here.
        """
        if not self._allocate(sequence, budget):
            return False
        assert self._inbox is not None
        assert sequence.transfer is not None
        request, ports = sequence.request, sequence.opening.bootstrap_ports
        self._inbox.expect(
            sequence.opening,
            sequence.table,
            sequence.prompt,
            sequence.transfer,
            (request.bootstrap_host or "", ports[0] if ports else request.bootstrap_port or 0),
            verdict(sequence.opening),
            observe=not self._gate.guarded(Guard.VERDICT),
        )
        return True

    def _allocate(self, sequence: Sequence, budget: Budget) -> bool:
        written, first = self._pages(sequence.prompt), self._first_window_page(sequence.prompt)
        whole = self._pages(sequence.prompt + sequence.request.max_new_tokens)
        pages = first_pages(written, whole, retracted=sequence.key.generation > 1, oldest=sequence.oldest)
        wants = {"full": pages, "swa": pages - first, "state": 1}
        if not budget.take(wants):
            return False
        taken = self._gate.allocate(wants)
        assert taken is not None, "every rank has what all agreed on"
        sequence.owned = {space: set(numbers) for space, numbers in taken.items()}
        table = sequence.table
        table.full = list(taken["full"])
        table.swa = dict(enumerate(taken["swa"], start=first))
        (table.state,) = taken["state"]
        targets = [
            self._gate.extent("full", table.full[:written]),
            self._gate.extent("swa", [page for logical, page in table.swa.items() if logical < written]),
            self._gate.extent("state", [table.state]),
        ]
        verify = verdict(sequence.opening) is Verdict.BEFORE_READ and self._gate.guarded(Guard.VERDICT)
        sequence.transfer = self._gate.open_load(LoadKind.TRANSFER, targets, room=sequence.key, verify=verify)
        return True

    def start(self, sequence: Sequence) -> None:
        """Everything landed and is verified: tickets for what is sealed, a forward lease for what grows.

        Raises LedgerError; Refusal or UnknownRoomError if the room is over on this rank.
        """
        manifest = sequence.manifest
        assert manifest is not None
        sequence.cached_tokens, sequence.host_tokens = manifest.cached_tokens, manifest.host_tokens
        sequence.computed = sequence.prompt
        if verdict(sequence.opening) is Verdict.BEFORE_OUTPUT:
            sequence.held = []
        sequence.emit(manifest.first_token)
        self._take_rights(sequence)
        self._agent.apply(sequence.key, lambda reader: reader.forward_begin())

    def _take_rights(self, sequence: Sequence) -> None:
        table, sealed = sequence.table, sequence.prompt // self._page_tokens
        window = [logical for logical in table.swa if logical >= sealed]
        growing = [
            self._gate.extent("full", table.full[sealed:]),
            self._gate.extent("swa", [table.swa[logical] for logical in window]),
            self._gate.extent("state", [table.state]),
        ]
        sequence.lease = self._gate.open_load(LoadKind.FORWARD, growing, room=sequence.key)
        if sealed:
            sequence.join_landed(sealed)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _first_window_page(self, prompt: int) -> int:
        """The first logical page that the token at position `prompt` still sees in its window."""
        return max(0, prompt - self._window + 1) // self._page_tokens

    # ---- growth --------------------------------------------------------------------------------------

    def grows(self, sequence: Sequence) -> bool:
        """The next token lies in a page that the sequence does not have."""
        return (len(sequence.ids) - 1) // self._page_tokens >= len(sequence.table.full)

    def grow(self, sequence: Sequence) -> None:
        """One page more, taken from the budget before, under a lease of its own."""
        taken = self._gate.allocate(PAGE)
        assert taken is not None, "every rank has what all agreed on"
        logical, table = len(sequence.table.full), sequence.table
        (full,), (swa,) = taken["full"], taken["swa"]
        table.full.append(full)
        table.swa[logical] = swa
        for space, pages in taken.items():
            sequence.owned[space].update(pages)
        leased = [self._gate.extent(space, pages) for space, pages in taken.items()]
        sequence.grown[logical] = self._gate.open_load(LoadKind.FORWARD, leased, room=sequence.key)

    # ---- steps ---------------------------------------------------------------------------------------

    def over(self, sequence: Sequence) -> str | None:
        """Why the sequence needs no further step (`stop`, `length`), or None."""
        if not sequence.request.ignore_eos and sequence.ids[-1] == EOS:
            return "stop"
        return "length" if sequence.generated >= sequence.request.max_new_tokens else None

    def chunk(self, sequence: Sequence) -> Chunk:
        """The last token, whose bytes are not in the pools yet."""
        at = len(sequence.ids) - 1
        return make_chunk(self._pools, sequence.ids[at:], at, sequence.table)

    def computed(self, sequence: Sequence, end: int) -> None:
        """The token at `end` - 1 is in the pools; a page that it filled is sealed and joins the tickets."""
        sequence.computed = end
        if end % self._page_tokens:
            return
        logical, table = end // self._page_tokens - 1, sequence.table
        lease = sequence.grown.get(logical) or sequence.lease
        assert lease is not None
        self._gate.seal(lease, "full", (table.full[logical],))
        self._gate.seal(lease, "swa", (table.swa[logical],))
        if sequence.grown.pop(logical, None) is not None:
            self._gate.end_load(lease)
        sequence.join_sealed(logical)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """The last token is out: on every rank, whatever became of the room on this one. Raises UnknownRoomError."""

        def over(reader: Reader) -> list[Effect]:
            return [*reader.forward_end(), *(reader.finished() if reader.live else [])]

        self._agent.apply(sequence.key, over)
        sequence.finish(reason)
