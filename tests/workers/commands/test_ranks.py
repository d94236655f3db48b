"""Commands of several ranks: what torchrun would start, with real processes, on a real device."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from app.core.model.messages import Failed, Finished, Paused, Resized, Saved, Started, Stopped
from tests.workers.commands.test_runner import ended, its_processes, shell, used_s
from tests.workers.conftest import Ground

pytestmark = pytest.mark.long

RANKS, STEPS = 3, 40
IMPORTS_S = 120.0  # each rank imports torch for itself, all on the same cores


def train(ground: Ground, task: str = "t1", epoch: int = 1, *, pace: float = 0.02, **more) -> None:
    words = ["python", "ddp.py", "--steps", str(STEPS), "--pace", str(pace)]
    ground.launch(task, words, epoch, world_size=RANKS, **{"budget_us": 10**9, **more})


def parameters(ground: Ground, task: str = "t1", epoch: int = 1) -> str:
    """The digest that it printed at its end."""
    ground.event(Finished, task, epoch, timeout_s=IMPORTS_S)
    said = [line for line in ended(ground, task, epoch) if line.startswith("parameters")]
    (line,) = said
    return line.split()[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Its parameters where nobody disturbs it, on one seat."""
    ground = Ground(tmp_path_factory.mktemp("alone"))
    ground.open()
    try:
        train(ground, "alone", pace=0.0)
        return parameters(ground, "alone")
    finally:
        ground.close()


# --- what a rank is given -------------------------------------------------------------------------


def test_any_program_runs_as_many_times_as_there_are_ranks_and_is_told_what_torchrun_tells(ground):
    said = "echo $RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE at $MASTER_ADDR"
    ground.launch("t1", shell(f"{said}; test $MASTER_PORT -gt 0"), world_size=RANKS)
    finished = ground.event(Finished, "t1")
    assert finished.result == {"exit_status": 0}
    assert sorted(ended(ground, "t1")) == [
        f"{rank} {rank} of {RANKS} {RANKS} at 127.0.0.1" for rank in range(RANKS)
    ]


def test_whatever_backend_it_asks_for_and_however_often_it_gets_ours(ground):
    """Also where the script has modules called as ours are."""
    said = "echo mine = 1 > workers.py; exec python meets.py well"
    ground.launch("t1", shell(said), world_size=RANKS, budget_us=10**9)
    ground.event(Finished, "t1", timeout_s=IMPORTS_S)
    each = [f"splice {rank} 6.0" for rank in range(RANKS)]
    assert sorted(line for line in ended(ground, "t1") if line) == sorted(each * 2)


def test_a_rank_that_cannot_reach_the_others_is_told_why(ground):
    script = "import torch.distributed as d; d.init_process_group('gloo')"
    outer = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    )
    ground.launch("t1", ["python", "-c", outer], world_size=2, budget_us=10**9)
    told = "cannot reach the others: what started this process closed the descriptors"
    ground.event(Failed, "t1", timeout_s=IMPORTS_S)
    assert any(told in line for line in ended(ground, "t1"))


def test_progress_and_outputs_are_those_of_one_rank(ground):
    train(ground, pace=0.0, outputs=["result"])
    digest = parameters(ground)
    finished = ground.event(Finished, "t1")
    assert finished.step == STEPS + 1  # and the end
    assert finished.outputs["result"]["size_bytes"] > len(digest)


# --- seats ----------------------------------------------------------------------------------------


def test_it_is_resized_and_paused_as_it_runs_with_the_same_bits(ground, undisturbed):
    chance = random.Random(5)
    for epoch in range(1, 4):
        train(ground, epoch=epoch)
        started = ground.event(Started, "t1", epoch)
        assert started.resumed == ("fresh" if epoch == 1 else "resident")
        for seats in (RANKS, chance.choice([1, 2])):
            before = len(ground.all(Resized, "t1", epoch))
            ground.resize("t1", seats, epoch)
            there = ground.until(
                lambda n=before, e=epoch: ground.all(Resized, "t1", e)[n:], timeout_s=IMPORTS_S
            )
            assert there[0].seats == [seats]
        ground.pause("t1", epoch)
        ground.event(Paused, "t1", epoch)
        time.sleep(1.5)  # longer than a rank that sleeps is left its seat
    train(ground, epoch=4)
    assert parameters(ground, epoch=4) == undisturbed


def test_on_a_seat_for_each_rank_it_computes_the_same_bits(ground, undisturbed):
    train(ground)
    ground.event(Started, "t1")
    ground.resize("t1", RANKS)
    assert ground.event(Resized, "t1", timeout_s=IMPORTS_S).seats == [RANKS]
    assert parameters(ground) == undisturbed


def test_ranks_that_never_meet_keep_their_seat_and_nothing_else_waits_for_that(ground):
    ground.launch("t1", shell("echo up; until test -e enough; do sleep 0.02; done"), world_size=2)
    ground.until(lambda: ground.printed("t1") == ["up"] * 2)
    ground.resize("t1", 2)
    ground.pause("t1")
    ground.event(Paused, "t1")
    ground.launch("t1", shell(""), epoch=2, world_size=2)
    ground.event(Started, "t1", 2)
    ground.resize("t1", 1, epoch=2)
    assert ground.event(Resized, "t1", 2).seats == [1]
    assert not ground.all(Resized, "t1")


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told", "detail"),
    [
        ("raise", "rank 1: It ended with exit status 1.", "rank one has had enough"),
        ("kill", "rank 1: It was ended by SIGKILL; perhaps it ran out of memory.", ""),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(ground, how, told, detail):
    ground.launch("t1", ["python", "meets.py", how], world_size=2, budget_us=10**9)
    failed = ground.event(Failed, "t1", timeout_s=IMPORTS_S)
    assert failed.message == told
    assert detail in failed.detail
    ground.until(lambda: not ground.supervisor.lives.residents)


def test_of_programs_that_are_no_python_the_first_that_fails_is_named_too(ground):
    ground.launch("t1", shell("test $RANK = 2 && exit 7; sleep 60"), world_size=RANKS)
    assert ground.event(Failed, "t1").message == "rank 2: It ended with exit status 7."


def test_a_pause_stops_all_ranks_and_cancel_lets_each_tidy_up(ground):
    said = "trap 'sleep 0.$RANK; echo tidy $RANK; exit 1' TERM; echo up; while :; do :; done"
    ground.launch("t1", shell(said), world_size=RANKS)
    ground.until(lambda: ground.printed("t1") == ["up"] * RANKS)
    ground.pause("t1")
    ground.event(Paused, "t1")
    processes = its_processes(ground)
    assert [process.status() for process in processes] == [psutil.STATUS_STOPPED] * RANKS
    ground.launch("t1", shell(said), epoch=2, world_size=RANKS)
    before = used_s(processes)
    ground.until(
        lambda: all(now > then for now, then in zip(used_s(processes), before, strict=True))
    )
    ground.cancel("t1", 2)
    ground.event(Stopped, "t1", 2)
    assert sorted(ended(ground, "t1", 2)) == [f"tidy {rank}" for rank in range(RANKS)]
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


# --- its working folder ---------------------------------------------------------------------------


def test_where_it_is_lost_all_ranks_begin_again_in_the_folder_with_the_same_bits(
    ground, undisturbed
):
    train(ground)
    ground.until(lambda: (view := ground.view("t1")) and view.step >= 5, timeout_s=IMPORTS_S)
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    ground.drop.append(["t1", 1])
    ground.until(lambda: not ground.supervisor.lives.residents)
    train(ground, epoch=2, images=[ground.image(saved)])
    started = ground.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("folder", saved.step)
    assert parameters(ground, epoch=2) == undisturbed
    first = ground.printed("t1", 2)[0].split()
    assert 4 <= int(first[2]) < STEPS
    assert first[4] == "1"
