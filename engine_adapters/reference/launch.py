"""How a rank of the reference engine is started."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from dsv4ctl.engine_adapters.protocol import AdapterError, LaunchRequest, LaunchSpec, encode_request

#: What the engine imports, none of which the control plane needs.
_NEEDS = ("torch", "numpy", "nixl_cu12")


def processes(ranks: int) -> int:
    return ranks


def launch(request: LaunchRequest) -> LaunchSpec:
    """Raises AdapterError if torch, numpy or NIXL is not installed."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise AdapterError(f"the reference engine needs {', '.join(missing)}: pip install 'dsv4ctl[reference]'")
    return LaunchSpec((sys.executable, "-m", "dsv4ctl.engine_adapters.reference"), encode_request(request))
