"""Names that an operator gives, checked before anything happens."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.admin.plane import Plane
from dsv4ctl.controlplane.config.problems import unknown


def check_engines(plane: Plane, names: Iterable[str]) -> None:
    """Raises AdminError for a name that is no engine's."""
    valid = [engine.name for engine in plane.config.engines]
    for name in names:
        if name not in valid:
            raise AdminError("bad_request", unknown("engine", name, valid))
