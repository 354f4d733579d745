"""The configuration file of an experiment: pools too small for the workload, so that prefixes are really reloaded."""

from __future__ import annotations

from typing import NamedTuple

from dsv4ctl.controlplane.incident.rows import Deployment

#: Fewer sessions than this fit on the device, and nothing would be reloaded.
MIN_SESSIONS = 8
#: Pages that hold all there is of a session: its half of the group's prefix, and its own turns.
PAGES_A_SESSION = 12
#: Seconds that a request may wait for pages: more requests are in flight than fit, and that is no fault.
QUEUE_DEADLINE = 90
_ROLES = {"pd": ("prefill", "decode"), "single": ("single",)}


class Setting(NamedTuple):
    """What is made hard in a deployment. `fault`: what the reference engine stages on its last rank."""

    ranks: int = 1
    fault: str | None = None
    host_pages: int = PAGES_A_SESSION  #: a session
    device_pages: int | None = None  #: None: a few requests' worth
    decode_pages: int | None = None  #: None: as many
    h2d_gbps: float | None = None  #: of the paced link; None: as on a real deployment
    load_threshold: int = 1  #: pages; fewer are computed again
    off: tuple[str, ...] = ()  #: guards off from the start: ranks would part where one learns of it first


#: Room for one request of the second round: it finds no prefix of another group on the device, and loads its own.
_RANKS = Setting(ranks=2, fault="by-request", device_pages=4, h2d_gbps=0.1)
#: By the deployment's `setting`.
SETTINGS = {
    "": Setting(),
    "ranks-agreed": _RANKS,
    "ranks-alone": _RANKS._replace(off=("rank_agreement",)),
    "short-sidecar": Setting(fault="short-sidecar"),
    "storm": Setting(device_pages=384),
    "poison": Setting(device_pages=384, fault="poison"),
    "small-pool": Setting(host_pages=2, decode_pages=8),
    "slow-backup": Setting(fault="slow-backup", device_pages=16),
    "cramped": Setting(host_pages=4, device_pages=20, h2d_gbps=0.004, load_threshold=4),
}
#: Seconds after which ranks that do not meet are given up.
_COLLECTIVE_TIMEOUT = 2.0


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
off = {list(SETTINGS[deployment.setting].off)}
{engines}"""


def _engine(deployment: Deployment, role: str, sessions: int, model_seed: int) -> str:
    setting = SETTINGS[deployment.setting]
    few = setting.device_pages or device_pages(deployment, role, sessions)
    pages = setting.decode_pages or few if role == "decode" else few
    hicache = deployment.hicache and role != "decode"
    return f"""
[[engines]]
name = "{role}0"
role = "{role}"
ranks = {setting.ranks}

[engines.hicache]
enabled = {str(hicache).lower()}
pages = {setting.host_pages * sessions}
load_threshold_pages = {setting.load_threshold}
{"" if setting.h2d_gbps is None else f"h2d_gbps = {setting.h2d_gbps}"}

[engines.reference]
index_k_dtype = "{deployment.index_k}"
device_pages = {pages}
state_slots = {2 * pages}
seed = {model_seed}
collective_timeout = {_COLLECTIVE_TIMEOUT}
{"" if setting.fault is None else f'fault = "{setting.fault}"'}
"""
