"""Functions that run one after another in one process: what they share, and with which others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.core.device import device_machine, device_records
from app.core.model.protocol.messages import Failed, Finished, Paused, Started, Stopped
from tests.workers.conftest import PRESET, DeviceRig
from workers.device.stays.admission import READY_AHEAD


@pytest.fixture(autouse=True)
def long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that rests waits for the next function of a slow test."""
    monkeypatch.setattr(device_machine, "REST_US", 600_000_000)


def _ended(rig: DeviceRig, task: str, run: str = "short:look", **more: object) -> Finished:
    rig.launch(task, run, **more)
    finished: Finished = rig.event(Finished, task)
    return finished


def _process(rig: DeviceRig, task: str, run: str = "short:look", **more: object) -> str:
    return str(_ended(rig, task, run, **more).result["process"])


def _state(pid: int) -> str:
    """Return the letter by which the kernel tells what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_functions_run_one_after_another_in_one_process(rig):
    results = [_ended(rig, f"t{n}").result for n in range(3)]
    assert len({result["process"] for result in results}) == 1
    assert [result["calls"] for result in results] == [1, 2, 3]
    assert results[0]["state"] == results[1]["state"] == results[2]["state"]


def test_functions_of_two_requests_share_no_process_unless_both_say_so(rig):
    first, second = (_process(rig, f"a{n}", request=f"req_{n}") for n in range(2))
    assert first != second
    ours = [_process(rig, f"b{n}", request=f"req_{n}", isolation="user") for n in range(2)]
    assert ours[0] == ours[1]
    assert ours[0] not in (first, second)


def test_function_cannot_change_the_torch_of_another_request(rig):
    _ended(rig, "t0", "short:spoil_torch", request="req_0")
    assert _ended(rig, "t1", "short:ones", request="req_1").result["sum"] == 3.0


def test_functions_that_are_launched_together_run_one_after_another(rig):
    for n in range(4):
        rig.launch(f"t{n}", "short:look", params={"nap_s": 0.05})
    ends = [rig.event(Finished, f"t{n}") for n in range(4)]
    assert len({end.result["process"] for end in ends}) == 1
    assert sorted(end.result["calls"] for end in ends) == [1, 2, 3, 4]
    assert all(end.held_us >= 50_000 for end in ends)
    assert rig.supervisor.spawner.last_id == 1


def test_each_function_has_its_own_log_and_its_own_start(rig):
    for n in range(3):
        _ended(rig, f"t{n}")
        started = rig.event(Started, f"t{n}")
        assert (started.resumed, started.preset) == ("fresh", PRESET)
        rig.until(lambda n=n: rig.printed(f"t{n}") == ["looks"])


def test_next_function_finds_the_process_as_the_first_one_did(rig):
    first = _ended(rig, "t1").result
    changed = _process(rig, "t2", "short:change")
    last = _ended(rig, "t3").result
    assert first["process"] == changed == last["process"]
    assert first["state"] == last["state"]
    rig.until(lambda: rig.printed("t3") == ["looks"])


def test_function_that_raises_leaves_the_process_to_the_next(rig):
    process = _process(rig, "t1")
    rig.launch("t2", "short:fail")
    assert rig.event(Failed, "t2").message == f"ValueError: {process}"
    assert _process(rig, "t3") == process


def test_function_that_ends_the_process_takes_no_other_function_along(rig):
    process = _process(rig, "t1")
    rig.launch("t2", "short:wait")
    rig.event(Started, "t2")
    rig.launch("t3", "short:die")
    rig.until(lambda: rig.supervisor.admission.fetched)  # it waits behind t2, and before t4
    rig.launch("t4", "short:look")
    rig.let_end("t2")
    assert rig.event(Finished, "t2").result["process"] == process
    assert rig.event(Failed, "t3").cause == "exit"
    assert rig.event(Finished, "t4").result["process"] != process


@pytest.mark.parametrize(
    "leaves", ["leave_thread", "leave_child", "close_output", "lower_priority", "lower_limit"]
)
def test_function_that_leaves_something_behind_ends_its_process(rig, leaves):
    process = _process(rig, "t1", f"short:{leaves}")
    rig.until(lambda: not rig.supervisor.stays.residents)
    assert _process(rig, "t2") != process


@pytest.mark.parametrize(
    "differs",
    [
        {"tenant": "ten_other"},
        {"user": "usr_other"},
        {"env": {"A": "b"}},
        {"preset": {**PRESET, "threads": 2}},
        {"resources": {"cpus": 1.0}},
        {"memory_bytes": 1 << 20},
        {"isolation": "process"},
        {"run": "jobs:tokenize", "params": {"text": "a"}, "outputs": ["tokens"]},
    ],
    ids=lambda differs: next(iter(differs)),
)
def test_function_that_differs_runs_in_a_process_of_its_own(rig, differs):
    process = _process(rig, "t1")
    residents = [*rig.supervisor.stays.residents]
    finished = _ended(rig, "t2", differs.pop("run", "short:look"), **differs)
    assert finished.result.get("process") != process
    assert rig.supervisor.spawner.last_id == 2
    assert len(residents) == 1


def test_function_that_asked_for_its_own_process_shares_it_with_no_equal_one(rig):
    own = {"isolation": "process"}
    assert _process(rig, "t1", **own) != _process(rig, "t2", **own)


def test_few_processes_are_made_ready_for_functions_of_a_batch_that_need_their_own(
    rig, monkeypatch
):
    monkeypatch.setattr(device_records, "BEHIND_US", 600_000_000)  # none is given back
    rig.launch("t0", "short:wait", isolation="process")
    for n in range(1, 5):
        rig.launch(f"t{n}", "short:look", isolation="process", beside=True)
    rig.event(Started, "t0")
    residents = rig.supervisor.stays.residents
    rig.until(lambda: len(residents) == 1 + READY_AHEAD)
    rig.until(lambda: all(each.is_prepared for each in residents.values()))
    assert len(residents) == 1 + READY_AHEAD
    rig.let_end("t0")
    ends = [rig.event(Finished, f"t{n}") for n in range(5)]
    assert len({end.result["process"] for end in ends}) == 5


def test_resting_process_is_stopped_and_speaks_to_nobody(rig):
    _process(rig, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    rig.until(lambda: _state(resident.pid) == "T")  # a busy processor comes to a stop later
    assert rig.view("t1") is None or rig.view("t1").state == "ended"


def test_process_that_is_killed_while_it_rests_fails_no_function(rig):
    process = _process(rig, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    os.kill(resident.pid, signal.SIGKILL)
    assert _process(rig, "t2") != process
    assert not [event for event in rig.events if isinstance(event, Failed)]


def test_resting_process_makes_room_for_another_task(rigs):
    rig = rigs(residents_max=1)
    _process(rig, "t1")
    rig.launch("t2", "jobs:Count", params={"steps": 3})
    rig.event(Finished, "t2")


def test_functions_behind_the_running_one_give_way_and_lose_nothing(rig):
    _process(rig, "t1")
    rig.launch("t2", "short:wait")
    rig.event(Started, "t2")
    rig.launch("t3", "short:look")
    rig.launch("t4", "short:look")
    rig.until(lambda: rig.view("t4") is not None)
    rig.pause("t3")
    rig.event(Paused, "t3")
    rig.cancel("t4")
    rig.event(Stopped, "t4")
    rig.let_end("t2")
    process = rig.event(Finished, "t2").result["process"]
    rig.launch("t3", "short:look", epoch=2)
    assert rig.event(Finished, "t3", 2).result["process"] == process


def test_cancelled_function_ends_its_process_and_the_next_one_begins_anew(rig):
    process = _process(rig, "t1")
    rig.launch("t2", "short:wait")
    rig.event(Started, "t2")
    rig.launch("t3", "short:look")
    rig.cancel("t2")
    rig.event(Stopped, "t2")
    assert rig.event(Finished, "t3").result["process"] != process


def test_device_that_leaves_ends_its_resting_processes_at_once(rig):
    _process(rig, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    rig.close()
    assert resident.kill_reason == "rested"


def test_functions_of_a_batch_are_given_back_if_the_one_before_them_takes_long(rig):
    rig.launch("t1", "short:wait")
    rig.event(Started, "t1")
    for name in ("t2", "t3"):
        rig.launch(name, "short:look", beside=True)
    for name in ("t2", "t3"):
        rig.event(Paused, name)
    rig.let_end("t1")
    process = rig.event(Finished, "t1").result["process"]
    rig.launch("t2", "short:look", epoch=2)
    assert rig.event(Finished, "t2", 2).result["process"] == process


def test_lost_worker_loses_only_what_had_no_end(rig, monkeypatch):
    """The functions of a batch have stays and epochs of their own."""
    monkeypatch.setattr(device_records, "BEHIND_US", 600_000_000)  # none is given back
    for n in range(3):
        rig.launch(f"t{n}", "short:look", beside=n > 0)
    ends = [rig.event(Finished, f"t{n}") for n in range(3)]
    assert [(end.epoch, end.seq) for end in ends] == 3 * [(1, 2)]
    rig.until(lambda: not rig.supervisor.stays.by_key)
