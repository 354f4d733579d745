"""The configuration file of an experiment: pools too small for the workload, so that prefixes are really reloaded."""

from __future__ import annotations

from dsv4ctl.controlplane.incident.rows import Deployment

#: Fewer sessions than this fit on the device, and nothing would be reloaded.
MIN_SESSIONS = 8
#: Pages that hold all there is of a session: its half of the group's prefix, and its own turns.
PAGES_A_SESSION = 12
#: Seconds that a request may wait for pages: more requests are in flight than fit, and that is no fault.
QUEUE_DEADLINE = 90
_ROLES = {"pd": ("prefill", "decode"), "single": ("single",)}


def device_pages(deployment: Deployment, role: str, sessions: int) -> int:
    """Room for a few requests: prefixes are evicted between two rounds, and freed pages are soon another request's.

    Where HiCache is off, prefixes stay on the device instead.
    """
    few = min(48, 3 * sessions)
    return few if deployment.hicache or role == "decode" else PAGES_A_SESSION * sessions


def toml(deployment: Deployment, socket: str, sessions: int, model_seed: int) -> str:
    """The file that `dsv4ctl start` is given."""
    engines = "".join(_engine(deployment, role, sessions, model_seed) for role in _ROLES[deployment.topology])
    return f"""socket = "{socket}"

[gateway]
port = 0

[log]
level = "warning"
format = "json"

[deadlines]
allocated = {QUEUE_DEADLINE}
bootstrapping = {QUEUE_DEADLINE}

[unsafe]
runtime = true
{engines}"""


def _engine(deployment: Deployment, role: str, sessions: int, model_seed: int) -> str:
    pages = device_pages(deployment, role, sessions)
    hicache = deployment.hicache and role != "decode"
    return f"""
[[engines]]
name = "{role}0"
role = "{role}"

[engines.hicache]
enabled = {str(hicache).lower()}
pages = {PAGES_A_SESSION * sessions}

[engines.reference]
index_k_dtype = "{deployment.index_k}"
device_pages = {pages}
state_slots = {2 * pages}
seed = {model_seed}
"""
