"""Names to policies: the ones here, third-party ones by entry point, and clear refusals."""

from __future__ import annotations

import pytest

from dsv4ctl.policies import registry, routing
from dsv4ctl.policies.registry import KINDS, PolicyError, load, names


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A distribution on sys.path with one entry point; returns a function that writes it."""

    def install(group: str, name: str, value: str) -> None:
        info = tmp_path / "acme_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        (tmp_path / "acme_policies.py").write_text(
            "class First:\n    def choose(self, pairs):\n        return pairs[0]\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_policies_that_load(kind: str) -> None:
    assert names(kind)
    for name in names(kind):
        assert callable(load(kind, "sample:0.5" if name == "sample" else name))


def test_the_near_miss_is_named() -> None:
    with pytest.raises(PolicyError, match=r"unknown routing policy 'round-robbin': did you mean 'round-robin'\? "):
        load("routing", "round-robbin")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("emitt", "unknown integrity policy 'emitt': did you mean 'emit'"),
        ("sample", "'sample': expected a share .* found ''"),
        ("sample:2", "'sample': expected a share .* found '2'"),
        ("sample:nan", "'sample': expected a share .* found 'nan'"),
        ("read:1", "'read' takes no parameter, found 'read:1'"),
    ],
)
def test_a_parameter_that_is_missing_wrong_or_too_many_is_refused(name: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        load("integrity", name)


def test_unknown_kind() -> None:
    with pytest.raises(PolicyError, match="unknown kind of policy 'rooting': did you mean 'routing'"):
        load("rooting", "round-robin")


def test_third_party_by_entry_point(third_party) -> None:
    third_party("dsv4ctl.policies.routing", "first", "acme_policies:First")
    pair = routing.Pair("p", "d")
    assert load("routing", "first")().choose([pair]) is pair
    assert "first" in names("routing")


def test_third_party_cannot_replace_a_name(third_party) -> None:
    third_party("dsv4ctl.policies.routing", "round-robin", "acme_policies:First")
    with pytest.raises(PolicyError, match="more than once: entry points acme_policies:First"):
        load("routing", "round-robin")


def test_third_party_that_does_not_import(third_party) -> None:
    third_party("dsv4ctl.policies.routing", "gone", "acme_policies:Gone")
    with pytest.raises(PolicyError, match=r"'gone' \(acme_policies:Gone\) cannot be imported"):
        load("routing", "gone")


def test_kinds_are_modules_with_a_factory() -> None:
    for kind in KINDS:
        assert hasattr(getattr(registry, kind), "Factory")
