"""Wheels of SGLang from the package index, kept below pytest's cache: sources to read, nothing is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from dsv4ctl.engine_adapters.sglang.audit import sources
from dsv4ctl.engine_adapters.sglang.audit.sources import Sources

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "d" / "sglang-wheels"


def wheel(release: str) -> Path:
    """The wheel of that release, downloaded on first use."""
    if not _found(release):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", CACHE, f"sglang=={release}"], check=True, timeout=300)
    return _found(release)[0]


@cache
def released(release: str) -> Sources:
    """Its sources, parsed once for all tests."""
    return sources.wheel(wheel(release))


class Copy(Sources):
    """A copy of which one module differs; with `only`, a copy of no more than these modules."""

    def __init__(self, original: Sources, path: str, old: str, new: str, only: tuple[str, ...] = ()) -> None:
        text = original.text(path)
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path}"
        super().__init__("copy", "memory", only or original, original.text)
        self._texts[path] = text.replace(old, new)
        self._original = original

    def tree(self, path: str) -> ast.Module:
        return super().tree(path) if path in self._texts or path not in self._known else self._original.tree(path)


def _found(release: str) -> list[Path]:
    return sorted(CACHE.glob(f"sglang-{release}-*.whl"))
