"""The Slurm job starts device workers that drain when Slurm tells the batch script to stop.

`tests/deploy/slurm/srun` stands for Slurm's; real device workers take part in the last test.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.local.embedded_servers import temporary_home
from tests.acceptance.conftest import SETTLE_S, running_system
from tests.acceptance.history import overlaps, runs

ROOT = Path(__file__).parent.parent.parent
STUBS = Path(__file__).parent / "slurm"
SCRIPT = ROOT / "deploy" / "slurm" / "device_workers.sbatch"
NAME = "slurm-a"


def until(is_true):
    ends_s = time.monotonic() + SETTLE_S
    while not (found := is_true()):
        assert time.monotonic() < ends_s
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def batch(home, path, *words, env=None):
    """Run the batch script as Slurm does in an allocation of one node; kill it in the end."""
    its = {
        **{name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
        "PATH": f"{path}:{os.environ['PATH']}",
        "TMPDIR": str(home),
        "ROUNDHOUSE_HOME": str(home / "shared"),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": NAME,
        "SLURM_NTASKS": "1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        **(env or {}),
    }
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *words], env=its, start_new_session=True, preexec_fn=_take_interrupts
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _take_interrupts():
    """Undo what a shell does to its background jobs: bash cannot trap an ignored signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# --- the scripts, with a device worker that only takes notes --------------------------------------


@pytest.fixture
def home(tmp_path):
    key = tmp_path / "shared" / f"{NAME}-0" / "run" / "signing.key"
    key.parent.mkdir(parents=True)
    key.write_text("the key of the host")
    (tmp_path / "notes").mkdir()
    return tmp_path


@contextlib.contextmanager
def noted(home, *words, env=None):
    """Run the script; gives it and a function that returns what the node's worker noted."""

    def notes():
        file = home / "notes" / f"{NAME}-0"
        return file.read_text().splitlines() if file.exists() else []

    with batch(home, STUBS, *words, env={"NOTES": str(home / "notes"), **(env or {})}) as one:
        yield one, notes


def test_worker_of_a_node_serves_its_devices_with_the_key_on_the_disk_of_the_node(home):
    with noted(home, "2") as (process, notes):
        assert until(notes)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SETTLE_S) == 0
    own = home / f"roundhouse-{os.getuid()}" / f"{NAME}-0"
    assert notes() == [
        "args -A workers.device.worker worker --pool threads -c 2"
        f" -Q device.{NAME}-0,device.{NAME}-0.0,device.{NAME}-0.1 -n host.{NAME}-0@%h -l WARNING",
        f"home {own}",
        "key the key of the host",
        f"devices {NAME}-0.0=cpu,{NAME}-0.1=cpu ",
        "TERM",
    ]
    assert (own / "run" / "signing.key").stat().st_mode & 0o077 == 0


def test_worker_serves_all_gpus_that_the_step_has_on_the_node(home):
    gpus = {"SLURM_JOB_GPUS": "0,1,2,5", "SLURM_STEP_GPUS": "2,5", "CUDA_VISIBLE_DEVICES": "0,1"}
    with noted(home, env=gpus) as (process, notes):
        assert until(notes)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SETTLE_S) == 0
    assert f"devices {NAME}-0.0=cuda:2,{NAME}-0.1=cuda:5 " in notes()


def test_worker_that_ends_by_itself_is_started_again_until_the_end(home):
    (home / "notes" / "crash").touch()
    with noted(home) as (process, notes):
        assert until(lambda: sum("args" in line for line in notes()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SETTLE_S) == 0
    assert notes()[-1] == "TERM"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_drain_when_the_batch_script_is_interrupted_or_killed(home, number):
    with noted(home) as (process, notes):
        assert until(notes)
        process.send_signal(number)
        assert until(lambda: notes()[-1] == "TERM")
        process.wait(SETTLE_S)


def test_without_a_key_no_worker_is_started(home):
    (home / "shared" / f"{NAME}-0" / "run" / "signing.key").unlink()
    with noted(home) as (process, notes):
        process.wait(SETTLE_S)
    assert notes() == []


def test_folder_of_another_account_is_refused(home):
    if os.geteuid() != 0:
        pytest.skip("only root makes a folder of another account")
    (home / "roundhouse-0").mkdir()
    os.chown(home / "roundhouse-0", 12345, 12345)
    with noted(home) as (process, notes):
        assert process.wait(SETTLE_S) == 1
    assert notes() == []


def test_link_is_refused_though_it_leads_to_a_folder_of_our_own(home):
    """Whoever made the link could let it lead elsewhere later."""
    (home / "elsewhere").mkdir()
    (home / f"roundhouse-{os.getuid()}").symlink_to(home / "elsewhere")
    with noted(home) as (process, notes):
        assert process.wait(SETTLE_S) == 1
    assert notes() == []
    assert not any((home / "elsewhere").iterdir())


def test_page_and_script_agree_on_the_time_before_the_limit():
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text()
    [before_s] = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert int(before_s) > 60  # which a container has to drain
    assert f"--signal=B:TERM@{before_s}" in page


# --- a real device worker -------------------------------------------------------------------------

DEVICE = f"{NAME}-0.0"


@pytest.fixture(scope="module")
def system():
    with temporary_home() as home, running_system(home, devices=1, env={}) as system:
        yield system


@pytest.fixture
def joined(system, tmp_path):
    """Run the batch script with a real device worker that is up; gives the process."""
    enrolled = system.handle.enrol(DEVICE, tmp_path / "shared" / f"{NAME}-0", "local")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").symlink_to(STUBS / "srun")
    (bin_ / "celery").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m celery "$@"\n')
    (bin_ / "celery").chmod(0o755)
    env = {
        **enrolled,
        "REDIS_URL": system.handle.facts["redis_url"],
        "ROUNDHOUSE_STORE": str(Path(system.handle.facts["home"]) / "store"),
        "ROUNDHOUSE_SANDBOX": "preferred",
        "ROUNDHOUSE_MOUNT_ROOTS": str(system.shared),
    }
    with batch(tmp_path, bin_, env=env) as process:
        yield process


@pytest.mark.acceptance
@pytest.mark.long
def test_job_goes_on_elsewhere_without_a_lost_step_when_the_time_limit_comes(system, joined):
    admin, client = system.client("platform", "platform_admin"), system.client("alpha")
    undisturbed = client.wait(client.submit_job("train:Train", name="undisturbed"))["tasks"][0]
    until(lambda: any(one["id"] == DEVICE and one["up"] for one in admin.items("/v1/devices")))
    admin.post("/v1/devices/local.0/cordon")
    with system.gate() as gate:
        id = client.submit_job("train:Train", name="limit", params={"step_s": 0.2}, gate=gate)
        system.wait_running(client, id)
        assert client.request(id)["tasks"][0]["seat"] == DEVICE
        joined.send_signal(signal.SIGTERM)  # as Slurm does it before the time limit
        assert joined.wait(SETTLE_S) == 0
        [task] = client.request(id)["tasks"]
        assert (task["seat"], task["lost_steps"]) == (None, 0)
        kept = task["step"]
        assert kept > 0
        admin.post("/v1/devices/local.0/uncordon")
        client.wait_until(id, lambda it: it["tasks"][0]["seat"] == "local.0")
    [task] = client.wait(id)["tasks"]
    assert (task["state"], task["lost_steps"], task["attempts"]) == ("done", 0, 0)
    assert task["result"] == undisturbed["result"]
    assert overlaps(runs(client.log_text(task["id"]))) == []
    system.check_ledger()
