"""The decode rank's receives: pages are exposed to the peer, counted in, compared and handed to the step thread."""

from __future__ import annotations

from dsv4ctl.controlplane.link.wire import OpenRoom
from dsv4ctl.controlplane.tickets.ledger import Load
from dsv4ctl.engine_adapters.reference.sequence import PageTable

Address = tuple[str, int]


class Receiver:
    def expect(
        self,
        opening: OpenRoom,
        table: PageTable,
        prompt_tokens: int,
        load: Load,
        address: Address,
        observe: bool = False,
    ) -> None:
        """Thread-safe; returns at once. Asks the prefill rank at `address` to write the room's prompt here.

        `table` (copied) has every full page of the prompt, the window's swa pages and the state slot; `load` is
        the open `transfer` load over exactly these pages. Digests are compared if `load.verify`; `observe`
        compares too, but a mismatch is only counted and reported. The load is ended here once the room is
        verified; on an abort whoever frees the pages ends it (if `load.open`), inside the agent's `release`.
        """
        raise NotImplementedError
