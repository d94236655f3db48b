"""The very `decide` of an island, on imaginary devices, over hours of virtual time.

`simulate` itself checks after every step that no seat is promised twice, nobody is paused before a
full slice, no device stands free while somebody could use it, and every wait is explained.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.fairness.usage_decay import (
    FIXED_POINT_BITS,
    LONGEST_HALF_LIFE_S,
    SHORTEST_HALF_LIFE_S,
)
from app.core.model.device_choice import DeviceTraits
from app.core.model.lifecycle import Move
from app.core.model.snapshot import BoardDevice, BoardTask, BoardTenant, Plan, Policy, Snapshot
from app.core.scheduling.cycle import cycle, decide
from app.core.scheduling.stays import HOLDS_A_SEAT, slice_us
from app.core.simulation.simulator import (
    Arrival,
    Costs,
    InvariantBroken,
    Report,
    World,
    check,
    simulate,
)
from tests.core.pictures import NOW_S, island, moves
from tests.core.stays import stays
from tests.thoroughness import examples

REAL = Costs(start_s=0.05, pause_s=0.01, save_s=0.5)


def devices(n: int, **details: object) -> list[BoardDevice]:
    return [BoardDevice(id=f"d{i}", host="h", kind="cpu", **details) for i in range(n)]


def tenants(**weights: float) -> list[BoardTenant]:
    return [BoardTenant(id=id, name=id, weight=int(1000 * w)) for id, w in weights.items()]


def busy(tenant: str, *, at_s: float = 0.0, tasks: int = 3, work_s: float = 1e6) -> list[Arrival]:
    """More work than there is time for."""
    return [
        Arrival(at_s=at_s, task=f"{tenant}{n}", tenant=tenant, user=f"{tenant}1", work_s=work_s)
        for n in range(tasks)
    ]


# --- shares -------------------------------------------------------------------------------------


def test_device_that_is_too_small_for_the_waiting_tasks_stays_free() -> None:
    some = [*devices(1, memory_bytes=8), BoardDevice(id="s", host="h", kind="cpu", memory_bytes=4)]
    work = [replace(task, memory_bytes=8) for task in busy("a", tasks=2)]
    report = simulate(work, some, tenants(a=1), Policy(), until_s=50)
    assert {line.decision.device for line in report.timeline} == {"d0"}


@pytest.mark.parametrize("costs", [Costs(), REAL], ids=["free switches", "real switches"])
@pytest.mark.slow
def test_shares_converge_to_the_weights(costs: Costs) -> None:
    three = tenants(a=1, b=1, c=2)
    work = [*busy("a"), *busy("b"), *busy("c")]
    report = simulate(work, devices(2), three, Policy(), costs=costs, until_s=300, checked=False)
    total_s = sum(report.device_s.values())
    assert total_s > 0.98 * 2 * 300  # F8: switching costs no more than its share
    for tenant, share in (("a", 0.25), ("b", 0.25), ("c", 0.5)):
        assert report.device_s[tenant] / total_s == pytest.approx(share, abs=0.01)


def test_one_device_is_shared_by_four_weights() -> None:
    four = tenants(a=1, b=2, c=4, d=8)
    work = [task for tenant in "abcd" for task in busy(tenant, tasks=1)]
    report = simulate(work, devices(1), four, Policy(), until_s=600)
    for tenant in four:
        share = report.device_s[tenant.id] / sum(report.device_s.values())
        assert share == pytest.approx(tenant.weight / 15000, abs=0.01)


def test_a_tenant_that_comes_late_catches_up_and_then_shares() -> None:
    work = [*busy("a"), *busy("b", at_s=100)]
    both = tenants(a=1, b=1)
    early = simulate(work, devices(1), both, Policy(), until_s=190)
    late = simulate(work, devices(1), both, Policy(), until_s=400)
    assert early.device_s["b"] == pytest.approx(90, abs=2)  # all of it, until both have had 100 s
    assert late.device_s["b"] == pytest.approx(200, abs=3)


def test_faded_usage_is_forgiven() -> None:
    # a has used 1000 s long ago; with a half-life of 10 s that is gone when b comes.
    work = [*busy("a", work_s=1000, tasks=1), *busy("a", at_s=1200), *busy("b", at_s=1200)]
    work = [replace(task, task=f"{task.task}@{task.at_s:g}") for task in work]
    report = simulate(work, devices(1), tenants(a=1, b=1), Policy(half_life_s=10), until_s=1400)
    assert report.device_s["a"] == pytest.approx(1100, abs=5)
    assert report.device_s["b"] == pytest.approx(100, abs=5)


def test_many_tasks_gain_a_tenant_no_larger_share() -> None:
    work = [*busy("a", tasks=50), *busy("b", tasks=1)]
    report = simulate(work, devices(1), tenants(a=1, b=1), Policy(), until_s=200)
    assert report.device_s["a"] == pytest.approx(100, abs=2)


def test_short_tasks_gain_a_tenant_no_larger_share() -> None:
    short = [
        Arrival(at_s=0, task=f"a{n:03}", tenant="a", user="a1", work_s=0.25) for n in range(200)
    ]
    report = simulate(
        [*short, *busy("b")], devices(1), tenants(a=1, b=1), Policy(), until_s=80, checked=False
    )
    assert report.device_s["a"] == pytest.approx(40, abs=2)


def test_users_share_alike_inside_their_tenant() -> None:
    work = [
        Arrival(at_s=0, task=f"{user}{n}", tenant="a", user=user, work_s=1e6)
        for user, tasks in (("u", 9), ("v", 1))
        for n in range(tasks)
    ]
    report = simulate(work, devices(1), tenants(a=1), Policy(), until_s=100)
    v_s = _held_s(report, "v0", until_s=100)
    assert v_s == pytest.approx(50, abs=2)


def _held_s(report: Report, task: str, *, until_s: float) -> float:
    """From the timeline alone: between its launches and its pauses."""
    held_s, since_s = 0.0, None
    for line in report.timeline:
        if line.decision.task == task and line.decision.move == Move.Launch:
            since_s = line.at_s
        elif (
            line.decision.task == task and line.decision.move == Move.Pause and since_s is not None
        ):
            held_s, since_s = held_s + line.at_s - since_s, None
    return held_s + (until_s - since_s if since_s is not None else 0.0)


# --- nobody starves, nobody flutters ------------------------------------------------------------


@pytest.mark.slow
def test_no_tenant_starves_behind_a_stream_of_newcomers() -> None:
    stream = [
        Arrival(at_s=float(n), task=f"s{n:03}", tenant=f"t{n % 5}", user=f"t{n % 5}u", work_s=4)
        for n in range(100)
    ]
    patient = Arrival(at_s=10, task="patient", tenant="z", user="z1", work_s=20)
    everyone = tenants(**{f"t{n}": 1 for n in range(5)}, z=1)
    report = simulate([*stream, patient], devices(2), everyone, Policy(), costs=REAL, checked=False)
    assert len(report.finished) == 101
    assert report.waits_s["patient"] < 5
    assert report.finished["patient"] < 120  # 20 s at a sixth of two devices


def test_turns_are_not_taken_more_often_than_slices_allow() -> None:
    work = [*busy("a", tasks=1), *busy("b", tasks=1)]
    report = simulate(work, devices(1), tenants(a=1, b=1), Policy(slice_min_s=2), until_s=100)
    pauses = [line.at_s for line in report.timeline if line.decision.move == Move.Pause]
    assert len(pauses) > 10
    assert all(later - sooner >= 2 for sooner, later in pairwise(pauses))


def test_a_single_tenant_is_never_interrupted() -> None:
    report = simulate(busy("a", tasks=4, work_s=5), devices(2), tenants(a=1), Policy())
    assert report.pauses == {}
    assert max(report.finished.values()) == pytest.approx(10)


def test_task_starts_when_the_data_it_needs_is_made() -> None:
    chain = [
        Arrival(
            at_s=0,
            task=f"n{n}",
            tenant="a",
            user="a1",
            work_s=1,
            after=(f"n{n - 1}",) if n else (),
        )
        for n in range(5)
    ]
    report = simulate(chain, devices(3), tenants(a=1), Policy())
    assert report.finished == pytest.approx({f"n{n}": n + 1.0 for n in range(5)})


def test_equal_input_gives_an_equal_report() -> None:
    work = [*busy("a"), *busy("b", at_s=3.3), *busy("c", at_s=7)]
    three = tenants(a=1, b=2, c=3)
    first = simulate(work, devices(2), three, Policy(), costs=REAL, until_s=60)
    again = simulate(work[::-1], devices(2), three[::-1], Policy(), costs=REAL, until_s=60)
    assert first == again


def test_broken_invariant_is_reported_with_the_decisions_before_it() -> None:
    world = World(busy("a", tasks=2), devices(1), tenants(a=1), Policy(), Costs())
    world.advance(0)
    seen = world.snapshot()
    plan = cycle(world.board)
    launch = next(d for d in plan.decisions if d.move == Move.Launch)
    world.board.set_task(replace(world.tasks["a1"], state="starting", seats=("d0",), epoch=1))
    twice = replace(plan, decisions=(*plan.decisions, replace(launch, task="a1")))
    world.obey(twice)
    with pytest.raises(
        InvariantBroken, match=r"2000 thousandths of d0 were promised\n(.*\n)*.*Launch a1 d0"
    ):
        check(world, seen, twice)


# --- random islands -----------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(dice=st.randoms(use_true_random=False))
def test_random_islands_keep_all_invariants_and_finish(dice: random.Random) -> None:
    names = "abcd"[: dice.randint(1, 4)]
    some = [
        BoardDevice(
            id=f"d{n}",
            host="h",
            kind=dice.choice(["cpu", "cpu", "cuda"]) if n else "cpu",
            memory_bytes=8 if n == 0 else dice.choice([4, 8]),
            cost=dice.choice([1000, 3000]),
            traits=DeviceTraits(labels=("fast",) if n == 0 else dice.choice([(), ("spot",)])),
        )
        for n in range(dice.randint(1, 4))
    ]
    kinds = sorted({device.kind for device in some})
    arrivals: list[Arrival] = []
    for n in range(dice.randint(1, 25)):
        tenant, kind = dice.choice(names), dice.choice(kinds)
        earlier = [arrival.task for arrival in arrivals]
        arrivals.append(
            Arrival(
                at_s=dice.choice([0.0, dice.uniform(0, 30)]),
                task=f"k{n:02}",
                tenant=tenant,
                user=f"{tenant}{dice.randint(1, 2)}",
                work_s=dice.choice([0.3, 2.0, dice.uniform(0.1, 15)]),
                kind=kind,
                memory_bytes=dice.choice([0, 8]) if kind == "cpu" else 0,
                choice=dice.choice(["", "", "-spot", "+fast"]) if kind == "cpu" else "",
                priority=dice.randint(-1, 1),
                after=tuple(dice.sample(earlier, min(len(earlier), dice.choice([0, 0, 1, 2])))),
            )
        )
    costs = dice.choice([Costs(), REAL, Costs(start_s=1, pause_s=0.2, save_s=3)])
    policy = Policy(half_life_s=dice.choice([0, 5, 604800]), slice_min_s=dice.choice([0.2, 1]))
    report = simulate(
        arrivals, some, tenants(**{name: dice.choice([1, 2, 0.5]) for name in names}), policy,
        costs=costs,
    )  # fmt: skip

    assert set(report.finished) == {arrival.task for arrival in arrivals}
    # Nothing is lost: what was held is the work, each switch, and as much of each start as did not
    # pass while the devices were still held by the task before.
    pauses = sum(report.pauses.values())
    held_s = sum(report.device_s.values())
    held_s -= sum(arrival.work_s for arrival in arrivals)
    held_s -= pauses * (costs.image_s + costs.resume_s)
    assert -0.001 < held_s < (len(arrivals) + pauses) * costs.start_s + 0.001
    for launch, pause in stays(report):
        assert pause - launch >= policy.slice_min_s - 1e-6


SHORT_HALF_LIFE_S = 43.2  # 2,300 of them go by while two tasks of 100,000 s share a device


def test_two_tasks_share_alike_over_thousands_of_half_lives() -> None:
    work = [busy(tenant, tasks=1, work_s=100_000)[0] for tenant in "ab"]
    policy = Policy(half_life_s=SHORT_HALF_LIFE_S, slice_min_s=60, slice_max_s=60)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy, checked=False)
    assert set(report.finished) == {"a0", "b0"}
    ended_s = sorted(report.finished.values())
    assert ended_s[1] == 200_000
    assert ended_s[0] > 199_000, "they took turns to the end"


def test_usage_of_long_ago_is_forgotten_and_the_replay_goes_on() -> None:
    """A gap of a million half-lives, longer than any number should be."""
    work = [*busy("a", tasks=1, work_s=5), *busy("b", at_s=1e6, tasks=2, work_s=5)]
    policy = Policy(half_life_s=SHORTEST_HALF_LIFE_S, slice_min_s=0.2)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy)
    assert report.finished == {"a0": 5, "b0": 1_000_005, "b1": 1_000_010}


#: (half-life in seconds, slice in seconds), weights and costs in thousandths: at their bounds.
HALF_LIVES_S = [0.0, SHORTEST_HALF_LIFE_S, 600.0, 7 * 86400.0, LONGEST_HALF_LIFE_S]
WEIGHTS_MILLI = [1, 1000, 10**9]
COSTS_MILLI = [1, 1000, 10**9]


@settings(max_examples=examples(15))
@given(
    half_life_s=st.sampled_from(HALF_LIVES_S),
    weights=st.lists(st.sampled_from(WEIGHTS_MILLI), min_size=3, max_size=3),
    costs=st.lists(st.sampled_from(COSTS_MILLI), min_size=2, max_size=2),
    starts_s=st.lists(st.sampled_from([0.0, 1.0, 1e5, 3e8]), min_size=6, max_size=6),
)
def test_replays_with_numbers_at_their_bounds_end(
    half_life_s: float, weights: list[int], costs: list[int], starts_s: list[float]
) -> None:
    owners = [BoardTenant(id=id, name=id, weight=w) for id, w in zip("abc", weights, strict=True)]
    some = [
        BoardDevice(id=f"d{n}", host="h", kind="cpu", cost=cost) for n, cost in enumerate(costs)
    ]
    work = [
        Arrival(at_s=at_s, task=f"{id}{n}", tenant=id, user=id, work_s=20.0 + n, width=1 + n // 4)
        for n, (at_s, id) in enumerate(zip(starts_s, "abcabc", strict=True))
    ]
    report = simulate(work, some, owners, Policy(half_life_s=half_life_s), checked=False)
    assert set(report.finished) == {arrival.task for arrival in work}


CELLS = [".", "x", "#", "a", "a'", "a*", "a/", "a!", "b", "b'", "b#", "c", "c2", "a2"]


@settings(max_examples=examples(300))
@given(
    cells=st.lists(st.sampled_from(CELLS), max_size=5),
    queue=st.lists(st.sampled_from(["a", "a2", "b", "c"]), max_size=6),
    used=st.dictionaries(st.sampled_from("abc"), st.integers(0, 30), max_size=3),
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 2, 3]), max_size=2),
    dice=st.randoms(use_true_random=False),
)
def test_a_plan_follows_the_rules_whatever_the_island(
    cells: list[str],
    queue: list[str],
    used: dict[str, float],
    weights: dict[str, float],
    dice: random.Random,
) -> None:
    quiet = island(" ".join(cells), queue=" ".join(queue), used=used, weights=weights)
    drawn = _disturbed(quiet, dice)
    plan = decide(drawn, now_s=NOW_S)
    assert plan == decide(_shuffled(drawn, dice), now_s=NOW_S)
    assert plan.look_again_s is None or plan.look_again_s > NOW_S
    assert sorted(plan.places.values()) == list(range(1, len(plan.places) + 1))
    _check_pauses(drawn, plan)
    _check_seats(drawn, plan)
    _check_nothing_changes_before(drawn, plan)


def _disturbed(drawn: Snapshot, dice: random.Random) -> Snapshot:
    """The same island, with wishes, images, failures and silent devices strewn over it."""
    tasks = {}
    for id, task in drawn.tasks.items():
        task = replace(
            task,
            cancel_asked=dice.random() < 0.1,
            priority=dice.randint(0, 1),
            switch_us=dice.choice([0, 40_000]),
        )
        if dice.random() < 0.1:
            task = replace(task, conditions=replace(task.conditions, hold="user"))
        if task.state == "waiting" and drawn.devices and dice.random() < 0.4:
            device = dice.choice(sorted(drawn.devices))
            task = replace(task, image_on=device, saved=dice.random() < 0.5)
        elif task.state == "waiting" and dice.random() < 0.2:
            task = replace(task, retry_at_s=NOW_S + dice.choice([-1, 2]))
        tasks[id] = task
    devices = {
        id: replace(device, lease_until_s=NOW_S + dice.choice([10, 10, 10, -1]))
        for id, device in drawn.devices.items()
    }
    return replace(drawn, tasks=tasks, devices=devices)


def _shuffled(drawn: Snapshot, dice: random.Random) -> Snapshot:
    def turned(mapping: dict[str, object]) -> dict[str, object]:
        items = list(mapping.items())
        dice.shuffle(items)
        return dict(items)

    return replace(
        drawn,
        tasks=turned(drawn.tasks),
        devices=turned(drawn.devices),
        users=turned(drawn.users),
        tenants=turned(drawn.tenants),
    )


def _check_pauses(drawn: Snapshot, plan: Plan) -> None:
    """F6, by plain arithmetic: after a full slice, and by who stays behind even so."""
    owing = {task.id: task for task in drawn.tasks.values() if task.state in HOLDS_A_SEAT}
    for decision in plan.decisions:
        task = drawn.tasks[decision.task]
        if decision.move == Move.Launch:
            owing[task.id] = replace(task, held_us=0)
            continue
        if decision.move == Move.Pause and decision.against is not None:
            gains = drawn.tasks[decision.against]
            turn_us = slice_us(drawn.policy, task, gains)
            assert task.held_us >= turn_us
            assert (gains.id, "Launch") in moves(plan)
            if task.user == gains.user:
                assert task.priority < gains.priority
            else:
                level = "user" if task.tenant == gains.tenant else "tenant"
                fee_us = slice_us(drawn.policy, gains)  # the turn that it is charged, its own
                mine = _served_us(drawn, owing.values(), getattr(gains, level), level, fee_us)
                assert _served_us(drawn, owing.values(), getattr(task, level), level, 0) > mine
        owing.pop(task.id, None)


def _served_us(
    drawn: Snapshot, owing: Iterable[BoardTask], id: str, level: str, extra_us: int
) -> Fraction:
    """Usage over weight; whoever holds a seat owes what is left of a slice."""
    users = [u for u in drawn.users.values() if id in (u.id, u.tenant)]
    faded_us = sum(user.faded_us for user in users)
    used_us = Fraction(faded_us, 1 << FIXED_POINT_BITS) + extra_us
    for task in owing:
        if getattr(task, level) == id:
            used_us += max(0, slice_us(drawn.policy, task) - task.held_us)
    return used_us / (drawn.tenants[id].weight if level == "tenant" else 1000)


def _check_seats(drawn: Snapshot, plan: Plan) -> None:
    launched = [d.device for d in plan.decisions if d.move == Move.Launch]
    assert len(launched) == len(set(launched))
    gone = {d.task for d in plan.decisions if d.move in (Move.Pause, Move.Lost, Move.Cancel)}
    for decision in plan.decisions:
        if decision.move != Move.Launch:
            continue
        device = drawn.devices[decision.device or ""]
        assert device.up
        assert not device.cordoned
        assert device.lease_until_s > NOW_S
        held = [
            task.id
            for task in drawn.tasks.values()
            if task.seat == device.id and task.state in ("starting", "running")
        ]
        assert set(held) <= gone


def _check_nothing_changes_before(drawn: Snapshot, plan: Plan) -> None:
    """Until `look_again_s` the mere passing of time changes nothing."""
    if plan.look_again_s is None or plan.decisions:
        return
    for part in (0.3, 0.99):
        passed_s = (plan.look_again_s - 0.0011 - NOW_S) * part
        if passed_s <= 0:
            continue
        tasks = {
            id: replace(
                task,
                held_us=task.held_us + int(passed_s * 1e6),
                accrued_us=task.accrued_us + int(passed_s * 1e6),
            )
            if task.state in ("running", "pausing", "stopping")
            else task
            for id, task in drawn.tasks.items()
        }
        later = decide(replace(drawn, tasks=tasks), now_s=NOW_S + passed_s)
        assert later.decisions == ()


# --- one user's own tasks (F8) ------------------------------------------------------------------


def own(task: str, *, at_s: float = 0.0, work_s: float, width: int = 1) -> Arrival:
    return Arrival(at_s=at_s, task=task, tenant="a", user="ann", work_s=work_s, width=width)


def other(tenant: str, *, work_s: float) -> Arrival:
    return Arrival(at_s=0.0, task=tenant, tenant=tenant, user=f"{tenant}1", work_s=work_s)


@pytest.mark.parametrize("width", [1, 2])
def test_a_short_task_starts_at_once_behind_a_long_one_that_had_its_minute(width: int) -> None:
    work = [own("long", work_s=7200, width=width), own("short", at_s=100, work_s=1.5)]
    report = simulate(work, devices(width), tenants(a=1), Policy(), costs=REAL)
    assert report.waits_s["short"] < 1
    assert report.finished["long"] < 7202 * 1.02, "what it lost is the short task and a switch"


def test_a_short_task_starts_within_a_minute_behind_a_long_one_that_just_started() -> None:
    work = [own("long", work_s=7200), own("short", at_s=10, work_s=1.5)]
    report = simulate(work, devices(1), tenants(a=1), Policy(), costs=REAL)
    assert report.waits_s["short"] <= 61


@pytest.mark.slow
@pytest.mark.parametrize("slice_s", [1.0, 5.0, 30.0])
def test_a_short_task_passes_its_users_long_one_while_another_tenant_takes_turns(slice_s) -> None:
    """The other tenant ends each turn of the long task long before it has held for a minute."""
    work = [own("long", work_s=3600), other("b", work_s=3600), own("short", at_s=10, work_s=1.5)]
    policy = Policy(slice_min_s=slice_s, slice_max_s=slice_s)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy, costs=REAL, until_s=400)
    first_minute_s = 2 * 60
    assert report.waits_s["short"] <= first_minute_s + 2 * slice_s + 2
    assert report.waits_s["short"] >= first_minute_s / 2, "the long task is older, until then"


def test_short_tasks_and_a_long_one_of_their_user_alternate_while_others_take_turns() -> None:
    short = [own(f"s{n:02}", at_s=130 + 20.0 * n, work_s=4) for n in range(20)]
    work = [own("long", work_s=600), other("b", work_s=3600), *short]
    policy = Policy(slice_min_s=5, slice_max_s=5)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy, costs=REAL)
    assert max(report.waits_s[one.task] for one in short) < 40
    assert report.finished["long"] < 2 * (600 + 20 * 4) + 60


@pytest.mark.slow
def test_a_long_task_gets_turns_while_its_user_asks_for_more_than_the_user_can_have() -> None:
    """The short tasks alone need 4 s of 5; the user's share is a half."""
    short = [own(f"s{n:03}", at_s=130 + 5.0 * n, work_s=4) for n in range(300)]
    work = [own("long", work_s=240), other("b", work_s=9000), *short]
    policy = Policy(slice_min_s=5, slice_max_s=5)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy, costs=REAL, checked=False)
    share_of_the_long_task = (240 - 60) / (0.5 * (report.finished["long"] - 120))
    assert share_of_the_long_task > 0.1


def test_tasks_of_one_request_end_one_after_the_other_while_others_take_turns() -> None:
    sweep = [replace(own(f"t{n}", work_s=100), request="sweep") for n in range(3)]
    work = [*sweep, other("b", work_s=3600)]
    policy = Policy(slice_min_s=5, slice_max_s=5)
    report = simulate(work, devices(1), tenants(a=1, b=1), policy, costs=REAL)
    ends_s = [report.finished[f"t{n}"] for n in range(3)]
    assert ends_s == pytest.approx([200, 400, 600], rel=0.05)


def test_a_short_gang_takes_the_place_of_two_long_tasks_of_its_user() -> None:
    work = [own("a", work_s=600), own("b", work_s=600), own("gang", at_s=90, work_s=9, width=2)]
    report = simulate(work, devices(2), tenants(a=1), Policy(), costs=REAL)
    assert report.waits_s["gang"] < 1


def test_equal_tasks_of_one_user_lose_no_more_than_switches() -> None:
    work = [own(f"t{n}", work_s=600) for n in range(10)]
    report = simulate(work, devices(1), tenants(a=1), Policy(), costs=REAL)
    assert report.until_s < 6000 * 1.02
    assert sum(report.pauses.values()) <= 2 * len(work), "a task has one first minute"


def test_the_older_of_two_long_tasks_ends_first() -> None:
    work = [own("older", work_s=3600), own("newer", at_s=100, work_s=3600)]
    report = simulate(work, devices(1), tenants(a=1), Policy(), costs=REAL)
    assert report.finished["older"] < 3600 + 62
    assert report.pauses == {"older": 1, "newer": 1}


def test_many_tasks_of_one_request_run_one_after_the_other() -> None:
    world = World([own(f"t{n}", work_s=300) for n in range(3)], devices(1), tenants(a=1),
                  Policy(), Costs())  # fmt: skip
    world.advance(0)
    for task in list(world.tasks.values()):
        world.board.set_task(replace(task, request="sweep"))
    for _ in range(2):
        world.obey(cycle(world.board))
        at_us = world.next_us()
        assert at_us is not None
        world.advance(at_us)
    world.advance(200_000_000)
    assert cycle(world.board).decisions == ()


@pytest.mark.slow
def test_a_stream_of_short_tasks_leaves_the_long_one_half_of_the_time() -> None:
    short = [own(f"s{n:03}", at_s=100 + 3.0 * n, work_s=3) for n in range(200)]
    work = [own("long", work_s=600), *short]
    report = simulate(work, devices(1), tenants(a=1), Policy(), costs=REAL)
    assert report.finished["long"] < 600 + 600 + 60
