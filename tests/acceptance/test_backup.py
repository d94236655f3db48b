"""The drill of the guide: its own commands back up and restore the embedded Postgres."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.client import Client
from app.local.embedded_servers import CannotStart, temporary_home
from app.local.up import running
from tests.acceptance.conftest import STEADY, System

pytestmark = [pytest.mark.acceptance, pytest.mark.long]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "howto" / "backup_and_restore.md"
SAID = "import os; print(os.environ['TOKEN'][::-1])"


def commands() -> list[str]:
    """The blocks of the guide: back up, restore, start."""
    return re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL)[:3]


def follow(block: str, folder: Path, home: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "ROUNDHOUSE_HOME": str(home), "PATH": programs, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euc", block], cwd=folder, env=env, check=True)


def reversed_secret(client: Client) -> str:
    """What a task with the secret prints."""
    command = {"name": "t", "run": {"command": [sys.executable, "-c", SAID]}, "secrets": ["TOKEN"]}
    request = client.submit({"name": "says", "tasks": [command]})
    ended = client.wait(request["id"], timeout_s=300.0)
    assert ended["state"] == "done", ended
    lines = client.items(f"/v1/requests/{request['id']}/logs")
    return "".join(line["text"] for line in lines)


@contextlib.contextmanager
def _system(home: Path) -> Iterator[System]:
    with running(home, devices=1, env=STEADY) as handle, contextlib.closing(System(handle)) as it:
        yield it


def test_restored_service_has_secrets_and_bundles(tmp_path):
    back_up, restore, start = commands()
    with temporary_home() as home:
        with _system(home) as system:
            client = system.client("alpha")
            client.put("/v1/secrets/TOKEN", {"value": "drill-4711"})
            client.bundle  # noqa: B018 - uploads it
            before = reversed_secret(client)
            follow(back_up, tmp_path, home)
        with temporary_home() as other:
            shutil.copytree(tmp_path, other / "drill")
            (other / "drill").chmod(0o711)  # Postgres runs as nobody if we are root
            follow(restore, other / "drill", home)
            new = other / "drill" / "new-home"
            key = (new / "secrets.key").read_bytes()
            (new / "secrets.key").unlink()
            with pytest.raises(CannotStart, match="cannot be opened"), running(new, devices=1):
                pass
            assert not (new / "secrets.key").exists(), "no key is made over secrets"
            (new / "secrets.key").write_bytes(key)
            with _system(new) as system:
                client = system.client("alpha")
                checks = client.ready()["checks"]
                assert checks["secrets"]["ok"], checks
                assert checks["store"]["ok"], checks
                assert reversed_secret(client) == before
    assert "make up" in start
