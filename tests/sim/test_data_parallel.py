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


def _digests(device: str, store: Path) -> list[str]:
    """Run both ranks; return the digest of each rank's parameters."""
    environment = {**os.environ, "SIM_DEVICES": "2", "SIM_MODE": "lazy"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sim.ddp_rank", str(rank), str(store), device],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_both_ranks_end_with_the_cpus_bits(tmp_path: Path) -> None:
    on_sim = _digests("sim", tmp_path / "sim")
    assert on_sim[0] == on_sim[1]
    assert on_sim == _digests("cpu", tmp_path / "cpu")
