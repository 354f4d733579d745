"""HiCache backups: device pages are read behind the forward that writes them and the loads that fill them."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.tickets.types import Guard, LoadKind
from dsv4ctl.engine_adapters.sglang import rank
from dsv4ctl.engine_adapters.sglang.hooks.loads import copy_of, stream_of


def start_writing(stock: Any, controller: Any) -> Any:
    here = rank.here()
    if here is None or not controller.write_queue:
        return stock(controller)
    copies = [copy_of(here, LoadKind.BACKUP, operation) for operation in controller.write_queue]
    if here.digests is not None:
        here.digests.backed_up([copy.pages for copy in copies])
    if here.gate.guarded(Guard.BACKUP):
        stream = stream_of(controller, LoadKind.BACKUP)
        stream.wait_stream(here.scheduler.forward_stream)
        for event in here.copies.waits(LoadKind.HICACHE):
            stream.wait_event(event)
    here.copies.promised(copies)
    answer = stock(controller)
    here.copies.launched(copies, [controller.ack_write_queue[-1].finish_event])
    return answer
