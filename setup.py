"""Package list only: pyproject.toml cannot say "every sub-package of controlplane/, prefixed dsv4ctl"."""

from setuptools import find_packages, setup

FOLDERS = ("controlplane", "engine_adapters", "kernels", "policies")

setup(
    package_dir={f"dsv4ctl.{folder}": folder for folder in FOLDERS},
    packages=[
        f"dsv4ctl.{package}"
        for folder in FOLDERS
        for package in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))
    ],
)
