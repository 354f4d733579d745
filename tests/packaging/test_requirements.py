"""Nothing built in Rust among the base requirements; every requirement has an exact version for CI."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

RUST_FILES = (".rs", "Cargo.toml", "Cargo.lock")
RUST_BUILDERS = ("maturin", "setuptools-rust", "setuptools_rust")
RUST_BYTES = (b"/rustc/", b"rust_begin_unwind", b"rust_panic", b"RUST_BACKTRACE")


def closure(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The distributions that `requirements` bring in here, with all they require, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(line) for line in requirements]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        distribution = found.setdefault(name, metadata.distribution(requirement.name))
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = map(Requirement, distribution.requires or ())
            queue += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def rust_marks(distribution: metadata.Distribution) -> list[str]:
    """Every sign that a distribution was built from Rust."""
    marks = [
        f"{file}: {mark}"
        for file in ("WHEEL", "METADATA", "pyproject.toml")
        for mark in (*RUST_BUILDERS, "Programming Language :: Rust")
        if mark in (distribution.read_text(file) or "")
    ]
    for file in distribution.files or ():
        if file.name.endswith(RUST_FILES):
            marks.append(str(file))
        elif ".so" in file.suffixes or file.suffix == ".pyd":
            content = Path(str(file.locate())).read_bytes()
            marks += [f"{file}: {mark.decode()}" for mark in RUST_BYTES if mark in content]
    return marks


def test_no_base_requirement_is_built_in_rust(project: dict[str, Any]) -> None:
    base = closure(project["dependencies"])
    assert {"aiohttp", "anyio", "idna", "multidict"} <= set(base)  # direct and indirect ones are seen
    assert {name: marks for name, found in base.items() if (marks := rust_marks(found))} == {}


@pytest.mark.parametrize("name", ["pydantic-core", "jiter"])
def test_rust_would_be_noticed(name: str) -> None:
    marks = rust_marks(metadata.distribution(name))
    assert any(mark.startswith("WHEEL: ") for mark in marks)
    assert any(mark.endswith(": /rustc/") for mark in marks)


def test_base_requirements_bring_no_device_code(project: dict[str, Any]) -> None:
    assert not {"torch", "triton", "sglang", "nixl", "nixl-cu12"} & set(closure(project["dependencies"]))


def test_ci_has_an_exact_version_of_everything(project: dict[str, Any], root: Path) -> None:
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["reference"], *extras["dev"]]
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    gpu_builds_only = ("cuda-", "nvidia-", "triton")  # torch brings these along where its build is for CUDA
    missing = {name for name in closure(wanted) if not name.startswith(gpu_builds_only)} - set(pins)
    assert not missing
    for requirement in map(Requirement, wanted):
        assert Version(pins[canonicalize_name(requirement.name)]) in requirement.specifier
