"""Whether hooks are really in the way of what they guard: a patched name is not yet a patched call.

SGLang's registry replaces one attribute, and module attributes that are the same object. What it does not reach:
an alias in a class body, a subclass with a method of its own, a hook that could not be applied at all.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


def problems(functions: Mapping[str, Any], modules: Mapping[str, ModuleType]) -> list[str]:
    """One sentence for each target whose calls do not all pass our function; `functions` are ours by target path."""
    return [problem for target, function in functions.items() for problem in _of(target, function, modules)]


def _of(target: str, function: Any, modules: Mapping[str, ModuleType]) -> Iterator[str]:
    path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        present = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        yield f"{target} is not there ({type(error).__name__})"
        return
    present = getattr(present, "__func__", present)
    if not _passes(present, function):
        yield f"{target} is not hooked"
        return
    beneath = _beneath(present)
    if isinstance(owner, type):
        yield from _in_classes(target, owner, name, beneath)
    else:
        yield from _in_modules(target, beneath, modules)


def _in_classes(target: str, owner: type, name: str, beneath: list[Any]) -> Iterator[str]:
    for alias, value in vars(owner).items():
        if _among(getattr(value, "__func__", value), beneath):
            yield f"{target} is also called {alias} in its class, unhooked"
    for subclass in _descendants(owner):
        if name in vars(subclass) and name != "__init__":  # an __init__ calls its base's
            yield f"{target} is overridden by {subclass.__module__}.{subclass.__qualname__}"


def _in_modules(target: str, beneath: list[Any], modules: Mapping[str, ModuleType]) -> Iterator[str]:
    for name, module in list(modules.items()):
        if name.startswith("sglang") and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if _among(value, beneath):
                    yield f"{target} is imported by {name} as {attribute}, unhooked"


def _among(value: Any, beneath: list[Any]) -> bool:
    return any(value is known for known in beneath)


def _descendants(owner: type) -> Iterator[type]:
    subclasses: list[type] = owner.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _descendants(subclass)


def _passes(present: Any, function: Any) -> bool:
    """Whether a wrapper in the chain of `__wrapped__` calls `function`."""
    while present is not None:
        cells = getattr(present, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in cells):
            return True
        present = getattr(present, "__wrapped__", None)
    return False


def _beneath(present: Any) -> list[Any]:
    """What the hook wraps, down to the bare function: a call of any of these passes the hook by."""
    chain = []
    while (present := getattr(present, "__wrapped__", None)) is not None:
        chain.append(present)
    return chain
