"""`dsv4ctl incident`."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

import anyio
import click

from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.incident.configuration import MIN_SESSIONS
from dsv4ctl.controlplane.incident.experiment import Experiment, Plan, steps
from dsv4ctl.controlplane.incident.progress import Progress
from dsv4ctl.controlplane.incident.report import Report, as_json, as_text
from dsv4ctl.controlplane.incident.rows import UnknownRowError, full_rows, more_rows, quick_rows, select
from dsv4ctl.controlplane.incident.workload import FULL_WORK, QUICK_WORK


@click.command(
    "incident",
    epilog="""
Exit code 0: no guarded row was corrupted, stuck or failed, each of the indexer, attention and sender rows that ran
showed damage, no rank row without agreement got through, and the retraction row retracted. 1: not so, or the
experiment could not be run.

\b
Examples:
  dsv4ctl incident --quick
  dsv4ctl incident --json > table.json
  dsv4ctl incident --only sender-off,pd-bf16-hicache-on-guards-on
  dsv4ctl incident --quick --only ranks
""",
)
@click.option("--quick", is_flag=True, help="Six rows on one pair, 16 sessions: about a minute on two idle cores.")
@click.option(
    "--only",
    metavar="ROW[,ROW]",
    default="",
    help="Only these rows, or groups of them: ranks, groups, storms. A wrong name lists those there are.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the conversations.")
@click.option(
    "--sessions",
    type=click.IntRange(min=MIN_SESSIONS),
    help=f"Conversations at once. Default: {FULL_WORK[''].sessions}, or {QUICK_WORK[''].sessions} with --quick.",
)
@click.option("--traces", is_flag=True, help="Look for races in each row's event trace, and name who is behind damage.")
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object.")
def command(quick: bool, only: str, seed: int, sessions: int | None, traces: bool, as_object: bool) -> None:
    """Real A/B experiments: what each guard prevents, against the one-at-a-time oracle.

    Starts deployments of the embedded engine of its own, switches guards off, and compares every output and page
    digest. Nothing is simulated but the speed of the host-to-device link.
    """
    if find_spec("torch") is None:
        raise Failure("incident needs the embedded engine: pip install 'dsv4ctl[reference]'", Exit.FAILED)
    rows, others = (quick_rows(), more_rows()) if quick else (full_rows(), ())
    names = [name.strip() for name in only.split(",") if name.strip()]
    try:
        chosen = select(rows, others, names)
    except UnknownRowError as error:
        raise Failure(str(error), Exit.USAGE) from error
    works = QUICK_WORK if quick else FULL_WORK
    plan = Plan(
        rows=chosen,
        work={group: work if sessions is None else work._replace(sessions=sessions) for group, work in works.items()},
        seed=seed,
        cost=not quick and not names,
        traces=traces,
    )
    report = _run(plan)
    click.echo(as_json(report) if as_object else as_text(report))
    raise SystemExit(Exit.FAILED if report.problems else Exit.OK)


def _run(plan: Plan) -> Report:
    progress = Progress(sys.stderr, steps(plan))
    try:
        report = anyio.run(_until_signalled, Experiment(plan, progress))
    finally:
        progress.clear()
    if report is None:
        raise Failure("interrupted: what was started is stopped", Exit.INTERRUPTED)
    return report


async def _until_signalled(experiment: Experiment) -> Report | None:
    """None: SIGINT or SIGTERM came first, and everything that was started is stopped."""
    report: Report | None = None

    async def watch(scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                scope.cancel()
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        report = await experiment.run()
        tasks.cancel_scope.cancel()
    return report
