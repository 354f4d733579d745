"""Engines by adapter name, without importing engine code: the one place where the two sides meet."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from dsv4ctl.controlplane.config.schema import Config, EngineConfig
from dsv4ctl.controlplane.scheduler.fleet import Engine, Rank
from dsv4ctl.controlplane.supervisor.process import Health, start, start_tree
from dsv4ctl.controlplane.supervisor.runner import LaunchError, Running
from dsv4ctl.controlplane.supervisor.survival import Kept, SurvivingProcess, Survivors, Wanted, digest

_PROTOCOL = "dsv4ctl.engine_adapters.protocol"


class AdapterLauncher:
    """Starts engines through the adapters. `link` is the path of the socket that their ranks connect to."""

    def __init__(self, config: Config, link: str) -> None:
        self._config = config
        self._link = link
        self._registry = Survivors(Path(link).parent)
        self._protocol: Any = importlib.import_module(_PROTOCOL)

    def processes_of(self, engine: Engine) -> int:
        """Raises LaunchError if there is no such adapter."""
        try:
            count: int = self._protocol.find(engine.config.adapter).processes(engine.config.ranks)
        except self._protocol.AdapterError as error:
            raise LaunchError(str(error)) from error
        return count

    async def __call__(self, engine: Engine, ranks: Sequence[Rank]) -> Running:
        """Raises LaunchError if there is no such adapter or what it needs is not installed, OSError."""
        first = ranks[0]
        adopted = self._registry.adopted(first.incarnation)
        if adopted is not None:
            return adopted
        request = self._request(engine.config, ranks, next(iter(engine.ranks)))
        told: str | None = None
        try:
            # In a thread: an adapter may ask another interpreter what is installed there.
            spec = await anyio.to_thread.run_sync(self._protocol.find(engine.config.adapter).launch, request)
        except self._protocol.AdapterError as error:
            raise LaunchError(str(error)) from error
        if engine.config.survive:
            assert not spec.tree  # refused by its adapter's `problems`
            told = digest(self._request(engine.config))
            process: Running = await self._registry.start(first.incarnation, spec.argv, spec.env)
        elif spec.tree:
            process = await start_tree(spec.argv, spec.env, Health(*spec.health) if spec.health else None)
        else:
            process = await start(spec.argv, spec.env)
        try:
            self._registry.note(engine.name, first.number, first.incarnation, process.pid, told)
        except OSError:  # nobody would find it again
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.reaped()
                await process.close()
            raise
        if isinstance(process, SurvivingProcess):
            process.go()
        return process

    async def survivors(self, refused: Callable[[Kept, str], None]) -> dict[str, list[str]]:
        """Raises OSError for a registry of an earlier control plane that cannot be read."""
        surviving = [engine for engine in self._config.engines if engine.survive]
        wanted = {engine.name: Wanted(engine.ranks, digest(self._request(engine))) for engine in surviving}
        return await self._registry.settle(wanted, refused)

    def _request(self, engine: EngineConfig, ranks: Sequence[Rank] = (), group: str = "") -> msgspec.Struct:
        """What a process with these ranks is told; without ranks: what every one of the engine is told."""
        request: msgspec.Struct = self._protocol.LaunchRequest(
            engine=msgspec.to_builtins(engine),
            rank=ranks[0].number if ranks else 0,
            incarnation=ranks[0].incarnation if ranks else "",
            group=group,
            link=self._link,
            unsafe_off=tuple(self._config.unsafe.off),
            integrity=self._config.policies.integrity,
            model=self._config.gateway.model,
            incarnations=tuple(rank.incarnation for rank in ranks),
        )
        return request
