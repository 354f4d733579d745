"""Which of the plugin's hooks would find their target in a release."""

from __future__ import annotations

import msgspec

from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from dsv4ctl.engine_adapters.sglang.audit.targets import Kind, kind
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED, hooks_of

_ROOT = "sglang.srt."


class Hooked(msgspec.Struct, frozen=True):
    #: Below `sglang.srt`, as in the table of hooks.
    target: str
    kind: Kind
    why: str

    @property
    def applies(self) -> bool:
        return self.kind not in (Kind.MISSING, Kind.CLOSURE)


def hooked(sources: Sources) -> list[Hooked]:
    """The hooks that every engine of this release gets; for an unverified one, those that it would be tried with."""
    return [Hooked(hook.target, kind(sources, _ROOT + hook.target), hook.why) for hook in hooks_of(sources.release)]


def verified(release: str) -> bool:
    return release in VERIFIED
