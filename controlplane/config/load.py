"""One TOML file into a `Config`, or a `ConfigError` that names everything wrong with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from dsv4ctl.controlplane.config.problems import ConfigError, Problem
from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.config.semantics import Facts, semantic_problems
from dsv4ctl.controlplane.config.shape import shape_problems


def load(path: Path, facts: Facts) -> Config:
    """Reads and checks `path`. Raises ConfigError."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(str(path), [Problem("", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("", f"expected UTF-8 text: {error}")]) from error
    return parse(text, str(path), facts)


def parse(text: str, file: str, facts: Facts) -> Config:
    """`file` is only named in errors. Raises ConfigError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(file, [Problem("", f"expected TOML: {error}")]) from error
    problems = list(shape_problems(table, Config))
    if problems:
        raise ConfigError(file, problems)
    config = msgspec.convert(table, Config, strict=True)
    check(config, file, facts)
    return config


def check(config: Config, file: str, facts: Facts) -> None:
    """Raises ConfigError for values that cannot work together."""
    problems = list(semantic_problems(config, facts))
    if problems:
        raise ConfigError(file, problems)
