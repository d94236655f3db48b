"""Several tasks take turns on one device, by weight, and the island says nothing between them."""

import itertools

import pytest

from app.core.model.messages import Finished, Paused, Saved, Started, Stopped
from tests.workers.graph.test_runner import LONG, launched, undisturbed

__all__ = ["undisturbed"]

ENOUGH_US = 1_500_000  # of seat time, all together, to judge shares by


def share(ground, weights, run="jobs:Stamp", **more):
    """All of them on the device, and each has had the seat."""
    ground.weights |= weights
    for number, task in enumerate(weights):
        ground.launch(task, run, beside=number > 0, **more)
        ground.event(Started, task)


def held_us(ground, tasks):
    views = {task: ground.view(task) for task in tasks}
    return {task: view.held_us for task, view in views.items() if view is not None}


def grown_us(ground, tasks):
    """What each of them holds from now on, until it is enough."""
    before = held_us(ground, tasks)

    def enough():
        now = held_us(ground, tasks)
        grown = {task: now.get(task, 0) - before[task] for task in tasks}
        return grown if sum(grown.values()) >= ENOUGH_US else None

    return ground.until(enough)


def in_turns(ground):
    """The steps of all, in order; no two of them overlap."""
    lines = [line for said in list(ground.lines.values()) for _, line in said]
    steps = sorted(tuple(map(float, line.split())) for line in lines if line[0].isdigit())
    for (_, ended), (began, _) in itertools.pairwise(steps):
        assert ended <= began
    return steps


def test_seat_time_follows_the_weights_and_only_one_steps_at_a_time(ground):
    weights = {"t1": 1000, "t2": 2000, "t4": 4000}
    share(ground, weights, params={"nap_s": 0.002})
    grown_us(ground, weights)  # until who came first has been caught up with
    grown = grown_us(ground, weights)
    for task, weight in weights.items():
        assert grown[task] / sum(grown.values()) == pytest.approx(weight / 7000, abs=0.08)
    assert not any(ground.all(Paused, task) for task in weights)
    assert len(in_turns(ground)) > 100


def test_one_that_is_paused_leaves_the_device_to_the_others_and_goes_on_later(ground):
    share(ground, {"t1": 1000, "t2": 1000, "t3": 1000}, params={"nap_s": 0.002})
    step = {}
    for task in ("t1", "t2"):  # whoever of them has the seat just now, and who has not
        ground.pause(task)
        step[task] = ground.event(Paused, task).step
        ground.until(lambda task=task: any(s.step == step[task] for s in ground.all(Saved, task)))
    ground.steps("t3", ground.view("t3").step + 20)
    assert ground.view("t1").step == step["t1"]
    ground.launch("t1", "jobs:Stamp", 2, beside=True, params={"nap_s": 0.002})
    started = ground.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("resident", step["t1"])
    ground.steps("t1", step["t1"] + 20, 2)
    in_turns(ground)


def test_whoever_it_is_can_be_saved_and_cancelled(ground):
    tasks = {"t1": 1000, "t2": 1000, "t3": 1000}
    share(ground, tasks, params={"nap_s": 0.002})
    for task in tasks:
        ground.save(task)
        ground.event(Saved, task)
    for task in tasks:
        ground.cancel(task)
        ground.event(Stopped, task)
    ground.until(lambda: not ground.supervisor.lives.residents)
    in_turns(ground)


def test_a_stopping_worker_pauses_and_saves_all_of_them(grounds):
    ground = grounds()
    share(ground, {"t1": 1000, "t2": 1000}, params={"nap_s": 0.002})
    ground.close()
    for task in ("t1", "t2"):
        (paused,) = ground.all(Paused, task)
        assert ground.all(Saved, task)[-1].step == paused.step


def test_a_graph_that_takes_turns_ends_with_the_same_bits(ground, undisturbed):
    ground.weights |= {"t1": 1000, "t2": 2000}
    launched(ground, "t1", LONG)
    ground.event(Started, "t1")
    launched(ground, "t2", LONG, beside=True)
    for task in ("t1", "t2"):
        assert ground.event(Finished, task).result == undisturbed


def test_where_not_all_fit_the_best_served_gives_way(grounds):
    ground = grounds(memory_bytes=3 * 2**30)
    share(ground, {"t1": 1000, "t2": 8000}, memory_bytes=2**30, params={"nap_s": 0.002})
    ground.weights["t3"] = 8000
    ground.launch("t3", "jobs:Stamp", beside=True, memory_bytes=3 * 2**29)
    ground.event(Started, "t3")
    assert len(ground.all(Paused, "t1") + ground.all(Paused, "t2")) == 1
    in_turns(ground)


def test_nobody_makes_room_for_an_heir(grounds):
    ground = grounds(residents_max=2)
    share(ground, {"t1": 1000, "t2": 1000}, params={"nap_s": 0.002})
    ground.launch("t2+", "jobs:Stamp", beside=True)
    ground.event(Paused, "t2+")
    assert not ground.all(Started, "t2+")
    grown_us(ground, ["t1", "t2"])
    assert not ground.all(Paused, "t1") + ground.all(Paused, "t2")
