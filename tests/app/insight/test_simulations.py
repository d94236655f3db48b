"""POST /v1/simulations: an island's history, or arrivals made up, as it is and as it would be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from app.core.fairness.budget import Budget
from app.core.simulation.simulator import Costs
from app.db.models import (
    Lot,
    Need,
    RequestNeed,
    Reservation,
    ReservationWindow,
    RungResult,
    Tenant,
    User,
)
from app.insight import simulations
from app.scheduling import ledger
from tests.app.conftest import problem
from tests.scenery import Scenery

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HISTORY = {
    "source": "history",
    "island": "isle",
    "since": "2026-11-20T00:00:00Z",
    "until": "2026-11-21T00:00:00Z",
}


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def post(app, scenery):
    client = TestClient(app)
    key = scenery.key(scenery.root, "platform_admin")

    def post(body, key=key):
        headers = {"Authorization": f"Bearer {key}"}
        return client.post("/v1/simulations", json=body, headers=headers)

    return post


def ended(scenery, tenant, *, at_s=0.0, held_s=10.0, **more):
    """A task that was submitted `at_s` after noon and ended within the hour."""
    return scenery.task(
        tenant,
        more.pop("state", "done"),
        submitted_at=NOON + timedelta(seconds=at_s),
        ended_at=NOON + timedelta(hours=1),
        total_held_us=int(held_s * 1e6),
        **more,
    )


def made(tenant="red", work_s=10.0, **more):
    return {"tenant": tenant, "work_s": work_s, **more}


# --- history ------------------------------------------------------------------------------------


def test_history_is_replayed_as_it_was_and_under_another_policy(post, scenery):
    red, blue = scenery.tenant("red"), scenery.tenant("blue")
    scenery.device("d0")
    ended(scenery, red, held_s=10)
    ended(scenery, blue, at_s=1, held_s=20)
    answer = post({**HISTORY, "policy": "fair-strict", "devices": {"cpu": 2}})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["jobs"], told["left_out"]) == (2, 0)
    assert told["since"] == "2026-11-20T00:00:00Z"
    as_is, what_if = told["runs"]
    assert (as_is["run"], as_is["policy"], as_is["devices"]) == ("as is", "fair", {"cpu": 1})
    assert (what_if["run"], what_if["policy"]) == ("what if", "fair-strict")
    assert what_if["devices"] == {"cpu": 2}
    assert what_if["lost_s"]["max"] == 0.0  # each has a device of its own
    assert what_if["lasted_s"] == 21.0
    assert as_is["lasted_s"] == 30.0
    assert {t["tenant"]: t["device_h"] for t in what_if["tenants"]} == {
        "red": round(10 / 3600, 3),
        "blue": round(20 / 3600, 3),
    }


def test_history_is_the_tasks_that_held_a_device_and_ended_in_the_window(post, scenery):
    red = scenery.tenant("red")
    scenery.device("d0")
    ended(scenery, red)
    ended(scenery, red, held_s=0, state="cancelled")
    scenery.task(red, "done", ended_at=NOON - timedelta(days=1), total_held_us=1_000_000)
    scenery.task(red, "running", seat="d0", total_held_us=1_000_000)
    told = post(HISTORY).json()
    assert (told["jobs"], told["left_out"]) == (1, 1)


def test_task_that_needed_another_waits_for_it_in_the_replay(post, scenery):
    red = scenery.tenant("red")
    scenery.device("d0"), scenery.device("d1")
    first, second = ended(scenery, red, held_s=10), ended(scenery, red, held_s=5)
    scenery.add(Need(task_id=second.id, needs_id=first.id))
    [as_is, _] = post(HISTORY).json()["runs"]
    assert as_is["lasted_s"] == 15.0


def test_task_that_came_after_another_request_does_so_in_the_replay(post, scenery):
    red = scenery.tenant("red")
    scenery.device("d0"), scenery.device("d1")
    first, second, third = (ended(scenery, red, held_s=s) for s in (10, 5, 2))
    for task, needed, awaited in ((second, first, "ended"), (third, first, "started")):
        scenery.add(
            RequestNeed(
                task_id=task.id, needs_request_id=needed.request_id, name="first",
                awaited=awaited, otherwise="fail", outcome="met",
            )
        )  # fmt: skip
    [as_is, _] = post(HISTORY).json()["runs"]
    assert as_is["lasted_s"] == 15.0


def test_weights_guarantees_and_limits_change_the_shares(post, scenery):
    red, blue = scenery.tenant("red"), scenery.tenant("blue")
    for n in range(4):
        scenery.device(f"d{n}")
    for tenant in (red, blue):
        for _ in range(8):
            ended(scenery, tenant, held_s=100)

    def shares(**changes):
        _, what_if = post({**HISTORY, **changes}).json()["runs"]
        held = what_if["over_time"]["held"]
        return sum(held["red"][10:90]), sum(held["blue"][10:90])

    same, heavy = shares(), shares(weights={"red": 3.0})
    assert same[0] == pytest.approx(same[1], rel=0.1)
    assert heavy[0] == pytest.approx(3 * heavy[1], rel=0.1)
    limited = shares(limits={"red": {"cpu": 1}})
    assert limited[0] == pytest.approx(80, rel=0.05)
    guaranteed = shares(guarantees={"blue": {"cpu": 3}})
    assert guaranteed[1] == pytest.approx(240, rel=0.1)


def test_tenants_of_one_name_are_shown_with_their_ids(post, scenery):
    red = scenery.tenant("red")
    inner = scenery.tenant("red", parent_id=red.id)
    scenery.device("d0")
    for tenant in (red, inner):
        ended(scenery, tenant, held_s=100)
    found = post({**HISTORY, "weights": {"red": 2.0}})
    problem(found, 422, "validation-error", "/weights/red")
    [as_is, _] = post({**HISTORY, "weights": {f"red ({inner.id})": 2.0}}).json()["runs"]
    assert as_is["jobs"] == 2


def test_cost_of_a_pause_is_the_measured_one(session, scenery):
    red = scenery.tenant("red")
    scenery.device("d0")
    for switch_us, pauses in ((3_000_000, 1), (5_000_000, 2), (9_000_000, 1), (70_000_000, 0)):
        ended(scenery, red, switch_us=switch_us, pauses=pauses)
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=False
    )
    assert scene.resume_s == 5.0  # the median of those that were paused
    assert {arrival.expected_s for arrival in scene.arrivals} == {None}


def test_replay_changes_nothing(post, scenery, session, rows):
    ended(scenery, scenery.tenant("red"))
    scenery.device("d0")
    ledger.base(session)  # it is there since the island's first round
    session.flush()
    before = rows()
    assert post({**HISTORY, "weights": {"red": 2.0}}).status_code == 200
    assert rows() == before


def test_users_have_their_weights_in_the_replay(session, scenery):
    red = scenery.tenant("red")
    scenery.device("d0")
    ended(scenery, red)
    session.scalars(select(User).where(User.tenant_id == red.id)).one().weight_milli = 2500
    session.flush()
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=True
    )
    user = scene.as_is.users[scene.arrivals[0].user]
    assert user.weight == 2500
    assert scene.arrivals[0].expected_s == 10.0


def test_budgets_hold_in_the_replay_from_its_beginning_on(session, scenery):
    """What they have put in force today does not hold: the replay begins with nothing spent."""
    red = scenery.tenant("red")
    red.budget = Budget(grants_us={"cpu": 6_000_000}, period=1, at={100: "pause"}).as_json()
    red.exhausted = {"cpu": "pause"}
    scenery.device("d0")
    ended(scenery, red, held_s=10.0)
    session.flush()
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=True
    )
    as_is, _ = simulations.compare(scene, simulations.WhatIf(), Costs())
    assert as_is["jobs"] == 1
    assert as_is["lost_s"]["mean"] == pytest.approx(12 * 3600 - 6)


def test_tasks_of_a_reservation_of_one_device_run_one_after_the_other_on_it(session, scenery):
    """The other device is free all the time; what is in force today does not hold."""
    red = scenery.tenant("red")
    scenery.device("d0").reserved_by = "elsewhere"
    scenery.device("d1", seen_at=func.now())
    it = Reservation(
        id="r0", name="one", island="isle", tenant_id=red.id, devices={"cpu": 1},
        device_ids=["d1"], labels=[], begins_at=NOON, ends_at=NOON + timedelta(hours=1),
    )  # fmt: skip
    session.add(it)
    session.flush()
    times = {"begins_at": it.begins_at, "ends_at": it.ends_at}
    session.add(ReservationWindow(reservation_id="r0", **times))
    for _ in range(2):
        ended(scenery, red, held_s=50.0, reservation_id="r0", device_choice="@r0")
    session.flush()
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=True
    )
    as_is, fifo = simulations.compare(scene, simulations.WhatIf(policy="fifo"), Costs())
    assert as_is["wait_s"]["max"] == fifo["wait_s"]["max"] == pytest.approx(50, abs=1)


def test_an_empty_history_gives_an_empty_report(post, scenery):
    scenery.device("d0")
    told = post(HISTORY).json()
    assert told["jobs"] == 0
    assert told["runs"][0]["lost_s"]["mean"] is None


# --- arrivals made up ---------------------------------------------------------------------------


def test_invented_jobs_may_name_new_tenants(post, scenery, session):
    scenery.tenant("red", weight_milli=4000)
    scenery.device("d0")
    arrivals = [made(), made("new one", at_s=2.0, devices=1)]
    told = post({"source": "arrivals", "island": "isle", "arrivals": arrivals}).json()
    weights = {t["tenant"]: t["weight"] for t in told["runs"][0]["tenants"]}
    assert weights == {"red": 4.0, "new one": 1.0}
    assert told["since"] is None
    assert session.scalars(select(Tenant).where(Tenant.name == "new one")).all() == []


def test_task_that_needs_more_devices_than_exist_is_left_out(post, scenery):
    scenery.device("d0")
    body = {"source": "arrivals", "island": "isle", "arrivals": [made(devices=2), made()]}
    as_is, what_if = post({**body, "devices": {"cpu": 2}}).json()["runs"]
    assert (as_is["left_out"], as_is["jobs"]) == (1, 1)
    assert (what_if["left_out"], what_if["jobs"]) == (0, 2)


def test_cordoned_devices_take_no_part(post, scenery):
    scenery.device("d0"), scenery.device("d1", cordoned=True)
    body = {"source": "arrivals", "island": "isle", "arrivals": [made()]}
    assert post(body).json()["runs"][0]["devices"] == {"cpu": 1}


# --- who, and what is refused -------------------------------------------------------------------


@pytest.mark.parametrize("role", ["viewer", "member", "tenant_admin"])
def test_only_platform_admins_may_replay(post, scenery, role):
    answer = post(HISTORY, key=scenery.key(scenery.tenant("red"), role))
    problem(answer, 403, "insufficient-scope")


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"island": "nowhere"}, "/island"),
        ({"since": "2026-11-21T00:00:00Z"}, "/since"),
        ({"policy": "random"}, "/policy"),
        ({"weights": {"nobody": 2.0}}, "/weights/nobody"),
        ({"weights": {"red": 0.0}}, "/weights/red"),
        ({"limits": {"a/b": {"cpu": 1}}}, "/limits/a~1b"),
        ({"guarantees": {"red": {"cpu": -1}}}, "/guarantees/red/cpu"),
        ({"guarantees": {"red": {"cpu": 3}}, "limits": {"red": {"cpu": 2}}}, "/limits/red/cpu"),
        ({"devices": {"cpu": 9_999, "cuda": 9_999}}, "/devices"),
        ({"devices": {}}, "/devices"),
        ({"slice_min_s": 100.0, "slice_max_s": 10.0}, "/slice_min_s"),
        ({"half_life_s": -1.0}, "/half_life_s"),
        ({"half_life_s": 5e-324}, "/half_life_s"),
        ({"half_life_s": 0.99}, "/half_life_s"),
        ({"half_life_s": 1e300}, "/half_life_s"),
        ({"arrivals": [made()]}, "/arrivals"),
        ({"source": "arrivals"}, "/arrivals"),
        ({"source": "arrivals", "arrivals": [made()], "island": "nowhere"}, "/island"),
        ({"source": "arrivals", "arrivals": [made(work_s=0.0)]}, "/arrivals/0/work_s"),
        ({"colour": "red"}, "/colour"),
    ],
)
def test_bad_input_is_reported_with_its_pointer(post, scenery, changes, pointer):
    scenery.tenant("red")
    problem(post({**HISTORY, **changes}), 422, "validation-error", pointer)


def test_history_that_is_too_long_is_refused_with_advice(post, scenery, monkeypatch):
    monkeypatch.setattr(simulations, "MOST_ARRIVALS", 2)
    red = scenery.tenant("red")
    for _ in range(3):
        ended(scenery, red)
    body = problem(post(HISTORY), 422, "validation-error", "/since")
    assert "more than 2 tasks ended in that time; choose a shorter time" in body["detail"]


def test_replay_that_takes_too_long_is_abandoned(post, scenery, monkeypatch):
    monkeypatch.setattr(simulations, "BUDGET_S", 0.0)
    scenery.device("d0")
    arrivals = [made(at_s=float(n), work_s=0.5) for n in range(600)]
    answer = post({"source": "arrivals", "island": "isle", "arrivals": arrivals})
    body = problem(answer, 422, "validation-error", "")
    assert "choose a shorter window" in body["detail"]
    assert post({**HISTORY}).status_code == 200  # the next one may be made


def test_one_replay_runs_at_a_time(post, scenery):
    scenery.device("d0")
    with simulations._one_at_a_time:
        problem(post(HISTORY), 409, "conflict-state")
    assert post(HISTORY).status_code == 200


def test_costs_of_switches_are_paid_in_both_runs(session, scenery):
    scenery.tenant("red"), scenery.tenant("blue")
    scenery.device("d0")
    two = [simulations.Made(at_s=0.0, tenant=name, work_s=30.0) for name in ("red", "blue")]
    scene = simulations.of_made(session, "isle", two, durations_known=True)
    what_if = simulations.WhatIf(slice_min_s=5.0, slice_max_s=5.0)
    runs = simulations.compare(scene, what_if, Costs(image_s=1.0, resume_s=1.0))
    for run in runs:
        lasted_s = 60 + 2 * run["pauses"]
        assert run["lasted_s"] == pytest.approx(lasted_s, abs=0.1), run["run"]
    assert runs[1]["pauses"] > runs[0]["pauses"] > 0  # a slice of 1 s grows to 50 times a switch


# --- elastic arrivals ---------------------------------------------------------------------------


def test_invented_elastic_task_grows_while_devices_are_free(post, scenery):
    """40 s of work on two devices: 5 s on one while it may not grow, and 37.5 s on two."""
    scenery.device("d0")
    body = {
        "source": "arrivals",
        "island": "isle",
        "devices": {"cpu": 2},
        "arrivals": [{"tenant": "red", "work_s": 40.0, "devices": 2, "devices_min": 1}],
        "resize_s": 0.0,
    }
    as_is, what_if = post(body).json()["runs"]
    assert (as_is["resizes"], as_is["lasted_s"]) == (0, 80.0)
    assert (what_if["resizes"], what_if["lasted_s"]) == (1, 42.5)
    calm = post({**body, "grow_after_s": 20.0}).json()["runs"][1]
    assert calm["lasted_s"] == 50.0


def test_task_that_needs_more_devices_than_it_can_use_is_refused(post, scenery):
    scenery.device("d0")
    arrival = {"tenant": "red", "work_s": 40.0, "devices": 2, "devices_min": 3}
    answer = post({"source": "arrivals", "island": "isle", "arrivals": [arrival]})
    problem(answer, 422, "validation-error", "/arrivals/0/devices_min")


def test_replay_may_last_thousands_of_half_lives(post, scenery):
    scenery.tenant("red"), scenery.device("d0")
    arrivals = [made("red", 1500.0), made("blue", 1500.0)]
    body = {"source": "arrivals", "island": "isle", "arrivals": arrivals, "half_life_s": 1.0}
    response = post(body)
    assert response.status_code == 200, response.text
    assert [run["finished"] for run in response.json()["runs"]] == [2, 2]


def test_member_of_a_lot_comes_in_place_of_an_earlier_one(session, scenery):
    red = scenery.tenant("red")
    scenery.device("d0")
    lot = scenery.task(red, "done", island=None)
    lot.lot_id = lot.id
    scenery.add(Lot(id=lot.id, count=5, at_once=2))
    which = ({"lot_id": lot.id, "lot_index": index} for index in range(5))
    members = [ended(scenery, red, **each).id for each in which]
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=True
    )
    after = {arrival.task: arrival.after for arrival in scene.arrivals}
    assert [after[id] for id in members] == [(), (), *((id,) for id in members[:3])]


def test_members_of_a_sweep_pause_at_their_rungs_and_their_losers_end_with_it(session, scenery):
    """Three members of which the first has the best loss; the others were stopped at the rung."""
    red = scenery.tenant("red")
    scenery.device("d0"), scenery.device("d1")
    lot = scenery.task(red, "done", island=None)
    lot.lot_id = lot.id
    stop = {"metric": "loss", "goal": "min", "rungs": [10, 30], "keep": 0.33}
    lot.descriptor = {**lot.descriptor, "stop": stop}
    scenery.add(Lot(id=lot.id, count=3, at_once=2))
    members = [
        ended(scenery, red, held_s=held_s, step=step, lot_id=lot.id, lot_index=index, state=state)
        for index, (held_s, step, state) in enumerate(
            [(40.0, 40, "done"), (12.0, 12, "cancelled"), (11.0, 11, "cancelled")]
        )
    ]
    results = [(0, 0, 10, 0.1), (0, 1, 30, 0.05), (1, 0, 10, 0.2), (2, 0, 11, None)]
    for index, rung, step, value in results:
        whose = {"task_id": members[index].id, "lot_id": lot.id}
        scenery.add(RungResult(rung=rung, step=step, value=value, **whose))
    scene, _, _ = simulations.of_history(
        session, "isle", since=NOON, until=NOON + timedelta(days=1), durations_known=True
    )
    arrivals = {arrival.task: arrival for arrival in scene.arrivals}
    marks = [[(m.work_s, m.value) for m in arrivals[one.id].rungs] for one in members]
    assert marks == [[(10.0, 0.1), (30.0, 0.05)], [(10.0, 0.2)], [(11.0, None)]]
    assert {arrivals[one.id].lot for one in members} == {lot.id}
    assert not any(arrival.after for arrival in scene.arrivals), "the lot's room admits them"
    wide = simulations.WhatIf(devices={"cpu": 4})
    for run in simulations.compare(scene, wide, Costs()):
        assert (run["finished"], run["lasted_s"], run["pauses"]) == (3, 40.0, 1), run["run"]
        assert run["device_h"] == round((40 + 10 + 11) / 3600, 3), run["run"]
