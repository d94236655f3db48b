"""Which members of a lot go on past a rung."""

from __future__ import annotations

import random
from collections import Counter
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model.fields import Fault, Fields
from app.core.model.provisions.stop_rule import StopRule, read_stop, rule_in
from app.core.model.rungs import RungValue, Standings
from tests.core.model.test_lot_members import faults, read

#: How many rungs each of 1,000 trials passed in optuna 5.0.0: SuccessiveHalvingPruner with
#: min_resource=1, reduction_factor=3, on the curves of `curves`.
OF_OPTUNA = (
    "424000000000000020001100044000000000201000010001000100000001000101210000110200000000003000"
    "000100000000000000110100000000101000000100000001100000000102011000100000101000000001011000"
    "000001100001110101100000000000000303011100010002000000012200000100001000010001100000010010"
    "000021000111000010000000000200000000100100020100202000000000000000000000010100001000000003"
    "102011110102011211100100002301100010001000001100110020000300001000002000011000011000000000"
    "011310020001010010012000200000001000002110102100000330001201002002230003100010110011111010"
    "010001010000121000010000000000311000010100001010112000200011100000001001200011101100010010"
    "100110030100000000001000000100100110110100321100010000000010003000000010010000100001120110"
    "100020000020000010010100000110102000000004010103010000002004120002001010010100001010402000"
    "020001000112101010010001000100000000000101001002100000140012000001010001300200100112000101"
    "012010000000021000010000000000101000000131021100000000000000001100200020001000001000001322"
    "0100000000"
)
NAMES = st.sampled_from("abcdefgh")


def rule(keep: float = 0.33, rungs: tuple[int, ...] = (1, 3, 9, 27), goal: str = "min") -> StopRule:
    return StopRule(metric="loss", goal=goal, rungs=rungs, keep=keep)


def value(member: str, rung: int, value: float | None, passed: bool = False) -> RungValue:
    return RungValue(member=member, rung=rung, value=value, passed=passed)


def curves() -> list[list[float]]:
    rng = random.Random(7)
    bases = (rng.random() for _ in range(1000))
    return [[base + rng.random() / (k + 1) for k in range(4)] for base in bases]


def test_decisions_at_arrival_are_those_of_optuna():
    standings, passed = Standings(rule()), []
    for n, curve in enumerate(curves()):
        rungs = 0
        for k, found in enumerate(curve):
            standings.add(value(str(n), k, found))
            if (str(n), k) not in standings.passed:
                break
            rungs += 1
        passed.append(str(rungs))
    assert "".join(passed) == OF_OPTUNA


@st.composite
def histories(draw: st.DrawFn) -> list[RungValue]:
    """Draw results of members that reach their rungs in order, whether or not they passed."""
    values = st.one_of(st.none(), st.integers(0, 5).map(float))
    reached: Counter[str] = Counter()
    found = []
    for member in draw(st.lists(NAMES, max_size=40)):
        if reached[member] < 3:
            is_let = draw(st.integers(0, 9)) == 0
            found.append(value(member, reached[member], draw(values), is_let))
            reached[member] += 1
    return found


@given(histories(), st.sampled_from([0.2, 0.33, 0.5, 0.66, 0.9]))
def test_at_each_rung_the_best_of_all_results_have_passed(history: list[RungValue], keep: float):
    its = rule(keep, (1, 2, 3))
    found = Standings.of(its, history)
    order = {(each.member, each.rung): n for n, each in enumerate(history)}
    for rung in range(3):
        here = [
            each
            for each in history
            if each.rung == rung and (rung == 0 or (each.member, rung - 1) in found.passed)
        ]
        ranked = sorted(here, key=lambda e: (its.badness(e.value), order[e.member, e.rung]))
        assert found.results(rung) == len(here)
        assert [found.place(e.member, rung) for e in ranked] == [*range(1, len(here) + 1)]
        best = ranked[: its.passing(len(here))] if here else []
        must = {each.member for each in best} | {each.member for each in here if each.passed}
        passed = {member for member, at in found.passed if at == rung}
        assert must <= passed <= {each.member for each in here}


@given(histories(), st.data())
def test_what_has_passed_stays_passed_and_a_second_reading_says_the_same(
    history: list[RungValue], data: st.DataObject
):
    cut = data.draw(st.integers(0, len(history)))
    before, after = Standings.of(rule(), history[:cut]), Standings.of(rule(), history)
    assert before.passed <= after.passed
    # what control wrote down at some time changes nothing that follows from the results
    noted = [
        value(e.member, e.rung, e.value, e.passed or (e.member, e.rung) in after.passed)
        for e in history
    ]
    assert Standings.of(rule(), noted).passed == after.passed


def test_loser_goes_on_when_enough_worse_results_are_in():
    results = [value("a", 0, 0.1), value("b", 0, 0.2)]
    assert Standings.of(rule(), results).lost_at("b") == 0
    results += [value(f"worse{n}", 0, 0.5 + n) for n in range(3)]
    assert Standings.of(rule(), results).lost_at("b") == 0
    results.append(value("worse3", 0, 0.9))
    found = Standings.of(rule(), results)
    assert (found.lost_at("b"), found.place("b", 0)) == (None, 2)


def test_value_of_a_later_rung_counts_only_after_the_one_before_is_passed():
    fast = [value("a", 0, 0.1), value("b", 0, 0.2), value("b", 1, 0.0)]
    found = Standings.of(rule(0.5), fast)
    assert (found.lost_at("b"), found.place("b", 1), found.results(1)) == (0, None, 0)
    found = Standings.of(rule(0.5), [*fast, value("c", 0, 0.9), value("d", 0, 0.9)])
    assert (found.lost_at("b"), found.place("b", 1)) == (None, 1)


def test_person_lets_a_loser_pass_and_it_counts_at_the_next_rung():
    results = [value("a", 0, 0.1), value("b", 0, 0.2, True), value("a", 1, 0.1), value("b", 1, 0.3)]
    found = Standings.of(rule(), results)
    assert (found.lost_at("b"), found.place("b", 1)) == (1, 2)


def test_no_number_is_the_worst_value():
    results = [value("a", 0, None), value("b", 0, 5.0), value("c", 0, None), value("d", 0, 1.0)]
    found = Standings.of(rule(goal="max"), results)
    assert [found.place(each, 0) for each in "bdac"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("keep", "of", "passing"),
    [(0.33, 3, 1), (0.33, 9, 3), (0.33, 2, 1), (0.66, 3, 1), (0.67, 3, 2), (0.5, 5, 2),
     (0.9, 20, 18), (0.15, 100, 15), (0.05, 100, 5), (0.25, 8, 2)],
)  # fmt: skip
def test_share_near_a_simple_fraction_means_it(keep: float, of: int, passing: int):
    assert rule(keep).passing(of) == passing


@pytest.mark.parametrize(
    ("said", "found"), [(1, 1.0), (0.5, 0.5), ("nan", None), ("-inf", None), (True, 0), ("x", 0)]
)
def test_only_numbers_reach_a_rung_and_those_that_are_not_finite_are_worst(said, found):
    rows = [(4, {"loss": said}), (3, {"other": 1})]
    expected = {} if found == 0 else {0: (4, found), 1: (4, found)}
    assert rule().reached(rows) == expected


def test_rung_has_the_first_value_at_its_step_or_after_it():
    rows = [(9, {"loss": 0.3}), (2, {"loss": 0.9}), (4, {"loss": 0.5}), (28, {"acc": 1})]
    assert rule().reached(rows) == {0: (2, 0.9), 1: (4, 0.5), 2: (9, 0.3)}


def test_badness_of_what_is_not_finite_is_infinite():
    assert [rule().badness(each) for each in (None, nan, -inf)] == [inf] * 3


def test_rule_is_read_and_stored():
    body = {"metric": "acc", "goal": "max", "rungs": [10, 30], "keep": 0.5}
    task = read(array={"count": 4}, run={"command": ["true"]}, stop=body)
    assert task.stop == StopRule(metric="acc", goal="max", rungs=(10, 30), keep=0.5)
    assert rule_in({"stop": task.stop.as_json()}) == task.stop
    assert rule_in({"stop": None}) is rule_in({}) is None


@pytest.mark.parametrize(
    ("stop", "pointer", "words"),
    [
        ({}, "/metric", "required"),
        ({"metric": "loss"}, "/rungs", "required"),
        ({"metric": "loss", "rungs": []}, "/rungs", "at least one step"),
        ({"metric": "loss", "rungs": [0]}, "/rungs/0", "from 1"),
        ({"metric": "loss", "rungs": [1, "x"]}, "/rungs/1", "whole number"),
        ({"metric": "loss", "rungs": [30, 10]}, "/rungs", "must rise"),
        ({"metric": "loss", "rungs": [*range(1, 18)]}, "/rungs", "at most 16"),
        ({"metric": "loss", "rungs": [1], "keep": 1}, "/keep", "at most 0.9"),
        ({"metric": "loss", "rungs": [1], "keep": 0}, "/keep", "above 0"),
        ({"metric": "loss", "rungs": [1], "goal": "low"}, "/goal", "min, max"),
        ({"metric": "", "rungs": [1]}, "/metric", "1 to 100"),
        ({"metric": "loss", "rungs": [1], "rule": "median"}, "/rule", "unknown field"),
    ],
)
def test_fault_of_a_rule_has_a_pointer(stop, pointer: str, words: str):
    found = faults({"name": "t", "array": {"count": 2}, "stop": stop})
    assert words in found[f"/tasks/0/stop{pointer}"], found


def test_rule_is_for_lots_of_jobs_and_commands_of_limited_size():
    good = {"metric": "loss", "rungs": [1]}
    assert "of a lot" in faults({"name": "t", "stop": good})["/tasks/0/stop"]
    large = faults({"name": "t", "stop": good, "array": {"count": 1001}})
    assert "at most 1000 members" in large["/tasks/0/stop"]
    found: list[Fault] = []
    read_stop(Fields({"stop": good}, "", found), run_kind="function")
    assert "a function" in found[0].detail
