"""How a benchmark shows what it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping


def show(figures: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value}")
