#!/usr/bin/env python3
"""Audits the wheels of SGLang named on the command line and writes the answers to docs/sglang.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from dsv4ctl.engine_adapters.sglang.audit import sources
from dsv4ctl.engine_adapters.sglang.audit.questions import answers
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources

MATRIX = Path(__file__).resolve().parent.parent / "docs" / "sglang.json"


def matrix(read: Iterable[Sources]) -> dict[str, dict[str, str]]:
    """{release: {key of a fact: answer}}, oldest release first."""
    ordered = sorted(read, key=lambda one: [int(number) for number in one.release.split(".")])
    return {one.release: {key: answer.value for key, answer in answers(one).items()} for one in ordered}


if __name__ == "__main__":
    wheels = [sources.wheel(Path(name)) for name in sys.argv[1:]]
    MATRIX.write_text(json.dumps(matrix(wheels), indent=1) + "\n")
