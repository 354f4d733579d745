"""Engines of a fake SGLang (`fake_sglang/`), started as real ones are, and every process that they leave behind."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

import dsv4ctl.controlplane as controlplane
from dsv4ctl.controlplane.config.schema import Config, DeadlinesConfig, EngineConfig, GatewayConfig, SglangConfig

SITE = Path(__file__).with_name("fake_sglang")
#: In the environment of every process of one test.
_MARK = "DSV4CTL_TEST_TREE"


class Trees:
    """The fake environment, and the processes that were started in it."""

    def __init__(self, **env: str) -> None:
        self._mark = uuid.uuid4().hex
        package = str(Path(next(iter(controlplane.__path__))).parent.parent)
        paths = [str(SITE), package, os.environ.get("PYTHONPATH", "")]
        self.env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), _MARK: self._mark, **env}

    def sglang(self, **changes: Any) -> SglangConfig:
        defaults: dict[str, Any] = {
            "python": sys.executable,
            "model": "/models/tiny",
            "extra_args": ["--device", "cpu"],
            "env": self.env,
        }
        return SglangConfig(**{**defaults, **changes})

    def engine(self, name: str, role: Any, **changes: Any) -> EngineConfig:
        defaults: dict[str, Any] = {"name": name, "role": role, "adapter": "sglang", "sglang": self.sglang()}
        return EngineConfig(**{**defaults, **changes})

    def pair(self, folder: Path, **changes: Any) -> Config:
        defaults: dict[str, Any] = {
            "socket": str(folder / "admin.sock"),
            "engines": [self.engine("prefill0", "prefill", ranks=2), self.engine("decode0", "decode", ranks=2)],
            "gateway": GatewayConfig(port=0),
            "deadlines": DeadlinesConfig(ack=1.0, fence=5.0, ready=60.0),
        }
        return Config(**{**defaults, **changes})

    def pids(self, word: str = "") -> list[int]:
        """Living processes (no zombies) with `word` in their command line, oldest first."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"{_MARK}={self._mark}".encode() not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and word in (process / "cmdline").read_bytes().decode().replace("\0", " "):
                    found.append(int(process.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended, or is another user's
        return sorted(found)
