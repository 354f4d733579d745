"""One release's audit: as a value, as JSON and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dsv4ctl.engine_adapters.sglang.audit import sources as reading
from dsv4ctl.engine_adapters.sglang.audit.consumers import Access, Consumer, consumers
from dsv4ctl.engine_adapters.sglang.audit.facts import Answer
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS, HAZARDS, answers
from dsv4ctl.engine_adapters.sglang.audit.sources import AuditError, Sources

__all__ = ["AuditError", "Report", "audit", "of", "table"]


class Hole(msgspec.Struct, frozen=True):
    key: str
    what: str
    where: str


class Report(msgspec.Struct, frozen=True):
    release: str
    origin: str
    answers: dict[str, Answer]
    consumers: list[Consumer]
    holes: list[Hole]
    hazards: list[str]

    @property
    def ok(self) -> bool:
        return not self.holes


def of(wheel: Path | None, python: Path) -> Report:
    """The audit of a downloaded wheel, or of what `python` has installed. Raises AuditError."""
    return audit(reading.wheel(wheel) if wheel else reading.interpreter(python))


def audit(sources: Sources) -> Report:
    """Raises AuditError."""
    answered, found = answers(sources), consumers(sources)
    return Report(
        sources.release,
        sources.origin,
        answered,
        found,
        [*_unanswered(answered), *_ungated(found)],
        [hazard.text for hazard in HAZARDS if answered[hazard.key].value in hazard.answers],
    )


def _unanswered(answered: dict[str, Answer]) -> Iterator[Hole]:
    for fact in FACTS:
        answer = answered[fact.key]
        if answer.value in fact.open:
            yield Hole(fact.key, fact.hole, answer.where)


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
        f"SGLang {report.release}: {report.origin}",
        _aligned([(fact.question, *report.answers[fact.key]) for fact in FACTS]),
        "Consumers: " + ", ".join(f"{counts[access]} {access}" for access in Access),
        _aligned([(each.access, each.platform, each.name, _short(each.where)) for each in shown]),
    ]
    if report.hazards:
        parts.append("Configuration:\n" + "\n".join(f"  {text}" for text in report.hazards))
    if report.holes:
        parts += [f"Open holes (CUDA): {len(report.holes)}", _aligned([(hole.key, hole.what) for hole in report.holes])]
    else:
        parts.append("No open hole (CUDA).")
    return "\n\n".join(parts)


def _short(where: str) -> str:
    first, *more = where.split(",")
    return f"{first} (+{len(more)})" if more else first


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
