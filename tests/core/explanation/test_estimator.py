from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.explanation.estimator import (
    BINS,
    DAY_S,
    ENOUGH,
    STARTS,
    STEP,
    Calibration,
    Estimate,
    Held,
    History,
    RuntimeCurve,
    Scene,
    TenantLine,
    Unknown,
    WaitingTask,
    WithheldDevices,
    bounded,
    in_order,
    starts_in,
)

A_BIN = math.exp(STEP)  # the largest ratio of two runtimes that one bin holds


class Sure:
    """Runtimes that are known: the only key of a task is its runtime in seconds."""

    def curve(self, who):
        return Certain(who[-1])

    def known(self, who):
        return 0.0


class Certain(RuntimeCurve):
    def __init__(self, runtime_s):
        super().__init__([])
        self.runtime_s = runtime_s

    def draw(self, elapsed_s, share):
        return max(elapsed_s, self.runtime_s)


# --- runtimes -----------------------------------------------------------------------------------


def test_no_runtime_is_predicted_before_one_has_ended():
    assert History().remaining((("a",), ())) is None
    assert History().median_s(((),)) is None


def test_quantiles_of_many_equal_runtimes_lie_in_their_bin():
    history = History()
    for _ in range(500):
        history.add((("a",), ()), 600)
    for seconds in history.remaining((("a",), ())):
        assert 600 / A_BIN <= seconds <= 600 * A_BIN


def test_quantiles_match_the_distribution_that_was_fed():
    # Log normal with median e^7 s and deviation 1.5: its 10th percentile is e^(7 - 1.2816 * 1.5).
    history, chance = History(), random.Random(3)
    for _ in range(20_000):
        history.add(((),), chance.lognormvariate(7, 1.5))
    for seconds, log in zip(history.remaining(((),)), (5.078, 7.0, 8.922), strict=True):
        assert math.log(seconds) == pytest.approx(log, abs=0.15)


def test_a_task_that_has_run_long_is_compared_with_those_that_ran_longer():
    # Half end at 100 s and half at 10,000 s.  Who has run 1,000 s is one of the latter.
    history = History()
    for _ in range(400):
        history.add(((),), 100)
        history.add(((),), 10_000)
    (left_s,) = history.remaining(((),), elapsed_s=1000, quantiles=(0.5,))
    assert 10_000 / A_BIN - 1000 <= left_s <= 10_000 * A_BIN - 1000


def test_task_that_outlasted_all_others_is_expected_to_run_as_long_again():
    # A Pareto tail with index 1: half of those who ran e seconds run e seconds more.
    history = History()
    for _ in range(100):
        history.add(((),), 10)
    (left_s,) = history.remaining(((),), elapsed_s=3600, quantiles=(0.5,))
    assert 3600 / A_BIN <= left_s <= 3600 * A_BIN


def test_unknown_key_is_estimated_by_the_next_wider_key():
    history = History()
    for _ in range(50):
        history.add((("a",), ()), 30)
        history.add((("b",), ()), 9000)
    assert history.remaining((("a", "new"), ("a",), ())) == history.remaining((("a",), ()))


def test_key_with_few_samples_is_between_its_own_and_wider_estimates():
    history = History()
    for _ in range(300):
        history.add((("a", "old"), ("a",), ()), 10_000)
    wide_s = history.median_s((("a",), ()))
    middles = []
    for _ in range(40):
        history.add((("a", "new"), ("a",), ()), 100)
        middles.append(history.median_s((("a", "new"), ("a",), ())))
    assert middles[0] == pytest.approx(wide_s, rel=0.5)
    assert 100 / A_BIN <= middles[-1] <= 100 * A_BIN


def test_old_runtimes_fade():
    history = History()
    for runtime_s in [10] * 1000 + [5000] * 200:
        history.add((("a", 1), ("a",), ()), runtime_s)
    assert history.median_s((("a", 1), ("a",), ())) >= 5000 / A_BIN


def test_weights_that_have_grown_for_years_are_scaled_back():
    # A specific key remembers 100: 230 doublings of its unit per 16,000 runtimes, past 1e100 twice.
    history = History()
    for runtime_s in [10] * 40_000 + [5000] * 2_000:
        history.add((1, 2, 3, 4), runtime_s)
    assert 5000 / A_BIN <= history.median_s((1, 2, 3, 4)) <= 5000 * A_BIN


def test_keys_without_a_recent_end_are_forgotten_first():
    history = History(keys_max=3)
    for name in "abc":
        history.add(((name,), ()), 60)
    assert [history.known(((name,), ())) for name in "abc"] == [0, 1, 1]
    assert history.known(((),)) == pytest.approx(3, abs=0.01)


def test_a_task_without_keys_is_refused():
    with pytest.raises(ValueError, match="at least one key"):
        History().add((), 60)


@given(
    runtimes=st.lists(st.floats(0, 1e9), min_size=1, max_size=50),
    elapsed_s=st.floats(0, 1e9),
)
def test_quantiles_are_in_order_and_never_negative(runtimes, elapsed_s):
    history = History()
    for runtime_s in runtimes:
        history.add((("a",), ()), runtime_s)
    shares = (0.01, 0.1, 0.5, 0.9, 0.99)
    left = history.remaining((("a",), ()), elapsed_s=elapsed_s, quantiles=shares)
    assert list(left) == sorted(left)
    assert all(0 <= seconds <= math.exp(BINS * STEP) for seconds in left)


# --- when it starts -----------------------------------------------------------------------------


def held(tenant, width, runtime_s, elapsed_s=0.0, **more):
    return Held(tenant=tenant, width=width, who=(runtime_s,), elapsed_s=elapsed_s, **more)


def queued(width, runtime_s, **more):
    return WaitingTask(width=width, who=(runtime_s,), **more)


def line(score_s, *tasks, **more):
    return TenantLine(score_s=score_s, tasks=tasks, **more)


def wait_s(scene, tenant="a", place=0):
    return starts_in(scene, tenant, place, Sure()).model_s


def test_next_task_in_line_starts_when_a_device_is_released():
    scene = Scene(
        free=0, held=[held("b", 1, 100, 40), held("b", 1, 500)], lines={"a": line(0, queued(1, 9))}
    )
    assert wait_s(scene) == 60


def test_task_with_extra_devices_releases_all_the_sooner():
    # 60 s are left of it on one device, so 20 on three; with two of three it needs, 40.
    lines = {"a": line(0, queued(3, 9))}
    for speed, left_s in ((3.0, 20), (1.5, 40)):
        scene = Scene(free=0, held=[held("b", 3, 100, 40, speed=speed)], lines=lines)
        assert wait_s(scene) == pytest.approx(left_s)


def test_line_advances_as_devices_are_released():
    # One device, free at 10 s; then two of 20 s each go before the third.
    scene = Scene(free=0, held=[held("b", 1, 10)], lines={"a": line(0, *[queued(1, 20)] * 3)})
    assert [wait_s(scene, place=place) for place in range(3)] == [10, 30, 50]


def test_the_less_served_tenant_goes_first_until_it_has_used_as_much():
    # b has used 50 s less: it starts tasks of 30 s at 10 s and 40 s, and then has 60 > 50.
    lines = {"a": line(50, queued(1, 5)), "b": line(0, *[queued(1, 30)] * 9)}
    assert wait_s(Scene(free=0, held=[held("b", 1, 10)], lines=lines)) == 70


def test_same_usage_counts_for_more_when_todays_has_faded():
    # After 10 s half is left: 30 s used then are worth 60 s of today, more than the 50 of a.
    lines = {"a": line(50, queued(1, 5)), "b": line(0, *[queued(1, 30)] * 9)}
    scene = Scene(free=0, held=[held("b", 1, 10)], lines=lines, half_life_s=10)
    assert wait_s(scene) == 40


def test_usage_that_fades_at_once_breaks_nothing():
    scene = Scene(free=1, held=[], lines={"a": line(0, *[queued(1, 1e6)] * 9)}, half_life_s=1)
    assert wait_s(scene, place=8) == 8e6


def test_a_heavier_tenant_is_charged_less_for_the_same_time():
    # Weight 2 halves the charge: after three starts b has 45 < 50, after four 60.
    lines = {"a": line(50, queued(1, 5)), "b": line(0, *[queued(1, 30)] * 9, weight=2.0)}
    assert wait_s(Scene(free=0, held=[held("b", 1, 10)], lines=lines)) == 130


def test_a_gang_gets_its_devices_when_enough_are_free_together():
    running = [held("b", 1, 100), held("b", 1, 200), held("b", 1, 300)]
    assert wait_s(Scene(free=0, held=running, lines={"a": line(0, queued(2, 9))})) == 200


def test_a_task_behind_a_gang_starts_after_the_gang():
    # The gang of 2 starts at 100 s and runs for 50 s; the free device is not used before.
    lines = {"a": line(9, queued(1, 5)), "b": line(0, queued(2, 50))}
    assert wait_s(Scene(free=1, held=[held("b", 1, 100)], lines=lines)) == 150


def test_task_that_never_fits_delays_no_other():
    lines = {"a": line(9, queued(5, 1), queued(1, 9)), "b": line(0, queued(2, 9))}
    assert wait_s(Scene(free=0, held=[held("b", 1, 100)], lines=lines), place=1) == 100


def test_running_task_releases_its_device_at_the_end_of_its_turn():
    scene = Scene(
        free=0,
        held=[held("b", 1, 100_000, 500, turn_s=20)],
        lines={"a": line(0, queued(1, 9)), "b": line(61)},
        slice_s=60,
    )
    assert wait_s(scene) == 40
    longer = replace(scene, held=[replace(scene.held[0], slice_s=300)])
    assert wait_s(longer) == 280, "its switches are expensive, so its own turn is longer"


def test_running_task_that_tells_its_steps_ends_with_them():
    scene = Scene(
        free=0,
        held=[replace(held("b", 1, 100_000, 500), left_s=30)],
        lines={"a": line(0, queued(1, 9)), "b": line(61)},
    )
    assert wait_s(scene) == 30


def test_running_task_keeps_its_device_until_it_is_better_served_by_a_turn():
    # b has used 500 s less. From the end of its turn on its usage grows by a second a second.
    lines = {"a": line(500, queued(1, 9)), "b": line(0)}
    running = held("b", 1, 100_000, 500, turn_s=20)
    wait = wait_s(Scene(free=0, held=[running], lines=lines, slice_s=60))
    assert wait == pytest.approx(40 + 560, abs=0.01)


def test_fresh_task_takes_the_place_of_its_tenants_settled_task():
    running = [held("a", 1, 100_000, 500, turn_s=70), held("a", 1, 100_000, 500, turn_s=20)]
    lines = {"a": line(0, queued(1, 100_000), queued(1, 9))}
    scene = Scene(free=0, held=running, lines=lines, slice_s=1, fresh_s=60)
    assert wait_s(scene, place=0) == 1
    assert wait_s(scene, place=1) == 40


def test_time_that_starts_take_delays_what_is_behind_them():
    lines = {"a": line(0, queued(1, 10), queued(1, 10), queued(1, 9))}
    assert wait_s(Scene(free=1, held=[], lines=lines, start_s=5), place=2) == 30


def test_gang_that_too_few_tasks_give_way_to_waits_for_one_to_end():
    running = [held("b", 1, 100_000, 500, turn_s=70), held("a", 1, 90)]
    lines = {"a": line(0, queued(2, 9)), "b": line(1000)}
    assert wait_s(Scene(free=0, held=running, lines=lines, slice_s=60)) == 90


def test_every_task_has_a_first_turn_within_one_round_of_turns():
    # Ten tenants with equal scores and endless tasks on one device: nine turns of 60 s at most.
    lines = {f"t{n}": line(0, queued(1, 1e6)) for n in range(10)}
    waits = [wait_s(Scene(free=1, held=[], lines=lines, slice_s=60), f"t{n}") for n in range(10)]
    assert waits == [1.0] + [pytest.approx(60 * n, abs=0.02) for n in range(1, 10)]


def withheld(number, begins_s, ends_s, tenant="nobody"):
    return WithheldDevices(tenant=tenant, number=number, begins_s=begins_s, ends_s=ends_s)


@pytest.mark.parametrize(
    ("windows", "starts_s"),
    [
        ([withheld(1, 30, 110)], 20),  # it starts before the window
        ([withheld(1, 10, 110)], 20),  # the other device becomes free at 20 s
        ([withheld(2, 10, 110)], 110),
        ([withheld(2, 10, 110), withheld(1, 110, 300)], 110),
        ([withheld(2, 10, 110), withheld(2, 110, 300)], 300),
        ([withheld(1, 0, 110), withheld(1, 15, 50)], 50),
        ([withheld(2, 10, 110, "a")], 10),  # they are its own
        ([withheld(1, 10, 110, "b")], 20),  # b holds as many
        ([withheld(1, 10, 110, "b"), withheld(1, 10, 200)], 200),
    ],
)
def test_task_starts_on_devices_that_no_reservation_withholds(windows, starts_s):
    running = [held("b", 1, 400), held("b", 1, 20)]
    scene = Scene(free=0, held=running, lines={"a": line(0, queued(1, 9))}, withheld=windows)
    assert wait_s(scene) == starts_s


def test_gang_waits_until_all_its_devices_are_in_service():
    scene = Scene(
        free=2, held=[], lines={"a": line(0, queued(2, 9))}, withheld=[withheld(1, 0, 100)]
    )
    assert wait_s(scene) == 100


def test_holder_of_a_device_that_is_reserved_for_another_goes_on_later():
    # b has 50 s left when c's window begins, and goes on at 150 s; a, better served, comes after.
    lines = {"a": line(1000, queued(1, 9)), "b": line(0)}
    window = withheld(1, 50, 150, "c")
    scene = Scene(free=0, held=[held("b", 1, 100)], lines=lines, withheld=[window])
    assert wait_s(scene) == 200


def test_tenant_in_its_window_goes_before_one_that_has_used_less():
    lines = {"a": line(1000, queued(1, 9)), "b": line(0, queued(1, 500))}
    scene = Scene(free=0, held=[held("b", 1, 100)], lines=lines)
    assert wait_s(scene) == 600
    assert wait_s(replace(scene, withheld=[withheld(1, 60, 90, "a")])) == 60


def test_nobody_takes_within_a_window_what_its_tenant_is_promised():
    # a is far better served than b, whose turns are over; both devices are b's until 300 s.
    running = [held("b", 1, 400, 100, turn_s=100), held("b", 1, 400, 100, turn_s=100)]
    scene = Scene(
        free=0, held=running, lines={"a": line(0, queued(1, 9)), "b": line(1000)}, slice_s=60
    )
    assert wait_s(scene) == 1
    assert wait_s(replace(scene, withheld=[withheld(2, 0, 200, "b")])) == 200


@given(
    st.lists(
        st.builds(
            withheld, st.integers(1, 4), st.floats(0, 500), st.floats(500, 900),
            st.sampled_from(["a", "b", "nobody"]),
        ),
        max_size=4,
    ),
    st.sampled_from([math.inf, 60.0]),
    st.integers(1, 3),
)  # fmt: skip
def test_task_starts_at_the_latest_when_all_windows_and_all_before_it_are_over(
    windows, slice_s, width
):
    running = [held("b", 1, 100), held("b", 2, 300), held("c", 1, 50)]
    lines = {"a": line(5, queued(1, 40), queued(width, 9)), "b": line(0, queued(3, 70))}
    scene = Scene(free=0, held=running, lines=lines, slice_s=slice_s, withheld=windows)
    assert 1 <= wait_s(scene, place=1) <= 900 + 300 + 100 + 50 + 40 + 70


def test_task_that_ran_before_has_less_left_to_run():
    tasks = [queued(1, 100, elapsed_s=70), queued(1, 1)]
    assert wait_s(Scene(free=1, held=[], lines={"a": line(0, *tasks)}), place=1) == 30


def test_max_duration_shortens_the_estimated_wait_of_the_next_task():
    tasks = [queued(1, 100, max_duration_s=25), queued(1, 1)]
    assert wait_s(Scene(free=1, held=[], lines={"a": line(0, *tasks)}), place=1) == 25


def test_line_too_long_to_simulate_is_extrapolated():
    tasks = [queued(1, 10)] * (2 * STARTS)
    scene = Scene(free=1, held=[], lines={"a": line(0, *tasks)})
    assert wait_s(scene, place=2 * STARTS - 1) == pytest.approx(20 * STARTS, rel=0.01)


def test_score_too_far_off_to_simulate_is_extrapolated():
    # b starts tasks of 10 s until it has used 15 s for each of STARTS.
    lines = {"a": line(15 * STARTS, queued(1, 1)), "b": line(0, *[queued(1, 10)] * (2 * STARTS))}
    scene = Scene(free=1, held=[], lines=lines)
    assert wait_s(scene) == pytest.approx(15 * STARTS, rel=0.01)


def test_task_wider_than_the_island_has_no_estimate():
    scene = Scene(free=1, held=[held("b", 1, 100)], lines={"a": line(0, queued(3, 9))})
    told = starts_in(scene, "a", 0, Sure())
    assert isinstance(told, Unknown)
    assert told.code == "TOO_WIDE"


def test_no_estimate_is_given_without_history():
    scene = Scene(free=0, held=[held("b", 1, 100)], lines={"a": line(0, queued(1, 9))})
    told = starts_in(scene, "a", 0, History())
    assert isinstance(told, Unknown)
    assert told.code == "NO_HISTORY"


def test_equal_boards_have_equal_estimates_with_ordered_percentiles():
    history, chance = History(), random.Random(5)
    for _ in range(300):
        history.add((("a", 1), ("a",), ()), chance.lognormvariate(7, 2))
    who = (("a", 1), ("a",), ())
    scene = Scene(
        free=0,
        held=[Held(tenant="a", who=who, width=1, elapsed_s=60.0 * n) for n in range(20)],
        lines={"a": TenantLine(score_s=0, tasks=[WaitingTask(who=who, width=1)] * 30)},
    )
    told = starts_in(scene, "a", 29, history)
    assert told == starts_in(scene, "a", 29, history)
    assert 0 < told.p10_s < told.p50_s < told.p90_s


def test_a_start_within_a_second_may_be_at_once():
    scene = Scene(free=1, held=[], lines={"a": line(0, queued(1, 9))})
    told = starts_in(scene, "a", 0, Sure())
    assert told.p10_s == 0.0 < told.p50_s


# --- what came true -----------------------------------------------------------------------------


def told(model_s, spread=0.5):
    away = math.exp(1.2816 * spread)
    return Estimate(
        p10_s=model_s / away,
        p50_s=model_s,
        p90_s=model_s * away,
        model_s=model_s,
        model_spread=spread,
    )


def test_constant_factor_of_error_is_corrected():
    calibration, chance = Calibration(), random.Random(2)
    for _ in range(200):
        model_s = chance.uniform(100, 10_000)
        said = calibration.corrected(told(model_s))
        calibration.learn(said, model_s * 3 * chance.lognormvariate(0, 0.1))
    assert calibration.corrected(told(1000)).p50_s == pytest.approx(3000, rel=0.1)


@pytest.mark.parametrize("true_spread", [0.1, 0.5, 2.0])
def test_interval_comes_to_hold_four_of_five_starts(true_spread):
    calibration, chance, hits = Calibration(), random.Random(4), 0
    for n in range(3000):
        said = calibration.corrected(told(1000))
        waited_s = 1000 * chance.lognormvariate(0.5, true_spread)
        calibration.learn(said, waited_s)
        hits += n >= 1000 and said.p10_s <= waited_s <= said.p90_s
    assert 0.77 <= hits / 2000 <= 0.83


def test_interval_follows_when_the_errors_change():
    calibration, chance, hits = Calibration(), random.Random(4), 0
    for n in range(4000):
        said = calibration.corrected(told(1000))
        waited_s = 1000 * chance.lognormvariate(2.0 if n // 500 % 2 else -2.0, 0.5)
        calibration.learn(said, waited_s)
        hits += said.p10_s <= waited_s <= said.p90_s
    assert 0.75 <= hits / 4000 <= 0.85


def test_waits_of_one_length_are_calibrated_by_themselves_once_there_are_enough():
    calibration = Calibration()
    for _ in range(100):
        calibration.learn(told(100), 100)
    for _ in range(29):
        calibration.learn(told(10_000), 100_000)
    assert calibration.corrected(told(10_000)).p50_s == pytest.approx(10_000)
    calibration.learn(told(10_000), 100_000)
    assert calibration.corrected(told(10_000)).p50_s == pytest.approx(100_000)
    assert calibration.corrected(told(100)).p50_s == pytest.approx(100)


def test_interval_that_says_too_little_is_unknown():
    near = told(1000)
    assert bounded(near) is near
    for far in (told(40 * DAY_S), told(3 * DAY_S, spread=3.0)):
        assert bounded(far).code == "TOO_FAR"
    assert bounded(told(50, spread=9.0)).message.endswith(
        "start within 50.0 s, but more than one in ten waits longer than 1h 40m."
    )


@given(st.lists(st.floats(0, 1e7)))
def test_starts_are_put_in_the_order_of_places(values):
    found = in_order(values)
    assert len(found) == len(values)
    assert all(one <= other * (1 + 1e-8) for one, other in pairwise(found))
    if values == sorted(values):
        assert found == values


def test_starts_out_of_order_become_their_geometric_mean():
    assert in_order([1, 400, 100, 900]) == [1, pytest.approx(200), pytest.approx(200), 900]


def test_errors_of_any_size_overflow_nothing():
    calibration = Calibration()
    for _ in range(ENOUGH):
        calibration.learn(told(1, spread=0.001), 1e9)
    assert bounded(calibration.corrected(told(1e9, spread=0.5))).code == "TOO_FAR"


def test_answer_is_less_sure_until_enough_have_come_true():
    calibration = Calibration()
    unproven = calibration.corrected(told(100, spread=0.3))
    assert unproven.p50_s == 100
    assert (unproven.p10_s, unproven.p90_s) == (pytest.approx(21.5, 0.01), pytest.approx(465, 0.01))
    assert calibration.corrected(told(100, spread=2.0)) == told(100, spread=2.0)
    for _ in range(ENOUGH):
        calibration.learn(unproven, 100)
    assert calibration.corrected(told(100, spread=0.3)).p90_s == pytest.approx(100)
