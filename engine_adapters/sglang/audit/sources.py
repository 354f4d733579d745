"""The Python sources of an SGLang that is installed or was downloaded: read as text, never imported."""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

from dsv4ctl.engine_adapters.protocol import AdapterError
from dsv4ctl.engine_adapters.sglang import environment

ROOT = "sglang/"


class AuditError(Exception):
    """There is no SGLang to read there; the message says what was found instead."""


class Sources:
    """Modules by their path below the package, such as `srt/managers/scheduler.py`."""

    #: What its environment lacks to run as an engine: one line, or empty. Of a wheel it is not known.
    lacks = ""

    def __init__(self, release: str, origin: str, paths: Iterable[str], read: Callable[[str], str]) -> None:
        self.release = release
        self.origin = origin
        self._known = frozenset(paths)
        self._read = read
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def text(self, path: str) -> str:
        """Empty if the release has no such module."""
        if path not in self._texts:
            self._texts[path] = self._read(path) if path in self._known else ""
        return self._texts[path]

    def tree(self, path: str) -> ast.Module:
        """The module parsed once; empty if the release has no such module. Raises AuditError."""
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.text(path), path)
            except SyntaxError as error:
                version = ".".join(map(str, sys.version_info[:2]))
                raise AuditError(f"{path}:{error.lineno}: no Python {version} syntax: {error.msg}") from error
        return self._trees[path]


def wheel(path: Path) -> Sources:
    """Raises AuditError."""
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise AuditError(f"{path}: no such file") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise AuditError(f"{path}: not a wheel: {error}") from error
    names = archive.namelist()
    release = next((_release(archive.read(name).decode()) for name in names if _is_metadata(name)), None)
    modules = [name.removeprefix(ROOT) for name in names if name.startswith(ROOT) and name.endswith(".py")]
    if release is None or not any(map(_is_runtime, modules)):
        raise AuditError(f"{path}: not a wheel of sglang: no sglang/srt with a sglang-*.dist-info in it")
    return Sources(release, str(path), modules, lambda module: archive.read(ROOT + module).decode())


def folder(package: Path, release: str | None) -> Sources:
    """`package` is the folder `sglang` itself. Raises AuditError."""
    modules = [str(found.relative_to(package)) for found in package.rglob("*.py")]
    if not any(map(_is_runtime, modules)):
        raise AuditError(f"{package}: not a package sglang: no srt/ with modules in it")
    if release is None:
        raise AuditError(f"{package}: of no known release: its sglang-*.dist-info is missing")
    return Sources(release, str(package), modules, lambda module: (package / module).read_text())


def interpreter(python: Path) -> Sources:
    """What `python` (an interpreter, or a virtual environment's folder) would import as sglang. Raises AuditError."""
    executable = python / "bin" / "python" if python.is_dir() else python
    try:
        installed = environment.ask(str(executable), {})
    except AdapterError as error:
        raise AuditError(str(error)) from error
    if installed.folder is None:
        raise AuditError(f"{executable}: has no sglang installed; name a wheel with --wheel, or another --python")
    found = folder(installed.package, installed.sglang)
    found.lacks = environment.missing(installed, str(executable), transfers=True, gpu=False) or ""
    return found


def _is_runtime(module: str) -> bool:
    return module.startswith("srt/")


def _is_metadata(name: str) -> bool:
    return name.startswith("sglang-") and name.endswith(".dist-info/METADATA")


def _release(metadata: str) -> str:
    return str(HeaderParser().parsestr(metadata)["Version"])
