"""How an SGLang server is started: one process tree for all its ranks, and what can be known before is checked."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from dsv4ctl.engine_adapters.protocol import AdapterError, LaunchRequest, LaunchSpec, encode_request
from dsv4ctl.engine_adapters.sglang import environment
from dsv4ctl.engine_adapters.sglang.arguments import ArgumentError, check, command_line, declared
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED
from dsv4ctl.engine_adapters.sglang.table import EngineTable, arguments
from dsv4ctl.engine_adapters.sglang.table import problems as table_problems
from dsv4ctl.policies.registry import load as load_policy

_STORAGE = "--hicache-storage-backend"
_ANY_HOST = ("0.0.0.0", "::")


def processes(ranks: int) -> int:
    return 1


def problems(engine: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    return table_problems(msgspec.convert(engine, EngineTable))


def least_deadlines() -> Mapping[str, float]:
    """A loop that stands hears, and is heard of, within a second.

    Of two ranks, the one at fault is the one that is not heard of for half of `wedge`. A decode rank that hears of an
    abort late names its writer three quarters of `ack` after that, and before its control plane guesses.
    """
    return {"wedge": 3.0, "ack": 5.0}


def launch(request: LaunchRequest) -> LaunchSpec:
    """For an engine without `problems`. Raises AdapterError with one line for whatever else would make the server fail,
    or serve unguarded: what this machine lacks, and what the installed release does not have.
    """
    engine = msgspec.convert(request.engine, EngineTable)
    table = engine.sglang
    try:
        installed = environment.ask(table.python, table.env)
    except AdapterError as error:
        raise AdapterError(f"sglang.python: {error}") from error
    lacking = environment.missing(
        installed, table.python, transfers=engine.role != "single", gpu=_device(table.extra_args) == "cuda"
    )
    if lacking is not None:
        raise AdapterError(lacking)
    release = installed.sglang or ""
    _check_release(release, engine)
    stores = any(name == _STORAGE for _, name, _ in arguments(table.extra_args))
    if stores and load_policy("integrity", request.integrity)().compares_digests():
        raise AdapterError(
            f"sglang.extra_args: pages that come from {_STORAGE} have no digest, and would all fail: "
            'leave it out, or set policies.integrity to "off"'
        )
    try:
        check(table.extra_args, declared(installed.package), release)
    except ArgumentError as error:
        raise AdapterError(f"sglang.extra_args: {error}") from error
    host = "127.0.0.1" if engine.host in _ANY_HOST else engine.host
    engine = _with_ports(engine, host)
    argv = (table.python, "-m", "sglang.launch_server", *command_line(engine, request.model))
    ports = {"port": engine.port, "bootstrap_port": engine.bootstrap_port}
    request = msgspec.structs.replace(request, engine={**request.engine, **ports})
    return LaunchSpec(argv, _environment(request, engine, host), tree=True, health=(host, engine.port, "/health"))


def _check_release(release: str, engine: EngineTable) -> None:
    table = engine.sglang
    if release in VERIFIED:
        return
    if not table.allow_unverified:
        known = ", ".join(VERIFIED)
        raise AdapterError(
            f"SGLang {release} is not verified (verified: {known}); sglang.allow_unverified starts it anyway"
        )
    if engine.ranks > 1 and "--disable-overlap-schedule" not in table.extra_args:
        raise AdapterError(
            f"the overlap schedule of SGLang {release} can desynchronise {engine.ranks} ranks at a mass abort: "
            "add --disable-overlap-schedule to sglang.extra_args"
        )


def _environment(request: LaunchRequest, engine: EngineTable, host: str) -> dict[str, str]:
    """What `engine.sglang.env` says wins."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        **environment.PATH_GUARD,
        "SGLANG_HOST_IP": host,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would generate a token; progress is the watchdog's
    }
    given = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**given, **engine.sglang.env, **encode_request(request)}


def _with_ports(engine: EngineTable, host: str) -> EngineTable:
    """A port that is 0 is chosen here: SGLang must be told one, and so must the hooks."""
    port = engine.port or _free_port(host)
    bootstrap = engine.bootstrap_port
    if engine.role == "prefill" and not bootstrap:
        bootstrap = _free_port(host)
    return msgspec.structs.replace(engine, port=port, bootstrap_port=bootstrap)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        number: int = probe.getsockname()[1]
        return number


def _device(extra: Sequence[str]) -> str:
    """What `--device` says; CUDA if it says nothing."""
    for at, word in enumerate(extra):
        if word == "--device" and at + 1 < len(extra):
            return extra[at + 1]
        if word.startswith("--device="):
            return word.partition("=")[2]
    return "cuda"
