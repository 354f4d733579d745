"""Wheels of SGLang from the package index, kept below pytest's cache: sources to read, nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".pytest_cache" / "d" / "sglang-wheels"


def wheel(release: str) -> Path:
    """The wheel of that release, downloaded on first use."""
    if not _found(release):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", CACHE, f"sglang=={release}"], check=True, timeout=300)
    return _found(release)[0]


def _found(release: str) -> list[Path]:
    return sorted(CACHE.glob(f"sglang-{release}-*.whl"))
