"""The second half of strictness: values that are well-formed and yet cannot work together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from dsv4ctl.controlplane.config.problems import Problem, expected, show, unknown
from dsv4ctl.controlplane.config.schema import Config, EngineConfig, PoliciesConfig
from dsv4ctl.controlplane.tickets.types import Guard

#: A Unix socket's path, its closing zero included, must fit into `sun_path` (108 bytes on Linux).
SOCKET_PATH_MAX = 107
#: What follows the admin socket's name in that of the folder where surviving engines are found again.
SURVIVORS = ".engines"
_LINK_MORE = len(f"{SURVIVORS}/link.sock")  #: bytes of the link's path there beyond the admin socket's
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
#: A host name (RFC 1123, and `_`, which resolvers take) or an address.
_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(%[\w.-]+)?", re.ASCII)
_ANY_HOST = frozenset({"0.0.0.0", "::"})
_LOOPBACK = frozenset({"localhost", "::1"})


class Facts(NamedTuple):
    """What the checks need to know of the machine and of what is installed."""

    memory_bytes: int
    adapters: Collection[str]
    #: Names of one kind of policy (a field of `PoliciesConfig`).
    policies: Callable[[str], Collection[str]]
    #: Why a policy of that kind, whose name is known, cannot be used as it is written; None if it can.
    policy_problem: Callable[[str, str], str | None]
    #: What the engine's adapter refuses in its table on any machine: keys below the table, what was expected.
    engine_problems: Callable[[EngineConfig], Iterable[tuple[str, str]]]
    #: Of an adapter there is, the least seconds that deadlines may have with it, by name.
    least_deadlines: Callable[[str], Mapping[str, float]]
    #: Bytes of one host page of an engine without such problems, or None where its adapter cannot say.
    host_page_bytes: Callable[[EngineConfig], int | None]


def semantic_problems(config: Config, facts: Facts) -> Iterator[Problem]:
    yield from _socket(config)
    yield from _names(config)
    yield from _peers(config)
    yield from _agreement(config, facts)
    yield from _hosts(config)
    yield from _ports(config)
    yield from _policies(config.policies, facts)
    yield from _guards(config)
    yield from _deadlines(config, facts)
    for index, engine in enumerate(config.engines):
        yield from _engine(f"engines[{index}]", engine, facts)


def _socket(config: Config) -> Iterator[Problem]:
    if config.socket is None:
        return
    length = len(os.fsencode(config.socket))
    survives = any(engine.survive for engine in config.engines)
    limit = SOCKET_PATH_MAX - (_LINK_MORE if survives else 0)
    if not 0 < length <= limit:
        why = " with engines that survive" if survives else ""
        yield Problem("socket", f"expected a path of 1 to {limit} bytes{why}, found {length}: {config.socket}")


def _names(config: Config) -> Iterator[Problem]:
    if not config.engines:
        yield Problem("engines", "expected at least one engine, found none")
    first: dict[str, int] = {}
    for index, engine in enumerate(config.engines):
        key = f"engines[{index}].name"
        if not _NAME.fullmatch(engine.name):
            yield Problem(key, expected("lower-case letters, digits, `.`, `_` and `-`", engine.name))
        if engine.name in first:
            found = f"{show(engine.name)}, the name of engines[{first[engine.name]}]"
            yield Problem(key, f"expected a name of its own, found {found}")
        first.setdefault(engine.name, index)


def _peers(config: Config) -> Iterator[Problem]:
    roles = {engine.role for engine in config.engines}
    for role, peer in (("decode", "prefill"), ("prefill", "decode")):
        if role in roles and peer not in roles:
            index = next(index for index, engine in enumerate(config.engines) if engine.role == role)
            name = config.engines[index].name
            yield Problem(
                f"engines[{index}].role",
                f"expected a {peer} engine beside {role} engine {show(name)}, found none",
            )


def _agreement(config: Config, facts: Facts) -> Iterator[Problem]:
    """Bytes move only between engines of one kind that keep index-K alike."""
    first = next((engine for engine in config.engines if engine.role == "prefill"), None)
    for index, engine in enumerate(config.engines):
        if first is None or engine.role == "single" or not {engine.adapter, first.adapter} <= set(facts.adapters):
            continue
        if engine.adapter != first.adapter:
            found = f"{show(engine.adapter)}: a transfer needs one kind of engine on both sides"
            yield Problem(
                f"engines[{index}].adapter", f"expected {show(first.adapter)} as on {first.name}, found {found}"
            )
            continue
        dtype, other = _index_k_dtype(engine), _index_k_dtype(first)
        if dtype != other:
            key = f"engines[{index}].{engine.adapter}.index_k_dtype"
            yield Problem(
                key, f"expected {show(other)} as on {first.name}, found {show(dtype)}: pages of different sizes"
            )


def _index_k_dtype(engine: EngineConfig) -> str | None:
    """None of an adapter that has no table of its own here."""
    return getattr(getattr(engine, engine.adapter, None), "index_k_dtype", None)


def _hosts(config: Config) -> Iterator[Problem]:
    places = [("gateway.host", config.gateway.host)]
    places += [(f"engines[{index}].host", engine.host) for index, engine in enumerate(config.engines)]
    for key, host in places:
        if not _HOST.fullmatch(host):
            yield Problem(key, expected("a host name or an address", host))


def _ports(config: Config) -> Iterator[Problem]:
    taken: list[tuple[str, int, str]] = []
    places = [("gateway.port", config.gateway.host, config.gateway.port)]
    for index, engine in enumerate(config.engines):
        places.append((f"engines[{index}].port", engine.host, engine.port))
        places.append((f"engines[{index}].bootstrap_port", engine.host, engine.bootstrap_port))
    for key, host, port in places:
        for other_host, other_port, other_key in taken:
            if port and port == other_port and _same_host(host, other_host):
                yield Problem(key, f"expected a free port, found {port}, which is {other_key}'s")
                break
        taken.append((host, port, key))


def _same_host(one: str, other: str) -> bool:
    names = {"127.0.0.1" if host in _LOOPBACK else host for host in (one, other)}
    return len(names) == 1 or bool(names & _ANY_HOST)


def _policies(policies: PoliciesConfig, facts: Facts) -> Iterator[Problem]:
    for kind in policies.__struct_fields__:
        name = getattr(policies, kind)
        names = facts.policies(kind)
        if name.partition(":")[0] not in names:
            yield Problem(f"policies.{kind}", unknown(f"{kind} policy", name, names))
        elif (problem := facts.policy_problem(kind, name)) is not None:
            yield Problem(f"policies.{kind}", problem)


def _guards(config: Config) -> Iterator[Problem]:
    names = [guard.value for guard in Guard]
    for index, name in enumerate(config.unsafe.off):
        if name not in names:
            yield Problem(f"unsafe.off[{index}]", unknown("guard", name, names))


def _deadlines(config: Config, facts: Facts) -> Iterator[Problem]:
    for adapter in sorted({engine.adapter for engine in config.engines} & set(facts.adapters)):
        for name, least in facts.least_deadlines(adapter).items():
            found = getattr(config.deadlines, name)
            if found < least:
                text = f"at least {least} s with an {adapter} engine, whose ranks may hear and be heard of late"
                yield Problem(f"deadlines.{name}", expected(text, found))


def _engine(at: str, engine: EngineConfig, facts: Facts) -> Iterator[Problem]:
    if engine.adapter not in facts.adapters:
        yield Problem(f"{at}.adapter", unknown("adapter", engine.adapter, facts.adapters))
        return
    problems = [Problem(f"{at}.{key}", text) for key, text in facts.engine_problems(engine)]
    yield from problems
    page_bytes = None if problems else facts.host_page_bytes(engine)
    if not engine.hicache.enabled or page_bytes is None:
        return
    needed = engine.hicache.pages * page_bytes * engine.ranks
    limit = min(engine.memory_bytes or facts.memory_bytes, facts.memory_bytes)
    if needed > limit:
        whose = "memory_bytes" if limit == engine.memory_bytes else "this machine"
        most = limit // (page_bytes * engine.ranks)
        yield Problem(
            f"{at}.hicache.pages",
            f"expected at most {most} pages ({limit:,} bytes, {whose}), found {engine.hicache.pages} pages "
            f"of {page_bytes:,} bytes on {engine.ranks} rank(s): {needed:,} bytes",
        )
