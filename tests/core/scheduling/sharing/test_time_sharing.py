"""Graphs share the only device of a kind: who joins, who does not, and what others see of it."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from app.core.fairness.usage_decay import FIXED_POINT_BITS
from app.core.model.snapshot import Policy
from app.core.scheduling.board import Board
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.sharing import time_sharing
from app.core.scheduling.sharing.turns import Rota, least_served
from tests.core.pictures import NOW_S, codes, island, moves
from tests.thoroughness import rest_long

POLICY = Policy(half_life_s=0.0, sharers_max=4, tier_share={})
GRAPH = {"graph": True}
MANY = ("a", "b", "c", "d", "e", "a.2", "a2", "b.2", "b2", "a2.2")


def drawn(cells, *, queue="", tasks=None, policy=POLICY, **more):
    """All tasks are graphs, and those that are drawn on devices share them; but for `tasks`."""
    more_of = {name: {**GRAPH, **(tasks or {}).get(name, {})} for name in MANY}
    return island(cells, queue=queue, tasks=more_of, policy=policy, **more)


def shared(names, *, queue="", tasks=None, **more):
    """Several running graphs on one device."""
    picture = drawn(names, queue=queue, tasks=tasks, **more)
    seated = {
        id: replace(task, seats=("d0",), shares=True)
        for id, task in picture.tasks.items()
        if task.seats
    }
    devices = {"d0": picture.devices["d0"]}
    return replace(picture, tasks={**picture.tasks, **seated}, devices=devices)


def test_graph_joins_a_running_graph_and_no_task_is_paused():
    plan = decide(drawn("a'", queue="b"), now_s=NOW_S)
    assert moves(plan) == [("a", "Share"), ("b", "Launch")]
    assert plan.decisions[1].shares
    assert plan.decisions[1].devices == ("d0",)


def test_several_graphs_join_in_one_round_up_to_the_limit_of_the_device():
    plan = decide(drawn("a'", queue="b c d e"), now_s=NOW_S)
    assert moves(plan) == [("a", "Share"), ("b", "Launch"), ("c", "Launch"), ("d", "Launch")]
    assert "e" in plan.reasons


def test_one_graph_of_each_user_takes_turns_and_standby_graphs_fill_the_rest():
    plan = decide(drawn("a'", queue="a b b a2 a2"), now_s=NOW_S)
    assert moves(plan)[1:3] == [("b", "Launch"), ("a2", "Launch")]
    (heir,) = plan.decisions[3:]
    assert (heir.task, heir.shares) == ("b.2", True)  # b has had nothing yet


def test_only_user_has_one_standby_graph():
    plan = decide(drawn("a'", queue="a a"), now_s=NOW_S)
    assert moves(plan) == [("a", "Share"), ("a.2", "Launch")]


@pytest.mark.parametrize(
    "more", [{"epoch": 1}, {"memory_bytes": 2**50}, {"graph": False}, {"width": 2}]
)
def test_graph_that_ran_before_or_does_not_fit_is_no_standby(more):
    picture = drawn("a'", queue="a", tasks={"a.2": more})
    assert moves(decide(picture, now_s=NOW_S)) == []


def test_standby_graph_leaves_when_another_user_joins():
    picture = shared("b a' a", queue="c", used={"c": 8.0}, policy=replace(POLICY, sharers_max=3))
    assert moves(decide(picture, now_s=NOW_S)) == [("a.2", "Pause"), ("c", "Launch")]


def test_standby_graph_has_one_turn_and_then_waits_for_the_graph_before_it():
    board = Board.of(shared("a' a' b'"), now_s=NOW_S)
    shares = time_sharing.shares(board, "d0")
    first = min(shares, key=lambda share: share.place)
    assert first.task == "a"
    here = [share for share in shares if share.task != "b"]
    assert least_served(here, {"a": 10**6, "a.2": 0}) == "a.2"
    assert least_served(here, {"a": 10**6, "a.2": 1}) == "a"
    assert least_served(here[1:], {"a.2": 1}) == "a.2"
    rota = Rota({share.task: share for share in shares})
    assert [task for task in ("a", "a.2", "b", "c") if rota.is_heir(task)] == ["a.2"]


@pytest.mark.parametrize(
    "tasks",
    [
        {"a": {"graph": False}},
        {"b": {"graph": False}},
        {"b": {"memory_bytes": 5_000_000_000}, "a": {"memory_bytes": 5_000_000_000}},
        {"b": {"width_max": 2}},
    ],
)
def test_job_or_graph_that_does_not_fit_shares_no_device(tasks):
    assert moves(decide(drawn("a'", queue="b", tasks=tasks), now_s=NOW_S)) == []


def test_graphs_whose_memory_fills_the_device_exactly_share_it():
    tasks = {name: {"memory_bytes": 4_000_000_000} for name in "ab"}
    assert moves(decide(drawn("a'", queue="b", tasks=tasks), now_s=NOW_S)) == [
        ("a", "Share"),
        ("b", "Launch"),
    ]


def grouped(*groups, queue="", free=0, **more):
    """Each group of running graphs shares a device; then devices that are free."""
    picture = drawn(" ".join(groups), queue=queue, **more)
    device = picture.devices["d0"]
    tasks, names = dict(picture.tasks), iter(sorted(picture.tasks, key=_seat))
    for n, group in enumerate(groups):
        for id in [next(names) for _ in group.split()]:
            alone = len(group.split()) == 1
            tasks[id] = replace(tasks[id], seats=(f"d{n}",), shares=not alone)
    devices = {f"d{n}": replace(device, id=f"d{n}") for n in range(len(groups) + free)}
    return replace(picture, tasks=tasks, devices=devices)


def _seat(id):
    """As it was drawn: "a", "b", "a.2"."""
    return id.partition(".")[2], id


def launches(plan):
    return {d.task: (*d.devices, d.shares) for d in plan.decisions if d.move == "Launch"}


def test_graph_joins_the_device_with_the_least_weight():
    even = decide(drawn("a' b'", queue="c"), now_s=NOW_S)
    assert launches(even) == {"c": ("d0", True)}
    heavy = decide(drawn("a' b'", queue="c", weights={"a": 4}), now_s=NOW_S)
    assert launches(heavy) == {"c": ("d1", True)}


def test_graph_rather_joins_graphs_that_are_ahead():
    ahead = drawn("a' b'", queue="c", used={"b": 4.0}, weights={"b": 2})
    assert launches(decide(ahead, now_s=NOW_S)) == {"c": ("d1", True)}


def test_graph_takes_a_free_device_and_the_next_graph_joins_another():
    plan = decide(drawn("a' .", queue="b c"), now_s=NOW_S)
    assert launches(plan) == {"b": ("d1", False), "c": ("d0", True)}


def test_user_s_next_graph_joins_a_device_where_the_user_has_none():
    plan = decide(drawn("a' b'", queue="a b"), now_s=NOW_S)
    assert launches(plan) == {"a.2": ("d1", True), "b.2": ("d0", True)}


def test_no_task_is_paused_for_a_graph_that_can_share():
    plan = decide(drawn("a b", queue="c", used={"a": 3.0, "b": 3.0, "c": 9.0}), now_s=NOW_S)
    assert launches(plan) == {"c": ("d0", True)}
    assert not any(decision.move == "Pause" for decision in plan.decisions)


def test_graphs_that_share_all_give_way_to_a_job_that_had_less():
    job = {"e": {"graph": False}}
    used = {"a": 9.0, "b": 9.0, "c": 9.0, "d": 9.0}
    plan = decide(grouped("a b'", "c d", queue="e", used=used, tasks=job), now_s=NOW_S)
    assert moves(plan) == [("d", "Pause"), ("c", "Pause"), ("e", "Launch")]
    assert launches(plan) == {"e": ("d1", False)}


def test_gang_gets_devices_when_all_graphs_that_share_them_give_way():
    gang = {"e": {"graph": False, "width": 2}}
    used = {"a": 9.0, "b": 9.0, "c": 9.0, "d": 9.0}
    plan = decide(grouped("a b", "c d", queue="e", used=used, tasks=gang), now_s=NOW_S)
    assert sorted(moves(plan))[:4] == [(id, "Pause") for id in "abcd"]
    assert plan.decisions[-1].devices == ("d0", "d1")
    plan = decide(grouped("a b'", "c d", queue="e", used=used, tasks=gang), now_s=NOW_S)
    assert moves(plan) == []


def test_graph_waits_a_while_for_its_device_until_its_image_is_durable():
    here = {"c": {"epoch": 1, "image_on": "d0", "saved": False, "waiting_since_s": NOW_S - 1}}
    more = {"used": {"b": 4.0}, "tasks": here, "weights": {"b": 2}}
    assert moves(decide(drawn("a' b'", queue="c", **more), now_s=NOW_S)) == []
    here["c"]["waiting_since_s"] = NOW_S - time_sharing.PATIENT_S
    assert launches(decide(drawn("a' b'", queue="c", **more), now_s=NOW_S)) == {"c": ("d0", True)}


def test_graph_far_behind_takes_the_place_of_graphs_that_are_ahead():
    """Users of one tenant, and another tenant that has had as much as they together."""
    picture = shared("a b", queue="a2", used={"a": 20.0, "b": 20.0})
    plan = decide(picture, now_s=NOW_S)
    assert moves(plan) == [("a", "Pause"), ("a2", "Launch")]
    assert launches(plan) == {"a2": ("d0", True)}


def test_graph_gives_up_its_turns_for_a_waiting_job_of_its_tenant():
    """Else the other tenant never would give way, and the job waited for ever."""
    job = {"a2": {"graph": False}}
    plan = decide(shared("a b", queue="a2", used={"a": 9.0, "b": 9.0}, tasks=job), now_s=NOW_S)
    assert moves(plan) == [("a", "Pause")]
    ripe = shared("b", queue="a2 a", used={"a": 9.0, "b": 12.0}, tasks=job)
    assert moves(decide(ripe, now_s=NOW_S)) == [("b", "Pause"), ("a2", "Launch")]


@pytest.mark.parametrize("bound", [{"guarantee": {"cpu": 1}}, {"limit": {"cpu": 1}}])
def test_graph_under_a_guarantee_or_a_limit_does_not_share(bound):
    picture = drawn("a'", queue="b")
    tenants = {**picture.tenants, "b": replace(picture.tenants["b"], **bound)}
    plan = decide(replace(picture, tenants=tenants), now_s=NOW_S)
    assert not any(decision.shares for decision in plan.decisions)


def test_graphs_take_whole_turns_while_a_tier_has_a_promise():
    policy = replace(POLICY, tier_share={"premium": 0.9, "standard": 0.7})
    plan = decide(drawn("a'", queue="b", policy=policy), now_s=NOW_S)
    assert moves(plan) == []
    basic = {"a": {"tier": "basic"}, "b": {"tier": "basic"}}
    plan = decide(drawn("a'", queue="b", policy=policy, tasks=basic), now_s=NOW_S)
    assert moves(plan) == [("a", "Share"), ("b", "Launch")]


def test_graph_far_behind_has_the_device_alone_and_graph_far_ahead_waits():
    behind = decide(drawn("a", queue="b", used={"a": 100.0}), now_s=NOW_S)
    assert moves(behind) == [("a", "Pause"), ("b", "Launch")]
    assert not behind.decisions[1].shares
    ahead = decide(drawn("a'", queue="b", used={"b": 100.0}), now_s=NOW_S)
    assert moves(ahead) == []


def test_graph_does_not_join_before_a_task_that_waits_for_the_whole_device():
    job = {"b": {"graph": False}}
    plan = decide(drawn("a'", queue="b c", used={"c": 0.1}, tasks=job), now_s=NOW_S)
    assert moves(plan) == []
    plan = decide(drawn("a'", queue="b c", used={"b": 0.1}, tasks=job), now_s=NOW_S)
    assert moves(plan) == [("a", "Share"), ("c", "Launch")]


def test_task_gets_the_device_when_all_graphs_that_share_it_had_more():
    job = {"c": {"graph": False}}
    even = shared("a b", queue="c", used={"a": 9.0, "b": 9.0}, tasks=job)
    plan = moves(decide(even, now_s=NOW_S))
    assert sorted(plan) == [("a", "Pause"), ("b", "Pause"), ("c", "Launch")]
    one_has_not = shared("a b", queue="c", used={"a": 9.0, "c": 9.8}, tasks=job)
    assert moves(decide(one_has_not, now_s=NOW_S)) == []
    too_soon = shared("a b'", queue="c", used={"a": 9.0, "b": 9.0}, tasks=job)
    assert moves(decide(too_soon, now_s=NOW_S)) == []


def test_device_is_free_when_the_last_graph_has_left():
    board = Board.of(shared("a b c"), now_s=NOW_S)
    for id in ("b", "a", "c"):
        assert [stay.id for stay in board.group("d0")]
        assert not board.pools["cpu"].free
        board.drop_task(id)
    assert list(board.pools["cpu"].free) == ["d0"]
    assert not board.beside
    assert not board.seated
    tree = board.tree.root
    assert not tree.running
    assert not +tree.held


def test_others_go_on_if_one_graph_is_held_or_cancelled():
    held = {"a": {"cancel_asked": True}}
    plan = decide(shared("a b c", tasks=held), now_s=NOW_S)
    assert moves(plan) == [("a", "Cancel")]
    board = Board.of(shared("a b c", tasks=held), now_s=NOW_S)
    cycle(board)
    assert [stay.id for stay in board.group("d0")] == ["b", "c"]
    assert not board.pools["cpu"].free


def test_all_graphs_are_paused_when_the_device_is_drained():
    picture = shared("a b c")
    drained = {"d0": replace(picture.devices["d0"], cordoned=True)}
    assert moves(decide(replace(picture, devices=drained), now_s=NOW_S)) == [
        ("a", "Pause"),
        ("b", "Pause"),
        ("c", "Pause"),
    ]


def test_graphs_part_when_a_second_device_comes():
    picture = shared("a b", used={"a": 1.0})
    second = replace(picture.devices["d0"], id="d1")
    picture = replace(picture, devices={**picture.devices, "d1": second})
    assert moves(decide(picture, now_s=NOW_S)) == [("a", "Pause")]


def test_graph_far_from_the_others_leaves_them():
    assert moves(decide(shared("a b", used={"a": 100.0}), now_s=NOW_S)) == [("a", "Pause")]
    assert moves(decide(shared("a b", used={"a": 1.0}), now_s=NOW_S)) == []


def test_graph_that_shares_is_charged_by_what_its_device_reported():
    board = Board.of(shared("a b", used={"a": 3.0}), now_s=NOW_S)
    before = board.tree.usage(board.stays["a"].leaf)
    board.at(NOW_S + 100)
    assert board.tree.usage(board.stays["a"].leaf) == before


def test_rota_of_a_device_has_the_order_of_the_island():
    weights = {"a": 1.0, "b": 2.0}
    board = Board.of(shared("a b", used={"a": 2.0, "b": 2.0}, weights=weights), now_s=NOW_S)
    shares = time_sharing.shares(board, "d0")
    booked = {share.task: share.held_us for share in shares}
    assert booked == {"a": 10_000_000, "b": 10_000_000}
    assert least_served(shares, booked) == "b"
    assert least_served(shares, {**booked, "b": booked["b"] + 12_100_000}) == "a"
    assert [level.name for level in shares[0].path] == ["a", "a1"]
    assert time_sharing.shares(Board.of(drawn("a"), now_s=NOW_S), "d0") == []


def test_plan_with_shared_devices_is_the_same_on_a_followed_board():
    picture = drawn("a'", queue="b c d e a2")
    board = Board.of(picture, now_s=NOW_S)
    cycle(board)
    for task in list(board.tasks.values()):
        if task.state == "starting":
            board.set_task(replace(task, state="running", started_s=NOW_S))
    again = Board.of(
        replace(picture, tasks=dict(board.tasks), users=dict(board.users)), now_s=NOW_S
    )
    assert again.seated.keys() == board.seated.keys()
    assert {s.id for s in again.group("d0")} == {s.id for s in board.group("d0")}
    assert again.tree.root.held == board.tree.root.held
    assert cycle(again).decisions == cycle(board).decisions == ()


def test_best_served_graph_leaves_where_more_want_to_share_than_may():
    picture = shared("a b c d", queue="e", used={"b": 2.0, "e": 10.0})
    plan = decide(picture, now_s=NOW_S)
    assert moves(plan) == [("b", "Pause"), ("e", "Launch")]
    assert plan.decisions[1].shares
    too_soon = decide(shared("a' b' c' d'", queue="e"), now_s=NOW_S)
    assert moves(too_soon) == []
    assert codes(too_soon, "e")


def test_user_s_graph_of_higher_priority_takes_the_place_of_the_lower():
    first = {"a.2": {"priority": 5}}
    assert moves(decide(shared("a b", queue="a", tasks=first), now_s=NOW_S)) == [
        ("a", "Pause"),
        ("a.2", "Launch"),
    ]
    assert moves(decide(shared("a' b", queue="a", tasks=first), now_s=NOW_S)) == []


def test_graph_does_not_join_on_a_device_kept_for_a_moving_task():
    picture = drawn("a'", queue="b c")
    moving = replace(picture.tasks["c"], moves_to="d0", stops=True)
    picture = replace(picture, tasks={**picture.tasks, "c": moving})
    assert moves(decide(picture, now_s=NOW_S)) == []


def test_graph_does_not_share_when_turns_are_off():
    picture = drawn("a'", queue="b", policy=replace(POLICY, turns=False))
    assert moves(decide(picture, now_s=NOW_S)) == []


class World:
    """One device and tenants who always have graphs and jobs, played from round to round; in each
    turn one of them may end.
    """

    def __init__(self, dice, users, *, jobs, ends):
        self.dice, self.now_s, self.pauses, self.ends, self.ended = dice, NOW_S, 0, ends, 0
        self.picture = drawn("a*", queue=" ".join([*users, *users, *users]))
        self.picture = replace(
            self.picture,
            tasks={
                id: replace(
                    task, graph=not dice.random() < jobs, state="waiting", seats=(), epoch=0
                )
                for id, task in self.picture.tasks.items()
            },
        )
        self.held_us = dict.fromkeys(self.picture.users, 0)

    def set(self, task, **after):
        tasks = {**self.picture.tasks, task.id: replace(task, **after)}
        self.picture = replace(self.picture, tasks=tasks)

    def round(self):
        device = replace(self.picture.devices["d0"], lease_until_s=self.now_s + 10)
        self.picture = replace(self.picture, devices={"d0": device})
        for task in list(self.picture.tasks.values()):
            if task.state == "starting" and not self.exclusive(task):
                self.set(task, state="running", started_s=self.now_s)
            elif task.state == "pausing":
                out = {"state": "waiting", "seats": (), "started_s": None, "shares": False}
                self.set(task, **out, waiting_since_s=self.now_s, held_us=0)
        for decision in decide(self.picture, now_s=self.now_s).decisions:
            self.obey(self.picture.tasks[decision.task], decision)
        self.check()

    def exclusive(self, task):
        """Is the device not free of others yet?"""
        others = (t for t in self.picture.tasks.values() if t.seats and t.id != task.id)
        return any(not (task.shares and t.shares) for t in others)

    def obey(self, task, decision):
        if decision.move == "Launch":
            seat = {"state": "starting", "seats": decision.devices, "epoch": task.epoch + 1}
            self.set(task, **seat, shares=decision.shares, launched_s=self.now_s)
        elif decision.move == "Share":
            self.set(task, shares=True)
        else:
            assert decision.move == "Pause"
            assert self.now_s - task.started_s >= POLICY.slice_min_s, "before a full slice"
            self.pauses += 1
            self.set(task, state="pausing")

    def check(self):
        board = Board.of(self.picture, now_s=self.now_s)
        on = [t for t in self.picture.tasks.values() if t.state in ("starting", "running")]
        assert {stay.id for stay in board.group("d0")} == {task.id for task in on}
        assert len(on) <= POLICY.sharers_max
        assert len(on) == 1 or all(task.graph and task.shares for task in on)
        assert all(n <= 2 for n in Counter(task.user for task in on).values())
        assert on, "the device stands free"

    def pass_by(self, seconds):
        """The device gives turns, says what each held, and the ledger books it."""
        until_s = self.now_s + seconds
        shares = time_sharing.shares(Board.of(self.picture, now_s=self.now_s), "d0")
        held_us = {share.task: share.held_us for share in shares}
        while self.now_s < until_s:
            on = {t.id: t for t in self.picture.tasks.values() if t.state == "running"}
            here = [share for share in shares if share.task in on]
            if on:
                among = {share.task for share in here}
                id = least_served(shares, held_us, among) if here else next(iter(on))
                self.hold(self.picture.tasks[id], 10_000)
                held_us[id] = on[id].held_us + 10_000
            self.now_s += 0.01

    def hold(self, task, us):
        user = self.picture.users[task.user]
        self.held_us[task.user] += us
        users = {user.id: replace(user, faded_us=user.faded_us + (us << FIXED_POINT_BITS))}
        self.picture = replace(self.picture, users={**self.picture.users, **users})
        self.set(task, held_us=task.held_us + us)
        if self.dice.random() < self.ends:
            self.end(task)

    def end(self, task):
        """Its user has another one instead, at the end of its line."""
        self.ended += 1
        tasks = {id: other for id, other in self.picture.tasks.items() if id != task.id}
        fresh = {"state": "waiting", "seats": (), "epoch": 0, "held_us": 0, "shares": False}
        id = f"{task.user}-{self.ended}"
        tasks[id] = replace(task, id=id, request=id, submitted_s=self.now_s, **fresh)
        tasks[id] = replace(tasks[id], started_s=None, waiting_since_s=self.now_s)
        self.picture = replace(self.picture, tasks=tasks)


@pytest.mark.parametrize("seed", rest_long(range(5), keep=1))
@pytest.mark.parametrize("jobs", [0.0, 0.4])
@pytest.mark.parametrize("ends", [0.0, 0.01])
@pytest.mark.slow
def test_shares_follow_the_weights_and_no_graph_is_paused_too_soon(seed, jobs, ends):
    dice = random.Random(seed)
    world = World(dice, "abcdef"[: dice.randint(2, 6)], jobs=jobs, ends=ends)
    tenants = {
        id: replace(tenant, weight=dice.choice([1000, 2000, 4000]))
        for id, tenant in world.picture.tenants.items()
    }
    world.picture = replace(world.picture, tenants=tenants)
    for _ in range(150):
        world.round()
        world.pass_by(0.5)
    weights = {user: tenants[user[0]].weight for user in world.held_us}
    total_us = sum(world.held_us.values())
    for user, held_us in world.held_us.items():
        due = weights[user] / sum(weights.values())
        assert held_us / total_us == pytest.approx(due, abs=0.08), (user, world.held_us)
