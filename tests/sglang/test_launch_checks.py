"""What is wrong with an SGLang engine is said before it is started: one line that names what would be right."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsv4ctl.controlplane.config import installed
from dsv4ctl.controlplane.config.load import parse
from dsv4ctl.controlplane.config.problems import ConfigError
from dsv4ctl.controlplane.config.schema import EngineConfig
from dsv4ctl.engine_adapters import gpu
from dsv4ctl.engine_adapters.protocol import ENGINE_VARIABLE, AdapterError, LaunchRequest, LaunchSpec
from dsv4ctl.engine_adapters.sglang import environment, launch
from dsv4ctl.engine_adapters.sglang.arguments import declared
from sglang_fake import SITE, Trees


def _launch(engine: EngineConfig, integrity: str = "read") -> LaunchSpec:
    table = msgspec.to_builtins(engine)
    incarnations = tuple(f"i{rank}" for rank in range(engine.ranks))
    return launch.launch(LaunchRequest(table, 0, "i0", "g", "/link", (), integrity, "served", incarnations))


def _refusal(engine: EngineConfig) -> str:
    with pytest.raises(AdapterError) as caught:
        _launch(engine)
    text = str(caught.value)
    assert "\n" not in text
    return text


def _with(role: str = "prefill", *, ranks: int = 1, **sglang: Any) -> EngineConfig:
    trees = Trees()
    return trees.engine("one", role, ranks=ranks, sglang=trees.sglang(**sglang))


def test_the_command_line_says_what_the_file_says() -> None:
    config = _with(ranks=2, mem_fraction=0.5, extra_args=["--device", "cpu", "--skip-server-warmup"])
    spec = _launch(config)
    request = msgspec.json.decode(spec.env[ENGINE_VARIABLE], type=LaunchRequest)
    port, bootstrap = request.engine["port"], request.engine["bootstrap_port"]
    assert isinstance(port, int)
    assert isinstance(bootstrap, int)
    assert 0 not in (port, bootstrap)
    assert spec.argv == (
        sys.executable, "-m", "sglang.launch_server", "--model-path", "/models/tiny", "--served-model-name", "served",
        "--host", "127.0.0.1", "--port", str(port), "--tp-size", "2", "--mem-fraction-static", "0.5",
        "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl",
        "--disaggregation-bootstrap-port", str(bootstrap), "--enable-hierarchical-cache", "--hicache-ratio", "2.0",
        "--device", "cpu", "--skip-server-warmup",
    )  # fmt: skip
    assert request.incarnations == ("i0", "i1")
    assert spec.health == ("127.0.0.1", port, "/health")
    assert spec.tree


def test_a_decode_server_has_no_prefix_cache_and_no_bootstrap_server() -> None:
    argv = _launch(_with("decode")).argv
    assert "decode" in argv
    assert not {"--enable-hierarchical-cache", "--disaggregation-bootstrap-port"} & set(argv)
    assert not any(word.startswith("--disaggregation") for word in _launch(_with("single")).argv)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--max-runing-requests", "4"], "no argument --max-runing-requests; did you mean --max-running-requests?"),
        (["--zzz"], "no argument --zzz"),
        (["--hidden"], "no argument --hidden"),
        (["--renamed"], "no argument --renamed"),
    ],
)
def test_arguments_that_the_release_would_refuse(extra: list[str], said: str) -> None:
    text = _refusal(_with(extra_args=[*extra, "--device", "cpu"]))
    assert text.startswith("sglang.extra_args: ")
    assert said in text


def test_arguments_that_the_release_declares() -> None:
    names = declared(SITE / "sglang")
    assert {"--port", "--model", "--tensor-parallel-size", "--other-name", "--skip-server-warmup"} <= names
    assert not {"--hidden", "--renamed", "--plain"} & names
    _launch(_with(extra_args=["--device=cpu", "--page-size", "256", "--other-name"]))


def _environment(tmp_path: Path, *, without: str) -> Mapping[str, str]:
    """The fake environment with one thing taken out, and nothing else on the path."""
    site = tmp_path / "site"
    shutil.copytree(SITE, site)
    for found in site.glob(f"{without}*"):
        shutil.rmtree(found)
    return {"PYTHONPATH": str(site)}


def _lacks(tmp_path: Path, without: str, role: str = "prefill", **sglang: Any) -> str:
    return _refusal(_with(role, python=_bare(), env=dict(_environment(tmp_path, without=without)), **sglang))


def _bare() -> str:
    """An interpreter whose environment is not this one's: nothing of the project is installed there."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


def test_what_the_environment_lacks(tmp_path: Path) -> None:
    assert "SGLang is not installed in the environment of" in _lacks(tmp_path / "a", "sglang")
    assert "without its hooks" in _lacks(tmp_path / "b", "dsv4ctl")
    assert "NIXL is not installed" in _lacks(tmp_path / "c", "nixl")
    env = dict(_environment(tmp_path / "d", without="nixl"))
    assert _launch(_with("single", python=_bare(), env=env)).argv  # which transfers nothing


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    assert "cannot be run: No such file" in _refusal(_with(python="/no/such/python"))
    impostor = tmp_path / "python"
    impostor.write_text("#!/bin/sh\necho no python here >&2; exit 3\n")
    impostor.chmod(0o755)
    assert _refusal(_with(python=str(impostor))).endswith(
        "is no Python that can be asked what is installed: no python here"
    )
    old = environment.Installed((3, 9), "0.5.16", "/x", nixl=True, plugins=("dsv4ctl",))
    text = environment.missing(old, "/usr/bin/python3.9", transfers=True, gpu=False)
    assert text == "/usr/bin/python3.9 is Python 3.9; an engine needs 3.11 or newer"


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRIVER", ("/no/such/driver",))
    assert "no NVIDIA GPU here" in _refusal(_with(extra_args=[]))
    monkeypatch.setattr(gpu, "DRIVER", ("/no/such/driver", os.devnull))
    assert _launch(_with(extra_args=[])).argv


def test_releases_that_the_hooks_were_not_verified_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "VERIFIED", ("0.5.99",))
    assert "SGLang 0.5.16 is not verified (verified: 0.5.99)" in _refusal(_with())
    assert _launch(_with(allow_unverified=True)).argv
    text = _refusal(_with(ranks=2, allow_unverified=True))
    assert "--disable-overlap-schedule" in text


def test_pages_of_a_storage_backend_have_no_digest() -> None:
    extra = ["--device", "cpu", "--hicache-storage-backend", "file"]
    assert "have no digest" in _refusal(_with(extra_args=extra))
    assert "have no digest" in _refusal(_with(extra_args=["--device=cpu", "--hicache-storage-backend=file"]))
    with pytest.raises(AdapterError, match="has no argument --hicache-storage-backend"):  # of this small release
        _launch(_with(extra_args=extra), integrity="off")


ONE = "[[engines]]\nname = 'one'\nrole = 'single'\nadapter = 'sglang'\n"
PAIR = """
[[engines]]
name = "p"
role = "prefill"
adapter = "sglang"
sglang = {{ model = "m", index_k_dtype = "{prefill}" }}
[[engines]]
name = "d"
role = "decode"
adapter = "{adapter}"
sglang = {{ model = "m", index_k_dtype = "bf16", env = {{ KEY = {value} }}, mem_fraction = {share} }}
"""


def _problems(**changes: str) -> str:
    values = {"prefill": "bf16", "adapter": "sglang", "value": '"v"', "share": "0.5", **changes}
    try:
        parse(PAIR.format(**values), "f.toml", installed.facts())
    except ConfigError as error:
        return str(error)
    return ""


_FP4 = "--enable-deepseek-v4-fp4-indexer"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("survive = true", "survive: expected false: a server of SGLang ends with its control plane"),
        ("sglang.model = ''", 'sglang.model: expected a folder with a model, or its Hugging Face name, found ""'),
        ("sglang.python = ''", """sglang.python: expected the interpreter of SGLang's environment, found \"\""""),
        ("sglang.env = {'A=B' = 'c'}", "sglang.env: expected names of environment variables, found 'A=B'"),
        (
            f"sglang.index_k_dtype = 'bf16'\nsglang.extra_args = ['{_FP4}']",
            f"sglang.extra_args: {_FP4} and index_k_dtype bf16 exclude each other",
        ),
        (
            "sglang.extra_args = ['stray', '--device']",
            "sglang.extra_args[0]: 'stray' belongs to no argument: an argument begins with --",
        ),
        (
            "sglang.extra_args = ['--device', 'cpu', '--hicache-size', '30']",
            (
                "sglang.extra_args[2]: --hicache-size is refused for DeepSeek-V4, whose pools differ in size: "
                "set hicache.ratio"
            ),
        ),
        (
            "sglang.extra_args = ['--page-size=64']",
            "sglang.extra_args[0]: --page-size 64: DeepSeek-V4 has pages of 256 tokens",
        ),
        (
            "sglang.extra_args = ['--speculative-algorithm', 'EAGLE']",
            (
                "sglang.extra_args[0]: --speculative-algorithm is not guarded: a draft's pages are not restored with a "
                "prefix, and a captured verification reads with no gate"
            ),
        ),
        (
            "sglang.extra_args = ['--device', 'cpu', '--pp-size=2']",
            ("sglang.extra_args[2]: --pp-size is not guarded: the ranks of an engine are those of tensor parallelism"),
        ),
        ("sglang.extra_args = ['--port', '1']", "sglang.extra_args[0]: --port is said elsewhere: set port"),
        (
            "sglang.extra_args = ['--tensor-parallel-size=2']",
            "sglang.extra_args[0]: --tensor-parallel-size is said elsewhere: set ranks",
        ),
    ],
)
def test_what_no_machine_and_no_release_could_serve(lines: str, problem: str) -> None:
    model = "" if "sglang.model" in lines else "sglang.model = 'm'\n"
    with pytest.raises(ConfigError) as caught:
        parse(f"{ONE}{model}{lines}", "f.toml", installed.facts())
    assert str(caught.value) == f"f.toml: engines[0].{problem}"


def test_what_only_some_release_could_refuse_is_a_good_file() -> None:
    extra = f"sglang.extra_args = ['--device', 'cpu', '--page-size', '256', '{_FP4}', '--zzz']"
    parse(f"{ONE}sglang.model = 'm'\n{extra}", "f.toml", installed.facts())


def test_both_sides_must_agree() -> None:
    assert _problems() == ""
    assert _problems(prefill="fp8") == (
        'f.toml: engines[1].sglang.index_k_dtype: expected "fp8" as on p, found "bf16": pages of different sizes'
    )
    assert 'engines[1].adapter: expected "sglang" as on p, found "reference"' in _problems(adapter="reference")


def test_a_table_of_strings_holds_strings() -> None:
    assert _problems(value="3") == "f.toml: engines[1].sglang.env.KEY: expected a string, found 3"
    assert (
        _problems(share="1.5")
        == "f.toml: engines[1].sglang.mem_fraction: expected a number above 0 and below 1, found 1.5"
    )
