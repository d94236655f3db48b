"""Jobs whose ranks use torch's own collectives, each on a device of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started
from tests.thoroughness import rest_long
from tests.workers.conftest import DeviceRig
from tests.workers.stock_gloo import output_of_ranks

BUNDLE = Path(__file__).parents[1] / "bundle"
RANKS, STEPS = 3, 40
NATIVE = {"collectives": "native", "seats": [RANKS], "world_size": RANKS}


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the same class gives in processes that torchrun would start, with stock gloo."""
    folder = tmp_path_factory.mktemp("gloo")
    *_, said = output_of_ranks([str(BUNDLE / "ranks.py"), str(STEPS)], RANKS, folder)
    found: dict[str, Any] = json.loads(said)
    return found


def train(rig: DeviceRig, epoch: int = 1, *, waits: bool = True, **more: Any) -> None:
    params = {"steps": STEPS, "pace": 0.02 if waits else 0.0, "waits": waits}
    rig.launch("t1", "ranks:Tells", epoch, params=params, **{**NATIVE, **more})


def test_job_computes_by_torchs_own_group_with_its_bits(rig, by_gloo):
    train(rig, waits=False)
    assert rig.event(Finished, "t1").result == by_gloo
    told = [line for line in rig.printed("t1") if line.startswith("rank ")]
    assert sorted(told) == [f"rank {rank} by gloo of NativeGroup" for rank in range(RANKS)]


@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_job_is_paused_saved_and_moved_with_the_same_bits(rig, by_gloo, seed):
    """In its processes, and in new ones that have other groups."""
    chance = random.Random(seed)
    images: list[Any] = []
    for epoch in range(1, 4):
        train(rig, epoch, images=images)
        started = rig.event(Started, "t1", epoch)
        assert started.resumed == ("fresh", "resident", "image")[epoch - 1]
        rig.steps("t1", started.step + chance.randrange(1, 4), epoch)
        rig.save("t1", epoch)
        rig.event(Saved, "t1", epoch)
        images = rig.paused_and_saved("t1", epoch)
        assert rig.event(Paused, "t1", epoch).step == images[0].step
        if epoch == 2:
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    train(rig, 4, images=images)
    rig.event(Started, "t1", 4)
    rig.let_end("t1", 4)
    assert rig.event(Finished, "t1", 4).result == by_gloo


def test_rank_that_calls_another_collective_fails_the_gang_and_is_named(rig):
    rig.launch("t1", "ranks:Strays", params={"how": "calls_another", "steps": 4}, **NATIVE)
    message = rig.event(Failed, "t1").message
    assert "mismatched collectives" in message
    assert "broadcast" in message


def test_rank_that_computes_on_is_named_while_the_gang_stands(rig):
    rig.launch("t1", "ranks:Strays", params={"how": "computes", "steps": 4}, **NATIVE)
    rig.until(lambda: (view := rig.view("t1")) and "rank 2" in view.behind)
    (rig.folder("t1") / "go on").touch()
    rig.event(Finished, "t1")
