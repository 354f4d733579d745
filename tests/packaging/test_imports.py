"""What importing the control plane and the policies brings in."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DEVICE = ("torch", "triton", "sglang", "nixl", "nixl_cu12", "nixl_cu13")
PACKAGES = ("dsv4ctl.controlplane", "dsv4ctl.policies")

IMPORT_ALL = """
import importlib, json, pkgutil, sys
top = importlib.import_module(sys.argv[1])
found = [module.name for module in pkgutil.walk_packages(top.__path__, top.__name__ + ".", onerror=print)]
names = [top.__name__, *(name for name in found if not name.endswith("__main__"))]
for name in names:
    importlib.import_module(name)
print(json.dumps({"imported": names, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def import_all(cwd: Path, name: str, extra_path: Path | None = None) -> dict[str, list[str]]:
    """In a fresh process: every module of the package `name`, and the top-level modules loaded by that."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, name],
        cwd=cwd,
        env=os.environ | ({"PYTHONPATH": str(extra_path)} if extra_path else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_loads_device_code(package: str, root: Path, tmp_path: Path) -> None:
    answer = import_all(tmp_path, package)
    folder = root / package.partition(".")[2]
    modules = [path for path in folder.rglob("*.py") if path.name != "__main__.py"]
    assert len(answer["imported"]) == len(modules)
    assert not set(DEVICE) & set(answer["loaded"])


def test_device_code_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "guilty/inner").mkdir(parents=True)
    (tmp_path / "torch.py").touch()
    (tmp_path / "guilty/__init__.py").touch()
    (tmp_path / "guilty/inner/__init__.py").touch()
    (tmp_path / "guilty/inner/deep.py").write_text("import torch\n")
    answer = import_all(tmp_path, "guilty", extra_path=tmp_path)
    assert "guilty.inner.deep" in answer["imported"]
    assert "torch" in answer["loaded"]


@pytest.mark.parametrize("package", PACKAGES)
def test_only_base_requirements_are_imported(package: str, root: Path, project: dict[str, Any]) -> None:
    base = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    owners = packages_distributions()
    foreign = {
        f"{path.relative_to(root)}: {top}"
        for path in (root / package.partition(".")[2]).rglob("*.py")
        for top in imported(path)
        if top != "dsv4ctl" and top not in sys.stdlib_module_names
        if not base & {canonicalize_name(owner) for owner in owners.get(top, ())}
    }
    assert not foreign


def imported(path: Path) -> set[str]:
    """Top-level names of all import statements in a file, late ones too."""
    tops: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            tops.add(node.module.partition(".")[0])
    return tops
