#!/usr/bin/env python3
"""Writes the generated parts of docs/ from the code; `--check` only says which are out of date (exit 1)."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from dsv4ctl.controlplane.cli.exits import MEANING
from dsv4ctl.controlplane.rooms import tables
from dsv4ctl.controlplane.telemetry.events import Event
from dsv4ctl.controlplane.tickets.types import Guard
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS
from dsv4ctl.policies.defaults import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent
#: {release: {key of a fact: answer}}
SGLANG = ROOT / "docs" / "sglang.json"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def defaults() -> str:
    rows = ((f"`{d.key}`", grouped(d.value, d.unit), d.unit, d.reason) for d in DEFAULTS.values())
    return table(("key", "default", "unit", "why"), rows)


def grouped(value: float | str, unit: str) -> str:
    """Thousands apart, except of a port."""
    return f"{value:,}" if isinstance(value, int) and unit != "port" else str(value)


def events() -> str:
    return table(("event", "meaning"), ((f"`{event.value}`", event.doc) for event in Event))


def exits() -> str:
    return table(("code", "meaning"), ((code.value, meaning) for code, meaning in MEANING.items()))


def guards() -> str:
    return table(("guard", "off: who no longer waits"), ((f"`{g.value}`", GUARD_MEANING[g]) for g in Guard))


def layers() -> str:
    """The layers contract of pyproject.toml: the architecture that the linter enforces."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    named = [" ".join(re.findall(r"\w+", row)) for row in rows]
    return "```\n" + "\n   |\n".join(named) + "\n```"


def sglang() -> str:
    """The audits of the releases, as scripts/sglang_matrix.py wrote them down."""
    audited = json.loads(SGLANG.read_text())
    rows = ((fact.question, *(answers[fact.key] for answers in audited.values())) for fact in FACTS)
    return table(("", *audited), rows)


GUARD_MEANING = {
    Guard.ATTENTION: "attention reads KV pages whether they have landed or not",
    Guard.INDEXER: "the indexer reads index-K pages whether they have landed or not",
    Guard.COMPRESSOR: "the compressor resumes from a state snapshot that may still be loading",
    Guard.SENDER: "the transfer lets NIXL read device pages that are still loading",
    Guard.BACKUP: "a backup reads device pages that may not be complete",
    Guard.LOAD: "a load reads host pages whose backup may still be writing",
    Guard.QUIESCE: "an aborted room's pages are freed before its writer acknowledged",
    Guard.AGREEMENT: "a rank acts on an abort, a landing or a free page that it alone knows of",
    Guard.HOLD: "pages that a backup or a load still copies are reused",
    Guard.FOLD: "a page that is published twice gives its first slots away, which a load may still fill",
    Guard.GROUPS: "a prefix is used as far as its KV reaches, with or without its index-K",
    Guard.VERDICT: "a digest mismatch is counted and reported, and the room goes on",
}

PARTS: dict[str, Callable[[], str]] = {
    "defaults": defaults,
    "events": events,
    "exits": exits,
    "guards": guards,
    "layers": layers,
    "rooms": tables.markdown,
    "sglang": sglang,
}


def fresh(text: str) -> str:
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]().strip()}\n{part[3]}", text)


def main(arguments: list[str]) -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (now := fresh(text)) != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in arguments:
                path.write_text(now)
    for path in stale:
        print(f"{path}: {'out of date: run scripts/docs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
