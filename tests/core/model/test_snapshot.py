"""The values of an island: what changes one leaves the other as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from app.core.fairness.fair_tree import FairTree
from app.core.model.snapshot import (
    BoardDevice,
    BoardTask,
    BoardTenant,
    BoardUser,
    Conditions,
    changed,
)

TASK = BoardTask(
    id="t", request="r", tenant="a", user="u", state="waiting", epoch=3, kind="cpu",
    conditions=Conditions(hold="user"), away=((1.0, 2.0),), seats=("d0",), switch_us=5,
)  # fmt: skip


def test_changed_task_equals_what_replace_makes() -> None:
    after = changed(TASK, state="running", started_s=4.0, seats=("d1", "d2"))
    assert after == replace(TASK, state="running", started_s=4.0, seats=("d1", "d2"))
    assert (TASK.state, TASK.started_s, TASK.seats) == ("waiting", None, ("d0",))


def test_changed_task_is_frozen_too() -> None:
    with pytest.raises(AttributeError):
        changed(TASK).state = "done"  # type: ignore[misc]


def test_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(KeyError, match="stat"):
        changed(TASK, stat="done")


@pytest.mark.parametrize(
    ("what", "made"),
    [
        ("lab: weight 0", lambda: BoardTenant(id="lab", name="lab", weight=0)),
        ("ann: weight -1", lambda: BoardUser(id="ann", tenant="lab", weight=-1)),
        ("d0: cost 0", lambda: BoardDevice(id="d0", host="h", kind="cpu", cost=0)),
    ],
)
def test_a_weight_or_cost_of_0_is_refused_by_name(what: str, made: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"{what} is not above 0"):
        made()


def test_a_branch_of_weight_0_is_refused_by_its_path() -> None:
    with pytest.raises(ValueError, match="lab: weight 0 is not above 0"):
        FairTree[str]().add(("lab",), weight=0)
