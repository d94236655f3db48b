from hypothesis import given
from hypothesis import strategies as st

from app.core.model.lifecycle import Move, State
from app.core.model.snapshot import BoardTask, Plan, PlanDecision
from app.core.scheduling.rounds.plan_parts import cut, is_legal

ROOM = (Move.Pause, Move.Splice, Move.Share)
moves = st.lists(st.sampled_from([*ROOM, Move.Launch, Move.Unlocked, Move.Lost]), max_size=30)


def plan_of(moves):
    decisions = [
        PlanDecision(task=f"t{n}", move=move, rule="F3", because="") for n, move in enumerate(moves)
    ]
    facts = {"user": "u", "tenant": "a", "request": "r", "kind": "cpu"}
    before = {
        one.task: BoardTask(id=one.task, state=State.blocked, epoch=0, **facts) for one in decisions
    }
    return Plan(decisions=tuple(decisions), before=before, now_s=7.0)


def parts_of(plan, most):
    parts = []
    while plan is not None:
        part, plan = cut(plan, most)
        parts.append(part)
    return parts


@given(moves, st.integers(1, 10))
def test_parts_are_the_plan_in_its_order(moves, most):
    plan = plan_of(moves)
    parts = parts_of(plan, most)
    assert sum((part.decisions for part in parts), ()) == plan.decisions
    assert {id: task for part in parts for id, task in part.before.items()} == plan.before
    for part in parts:
        assert set(part.before) == {one.task for one in part.decisions}


@given(moves, st.integers(1, 10))
def test_part_is_as_long_as_its_last_task_needs(moves, most):
    for part in parts_of(plan_of(moves), most)[:-1]:
        beyond = [one.move for one in part.decisions[most - 1 :]]
        assert beyond[-1] not in ROOM
        assert all(move in ROOM for move in beyond[:-1])


def test_plan_within_the_bound_is_one_part():
    plan = plan_of([Move.Launch] * 3)
    assert cut(plan, 3) == (plan, None)
    assert cut(Plan(), 3) == (Plan(), None)


def test_plan_is_legal_as_long_as_its_tasks_can_be_moved():
    plan = plan_of([Move.Unlocked, Move.Pause])
    twice = PlanDecision(task="t0", move=Move.Launch, rule="F3", because="")
    plan = Plan(decisions=(*plan.decisions, twice))
    assert is_legal(plan, {"t0": "blocked", "t1": "running", "another": "done"})
    assert not is_legal(plan, {"t0": "waiting", "t1": "running"})
    assert not is_legal(plan, {"t0": "blocked", "t1": "done"})
