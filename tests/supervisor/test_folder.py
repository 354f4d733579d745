"""The control plane's own folder: what a killed one left goes with the next start, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.supervisor.folder import own_folder

#: A control plane that has its folder, and says where, until it is killed.
_OWNER = """
import sys, tempfile
from dsv4ctl.controlplane.config.schema import Config
from dsv4ctl.controlplane.supervisor.folder import own_folder
tempfile.tempdir = sys.argv[1]
with own_folder(Config(engines=[], socket=sys.argv[1] + "/admin.sock")) as folder:
    (folder / "engines.json").write_text("[]")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _config(tmp_path: Path) -> Config:
    return Config(engines=[], socket=str(tmp_path / "admin.sock"))


def test_what_a_killed_control_plane_left_is_removed_by_the_next_and_not_while_it_lives(temporary: Path) -> None:
    argv = [sys.executable, "-c", _OWNER, str(temporary)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            folder = Path(owner.stdout.readline().strip())
            with own_folder(_config(temporary)):
                assert (folder / "engines.json").exists()
        finally:
            owner.kill()
    assert folder.exists()
    with own_folder(_config(temporary)) as own:
        assert not folder.exists()
        with own_folder(_config(temporary)):
            assert own.exists()
    assert list(temporary.iterdir()) == []


def test_what_is_not_ours_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_folder(_config(temporary)) as folder:
        names = [path.name for path in folder.iterdir()]
    (temporary / "dsv4ctl-nobodys").mkdir()
    (temporary / "dsv4ctl-file").touch()
    elsewhere = temporary / "elsewhere"
    for path in (elsewhere, temporary / "dsv4ctl-left"):
        path.mkdir()
        for name in names:
            (path / name).touch()
    (temporary / "dsv4ctl-link").symlink_to(elsewhere)
    before = {path.name for path in temporary.iterdir()}
    uid = temporary.stat().st_uid
    with monkeypatch.context() as patched:
        patched.setattr("os.getuid", lambda: uid + 1)
        with own_folder(_config(temporary)):
            pass
    assert {path.name for path in temporary.iterdir()} == before
    with own_folder(_config(temporary)):
        pass
    assert {path.name for path in temporary.iterdir()} == before - {"dsv4ctl-left"}
    assert elsewhere.exists()
