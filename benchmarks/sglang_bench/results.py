"""Results that survive whatever kills the run: one JSON file, merged by key at each step, by several processes."""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Results:
    """`resume`: what an earlier call found counts."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self._path = path
        self._resume = resume

    def found(self, key: str) -> dict[str, Any]:
        """What an earlier call put under `key`, if this one resumes it."""
        if not self._resume or not self._path.exists():
            return {}
        known: dict[str, Any] = json.loads(self._path.read_text()).get(key, {})
        return known

    def begin(self, steps: Collection[str]) -> None:
        """Forgets what an earlier run found in these steps, unless this one resumes it."""
        if self._resume:
            return
        with self._changed() as known:
            for name in steps:
                known.get("steps", {}).pop(name, None)
                for key in [key for key in known if key == name or key.startswith(f"{name}.")]:
                    del known[key]

    def put(self, key: str, **values: Any) -> None:
        """Adds `values` to what is known under `key`."""
        with self._changed() as known:
            known.setdefault(key, {}).update(values)

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
            yield known
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            part.replace(self._path)


def spread(values: Iterable[float], digits: int = 4) -> dict[str, float] | None:
    """Count, median, 90th and 99th percentile and maximum; None of nothing."""
    found = sorted(values)
    if not found:
        return None

    def at(share: float) -> float:
        return round(found[min(len(found) - 1, int(share * len(found)))], digits)

    return {
        "n": len(found),
        "median": round(statistics.median(found), digits),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": round(found[-1], digits),
    }
