"""Commands of several ranks: what torchrun would start, with real processes, on a real device."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from app.core.model.protocol.messages import (
    Failed,
    Finished,
    Paused,
    Resized,
    Saved,
    Started,
    Stopped,
)
from tests.workers.commands.test_runner import all_used_s, ended, its_processes, shell
from tests.workers.conftest import PATIENCE_S, DeviceRig

pytestmark = pytest.mark.long

RANKS, STEPS = 3, 40
IMPORTS_S = 120.0  # each rank imports torch for itself, all on the same cores


def train(rig: DeviceRig, task: str = "t1", epoch: int = 1, *, pace: float = 0.02, **more) -> None:
    words = ["python", "ddp.py", "--steps", str(STEPS), "--pace", str(pace)]
    rig.launch(task, words, epoch, world_size=RANKS, **{"budget_us": 10**9, **more})


def parameters(rig: DeviceRig, task: str = "t1", epoch: int = 1) -> str:
    """The digest that it printed at its end."""
    rig.event(Finished, task, epoch, timeout_s=IMPORTS_S)
    said = [line for line in ended(rig, task, epoch) if line.startswith("parameters")]
    (line,) = said
    return line.split()[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Its parameters where nobody disturbs it, on one seat."""
    rig = DeviceRig(tmp_path_factory.mktemp("alone"))
    rig.open()
    try:
        train(rig, "alone", pace=0.0)
        return parameters(rig, "alone")
    finally:
        rig.close()


# --- what a rank is given -------------------------------------------------------------------------


def test_program_runs_once_per_rank_with_the_variables_of_torchrun(rig):
    said = "echo $RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE at $MASTER_ADDR"
    rig.launch("t1", shell(f"{said}; test $MASTER_PORT -gt 0"), world_size=RANKS)
    finished = rig.event(Finished, "t1")
    assert finished.result == {"exit_status": 0}
    assert sorted(ended(rig, "t1")) == [
        f"{rank} {rank} of {RANKS} {RANKS} at 127.0.0.1" for rank in range(RANKS)
    ]


def test_program_gets_our_process_group_for_every_backend_it_asks_for(rig):
    """Also where the script has modules called as ours are."""
    said = "echo mine = 1 > workers.py; exec python meets.py well"
    rig.launch("t1", shell(said), world_size=RANKS, budget_us=10**9)
    rig.event(Finished, "t1", timeout_s=IMPORTS_S)
    each = [f"splice {rank} 6.0" for rank in range(RANKS)]
    assert sorted(line for line in ended(rig, "t1") if line) == sorted(each * 2)


def test_a_rank_that_cannot_reach_the_others_is_told_why(rig):
    script = "import torch.distributed as d; d.init_process_group('gloo')"
    outer = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    )
    rig.launch("t1", ["python", "-c", outer], world_size=2, budget_us=10**9)
    told = "cannot reach the others: what started this process closed the descriptors"
    rig.event(Failed, "t1", timeout_s=IMPORTS_S)
    assert any(told in line for line in ended(rig, "t1"))


def test_progress_and_outputs_come_from_one_rank(rig):
    train(rig, pace=0.0, outputs=["result"])
    digest = parameters(rig)
    finished = rig.event(Finished, "t1")
    assert finished.step == STEPS + 1  # and the end
    assert finished.outputs["result"]["size_bytes"] > len(digest)


LATE = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank() == 1:
    while not os.path.exists("go on"): pass
dist.all_reduce(torch.ones(4))
"""


def test_rank_that_does_not_come_is_named_until_it_comes(rig):
    argv = ["python", "-c", LATE]
    rig.launch("t1", argv, world_size=2, seats=[2], budget_us=10**9)
    behind = rig.until(lambda: rig.view("t1") and rig.view("t1").behind, timeout_s=IMPORTS_S)
    assert behind.startswith("Rank 0 waits in all_reduce(sum, float32[4])"), behind
    assert ", to which rank 1 has not come: rank 1 runs" in behind
    (rig.folder("t1") / "go on").touch()
    rig.event(Finished, "t1", timeout_s=IMPORTS_S)
    assert rig.views("t1")[-1].behind == ""


# --- seats ----------------------------------------------------------------------------------------


def test_ranks_of_a_command_are_resized_and_paused_with_the_same_bits(rig, undisturbed):
    chance = random.Random(5)
    for epoch in range(1, 4):
        train(rig, epoch=epoch)
        started = rig.event(Started, "t1", epoch)
        assert started.resumed == ("fresh" if epoch == 1 else "resident")
        for seats in (RANKS, chance.choice([1, 2])):
            before = len(rig.all(Resized, "t1", epoch))
            rig.resize("t1", seats, epoch)
            there = rig.until(
                lambda n=before, e=epoch: rig.all(Resized, "t1", e)[n:], timeout_s=IMPORTS_S
            )
            assert there[0].seats == [seats]
        rig.pause("t1", epoch)
        rig.event(Paused, "t1", epoch)
        time.sleep(1.5)  # longer than a rank that sleeps is left its seat
    train(rig, epoch=4)
    assert parameters(rig, epoch=4) == undisturbed


def test_command_with_a_slot_per_rank_computes_the_same_bits(rig, undisturbed):
    train(rig)
    rig.event(Started, "t1")
    rig.resize("t1", RANKS)
    assert rig.event(Resized, "t1", timeout_s=IMPORTS_S).seats == [RANKS]
    assert parameters(rig) == undisturbed


def test_ranks_that_never_meet_keep_their_slot_and_block_nothing_else(rig):
    rig.launch("t1", shell("echo up; until test -e enough; do sleep 0.02; done"), world_size=2)
    rig.until(lambda: rig.printed("t1") == ["up"] * 2)
    rig.resize("t1", 2)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.launch("t1", shell(""), epoch=2, world_size=2)
    rig.event(Started, "t1", 2)
    rig.resize("t1", 1, epoch=2)
    assert rig.event(Resized, "t1", 2).seats == [1]
    assert not rig.all(Resized, "t1")


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told", "detail"),
    [
        ("raise", "rank 1: It ended with exit status 1.", "rank one has had enough"),
        ("kill", "rank 1: It was ended by SIGKILL; perhaps it ran out of memory.", ""),
    ],
)
def test_failed_rank_is_named_and_ends_the_others(rig, how, told, detail):
    rig.launch("t1", ["python", "meets.py", how], world_size=2, budget_us=10**9)
    failed = rig.event(Failed, "t1", timeout_s=IMPORTS_S)
    assert failed.message == told
    assert detail in failed.detail
    rig.until(lambda: not rig.supervisor.stays.residents)


def test_first_failed_rank_of_a_program_without_python_is_named(rig):
    rig.launch("t1", shell("test $RANK = 2 && exit 7; sleep 60"), world_size=RANKS)
    assert rig.event(Failed, "t1").message == "rank 2: It ended with exit status 7."


def test_pause_stops_all_ranks_and_cancel_lets_each_clean_up(rigs):
    rig = rigs(stop_grace_s=30.0)
    said = "trap 'sleep 0.$RANK; echo tidy $RANK; exit 1' TERM; echo up; while :; do :; done"
    rig.launch("t1", shell(said), world_size=RANKS)
    rig.until(lambda: rig.printed("t1") == ["up"] * RANKS)
    rig.pause("t1")
    rig.event(Paused, "t1")
    processes = its_processes(rig)
    assert [process.status() for process in processes] == [psutil.STATUS_STOPPED] * RANKS
    rig.launch("t1", shell(said), epoch=2, world_size=RANKS)
    before = all_used_s(processes)
    rig.until(
        lambda: all(now > then for now, then in zip(all_used_s(processes), before, strict=True))
    )
    rig.cancel("t1", 2)
    rig.event(Stopped, "t1", 2)
    assert sorted(ended(rig, "t1", 2)) == [f"tidy {rank}" for rank in range(RANKS)]
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


# --- its working folder ---------------------------------------------------------------------------


def test_all_ranks_begin_again_in_the_folder_after_a_loss_with_the_same_bits(rig, undisturbed):
    train(rig)
    rig.until(lambda: (view := rig.view("t1")) and view.step >= 5, timeout_s=IMPORTS_S)
    rig.pause("t1")
    saved = rig.event(Saved, "t1")
    rig.drop.append(["t1", 1])
    rig.until(lambda: not rig.supervisor.stays.residents)
    train(rig, epoch=2, images=[rig.image(saved)])
    started = rig.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("folder", saved.step)
    assert parameters(rig, epoch=2) == undisturbed
    first = rig.printed("t1", 2)[0].split()
    assert 4 <= int(first[2]) < STEPS
    assert first[4] == "1"
