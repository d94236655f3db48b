"""Graphs move between devices that they share: who, when, and what comes of it in a minute."""

from collections import Counter
from dataclasses import replace

import pytest

from app.core.model.snapshot import BoardTenant
from app.core.scheduling.cycle import decide
from tests.core.pictures import NOW_S, moves
from tests.core.scheduling.sharing.test_time_sharing import grouped
from tests.core.shared import Shared, Wants, drawn
from tests.thoroughness import rest_long, seeds

WEIGHTS = {"a": 1, "b": 2, "c": 4, "d": 8}


def regroups(plan):
    return [decision.task for decision in plan.decisions if decision.rule == "regroup"]


def apart(first="a b", second="c d", **more):
    """Those on the second device are behind by 4 s of it each."""
    used = {"a": 4.0, "b": 4.0}
    return grouped(first, second, **{"used": used, **more})


def test_graph_that_is_behind_moves_to_graphs_that_are_ahead():
    plan = decide(apart(), now_s=NOW_S)
    assert regroups(plan) == ["c"]
    assert moves(plan) == [("c", "Pause")]


def test_graph_that_evens_the_two_devices_best_is_moved():
    weights = {"a": 1, "b": 2, "c": 4, "d": 8}
    used = {"a": -4.0, "b": 6.0, "c": 0.0, "d": 40.0}  # per weight 6, 8, 2.5, 6.25
    picture = grouped("a b", "c d", weights=weights, used=used)
    assert regroups(decide(picture, now_s=NOW_S)) == []  # d is not behind, c has the device
    used = {"a": -5.0, "b": 0.0, "c": 5.0, "d": 20.0}  # 5, 5, 3.75, 3.75
    assert regroups(decide(grouped("a b", "c d", weights=weights, used=used), now_s=NOW_S)) == ["c"]


@pytest.mark.parametrize(
    "more",
    [
        {"used": {"a": 2.0, "b": 2.0}},  # not far enough
        {"first": "a' b", "used": {"a": 9.0, "b": 9.0}, "second": "c' d'"},  # no full slice
        {"tasks": {"a": {"graph": False}, "b": {"graph": False}}, "first": "a", "second": "b"},
        {"second": "c"},  # it has its device for itself
        {"queue": "e", "tasks": {"e": {"graph": False}}},  # who goes before it waits
    ],
)
def test_no_graph_moves_without_need(more):
    assert regroups(decide(apart(**more), now_s=NOW_S)) == []


def test_graph_that_catches_up_by_itself_stays():
    assert regroups(decide(apart("a b e", "c d"), now_s=NOW_S)) == []


def test_graph_moves_to_a_free_device_standby_graphs_first():
    plan = decide(grouped("a b", free=1), now_s=NOW_S)
    assert moves(plan) == [("a", "Pause")]
    plan = decide(grouped("a b b", free=1), now_s=NOW_S)
    assert moves(plan) == [("b.2", "Pause")]
    assert moves(decide(grouped("a' b'", free=1), now_s=NOW_S)) == []


def test_only_one_graph_moves_at_a_time():
    picture = apart("a b", "c d e")
    (gone,) = regroups(decide(picture, now_s=NOW_S))
    leaves = {**picture.tasks, gone: replace(picture.tasks[gone], state="pausing")}
    assert moves(decide(replace(picture, tasks=leaves), now_s=NOW_S)) == []
    out = {"seats": (), "started_s": None, "shares": False, "held_us": 0, "waiting_since_s": NOW_S}
    pinned = {"state": "waiting", "image_on": "d1", "saved": False}
    waits = {**picture.tasks, gone: replace(picture.tasks[gone], **out, **pinned)}
    assert moves(decide(replace(picture, tasks=waits), now_s=NOW_S)) == []
    saved = {**waits, gone: replace(waits[gone], saved=True)}
    plan = decide(replace(picture, tasks=saved), now_s=NOW_S)
    assert moves(plan) == [(gone, "Launch")]
    assert plan.decisions[0].devices == ("d0",)


def test_graph_gives_up_its_turns_to_take_the_device_of_a_job_that_had_more():
    job = {"a": {"graph": False}}
    plan = decide(grouped("a", "c d", used={"a": 12.0}, tasks=job), now_s=NOW_S)
    assert regroups(plan) == ["c"]
    assert regroups(decide(grouped("a", "c d", used={"a": 2.0}, tasks=job), now_s=NOW_S)) == []


# --- in time ------------------------------------------------------------------------------------


def island_of(weights, *, graphs, devices=2, work_s=float("inf")):
    tenants = [BoardTenant(id=id, name=id, weight=1000 * weight) for id, weight in weights.items()]
    wants = [Wants(id, id, graphs=graphs, work_s=work_s) for id in weights]
    return Shared(devices, tenants, wants)


def parts(world, seconds):
    """Of the devices, by user."""
    before = world.held_us.copy()
    world.play(seconds)
    return {user: (world.held_us[user] - before[user]) / seconds / 1e6 for user in world.users}


def worst(world, seconds):
    fair, had = world.fair(), parts(world, seconds)
    return max(abs(had[user] - fair[user]) for user in fair)


def test_many_graphs_on_two_devices_share_by_weight_in_every_five_seconds():
    world = island_of(WEIGHTS, graphs=4)
    world.play(15)
    assert max(worst(world, 5) for _ in range(6)) <= 0.01
    assert not world.rules["Pause regroup"]


def test_short_graphs_share_by_weight_too():
    world = island_of(WEIGHTS, graphs=4, work_s=4.0)
    world.play(15)
    assert max(worst(world, 5) for _ in range(6)) <= 0.05


def test_heaviest_of_single_graphs_comes_to_have_its_own_device():
    world = island_of(WEIGHTS, graphs=1)
    world.play(20)
    had = parts(world, 10)
    assert had == pytest.approx({"a": 1 / 7, "b": 2 / 7, "c": 4 / 7, "d": 1.0}, abs=0.01)
    before = world.rules["Pause regroup"]
    world.play(20)
    assert world.rules["Pause regroup"] == before <= 6


@pytest.mark.parametrize("weights", rest_long(["111", "5341", "11111", "33222"], keep=2))
@pytest.mark.slow
def test_shares_are_even_in_time_where_no_grouping_is_even(weights):
    world = island_of({f"t{n}": int(w) for n, w in enumerate(weights)}, graphs=1)
    world.play(20)
    assert worst(world, 60) <= 0.08
    assert world.rules["Pause regroup"] <= 30  # of a task no more than one in a full slice


@pytest.mark.parametrize("seed", rest_long(seeds([0, 2, 3, 7, 11, 12, 20, 27])))
def test_shares_of_random_islands_follow_the_weights_and_no_graph_starves(seed):
    """Trees of tenants and users, bursts of 0.5 to 16 ms, graphs that end and others that do not.

    Rounds that go on for ever, pauses before a full slice and idle devices are looked for in each.
    """
    world = drawn(seed)
    world.play(30)
    fair = world.fair()
    had = parts(world, 60)
    assert {user for user, part in had.items() if not part} == set()
    for user, due in fair.items():
        assert had[user] == pytest.approx(due, abs=0.1), (user, had, fair)


@pytest.mark.parametrize("seed", rest_long(seeds([4, 5, 7, 10, 22]), keep=1))
def test_no_graph_starves_beside_jobs_that_need_whole_devices(seed):
    world = drawn(seed, jobs=0.4)
    world.play(30)
    fair = world.fair()
    had = parts(world, 60)
    for user, due in fair.items():
        assert had[user] == pytest.approx(due, abs=0.15), (user, had, fair)
        assert had[user] > due / 3, (user, had, fair)


def test_task_is_asked_to_move_once_within_a_full_slice():
    world = island_of({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, graphs=1, devices=3)
    asked = Counter()
    for _ in range(300):
        before = dict(world.moved)
        world.play(0.1)
        for id, at_s in world.moved.items():
            assert at_s - before.get(id, 0.0) >= 1.0 or at_s == before.get(id)
            asked[id] += at_s != before.get(id)
    assert asked
