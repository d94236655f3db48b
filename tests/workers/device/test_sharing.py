"""Several tasks take turns on one device, by weight, and the island says nothing between them."""

import itertools

import pytest

from app.core.model.protocol.messages import Finished, Paused, Saved, Started, Stopped
from tests.workers.graph.test_runner import LONG, launched, undisturbed

__all__ = ["undisturbed"]

ENOUGH_US = 1_500_000  # of seat time, all together, to judge shares by


def share(rig, weights, run="jobs:Stamp", **more):
    """All of them on the device, and each has had the seat."""
    rig.weights |= weights
    for number, task in enumerate(weights):
        rig.launch(task, run, beside=number > 0, **more)
        rig.event(Started, task)


def held_us(rig, tasks):
    """Return what each has held by one report: by two they would not be of the same moment."""
    views = {view.task: view for view in rig.reports[-1].residents if view.task in tasks}
    return {task: view.held_us for task, view in views.items()}


def grown_us(rig, tasks, is_right=lambda grown: True):
    """What each of them holds from now on, until it is enough, and right.

    A step that a busy machine holds up counts for less the more time there is to judge by.
    """
    before = held_us(rig, tasks)

    def enough():
        now = held_us(rig, tasks)
        grown = {task: now.get(task, 0) - before[task] for task in tasks}
        return grown if sum(grown.values()) >= ENOUGH_US and is_right(grown) else None

    return rig.until(enough)


def in_turns(rig):
    """The steps of all, in order; no two of them overlap."""
    lines = [line for said in list(rig.lines.values()) for _, line in said]
    steps = sorted(tuple(map(float, line.split())) for line in lines if line[0].isdigit())
    for (_, ended), (began, _) in itertools.pairwise(steps):
        assert ended <= began
    return steps


def test_slot_time_follows_the_weights_and_only_one_task_steps_at_a_time(rig):
    weights = {"t1": 1000, "t2": 2000, "t4": 4000}
    share(rig, weights, params={"nap_s": 0.002})
    grown_us(rig, weights)  # until who came first has been caught up with
    right = {task: pytest.approx(weight / 7000, abs=0.08) for task, weight in weights.items()}

    def is_right(grown):
        return {task: us / sum(grown.values()) for task, us in grown.items()} == right

    grown_us(rig, weights, is_right)
    assert not any(rig.all(Paused, task) for task in weights)
    assert len(in_turns(rig)) > 100


def test_paused_graph_leaves_the_device_to_the_others_and_resumes_later(rig):
    share(rig, {"t1": 1000, "t2": 1000, "t3": 1000}, params={"nap_s": 0.002})
    step = {}
    for task in ("t1", "t2"):  # whoever of them has the seat just now, and who has not
        rig.pause(task)
        step[task] = rig.event(Paused, task).step
        rig.until(lambda task=task: any(s.step == step[task] for s in rig.all(Saved, task)))
    rig.steps("t3", rig.view("t3").step + 20)
    assert rig.view("t1").step == step["t1"]
    rig.launch("t1", "jobs:Stamp", 2, beside=True, params={"nap_s": 0.002})
    started = rig.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("resident", step["t1"])
    rig.steps("t1", step["t1"] + 20, 2)
    in_turns(rig)


def test_every_graph_that_shares_can_be_saved_and_cancelled(rig):
    tasks = {"t1": 1000, "t2": 1000, "t3": 1000}
    share(rig, tasks, params={"nap_s": 0.002})
    for task in tasks:
        rig.save(task)
        rig.event(Saved, task)
    for task in tasks:
        rig.cancel(task)
        rig.event(Stopped, task)
    rig.until(lambda: not rig.supervisor.stays.residents)
    in_turns(rig)


def test_stopping_worker_pauses_and_saves_all_graphs_that_share(rigs):
    rig = rigs()
    share(rig, {"t1": 1000, "t2": 1000}, params={"nap_s": 0.002})
    rig.close()
    for task in ("t1", "t2"):
        (paused,) = rig.all(Paused, task)
        assert rig.all(Saved, task)[-1].step == paused.step


def test_graph_that_takes_turns_ends_with_the_same_bits(rig, undisturbed):
    rig.weights |= {"t1": 1000, "t2": 2000}
    launched(rig, "t1", LONG)
    rig.event(Started, "t1")
    launched(rig, "t2", LONG, beside=True)
    for task in ("t1", "t2"):
        assert rig.event(Finished, task).result == undisturbed


def test_best_served_graph_gives_way_where_not_all_fit(rigs):
    rig = rigs(memory_bytes=3 * 2**30)
    share(rig, {"t1": 1000, "t2": 8000}, memory_bytes=2**30, params={"nap_s": 0.002})
    rig.weights["t3"] = 8000
    rig.launch("t3", "jobs:Stamp", beside=True, memory_bytes=3 * 2**29)
    rig.event(Started, "t3")
    assert len(rig.all(Paused, "t1") + rig.all(Paused, "t2")) == 1
    in_turns(rig)


def test_no_graph_leaves_memory_for_a_standby_graph(rigs):
    rig = rigs(residents_max=2)
    share(rig, {"t1": 1000, "t2": 1000}, params={"nap_s": 0.002})
    rig.launch("t2+", "jobs:Stamp", beside=True)
    rig.event(Paused, "t2+")
    assert not rig.all(Started, "t2+")
    grown_us(rig, ["t1", "t2"])
    assert not rig.all(Paused, "t1") + rig.all(Paused, "t2")
