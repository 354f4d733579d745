"""Engines by adapter name, without importing engine code: the one place where the two sides meet."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.scheduler.fleet import Engine, Rank
from dsv4ctl.controlplane.supervisor.process import RankProcess, start
from dsv4ctl.controlplane.supervisor.runner import LaunchError

_PROTOCOL = "dsv4ctl.engine_adapters.protocol"


class AdapterLauncher:
    """Starts ranks through the adapters. `link` is the path of the socket that they connect to."""

    def __init__(self, config: Config, link: str) -> None:
        self._config = config
        self._link = link
        self._protocol: Any = importlib.import_module(_PROTOCOL)

    async def __call__(self, engine: Engine, rank: Rank) -> RankProcess:
        """Raises LaunchError if there is no such adapter or what it needs is not installed, OSError."""
        request = self._protocol.LaunchRequest(
            engine=msgspec.to_builtins(engine.config),
            rank=rank.number,
            incarnation=rank.incarnation,
            group=next(iter(engine.ranks)),
            link=self._link,
            unsafe_off=tuple(self._config.unsafe.off),
            integrity=self._config.policies.integrity,
            model=self._config.gateway.model,
        )
        try:
            spec = self._protocol.find(engine.config.adapter).launch(request)
        except self._protocol.AdapterError as error:
            raise LaunchError(str(error)) from error
        return await start(spec.argv, spec.env)
