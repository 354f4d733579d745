"""Who touches the bytes of DeepSeek-V4's pools, and what orders the access behind a HiCache load of those bytes.

SGLang's own gate is `DeepSeekV4TokenToKVPool.wait_layer_transfer`: an accessor of that class calls it before it hands a
buffer out. Everything else that gets at a buffer (through an inner pool, or by its address) is ordered by other means,
or by none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TypeGuard

import msgspec

from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from dsv4ctl.engine_adapters.sglang.audit.tree import Definition, called, definitions, find, functions, last

POOL = "srt/mem_cache/deepseek_v4_memory_pool.py"
CLASS = "DeepSeekV4TokenToKVPool"
GATE = "wait_layer_transfer"

#: The pools inside the pool: none of their own methods is gated.
_INNER = frozenset(
    {
        *("swa_kv_pool", "c4_kv_pool", "c128_kv_pool", "c4_indexer_kv_pool", "unified_kv_pool"),
        *("kv_pools", "index_pools", "request_window", "compress_kv_pool", "_indexer_pool"),
        *("compress_state_pools", "indexer_compress_state_pools"),
    }
)
#: Names that no other model's pools have: bytes, whoever holds them.
_ANYWHERE = frozenset({"kv_score_buffer", "get_swa_raw_buffer"})
#: The state pools are handed out whole, by layer.
_STATES = frozenset({"compress_state_pools", "indexer_compress_state_pools"})
#: Attributes and methods of an inner pool that are, or return, its bytes.
_BYTES = re.compile(
    r"(\w*buffers?|kv_score|data_ptrs|[gs]et_(key|value|kv|index|unified|cpu)\w*|load_cpu_copy|move_kv_cache)$"
)
_GEOMETRY = re.compile(r"\w*(page_size|_dim|_layout|_size_bytes|bytes_per_\w+|_infos)$")
_BUILDING = re.compile(r"(__init__|_init_|_make_|_create_|_allocate_)")
_WRITER = re.compile(r"(set|clear|move|load|_?zero|reset)_")
#: Its result is a set of addresses or views of whole buffers: for NIXL's registration, or for HiCache's copies.
_POINTER = re.compile(r"\w*(_infos|_buffers|_ptrs)$")
#: Modules that put HiCache's pools together out of such views.
_ASSEMBLERS = "srt/mem_cache/hybrid_cache/"

#: Accessors that look like readers and are not, each checked by hand: the caller stores new tokens through them.
_WRITE_TARGETS = frozenset({"get_swa_raw_buffer"})
#: Modules about other models' pools, whose attributes bear the same names.
_OTHER_MODELS = (
    *("srt/mem_cache/memory_pool.py", "srt/mem_cache/swa_memory_pool.py", "srt/mem_cache/unified_memory_pool.py"),
    *("srt/layers/attention/aiter_", "srt/layers/attention/dsa/"),
)
_PLATFORMS = {"NPU": re.compile(r"/hardware_backend/npu/"), "HIP": re.compile(r"[/_](hip|aiter)[/_.]")}
#: The unified layout exists on HIP only.
_HIP_ACCESSORS = frozenset({"get_unified_kv", "get_unified_kv_rope"})


class Access(StrEnum):
    GATED = "gated"
    UNGATED = "ungated read"
    WRITE = "write target"
    POINTER = "raw pointer"


class Consumer(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    where: str
    access: Access
    #: The one platform it runs on; empty: all.
    platform: str = ""
    #: Where it is called from.
    readers: tuple[str, ...] = ()


def consumers(sources: Sources) -> list[Consumer]:
    """The pool's accessors with their callers, then what goes past them."""
    found = accessors(sources)
    callers = _callers(sources, {each.name for each in found if each.access is not Access.POINTER})
    named = [msgspec.structs.replace(each, readers=tuple(callers.get(each.name, ()))) for each in found]
    return named + [each for path in sources for each in _direct(sources, path)]


def accessors(sources: Sources) -> list[Consumer]:
    pool = find(sources.tree(POOL), CLASS)
    if pool is None:
        return []
    return [
        Consumer(method.name, f"{POOL}:{method.lineno}", access, "HIP" if method.name in _HIP_ACCESSORS else "")
        for method in definitions(pool)
        if not _BUILDING.match(method.name) and (access := _classify(method)) is not None
    ]


def gate(method: Definition) -> int | None:
    """The line of the first unconditional call of the gate."""
    for statement in method.body:
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name))) if name == GATE:
                return statement.lineno
    return None


def _classify(method: Definition) -> Access | None:
    touched, gated = min((node.lineno for node in _accesses(method)), default=None), gate(method)
    if touched is None:
        return None
    if _WRITER.match(method.name) or method.name in _WRITE_TARGETS:
        return Access.WRITE
    if _POINTER.match(method.name):
        return Access.POINTER
    return Access.GATED if gated is not None and gated <= touched else Access.UNGATED


def _accesses(function: ast.AST) -> list[ast.expr]:
    """Expressions in it that are, or return, the bytes of an inner pool, named directly or by a local name."""
    local = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and last(node.value) in _INNER
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [node for node in ast.walk(function) if _is_access(node, _INNER | local)]


def _is_access(node: ast.AST, inner: frozenset[str]) -> TypeGuard[ast.expr]:
    match node:
        case ast.Subscript(value=ast.Attribute(attr=name), ctx=ast.Load()):
            return name in _STATES
        case ast.Attribute(value=owner, attr=name) if _BYTES.match(name) and not _GEOMETRY.match(name):
            return last(owner) in inner or name in _ANYWHERE
    return False


def _may_hold(sources: Sources, path: str, words: Iterable[str]) -> bool:
    """Whether the module is of the runtime (no kernel, test or benchmark) and of this model, and has one of `words`."""
    if not path.startswith("srt/") or path == POOL or path.startswith(_OTHER_MODELS):
        return False
    text = sources.text(path)
    return any(word in text for word in words)


def _direct(sources: Sources, path: str) -> Iterator[Consumer]:
    """Functions of another module that get at an inner pool's bytes; one that stores and reads counts as a reader."""
    if not _may_hold(sources, path, _INNER | _ANYWHERE):
        return
    for name, function in functions(sources.tree(path)):
        # A state pool comes from a gated accessor, or from one of _STATES, and those are looked for.
        found = [node for node in _accesses(function) if last(node) != "kv_score_buffer"]
        if found and not _BUILDING.match(function.name):
            where = ",".join(str(line) for line in sorted({node.lineno for node in found}))
            access = Access.POINTER if path.startswith(_ASSEMBLERS) else _direct_access(function, found)
            yield Consumer(name, f"{path}:{where}", access, _platform(path))


def _direct_access(function: Definition, found: list[ast.expr]) -> Access:
    if _POINTER.match(function.name):
        return Access.POINTER
    stores = _WRITER.match(function.name) or {id(node) for node in found} <= _stored(function)
    return Access.WRITE if stores else Access.UNGATED


def _stored(function: Definition) -> set[int]:
    """Ids of the expressions that go nowhere but into a kernel that stores new tokens (`..._store(...)`)."""
    into = [node for node in ast.walk(function) if isinstance(node, ast.Call) and "store" in called(node)]
    inside = {id(part) for call in into for part in ast.walk(call)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=local)], value=value):
                if all(id(use) in inside for use in names if use.id == local):
                    inside |= {id(part) for part in ast.walk(value)}
    return inside


def _platform(path: str) -> str:
    return next((platform for platform, place in _PLATFORMS.items() if place.search(path)), "")


def _callers(sources: Sources, accessors: set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    words = [f".{name}(" for name in accessors]
    for path in sources:
        if not _may_hold(sources, path, words):
            continue
        for node in ast.walk(sources.tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in accessors:
                found.setdefault(node.func.attr, []).append(f"{path}:{node.lineno}")
    return found
