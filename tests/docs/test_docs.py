"""The documents are true: generated parts are fresh, links lead somewhere, and every command in them works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from deployment import DECODE, Deployment, deployed

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Commands that run elsewhere, and where.
ELSEWHERE = {
    "scripts/run --once": "test_run_once, below",
    "scripts/test": "it is what runs this test",
    "pip install 'dsv4ctl[reference]'": "scripts/venv.sh installs the checkout with this extra",
    "dsv4ctl start": "every deployment of the tests",
    "dsv4ctl incident --quick": "tests/incident",
    "dsv4ctl doctor": "tests/sglang/test_audit_command.py, like the next two",
    "dsv4ctl doctor --python /opt/engine/bin/python": "",
    "dsv4ctl doctor --wheel sglang-0.5.16-cp311-cp311-manylinux_2_34_x86_64.whl --json": "",
}


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    return [line for block in blocks(path, "sh") for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with deployed() as running:
        (running.folder / "cluster.toml").write_text(blocks(ROOT / "README.md", "toml")[0])
        yield running


def test_generated_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "docs.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_command_works(deployment: Deployment) -> None:
    """The README's last command ends the deployment, so its commands come last."""
    gateway = deployment.events("gateway.listening")[0]["url"]
    decode = next(event["url"] for event in deployment.events("engine.ready") if event["engine"] == DECODE)
    asked = [command for path in (*DOCUMENTS[1:], DOCUMENTS[0]) for command in commands(path)]
    assert len(asked) > len(ELSEWHERE)
    for command in asked:
        if command not in ELSEWHERE:
            here = command.replace("http://127.0.0.1:30000", gateway).replace("http://127.0.0.1:30001", decode)
            words = shlex.split(here)
            if words[0] == "dsv4ctl":
                words[:1] = [str(Path(sys.executable).with_name("dsv4ctl")), "--socket", str(deployment.socket)]
            done = subprocess.run(words, cwd=deployment.folder, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            assert done.stdout.strip(), f"{command} says nothing"
            assert '"error"' not in done.stdout or words[0] != "curl", f"{command}: {done.stdout}"
            if "resume" in words:
                anyio.run(_ready, deployment)
    assert deployment.process.wait(60) == 0


async def _ready(deployment: Deployment) -> None:
    async with deployment.client() as client:
        await client.until_ready()


@pytest.mark.skipif(
    not (Path(sys.prefix) / ".dsv4ctl-stamp").exists(), reason="not in an environment that the scripts made"
)
def test_run_once() -> None:
    environment = {**os.environ, "DSV4CTL_VENV": sys.prefix}
    done = subprocess.run(
        [ROOT / "scripts" / "run", "--once"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it worked" in done.stdout
    assert "FAIL" not in done.stdout
