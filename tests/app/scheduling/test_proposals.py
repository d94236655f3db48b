"""Searches that learn: what the estimator is shown, what it proposes, and who asks it when."""

from __future__ import annotations

from math import log10
from statistics import median
from typing import Any

import pytest
from sqlalchemy import func, select

from app.core.model.provisions.lots import USUAL_PROPOSED
from app.core.model.provisions.searches import LotSearch, ValueInterval
from app.db.models import Task
from app.scheduling import journal
from app.scheduling.journal import lots, proposals
from app.scheduling.journal.proposals import SEEN, ShownTrial
from tests.app.conftest import problem
from tests.app.scheduling.test_lots import devices, end, look, members, submit

__all__ = ["devices", "submit"]  # fixtures

SPACE = {
    "rate": ValueInterval(scale="log", low=1e-5, high=1e-1),
    "deep": ValueInterval(scale="int", low=1, high=9),
    "wide": ValueInterval(scale="log_int", low=16, high=1024),
    "way": ["a", True, 1, 2.5],
}
SEARCH = LotSearch(method="tpe", trials=60, seed=1, space=SPACE)


def badness(values: dict[str, Any]) -> float:
    """Return 0 for the best values."""
    misses = abs(log10(values["rate"]) + 3) + abs(values["deep"] - 7) / 4
    return misses + abs(log10(values["wide"] / 128)) + (values["way"] is not True)


def searched(search: LotSearch) -> list[float]:
    """Run the trials one by one; return what came of each."""
    trials: list[ShownTrial] = []
    for index in range(search.trials):
        drawn = search.by_index()(index)
        values = (
            drawn
            if index < proposals.DRAWN or not search.learns
            else proposals.estimated(search, index, proposals.seen(trials))
        )
        trials.append(ShownTrial(values=values, badness=badness(values)))
    return [each.badness for each in trials if each.badness is not None]


def test_proposals_are_better_than_draws_and_follow_from_seed_and_results():
    pytest.importorskip("optuna")
    found = searched(SEARCH)
    assert found == searched(SEARCH)
    drawn = searched(LotSearch(method="random", trials=60, seed=1, space=SPACE))
    assert found[: proposals.DRAWN] == drawn[: proposals.DRAWN]
    assert median(found[30:]) < 0.6 * median(drawn[30:])
    assert min(found) < min(drawn)
    other = searched(LotSearch(method="tpe", trials=20, seed=2, space=SPACE))
    assert other != found[:20]


def test_proposals_made_at_once_differ_and_are_values_of_the_space():
    pytest.importorskip("optuna")
    drawn = SEARCH.by_index()
    trials = [ShownTrial(values=drawn(n), badness=badness(drawn(n))) for n in range(20)]
    found = []
    for index in range(20, 28):
        values = proposals.estimated(SEARCH, index, trials)
        found.append(values)
        trials.append(ShownTrial(values=values, badness=None))
    assert len({each["rate"] for each in found}) == len(found)
    for each in found:
        assert 1e-5 <= each["rate"] <= 1e-1
        assert each["rate"] == float(f"{each['rate']:.6g}")
        assert type(each["deep"]) is type(each["wide"]) is int
        assert any(each["way"] is way for way in SPACE["way"])


def test_best_and_newest_results_are_shown_with_all_that_runs():
    ended = [ShownTrial(values={}, badness=float((n * 7919) % 1000)) for n in range(1000)]
    runs = [ShownTrial(values={"n": n}, badness=None) for n in range(3)]
    shown = proposals.seen([*ended, *runs])
    assert shown[-3:] == runs
    assert len(shown) == SEEN + 3
    assert {0.0, 1.0, 49.0} <= {each.badness for each in shown}
    assert ended[-1] in shown
    assert proposals.seen([*ended[:5], *runs]) == [*ended[:5], *runs]


class TestLots:
    """Lots of red, by `submit`; the first results are drawn."""

    LOT: dict[str, Any] = {
        "search": {"method": "tpe", "trials": 40, "space": {"x": {"uniform": [0, 1]}}},
        "checkpoint": {"best": {"metric": "loss"}},
    }

    @pytest.fixture
    def asked(self, monkeypatch):
        """Put constants in the place of proposals; return with what each was asked for."""
        asked: list[tuple[int, list[float | None]]] = []

        def estimated(search, index, trials):
            asked.append((index, [each.badness for each in trials]))
            return {"x": index / 1000}

        monkeypatch.setattr(proposals, "estimated", estimated)
        monkeypatch.setattr(proposals, "is_available", lambda: True)
        return asked

    def done(self, session, *values: float | None) -> None:
        """End the first live members with these losses; None: with none."""
        for task, value in zip(members(session, "blocked", "waiting"), values, strict=False):
            task.metrics = {} if value is None else {"loss": value}
            end(session, task)

    def test_control_alone_makes_members_and_shows_the_results_so_far(
        self, session, submit, asked, monkeypatch
    ):
        submit(**self.LOT)
        look(session)
        assert len(members(session)) == USUAL_PROPOSED
        for n in range(3):
            before = len(members(session))
            self.done(session, *(n + k / 10 for k in range(4)))
            assert len(members(session)) == before, "an island makes none of them"
            look(session)
            assert len(members(session)) == before + 4
        drawn = SEARCH_OF_LOT.by_index()
        assert [m.lot_values for m in members(session)[:12]] == [drawn(n) for n in range(12)]
        assert [index for index, _ in asked] == [12, 13, 14, 15]
        assert asked[0][1] == pytest.approx([n + k / 10 for n in range(3) for k in range(4)])
        assert asked[3][1][-3:] == [None] * 3, "those that run are shown"
        assert members(session)[15].lot_values == {"x": 0.015}

    def test_member_without_a_number_is_not_shown_and_a_goal_turns_values(
        self, session, submit, asked
    ):
        lot = {**self.LOT, "checkpoint": {"best": {"metric": "loss", "goal": "max"}}}
        submit(**lot, array={"at_once": 12})
        look(session)
        self.done(session, None, *(float(n) for n in range(1, 12)))
        look(session)
        index, shown = asked[0]
        assert (index, shown[:11]) == (12, [-float(n) for n in range(1, 12)])

    def test_one_look_proposes_a_few_members_of_each_lot(self, session, submit, asked):
        for _ in range(3):
            submit(**self.LOT, array={"at_once": 50})
        journal.look_at_lots(session)
        by_lot = select(func.count()).where(Task.lot_index.is_not(None)).group_by(Task.lot_id)
        made = session.scalars(by_lot).all()
        assert sum(made) == lots.PROPOSALS_AT_ONCE
        assert max(made) == lots.PROPOSALS_OF_A_LOT

    def test_without_the_package_the_search_is_refused_with_what_to_do(
        self, red, devices, monkeypatch
    ):
        monkeypatch.setattr(proposals, "PACKAGE", "no_such_package")
        body = {"tasks": [{"name": "lot", "run": {"command": ["true"]}, **self.LOT}]}
        answer = red.post("/v1/requests", json=body)
        told = problem(answer, 422, "validation-error", "/tasks/0/search/method")
        assert "roundhouse[search]" in str(told)


SEARCH_OF_LOT = LotSearch(
    method="tpe", trials=40, seed=0, space={"x": ValueInterval(scale="uniform", low=0, high=1)}
)
