"""One release's audit: as a value, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from dsv4ctl.engine_adapters.sglang.audit import sources as reading
from dsv4ctl.engine_adapters.sglang.audit.consumers import Access, Consumer, consumers
from dsv4ctl.engine_adapters.sglang.audit.facts import Answer
from dsv4ctl.engine_adapters.sglang.audit.hooks import Hooked, hooked, verified
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS, HAZARDS, answers
from dsv4ctl.engine_adapters.sglang.audit.sources import AuditError, Sources

__all__ = ["AuditError", "Report", "audit", "of", "table"]


class Hole(msgspec.Struct, frozen=True):
    key: str
    what: str
    where: str
    #: Targets of the plugin's hooks that close it; empty: it is open.
    closed_by: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    release: str
    origin: str
    #: Whether the plugin's hooks were verified on this release.
    verified: bool
    answers: dict[str, Answer]
    consumers: list[Consumer]
    hooks: list[Hooked]
    holes: list[Hole]
    hazards: list[str]
    #: What the environment lacks to run this SGLang with the plugin, or empty.
    lacks: str = ""

    @property
    def ok(self) -> bool:
        """Every hole is closed, by hooks that are known to fit and are installed; with no hole, none are needed."""
        return not self.holes or (self.verified and not self.lacks and all(hole.closed_by for hole in self.holes))


def of(wheel: Path | None, python: Path) -> Report:
    """The audit of a downloaded wheel, or of what `python` has installed. Raises AuditError."""
    return audit(reading.wheel(wheel) if wheel else reading.interpreter(python))


def audit(sources: Sources) -> Report:
    """Raises AuditError."""
    answered, found, hooks = answers(sources), consumers(sources), hooked(sources)
    holes = [*_unanswered(answered, {hook.target for hook in hooks if hook.applies}), *_ungated(found)]
    fits = verified(sources.release)
    hazards = [hazard for hazard in HAZARDS if answered[hazard.key].value in hazard.answers]
    closed = {hole.key for hole in holes if hole.closed_by and fits}
    return Report(
        sources.release,
        sources.origin,
        fits,
        answered,
        found,
        hooks,
        holes,
        [hazard.text for hazard in hazards if hazard.key not in closed],
        sources.lacks,
    )


def _unanswered(answered: dict[str, Answer], hooks: set[str]) -> Iterator[Hole]:
    for fact in FACTS:
        answer = answered[fact.key]
        if answer.value in fact.open:
            yield Hole(fact.key, fact.hole, answer.where, fact.closed_by if hooks.issuperset(fact.closed_by) else ())


def _ungated(found: Iterable[Consumer]) -> Iterator[Hole]:
    """Readers on CUDA that nothing orders behind a load."""
    for each in found:
        if each.access is Access.UNGATED and not each.platform:
            yield Hole(each.name, "reads KV or index-K bytes that may still be loading", each.where)


def table(report: Report) -> str:
    """For people: what was answered, who reads, what is open."""
    counts = Counter(each.access for each in report.consumers)
    shown = [each for each in report.consumers if each.access is not Access.WRITE]
    parts = [
        f"SGLang {report.release} ({'verified' if report.verified else 'not verified'}): {report.origin}",
        _aligned([(fact.question, *report.answers[fact.key]) for fact in FACTS]),
        "Consumers: " + ", ".join(f"{counts[access]} {access}" for access in Access),
        _aligned([(each.access, each.platform, each.name, _short(each.where)) for each in shown]),
        f"Hooks: {sum(hook.applies for hook in report.hooks)} of {len(report.hooks)} find their target",
    ]
    if unfit := [(hook.target, str(hook.kind)) for hook in report.hooks if not hook.applies]:
        parts.append(_aligned(unfit))
    if report.hazards:
        parts.append("Configuration:\n" + "\n".join(f"  {text}" for text in report.hazards))
    parts.append(f"Holes (CUDA): {len(report.holes)}, open: {sum(not hole.closed_by for hole in report.holes)}")
    if report.holes:
        parts.append(_aligned([(hole.key, hole.what, _closure(hole)) for hole in report.holes]))
    if report.lacks:
        parts.append(report.lacks)
    if report.holes and not report.verified:
        parts.append("The plugin's hooks were not verified on this release: whether they close anything is not known.")
    return "\n\n".join(parts)


def _closure(hole: Hole) -> str:
    return (
        "closed by " + ", ".join(target.rpartition(".")[2] for target in hole.closed_by) if hole.closed_by else "OPEN"
    )


def _short(where: str) -> str:
    first, *more = where.split(",")
    return f"{first} (+{len(more)})" if more else first


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
