"""One table of defaults: complete, with reasons, and what the configuration really uses."""

from __future__ import annotations

import msgspec
import pytest

from dsv4ctl.controlplane.config import schema
from dsv4ctl.policies.defaults import DEFAULTS, count, name, seconds
from dsv4ctl.policies.registry import load

SECTIONS = {
    "deadlines": schema.DeadlinesConfig,
    "limits": schema.LimitsConfig,
    "policies": schema.PoliciesConfig,
    "evidence": schema.EvidenceConfig,
    "engines": schema.EngineConfig,
    "hicache": schema.HiCacheConfig,
    "reference": schema.ReferenceConfig,
    "sglang": schema.SglangConfig,
    "gateway": schema.GatewayConfig,
    "log": schema.LogConfig,
}


def configured() -> dict[str, object]:
    """Numbers and names; switches, and what is absent or empty, say themselves what they are."""
    return {
        f"{section}.{field.encode_name}": field.default
        for section, struct in SECTIONS.items()
        for field in msgspec.structs.fields(struct)
        if type(field.default) in (int, float, str) and field.default != ""
    }


def test_the_table_and_the_configuration_agree() -> None:
    table = {key: row.value for key, row in DEFAULTS.items() if key.split(".")[0] in SECTIONS}
    assert table == configured()


def test_every_row_says_unit_and_reason() -> None:
    for row in DEFAULTS.values():
        assert row.unit
        assert row.reason
        assert "\n" not in row.reason


def test_every_default_policy_exists() -> None:
    for key in DEFAULTS:
        section, _, kind = key.partition(".")
        if section == "policies":
            load(kind, name(key))


def test_values_come_out_in_the_unit_asked_for() -> None:
    assert seconds("deadlines.ack") == 5.0
    assert count("restart.tries") == 5
    with pytest.raises(TypeError, match=r"limits\.max_rooms is in rooms, not in seconds"):
        seconds("limits.max_rooms")
    with pytest.raises(TypeError, match="not a whole number"):
        count("policies.routing")
    with pytest.raises(TypeError, match="not a name"):
        name("limits.max_rooms")
