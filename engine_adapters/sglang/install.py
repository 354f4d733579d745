"""Registers the hooks of the installed release, and ends the process if anything about them is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import msgspec

from dsv4ctl.engine_adapters.protocol import LaunchRequest
from dsv4ctl.engine_adapters.sglang import verify
from dsv4ctl.engine_adapters.sglang.releases import VERIFIED, Hook, hooks_of, nearest

_HERE = "dsv4ctl.engine_adapters.sglang."
_ROOT = "sglang.srt."

#: Target path, kind of hook, our function.
Placed = tuple[str, str, Callable[..., Any]]


def install(encoded: str) -> None:
    """`encoded` is the LaunchRequest as JSON. Only a scheduler process is hooked: everything hooked lives there."""
    if not in_scheduler():
        return
    try:
        request = msgspec.json.decode(encoded, type=LaunchRequest)
    except msgspec.DecodeError as error:
        refuse(f"what the control plane passed to this engine can't be read: {error}")
    release = importlib.metadata.version("sglang")
    options = request.engine.get("sglang")
    table: dict[str, Any] = options if isinstance(options, dict) else {}
    if release not in VERIFIED and not table.get("allow_unverified"):
        refuse(
            f"sglang {release} is not among the verified releases ({', '.join(VERIFIED)}): "
            "install one of them, or set allow_unverified for this engine"
        )
    _load("rank").launched(request)
    placed = [*resolve(hook for hook in hooks_of(release) if request.engine["role"] in hook.roles)]
    if table.get("index_k_dtype") == "bf16":
        placed += _load("index_k.hooks").HOOKS[nearest(release)]
    verify_after_apply(register(placed))


def in_scheduler() -> bool:
    """A scheduler is a child whose entry function came with the scheduler's module."""
    return multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules


def resolve(hooks: Iterable[Hook]) -> Iterator[Placed]:
    """Full target paths and the functions themselves. An import that fails ends the process."""
    for hook in hooks:
        module, _, name = hook.function.partition(":")
        yield _ROOT + hook.target, hook.kind, getattr(_load(module), name)


def _load(module: str) -> Any:
    """Not imported above: an SGLang process that is no scheduler imports nothing of it."""
    try:
        return importlib.import_module(_HERE + module)
    except ImportError as error:
        refuse(f"{module} can't be loaded: {error}")


def register(placed: Iterable[Placed]) -> dict[str, Any]:
    """Registers with SGLang's registry. Returns our functions by target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    functions: dict[str, Any] = {}
    for target, kind, function in placed:
        functions[target] = function
        HookRegistry.register(target, function, HookType(kind))
    return functions


def verify_after_apply(functions: dict[str, Any]) -> None:
    """SGLang only logs a hook that it can't apply: look after it did, and end the process if one is missing."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry.apply_hooks

    def apply_and_verify(cls: type[Any]) -> None:
        apply()
        problems = verify.problems(functions, sys.modules)
        if problems:
            refuse(f"of {len(functions)} hooks some are not in place: {'; '.join(problems)}")

    HookRegistry.apply_hooks = classmethod(apply_and_verify)


def refuse(why: str) -> NoReturn:
    sys.stderr.write(f"dsv4ctl: this SGLang process ends, since it would serve unguarded: {why}\n")
    raise SystemExit(78)
