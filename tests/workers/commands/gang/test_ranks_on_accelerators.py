"""Commands that hold several accelerators: what torchrun would start, a rank on each device.

The host has eight simulated accelerators, and the supervisor of the task's own device is real.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Started
from tests.processes import status_of
from tests.workers.accelerators import host
from tests.workers.commands.test_runner import ended, its_processes, shell
from tests.workers.conftest import PATIENCE_S, DeviceRig

assert host

pytestmark = pytest.mark.sim

RANKS, STEPS = 4, 100  # each rank that trains imports torch anew: three train
GUESTS = ["h.1", "h.2"]
TRAIN = ["python", "ddp.py", "--kind", "sim", "--steps", str(STEPS), "--pace"]
QUICK, SLOW = [*TRAIN, "0.02"], [*TRAIN, "0.2"]  # the slow one does not end before it is paused


def launch(rig: DeviceRig, task: str, words: list[str], epoch: int = 1, **more: Any) -> None:
    """Launch a command on its worker's device and three guests, with a rank on each."""
    guests = more.pop("guests", ["h.1", "h.2", "h.3"])
    slots = 1 + len(guests)
    usual = {"world_size": slots, "seats": [slots], "guests": guests, "budget_us": 10**9}
    rig.launch(task, words, epoch, **{**usual, **more})


def on(lines: list[str]) -> list[str]:
    """The device of each rank, in their order."""
    return [line.rpartition(" ")[2] for line in sorted(lines) if line.startswith("rank ")]


def parameters(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("parameters"))
    return line.split()[1]


@pytest.fixture(scope="module")
def undisturbed(host: Callable[[int], DeviceRig]) -> str:
    rig = host(0)
    launch(rig, "alone", QUICK, guests=GUESTS)
    rig.event(Finished, "alone", timeout_s=120)
    lines = ended(rig, "alone")
    assert on(lines) == ["0", "1", "2"]
    return parameters(lines)


def test_script_is_frozen_thawed_moved_and_resized_by_a_twin(host, undisturbed):
    rig = host(0)
    launch(rig, "t1", SLOW, guests=GUESTS)
    rig.until(lambda: (view := rig.view("t1")) and view.step >= 3, timeout_s=120)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.until(lambda: {*map(status_of, its_processes(rig))} == {psutil.STATUS_STOPPED})
    rig.launch("other", shell("echo mine"))  # takes the slot of the first device meanwhile
    rig.event(Finished, "other")
    launch(rig, "t1", SLOW, 2, guests=GUESTS)
    assert rig.event(Started, "t1", 2).resumed == "resident"
    rig.until(lambda: (view := rig.view("t1", 2)) and view.step >= 10, timeout_s=120)
    images = rig.paused_and_saved("t1", 2)
    # moved to other devices, where it begins again from its own checkpoint
    elsewhere = host(4)
    launch(elsewhere, "t1", QUICK, 3, guests=["h.7", "h.6"], images=images)
    assert elsewhere.event(Started, "t1", 3).resumed == "folder"
    # a twin with another number of ranks begins in the same folder
    rig.drop.append(["t1", 2])
    launch(rig, "twin", QUICK, guests=["h.1"], images=images)
    rig.event(Finished, "twin", timeout_s=120)
    elsewhere.event(Finished, "t1", 3, timeout_s=120)
    moved, resized = ended(elsewhere, "t1", 3), ended(rig, "twin")
    assert (on(moved), on(resized)) == (["4", "7", "6"], ["0", "1"])
    other_ranks = "Roundhouse: it begins again with 2 ranks; its files are of a run with 3"
    assert (other_ranks in resized, other_ranks in moved) == (True, False)
    assert parameters(moved) == undisturbed
    assert parameters(resized) != undisturbed  # two ranks see other batches than three
    for lines in (moved, resized):
        (begun,) = (line for line in lines if line.startswith("begins after"))
        assert 9 <= int(begun.split()[2]) < STEPS


def test_launcher_starts_a_rank_on_each_device_of_its_command_and_is_frozen_with_them(host):
    """`torchrun` without options: the environment says how many ranks there are."""
    rig, begun = host(0), {"guests": ["h.1"], "world_size": 1}
    words = shell(
        'echo "$SIM_VISIBLE_DEVICES"; sleep 1;'
        " exec torchrun --no-python sh -c 'echo rank $RANK of $WORLD_SIZE'"
    )
    launch(rig, "own", words, **begun)
    rig.until(lambda: rig.printed("own") == ["0,1"])
    rig.pause("own")
    rig.event(Paused, "own")
    rig.until(lambda: {*map(status_of, its_processes(rig))} == {psutil.STATUS_STOPPED})
    launch(rig, "own", words, 2, **begun)
    assert rig.event(Started, "own", 2).resumed == "resident"
    rig.event(Finished, "own", 2, timeout_s=120)
    lines = [line for line in ended(rig, "own", 2) if not line.startswith("[")]
    assert sorted(lines) == ["rank 0 of 2", "rank 1 of 2"]


# --- the hostile side -----------------------------------------------------------------------------


def test_rank_that_looks_for_other_devices_finds_only_those_of_its_task(host):
    rig = host(0)
    launch(rig, "pry", ["python", "prying.py"], guests=["h.1"])
    rig.event(Finished, "pry", timeout_s=120)
    (said,) = ended(rig, "pry")
    seen = {"nodes": ["node0", "node1"], "count": "2", "beyond": "refused"}
    assert json.loads(said) == seen


def test_rank_that_hangs_is_frozen_and_ended_with_the_others(host):
    hangs = "trap '' TERM INT; echo up; while :; do [ $RANK = 2 ] || sleep 0.05; done"
    rig = host(0)
    launch(rig, "hang", shell(hangs))
    rig.until(lambda: rig.printed("hang") == ["up"] * RANKS)
    rig.pause("hang")
    rig.event(Paused, "hang")
    processes = its_processes(rig)  # none begins or ends while they are stopped
    rig.until(lambda: {*map(status_of, processes)} == {psutil.STATUS_STOPPED})
    launch(rig, "hang", shell(hangs), 2, budget_us=10**6)
    failed = rig.event(Failed, "hang", 2)
    assert failed.cause == "max_duration"
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_rank_that_dies_ends_the_others_and_each_is_told(host):
    dies = (
        "[ $RANK = 0 ] && echo $$ > first && exit 0; [ $RANK = 2 ] || exec sleep 600;"
        " until test -s first; do sleep 0.02; done;"
        " while kill -0 $(cat first); do sleep 0.02; done; kill -9 $$"  # its end is known by then
    )
    rig = host(0)
    launch(rig, "die", shell(dies))
    failed = rig.event(Failed, "die")
    assert failed.message == "rank 2: It was ended by SIGKILL; perhaps it ran out of memory."
    assert failed.detail.splitlines()[-RANKS:] == [
        "rank 0: It ended with exit status 0.",
        "rank 1: It was ended with the others.",
        "rank 2: It was ended by SIGKILL; perhaps it ran out of memory.",
        "rank 3: It was ended with the others.",
    ]
    rig.until(lambda: not rig.supervisor.stays.residents)


def test_command_whose_devices_are_not_served_is_told_so(host):
    rig = host(0)
    launch(rig, "homeless", shell("true"), guests=["h.99"])
    told = rig.event(Failed, "homeless").message
    assert told == ("It cannot use its devices: the worker of this host does not serve h.99.")
