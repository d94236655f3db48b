"""Which checkpoints of a task are its best, and how the rule is read."""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.model import descriptor as descriptors
from app.core.model.checkpoints.best import RankedCheckpoint, best_checkpoints
from app.core.model.descriptor import TaskDescriptor
from app.core.model.provisions.best_rule import BestRule, best_rule_in, objective_in
from tests.core.model.test_lot_members import faults

VALUES = st.one_of(
    st.none(), st.sampled_from([nan, inf, -inf, 0.0, -0.0, 1.0]), st.floats(allow_nan=False)
)
RULES = st.builds(
    BestRule, metric=st.just("loss"), goal=st.sampled_from(["min", "max"]), keep=st.integers(1, 4)
)


def read(**more: Any) -> TaskDescriptor:
    task = {"name": "train", "run": {"job": "train:Train"}, **more}
    return descriptors.parse({"bundle": f"sha256:{'5' * 64}", "tasks": [task]}).tasks[0]


def saved(values: list[float | None]) -> list[RankedCheckpoint]:
    """Return checkpoints of these values, a step apart."""
    return [
        RankedCheckpoint(id=f"ckp_{n:04}", step=n, value=value) for n, value in enumerate(values)
    ]


def is_better(rule: BestRule, one: RankedCheckpoint, other: RankedCheckpoint) -> bool:
    """True if the rule prefers the first one; both have finite values."""
    assert one.value is not None
    assert other.value is not None
    if one.value == other.value:
        return one.step < other.step
    return (one.value < other.value) == (rule.goal == "min")


def oracle(rule: BestRule, checkpoints: list[RankedCheckpoint]) -> set[str]:
    """Return those than which fewer than `keep` are better, each compared with each."""
    finite = [each for each in checkpoints if each.value is not None and isfinite(each.value)]
    return {
        one.id
        for one in finite
        if sum(is_better(rule, other, one) for other in finite if other is not one) < rule.keep
    }


@given(RULES, st.lists(VALUES, max_size=12), st.randoms())
def test_best_are_those_than_which_too_few_are_better(rule, values, random):
    checkpoints = saved(values)
    wanted = oracle(rule, checkpoints)
    random.shuffle(checkpoints)
    found = best_checkpoints(rule, checkpoints)
    assert set(found) == wanted
    by_id = {each.id: each for each in checkpoints}
    ranks = [by_id[id] for id in found]
    assert all(is_better(rule, ranks[n], ranks[n + 1]) for n in range(len(ranks) - 1))


@given(RULES, st.lists(VALUES, max_size=20), st.integers(1, 3))
def test_best_of_all_that_were_ever_saved_are_left_if_the_others_go_at_once(rule, values, newest):
    """Whatever is deleted on the way: at each checkpoint all but the best and the newest."""
    left: list[RankedCheckpoint] = []
    for n, checkpoint in enumerate(saved(values)):
        left.append(checkpoint)
        best = set(best_checkpoints(rule, left))
        assert best == oracle(rule, saved(values)[: n + 1])
        left = [each for each in left if each.id in best or each in left[-newest:]]


@pytest.mark.parametrize(
    ("reported", "ranked"),
    [
        ({"loss": 2}, {"step": 7, "value": 2.0}),
        ({"loss": 0.5, "acc": 1.0}, {"step": 7, "value": 0.5}),
        ({"loss": "nan"}, {"step": 7, "value": None}),
        ({"loss": inf}, {"step": 7, "value": None}),
        ({"loss": 10**400}, {"step": 7, "value": None}),
        ({"loss": True}, None),
        ({"loss": "low"}, None),
        ({"acc": 1.0}, None),
    ],
)
def test_row_ranks_by_its_metric_and_what_is_no_finite_number_is_worst(reported, ranked):
    assert BestRule(metric="loss", goal="min", keep=1).ranked(7, reported) == ranked


def test_rule_is_read_and_stored():
    body: dict[str, Any] = {"metric": "acc", "goal": "max", "keep": 2}
    task = read(checkpoint={"best": body})
    assert task.checkpoint.best == BestRule(metric="acc", goal="max", keep=2)
    assert best_rule_in(descriptors.as_json(task)) == task.checkpoint.best
    usual = read(checkpoint={"best": {"metric": "loss"}})
    assert usual.checkpoint.best == BestRule(metric="loss", goal="min", keep=1)
    command = read(run={"command": ["true"]}, checkpoint={"best": {"metric": "loss"}})
    assert command.checkpoint.best == usual.checkpoint.best
    assert best_rule_in({}) is best_rule_in({"checkpoint": {"every_s": 1, "keep": 1}}) is None


def test_lot_is_compared_by_its_rule_to_stop_or_else_by_that_of_its_checkpoints():
    stop = {"metric": "loss", "goal": "min", "rungs": [10]}
    checkpoint = {"best": {"metric": "acc", "goal": "max"}}
    for fields, wanted in (
        ({"stop": stop, "checkpoint": checkpoint}, ("loss", "min")),
        ({"checkpoint": checkpoint}, ("acc", "max")),
        ({}, None),
    ):
        lot = read(array={"count": 3}, **fields)
        assert objective_in(descriptors.as_json(lot)) == wanted


@pytest.mark.parametrize(
    ("task", "pointer", "words"),
    [
        ({"checkpoint": {"best": {}}}, "/metric", "required"),
        ({"checkpoint": {"best": {"metric": ""}}}, "/metric", "1 to 100"),
        ({"checkpoint": {"best": {"metric": "loss", "keep": 0}}}, "/keep", "from 1"),
        ({"checkpoint": {"best": {"metric": "loss", "goal": "low"}}}, "/goal", "min, max"),
        ({"checkpoint": {"best": {"metric": "loss", "every": 1}}}, "/every", "unknown field"),
        ({"run": {"function": "a:b"}}, "", "not a function"),
    ],
)
def test_fault_of_a_rule_has_a_pointer(task, pointer: str, words: str):
    job = {"name": "t", "run": {"job": "train:Train"}}
    found = faults({**job, "checkpoint": {"best": {"metric": "loss"}}, **task})
    assert words in found[f"/tasks/0/checkpoint/best{pointer}"], found


@pytest.mark.parametrize("wrong", ["@best", "A@best", "a/b/c@best", "a@last", "a/@best", "ckp_1"])
def test_checkpoint_to_start_from_is_an_id_or_the_best_of_a_name(wrong: str):
    for right in ("sweep-7@best", "sweep-7/train.3@best", f"ckp_{1:032x}"):
        assert read(from_checkpoint=right).from_checkpoint == right
    found = faults({"name": "t", "from_checkpoint": wrong})
    assert '"NAME@best"' in found["/tasks/0/from_checkpoint"]
