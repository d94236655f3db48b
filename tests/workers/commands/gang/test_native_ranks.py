"""Commands whose ranks use torch's own collectives: what torchrun would start, on real devices."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Started
from tests.workers.commands.gang.test_ranks import IMPORTS_S, RANKS, STEPS, parameters, train
from tests.workers.commands.test_runner import ended
from tests.workers.stock_gloo import output_of_ranks

pytestmark = pytest.mark.long

BUNDLE = Path(__file__).parents[2] / "bundle"
#: What a task with native collectives asks for, as its launch says it.
NATIVE = {"collectives": "native", "seats": [RANKS]}


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory):
    """The parameters of the same script where torchrun's variables start it, with stock gloo."""
    folder = tmp_path_factory.mktemp("gloo")
    script = [str(BUNDLE / "ddp.py"), "--steps", str(STEPS)]
    output_of_ranks(script, RANKS, folder, ROUNDHOUSE_RESTARTS="0", ROUNDHOUSE_METRICS=os.devnull)
    return (folder / "result.txt").read_text()


def test_ranks_are_paused_and_end_with_the_bits_of_gloo(rig, by_gloo):
    chance = random.Random(7)
    for epoch in range(1, 4):
        train(rig, epoch=epoch, **NATIVE)
        started = rig.event(Started, "t1", epoch)
        assert started.resumed == ("fresh" if epoch == 1 else "resident")
        rig.steps("t1", 8 * epoch, epoch)
        time.sleep(chance.uniform(0.0, 0.05))
        rig.pause("t1", epoch)
        rig.event(Paused, "t1", epoch)
    train(rig, epoch=4, **NATIVE)
    assert parameters(rig, epoch=4) == by_gloo


def test_program_finds_the_name_of_torchs_own_backend_and_begins_groups_again(rig):
    rig.launch("t1", ["python", "meets.py", "well"], world_size=RANKS, budget_us=10**9, **NATIVE)
    rig.event(Finished, "t1", timeout_s=IMPORTS_S)
    each = [f"gloo {rank} 6.0" for rank in range(RANKS)]
    assert sorted(line for line in ended(rig, "t1") if line) == sorted(each * 2)


LATE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    while not os.path.exists("go on"): pass
dist.all_reduce(torch.ones(4))
"""


def test_rank_that_does_not_come_is_named_until_it_comes(rig):
    rig.launch("t1", ["python", "-c", LATE], world_size=RANKS, budget_us=10**9, **NATIVE)
    behind = rig.until(lambda: rig.view("t1") and rig.view("t1").behind, timeout_s=IMPORTS_S)
    assert behind.startswith("Ranks 0 and 2 wait in all_reduce(float32[4])"), behind
    assert ", to which rank 1 has not come: rank 1 runs" in behind
    (rig.folder("t1") / "go on").touch()
    rig.event(Finished, "t1", timeout_s=IMPORTS_S)
    assert rig.views("t1")[-1].behind == ""


EARLY = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1: sys.exit(0)
dist.all_reduce(torch.ones(4))
"""


def test_rank_that_ends_early_is_named_where_gloo_ends_the_others(rig):
    rig.launch("t1", ["python", "-c", EARLY], world_size=2, **{**NATIVE, "seats": [2]})
    failed = rig.event(Failed, "t1", timeout_s=IMPORTS_S)
    assert failed.message == (
        "rank 0: It ended with exit status 1. Rank 0 waits in all_reduce(float32[4]), its call 3,"
        " to which rank 1 has not come: rank 1 has ended."
    )
