"""Packages that requests bring, through HTTP and the command line alone."""

from __future__ import annotations

import pytest

from app.settings import settings
from tests import command_line
from tests.wheels import add_wheel

pytestmark = pytest.mark.acceptance

SCRIPT = """
import os, sys, blocks, towers, torch
print(sys.prefix, towers.VERSION, blocks.VERSION, torch.__name__)
try:
    open(os.path.join(os.path.dirname(towers.__file__), "mine.py"), "w")
except OSError as error:
    print("write", type(error).__name__)
"""
TENANTS = ("alpha", "beta")
JOB = """
import towers

class Train:
    def __init__(self, ctx):
        self.version = towers.VERSION

    def step(self, ctx):
        ctx.finish({"version": self.version})
"""


@pytest.fixture
def cli(system, monkeypatch):
    """Run a verb as a member of a tenant; returns the exit status and what it prints."""
    for name in ("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(system.handle.wanted.home))
    settings.cache_clear()
    yield lambda tenant, *words: _run("--as", f"{tenant}:member", *words)
    settings.cache_clear()


def _run(*words):
    result = command_line.invoke(words)
    return result.exit_code, result.output


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "jobs.py").write_text(JOB)
    (folder / "requirements.txt").write_text("towers  # and what it needs\n")
    return folder


def listed(client):
    return client.get("/v1/environments")["items"]


def newest(client):
    return client.get("/v1/requests", limit=1)["items"][0]["id"]


def test_two_tenants_bring_the_same_packages_and_share_their_files(system, cli, code, wheels):
    environment = ("--environment", "requirements.txt")
    known = {one["id"] for tenant in TENANTS for one in listed(system.client(tenant))}
    for tenant in ("alpha", "beta"):
        status, told = cli(tenant, "submit", str(code / "train.py"), *environment)
        assert status == 0, told
        client = system.client(tenant)
        done = client.wait(newest(client))
        assert done["state"] == "done", done
        said = client.log_text(done["tasks"][0]["id"])
        assert said[0] == "/environment 1.0 1.0 torch"
        assert said[1] in ("write OSError", "write PermissionError")
    status, told = cli("alpha", "submit", str(code), "--job", "jobs:Train", *environment)
    assert status == 0, told
    client = system.client("alpha")
    done = client.wait(newest(client))
    assert done["tasks"][0]["result"] == {"version": "1.0"}

    shown = {
        tenant: [one for one in listed(system.client(tenant)) if one["id"] not in known]
        for tenant in TENANTS
    }
    locks = {one["lock_sha256"] for items in shown.values() for one in items}
    built = system.handle.wanted.home / "run" / "environments" / "built"
    assert len(locks) == 1
    assert locks <= {path.name for path in built.iterdir()}
    # of commands alone, and of a request with a job
    assert [len(items) for items in shown.values()] == [2, 1]
    assert shown["alpha"][0]["packages"] == [
        {"name": "blocks", "version": "1.0"},
        {"name": "towers", "version": "1.0"},
    ]
    assert system.until(lambda: client.get("/v1/environments")["items"][0]["hosts"])
    status, told = cli("alpha", "environment", "show", shown["alpha"][0]["id"])
    assert "towers==1.0" in told
    status, told = cli("alpha", "environment", "list")
    assert "requirements.txt" in told
    status, told = cli("alpha", "environment", "refresh", shown["alpha"][0]["id"])
    assert (status, told.split(":")[0]) == (0, "requirements.txt is stale")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("./mine", "requirements.txt, line 2: names a local path"),
        ("mine @ https://example.org/mine.whl", "requirements.txt, line 2: names an address"),
    ],
)
def test_hostile_requirement_is_refused_by_the_command_line(cli, code, line, told):
    (code / "requirements.txt").write_text(f"towers\n{line}\n")
    status, said = cli("alpha", "submit", str(code / "train.py"), "-e", "requirements.txt")
    assert status == 2
    assert told in " ".join(said.split())


def test_packages_that_do_not_fit_fail_before_a_device(system, cli, code, wheels):
    add_wheel(wheels, "picky", requires=["blocks>=2"])
    (code / "requirements.txt").write_text("picky\n")
    status, told = cli("beta", "submit", str(code / "train.py"), "-e", "requirements.txt")
    assert status == 0, told
    client = system.client("beta")
    failed = client.wait(newest(client))["tasks"][0]
    whole = client.get(f"/v1/tasks/{failed['id']}")
    assert (whole["state"], whole["cause"]) == ("failed", "environment")
    assert "picky" in whole["detail"]
    assert "blocks>=2" in whole["detail"]
    assert list(client.items(f"/v1/tasks/{failed['id']}/placements")) == []


def test_packages_that_cannot_be_installed_fail_before_a_device(system, cli, code, wheels):
    """The lock is there already; meanwhile the wheel is another one."""
    add_wheel(wheels, "shaky")
    (code / "requirements.txt").write_text("towers\nshaky\n")
    submit = ("submit", str(code / "train.py"), "-e", "requirements.txt")
    client = system.client("beta")
    assert cli("beta", *submit)[0] == 0
    assert client.wait(newest(client))["state"] == "done"
    lock = client.get("/v1/environments", limit=1)["items"][0]["lock_sha256"]

    add_wheel(wheels, "shaky", files={"shaky.py": "VERSION = 'of somebody else'\n"})
    built = system.handle.wanted.home / "run" / "environments" / "built"
    (built / lock).rename(built.parent / "work" / "gone-of-a-test")
    assert system.until(lambda: not client.get("/v1/environments", limit=1)["items"][0]["hosts"])
    assert cli("beta", *submit)[0] == 0
    failed = client.wait(newest(client))["tasks"][0]
    whole = client.get(f"/v1/tasks/{failed['id']}")
    assert (whole["state"], whole["cause"]) == ("failed", "environment")
    assert whole["message"] == "Its packages could not be installed on local."
    assert "Hash mismatch" in whole["detail"]
    assert list(client.items(f"/v1/tasks/{failed['id']}/placements")) == []
