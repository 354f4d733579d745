"""A configuration is taken whole or refused with file, key, what was expected and the nearest valid name."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dsv4ctl.controlplane.config import installed
from dsv4ctl.controlplane.config.load import check, load, parse
from dsv4ctl.controlplane.config.problems import ConfigError
from dsv4ctl.controlplane.config.schema import ReferenceConfig, embedded
from dsv4ctl.controlplane.config.semantics import Facts
from dsv4ctl.engine_adapters.reference.geometry import Geometry

PAIR = """
[[engines]]
name = "p0"
role = "prefill"
[[engines]]
name = "d0"
role = "decode"
"""
FACTS = installed.facts()._replace(memory_bytes=2**40)


def refused(text: str, facts: Facts = FACTS) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "cluster.toml", facts)
    return str(caught.value).splitlines()


def test_a_file_says_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(PAIR + "[engines.hicache]\npages = 64\n[deadlines]\ndrain = 12\n[log]\nlevel = 'debug'\n")
    config = load(path, FACTS)
    assert [engine.name for engine in config.engines] == ["p0", "d0"]
    assert config.engines[1].hicache.pages == 64
    assert (config.deadlines.drain, config.deadlines.ack) == (12.0, 5.0)
    assert config.log.level == "debug"


def test_the_embedded_default_passes_its_own_checks() -> None:
    check(embedded(), "(embedded)", FACTS)


SHAPE = [
    ("gatway.port = 1", 'gatway: unknown key "gatway". Did you mean gateway?'),
    ("gateway.prot = 1", 'gateway.prot: unknown key "prot". Did you mean port?'),
    ("gateway.port = '80'", 'gateway.port: expected an integer from 0 to 65535, found "80"'),
    ("gateway.port = 70000", "gateway.port: expected an integer from 0 to 65535, found 70000"),
    ("gateway.port = true", "gateway.port: expected an integer from 0 to 65535, found true"),
    ("gateway = 3", "gateway: expected a table, found 3"),
    ("deadlines.ack = 0", "deadlines.ack: expected a number above 0, found 0"),
    ("deadlines.ack = -1.5", "deadlines.ack: expected a number above 0, found -1.5"),
    ("deadlines.drain = inf", "deadlines.drain: expected a number above 0, found inf"),
    ("deadlines.drain = nan", "deadlines.drain: expected a number above 0, found nan"),
    ("deadlines.drain = false", "deadlines.drain: expected a number above 0, found false"),
    ("log.level = 'warn'", 'log.level: unknown value "warn". Did you mean warning?'),
    ("log.level = 3", "log.level: expected one of: debug, info, warning, error, found 3"),
    ("unsafe.runtime = 1", "unsafe.runtime: expected true or false, found 1"),
    ("unsafe.off = 'quiesce'", 'unsafe.off: expected an array of strings, found "quiesce"'),
    ("unsafe.off = [1]", "unsafe.off[0]: expected a string, found 1"),
    ("socket = 1", "socket: expected a string, found 1"),
    ('socket = "a\\u0000b"', "socket: expected a string without a zero character, found "),
]


@pytest.mark.parametrize(("line", "message"), SHAPE, ids=[line for line, _ in SHAPE])
def test_wrong_keys_types_and_ranges(line: str, message: str) -> None:
    (found,) = refused(f"{line}\n{PAIR}")
    assert found.startswith(f"cluster.toml: {message}")


def test_keys_of_engines_are_named_with_their_index() -> None:
    text = PAIR + "[engines.hicache]\npages = 0\npagse = 3\n[[engines]]\nrole = 'prefil'\nranks = 0\n"
    guess = "Did you mean {}? Expected one of: {}"
    assert refused(text) == [
        f"cluster.toml: {problem}"
        for problem in (
            "engines[1].hicache.pages: expected an integer of at least 1, found 0",
            'engines[1].hicache.pagse: unknown key "pagse". '
            + guess.format("pages", "enabled, h2d_gbps, load_threshold_pages, pages, ratio"),
            'engines[2].role: unknown value "prefil". ' + guess.format("prefill", "decode, prefill, single"),
            "engines[2].ranks: expected an integer of at least 1, found 0",
            "engines[2].name: is missing; expected a string",
        )
    ]


def test_a_file_without_engines() -> None:
    assert refused("") == ["cluster.toml: engines: is missing; expected an array of tables"]
    assert refused("engines = []") == ["cluster.toml: engines: expected at least one engine, found none"]
    assert refused("engines = 3") == ["cluster.toml: engines: expected an array of tables, found 3"]


SEMANTIC = [
    (
        "[[engines]]\nname='d0'\nrole='decode'",
        'engines[0].role: expected a prefill engine beside decode engine "d0", found none',
    ),
    (
        "[[engines]]\nname='p0'\nrole='prefill'",
        'engines[0].role: expected a decode engine beside prefill engine "p0", found none',
    ),
    (
        PAIR + "[[engines]]\nname='p0'\nrole='prefill'",
        'engines[2].name: expected a name of its own, found "p0", the name of engines[0]',
    ),
    (
        "[[engines]]\nname='P 0'\nrole='single'",
        'engines[0].name: expected lower-case letters, digits, `.`, `_` and `-`, found "P 0"',
    ),
    (
        PAIR + "port = 30000",
        "engines[1].port: expected a free port, found 30000, which is gateway.port's",
    ),
    (
        "gateway.host = '0.0.0.0'\n" + PAIR + "bootstrap_port = 30000\nhost = '10.0.0.1'",
        "engines[1].bootstrap_port: expected a free port, found 30000, which is gateway.port's",
    ),
    (
        PAIR + "port = 8000\nbootstrap_port = 8000",
        "engines[1].bootstrap_port: expected a free port, found 8000, which is engines[1].port's",
    ),
    (
        "policies.routing = 'round_robin'\n" + PAIR,
        'policies.routing: unknown routing policy "round_robin". Did you mean round-robin?',
    ),
    (
        "policies.integrity = 'emitt'\n" + PAIR,
        'policies.integrity: unknown integrity policy "emitt". Did you mean emit?',
    ),
    (
        "policies.integrity = 'sample'\n" + PAIR,
        (
            "policies.integrity: integrity policy 'sample': expected a share of the rooms above 0 and at most 1, "
            "as in sample:0.1, found ''"
        ),
    ),
    (
        "policies.integrity = 'sample:2'\n" + PAIR,
        (
            "policies.integrity: integrity policy 'sample': expected a share of the rooms above 0 and at most 1, "
            "as in sample:0.1, found '2'"
        ),
    ),
    (
        "policies.integrity = 'read:1'\n" + PAIR,
        "policies.integrity: integrity policy 'read' takes no parameter, found 'read:1'",
    ),
    (
        "unsafe.off = ['quiesce', 'indexer']\n" + PAIR,
        'unsafe.off[1]: unknown guard "indexer". Did you mean indexer_ticket?',
    ),
    (f"socket = '/{'s' * 107}'\n{PAIR}", "socket: expected a path of 1 to 107 bytes, found 108: /sss"),
    ("socket = ''\n" + PAIR, "socket: expected a path of 1 to 107 bytes, found 0"),
    (
        PAIR + "adapter = 'referense'",
        'engines[1].adapter: unknown adapter "referense". Did you mean reference?',
    ),
    (
        PAIR + "[engines.reference]\ncontext_tokens = 1000",
        "engines[1].reference.context_tokens: expected a multiple of 256, found 1000",
    ),
    (
        PAIR + "ranks = 3",
        "engines[1].ranks: expected one of 1, 2, 4, 8, 16, 32, 64, 128 (equal parts of the model), found 3",
    ),
    (
        PAIR + "hicache = { h2d_gbps = 1.0 }\nreference = { device = 'cuda' }",
        'engines[1].hicache.h2d_gbps: expected none with reference.device = "cuda"',
    ),
    ("gateway.host = 'a..b'\n" + PAIR, 'gateway.host: expected a host name or an address, found "a..b"'),
    (PAIR + "host = ''", 'engines[1].host: expected a host name or an address, found ""'),
    (PAIR + "host = 'http://10.0.0.1'", 'engines[1].host: expected a host name or an address, found "http://10.0.0.1"'),
]


@pytest.mark.parametrize(("text", "message"), SEMANTIC)
def test_values_that_cannot_work_together(text: str, message: str) -> None:
    (found,) = refused(text)
    assert found.startswith(f"cluster.toml: {message}")


@pytest.mark.parametrize(("name", "least"), [("wedge", 3), ("ack", 5)])
def test_a_scheduler_that_stands_is_given_the_time_to_say_so(name: str, least: int) -> None:
    sglang, short = PAIR + "adapter = 'sglang'", f"cluster.toml: deadlines.{name}: expected at least {least}.0 s with"
    assert any(line.startswith(short) for line in refused(f"deadlines.{name} = {least - 0.1}\n{sglang}"))
    assert not any(line.startswith(short) for line in refused(f"deadlines.{name} = {least}\n{sglang}"))
    parse(f"deadlines.{name} = 0.5\n{PAIR}", "cluster.toml", FACTS)


def test_ports_on_other_hosts_or_chosen_freely_do_not_overlap() -> None:
    parse(PAIR + "host = '10.0.0.1'\nport = 30000", "cluster.toml", FACTS)
    parse("gateway.port = 0\n" + PAIR, "cluster.toml", FACTS)
    assert refused("gateway.host = 'localhost'\n" + PAIR + "port = 30000")


@pytest.mark.parametrize("host", ["node-1.example.org", "_x", "10.0.0.1", "::", "fe80::1%br-lan.2", "::ffff:10.0.0.1"])
def test_hosts(host: str) -> None:
    parse(f"gateway.host = '{host}'\n{PAIR}host = '{host}'", "cluster.toml", FACTS)


def test_hicache_larger_than_memory() -> None:
    facts = FACTS._replace(memory_bytes=1_000_000, host_page_bytes=lambda engine: 1000)
    text = PAIR + "[engines.hicache]\npages = 1001"
    (found,) = refused(text, facts)
    assert found == (
        "cluster.toml: engines[1].hicache.pages: expected at most 1000 pages (1,000,000 bytes, "
        "this machine), found 1001 pages of 1,000 bytes on 1 rank(s): 1,001,000 bytes"
    )
    parse(PAIR + "[engines.hicache]\npages = 1000", "cluster.toml", facts)
    parse(PAIR + "[engines.hicache]\npages = 1001\nenabled = false", "cluster.toml", facts)
    (found,) = refused(PAIR + "ranks = 2\nmemory_bytes = 900_000\n[engines.hicache]\npages = 500", facts)
    assert "expected at most 450 pages (900,000 bytes, memory_bytes), found 500 pages" in found


def test_the_reference_engine_says_what_a_host_page_takes() -> None:
    engine = embedded().engines[0]
    bf16 = installed.host_page_bytes(engine)
    fp8 = installed.host_page_bytes(
        msgspec.structs.replace(engine, reference=msgspec.structs.replace(engine.reference, index_k_dtype="fp8"))
    )
    assert bf16 is not None
    assert fp8 is not None
    # Index-K pages of 64 keys in every layer of ratio 4: 256 bytes a key against 128 and a scale of 4.
    assert bf16 - fp8 == len(Geometry().layers_of_ratio(4)) * 64 * (256 - 132)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load(path, FACTS)
        return str(caught.value).removeprefix(f"{path}: ")

    assert refusal(tmp_path / "none.toml") == "cannot be read: No such file or directory"
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff'")
    assert refusal(tmp_path / "binary.toml").startswith("expected UTF-8 text: ")
    (tmp_path / "broken.toml").write_text("a = \n")
    assert refusal(tmp_path / "broken.toml").startswith("expected TOML: ")
    assert "line 1" in refusal(tmp_path / "broken.toml")


def test_an_engine_whose_packages_are_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = embedded().engines[0]
    monkeypatch.setattr("dsv4ctl.engine_adapters.reference.launch.find_spec", lambda name: None)
    assert "pip install 'dsv4ctl[reference]'" in (installed.missing(engine) or "")


@pytest.mark.parametrize("there", ["nixl_cu12", "nixl_cu13"])
def test_either_package_of_nixl_will_do(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch", "numpy", there}
    monkeypatch.setattr("dsv4ctl.engine_adapters.reference.launch.find_spec", lambda name: name in found or None)
    assert installed.missing(embedded().engines[0]) is None


def test_an_engine_on_a_gpu_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = embedded().engines[0]
    engine = msgspec.structs.replace(engine, reference=ReferenceConfig(device="cuda"))
    monkeypatch.setattr("dsv4ctl.engine_adapters.gpu.DRIVER", ("/no/such/driver",))
    assert "no NVIDIA GPU here" in (installed.missing(engine) or "")
    monkeypatch.setattr("dsv4ctl.engine_adapters.gpu.DRIVER", (os.devnull,))
    assert installed.missing(engine) is None
