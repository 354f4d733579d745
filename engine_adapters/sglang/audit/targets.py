"""What a dotted path names in a release: what a hook on it would be set on."""

from __future__ import annotations

import ast
from enum import StrEnum

from dsv4ctl.engine_adapters.sglang.audit.sources import Sources
from dsv4ctl.engine_adapters.sglang.audit.tree import find, last

_PACKAGE = "sglang."


class Kind(StrEnum):
    DEF = "def"
    CLASS = "class"
    #: `name = other` in a class body or a module: a hook on `other` does not reach it.
    ALIAS = "alias"
    #: Of a base class: a hook is set on the subclass alone.
    INHERITED = "inherited"
    #: Inside a function: only the function around it can be hooked.
    CLOSURE = "closure"
    MISSING = "missing"


def kind(sources: Sources, target: str) -> Kind:
    """`target` begins with `sglang.`; its longest prefix that is a module is taken for the module."""
    parts = target.removeprefix(_PACKAGE).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        path = "/".join(parts[:cut])
        for module in (f"{path}.py", f"{path}/__init__.py"):
            if sources.text(module):
                return _member(sources, module, sources.tree(module), parts[cut:])
    return Kind.MISSING


def _member(sources: Sources, module: str, scope: ast.AST, names: list[str]) -> Kind:
    name, *rest = names
    found = find(scope, name)
    if found is None:
        if not rest and _is_assigned(scope, name):
            return Kind.ALIAS
        if isinstance(scope, ast.ClassDef) and _inherits(sources, module, scope, names):
            return Kind.INHERITED
        return Kind.MISSING
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return Kind.CLOSURE
    if rest:
        return _member(sources, module, found, rest)
    return Kind.CLASS if isinstance(found, ast.ClassDef) else Kind.DEF


def _is_assigned(scope: ast.AST, name: str) -> bool:
    assigned = [node for node in ast.iter_child_nodes(scope) if isinstance(node, ast.Assign)]
    return any(isinstance(target, ast.Name) and target.id == name for node in assigned for target in node.targets)


def _inherits(sources: Sources, module: str, derived: ast.ClassDef, names: list[str]) -> bool:
    for base in derived.bases:
        where, name = _origin(sources, module, last(base))
        parent = find(sources.tree(where), name)
        if parent is not None and parent is not derived and _member(sources, where, parent, names) is not Kind.MISSING:
            return True
    return False


def _origin(sources: Sources, module: str, name: str) -> tuple[str, str]:
    """The module that `name` was imported from and what it is called there, or `module` itself."""
    for node in ast.walk(sources.tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = node.module.removeprefix(_PACKAGE).replace(".", "/")
            for each in node.names:
                if name == (each.asname or each.name):
                    return (f"{path}.py" if sources.text(f"{path}.py") else f"{path}/__init__.py"), each.name
    return module, name
