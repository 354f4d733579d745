"""The whole run: oracles, deployments, rows, in the order that starts as little as possible."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, NamedTuple

import anyio

from dsv4ctl.controlplane.admin.client import NoControlPlaneError
from dsv4ctl.controlplane.admin.errors import AdminError
from dsv4ctl.controlplane.incident.cost import CostError, measure
from dsv4ctl.controlplane.incident.deployment import DeploymentError, Running, deployed
from dsv4ctl.controlplane.incident.drive import run_row
from dsv4ctl.controlplane.incident.evaluate import RowResult, comparisons, evaluate, problems
from dsv4ctl.controlplane.incident.oracle import OracleError, Script, write_scripts
from dsv4ctl.controlplane.incident.progress import Progress
from dsv4ctl.controlplane.incident.report import Pacing, Report
from dsv4ctl.controlplane.incident.rows import Deployment, Dtype, Row, by_deployment
from dsv4ctl.controlplane.incident.workload import Work, conversations, victims

#: Each of these ends the rows of one deployment; the others still run.
FAULTS = (OracleError, DeploymentError, NoControlPlaneError, AdminError, TimeoutError)
#: Weights of the model: the workload's seed changes prompts, never the model.
_MODEL_SEED = 0
_PACKAGES = {"dsv4ctl": "dsv4ctl", "torch": "torch", "nixl": "nixl-cu12", "aiohttp": "aiohttp"}


class Plan(NamedTuple):
    """`work`: by the rows' work."""

    rows: tuple[Row, ...]
    work: Mapping[str, Work]
    seed: int
    cost: bool
    traces: bool = False

    def work_of(self, row: Row) -> Work:
        return self.work[row.work or row.group]


class Experiment:
    """Runs one plan, once."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._scripts: dict[tuple[Dtype, Work], Script] = {}
        self._infos: dict[Deployment, list[dict[str, Any]]] = {}
        self._results: list[tuple[Row, RowResult]] = []
        self._faults: list[str] = []

    async def run(self) -> Report:
        """What failed stands in the report's problems."""
        plan, began = self._plan, anyio.current_time()
        for deployment, rows in by_deployment(plan.rows):
            try:
                await self._rows(deployment, rows)
            except BaseExceptionGroup as group:
                error = _only(group)
                if not isinstance(error, FAULTS):
                    raise
                self._faults.append(f"{deployment}: {str(error) or type(error).__name__}")
        cost = await self._cost() if plan.cost else None
        self._progress.clear()
        order = {row.name: at for at, row in enumerate(plan.rows)}
        self._results.sort(key=lambda one: order[one[0].name])
        results = [result for _, result in self._results]
        return Report(
            rows=results,
            comparisons=comparisons(results),
            seed=plan.seed,
            sessions=max(plan.work_of(row).sessions for row in plan.rows),
            rounds=max(plan.work_of(row).size.rounds for row in plan.rows),
            index_topk=self._index_topk(),
            pacing=Pacing(self._speeds()),
            cost=cost,
            versions=_versions(),
            seconds=round(anyio.current_time() - began, 1),
            problems=[*self._faults, *problems(self._results)],
        )

    async def _rows(self, deployment: Deployment, rows: Sequence[Row]) -> None:
        """Raises its FAULTS in an exception group."""
        async with self._prepared(deployment, self._plan.work_of(rows[0])) as (running, script):
            self._infos[deployment] = await running.engine_infos()
            for row in rows:
                await self._row(running, row, script)

    async def _cost(self) -> dict[str, Any] | None:
        self._progress.label("cost of the guards")
        try:
            return await measure()
        except CostError as error:
            self._faults.append(f"cost of the guards: {error}")
            return None

    @asynccontextmanager
    async def _prepared(self, deployment: Deployment, work: Work) -> AsyncIterator[tuple[Running, Script]]:
        """The deployment, serving, and what is right there; both are got ready at the same time."""
        self._progress.label(f"{deployment}: starting")
        async with anyio.create_task_group() as tasks:
            written = anyio.Event()
            tasks.start_soon(self._write_scripts, deployment.index_k, written)
            async with deployed(deployment, work.sessions, _MODEL_SEED) as running:
                # No deadline: every answer of the oracle has one.
                await written.wait()
                yield running, self._scripts[deployment.index_k, work]

    async def _write_scripts(self, index_k: Dtype, written: anyio.Event) -> None:
        """All of this layout at once: an oracle takes longer to start than to answer."""
        plan = self._plan
        works = list(dict.fromkeys(plan.work_of(row) for row in plan.rows if row.deployment.index_k == index_k))
        if (index_k, works[0]) not in self._scripts:
            spoken = [conversations(plan.seed, work.sessions, work.size) for work in works]
            scripts = await write_scripts(index_k, _MODEL_SEED, spoken, self._progress.step)
            self._scripts |= {(index_k, work): script for work, script in zip(works, scripts, strict=True)}
        written.set()

    async def _row(self, running: Running, row: Row, script: Script) -> None:
        seed, sessions = self._plan.seed, self._plan.work_of(row).sessions
        self._progress.label(row.name)

        def chosen(round_: int) -> frozenset[int]:
            return victims(seed, round_, sessions)

        def told() -> None:
            for _ in range(sessions):
                self._progress.step()

        measured = await run_row(running, row, script.turns, chosen, told, self._plan.traces)
        self._results.append((row, evaluate(row, sessions, script.expected, measured)))

    def _index_topk(self) -> int | None:
        return next((info["index_topk"] for infos in self._infos.values() for info in infos), None)

    def _speeds(self) -> dict[str, float]:
        return {
            str(deployment): info["h2d_gbps"]
            for deployment, infos in self._infos.items()
            for info in infos
            if info["h2d_gbps"] is not None
        }


def steps(plan: Plan) -> int:
    """Requests that a run makes, the oracles' among them: the length of its progress bar."""
    scripts = {(row.deployment.index_k, plan.work_of(row)) for row in plan.rows}
    works = [*(plan.work_of(row) for row in plan.rows), *(work for _, work in scripts)]
    return sum(work.sessions * work.size.rounds for work in works)


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error inside, the first of several of one kind: a task group wraps what ends it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len({type(one) for one in error.exceptions}) == 1:
        error = error.exceptions[0]
    return error


def _versions() -> dict[str, str]:
    found = {"python": python_version(), "platform": sys.platform}
    for name, package in _PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
