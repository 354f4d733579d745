"""What is started on the machine: SGLang servers as they are, and deployments under `dsv4ctl start`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio

#: Seconds between two looks.
LOOK = 0.25
#: Seconds without progress, of engines of one rank and of several: a kernel may be compiled in a first request.
WEDGE = {False: 90.0, True: 45.0}


@dataclass(frozen=True)
class Machine:
    """Where things are, and what every server is started with."""

    out: Path
    models: Path
    env: Mapping[str, str]
    extra: tuple[str, ...]
    site: tuple[str, ...] = ()  #: of a stock server's PYTHONPATH

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.env, **more}


@dataclass(frozen=True)
class Shape:
    """One server: its role, the GPUs it sees, its pools."""

    name: str
    role: str  #: prefill, decode or single
    port: int
    gpus: str = "0"
    ranks: int = 1
    model: str = "model"
    tokens: int = 131_072
    hicache: float | None = None  #: host pages for each device page
    bootstrap_port: int = 0
    index_k: str = "fp8"
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Server:
    """A stock SGLang server: the hooks are installed and not asked for."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self.shape = shape
        self._log = (machine.out / f"{shape.name}.log").open("ab")
        self.started = time.monotonic()
        self.seconds: float | None = None
        self._process = subprocess.Popen(
            stock_command(machine, shape),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=machine.environment(CUDA_VISIBLE_DEVICES=shape.gpus, **shape.env),
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, http: aiohttp.ClientSession, deadline: float) -> bool:
        while self.alive and time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(self.shape.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        self.seconds = time.monotonic() - self.started
                        return True
            await anyio.sleep(LOOK)
        return False

    def stop(self) -> None:
        _kill(self._process)
        self._log.close()


def stock_command(machine: Machine, shape: Shape) -> list[str]:
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(machine.models / shape.model)]
    line += ["--host", "127.0.0.1", "--port", str(shape.port), "--tp-size", str(shape.ranks)]
    line += ["--max-total-tokens", str(shape.tokens), *machine.extra, *shape.extra]
    if shape.role != "single":
        line += ["--disaggregation-mode", shape.role, "--disaggregation-transfer-backend", "nixl"]
    if shape.role == "prefill":
        line += ["--disaggregation-bootstrap-port", str(shape.bootstrap_port)]
    if shape.hicache is not None:
        line += ["--enable-hierarchical-cache", "--hicache-ratio", str(shape.hicache)]
    return line


class Deployment:
    """One `dsv4ctl start`: its engines, its gateway, its log. `unsafe`: guards can be switched off."""

    def __init__(self, machine: Machine, name: str, gateway: int, shapes: Sequence[Shape], *, unsafe: bool) -> None:
        self.name = name
        self.shapes = list(shapes)
        self.url = f"http://127.0.0.1:{gateway}"
        self.socket = str(machine.out / f"{name}.sock")[-100:]
        self.log = machine.out / f"{name}.log"
        self.seconds: float | None = None
        file = machine.out / f"{name}.toml"
        file.write_text(_toml(machine, gateway, self.socket, shapes, unsafe=unsafe))
        self._file = self.log.open("ab")
        self._environment = machine.environment()
        self._process = subprocess.Popen(
            dsv4ctl("start", str(file)),
            stdout=self._file, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self, http: aiohttp.ClientSession, deadline: float) -> bool:
        """The gateway could serve a request."""
        while self.alive and time.monotonic() < deadline:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        self.seconds = max((record["seconds"] for record in self.events("engine.ready")), default=0.0)
                        return True
            await anyio.sleep(LOOK)
        return False

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The log's events of these names, oldest first."""
        lines = self.log.read_text(errors="replace").splitlines()
        wanted = tuple(f'"{name}"' for name in names)
        found: list[dict[str, Any]] = []
        for line in lines:
            if line.startswith("{") and any(name in line for name in wanted):
                with suppress(ValueError):  # the last line may be half written
                    found.append(json.loads(line))
        return [record for record in found if record.get("event") in names]

    async def run(self, *words: str) -> dict[str, Any]:
        """What `dsv4ctl WORDS` said, and its exit code."""
        command = [*dsv4ctl("--socket", self.socket), *words]
        done = await anyio.run_process(command, env=self._environment, check=False)
        said = (done.stdout + done.stderr).decode(errors="replace")
        return {"exit_code": done.returncode, "said": said[-1500:]}

    async def drain(self, seconds: float) -> dict[str, Any]:
        """`dsv4ctl drain`, and how the whole ended."""
        began = time.monotonic()
        command = dsv4ctl("--socket", self.socket, "drain", "--json")
        with anyio.move_on_after(seconds):
            done = await anyio.run_process(command, env=self._environment, check=False)
            while self.alive:  # noqa: ASYNC110 - another process
                await anyio.sleep(LOOK)
            return {
                "seconds": round(time.monotonic() - began, 2),
                "said": done.stdout.decode(errors="replace")[-300:],
                "exit_code": self._process.poll(),
            }
        return {"seconds": seconds, "exit_code": None}

    def stop(self) -> None:
        """Kills the control plane; its engines die with it."""
        _kill(self._process)
        self._file.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """And its group, unless it is known to have ended: its number may be another's by now."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def dsv4ctl(*words: str) -> list[str]:
    return [sys.executable, "-c", "from dsv4ctl.controlplane.cli.main import main; main()", *words]


def _toml(machine: Machine, gateway: int, socket: str, shapes: Sequence[Shape], *, unsafe: bool) -> str:
    lines = [
        f"socket = {json.dumps(socket)}",
        f"gateway = {{ port = {gateway}, max_body_bytes = {32 * 1024 * 1024} }}",
        'log = { format = "json", level = "debug", queue = 100000 }',
        "limits = { max_rooms = 4096, max_bytes = 1000000000000 }",
        f"deadlines = {{ ready = 400.0, wedge = {WEDGE[shapes[0].ranks > 1]}, fence = 20.0, ack = 10.0 }}",
        *(["unsafe = { runtime = true }"] if unsafe else []),
    ]
    for shape in shapes:
        env = {**machine.env, "CUDA_VISIBLE_DEVICES": shape.gpus, **shape.env}
        hicache = "{ enabled = false }" if shape.hicache is None else f"{{ enabled = true, ratio = {shape.hicache} }}"
        lines += [
            "[[engines]]",
            f'name = "{shape.name}"',
            f'role = "{shape.role}"',
            'adapter = "sglang"',
            f"ranks = {shape.ranks}",
            f"port = {shape.port}",
            f"bootstrap_port = {shape.bootstrap_port}",
            f"hicache = {hicache}",
            "[engines.sglang]",
            f"python = {json.dumps(sys.executable)}",
            f"model = {json.dumps(str(machine.models / shape.model))}",
            f'index_k_dtype = "{shape.index_k}"',
            f"max_total_tokens = {shape.tokens}",
            f"extra_args = {json.dumps([*machine.extra, *shape.extra])}",
            "[engines.sglang.env]",
            *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in env.items()),
        ]
    return "\n".join(lines) + "\n"
