"""Engines by adapter name, without importing engine code: the one place where the two sides meet."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.scheduler.fleet import Engine, Rank
from dsv4ctl.controlplane.supervisor.process import Health, RankProcess, start, start_tree
from dsv4ctl.controlplane.supervisor.runner import LaunchError

_PROTOCOL = "dsv4ctl.engine_adapters.protocol"


class AdapterLauncher:
    """Starts engines through the adapters. `link` is the path of the socket that their ranks connect to."""

    def __init__(self, config: Config, link: str) -> None:
        self._config = config
        self._link = link
        self._protocol: Any = importlib.import_module(_PROTOCOL)

    def processes_of(self, engine: Engine) -> int:
        """Raises LaunchError if there is no such adapter."""
        try:
            count: int = self._protocol.find(engine.config.adapter).processes(engine.config.ranks)
        except self._protocol.AdapterError as error:
            raise LaunchError(str(error)) from error
        return count

    async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> RankProcess:
        """Raises LaunchError if there is no such adapter or what it needs is not installed, OSError."""
        request = self._protocol.LaunchRequest(
            engine=msgspec.to_builtins(engine.config),
            rank=ranks[0].number,
            incarnation=ranks[0].incarnation,
            group=next(iter(engine.ranks)),
            link=self._link,
            unsafe_off=tuple(self._config.unsafe.off),
            integrity=self._config.policies.integrity,
            model=self._config.gateway.model,
            incarnations=tuple(rank.incarnation for rank in ranks),
        )
        try:
            # In a thread: an adapter may ask another interpreter what is installed there.
            spec = await anyio.to_thread.run_sync(self._protocol.find(engine.config.adapter).launch, request)
        except self._protocol.AdapterError as error:
            raise LaunchError(str(error)) from error
        if spec.tree:
            return await start_tree(spec.argv, spec.env, Health(*spec.health) if spec.health else None)
        return await start(spec.argv, spec.env)
