"""Every event name there is. The name of an event never changes once released; its fields may grow."""

from __future__ import annotations

from enum import Enum
from typing import Self


class Event(Enum):
    """A stable dotted name (`value`) and what it means (`doc`)."""

    doc: str

    # That of Enum is a Python call, made twice for every event that is counted.
    __hash__ = object.__hash__

    def __new__(cls, name: str, doc: str) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.doc = doc
        return member

    # ---- the control plane itself
    START_BEGIN = "start.begin", "The control plane starts: version, pid, configuration file, engines."
    START_READY = "start.ready", "Every engine is ready and the gateway serves."
    START_FAILED = "start.failed", "The start was given up; `reason` says why."
    STOP_SIGNAL = "stop.signal", "SIGTERM or SIGINT: the first drains, the second stops now."
    STOP_DONE = "stop.done", "The control plane ends; `exit_code`."
    NOTIFY_FAILED = "notify.failed", "The service manager could not be told; `state`, `error`."
    LOOP_DIED = "loop.died", "A background loop, task or thread ended with an error; `loop`, `error`."
    LOG_DROPPED = "log.dropped", "`count` lines were dropped because their reader was too slow."
    LOG_LIBRARY = "log.library", "What a library wrote to Python's logging; `logger`, `message`."
    GUARD_OFF = "guard.off", "A guard is switched off by [unsafe] or at run time: output will be corrupted."
    GUARD_ON = "guard.on", "A guard that was off is on again."

    # ---- engines
    ENGINE_STARTING = "engine.starting", "An engine process is about to be started; `incarnation`."
    ENGINE_STARTED = "engine.started", "An engine process runs; `pid`, `incarnation`, `argv`."
    ENGINE_ADOPTED = "engine.adopted", "A process that outlived its control plane goes on under this one; `pid`."
    ENGINE_NOT_ADOPTED = (
        "engine.not_adopted",
        "A process of an earlier control plane is killed instead; `reason`, `pid`.",
    )
    ENGINE_READY = "engine.ready", "Every rank of the engine has said Hello and its HTTP server answers."
    ENGINE_EXITED = "engine.exited", "An engine process ended; `exit_code` or `signal`."
    ENGINE_RESTARTING = "engine.restarting", "The engine is started again after `delay_s`."
    ENGINE_GAVE_UP = "engine.gave_up", "The restart policy gave up: the engine stays failed."
    ENGINE_FENCED = "engine.fenced", "The engine's process was killed and reaped: it can write no more."
    ENGINE_WEDGED = "engine.wedged", "No progress; `cause` names the rank and its queues, `rooms` what it held."
    ENGINE_STOPPING = "engine.stopping", "The engine is asked to end."
    ENGINE_OUTPUT = "engine.output", "A line the engine wrote: its JSON fields, or `line`."
    ENGINE_EVIDENCE = "engine.evidence", "What a wedged or failed engine was doing: stacks, rooms, tickets."
    EVIDENCE_KEPT = "evidence.kept", "What a rank knows of a mismatch, a wedge or a fence was written to `file`."
    EVIDENCE_FAILED = "evidence.failed", "Evidence could not be written; said once, until it can be again."
    ENGINE_QUARANTINE_FULL = "engine.quarantine_full", "Above `quarantine_max` pages: no admission, then a restart."

    # ---- links
    LINK_CONNECTED = "link.connected", "A rank said Hello and was welcomed."
    LINK_LOST = "link.lost", "A rank's link ended."
    LINK_REFUSED = "link.refused", "A rank's Hello was refused; `reason`."
    LINK_BAD_FRAME = "link.bad_frame", "A malformed, unknown or late frame was refused; the link lives on."
    LINK_QUERY_FAILED = "link.query_failed", "A rank answered a query with an error, or not in time."

    # ---- rooms
    ROOM_OPENED = "room.opened", "A room was opened on both sides."
    ROOM_STATE = "room.state", "A room entered `state`."
    ROOM_CLOSED = "room.closed", "A room ended well; `seconds`, `bytes_by_pool`."
    ROOM_ABORTING = "room.aborting", "A room is being aborted; `source`, `reason`."
    ROOM_ABORTED = "room.aborted", "An aborted room is quiet on both sides; `source`, `reason`, `seconds`."
    ROOM_RETRACTED = "room.retracted", "A generation ended for want of pages; the room begins again with the next."
    ROOM_QUARANTINED = "room.quarantined", "No ack by the deadline: the room's pages are quarantined."
    ROOM_REFUSED = "room.refused", "A room could not be opened; `reason`."
    ROOM_LATE_REPORT = "room.late_report", "A report of an ended room was refused; if it lives there, it is aborted."
    ROOM_INVALID_REPORT = "room.invalid_report", "A report that the room's state does not allow was refused."
    ABORT_SENT = "abort.sent", "An abort frame was sent to a rank (again, if `resent`)."
    ABORT_RECEIVED = "abort.received", "A rank acknowledged the abort frames up to `seq`."
    ABORT_ACKED = "abort.acked", "A rank is done with an aborted room; `outcome` quiet or poisoned."
    DIGEST_MISMATCH = "digest.mismatch", "Pages that landed differ from those that were sealed; `pools`."

    # ---- peers: the channel between a prefill rank and a decode rank
    PEER_CONNECTED = "peer.connected", "Two ranks greeted each other and agree on their pools; `peer_incarnation`."
    PEER_LOST = "peer.lost", "The connection between two ranks ended; the decode rank connects again if it must."
    PEER_REFUSED = "peer.refused", "Two ranks do not fit; `reason` names both figures."
    PEER_BAD_FRAME = (
        "peer.bad_frame",
        "A malformed, unknown or unfitting frame of a peer was refused; the channel lives.",
    )

    # ---- drain
    DRAIN_BEGIN = "drain.begin", "Engines admit no new room; `engines`, `deadline_s`."
    DRAIN_DONE = "drain.done", "The drained engines hold no room."
    DRAIN_LEFTOVERS = "drain.leftovers", "The drain deadline passed: `rooms` are named and aborted."
    DRAIN_RESUMED = "drain.resumed", "Engines admit rooms again."

    # ---- gateway and admin
    GATEWAY_LISTENING = "gateway.listening", "The gateway accepts requests; `url`."
    GATEWAY_REQUEST = "gateway.request", "A completion request was answered; `path`, `status`, `seconds`."
    GATEWAY_REFUSED = "gateway.refused", "A request was refused before a room was opened; `status`, `code`."
    GATEWAY_LEG_FAILED = "gateway.leg_failed", "One leg of a request failed; `engine`, `leg`, `reason`."
    GATEWAY_CLIENT_GONE = "gateway.client_gone", "The client left before its answer was complete."
    ADMIN_LISTENING = "admin.listening", "The admin API accepts connections; `socket`."
    ADMIN_REQUEST = "admin.request", "A call that changes something, or was refused; `verb`."
    ADMIN_DENIED = "admin.denied", "A peer with another uid was refused; `uid`, `pid`."
    ADMIN_FAILED = "admin.failed", "An admin call failed through our own fault; `verb`, `error`."


#: By dotted name.
BY_NAME: dict[str, Event] = {event.value: event for event in Event}
