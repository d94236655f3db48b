"""Trains with DistributedDataParallel on two simulated accelerators: both ranks have CPU's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim

ROOT = Path(__file__).parent.parent.parent


def test_both_ranks_end_with_the_cpus_bits(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.sim.ddp_ranks", str(tmp_path)],
        env={**os.environ, "SIM_DEVICES": "2", "SIM_MODE": "lazy"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
    ).stdout
    digests = json.loads(said.splitlines()[-1])
    assert digests["sim"][0] == digests["sim"][1]
    assert digests["sim"] == digests["cpu"]
