"""What the guards cost: measured inside one process of the reference engine, whose JSON object is passed on."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from dsv4ctl.controlplane.config.schema import EngineConfig, HiCacheConfig, ReferenceConfig
from dsv4ctl.controlplane.incident.process import ours

_MODULE = "dsv4ctl.engine_adapters.reference.guards_cost"
#: Seconds for the whole measurement.
DEADLINE = 300.0
#: Device pages of the engine; its host pages hold a few requests of that size.
_PAGES = 16


class CostError(RuntimeError):
    """The measurement ended without figures."""


async def measure() -> dict[str, Any]:
    """Its standard error is ours. Raises CostError."""
    engine = EngineConfig(
        name="bench",
        role="single",
        hicache=HiCacheConfig(pages=8 * _PAGES),
        reference=ReferenceConfig(device_pages=_PAGES, state_slots=2 * _PAGES),
    )
    table = msgspec.json.encode(engine)
    try:
        with anyio.fail_after(DEADLINE):
            done = await anyio.run_process(ours(["-m", _MODULE]), input=table, check=False, stderr=None)
    except TimeoutError as error:
        raise CostError(f"not measured within {DEADLINE:g} s") from error
    if done.returncode:
        raise CostError(f"not measured: exit code {done.returncode}")
    cost: dict[str, Any] = msgspec.json.decode(done.stdout)
    return cost
