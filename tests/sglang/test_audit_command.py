"""`dsv4ctl doctor`: what it prints, its exit codes, and what it says when there is no SGLang."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsv4ctl.controlplane.cli.main import cli
from dsv4ctl.engine_adapters.sglang.audit.questions import FACTS
from sglang_wheels import wheel


def doctor(*words: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *words], prog_name="dsv4ctl")


def installed(folder: Path, release: str = "9.9.9") -> None:
    """A package that cannot be imported, with nothing in it that the audit knows."""
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "sglang" / "srt" / "environ.py").write_text("\n")
    (folder / f"sglang-{release}.dist-info").mkdir()
    (folder / f"sglang-{release}.dist-info" / "METADATA").write_text(f"Name: sglang\nVersion: {release}\n")


def test_a_verified_release_as_a_table() -> None:
    result = doctor("--wheel", str(wheel("0.5.16")))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("SGLang 0.5.16 (verified): ")
    assert all(any(fact.question in line for line in lines) for fact in FACTS)
    hole = "NIXL reads pages that HiCache is still loading"
    assert any(hole in line and line.endswith("closed by load_back, transfer_worker") for line in lines)
    assert any("--hicache-ratio" in line for line in lines)


def test_an_installed_one_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = doctor("--python", sys.executable, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["release"], report["verified"], report["consumers"]) == ("9.9.9", False, [])
    assert report["answers"]["early_send"] == ["-", ""]
    assert report["answers"].keys() == {fact.key for fact in FACTS}
    assert {
        "key": "index_k_gated",
        "what": "nothing is known about who reads index keys",
        "where": "",
    }.items() <= report["holes"][0].items()
    assert {hook["kind"] for hook in report["hooks"]} == {"missing"}


def test_an_installed_one_is_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = doctor("--python", sys.executable)
    assert result.exit_code == 1
    assert result.stdout.startswith(f"SGLang 9.9.9 (not verified): {tmp_path / 'sglang'}\n")
    assert "nothing is known about who reads index keys" in result.stdout


def test_a_virtual_environment_is_as_good_as_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert doctor("--python", str(tmp_path)).stdout.startswith("SGLang 9.9.9 (not verified): ")


def test_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "text.whl").write_text("text")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    complaints = {
        ("--wheel", f"{tmp_path}/no.whl"): "no.whl: no such file",
        ("--wheel", f"{tmp_path}/text.whl"): "text.whl: not a wheel: File is not a zip file",
        (
            "--wheel",
            f"{tmp_path}/other.whl",
        ): "other.whl: not a wheel of sglang: no sglang/srt with a sglang-*.dist-info",
        ("--python", f"{tmp_path}/python"): "python' cannot be run: No such file or directory",
        ("--python", f"{tmp_path}/text.whl"): "text.whl' cannot be run: Permission denied",
        ("--python", sys.executable): "has no sglang installed; name a wheel with --wheel, or another --python",
        ("--python", "python", "--wheel", "x"): "--wheel and --python exclude each other",
    }
    for words, complaint in complaints.items():
        result = doctor(*words)
        assert result.exit_code == 2, words
        (line,) = result.stderr.splitlines()
        assert complaint in line


def test_an_installed_one_of_unknown_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "environ.py").write_text("\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = doctor("--python", sys.executable)
    assert result.exit_code == 2
    assert "of no known release" in result.stderr
