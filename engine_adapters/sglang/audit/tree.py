"""Questions to a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find(tree: ast.AST, dotted: str) -> Definition | None:
    """`Class.method`, `function` or `Class.method.closure`; the last one where a name is bound twice."""
    name, _, rest = dotted.partition(".")
    found = next((each for each in reversed(list(definitions(tree))) if each.name == name), None)
    return find(found, rest) if found and rest else found


def definitions(scope: ast.AST) -> Iterator[Definition]:
    """What is defined in `scope` itself, also below an `if`, `try` or `with`."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from definitions(child)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function that is not itself inside a function, with its dotted name."""
    for found in definitions(tree):
        if isinstance(found, ast.ClassDef):
            yield from functions(found, f"{prefix}{found.name}.")
        else:
            yield prefix + found.name, found


def called(call: ast.Call) -> str:
    """The last name of what is called: `wait` in `a.b.wait(c)`."""
    return last(call.func)


def last(node: ast.AST) -> str:
    """The last name of an expression: `b` of `a.b`, `a.b[0]` and `a.b()`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return last(inner)
    return ""


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    return [found for found in ast.walk(node) if isinstance(found, ast.Call) and called(found) == name]


def names(node: ast.AST) -> set[str]:
    """Every name and attribute in it."""
    return {last(found) for found in ast.walk(node) if isinstance(found, ast.Name | ast.Attribute)}


def constants(node: ast.AST) -> set[object]:
    return {found.value for found in ast.walk(node) if isinstance(found, ast.Constant)}
