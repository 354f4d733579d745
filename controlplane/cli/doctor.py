"""`dsv4ctl doctor`: what an SGLang does about early reads and late writes, read from its sources."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.cli.verbs import pretty

#: The control plane imports no engine code; this part of it reads SGLang and imports nothing of it.
_AUDIT = "dsv4ctl.engine_adapters.sglang.audit.report"


@click.command(
    epilog="""
\b
Examples:
  dsv4ctl doctor                                   the SGLang beside this dsv4ctl
  dsv4ctl doctor --python /opt/engine/bin/python   the SGLang of another environment
  dsv4ctl doctor --wheel sglang-0.5.16-....whl     one that was downloaded
"""
)
@click.option("--wheel", metavar="FILE", type=click.Path(path_type=Path), help="Audit this wheel.")
@click.option(
    "--python",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Audit what this interpreter, or this virtual environment, would import. Default: this dsv4ctl's own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole audit as JSON.")
def doctor(wheel: Path | None, python: Path | None, as_json: bool) -> None:
    """Audit an SGLang from its sources: who reads KV and index-K bytes, and what holds them back.

    Nothing is imported and no GPU is needed. Exit code 0: the plugin closes every hole there is, and was verified on
    this release; 1: it does not, or was not.
    """
    if wheel and python:
        raise Failure("--wheel and --python exclude each other", Exit.USAGE)
    audit: Any = import_module(_AUDIT)
    try:
        report = audit.of(wheel, python or Path(sys.executable))
    except audit.AuditError as error:
        raise Failure(str(error), Exit.USAGE) from error
    click.echo(pretty(report) if as_json else audit.table(report))
    raise SystemExit(Exit.OK if report.ok else Exit.FAILED)
