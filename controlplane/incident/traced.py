"""The race detector on a row: what the ranks' rings say of it."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

import anyio.to_thread
import msgspec

from dsv4ctl.controlplane.admin.client import AdminClient
from dsv4ctl.controlplane.admin.verbs import trace as verb
from dsv4ctl.controlplane.incident.evaluate import Traced
from dsv4ctl.controlplane.trace.check import check
from dsv4ctl.controlplane.trace.file import TraceFile, Writer
from dsv4ctl.controlplane.trace.lineage import inherited

_LIMIT = 1 << 30


async def traced(admin: AdminClient, since_ns: int) -> Traced:
    """What the rings hold, checked; races before `since_ns` (monotonic, of this host) are an earlier row's."""
    with tempfile.TemporaryDirectory(prefix="dsv4ctl-incident-") as folder:
        file = Path(folder) / "row.trace"
        with Writer(file, _LIMIT) as writer:
            async for line in admin.lines(verb.VERB.paths[0], {"follow": False}):
                part = msgspec.json.decode(line)
                if "error" not in part:
                    identity, events = (base64.b64decode(part[field]) for field in ("identity", "events"))
                    writer.write(part["incarnation"], identity, events)
        return await anyio.to_thread.run_sync(_check, file, since_ns)


def _check(file: Path, since_ns: int) -> Traced:
    opened = TraceFile(file)
    report = check(opened.ranks, opened.merged())
    races = [race for race in report.races if race.second.at_ns >= since_ns]
    own = {race.room: race.consumer for race in races if race.consumer}
    behind = {room: sorted(names) for room, names in inherited(races, opened.merged()).items()}
    return Traced(report.events, report.resets, len(races), len(own), behind)
