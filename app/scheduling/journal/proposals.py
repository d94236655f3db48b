"""Proposes the values of a lot's next members from the results of the others: `method: tpe`.

The tree-structured Parzen estimator (TPE) is that of optuna, an optional package. Control alone
asks it, a few members at a time, and shows it at most SEEN results, so that no search of a tenant
holds up the others. The first members are drawn at random. After equal results, proposals are
equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED
from app.core.model.provisions.best_rule import objective_in
from app.core.model.provisions.lot_values import Scalar
from app.core.model.provisions.searches import LotSearch, ValueInterval
from app.core.model.provisions.stop_rule import badness
from app.core.model.rungs import RUNG_HOLDS
from app.db.models import Task
from app.scheduling.journal.best_members import metric_value

PACKAGE = "optuna"
DRAWN = 10  # results before which members are drawn at random
SEEN = 200  # most results that are shown to the estimator
_BEST_SEEN = 50  # of these, if there are more; the others are the newest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrial:
    """Holds the values of a member. Lower `badness` is better; it is None while the member runs."""

    values: Mapping[str, Scalar]
    badness: float | None


def is_available() -> bool:
    return find_spec(PACKAGE) is not None


def propose(
    session: Session, lot_id: str, search: LotSearch, indices: range
) -> list[dict[str, Scalar]]:
    """Return the values of the members with these indices, which are the next."""
    trials, found, drawn = [*_trials(session, lot_id)], [], search.by_index()
    for index in indices:
        results = sum(trial.badness is not None for trial in trials)
        if results < DRAWN:
            values = drawn(index)
        elif is_available():
            values = estimated(search, index, seen(trials))
        else:
            log.error("lot %s: %s is not installed; drawn at random", lot_id, PACKAGE)
            values = drawn(index)
        found.append(values)
        trials.append(ShownTrial(values=values, badness=None))
    return found


def _trials(session: Session, lot_id: str) -> Iterator[ShownTrial]:
    """Yield the members in the order of their indices, without those that ended with no number."""
    objective = objective_in(session.get_one(Task, lot_id).descriptor)
    assert objective is not None, lot_id
    metric, goal = objective
    columns = (Task.lot_values, Task.state, Task.hold, metric_value(metric).label("value"))
    mine = (Task.lot_id == lot_id, Task.lot_index.is_not(None))
    for row in session.execute(select(*columns).where(*mine).order_by(Task.lot_index)):
        if row.state not in ENDED and row.hold not in RUNG_HOLDS:
            yield ShownTrial(values=row.lot_values, badness=None)
        elif row.value is not None:
            yield ShownTrial(values=row.lot_values, badness=badness(goal, float(row.value)))


def seen(trials: Sequence[ShownTrial]) -> list[ShownTrial]:
    """Return the trials that are shown: the best and the newest results, and what runs."""
    results = [n for n, trial in enumerate(trials) if trial.badness is not None]
    if len(results) > SEEN:
        best = sorted(results, key=lambda n: (trials[n].badness, n))[:_BEST_SEEN]
        others = [n for n in results if n not in {*best}]
        results = [*best, *others[_BEST_SEEN - SEEN :]]
    shown = {*results}
    return [t for n, t in enumerate(trials) if t.badness is None or n in shown][-2 * SEEN :]


def estimated(search: LotSearch, index: int, trials: Sequence[ShownTrial]) -> dict[str, Scalar]:
    """Return what the estimator proposes after these trials."""
    optuna: Any = import_module(PACKAGE)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {key: _distribution(optuna, of) for key, of in search.space.items()}
    states = optuna.trial.TrialState
    # trials that run count as bad ones, so that members made at once are not alike
    seed = int.from_bytes(sha256(f"{search.seed}/tpe/{index}".encode()).digest()[:4])
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    study.add_trials(
        [
            optuna.trial.create_trial(
                state=states.RUNNING if trial.badness is None else states.COMPLETE,
                params={key: _inner(of, trial.values[key]) for key, of in search.space.items()},
                distributions=spaces,
                value=trial.badness,
            )
            for trial in trials
        ]
    )
    asked: dict[str, Any] = study.ask(spaces).params
    return {key: _outer(of, asked[key]) for key, of in search.space.items()}


def _distribution(optuna: Any, of: Sequence[Scalar] | ValueInterval) -> Any:
    if not isinstance(of, ValueInterval):
        return optuna.distributions.CategoricalDistribution([*range(len(of))])
    is_log = of.scale in ("log", "log_int")
    if of.is_whole:
        return optuna.distributions.IntDistribution(int(of.low), int(of.high), log=is_log)
    return optuna.distributions.FloatDistribution(of.low, of.high, log=is_log)


def _inner(of: Sequence[Scalar] | ValueInterval, value: Scalar) -> Any:
    """Return a value of a member as the estimator sees it: of a list, its place."""
    if isinstance(of, ValueInterval):
        return int(value) if of.is_whole else float(value)
    # true and 1 are equal, but not alike; a table may change the type of a number
    alike = [n for n, each in enumerate(of) if each == value and type(each) is type(value)]
    return (alike or [n for n, each in enumerate(of) if each == value])[0]


def _outer(of: Sequence[Scalar] | ValueInterval, value: Any) -> Scalar:
    return of.rounded(value) if isinstance(of, ValueInterval) else of[value]
