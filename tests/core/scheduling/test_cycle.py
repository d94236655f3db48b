"""`decide` on drawn islands: one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.explanation.waiting_reasons import bound
from app.core.model.snapshot import BoardTask, Conditions, Plan, Policy, Snapshot
from app.core.scheduling.cycle import decide
from app.core.scheduling.stays import slice_us
from tests.core.pictures import NOW_S, SECOND, codes, island, moves, seats


def plan(snapshot: Snapshot) -> Plan:
    return decide(snapshot, now_s=NOW_S)


def with_device(snapshot: Snapshot, id: str, **changes: object) -> Snapshot:
    devices = {**snapshot.devices, id: replace(snapshot.devices[id], **changes)}
    return replace(snapshot, devices=devices)


# --- F3: who goes next --------------------------------------------------------------------------


def test_a_free_device_goes_to_the_tenant_who_used_least() -> None:
    assert seats(plan(island(".", queue="a b", used={"a": 2, "b": 1}))) == "d0: b"


def test_usage_counts_by_weight() -> None:
    drawn = island(".", queue="a b", used={"a": 3, "b": 2}, weights={"a": 2})
    assert seats(plan(drawn)) == "d0: a"  # 3/2 < 2/1


def test_a_tie_goes_to_the_oldest() -> None:
    assert seats(plan(island(".", queue="b a"))) == "d0: b"


def test_least_served_user_of_a_tenant_goes_first() -> None:
    assert seats(plan(island(".", queue="a1 a2", used={"a1": 2, "a2": 1}))) == "d0: a2"


def test_priority_goes_before_age_among_tasks_of_one_user() -> None:
    urgent = {"a.2": {"priority": 5}}
    assert seats(plan(island(".", queue="a a", tasks=urgent))) == "d0: a.2"


def test_launch_counts_for_the_next_pick_of_the_same_round() -> None:
    # a is ahead by half a slice; after one launch it owes a whole one, so b comes second.
    assert seats(plan(island(". .", queue="a a b", used={"b": 0.5}))) == "d0: a  d1: b"


def test_running_task_is_charged_before_the_ledger_has_booked_it() -> None:
    drawn = island("a' .", queue="a b", used={"b": 0.9})
    # a holds 0.5 s and owes the full slice of 1 s; b has used 0.9.
    assert seats(plan(drawn)) == "d1: b"


def test_tenant_that_waits_for_one_kind_blocks_no_turn_on_another_kind() -> None:
    cuda = {"kind": "cuda"}
    drawn = island(
        "a1 b",
        queue="a2 c",
        used={"a1": 0, "a2": 200, "b": 9000, "c": 1000},
        tasks={"b": cuda, "c": cuda},
    )
    # On cpu a2 waits for a1 of its own tenant, who had less; c has had less than b on cuda.
    assert seats(plan(with_device(drawn, "d1", kind="cuda"))) == "d1: b>c"


# --- where --------------------------------------------------------------------------------------


def test_task_resumes_on_the_device_with_its_image() -> None:
    image = {"a": {"image_on": "d1"}}
    assert seats(plan(island(". .", queue="a", tasks=image))) == "d1: a"


def test_task_waits_for_its_device_until_its_image_is_durable() -> None:
    image = {"a": {"image_on": "d0", "saved": False}}
    drawn = island("b' .", queue="a", tasks=image)
    assert seats(plan(drawn)) == ""
    assert "IMAGE_BEING_SAVED" in codes(plan(drawn), "a")


def test_a_frozen_command_waits_for_its_device_although_its_folder_is_durable() -> None:
    frozen = {"a": {"image_on": "d0", "saved": True, "restarts": True}}
    drawn = island("b' .", queue="a", tasks=frozen)
    assert seats(plan(drawn)) == ""
    assert "FROZEN_ON_DEVICE" in codes(plan(drawn), "a")


def test_a_frozen_command_begins_again_elsewhere_if_its_device_is_drained_or_lost() -> None:
    frozen = {"a": {"image_on": "d0", "saved": True, "restarts": True}}
    drained = with_device(island(". .", queue="a", tasks=frozen), "d0", cordoned=True)
    assert seats(plan(drained)) == "d1: a"
    assert seats(plan(island("x .", queue="a", tasks=frozen))) == "d1: a"


def test_a_frozen_command_whose_folder_is_not_kept_yet_stays_even_while_drained() -> None:
    frozen = {"a": {"image_on": "d0", "saved": False, "restarts": True}}
    drained = with_device(island(". .", queue="a", tasks=frozen), "d0", cordoned=True)
    assert seats(plan(drained)) == ""


GANG = {"width": 2, "one_host": True, "image_on": "d1", "image_with": ("d3",), "restarts": True}


@pytest.mark.parametrize("saved", [True, False])
def test_a_frozen_command_of_several_devices_goes_on_only_where_all_its_processes_are(
    saved,
) -> None:
    frozen = {"a": {**GANG, "saved": saved}}
    (launch,) = plan(island(". . . .", queue="a", tasks=frozen)).decisions
    assert launch.devices == ("d1", "d3")
    waits = island(". . . b'", queue="a", tasks=frozen)
    assert seats(plan(waits)) == ""
    assert ("FROZEN_ON_DEVICE" in codes(plan(waits), "a")) == saved
    replaces = plan(island(". . . b", queue="a", tasks=frozen, used={"b": 50.0}))
    assert moves(replaces) == [("b", "Pause"), ("a", "Launch")]
    assert replaces.decisions[1].devices == ("d1", "d3")


@pytest.mark.parametrize("row", [". . . x", ". . . #"])
def test_a_frozen_command_begins_again_elsewhere_if_one_of_its_devices_is_gone(row) -> None:
    frozen = {"a": {**GANG, "saved": True}}
    (launch,) = plan(island(row, queue="a", tasks=frozen)).decisions
    assert set(launch.devices) <= {"d0", "d1", "d2"}
    assert len(launch.devices) == 2


def test_a_frozen_command_waits_for_its_folder_while_its_home_device_is_alive() -> None:
    frozen = {"a": {**GANG, "saved": False}}
    waits = plan(island(". . . x", queue="a", tasks=frozen))
    assert (moves(waits), codes(waits, "a")[0]) == ([], "IMAGE_BEING_SAVED")
    assert seats(plan(island(". x . .", queue="a", tasks=frozen))) != ""  # it is lost


def test_a_command_that_loses_a_further_device_keeps_the_others_until_it_is_paused() -> None:
    held = {"seats": ("d0", "d1", "d2"), "width": 3, "one_host": True, "restarts": True}
    drawn = island("a . .", tasks={"a": held})
    assert moves(plan(with_device(drawn, "d1", lease_until_s=0.0))) == [("a", "Pause")]
    pausing = island("a/ . .", tasks={"a": held})
    again = plan(with_device(pausing, "d1", lease_until_s=0.0))
    assert moves(again) == []
    homeless = plan(with_device(drawn, "d0", lease_until_s=0.0))
    assert moves(homeless)[0] == ("a", "Lost")


def test_a_command_of_several_devices_leaves_all_at_once_if_one_is_drained() -> None:
    held = {"seats": ("d0", "d2"), "width": 2, "one_host": True}
    drained = plan(island("a . #", tasks={"a": held}))
    assert moves(drained) == [("a", "Pause")]
    assert drained.decisions[0].devices == ("d0", "d2")


def test_task_goes_on_elsewhere_when_its_image_is_lost_with_its_device() -> None:
    image = {"a": {"image_on": "d0", "saved": False}}
    assert seats(plan(island("x .", queue="a", tasks=image))) == "d1: a"


def test_task_that_fits_anywhere_leaves_the_device_to_a_pinned_task() -> None:
    image = {"b": {"image_on": "d0", "saved": False}}
    assert seats(plan(island(". .", queue="a b", tasks=image))) == "d0: b  d1: a"


def test_slot_that_is_being_vacated_is_given_away_once() -> None:
    assert seats(plan(island("a/", queue="b c"))) == "d0: b"
    starting = {"b": {"seats": ("d0",)}}
    assert seats(plan(island("a/ b*", queue="c", tasks=starting))) == "d1: c"


def test_an_empty_device_is_taken_before_one_being_vacated() -> None:
    assert seats(plan(island("a/ .", queue="b"))) == "d1: b"


@pytest.mark.parametrize("cell", ["x", "#"])
def test_a_device_that_is_down_or_cordoned_gets_nothing(cell: str) -> None:
    assert seats(plan(island(cell, queue="a"))) == ""


def test_a_device_whose_lease_ended_gets_nothing() -> None:
    drawn = with_device(island(".", queue="a"), "d0", lease_until_s=NOW_S)
    assert seats(plan(drawn)) == ""
    assert codes(plan(drawn), "a") == ["NO_DEVICE_UP"]


def test_device_must_have_kind_and_memory_or_the_next_task_gets_it() -> None:
    wants = {"a": {"memory_bytes": 9_000_000_000}, "b": {"kind": "cuda"}}
    assert seats(plan(island(".", queue="a b c", tasks=wants))) == "d0: c"


# --- F6, F8: taking turns -----------------------------------------------------------------------


def test_best_served_task_gives_way_after_a_full_slice() -> None:
    assert seats(plan(island("a", queue="b"))) == "d0: a>b"


def test_no_task_gives_way_before_a_full_slice() -> None:
    assert seats(plan(island("a'", queue="b", used={"a": 100}))) == ""


@pytest.mark.parametrize(
    ("used_by_b", "drawn"),
    [
        (8.9, "d0: a>b"),  # a has held 10 s: 10 > 8.9 + 1
        (9.0, ""),  # 10 > 9 + 1 does not hold: an equal stays
        (9.1, ""),
    ],
)
def test_victim_must_still_be_better_served_after_the_change(used_by_b: float, drawn: str) -> None:
    assert seats(plan(island("a", queue="b", used={"b": used_by_b}))) == drawn


def test_most_over_served_task_gives_way() -> None:
    assert seats(plan(island("a b", queue="c", used={"b": 5}))) == "d1: b>c"


def test_waiting_task_takes_its_turn_where_its_image_is() -> None:
    image = {"c": {"image_on": "d0"}}
    assert seats(plan(island("a b", queue="c", used={"b": 5}, tasks=image))) == "d0: a>c"


def test_users_of_a_tenant_take_turns_by_their_own_usage() -> None:
    assert seats(plan(island("a1", queue="a2"))) == "d0: a1>a2"
    assert seats(plan(island("a1", queue="a2", used={"a2": 9.5}))) == ""


def test_tasks_of_one_user_give_way_only_to_a_higher_priority() -> None:
    assert seats(plan(island("a", queue="a"))) == ""
    assert seats(plan(island("a", queue="a", tasks={"a.2": {"priority": 1}}))) == "d0: a>a.2"


def test_two_turns_in_one_round_leave_no_victim_worse_served_than_the_winner() -> None:
    # c gains one device; a second one would make it better served than b.
    drawn = island("a b", queue="c c", used={"a": 20, "c": 8.5})
    assert seats(plan(drawn)) == "d0: a>c"  # c: 9.5, then 10.5 > 10


def test_the_pause_is_decided_before_the_launch_that_needs_it() -> None:
    assert moves(plan(island("a", queue="b"))) == [("a", "Pause"), ("b", "Launch")]


def test_a_free_device_is_taken_rather_than_a_held_one() -> None:
    assert seats(plan(island("a .", queue="b"))) == "d1: b"


@pytest.mark.parametrize(
    ("switch_us", "expected_s"),
    [
        (0, 1.0),  # never below slice_min_s
        (100_000, 5.0),  # 0.1 s / 2 %
        (10_000_000, 500.0),
        (20_000_000, 600.0),  # never above slice_max_s
    ],
)
def test_slice_is_so_long_that_switching_costs_at_most_its_share(
    switch_us: int, expected_s: float
) -> None:
    task = island("", queue="a").tasks["a"]
    costly = replace(task, switch_us=switch_us)
    assert slice_us(Policy(), task, costly) == int(expected_s * SECOND)


# --- wishes -------------------------------------------------------------------------------------


def held(task: BoardTask) -> dict[str, object]:
    return {"conditions": replace(task.conditions, hold="user")}


def test_a_cancelled_task_that_waits_ends_at_once() -> None:
    drawn = island(".", queue="a", tasks={"a": {"cancel_asked": True}})
    assert moves(plan(drawn)) == [("a", "Cancel")]


@pytest.mark.parametrize("cell", ["a", "a*", "a/"])
def test_cancelled_running_task_is_told_to_stop_and_its_slot_is_given_away(cell: str) -> None:
    drawn = island(cell, queue="b", tasks={"a": {"cancel_asked": True}})
    assert moves(plan(drawn)) == [("a", "Cancel"), ("b", "Launch")]


def test_a_task_is_told_to_stop_only_once() -> None:
    drawn = island("a!", tasks={"a": {"cancel_asked": True}})
    assert moves(plan(drawn)) == []


def test_hold_pauses_a_running_task_and_blocks_a_waiting_task() -> None:
    hold = {"conditions": Conditions(hold="user")}
    running = island("a .", tasks={"a": hold})
    assert moves(plan(running)) == [("a", "Pause")]
    waiting = island(".", queue="a", tasks={"a": hold})
    assert moves(plan(waiting)) == [("a", "Locked")]
    assert codes(plan(waiting), "a") == ["HELD_BY_USER"]


def test_a_starting_task_is_held_once_it_runs() -> None:
    assert moves(plan(island("a*", tasks={"a": {"conditions": Conditions(hold="user")}}))) == []


def test_a_drained_device_is_emptied() -> None:
    decided = plan(island("a#", queue="b"))
    assert [(d.task, d.move, d.rule) for d in decided.decisions] == [("a", "Pause", "drain")]
    assert codes(decided, "b") == ["DEVICE_DRAINED"]


# --- start conditions ---------------------------------------------------------------------------

BLOCKED = {"state": "blocked"}


@pytest.mark.parametrize(
    ("conditions", "moves_", "codes_"),
    [
        (Conditions(), [("a", "Unlocked"), ("a", "Launch")], None),
        (Conditions(waits_for=("z",)), [], ["DEPENDENCY"]),
        (Conditions(not_before_s=NOW_S + 1), [], ["NOT_BEFORE"]),
        (Conditions(not_before_s=NOW_S), [("a", "Unlocked"), ("a", "Launch")], None),
        (Conditions(hold="admin"), [], ["HELD_BY_ADMIN"]),
        (Conditions(reservation="planned"), [], ["OUTSIDE_RESERVATION"]),
        (Conditions(reservation="ended"), [], ["RESERVATION_OVER"]),
        (
            Conditions(waits_for=("z",), not_before_s=NOW_S + 1, hold="user"),
            [],
            ["HELD_BY_USER", "DEPENDENCY", "NOT_BEFORE"],
        ),
        (Conditions(waits_for=("y",), broken=("z",)), [("a", "GaveUp")], None),
    ],
)
def test_a_task_starts_when_all_its_conditions_hold(
    conditions: Conditions, moves_: list[tuple[str, str]], codes_: list[str] | None
) -> None:
    drawn = island(".", queue="a", tasks={"a": {**BLOCKED, "conditions": conditions}})
    decided = plan(drawn)
    assert moves(decided) == moves_
    assert decided.reasons == {} if codes_ is None else codes(decided, "a") == codes_


@pytest.mark.parametrize("standing", ["planned", "ended"])
def test_running_task_is_paused_when_the_window_of_its_reservation_ends(standing: str) -> None:
    outside = {"conditions": Conditions(reservation=standing)}
    decided = plan(island("a", tasks={"a": outside}))
    assert [(d.task, d.move, d.rule) for d in decided.decisions] == [("a", "Pause", "reservation")]


def test_running_task_is_paused_when_its_input_cannot_come() -> None:
    cannot = {"conditions": Conditions(broken=("z",))}
    decided = plan(island("a", tasks={"a": cannot}))
    assert [(d.task, d.move, d.rule) for d in decided.decisions] == [("a", "Pause", "needs")]


def test_a_task_that_failed_waits_for_its_next_attempt() -> None:
    drawn = island(".", queue="a", tasks={"a": {"retry_at_s": NOW_S + 4, "attempts": 1}})
    decided = plan(drawn)
    assert moves(decided) == []
    assert codes(decided, "a") == ["RETRY_BACKOFF"]
    assert decided.look_again_s == NOW_S + 4


def test_round_is_due_again_when_a_condition_is_met_by_time() -> None:
    later = {**BLOCKED, "conditions": Conditions(not_before_s=NOW_S + 3)}
    assert plan(island(".", queue="a", tasks={"a": later})).look_again_s == NOW_S + 3


# --- lost ---------------------------------------------------------------------------------------


def test_task_on_a_device_with_an_ended_lease_is_lost_and_goes_on_elsewhere() -> None:
    drawn = with_device(island("a ."), "d0", lease_until_s=NOW_S)
    assert moves(plan(drawn)) == [("a", "Lost"), ("a", "Launch")]
    assert seats(plan(drawn)) == "d1: a"
    told = plan(drawn).decisions[0].because
    assert told == "The lease of d0 expired without a heartbeat."


def test_a_lost_device_is_waited_for_as_long_as_the_policy_says() -> None:
    patient = Policy(half_life_s=0, lost_grace_s=5)
    drawn = with_device(island("a", policy=patient), "d0", lease_until_s=NOW_S - 4)
    assert moves(plan(drawn)) == []
    assert plan(drawn).look_again_s == NOW_S + 1


def test_a_lost_device_with_long_steps_is_waited_for_as_long_as_its_grace_lasts() -> None:
    drawn = with_device(island("a ."), "d0", lease_until_s=NOW_S - 4, grace_s=5)
    assert moves(plan(drawn)) == []
    assert plan(drawn).look_again_s == NOW_S + 1
    over = with_device(island("a ."), "d0", lease_until_s=NOW_S - 5, grace_s=5)
    assert moves(plan(over)) == [("a", "Lost"), ("a", "Launch")]


@pytest.mark.parametrize("silent", [("d0", "d1"), ("d1",)])
def test_a_task_on_two_devices_is_lost_after_the_longer_grace(silent: tuple[str, ...]) -> None:
    """Its step runs on d0, which has the grace; d1 was lent to it."""
    drawn = island("a .", tasks={"a": {"seats": ("d0", "d1"), "width": 2}})
    drawn = with_device(drawn, "d0", grace_s=5)
    for id in silent:
        drawn = with_device(drawn, id, lease_until_s=NOW_S - 4)
    assert ("a", "Lost") not in moves(plan(drawn))
    for id in silent:
        drawn = with_device(drawn, id, lease_until_s=NOW_S - 5)
    assert moves(plan(drawn))[0] == ("a", "Lost")


def test_a_device_in_its_grace_gets_no_new_task() -> None:
    drawn = with_device(island(".", queue="a"), "d0", lease_until_s=NOW_S - 4, grace_s=5)
    assert moves(plan(drawn)) == []


@pytest.mark.parametrize("cell", ["a*", "a", "a/", "a!"])
def test_a_task_is_lost_whatever_it_did(cell: str) -> None:
    drawn = with_device(island(cell), "d0", lease_until_s=0.0)
    assert moves(plan(drawn))[0] == ("a", "Lost")


def test_a_cancelled_task_that_is_lost_is_not_launched_again() -> None:
    drawn = with_device(island("a .", tasks={"a": {"cancel_asked": True}}), "d0", lease_until_s=0.0)
    assert moves(plan(drawn)) == [("a", "Lost"), ("a", "Cancel")]


def test_task_on_an_unknown_device_is_lost() -> None:
    assert moves(plan(island("a", tasks={"a": {"seats": ("gone",)}})))[0] == ("a", "Lost")


# --- F10: explain -------------------------------------------------------------------------------


def test_places_follow_the_order_of_picks() -> None:
    decided = plan(island("z'", queue="a a b c", used={"c": 1.5}))
    # a 0, b 0 -> a (older), then b 0, then a 1, then c 1.5
    assert decided.places == {"a": 1, "b": 2, "a.2": 3, "c": 4}


def test_reason_says_that_the_tenant_had_more_and_names_no_other() -> None:
    decided = plan(island("b", queue="a a", used={"a": 50}))
    assert codes(decided, "a") == ["WAITING_FOR_DEVICE", "TENANT_OVER_FAIR_SHARE"]
    told = decided.reasons["a"][1].message
    assert told == (
        "Your tenant has used more than its share recently (51 vs 10 device-seconds per weight)."
    )
    assert codes(decided, "a.2") == [
        "WAITING_FOR_DEVICE",
        "TENANT_OVER_FAIR_SHARE",
        "EARLIER_TASK_AHEAD",
    ]


@pytest.mark.parametrize(
    ("used", "more"), [(838, "1"), (838.5, "1"), (839.5, "2"), (843, "5"), (843.5, "10")]
)
def test_reason_gives_the_difference_of_two_equal_looking_numbers(used: float, more: str) -> None:
    told = plan(island("b", queue="a", used={"a": used, "b": 829})).reasons["a"][1].message
    assert told == (
        "Your tenant has used more than its share recently "
        f"(up to {more} device-seconds per weight more than those who run)."
    )


def test_bound_is_rounded_up_never_down() -> None:
    assert [bound(s) for s in (0, 1, 1.1, 4, 6, 12, 50, 51, 700)] == [
        1, 1, 2, 5, 10, 20, 50, 100, 1000
    ]  # fmt: skip


def test_reason_counts_users_and_priorities_before_the_task() -> None:
    urgent = {"a": {"priority": 1}}
    decided = plan(island("z'", queue="a a a2", used={"a1": 3, "z": 100}, tasks=urgent))
    assert codes(decided, "a.2") == [
        "WAITING_FOR_DEVICE",
        "USER_OVER_FAIR_SHARE",
        "HIGHER_PRIORITY_AHEAD",
    ]


@pytest.mark.parametrize("cells", ["", "x", "x x"])
def test_reason_says_that_no_device_of_the_kind_is_up(cells: str) -> None:
    assert codes(plan(island(cells, queue="a")), "a") == ["NO_DEVICE_UP"]


def test_reasons_stay_the_same_while_nothing_changes() -> None:
    drawn = island("a' b'", queue="c d", used={"c": 30, "d": 40})
    now, later = plan(drawn), decide(drawn, now_s=NOW_S + 0.2)
    assert now.reasons == later.reasons


# --- when to look again -------------------------------------------------------------------------


def test_round_is_due_again_at_the_end_of_a_slice() -> None:
    decided = plan(island("a'", queue="b", used={"a": 100}))
    assert decided.look_again_s == pytest.approx(NOW_S + 0.5, abs=0.002)


def test_round_is_due_again_when_two_scores_cross() -> None:
    decided = plan(island("a", queue="b", used={"b": 12}))
    # a has 10 s and gains one each second; b would have 13 with its turn.
    assert decided.look_again_s == pytest.approx(NOW_S + 3, abs=0.002)


def test_round_is_due_again_at_the_end_of_a_lease_although_no_task_waits() -> None:
    assert plan(island("a")).look_again_s == NOW_S + 10
