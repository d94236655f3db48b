"""What a lot's members are, and when they are made."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.model import descriptor as descriptors
from app.core.model import lot_members
from app.core.model.descriptor import BadDescriptor, TaskDescriptor
from app.core.model.lifecycle import State
from app.core.model.lot_members import LotCounts, member
from app.core.model.provisions.lots import MOST_MEMBERS

COMMAND = {"command": ["python", "train.py", "--lr=${matrix.lr}", "${array.index}"]}


def read(**more: Any) -> TaskDescriptor:
    task = {"name": "train", "run": COMMAND, **more}
    return descriptors.parse({"tasks": [task]}).tasks[0]


def faults(*tasks: dict[str, Any]) -> dict[str, str]:
    """Return the faults of a request by pointer."""
    body = {"tasks": [{"run": {"command": ["true"]}, **task} for task in tasks]}
    try:
        descriptor = descriptors.parse(body)
    except BadDescriptor as error:
        return {fault.pointer: fault.detail for fault in error.faults}
    return {fault.pointer: fault.detail for fault in lot_members.faults(descriptor)}


def test_values_are_in_params_env_words_and_published_names():
    task = read(
        matrix={"lr": [0.001, 1e-4], "seed": "0-2"},
        params={"rate": "${matrix.lr}", "deep": [{"text": "s${matrix.seed}-${array.index}"}]},
        env={"LR": "${matrix.lr}"},
    )
    values = [*task.matrix.combinations()][4]
    made = member(task, 4, values)
    assert values == {"lr": 1e-4, "seed": 1}
    assert made.name == "train.4"
    assert made.params == {"rate": 1e-4, "deep": [{"text": "s1-4"}]}
    assert made.run.argv == ("python", "train.py", "--lr=0.0001", "4")
    assert made.env == {"LR": "0.0001", "ROUNDHOUSE_ARRAY_INDEX": "4"}
    assert (made.array, made.matrix) == (None, None)
    assert descriptors.from_json(descriptors.as_json(made)) == made


def test_key_that_is_named_nowhere_is_a_parameter():
    task = read(matrix={"lr": [1], "wide": [True, False]}, params={"steps": 3})
    assert member(task, 0, {"lr": 1, "wide": True}).params == {"steps": 3, "wide": True}


def test_function_has_no_variable_of_its_own_and_shares_its_process():
    body = {"name": "f", "run": {"function": "ops:f"}, "array": {"count": 2}}
    body["params"] = {"n": "${array.index}"}
    task = descriptors.parse({"tasks": [body], "bundle": "sha256:" + "0" * 64}).tasks[0]
    made = member(task, 1, {})
    assert (made.env, made.params) == ({}, {"n": 1})


def test_order_of_the_keys_is_that_of_the_alphabet_however_they_were_stored():
    orders = ({"way": ["x", "y"], "lr": [1, 2]}, {"lr": [1, 2], "way": ["x", "y"]})
    found = [[*read(matrix=matrix).matrix.combinations()] for matrix in orders]
    assert found[0] == found[1]
    assert [each["lr"] for each in found[0]] == [1, 1, 2, 2]


def test_indices_follow_the_matrix_and_leave_out_what_is_excluded():
    task = read(matrix={"lr": ["a", "b"], "seed": [1, 2], "exclude": [{"lr": "a", "seed": 2}]})
    said = [(one["lr"], one["seed"]) for one in task.matrix.combinations()]
    assert said == [("a", 1), ("b", 1), ("b", 2)]
    assert task.array.count == 3
    assert descriptors.from_json(descriptors.as_json(task)) == task


@pytest.mark.parametrize(
    ("more", "pointer", "words"),
    [
        ({"array": {}}, "/array/count", "required"),
        ({"array": {"count": MOST_MEMBERS + 1}}, "/array/count", f"to {MOST_MEMBERS}"),
        ({"array": {"count": 0}}, "/array/count", "from 1"),
        ({"array": {"count": 2, "max_failures": 1.5}}, "/array/max_failures", "whole number"),
        ({"array": {"count": 2, "max_failures": -1}}, "/array/max_failures", "above"),
        ({"matrix": {"a": "0-999", "b": "0-99"}}, "/matrix", "at most 10000 combinations"),
        ({"matrix": {"a": "0-1000"}}, "/matrix/a", "to 1000 values"),
        ({"matrix": {"a": 3}}, "/matrix/a", "a list of values"),
        ({"matrix": {"a": [[1]]}}, "/matrix/a/0", "a text, a number"),
        ({"matrix": {"1a": [1]}}, "/matrix/1a", "name of a key"),
        ({"matrix": {}}, "/matrix", "1 to 16 keys"),
        ({"matrix": {"a": [1], "exclude": [{"b": 1}]}}, "/matrix/exclude/0", "keys a"),
        ({"matrix": {"a": [1], "exclude": [{"a": 2}]}}, "/matrix/exclude/0/a", "excludes nothing"),
        ({"matrix": {"a": [1], "exclude": [{"a": 1}]}}, "/matrix/exclude", "no combination"),
        ({"matrix": {"a": [1, 2]}, "array": {"count": 3}}, "/array/count", "2 combinations"),
        ({"search": {"trials": 3, "space": {"a": [1]}}, "matrix": {"a": [1]}}, "/search",
         "a matrix or a search"),
        ({"search": {"trials": 3, "space": {"a": [1]}}, "array": {"count": 2}},
         "/array/count", "3 trials"),
        ({"search": {"trials": 3, "space": {"a": [1]}}, "env": {"A": "${matrix.a}"}},
         "/env/A", "known: ${array.index}, ${search.a}"),
        ({"array": {"count": 2}, "env": {"A": "${matrix.a}"}}, "/env/A", "known: ${array.index}"),
        ({"array": {"count": 2}, "params": {"a": ["${array.i}"]}}, "/params/a/0", "unknown value"),
        ({"array": {"count": 2}, "name": "n" * 58}, "/name", "at most 57"),
        ({"array": {"count": 2}, "session": {}}, "/session", "no session"),
        ({"matrix": {"a": ["x" * 900]}, "params": {str(f"p{n}"): "${matrix.a}" for n in range(99)}},
         "/params", "65536 bytes"),
    ],
)  # fmt: skip
def test_fault_of_a_lot_has_a_pointer(more: dict[str, Any], pointer: str, words: str):
    found = faults({"name": "t", **more})
    assert words in found[f"/tasks/0{pointer}"], found


SPACE = {
    "rate": {"log": [1e-5, 1e-2]},
    "drop": {"uniform": [-1, 0.5]},
    "deep": {"int": [2, 4]},
    "wide": {"log_int": [16, 1024]},
    "way": ["a", "b"],
    "seed": "0-9",
}


FIRST = {"deep": 2, "drop": -0.151128, "rate": 7.52214e-05, "seed": 0, "way": "a", "wide": 558}


def drawn(**search: Any) -> list[dict[str, Any]]:
    return [*read(run={"command": ["true"]}, search=search).search.combinations()]


def test_drawn_values_lie_in_the_space_and_cover_it():
    found = drawn(trials=2000, space=SPACE)
    for key, low, high in (("rate", 1e-5, 1e-2), ("drop", -1, 0.5), ("wide", 16, 1024)):
        values = sorted(each[key] for each in found)
        assert low <= values[0] < values[-1] <= high
    assert {each["deep"] for each in found} == {2, 3, 4}
    assert {each["seed"] for each in found} == set(range(10))
    assert 400 < sum(each["rate"] < 10**-4.25 for each in found) < 600  # a quarter of the decades
    assert 400 < sum(each["drop"] < -0.625 for each in found) < 600
    assert 800 < sum(each["wide"] < 128 for each in found) < 1200
    assert all(type(each["wide"]) is type(each["deep"]) is int for each in found)


def test_drawn_values_follow_from_the_seed_and_the_index_alone():
    first = drawn(trials=5, seed=1, space=SPACE)
    assert first[0] == FIRST
    more = drawn(trials=50, seed=1, space={**SPACE, "other": [1, 2, 3]})
    assert [{key: each[key] for key in SPACE} for each in more[:5]] == first
    assert drawn(trials=5, seed=2, space=SPACE) != first


def test_grid_has_each_combination_once_in_an_order_of_the_seed():
    space = {"a": [1, 2, 3], "b": {"int": [5, 9]}, "c": "0-1"}
    every = drawn(method="grid", space=space)
    assert len({tuple(each.values()) for each in every}) == len(every) == 30
    assert drawn(method="grid", space=space, trials=7) == every[:7]
    assert drawn(method="grid", space=space, seed=1) != every
    assert every != sorted(every, key=lambda each: tuple(each.values()))


def test_search_that_learns_needs_a_metric_and_makes_few_at_once():
    search = {"method": "tpe", "trials": 20, "space": SPACE}
    task = {"name": "lot", "run": {"command": ["true"]}, "search": search}
    assert "checkpoint" in faults(task)["/tasks/0/search/method"]
    lot = read(run={"command": ["true"]}, search=search, checkpoint={"best": {"metric": "loss"}})
    assert lot.array.at_once == 4
    assert descriptors.from_json(descriptors.as_json(lot)) == lot
    rule = {"metric": "loss", "rungs": [10]}
    many = {**search, "trials": 1001}
    assert "/tasks/0/search/trials" in faults({**task, "search": many, "stop": rule})
    assert "/tasks/0/search/method" not in faults({**task, "stop": rule})


def test_member_of_a_search_has_its_values():
    task = read(
        run={"command": ["python", "train.py", "${search.way}"]},
        search={"trials": 3, "space": SPACE},
        params={"rate": "${search.rate}"},
    )
    values = [*task.search.combinations()][2]
    made = member(task, 2, values)
    assert made.run.argv[-1] == values["way"]
    assert made.params["rate"] == values["rate"]
    assert made.params["wide"] == values["wide"]
    assert made.search is None
    assert descriptors.from_json(descriptors.as_json(task)) == task


@pytest.mark.parametrize(
    ("search", "pointer", "words"),
    [
        ({"space": {"a": [1]}}, "/trials", "required"),
        ({"trials": 3}, "/space", "required"),
        ({"trials": 3, "space": {}}, "/space", "1 to 16 keys"),
        ({"trials": 10**9, "space": {"a": [1]}}, "/trials", "1 to 10000"),
        ({"trials": 3, "seed": -1, "space": {"a": [1]}}, "/seed", "from 0"),
        ({"trials": 3, "by": 1, "space": {"a": [1]}}, "/by", "unknown field"),
        ({"method": "grid", "space": {"a": {"log": [1, 2]}}}, "/space/a", "grid"),
        ({"method": "grid", "space": {"a": {"int": [1, 9999]}}}, "/space/a", "1000 values"),
        ({"method": "grid", "space": {"a": "0-999", "b": "0-99"}}, "/space", "at most 10000"),
        ({"method": "grid", "trials": 9, "space": {"a": [1, 2]}}, "/trials", "1 to 2"),
    ],
)
def test_fault_of_a_search_has_a_pointer(search: dict[str, Any], pointer: str, words: str):
    found = faults({"name": "t", "search": search})
    assert words in found[f"/tasks/0/search{pointer}"], found


@pytest.mark.parametrize(
    ("interval", "pointer", "words"),
    [
        ({"log": [0, 1]}, "/log", "above 0"),
        ({"int": [0.5, 2]}, "/int", "whole"),
        ({"log": [2, 1]}, "/log", "rise"),
        ({"uniform": [0, 1e300]}, "/uniform", "rise, between"),
        ({"int": [1, "nan"]}, "/int", "two numbers"),
        ({"int": [False, True]}, "/int", "two numbers"),
        ({"int": [1, 2, 3]}, "/int", "two numbers"),
        ({"normal": [0, 1]}, "", "one of uniform"),
        ({"int": [0, 1], "log": [1, 2]}, "", "one of uniform"),
        (3, "", "a list of values"),
        ({"uniform": [float("nan"), 1]}, "/uniform/0", "not a valid JSON number"),
    ],
)
def test_fault_of_an_interval_has_a_pointer(interval: object, pointer: str, words: str):
    found = faults({"name": "t", "search": {"trials": 3, "space": {"a": interval}}})
    assert words in found[f"/tasks/0/search/space/a{pointer}"], found


def test_name_of_a_member_is_taken():
    found = faults({"name": "t", "array": {"count": 2}}, {"name": "t.7"}, {"name": "t.x"})
    assert list(found) == ["/tasks/1/name"]


def test_each_published_name_is_checked():
    lot = {"name": "t", "outputs": ["y"], "run": {"command": ["true"]}}
    same = faults({**lot, "publish": {"y": "model"}, "array": {"count": 2}})
    assert "each member would publish" in same["/tasks/0/publish/y"]
    odd = {**lot, "publish": {"y": "m-${matrix.a}"}, "matrix": {"a": ["ok", "Not ok"]}}
    assert "Not ok" in faults(odd)["/tasks/0/publish/y"]
    assert not faults({**lot, "publish": {"y": "m-${array.index}"}, "array": {"count": 2}})


@pytest.mark.parametrize(
    ("counts", "room", "end"),
    [
        (LotCounts(count=10, at_once=3), 3, None),
        (LotCounts(count=10, at_once=3, made=3, live=3), 0, None),
        (LotCounts(count=10, at_once=3, made=9, live=1, done=8), 1, None),
        (LotCounts(count=10, at_once=0), 0, None),
        (LotCounts(count=10, at_once=3, made=10, done=10), 0, State.done),
        (LotCounts(count=10, at_once=3, made=10, done=9, failed=1), 0, State.failed),
        (LotCounts(count=10, at_once=3, made=10, done=9, failed=1, failures_allowed=1), 0, "done"),
        (LotCounts(count=10, at_once=3, made=5, failed=2, failures_allowed=1), 0, None),
        (LotCounts(count=5, at_once=3, made=5, failed=2, done=3, failures_allowed=1), 0, "failed"),
        (LotCounts(count=10, at_once=3, made=10, done=9, cancelled=1), 0, State.cancelled),
        (LotCounts(count=10, at_once=3, made=10, done=8, again=2), 2, None),
        (LotCounts(count=10, at_once=3, made=5, live=5, resting=3), 1, None),
        (LotCounts(count=5, at_once=3, made=5, live=5, resting=4, promoted=2), 2, None),
        (LotCounts(count=5, at_once=3, made=5, done=2, cancelled=3, stopped=3), 0, State.done),
        (LotCounts(count=5, at_once=3, made=5, done=2, cancelled=3, stopped=2), 0, "cancelled"),
    ],
)
def test_room_and_end_follow_the_counts(counts: LotCounts, room: int, end: State | None):
    assert (counts.room, counts.end) == (room, end)


@pytest.mark.parametrize(("said", "allowed"), [(None, None), (0, 0), (0.1, 5), (3, 3), (0.99, 49)])
def test_max_failures_is_a_share_or_a_number(said: float | None, allowed: int | None):
    task = read(matrix={"lr": "0-49"}, array={"max_failures": said})
    assert task.array.failures_allowed == allowed
