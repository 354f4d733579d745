"""Folders and the names they are installed under."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

FOLDERS = ("controlplane", "engine_adapters", "kernels", "policies")


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_installed_under_the_project_s_name(folder: str, root: Path) -> None:
    package = import_module(f"dsv4ctl.{folder}")
    assert Path(str(package.__file__)).parent == root / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_sub_folder_is_a_package(folder: str, root: Path) -> None:
    bare = {path.parent for path in (root / folder).rglob("*.py") if not (path.parent / "__init__.py").exists()}
    assert not bare, "setuptools leaves these out of a wheel"


@pytest.mark.parametrize("folder", FOLDERS)
def test_packages_run_no_code_of_their_own(folder: str, root: Path) -> None:
    for path in (root / folder).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        docstring = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        assert body == docstring, f"{path.relative_to(root)}: only a docstring expected"
