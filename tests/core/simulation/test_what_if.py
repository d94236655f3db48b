"""What a replay is said to show, on cases that are worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest

from app.core.fairness.budget import Budget
from app.core.model.snapshot import BoardDevice, BoardTenant, BoardUser, Policy
from app.core.simulation.device_meter import MOST, Meter
from app.core.simulation.simulator import Arrival, Costs, SimulationStopped, simulate
from app.core.simulation.what_if import POLICIES, Setup, owed_by_tree, policy, quantile, run, spread

NO_FADING = Policy(half_life_s=0)


def tenants(*names: str, **more: object) -> list[BoardTenant]:
    return [BoardTenant(id=f"id {name}", name=name, weight=1000, **more) for name in names]


def arrival(task: str, work_s: float, **more: object) -> Arrival:
    """Of the tenant that the task's first letter names."""
    tenant = f"id {task[0]}"
    return Arrival(**{"at_s": 0.0, "task": task, "tenant": tenant, "user": f"{tenant} u",
                      "work_s": work_s, **more})  # fmt: skip


def setup(*arrivals: Arrival, devices: int = 1, **more: object) -> Setup:
    return Setup(
        arrivals=arrivals,
        devices=[BoardDevice(id=f"d{n}", host="h", kind="cpu") for n in range(devices)],
        tenants=tenants("a", "b"),
        **{"policy": NO_FADING, **more},
    )


# --- the report ---------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["fair-strict", "fifo"])
def test_report_shows_two_jobs_on_one_device_as_they_ran(named: str) -> None:
    # a1 holds the device for 10 s and b1 for the 20 s after that; each is owed half until 10 s.
    _, told = run(setup(arrival("a1", 10), arrival("b1", 20), named=named))
    assert told["policy"] == named
    assert (told["jobs"], told["finished"], told["left_out"], told["pauses"]) == (2, 2, 0, 0)
    waits = {"mean": 5.0, "p50": 0.0, "p95": 10.0, "p99": 10.0, "max": 10.0}
    assert told["wait_s"] == told["lost_s"] == waits
    assert told["slowdown"] == {"p50": 1.0, "p95": 1.017}  # (10 + 600) / 600
    assert (told["lasted_s"], told["device_h"], told["utilisation"]) == (30.0, 0.008, 1.0)
    assert told["fairness_error"] == 0.1667  # half a device for 10 of 30 s
    shares = [(t["tenant"], t["share"], t["fair_share"], t["share_error"]) for t in told["tenants"]]
    assert shares == [("a", 0.3333, 0.1667, 0.1667), ("b", 0.6667, 0.8333, -0.1667)]
    assert [(w["devices"], w["jobs"]) for w in told["widths"]] == [("1", 2)]
    assert told["lost_curve_s"] == [0.0] * 100 + [10.0]
    assert told["over_time"] == {
        "every_s": 1.0,
        "wanted": [2.0] * 10 + [1.0] * 20,
        "held": {"a": [1.0] * 10 + [0.0] * 20, "b": [0.0] * 10 + [1.0] * 20},
    }


DAILY = Budget(grants_us={"cpu": 60_000_000}, period=1, at={100: "pause"})
HELD = replace(DAILY, at={100: "hold"})


@pytest.mark.parametrize(
    ("arrivals", "budgets", "devices", "until_s", "error", "fair_shares"),
    [
        ([arrival("a1", 150)], {"id a": DAILY}, 1, math.inf, 0.0, {"a": 1.0}),
        ([arrival("a1", 150)], {"id a u": DAILY}, 1, math.inf, 0.0, {"a": 1.0}),
        # a2 waits for the next day while a1 runs on, so one of two devices is owed to nobody
        ([arrival("a1", 300), arrival("a2", 9, at_s=100)], {"id a": HELD}, 2, 300, 0.0, {"a": 1.0}),
        # a holds the device for its minute, of which each is owed a half; then b alone is owed it
        (
            [arrival("a1", 90), arrival("b1", 90)],
            *({"id a": DAILY}, 1, 200, 30 / 200, {"a": 0.2, "b": 0.8}),
        ),
    ],
)
def test_tenant_that_its_budget_holds_back_is_owed_nothing(
    arrivals, budgets, devices, until_s, error, fair_shares
) -> None:
    more = {"named": "fair-strict", "budgets": budgets, "until_s": until_s}
    _, told = run(setup(*arrivals, devices=devices, **more))
    assert told["fairness_error"] == error
    shares = {t["tenant"]: t["fair_share"] for t in told["tenants"]}
    assert {name: shares[name] for name in fair_shares} == fair_shares


def test_pauses_and_switches_are_lost_time_too() -> None:
    # A stay that is paused holds the device 1 s longer, one that goes on 2 s before it steps.
    slices = Policy(half_life_s=0, slice_min_s=10, slice_max_s=10)
    costs = Costs(image_s=1, resume_s=2)
    report, told = run(setup(arrival("a1", 60), arrival("b1", 60), policy=slices, costs=costs))
    assert told["pauses"] == sum(report.pauses.values()) > 3
    assert sum(report.device_s.values()) == pytest.approx(120 + 3 * told["pauses"])
    for task, lost_s in report.lost_s.items():
        assert lost_s == pytest.approx(report.finished[task] - 60)


def test_job_that_never_started_is_reported_as_unfinished() -> None:
    _, told = run(setup(arrival("a1", 10), arrival("a2", 10), until_s=5.0, named="fifo"))
    assert (told["jobs"], told["finished"]) == (2, 0)
    assert told["lost_s"] == dict.fromkeys(("mean", "p50", "p95", "p99", "max"))
    assert told["wait_s"]["max"] == 0.0
    assert told["device_h"] == round(5 / 3600, 3)


def test_job_that_can_never_start_is_left_out_with_its_dependents() -> None:
    _, told = run(
        setup(
            arrival("a1", 1, width=3),
            arrival("a2", 1, after=("a1",)),
            arrival("a3", 1, after=("a2",)),
            arrival("a4", 1, kind="cuda"),
            arrival("a5", 1, memory_bytes=8),
            arrival("a6", 1, choice="+fast"),
            arrival("b1", 1, width=2, choice="-spot"),
            devices=2,
        )
    )
    assert (told["left_out"], told["jobs"], told["finished"]) == (6, 1, 1)
    assert [w["devices"] for w in told["widths"]] == ["2-7"]


def test_gang_on_more_hosts_than_have_its_devices_is_left_out() -> None:
    hosts = [BoardDevice(id=f"{h}{n}", host=h, kind="cpu") for h, n in ("g1", "g2", "g3", "h1")]
    fits, wide = (replace(arrival(f"a{n}", 5), width=n, choice="#2") for n in (2, 4))
    _, told = run(replace(setup(fits, wide), devices=hosts))
    assert (told["left_out"], told["finished"]) == (1, 1)


def test_quantiles_are_values_that_occurred() -> None:
    # nearest rank of 1..10: ceil(0.5 * 10) = the 5th, ceil(9.5) = the 10th
    ten = [float(n) for n in range(1, 11)]
    assert (quantile(ten, 50), quantile(ten, 95), quantile([7.0], 99)) == (5.0, 10.0, 7.0)
    assert quantile([], 50) is None
    assert spread([3.0, 1.0]) == {"mean": 2.0, "p50": 1.0, "p95": 3.0, "p99": 3.0, "max": 3.0}


# --- policies -----------------------------------------------------------------------------------


def test_a_policy_by_name_changes_turns_backfill_and_patience_only() -> None:
    given = Policy(half_life_s=5, slice_min_s=3)
    assert policy("fair", given) == given
    easy = replace(given, turns=False, patience_s=math.inf)
    assert policy("fair-easy", given) == policy("fifo-easy", given) == easy
    assert policy("fifo", given) == replace(easy, backfill="strict")
    assert policy("fair-greedy", given) == replace(easy, backfill="greedy")


#: On two devices: a1 holds one until 10 s; a2 and then b1 and b2 come.  a2 needs both.
GANG = (
    arrival("a1", 10, expected_s=10.0),
    arrival("a2", 10, at_s=1.0, width=2, expected_s=10.0),
    arrival("b1", 5, at_s=2.0, expected_s=5.0),
    arrival("b2", 50, at_s=3.0, expected_s=50.0),
)


@pytest.mark.parametrize(
    ("named", "starts"),
    [
        # strict: nobody passes the gang, which starts at 10
        ("fifo", {"a2": 10, "b1": 20, "b2": 20}),
        # EASY: b1 ends by 10 and may pass; b2 would still run then
        ("fifo-easy", {"a2": 10, "b1": 2, "b2": 20}),
        # greedy: whoever fits; the gang waits for b2, from 7 until 57
        ("fifo-greedy", {"a2": 57, "b1": 2, "b2": 7}),
    ],
)
def test_policy_name_says_which_tasks_may_pass_a_gang(named: str, starts: dict[str, float]) -> None:
    report, _ = run(setup(*GANG, devices=2, named=named))
    at_s = {a.task: a.at_s for a in GANG}
    assert {task: report.waits_s[task] + at_s[task] for task in starts} == starts


def test_every_policy_does_all_the_work() -> None:
    for named in POLICIES:
        report, told = run(setup(*GANG, devices=2, named=named))
        assert told["finished"] == 4, named
        assert sum(report.device_s.values()) >= 10 + 20 + 5 + 50


# --- shares -------------------------------------------------------------------------------------

LAB = [
    BoardTenant(id="lab", name="lab", weight=1000),
    BoardTenant(id="x", name="x", weight=1000, parent="lab"),
    BoardTenant(id="y", name="y", weight=3000, parent="lab"),
    BoardTenant(id="z", name="z", weight=1000),
]


def test_entitlement_goes_down_the_tree_by_weight() -> None:
    assert owed_by_tree(8, "cpu", LAB, {"x": 8, "y": 8, "z": 8}) == {"x": 1, "y": 3, "z": 4}


def test_parents_own_demand_counts_as_a_child_of_weight_1() -> None:
    owed = owed_by_tree(8, "cpu", LAB, {"lab": 8, "x": 8, "y": 8, "z": 8})
    fifth = Fraction(4, 5)
    assert owed == {"lab": fifth, "x": fifth, "y": 3 * fifth, "z": 4}


def test_devices_beyond_limits_and_of_idle_tenants_go_to_the_others() -> None:
    capped = [*LAB[:3], replace(LAB[3], limit={"*": 2})]
    assert owed_by_tree(8, "cpu", capped, {"y": 8, "z": 8}) == {"y": 6, "z": 2}


def test_guarantee_is_owed_first() -> None:
    owed = owed_by_tree(8, "cpu", [*LAB[:3], replace(LAB[3], guarantee={"cpu": 6})],
                        {"y": 8, "z": 8})  # fmt: skip
    assert owed == {"y": 2, "z": 6}


# --- the meter ----------------------------------------------------------------------------------

KEY = ("a", "cpu")


def test_a_meter_sums_exactly_between_changes() -> None:
    meter = Meter()
    meter.want(0, KEY, 2)
    meter.hold(500_000, KEY, 1)
    meter.hold(2_250_000, KEY, -1)
    told = meter.intervals(2_500_000)
    assert [i.held.get(KEY, 0.0) for i in told] == [0.5, 1.0, 0.5]  # the last one is half as long
    assert [i.wanted[KEY] for i in told] == [2.0, 2.0, 2.0]
    assert [(i.from_s, i.lasts_s) for i in told] == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.5)]


@pytest.mark.parametrize("lasts_s", [1, 256, 257, 1000, 3_000_000])
def test_long_timeline_is_merged_into_few_intervals_without_loss(lasts_s: int) -> None:
    meter = Meter()
    meter.hold(0, KEY, 3)
    meter.hold(lasts_s * 500_000, KEY, -1)
    told = meter.intervals(lasts_s * 1_000_000)
    assert len(told) <= MOST
    assert sum(i.held[KEY] * i.lasts_s for i in told) == pytest.approx(2.5 * lasts_s)
    assert sum(i.lasts_s for i in told) == pytest.approx(lasts_s)


# --- what `simulate` takes besides --------------------------------------------------------------


def test_a_timeline_that_is_not_kept_changes_nothing_else() -> None:
    work = [arrival(f"{t}{n}", 30) for t in "ab" for n in range(3)]
    one = [BoardDevice(id="d", host="h", kind="cpu")]
    told = [
        simulate(work, one, tenants("a", "b"), Policy(), checked=False, keep_timeline=kept)
        for kept in (True, False)
    ]
    assert told[0].timeline
    assert told[1] == replace(told[0], timeline=())
    assert told[1].pauses


def test_caller_may_stop_a_simulation() -> None:
    work, rounds = [arrival(f"a{n:04}", 1) for n in range(1000)], itertools.count()
    with pytest.raises(SimulationStopped, match=r"stopped at \d+ s with \d+ tasks done") as stopped:
        run(setup(*work), go_on=lambda: next(rounds) < 256)
    assert 0 < stopped.value.done < 1000


def test_users_share_by_their_own_weights() -> None:
    work = [arrival(f"a{user}", 1000, user=user, owner=user) for user in ("u", "v")]
    one = [BoardDevice(id="d", host="h", kind="cpu")]
    users = [BoardUser(id="v", tenant="id a", weight=3000)]
    report = simulate(work, one, tenants("a"), NO_FADING, users=users, until_s=400.0)
    assert report.device_s["u"] == pytest.approx(100, abs=3)
    assert report.device_s["v"] == pytest.approx(300, abs=3)
