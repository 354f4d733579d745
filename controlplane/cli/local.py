"""Commands that need no control plane: `config check` and `version`."""

from __future__ import annotations

from pathlib import Path

import click

from dsv4ctl.controlplane.admin.verbs import version as version_verb
from dsv4ctl.controlplane.cli.exits import Exit, Failure
from dsv4ctl.controlplane.cli.start import UNSAFE
from dsv4ctl.controlplane.cli.verbs import pretty
from dsv4ctl.controlplane.config import installed
from dsv4ctl.controlplane.config.load import load
from dsv4ctl.controlplane.config.problems import ConfigError


@click.group()
def config() -> None:
    """Check configuration files."""


@config.command(epilog="Example: dsv4ctl config check cluster.toml")
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check FILE and start nothing: every problem with its key, what was expected, and the nearest valid name."""
    try:
        loaded = load(file, installed.facts())
    except ConfigError as error:
        raise Failure(str(error), Exit.USAGE) from error
    engines = ", ".join(f"{engine.name} ({engine.role})" for engine in loaded.engines)
    click.echo(f"{file}: ok: {engines}")
    if loaded.unsafe.off:
        click.secho(UNSAFE.format(", ".join(loaded.unsafe.off)), fg="red", bold=True, err=True)


@click.command(epilog="Example: dsv4ctl version --json")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def version(as_json: bool) -> None:
    """Versions of dsv4ctl, its wire format and Python."""
    versions = version_verb.here()
    click.echo(pretty(versions) if as_json else version_verb.render(versions))
