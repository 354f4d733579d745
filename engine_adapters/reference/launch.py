"""How a rank of the reference engine is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import msgspec

from dsv4ctl.engine_adapters.gpu import no_gpu
from dsv4ctl.engine_adapters.protocol import AdapterError, LaunchRequest, LaunchSpec, encode_request
from dsv4ctl.engine_adapters.reference.geometry import Geometry
from dsv4ctl.engine_adapters.reference.options import EngineOptions

#: What the engine imports, none of which the control plane needs; of NIXL's packages (by CUDA release) any.
_NEEDS = ("torch", "numpy")
NIXL = ("nixl_cu12", "nixl_cu13")


def processes(ranks: int) -> int:
    return ranks


def problems(engine: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """What the model cannot be."""
    options, model = msgspec.convert(engine, EngineOptions), Geometry()
    tokens = options.reference.context_tokens
    if tokens % model.page_tokens:
        yield "reference.context_tokens", f"expected a multiple of {model.page_tokens}, found {tokens}"
    if model.mlp % options.ranks:
        shares = [str(ranks) for ranks in range(1, model.mlp + 1) if model.mlp % ranks == 0]
        yield "ranks", f"expected one of {', '.join(shares)} (equal parts of the model), found {options.ranks}"
    if options.reference.device == "cuda" and options.hicache.h2d_gbps is not None:
        yield "hicache.h2d_gbps", 'expected none with reference.device = "cuda": it paces the copies on a CPU'


def least_deadlines() -> Mapping[str, float]:
    return {}


def launch(request: LaunchRequest) -> LaunchSpec:
    """Raises AdapterError if torch, numpy or NIXL is not installed, or there is no GPU and one is asked for."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if all(find_spec(name) is None for name in NIXL):
        missing.append(" or ".join(NIXL))
    if missing:
        raise AdapterError(f"the reference engine needs {', '.join(missing)}: pip install 'dsv4ctl[reference]'")
    if msgspec.convert(request.engine, EngineOptions).reference.device == "cuda" and (lacking := no_gpu()):
        raise AdapterError(f'{lacking}; reference.device = "cpu" runs anywhere')
    return LaunchSpec((sys.executable, "-m", "dsv4ctl.engine_adapters.reference"), encode_request(request))
