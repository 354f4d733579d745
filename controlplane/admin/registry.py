"""All verbs, in the order in which help and documents list them."""

from __future__ import annotations

from typing import Any

from dsv4ctl.controlplane.admin.verb import Verb
from dsv4ctl.controlplane.admin.verbs import (
    abort,
    drain,
    engines,
    flush,
    guards,
    logs,
    metrics,
    resume,
    rooms,
    status,
    tickets,
    trace,
    version,
)

VERBS: tuple[Verb[Any], ...] = (
    status.VERB,
    engines.VERB,
    rooms.VERB,
    tickets.VERB,
    abort.VERB,
    drain.VERB,
    resume.VERB,
    guards.VERB,
    flush.VERB,
    logs.VERB,
    trace.VERB,
    version.VERB,
    metrics.VERB,
)
