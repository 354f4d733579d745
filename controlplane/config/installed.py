"""What is installed here: adapters, policies, memory. Nothing is imported that may import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec

from dsv4ctl.controlplane.config.schema import EngineConfig
from dsv4ctl.controlplane.config.semantics import Facts
from dsv4ctl.policies import registry

#: By name, so that no import of the control plane leads into an engine's code.
ADAPTERS = "dsv4ctl.engine_adapters"
#: Module of an adapter that says, without torch, what an engine needs: `host_page_bytes(table) -> int`.
MEMORY_MODULE = "memory"


def facts() -> Facts:
    return Facts(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        adapters=adapter_names(),
        policies=registry.names,
        policy_problem=policy_problem,
        engine_problems=engine_problems,
        least_deadlines=least_deadlines,
        host_page_bytes=host_page_bytes,
    )


def adapter_names() -> list[str]:
    """Adapters are the sub-packages of `dsv4ctl.engine_adapters`."""
    spec = find_spec(ADAPTERS)
    folders = spec.submodule_search_locations if spec else None
    return sorted({path.parent.name for folder in folders or () for path in Path(folder).glob("*/__init__.py")})


def policy_problem(kind: str, name: str) -> str | None:
    try:
        registry.load(cast(registry.Kind, kind), name)
    except registry.PolicyError as error:
        return str(error)
    return None


def engine_problems(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    problems: Iterator[tuple[str, str]] = _protocol().find(engine.adapter).problems(msgspec.to_builtins(engine))
    return problems


def least_deadlines(adapter: str) -> Mapping[str, float]:
    least: Mapping[str, float] = _protocol().find(adapter).least_deadlines()
    return least


def host_page_bytes(engine: EngineConfig) -> int | None:
    module = f"{ADAPTERS}.{engine.adapter}.{MEMORY_MODULE}"
    if find_spec(module) is None:
        return None
    size: int = import_module(module).host_page_bytes(msgspec.to_builtins(engine))
    return size


def missing(engine: EngineConfig) -> str | None:
    """What this machine lacks that the engine needs, and how to get it; None if it can be started."""
    protocol = _protocol()
    request = protocol.LaunchRequest(
        engine=msgspec.to_builtins(engine),
        rank=0,
        incarnation="",
        group="",
        link="",
        unsafe_off=(),
        integrity="",
        model="",
        incarnations=("",) * engine.ranks,
    )
    try:
        protocol.find(engine.adapter).launch(request)
    except protocol.AdapterError as error:
        return str(error)
    return None


def _protocol() -> Any:
    return import_module(f"{ADAPTERS}.protocol")
