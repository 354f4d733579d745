"""What a client asks for, whatever the dialect, and the fields that both dialects share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv4ctl.engine_adapters.reference.http.errors import invalid
from dsv4ctl.engine_adapters.reference.http.fields import Body, integer, string

Role = Literal["single", "prefill", "decode"]

RID_LENGTH = 256
HOST_LENGTH = 253
LAST_PORT = 2**16 - 1
LAST_ROOM = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The fields by which a request finds its room and its peer; SGLang's names."""

    host: str | None
    port: int | None
    room: int | None


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how it is to be continued. `rid` is the client's own name for it, if it gave one."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    stream: bool
    rid: str | None
    bootstrap: Bootstrap
    include_usage: bool = False


def rid(body: Body) -> str | None:
    return string(body, "rid", RID_LENGTH)


def bootstrap(body: Body, role: Role) -> Bootstrap:
    """Raises AnswerError (400) for fields of a wrong form, or if this role needs one that is missing."""
    found = Bootstrap(
        host=string(body, "bootstrap_host", HOST_LENGTH),
        port=integer(body, "bootstrap_port", 1, LAST_PORT),
        room=integer(body, "bootstrap_room", 0, LAST_ROOM),
    )
    needed: dict[str, dict[str, object]] = {
        "single": {},
        "prefill": {"bootstrap_room": found.room},
        "decode": {
            "bootstrap_host": found.host,
            "bootstrap_port": found.port,
            "bootstrap_room": found.room,
        },
    }
    for name, value in needed[role].items():
        if value is None:
            raise invalid(f"{name} is missing: a {role} engine serves requests of a room (see the gateway)", name)
    return found
