#!/usr/bin/env python3
"""Audits the wheels of SGLang named on the command line and writes the answers to docs/sglang.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dsv4ctl.engine_adapters.sglang.audit import sources
from dsv4ctl.engine_adapters.sglang.audit.questions import answers

MATRIX = Path(__file__).resolve().parent.parent / "docs" / "sglang.json"


def matrix(wheels: list[Path]) -> dict[str, dict[str, str]]:
    """{release: {key of a fact: answer}}, oldest release first."""
    read = sorted((sources.wheel(wheel) for wheel in wheels), key=lambda one: [int(n) for n in one.release.split(".")])
    return {one.release: {key: answer.value for key, answer in answers(one).items()} for one in read}


if __name__ == "__main__":
    MATRIX.write_text(json.dumps(matrix([Path(name) for name in sys.argv[1:]]), indent=1) + "\n")
