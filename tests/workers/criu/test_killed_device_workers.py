"""Kills both device workers of a move at each of its stages.

The task goes on from its newest image, or begins again where it has none.  Nothing of before runs
any more, and no group, mount or folder is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.conftest import ROOT
from tests.workers.criu.criu_processes import words_of
from tests.workers.criu.killed_device import DEVICES
from tests.workers.criu.moving import END_S
from tests.workers.criu.test_kills import COUNTS, summed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

#: Stage -> how the task begins after it.
BEGINS = {"dump": "fresh", "upload": "fresh", "restore": "image", "thaw": "image"}
IN_TEST = "restore"


@pytest.mark.parametrize(
    "stage",
    [
        stage if stage == IN_TEST else pytest.param(stage, marks=pytest.mark.long)
        for stage in BEGINS
    ],
)
def test_killed_device_workers_leave_nothing_and_their_task_goes_on(tmp_path, criu, stage):
    tmp_path.chmod(0o711)
    (tmp_path / "store").mkdir()
    mounts, source = _mounts(), f"{COUNTS}# {tmp_path}\n"
    killed = _run(tmp_path, criu, source, stage)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    said = json.loads(killed.stdout.splitlines()[-1])
    assert said.get("has_processes", True)
    until_s = time.monotonic() + END_S
    while left := _of(tmp_path):
        assert time.monotonic() < until_s, [words_of(pid) for pid in left]
        time.sleep(0.05)
    assert _mounts() == mounts
    after = _run(tmp_path, criu, source, "after", json.dumps(said))
    assert after.returncode == 0, after.stderr[-2000:]
    went = json.loads(after.stdout.splitlines()[-1])
    assert went["resumed"] == BEGINS[stage]
    assert went["printed"] == ["begins", summed()][went["resumed"] == "image" :]
    assert not went["left"]
    assert not _of(tmp_path)
    assert _mounts() == mounts
    assert not _groups()


def _run(home: Path, criu: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tests.workers.criu.killed_device", str(home), str(criu)]
    with (home / "errors").open("w+") as errors:  # a pipe would be kept open by what is left
        done = subprocess.run(
            [*program, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
            timeout=4 * END_S, check=False,
        )  # fmt: skip
    done.stderr = (home / "errors").read_text()
    return done


def _of(home: Path) -> list[int]:
    """Return the processes that have the folder of this test among their words."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if str(home) in " ".join(words_of(pid))]


def _mounts() -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if _is_ours(line)]


def _is_ours(line: str) -> bool:
    return any(device in line for device in DEVICES)


def _groups() -> list[Path]:
    """Return the groups of these devices; those of other tests may go at any moment."""
    found = os.walk("/sys/fs/cgroup")
    return [Path(folder, name) for folder, names, _ in found for name in names if _is_ours(name)]
