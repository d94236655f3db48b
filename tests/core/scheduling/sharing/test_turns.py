"""Turns on a shared device: by measured time and weight, however long a burst is."""

import json
import random
import statistics

import pytest

from app.core.scheduling.sharing.turns import (
    TURN_US,
    Level,
    Rota,
    Share,
    as_json,
    from_json,
    least_served,
)
from tests.thoroughness import seeds


def share(task, *path, held_us=0, epoch=1, rate=1000, place=0):
    levels = tuple(Level(name=name, used=used, weight=weight) for name, used, weight in path)
    return Share(task=task, epoch=epoch, place=place, held_us=held_us, rate=rate, path=levels)


class Seat:
    """A device that gives turns as the supervisor does; a turn ends with a burst of its task."""

    def __init__(self, shares, burst_us):
        self.shares, self.burst_us = shares, burst_us
        self.held_us = {each.task: each.held_us for each in shares}
        self.turns = []  # (who, from, to)
        self.now_us = 0

    def turn(self):
        task = least_served(self.shares, self.held_us)
        burst_us = self.burst_us[task]
        lasts_us = -(-TURN_US // burst_us) * burst_us
        self.held_us[task] += lasts_us
        self.turns.append((task, self.now_us, self.now_us + lasts_us))
        self.now_us += lasts_us

    def held_within(self, task, from_us, to_us):
        return sum(
            max(0, min(to, to_us) - max(since, from_us))
            for who, since, to in self.turns
            if who == task
        )


def flat(dice):
    """Tenants of random weights and bursts, eightfold and more apart."""
    tasks = [f"t{n}" for n in range(dice.randint(2, 8))]
    weights = {task: dice.choice([500, 1000, 2000, 4000, 8000]) for task in tasks}
    shares = [share(task, (task, 0, weights[task])) for task in tasks]
    return Seat(shares, {task: dice.randint(500, 16_000) for task in tasks}), weights


@pytest.mark.parametrize("seed", seeds(range(40)))
def test_no_task_is_ahead_of_another_by_more_than_its_own_turn(seed):
    seat, weights = flat(random.Random(seed))
    for _ in range(400):
        seat.turn()
        served = {task: held / weights[task] for task, held in seat.held_us.items()}
        least = min(served.values())
        for task, mine in served.items():
            turn_us = TURN_US + seat.burst_us[task]
            assert mine - least <= turn_us / weights[task] + 1e-9


@pytest.mark.parametrize("seed", seeds(range(40)))
def test_shares_of_a_window_follow_the_weights_within_a_few_turns(seed):
    seat, weights = flat(random.Random(seed))
    while seat.now_us < 12_000_000:
        seat.turn()
    longest_us = TURN_US + max(seat.burst_us.values())
    for from_us in range(0, 6_000_000, 500_000):
        for task, weight in weights.items():
            due_us = 5_000_000 * weight / sum(weights.values())
            error_us = abs(seat.held_within(task, from_us, from_us + 5_000_000) - due_us)
            assert error_us <= 2 * len(weights) * longest_us


def test_weights_1_2_4_8_are_met_within_half_a_percent_over_five_seconds():
    weights = {"a": 1000, "b": 2000, "c": 4000, "d": 8000}
    shares = [share(task, (task, 0, weight)) for task, weight in weights.items()]
    seat = Seat(shares, dict.fromkeys(weights, 2000))
    while seat.now_us < 30_000_000:
        seat.turn()
    for window_us, bound in ((1_000_000, 2.0), (5_000_000, 0.5)):
        errors = [
            max(
                abs(100 * seat.held_within(task, at, at + window_us) / window_us - weight / 150)
                for task, weight in weights.items()
            )
            for at in range(0, 25_000_000, 333_000)
        ]
        assert statistics.mean(errors) <= bound


def test_users_divide_the_turns_of_their_tenant():
    shares = [
        share("x", ("a", 0, 1000), ("a1", 0, 1000)),
        share("y", ("a", 0, 1000), ("a2", 0, 3000)),
        share("z", ("b", 0, 1000), ("b1", 0, 1000)),
    ]
    seat = Seat(shares, dict.fromkeys("xyz", 2000))
    for _ in range(4000):
        seat.turn()
    part = {task: held / seat.now_us for task, held in seat.held_us.items()}
    assert part == pytest.approx({"x": 1 / 8, "y": 3 / 8, "z": 1 / 2}, abs=0.002)


def test_less_served_task_catches_up_first_and_is_not_ahead_afterwards():
    shares = [share("old", ("a", 10**9, 1000), held_us=700), share("new", ("b", 0, 1000))]
    seat = Seat(shares, dict.fromkeys(("old", "new"), 2000))
    while seat.held_us["old"] == 700:
        seat.turn()
    assert 0 <= seat.held_us["new"] - 1_000_000 < 2 * TURN_US
    for _ in range(100):
        seat.turn()
    assert abs(seat.held_us["new"] - 1_000_000 - (seat.held_us["old"] - 700)) <= 2 * TURN_US


def test_new_answer_with_the_same_shares_changes_no_turn():
    dice = random.Random(7)
    seat, weights = flat(dice)
    for _ in range(200):
        seat.turn()
        as_booked = [
            share(
                task, (task, seat.held_us[task] * 1000, weights[task]), held_us=seat.held_us[task]
            )
            for task in weights
        ]
        assert least_served(as_booked, seat.held_us) == least_served(seat.shares, seat.held_us)


def test_ties_are_broken_by_name_in_any_order():
    shares = [share(task, (task, 5, 1000)) for task in "cab"]
    for _ in range(5):
        random.shuffle(shares)
        assert least_served(shares, dict.fromkeys("abc", 0)) == "a"


def test_last_task_is_the_one_with_the_farthest_turn():
    rota = Rota.of([as_json(share(task, (task, used, 1000))) for used, task in enumerate("abc")])
    held = dict.fromkeys("abc", 0)
    assert rota.most_of("abc", held) == "c"
    assert rota.next_of("bc", held) == "b"
    assert rota.has("a", 1)
    assert not rota.has("a", 2)
    assert not rota.has("d", 1)


def test_time_of_an_ended_task_still_counts_for_its_user():
    shares = [
        share("first", ("a", 0, 1000), place=0),
        share("heir", ("a", 0, 1000), place=1),
        share("other", ("b", 0, 1000), place=2),
    ]
    held = {"first": 70_000, "heir": 10_000, "other": 60_000}
    assert least_served(shares, held, ["heir", "other"]) == "other"
    assert least_served(shares, {**held, "other": 90_000}, ["heir", "other"]) == "heir"


def test_share_survives_json():
    one = share("x", ("a", 10**20, 1000), ("u", 3, 500), held_us=9, epoch=4)
    assert from_json(json.loads(json.dumps(as_json(one)))) == one
