"""The first half of strictness: keys, types and ranges, all problems of a file at once.

msgspec stops at the first error, so tables are walked here and each single value is given to msgspec.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from dsv4ctl.controlplane.config.problems import Problem, expected, unknown
from dsv4ctl.controlplane.config.schema import Section

_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", list: "an array"}


def shape_problems(table: Mapping[str, Any], section: type[Section], at: str = "") -> Iterator[Problem]:
    """Unknown and missing keys, wrong types and values out of range in `table` and the tables below it."""
    hints = get_type_hints(section, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        path = f"{at}.{key}" if at else key
        if key not in fields:
            yield Problem(path, unknown("key", key, fields))
        else:
            yield from _value_problems(value, hints[key], path)
    for name, field in fields.items():
        if field.required and name not in table:
            yield Problem(f"{at}.{name}" if at else name, f"is missing; expected {describe(hints[name])}")


def _value_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    if _is_section(kind):
        if isinstance(value, dict):
            yield from shape_problems(value, kind, path)
        else:
            yield Problem(path, expected("a table", value))
        return
    if get_origin(kind) is list:
        if not isinstance(value, list):
            yield Problem(path, expected(describe(kind), value))
            return
        for index, item in enumerate(value):
            yield from _value_problems(item, get_args(kind)[0], f"{path}[{index}]")
        return
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            yield Problem(path, expected(describe(kind), value))
            return
        for key, item in value.items():
            yield from _value_problems(item, get_args(kind)[1], f"{path}.{key}")
        return
    yield from _single_problems(value, kind, path)


def _single_problems(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    if get_origin(kind) is Literal and isinstance(value, str):
        if value not in get_args(kind):
            yield Problem(path, unknown("value", value, get_args(kind)))
        return
    if isinstance(value, str) and "\0" in value:  # no path, name or argument may hold one
        yield Problem(path, expected("a string without a zero character", value))
        return
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        yield Problem(path, expected(describe(kind), value))


def describe(kind: Any) -> str:
    """A type of the schema in words, with its bounds."""
    if _is_section(kind):
        return "a table"
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return "an array of tables" if _is_section(arguments[0]) else "an array of strings"
    if origin is dict:
        return "a table of strings"
    if origin is Literal:
        return "one of: " + ", ".join(arguments)
    if origin in (Union, types.UnionType):
        return describe(next(one for one in arguments if one is not types.NoneType))
    if origin is Annotated:
        return describe(arguments[0]) + _bounds(arguments[1])
    return _WORDS[kind]


def _bounds(meta: msgspec.Meta) -> str:
    low = f"above {meta.gt:g}" if meta.gt is not None else f"from {meta.ge}"
    if meta.le is not None:
        return f" {low} to {meta.le}"
    if meta.gt is not None and meta.lt is not None and meta.lt <= 1000:
        return f" {low} and below {meta.lt:g}"
    return f" {low}" if meta.gt is not None else f" of at least {meta.ge}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)
