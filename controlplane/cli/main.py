"""`dsv4ctl`: the command line."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

import click

from dsv4ctl.controlplane.admin.registry import VERBS
from dsv4ctl.controlplane.cli import local
from dsv4ctl.controlplane.cli.doctor import doctor
from dsv4ctl.controlplane.cli.exits import MEANING, Exit, Failure
from dsv4ctl.controlplane.cli.start import start
from dsv4ctl.controlplane.cli.trace import trace
from dsv4ctl.controlplane.cli.verbs import command

#: A click command of its own, imported when it is called: it brings a model and its oracle along.
INCIDENT = "dsv4ctl.controlplane.incident.command"
#: As help lists them; what is not named here follows.
ORDER = (
    *("start", "drain", "resume", "status", "engines", "rooms", "tickets", "abort", "logs"),
    *("trace", "incident", "doctor", "config"),
)

#: How much of a wrong name a command must share to be suggested: two swapped letters of four, not `logs` for `bogus`.
NEAR = 0.7

EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code.value:<4} {meaning}" for code, meaning in MEANING.items())
    + """

\b
Examples:
  dsv4ctl start                        run the embedded prefill and decode engine
  dsv4ctl status                       what runs
  dsv4ctl rooms                        which requests are in flight
  dsv4ctl drain decode0 --deadline 60  take one engine out of service
  dsv4ctl logs --follow --json         live events, one JSON object a line
"""
)


class Commands(click.Group):
    """The commands in a fixed order; `incident` is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {*self.commands, "incident"}
        return [*(name for name in ORDER if name in names), *sorted(names.difference(ORDER))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "incident":
            return super().get_command(ctx, cmd_name)
        return incident()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but a wrong name is answered with a near one only, `incident` among them."""
        name = args[0]
        if not (name.startswith("-") or ctx.resilient_parsing) and self.get_command(ctx, name) is None:
            near = get_close_matches(name, self.list_commands(ctx), n=1, cutoff=NEAR)
            ctx.fail(f"No such command {name!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
        return super().resolve_command(ctx, args)


def incident() -> click.Command:
    """The command `incident`, or one that says why there is none."""
    try:
        found: click.Command = import_module(INCIDENT).command
    except ModuleNotFoundError as error:
        return _unavailable(f"incident needs {error.name}, which is not installed: pip install 'dsv4ctl[reference]'")
    return found


def _unavailable(reason: str) -> click.Command:
    @click.command("incident", help="Real A/B experiments on the embedded engine. Not installed here.")
    @click.argument("ignored", nargs=-1, type=click.UNPROCESSED)
    def unavailable(ignored: tuple[str, ...]) -> None:
        raise Failure(reason, Exit.FAILED)

    unavailable.context_settings = {"ignore_unknown_options": True}
    return unavailable


@click.group(cls=Commands, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--socket",
    metavar="PATH",
    help="The admin socket. Default: dsv4ctl.sock in $XDG_RUNTIME_DIR, or in /run/dsv4ctl.",
)
@click.pass_context
def cli(ctx: click.Context, socket: str | None) -> None:
    """Control plane for prefill/decode disaggregated DeepSeek-V4.

    No KV page is read before it has landed, and none is written under a reader.
    """
    if socket == "":
        raise click.BadParameter("expected a path, found nothing", ctx, param_hint="--socket")
    ctx.obj = socket


cli.add_command(start)
cli.add_command(local.config)
cli.add_command(doctor)
for _verb in VERBS:
    cli.add_command(command(_verb))
cli.add_command(local.version)  # in place of the verb's: it needs no control plane
cli.add_command(trace)  # likewise: it writes and reads files


def main() -> None:
    cli(prog_name="dsv4ctl")
