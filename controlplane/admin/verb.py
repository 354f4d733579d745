"""What a verb is: one definition from which the API route, the OpenAPI operation and the command are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dsv4ctl.controlplane.admin.plane import Plane


class Arguments(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every verb's arguments. Fields are `Annotated` with `argument(...)`."""


class Nothing(Arguments):
    """No arguments."""


Args = TypeVar("Args", bound=Arguments)


JSON = "application/json"
LINES = "application/x-ndjson"  #: one JSON object a line, as they come
METRICS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Verb(Generic[Args]):
    """`answer` gives what is encoded as `content_type`: JSON, an async iterator of JSON objects, or text."""

    name: str
    method: Literal["GET", "POST"]
    paths: tuple[str, ...]  #: the last may hold an argument: `/rooms/{room}`
    help: str
    example: str
    args: type[Args]
    answer: Callable[[Plane, Args], Awaitable[Any]]
    #: The answer (for an iterator: one object of it) as text for people.
    render: Callable[[Any], str]
    content_type: str = JSON
    #: The command's exit code for an answer.
    exit_code: Callable[[Any], int] = lambda answer: 0
    #: Seconds the command waits for its answer; None: it may take as long as the call itself says.
    timeout: float | None = 10.0

    @property
    def reads(self) -> bool:
        return self.method == "GET"


class Field(NamedTuple):
    """One argument of a verb."""

    name: str
    kind: Any  #: int, float, str, bool or list[str]
    help: str
    #: How the command takes it: `--option`, or `WORD` for a positional one; None: not at all.
    command: str | None
    default: Any


def argument(text: str, command: str | None, **bounds: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, extra={"command": command}, **bounds)


def fields(args: type[Arguments]) -> Iterator[Field]:
    """The arguments of a verb, in order."""
    hints = get_type_hints(args, include_extras=True)
    for field in msgspec.structs.fields(args):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            raise TypeError(f"{args.__name__}.{field.name} needs Annotated[..., argument(...)]")
        kind, meta = get_args(hint)[:2]
        if get_origin(kind) is not list:
            kind = next((one for one in get_args(kind) if one is not type(None)), kind)
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield Field(field.name, kind, meta.description or "", (meta.extra or {})["command"], default)
