"""The command line of an SGLang server, checked against the arguments that the installed release itself declares.

The release's source is read, never imported: an import would load torch. A release declares an argument as a field
of a class, annotated `A[type, ...]` (0.5.15 and later), or as a call of `add_argument` (all releases).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from dsv4ctl.engine_adapters.sglang.table import EngineTable, arguments

_SOURCES = ("srt/server_args.py", "srt/arg_groups/fields/*.py")


class ArgumentError(ValueError):
    """An argument that the release would refuse; the message says what would be right."""


def command_line(engine: EngineTable, model: str) -> tuple[str, ...]:
    """Arguments of `sglang.launch_server`; `model` is the name that clients use."""
    table = engine.sglang
    line = [
        "--model-path",
        table.model,
        "--served-model-name",
        model,
        "--host",
        engine.host,
        "--port",
        str(engine.port),
    ]
    line += ["--tp-size", str(engine.ranks)]
    if table.mem_fraction is not None:
        line += ["--mem-fraction-static", str(table.mem_fraction)]
    if table.max_total_tokens is not None:
        line += ["--max-total-tokens", str(table.max_total_tokens)]
    if engine.role != "single":
        line += ["--disaggregation-mode", engine.role, "--disaggregation-transfer-backend", "nixl"]
    if engine.role == "prefill":
        line += ["--disaggregation-bootstrap-port", str(engine.bootstrap_port)]
    if engine.role != "decode" and engine.hicache.enabled:  # a decode server keeps no prefix cache
        line += ["--enable-hierarchical-cache", "--hicache-ratio", str(engine.hicache.ratio)]
    return (*line, *table.extra_args)


def check(extra: Sequence[str], known: Iterable[str], release: str) -> None:
    """Raises ArgumentError for the first of `extra` that the release does not have."""
    names = set(known)
    for _, name, _ in arguments(extra):
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"SGLang {release} has no argument {name}{hint}")


def declared(package: Path) -> frozenset[str]:
    """Every argument that the release in `package` (the folder `sglang`) declares. Raises OSError, SyntaxError."""
    found: set[str] = set()
    for pattern in _SOURCES:
        for source in sorted(package.glob(pattern)):
            tree = ast.parse(source.read_text(), str(source))
            for node in ast.walk(tree):
                if isinstance(node, ast.AnnAssign):
                    found.update(_of_field(node))
                elif isinstance(node, ast.Call) and _name_of(node.func) == "add_argument":
                    found.update(_strings(node.args))
    return frozenset(name for name in found if name.startswith("--"))


def _of_field(node: ast.AnnAssign) -> Iterator[str]:
    """The names of a field annotated `A[type, "help"]` or `A[type, Arg(cli_name=..., aliases=[...])]`."""
    kind = node.annotation
    if not (isinstance(kind, ast.Subscript) and _name_of(kind.value) in ("A", "Annotated")):
        return
    given: Mapping[str | None, ast.expr] = {}
    if isinstance(kind.slice, ast.Tuple):
        for part in kind.slice.elts[1:]:
            if isinstance(part, ast.Call):
                given = {keyword.arg: keyword.value for keyword in part.keywords}
    if "no_cli" in given:
        return
    yield from (
        _strings([given["cli_name"]]) if "cli_name" in given else (f"--{_name_of(node.target).replace('_', '-')}",)
    )
    if isinstance(aliases := given.get("aliases"), ast.List):
        yield from _strings(aliases.elts)


def _strings(nodes: Iterable[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _name_of(node: ast.expr) -> str:
    """`x` of `x` and of `a.x`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
