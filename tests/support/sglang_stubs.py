"""Stands in for packages that SGLang imports and that its scheduler's bookkeeping never calls. Subprocesses only.

A module of `NAMES` that is not installed, imported by SGLang itself, becomes an empty one whose every attribute is
a class that accepts anything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import types
from typing import Any, ClassVar

NAMES = frozenset(
    (
        *("IPython", "PIL", "accelerate", "compressed_tensors", "cuda", "dill", "einops", "fastapi", "flash_attn"),
        *("gguf", "huggingface_hub", "llguidance", "orjson", "partial_json_parser", "prometheus_client", "pybase64"),
        *("requests", "safetensors", "sentencepiece", "setproctitle", "sgl_kernel", "torchcodec", "torchvision"),
        *("starlette", "tqdm", "transformers", "tvm_ffi", "uvicorn", "uvloop", "xgrammar", "yaml"),
    )
)


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name == "__class_validators__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __setitem__(cls, item: Any, value: Any) -> None:
        pass

    def __contains__(cls, item: Any) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def keys(cls) -> list[Any]:
        return []


def _schema(cls: type, *args: Any) -> Any:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _instance(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _class(name)()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A decorator, or with a text (a route) a maker of decorators."""
    if not args:
        return None
    return _instance("decorator") if isinstance(args[0], str) else args[0]


def _class(name: str) -> Any:
    return _Meta(
        name,
        (object,),
        {
            "__module__": "stub",
            "__init__": lambda self, *args, **kwargs: None,
            "__init_subclass__": classmethod(lambda cls, **kwargs: None),
            "__call__": _call,
            "__getattr__": lambda self, name: _instance(name),
            "__getitem__": lambda self, item: _instance("item"),
            "__iter__": lambda self: iter(()),
            "__len__": lambda self: 0,
            "__or__": lambda self, other: self,
            "__get_pydantic_core_schema__": classmethod(_schema),
        },
    )


class _Module(types.ModuleType):
    __version__ = "99.0"
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _class(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top, _, rest = fullname.partition(".")
        if top not in NAMES or (rest and not isinstance(sys.modules.get(top), _Module)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Call it first: what is installed is found before a stub is made."""
    sys.modules.setdefault("regex", re)
    sys.meta_path.append(_Finder())
